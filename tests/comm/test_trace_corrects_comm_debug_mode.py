"""The ten ways in which torch's CommDebugMode failed in 2.13, each right for `trace`.

Where it costs little, a test also shows torch's own class fail, so that we notice when it no
longer does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils.checkpoint import checkpoint

from older_torch import TORCH
from shardscope import World, trace
from shardscope.record import CollectiveKind, Phase
from small_models import Block, Net, Own, batch, everyone, facts, gap_facts, shard_net

K = CollectiveKind


def test_bug_1_module_that_runs_twice_neither_crashes_nor_stays_broken(world: World) -> None:
    net = Net(depth=1)
    with trace(net) as t:
        net(net(batch())).sum().backward()
    assert facts(t, "phase", "owner") == [
        (Phase.FORWARD, "layers.0.sum"),
        (Phase.FORWARD, "layers.0.sum"),
        (Phase.BACKWARD, "layers.0.sum"),
        (Phase.BACKWARD, "layers.0.sum"),
    ]
    assert torch.isfinite(net(net(batch()))).all()


@pytest.mark.skipif(TORCH >= (2, 14), reason=f"torch {torch.__version__} has fixed it")
def test_torch_has_bug_1(world: World) -> None:
    net = Net(depth=1)
    with pytest.raises(IndexError), CommDebugMode():
        net(net(batch()))


def test_bug_2_two_models_of_one_class_do_not_collide(world: World) -> None:
    first, second = Net(depth=1), Net(depth=1)
    with trace() as t:
        first(batch())
        second(batch())
    assert facts(t, "owner") == [("Net.layers.0.sum",), ("Net#2.layers.0.sum",)]


def on_another_thread() -> None:
    worker = threading.Thread(target=dist.all_reduce, args=(torch.ones(1),))
    worker.start()
    worker.join()


UNCOUNTED: dict[str, Callable[[], object]] = {
    "barrier": lambda: dist.barrier(),
    "send": lambda: dist.send(torch.ones(4), 1),
    "recv": lambda: dist.recv(torch.ones(4), 1),
    "isend": lambda: dist.isend(torch.ones(4), 1),
    "irecv": lambda: dist.irecv(torch.ones(4), 1),
    "batch_isend_irecv": lambda: dist.batch_isend_irecv([dist.P2POp(dist.isend, torch.ones(4), 1)]),
    "all_reduce_": lambda: torch.ops._c10d_functional.all_reduce_(
        torch.ones(4), "sum", everyone().group_name
    ),
    "broadcast_": lambda: torch.ops._c10d_functional.broadcast_(
        torch.ones(4), 0, everyone().group_name
    ),
    "all_reduce_coalesced_": lambda: torch.ops._c10d_functional.all_reduce_coalesced_(
        [torch.ones(4)], "sum", everyone().group_name
    ),
    "all_gather_into_tensor_out": lambda: torch.ops._c10d_functional.all_gather_into_tensor_out(
        torch.ones(4), 4, everyone().group_name, out=torch.ones(16)
    ),
    "reduce_scatter_tensor_out": lambda: torch.ops._c10d_functional.reduce_scatter_tensor_out(
        torch.ones(16), "sum", 4, everyone().group_name, out=torch.ones(4)
    ),
    "functional isend": lambda: torch.ops._c10d_functional.isend(
        torch.ones(4), 1, 0, everyone().group_name
    ),
    "functional irecv": lambda: torch.ops._c10d_functional.irecv(
        torch.ones(4), 1, 0, everyone().group_name
    ),
    "another thread": on_another_thread,
}


@pytest.mark.parametrize("name", UNCOUNTED)
def test_bug_3_collective_that_torch_leaves_out_is_counted(world: World, name: str) -> None:
    with CommDebugMode() as torchs, trace() as ours:
        UNCOUNTED[name]()
    assert len(ours.recording.collectives) == 1
    assert torchs.get_total_counts() == 0


def test_bug_4_backward_is_charged_to_the_block_not_to_a_child(world: World) -> None:
    net = Net(block=Own)
    with trace(net) as t:
        net(batch()).sum().backward()
    backward = [owner for phase, owner in facts(t, "phase", "owner") if phase == Phase.BACKWARD]
    assert backward == ["layers.1", "layers.0"]


def test_bug_4_sharded_blocks_own_their_reductions_and_prefetched_gathers(world: World) -> None:
    net = shard_net(Net(depth=3), world.mesh)  # each block with a linear within
    with trace(net) as t:
        net(batch()).sum().backward()
    backward = [
        (kind, owner, trigger)
        for phase, kind, owner, trigger in facts(t, "phase", "kind", "owner", "trigger")
        if phase == Phase.BACKWARD
    ]
    assert [owner for kind, owner, _ in backward if kind == K.REDUCE_SCATTER] == [
        "layers.2",
        "layers.1",
        "layers.0",
        "",
    ]
    prefetched = [(o, trigger) for kind, o, trigger in backward if kind == K.ALL_GATHER]
    assert ("layers.1", "layers.2") in prefetched
    assert ("layers.0", "layers.1") in prefetched


def test_bug_5_clipping_after_backward_belongs_to_no_module(world: World) -> None:
    net = shard_net(Net(), world.mesh)
    with trace(net) as t:
        net(batch()).sum().backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    assert facts(t, "kind", "phase", "owner")[-1] == (K.ALL_REDUCE, Phase.OUTSIDE, None)


def test_bug_6_recompute_is_a_phase_of_its_own_and_the_blocks(world: World) -> None:
    block = Block()
    model = nn.Sequential(nn.Linear(8, 8), block)
    with trace(model) as t:
        checkpoint(block, model[0](batch()), use_reentrant=False).sum().backward()
    assert facts(t, "phase", "owner") == [
        (Phase.FORWARD, "1.sum"),
        (Phase.RECOMPUTE, "1.sum"),
        (Phase.BACKWARD, "1.sum"),
    ]


def test_bug_6_forward_outside_and_backward_inside_is_recorded(world: World) -> None:
    net = Net(depth=1)
    loss = net(batch()).sum()
    with trace(net) as t:
        loss.backward()
    assert facts(t, "phase") == [(Phase.BACKWARD,)]
    assert "forward ran before the trace" in gap_facts(t)[0]


def test_bug_7_compiler_is_not_disabled(world: World) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return funcol.all_reduce(x * 2, "sum", everyone()) + 1

    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(step, backend=counter, fullgraph=True)
    with trace() as t:
        compiled(batch())
        compiled(batch())
    assert counter.frame_count == 1
    assert len(t.recording.collectives) == 2


def test_bug_8_sharding_is_known_under_fsdp(world: World) -> None:
    net = shard_net(Net(depth=1), world.mesh)
    with trace() as t:  # the model turns up as it runs, with its parameters gathered
        net(batch())
    placements = {
        f"{module.name}.{parameter.name}": (parameter.placements, parameter.local_shape)
        for module in t.recording.modules
        for parameter in module.parameters
    }
    assert placements == {
        "Net.embed.weight": (("Shard(0)",), (2, 8)),
        "Net.embed.bias": (("Shard(0)",), (2,)),
        "Net.layers.0.linear.weight": (("Shard(0)",), (2, 8)),
        "Net.layers.0.linear.bias": (("Shard(0)",), (2,)),
    }


def test_bug_9_entering_again_adds_and_nesting_counts_once(world: World) -> None:
    net = Net(depth=1)
    t = trace(net)
    with t, t:
        net(batch())
    with t:
        net(batch())
    assert facts(t, "owner") == [("layers.0.sum",)] * 2


def test_bug_9_exception_leaves_the_module_stack_right(world: World) -> None:
    net = Net(depth=1)
    with trace(net) as t:
        with pytest.raises(RuntimeError):
            net(torch.ones(4, 3))
        dist.barrier()
    assert facts(t, "phase", "owner") == [(Phase.OUTSIDE, None)]


def test_bug_10_bytes_group_axis_cause_and_line_are_there(world: World) -> None:
    net = Net(depth=1)
    with trace(net) as t:
        net(batch())
    (call,) = t.recording.collectives
    assert (call.input_bytes, call.group, call.axis) == (128, "dp[0-3]", "dp")
    assert call.cause is not None
    assert call.source.text == 'return funcol.all_reduce(x, "sum", everyone()) * 1'
