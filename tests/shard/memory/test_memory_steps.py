"""Steps as people write them: moves to a GPU, logged losses, loaders; and calls that are wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from memory_models import DIM, WEIGHT, backward, chain, rows
from shardscope import Memory, ShardscopeError, load, memory
from shardscope.record import MemoryKind, Phase, Severity
from shardscope.shard.memory.advice import NOT_COUNTED

K = MemoryKind


def places(told: Memory) -> list[str]:
    return [gap.place for gap in told.recording.gaps]


class TestMovesToAGPU:
    @pytest.mark.parametrize(
        "move",
        [
            lambda x: x.cuda(),
            lambda x: x.cuda(non_blocking=True),
            lambda x: x.pin_memory().to("cuda:0", non_blocking=True),
            lambda x: x.to(device="cuda", dtype=torch.float32),
            lambda x: x.to(torch.device("cuda")),
            lambda x: torch.zeros(DIM, DIM, device="cuda"),
            lambda x: torch.zeros_like(x, device=torch.device("cuda", 0)),
        ],
    )
    def test_a_batch_is_counted_once_wherever_the_step_moves_it(
        self, move: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        model = chain(2)
        told = memory(model, lambda: model(move(rows())).sum().backward())
        made = memory(model, lambda: model(rows()).sum().backward())
        assert told.profile.peak_bytes == made.profile.peak_bytes
        assert places(told) == []

    def test_a_device_context_is_respected(self) -> None:
        model = chain(1)

        def step() -> None:
            with torch.device("cuda"):
                model(rows()).sum().backward()

        assert memory(model, step).profile.peak_bytes > WEIGHT

    def test_what_is_run_again_in_backward_may_move_too(self) -> None:
        model = chain(1)

        def run(x: torch.Tensor) -> torch.Tensor:
            return model(x) * torch.ones(DIM, device="cuda")

        told = memory(model, lambda: checkpoint(run, rows(), use_reentrant=False).sum().backward())
        assert Phase.RECOMPUTE in {sample.phase for sample in told.profile.samples}

    @pytest.mark.skipif(torch.cuda.is_available(), reason="it can be called then")
    def test_calls_that_need_a_gpu_are_refused_in_one_sentence(self) -> None:
        with pytest.raises(ShardscopeError, match=r"Remove calls of torch\.cuda"):
            memory(chain(1), lambda: torch.cuda.current_stream())


class TestValues:
    def test_a_loss_can_be_printed(self) -> None:
        model, said = chain(1), []

        def step() -> None:
            loss = model(rows()).sum()
            loss.backward()
            said.append(f"{loss:.3f} {loss.item():.1f}")

        assert places(memory(model, step)) == ["values"]
        assert said == ["0.000 0.0"] * 2

    def test_a_failure_after_a_value_was_taken_as_zero_says_so(self) -> None:
        model = chain(1)

        def step() -> None:
            loss = model(rows()).sum()
            (loss * (10 / (loss > 0).sum().item())).backward()

        with pytest.raises(
            ShardscopeError,
            match=r"read as zero: ZeroDivisionError: .* \(.*test_memory_steps.py, line \d+\).*"
            r"without materialize\(\)",
        ):
            memory(model, step)

    def test_an_assertion_on_a_value_says_so(self) -> None:
        def step() -> None:
            assert torch.isfinite(rows().sum())

        with pytest.raises(ShardscopeError, match="read as zero: AssertionError"):
            memory(chain(1), step)

    def test_workers_of_a_loader_are_refused_in_a_sentence(self) -> None:
        model = chain(1)
        data = TensorDataset(torch.randn(4, DIM))

        def step() -> None:
            for (x,) in DataLoader(data, batch_size=2, num_workers=1):
                model(x).sum().backward()

        with pytest.raises(ShardscopeError, match="num_workers=0"):
            memory(model, step)

    def test_a_loader_without_workers_is_fine(self) -> None:
        model = chain(1)
        data = TensorDataset(torch.randn(4, DIM))

        def step() -> None:
            for (x,) in DataLoader(data, batch_size=2, shuffle=True):
                model(x).sum().backward()

        assert memory(model, step).profile.peak_bytes > WEIGHT

    def test_nested_tensors_are_refused_in_a_sentence(self) -> None:
        def step() -> None:
            torch.nested.nested_tensor([rows(1), rows(2)], layout=torch.jagged)

        with pytest.raises(ShardscopeError, match="pad them"):
            memory(chain(1), step)

    def test_gradients_of_parameters_captured_before_are_explained(self) -> None:
        model = chain(1)
        captured = list(model.parameters())
        with pytest.raises(ShardscopeError, match="Take parameters from the model in the step"):
            memory(model, lambda: torch.autograd.grad(model(rows()).sum(), captured))


class TestParts:
    @pytest.mark.parametrize(
        ("run", "word"),
        [
            (lambda model: model(rows()).sum().backward(), "no optimizer was stepped"),
            (lambda model: model(rows()), "backward never ran"),
        ],
    )
    def test_a_missing_backward_or_optimizer_is_a_finding(
        self, run: Callable[[nn.Module], object], word: str
    ) -> None:
        model = chain(1)
        (found,) = memory(model, lambda: run(model)).recording.findings
        assert (found.rule, found.severity) == (NOT_COUNTED, Severity.INFO)
        assert word in found.fact

    def test_after_an_optimizer_that_raised_the_step_goes_on(self) -> None:
        model = chain(1)

        class Failing(torch.optim.SGD):
            def step(self, closure: Any = None) -> None:
                raise KeyError("no")

        optimizer = Failing(model.parameters())

        def step() -> None:
            with pytest.raises(KeyError):
                optimizer.step()
            model(rows()).sum().backward()

        phases = {sample.phase for sample in memory(model, step).profile.samples}
        assert Phase.FORWARD in phases
        assert Phase.OPTIMIZER not in phases

    def test_a_tied_weight_is_one_modules(self) -> None:
        model = nn.ModuleDict({"e": nn.Embedding(64, DIM), "h": nn.Linear(DIM, 64, bias=False)})
        model["h"].weight = model["e"].weight
        told = memory(
            model,
            lambda: model["h"](model["e"](torch.randint(0, 64, (8,)))).sum().backward(),
            torch.optim.AdamW(model.parameters(), fused=True),
        )
        kinds = (K.PARAMETERS, K.GRADIENTS, K.OPTIMIZER_STATE)
        assert {use.module for use in told.profile.at_peak if use.kind in kinds} == {"e"}

    def test_a_compiled_function_is_a_gap(self) -> None:
        model = chain(1)
        square = torch.compile(lambda x: x * x, backend="eager")
        told = memory(model, lambda: square(model(rows())).sum().backward())
        assert places(told) == ["torch.compile"]

    def test_activations_kept_on_the_host_are_a_gap(self) -> None:
        model = chain(1)

        def step() -> None:
            with save_on_cpu():
                model(rows()).sum().backward()

        assert places(memory(model, step)) == ["save_on_cpu"]
        assert "__enter__" not in vars(save_on_cpu)


class TestCalls:
    def test_an_integral_number_of_bytes_may_be_a_float(self, tmp_path) -> None:
        told = memory(model := chain(1), backward(model), device_bytes=80e9)  # type: ignore[arg-type]
        assert load(told.save(tmp_path / "told.json")).memory[0].device_bytes == 80 * 10**9

    @pytest.mark.parametrize("size", [-5, 0, "80GiB", 1.5, True, 1 << 70, float("inf")])
    def test_an_invalid_size_is_refused(self, size: Any) -> None:
        with pytest.raises(
            ShardscopeError, match="the memory of the GPU in bytes, such as 80 << 30"
        ):
            memory(chain(1), lambda: None, device_bytes=size)

    @pytest.mark.parametrize(
        ("optimizer", "words"),
        [
            (torch.optim.AdamW, r"the class AdamW .* AdamW\(model.parameters\(\)\)"),
            ([torch.optim.SGD([torch.ones(1)])], "got list .* step several in the step"),
            (lambda model: 3, "returned int"),
            (lambda model: torch.optim.LBFGS(model.parameters()), r"step\(closure\) in the step"),
        ],
    )
    def test_an_optimizer_that_cannot_be_stepped_is_refused(
        self, optimizer: Any, words: str
    ) -> None:
        with pytest.raises(ShardscopeError, match=words):
            memory(model := chain(1), backward(model), optimizer)

    @pytest.mark.parametrize("model", ["x", 3, [3], {"a": "x"}])
    def test_what_is_no_model_is_refused_by_memory(self, model: Any) -> None:
        with pytest.raises(ShardscopeError, match=r"memory\(\) got (str|int) instead of"):
            memory(model, lambda: None)

    def test_lbfgs_in_the_step_is_fine(self) -> None:
        model = chain(1)
        optimizer = torch.optim.LBFGS(model.parameters())

        def step() -> None:
            def closure() -> torch.Tensor:
                optimizer.zero_grad()
                loss = model(rows()).sum()
                loss.backward()
                return loss

            optimizer.step(closure)

        assert memory(model, step, optimizer).profile.peak_bytes > WEIGHT
