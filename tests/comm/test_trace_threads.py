"""Threads have their own module stacks and autograd numbers, and are not mixed up."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

import torch
from torch import nn

from shardscope import World, trace
from shardscope.record import Phase
from small_models import Block, Net, Own, Reduce, batch, facts

FORWARD, BACKWARD = Phase.FORWARD, Phase.BACKWARD


def in_thread(name: str, work: Callable[[], object]) -> None:
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - raised again in the calling thread
            errors.append(error)

    worker = threading.Thread(target=run, name=name)
    worker.start()
    worker.join()
    if errors:
        raise errors[0]


def test_each_thread_has_its_own_modules(world: World) -> None:
    models = {"a": Net(), "b": Net(block=Own)}
    start = threading.Barrier(2)

    def step(model: nn.Module) -> None:
        start.wait(10)
        for _ in range(5):
            model(batch()).sum().backward()

    with trace(models) as t:
        workers = [
            threading.Thread(target=step, args=(model,), name=name)
            for name, model in models.items()
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    expected = {
        "a": ["a.layers.0.sum", "a.layers.1.sum", "a.layers.1.sum", "a.layers.0.sum"],
        "b": ["b.layers.0", "b.layers.1", "b.layers.1", "b.layers.0"],
    }
    for name in models:
        owners = [owner for thread, owner in facts(t, "thread", "owner") if thread == name]
        assert owners == expected[name] * 5
    assert t.recording.gaps == ()


def test_backward_may_run_on_another_thread_than_forward(world: World) -> None:
    model = Block()
    losses: list[torch.Tensor] = []
    with trace(model) as t:
        in_thread("forward", lambda: losses.append(model(batch()).sum()))
        losses.append(model(batch()).sum())
        for number, loss in enumerate(losses):
            in_thread(f"backward {number}", loss.backward)
    assert facts(t, "thread", "phase", "owner") == [
        ("forward", FORWARD, "sum"),
        ("", FORWARD, "sum"),
        ("backward 0", BACKWARD, "sum"),
        ("backward 1", BACKWARD, "sum"),
    ]


def test_module_running_on_one_thread_does_not_own_what_another_issues(world: World) -> None:
    class Waits(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            in_thread("helper", lambda: torch.distributed.barrier())
            return x

    model = Waits()
    with trace(model) as t:
        model(batch())
    assert facts(t, "thread", "owner", "phase") == [("helper", None, Phase.OUTSIDE)]


def test_trace_opened_on_one_thread_may_be_read_on_another(world: World) -> None:
    counts: list[int] = []
    with trace() as t:
        torch.distributed.barrier()
        in_thread("reader", lambda: counts.append(len(t.recording.collectives)))
        torch.distributed.barrier()
    assert counts == [1]
    assert len(t.recording.collectives) == 2


def test_reading_while_others_issue_loses_and_repeats_nothing(world: World) -> None:
    done = threading.Event()

    def issue() -> None:
        for _ in range(200):
            torch.distributed.barrier()
        done.set()

    with trace() as t:
        worker = threading.Thread(target=issue)
        worker.start()
        lengths = []
        while not done.is_set():
            lengths.append(len(t.recording.collectives))
        worker.join()
    assert lengths == sorted(lengths)
    assert [order for (order,) in facts(t, "order")] == list(range(200))


def test_traces_of_two_threads_each_see_the_entire_process(world: World) -> None:
    recorded: list[int] = []

    def watch() -> None:
        with trace() as inner:
            torch.distributed.barrier()
        recorded.append(len(inner.recording.collectives))

    with trace() as outer:
        in_thread("watcher", watch)
        torch.distributed.barrier()
    assert recorded == [1]
    assert len(outer.recording.collectives) == 2


def test_owner_is_a_gap_where_two_threads_may_have_run_its_forward(world: World) -> None:
    models = {"a": Net(), "b": Net(block=Own)}
    losses: dict[str, torch.Tensor] = {}
    start = threading.Barrier(2)

    def run(name: str) -> None:
        losses[name] = models[name](batch()).sum()
        start.wait(10)  # both alive, so that neither gets the other's identity

    with trace(models) as t:
        workers = [threading.Thread(target=run, args=(name,)) for name in models]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        losses["b"].backward()
    owners = {owner for phase, owner in facts(t, "phase", "owner") if phase == BACKWARD}
    assert owners <= {None, "b.layers.0", "b.layers.1"}
    assert ["forwards ran on several threads" in gap.fact for gap in t.recording.gaps] == [True]


def test_thread_that_has_ended_is_not_taken_for_the_one_with_its_identity(world: World) -> None:
    models = {"a": Block(), "b": nn.Linear(8, 8)}
    losses: list[torch.Tensor] = []
    with trace(models) as t:
        in_thread("first", lambda: losses.append(models["a"](batch()).sum()))
        in_thread("second", lambda: models["b"](batch(1)[:0]))
        losses[0].backward()
    owners = [owner for phase, owner in facts(t, "phase", "owner") if phase == BACKWARD]
    assert owners == ["a.sum"] or (owners == [None] and len(t.recording.gaps) == 1)


def test_models_met_on_many_threads_get_names_of_their_own(world: World) -> None:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(20):
            models = [Block() for _ in range(8)]
            start = threading.Barrier(len(models))

            def run(model: nn.Module, start: threading.Barrier = start) -> None:
                start.wait(10)
                model(batch())

            with trace() as t:
                workers = [threading.Thread(target=run, args=(model,)) for model in models]
                for worker in workers:
                    worker.start()
                for worker in workers:
                    worker.join()
            assert len({owner for (owner,) in facts(t, "owner")}) == len(models)
            assert len(t.recording.modules) == 3 * len(models)
    finally:
        sys.setswitchinterval(interval)


def test_modules_are_known_while_another_thread_compiles(world: World) -> None:
    model = Block()
    is_compiling, has_run = threading.Event(), threading.Event()

    def backend(graph: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        is_compiling.set()
        has_run.wait(30)
        return graph.forward

    compiled = torch.compile(lambda x: x + 1, backend=backend)
    with trace(model) as t:
        worker = threading.Thread(target=compiled, args=(batch(),))
        worker.start()
        assert is_compiling.wait(30)
        model(batch())
        has_run.set()
        worker.join()
    assert facts(t, "phase", "owner") == [(FORWARD, "sum")]


def test_thread_whose_forward_ran_before_the_trace_is_not_charged_to_another(world: World) -> None:
    watched, unwatched = Net(), Net(block=Own)
    has_begun, may_go_on = threading.Event(), threading.Event()

    def work() -> None:
        loss = unwatched(batch()).sum()
        has_begun.set()
        may_go_on.wait(30)
        loss.backward()

    worker = threading.Thread(target=work, name="worker")
    worker.start()
    assert has_begun.wait(30)
    with trace({"watched": watched}) as t:
        loss = watched(batch()).sum()
        may_go_on.set()
        worker.join()
        loss.backward()
    owners = {owner for thread, owner in facts(t, "thread", "owner") if thread == "worker"}
    assert owners == {None}
    assert len(t.recording.gaps) == 1


def test_thread_that_does_all_itself_outside_of_modules_is_no_gap(world: World) -> None:
    with trace() as t:
        in_thread("worker", lambda: Reduce.apply(batch().requires_grad_()).sum().backward())
    assert facts(t, "thread", "phase", "owner") == [
        ("worker", Phase.OUTSIDE, None),
        ("worker", BACKWARD, None),
    ]
    assert t.recording.gaps == ()
