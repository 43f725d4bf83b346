"""What a step's memory holds, on models small enough to count by hand."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from shardscope import Memory, ShardscopeError, World, load, memory, simulate
from shardscope._torch.cuda.workspaces import CUBLAS_BYTES
from shardscope.record import MemoryKind, MemoryProfile, Phase

K = MemoryKind
KIB = 1024
DIM = 256  # of a square weight in fp32: 256 KiB
WEIGHT = DIM * DIM * 4


def at_peak(told: Memory) -> Counter[MemoryKind]:
    held: Counter[MemoryKind] = Counter()
    for use in told.profile.at_peak:
        held[use.kind] += use.num_bytes
    return held


def most(told: Memory, kind: MemoryKind) -> int:
    index = list(MemoryKind).index(kind)
    return max(sample.num_bytes[index] for sample in told.profile.samples)


def chain(length: int = 3, *, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(DIM, DIM, bias=False, dtype=dtype) for _ in range(length)))


def rows(number: int = DIM, **kwargs: torch.dtype) -> torch.Tensor:
    return torch.randn(number, DIM, **kwargs)


def backward(model: nn.Module) -> Callable[[], None]:
    return lambda: model(rows()).sum().backward()


class TestKinds:
    def test_parameters_gradients_and_adam_state_are_counted_to_the_byte(self) -> None:
        model = chain()
        told = memory(model, backward(model), torch.optim.AdamW(model.parameters(), fused=True))
        assert most(told, K.PARAMETERS) == 3 * WEIGHT
        assert most(told, K.GRADIENTS) == 3 * WEIGHT
        counters = 3 * 512  # of steps, which the fused kernel wants on the device
        assert most(told, K.OPTIMIZER_STATE) == 2 * 3 * WEIGHT + counters

    def test_counters_that_stay_on_the_host_are_not_counted(self) -> None:
        model = chain()
        told = memory(model, backward(model), torch.optim.AdamW(model.parameters()))
        assert most(told, K.OPTIMIZER_STATE) == 2 * 3 * WEIGHT

    def test_activations_of_a_chain_are_the_inputs_of_its_layers(self) -> None:
        model = chain(4)
        told = memory(model, backward(model))
        scalars = 2 * 512  # the loss, and the gradient that backward begins with
        assert most(told, K.ACTIVATIONS) in (4 * WEIGHT + scalars, 4 * WEIGHT + 512)

    def test_relu_keeps_its_output_which_the_next_layer_keeps_too(self) -> None:
        model = nn.Sequential(nn.Linear(DIM, DIM), nn.ReLU(), nn.Linear(DIM, DIM))
        told = memory(model, backward(model))
        uses = {u.module: u.num_bytes for u in told.profile.at_peak if u.kind is K.ACTIVATIONS}
        assert uses["1"] == WEIGHT
        assert "0" not in uses  # what the first makes, relu does not need in backward

    def test_every_byte_at_the_peak_has_a_kind_and_the_kinds_add_up(self) -> None:
        model = chain()
        told = memory(model, backward(model), torch.optim.SGD(model.parameters(), momentum=0.9))
        assert sum(at_peak(told).values()) == told.profile.peak_bytes
        peak = max(sum(sample.num_bytes) for sample in told.profile.samples)
        assert peak == told.profile.peak_bytes

    def test_tied_weights_are_counted_once(self) -> None:
        model = chain(2)
        model[1].weight = model[0].weight
        told = memory(model, backward(model), torch.optim.SGD(model.parameters()))
        assert most(told, K.PARAMETERS) == WEIGHT
        assert most(told, K.GRADIENTS) == WEIGHT

    def test_views_share_what_they_view(self) -> None:
        model = chain(1)

        def step() -> None:
            x = rows()
            views = [x[:10], x.view(-1), x.t(), x.expand(3, DIM, DIM)]
            (model(x).sum() + sum(view.sum() for view in views)).backward()

        told = memory(model, step)
        assert most(told, K.ACTIVATIONS) < WEIGHT + 16 * 512

    def test_buffers_count_as_parameters(self) -> None:
        model = chain(1)
        model.register_buffer("table", torch.zeros(1000))
        assert most(memory(model, backward(model)), K.PARAMETERS) == WEIGHT + 4096

    def test_frozen_parameters_have_no_gradients(self) -> None:
        model = chain(2)
        model[0].requires_grad_(False)
        told = memory(model, backward(model))
        assert most(told, K.GRADIENTS) == WEIGHT

    def test_a_forward_without_gradients_keeps_nothing(self) -> None:
        model = chain(4)

        def step() -> None:
            with torch.no_grad():
                model(rows())

        told = memory(model, step)
        assert most(told, K.ACTIVATIONS) == 0
        assert most(told, K.GRADIENTS) == 0

    def test_each_thread_that_multiplies_matrices_has_a_workspace_of_cublas(self) -> None:
        model = chain(1)

        def forward() -> None:
            model(rows())

        assert CUBLAS_BYTES <= most(memory(model, forward), K.TEMPORARIES) < 2 * CUBLAS_BYTES
        assert most(memory(model, backward(model)), K.TEMPORARIES) >= 2 * CUBLAS_BYTES

    def test_bytes_belong_to_the_modules_that_own_them(self) -> None:
        model = chain(2)
        told = memory(model, backward(model), torch.optim.AdamW(model.parameters()))
        uses = {(u.kind, u.module): u.num_bytes for u in told.profile.at_peak}
        assert uses[K.PARAMETERS, "0"] == uses[K.PARAMETERS, "1"] == WEIGHT
        assert uses[K.OPTIMIZER_STATE, "1"] == 2 * WEIGHT


class TestSteps:
    def test_a_later_step_finds_the_state_that_the_first_has_made(self) -> None:
        model = chain(2)

        def step() -> None:
            model(rows(64 * DIM)).sum().backward()

        told = memory(model, step, torch.optim.AdamW(model.parameters()))
        more = told.profile.peak_bytes - told.profile.first_peak_bytes
        assert more == pytest.approx(2 * 2 * WEIGHT, abs=4 * KIB)

    def test_gradients_are_accumulated_in_place(self) -> None:
        model = chain()

        def step(num_micro: int) -> None:
            for _ in range(num_micro):
                backward(model)()

        single, four = (
            memory(model, lambda n=n: step(n), torch.optim.SGD(model.parameters())) for n in (1, 4)
        )
        assert most(single, K.GRADIENTS) == most(four, K.GRADIENTS) == 3 * WEIGHT
        assert four.profile.peak_bytes >= single.profile.peak_bytes

    def test_an_optimizer_is_not_stepped_again_if_the_step_did(self) -> None:
        model = chain(1)
        optimizer = torch.optim.SGD(model.parameters())
        num_steps = 0

        def step() -> None:
            backward(model)()
            optimizer.step()

        def count(*_: object) -> None:
            nonlocal num_steps
            num_steps += 1

        optimizer.register_step_post_hook(count)
        told = memory(model, step, optimizer)
        assert num_steps == 2
        assert told.profile.samples[0].num_bytes[1] == WEIGHT  # it never cleared its gradients

    def test_an_optimizer_that_only_the_step_knows_is_found(self) -> None:
        model = chain(1)
        optimizer = torch.optim.AdamW(model.parameters())

        def step() -> None:
            backward(model)()
            optimizer.step()
            optimizer.zero_grad()

        told = memory(model, step)
        assert most(told, K.OPTIMIZER_STATE) == 2 * WEIGHT
        assert optimizer.state == {}

    def test_foreach_optimizers_copy_all_parameters_and_fused_ones_none(self) -> None:
        model = chain()

        def optimizer_temporaries(**how: bool) -> int:
            optimizer = torch.optim.AdamW(model.parameters(), **how)
            told = memory(model, backward(model), optimizer)
            samples = [s for s in told.profile.samples if s.phase is Phase.OPTIMIZER]
            return max((s.num_bytes[-1] for s in samples), default=0)

        fused, foreach = optimizer_temporaries(fused=True), optimizer_temporaries()
        one_by_one = optimizer_temporaries(foreach=False)
        assert fused == 2 * CUBLAS_BYTES
        assert foreach == fused + 3 * WEIGHT
        assert (
            one_by_one == fused + 2 * WEIGHT + WEIGHT
        )  # the last one lives until the next is made

    @pytest.mark.parametrize("use_reentrant", [True, False])
    def test_checkpointed_layers_keep_their_inputs_only(self, use_reentrant: bool) -> None:
        layers = [nn.Sequential(nn.Linear(DIM, DIM), nn.GELU(), nn.Linear(DIM, DIM), nn.GELU())]
        layers = [*layers, *(nn.Sequential(*chain(1), nn.GELU(), *chain(3)) for _ in range(5))]
        model = nn.ModuleList(layers)

        def step(is_checkpointed: bool) -> None:
            x = rows().requires_grad_()
            for layer in model:
                if is_checkpointed:
                    x = checkpoint(layer, x, use_reentrant=use_reentrant)
                else:
                    x = layer(x)
            x.sum().backward()

        kept, made_again = (memory(model, lambda c=c: step(c)) for c in (False, True))
        assert most(kept, K.ACTIVATIONS) > 20 * WEIGHT
        assert most(made_again, K.ACTIVATIONS) < 13 * WEIGHT
        assert Phase.RECOMPUTE in {sample.phase for sample in made_again.profile.samples}
        assert Phase.RECOMPUTE not in {sample.phase for sample in kept.profile.samples}

    def test_values_that_are_read_are_a_gap_and_zero(self) -> None:
        model = chain(1)
        seen: list[object] = []

        def step() -> None:
            loss = model(rows()).sum()
            loss.backward()
            seen.extend((loss.item(), bool(loss.isnan()), int(loss)))

        told = memory(model, step)
        assert seen == [0.0, False, 0] * 2
        assert [gap.place for gap in told.recording.gaps] == ["values"]


class TestCudaChoices:
    """Tensors without data are the CPU's, where torch would choose other ops."""

    def test_attention_keeps_no_matrix_of_scores(self) -> None:
        model = nn.Linear(64, 3 * 64, dtype=torch.bfloat16)

        def step(dropout_p: float) -> None:
            x = model(torch.randn(2, 1024, 64, dtype=torch.bfloat16))
            heads = x.view(2, 1024, 3, 4, 16).permute(2, 0, 3, 1, 4)
            functional.scaled_dot_product_attention(*heads, dropout_p=dropout_p).sum().backward()

        for dropout_p in (0.0, 0.1):
            scores = 2 * 4 * 1024 * 1024 * 2
            assert most(memory(model, lambda p=dropout_p: step(p)), K.ACTIVATIONS) < scores / 4

    def test_dropout_keeps_a_mask_of_one_byte(self) -> None:
        model = nn.Sequential(*chain(1), nn.Dropout(0.1))
        told = memory(model, backward(model))
        (mask,) = [u for u in told.profile.at_peak if (u.kind, u.module) == (K.ACTIVATIONS, "1")]
        assert mask.num_bytes in (DIM * DIM, DIM * DIM + WEIGHT)

    def test_rms_norm_keeps_its_input_and_a_number_for_each_row(self) -> None:
        norm = nn.RMSNorm(DIM, dtype=torch.bfloat16)
        model = nn.Sequential(*chain(1, dtype=torch.bfloat16), norm)

        def step() -> None:
            model(rows(4096, dtype=torch.bfloat16)).sum().backward()

        kept = most(memory(model, step), K.ACTIVATIONS)
        assert kept < 3.2 * 4096 * DIM * 2  # two inputs, the output; composed it would be nine

    @pytest.mark.parametrize("device", ["cuda", "cpu"])
    def test_autocast_for_either_device_does_as_cuda_does(self, device: str) -> None:
        model = nn.Sequential(*chain(1), nn.LayerNorm(DIM))
        dtypes: list[torch.dtype] = []

        def step() -> None:
            with torch.autocast(device, dtype=torch.bfloat16):
                x = model[0](rows())
                y = model[1](x)
                dtypes.extend((x.dtype, y.dtype, functional.softmax(x, -1).dtype))
            y.sum().backward()

        memory(model, step)
        assert dtypes[:3] == [torch.bfloat16, torch.float32, torch.float32]

    def test_the_choices_are_torchs_own_again_afterwards(self) -> None:
        model = chain(1)
        memory(model, backward(model))
        assert torch.autocast("cpu").device == "cpu"
        x = rows().requires_grad_()
        kept = functional.dropout(x, 0.5)
        assert type(kept.grad_fn).__name__ == "MulBackward0"
        norm = functional.rms_norm(x, [DIM])
        assert type(norm.grad_fn).__name__ == "MulBackward0"
        with torch.autocast("cpu"):
            assert functional.softmax(rows().bfloat16(), -1).dtype == torch.bfloat16


class TestWorlds:
    def sharded(self, size: int, *, policy: MixedPrecisionPolicy | None = None) -> Memory:
        with simulate({"dp": size}) as world:
            with torch.device("meta"):
                model = chain(4)
            for layer in model:
                fully_shard(layer, mesh=world.mesh, mp_policy=policy or MixedPrecisionPolicy())
            fully_shard(model, mesh=world.mesh)
            world.materialize(model)
            return memory(model, backward(model), torch.optim.AdamW(model.parameters(), fused=True))

    def test_fsdp_divides_parameters_gradients_and_state(self) -> None:
        told = self.sharded(4)
        assert most(told, K.PARAMETERS) == 4 * WEIGHT // 4
        assert most(told, K.OPTIMIZER_STATE) == 2 * 4 * WEIGHT // 4 + 4 * 512

    def test_fsdp_gathers_a_layer_at_a_time_and_has_buffers_for_two(self) -> None:
        told = self.sharded(4)
        assert most(told, K.GATHERED) == WEIGHT
        # Gathered ahead for the next layer, and the gradients of the last one on their way.
        assert most(told, K.COMMUNICATION) == 2 * WEIGHT

    def test_mixed_precision_gathers_half_as_much(self) -> None:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        assert most(self.sharded(4, policy=policy), K.GATHERED) == WEIGHT // 2

    def test_gradients_that_are_not_reduced_yet_have_their_full_size(self) -> None:
        with simulate({"dp": 4}) as world:
            with torch.device("meta"):
                model = chain(2)
            fully_shard(model, mesh=world.mesh)
            world.materialize(model)

            def step() -> None:
                model.set_requires_gradient_sync(False)
                backward(model)()
                model.set_requires_gradient_sync(True)
                backward(model)()

            told = memory(model, step, torch.optim.SGD(model.parameters()))
        assert most(told, K.GRADIENTS) >= 2 * WEIGHT

    def test_tensor_parallel_layers_hold_their_part(self) -> None:
        with simulate({"tp": 4}) as world:
            with torch.device("meta"):
                model = chain(2)
            plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
            parallelize_module(model, world.mesh, plan)
            world.materialize(model)
            told = memory(model, backward(model), torch.optim.AdamW(model.parameters()))
        assert most(told, K.PARAMETERS) == 2 * WEIGHT // 4
        assert most(told, K.OPTIMIZER_STATE) == 2 * 2 * WEIGHT // 4
        assert most(told, K.GRADIENTS) == 2 * WEIGHT // 4
        assert told.recording.run.axes[0].name == "tp"

    def test_trial_runs_of_dtensor_take_no_memory(self) -> None:
        with simulate({"dp": 64}) as world:
            with torch.device("meta"):
                model = chain(4)
            fully_shard(model, mesh=world.mesh)
            world.materialize(model)
            told = memory(model, backward(model), torch.optim.AdamW(model.parameters()))
        samples = [s for s in told.profile.samples if s.phase is Phase.OPTIMIZER]
        assert max(sample.num_bytes[-1] for sample in samples) < 2 * CUBLAS_BYTES + WEIGHT

    def test_a_rank_of_an_uneven_shard_holds_less(self) -> None:
        held = []
        for rank in (0, 2):
            with simulate({"dp": 3}, rank=rank) as world:
                model = nn.Linear(DIM, 7, bias=False, device="meta")
                fully_shard(model, mesh=world.mesh)
                world.materialize(model)
                told = memory(model, lambda m=model: m(rows()).sum().backward())
            assert told.profile.rank == rank
            held.append(most(told, K.PARAMETERS))
        assert held[0] >= held[1]

    def test_real_tensors_in_a_world_are_counted_as_well(self) -> None:
        with simulate({"dp": 2}) as world:
            model = chain(2)
            fully_shard(model, mesh=world.mesh)
            told = memory(model, backward(model), torch.optim.SGD(model.parameters()))
        assert most(told, K.PARAMETERS) == WEIGHT


class TestOwners:
    """Memory that holds tensors of several modules is charged to each of them."""

    def step(self, model: nn.Module) -> Callable[[], object]:
        """A step whose peak comes when backward is over and all gradients are there."""

        def step() -> object:
            model(rows(4)).sum().backward()
            return torch.zeros(20 * WEIGHT // 4)

        return step

    def held(self, told: Memory, kind: MemoryKind) -> dict[str | None, int]:
        return {use.module: use.num_bytes for use in told.profile.at_peak if use.kind is kind}

    def sharded(
        self, world: World, groups: list[list[int]], **options: MixedPrecisionPolicy
    ) -> nn.Sequential:
        model = chain(3)
        for group in groups:
            fully_shard([model[index] for index in group], mesh=world.mesh, **options)
        return fully_shard(model, mesh=world.mesh, **options)

    @pytest.mark.parametrize("groups", [[], [[1, 2]], [[0, 1, 2]], [[0], [1], [2]]])
    def test_gradients_that_fsdp_reduces_together_are_each_parameters(
        self, groups: list[list[int]]
    ) -> None:
        with simulate({"dp": 4}) as world:
            model = self.sharded(world, groups)
            told = memory(model, self.step(model))
        assert self.held(told, K.GRADIENTS) == dict.fromkeys("012", WEIGHT // 4)

    def test_buffers_that_fsdp_gathers_and_reduces_with_are_each_parameters(self) -> None:
        with simulate({"dp": 4}) as world:
            # In twice the precision, so that the peak is where gradients are reduced.
            policy = MixedPrecisionPolicy(reduce_dtype=torch.float64)
            model = self.sharded(world, [[1, 2]], mp_policy=policy)
            told = memory(model, lambda: model(rows(4)).sum().backward())
        buffers = self.held(told, K.COMMUNICATION)
        assert buffers["1"] == buffers["2"] >= WEIGHT
        assert None not in buffers
        assert "" not in buffers

    def test_modules_of_other_sizes_are_charged_for_their_own(self) -> None:
        with simulate({"dp": 4}) as world:
            model = nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, 4 * DIM, bias=False))
            fully_shard([model[0], model[1]], mesh=world.mesh)
            fully_shard(model, mesh=world.mesh)
            told = memory(model, self.step(model))
        norm = 2 * DIM * 4 // 4
        assert self.held(told, K.GRADIENTS) == {"0": norm, "1": WEIGHT}

    @pytest.mark.parametrize("has_views", [False, True])
    def test_buckets_of_ddp_are_each_parameters(self, has_views: bool) -> None:
        with simulate({"dp": 2}):
            model = nn.parallel.DistributedDataParallel(chain(3), gradient_as_bucket_view=has_views)
            told = memory(model, self.step(model))
        each = dict.fromkeys("012", WEIGHT)
        assert self.held(told, K.GRADIENTS) == each
        assert self.held(told, K.COMMUNICATION) == ({} if has_views else each)

    @pytest.mark.parametrize("has_originals", [False, True])
    def test_flat_parameters_of_fsdp1_are_those_that_they_are_made_of(
        self, has_originals: bool
    ) -> None:
        with simulate({"dp": 3}):
            model = FullyShardedDataParallel(
                chain(3), use_orig_params=has_originals, device_id=torch.device("cpu")
            )
            told = memory(model, backward(model))
        # Rank 0 of 3 has the first of three equal parameters; all three are gathered together.
        assert self.held(told, K.PARAMETERS) == {"0": WEIGHT}
        assert self.held(told, K.GATHERED) == dict.fromkeys("012", WEIGHT)


class TestWithoutAWorld:
    def test_a_model_with_data_keeps_it_and_gets_no_gradients(self) -> None:
        model = chain(2)
        optimizer = torch.optim.AdamW(model.parameters())
        before = [parameter.detach().clone() for parameter in model.parameters()]
        same = list(model.parameters())
        memory(model, backward(model), optimizer)
        assert all(before is after for before, after in zip(same, model.parameters(), strict=True))
        assert all(map(torch.equal, before, model.parameters()))
        assert [parameter.grad for parameter in model.parameters()] == [None, None]
        assert optimizer.state == {}
        assert optimizer.param_groups[0]["params"][0] is same[0]

    def test_state_that_an_optimizer_has_already_is_kept_and_counted(self) -> None:
        model = chain(1)
        optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
        backward(model)()
        optimizer.step()
        optimizer.zero_grad()
        momentum = optimizer.state[model[0].weight]["momentum_buffer"]
        told = memory(model, backward(model), optimizer)
        assert optimizer.state[model[0].weight]["momentum_buffer"] is momentum
        assert most(told, K.OPTIMIZER_STATE) == WEIGHT

    @pytest.mark.parametrize("device", ["cpu", "meta"])
    def test_a_model_on_meta_needs_what_one_with_data_needs(self, device: str) -> None:
        with torch.device(device):
            model = chain(2)
        told = memory(model, backward(model), lambda m: torch.optim.AdamW(m.parameters()))
        assert most(told, K.PARAMETERS) == 2 * WEIGHT
        assert most(told, K.OPTIMIZER_STATE) == 4 * WEIGHT

    def test_inputs_with_data_are_counted(self) -> None:
        model, x = chain(1), rows(4 * DIM)
        told = memory(model, lambda: model(x).sum().backward())
        assert most(told, K.ACTIVATIONS) >= 4 * WEIGHT

    def test_two_models_have_names_of_their_own(self) -> None:
        models = {"actor": chain(1), "critic": chain(2)}

        def step() -> None:
            (models["actor"](rows()).sum() + models["critic"](rows()).sum()).backward()

        told = memory(models, step)
        names = {u.module for u in told.profile.at_peak if u.kind is K.PARAMETERS}
        assert names == {"actor.0", "critic.0", "critic.1"}

    def test_an_exception_in_the_step_leaves_nothing_behind(self) -> None:
        model = chain(2)
        weight = model[0].weight
        resize, call = torch.UntypedStorage.resize_, nn.Module.__call__

        def step() -> None:
            model(rows()).sum().backward()
            raise KeyError("midway")

        with pytest.raises(KeyError, match="midway"):
            memory(model, step, torch.optim.AdamW(model.parameters()))
        assert model[0].weight is weight
        assert not weight._post_accumulate_grad_hooks
        assert (torch.UntypedStorage.resize_, nn.Module.__call__) == (resize, call)
        assert type(torch.ones(1) + 1) is torch.Tensor
        assert most(memory(model, backward(model)), K.PARAMETERS) == 2 * WEIGHT

    def test_the_model_can_die_afterwards(self) -> None:
        model = chain(1)
        told = memory(model, backward(model), torch.optim.AdamW(model.parameters()))
        reference = weakref.ref(model)
        del model
        gc.collect()
        assert reference() is None
        assert told.profile.peak_bytes

    def test_shared_modules_dict_outputs_and_empty_inputs_are_fine(self) -> None:
        class Odd(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.one = nn.Linear(DIM, DIM)
                self.again = self.one

            def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
                return {"y": self.again(self.one(x)), "none": x[:0]}

        model = Odd()
        told = memory(model, lambda: model(rows())["y"].sum().backward())
        assert most(told, K.PARAMETERS) == WEIGHT + KIB
        empty = memory(model, lambda: model(rows(0))["y"].sum().backward())
        assert most(empty, K.PARAMETERS) == WEIGHT + KIB

    def test_a_step_that_allocates_nothing_has_a_peak(self) -> None:
        told = memory(chain(1), lambda: None)
        assert told.profile.peak_bytes == WEIGHT
        assert told.profile.peak_phase is Phase.OUTSIDE


class TestOddSteps:
    def test_a_second_backward_is_backward_and_nothing_is_run_again(self) -> None:
        model = chain(1)

        def step() -> None:
            loss = model(rows()).pow(3).sum()
            grads = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
            sum(grad.pow(2).sum() for grad in grads).backward()

        phases = {sample.phase for sample in memory(model, step).profile.samples}
        assert Phase.BACKWARD in phases
        assert Phase.RECOMPUTE not in phases

    def test_a_checkpointed_function_that_is_no_module_is_run_again(self) -> None:
        model = chain(1)

        def step() -> None:
            x = checkpoint(lambda x: x.relu().exp().sin(), model(rows()), use_reentrant=False)
            x.sum().backward()

        samples = memory(model, step).profile.samples
        assert Phase.RECOMPUTE in {sample.phase for sample in samples}

    def test_sparse_gradients_are_no_error(self) -> None:
        model = nn.Embedding(1000, 16, sparse=True)

        def step() -> None:
            model(torch.randint(0, 1000, (64,))).sum().backward()

        told = memory(model, step, torch.optim.SparseAdam(model.parameters()))
        assert most(told, K.PARAMETERS) == 64_000
        assert most(told, K.OPTIMIZER_STATE) == 128_000

    def test_ddp_buckets_are_for_communication(self) -> None:
        with simulate({"dp": 2}):
            model = nn.parallel.DistributedDataParallel(chain(2))
            told = memory(model, backward(model), torch.optim.SGD(model.parameters()))
        assert 2 * WEIGHT <= most(told, K.COMMUNICATION) < 2 * WEIGHT + 4 * KIB

    @pytest.mark.parametrize(
        ("make", "place"),
        [
            (lambda: torch.compile(chain(1), backend="eager"), "torch.compile"),
            (lambda: nn.LSTM(DIM, DIM), "recurrent layers"),
        ],
    )
    def test_what_cannot_be_estimated_is_a_gap(
        self, make: Callable[[], nn.Module], place: str
    ) -> None:
        model = make()

        def step() -> None:
            output = model(rows())
            (output[0] if isinstance(output, tuple) else output).sum().backward()

        assert [gap.place for gap in memory(model, step).recording.gaps] == [place]

    def test_offloading_is_a_gap(self) -> None:
        with simulate({"dp": 2}) as world:
            with torch.device("meta"):
                model = chain(1)
            fully_shard(model, mesh=world.mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))
            world.materialize(model)
            told = memory(model, backward(model))
        assert [gap.place for gap in told.recording.gaps] == ["FSDP"]


class TestRecords:
    def test_samples_are_few_ordered_and_hold_the_peak(self) -> None:
        model = chain(200)
        profile: MemoryProfile = memory(model, backward(model)).profile
        orders = [sample.order for sample in profile.samples]
        assert len(orders) <= 500
        assert orders == sorted(set(orders))
        assert profile.peak_order in orders

    def test_a_recording_is_saved_and_read_again(self, tmp_path) -> None:
        told = memory(model := chain(1), backward(model))
        path = told.save(tmp_path / "rank-{rank}.json")
        assert path.name == "rank-0.json"
        assert load(path) == told.recording
        assert load(path).memory == (told.profile,)

    def test_repr_says_where_the_peak_is(self) -> None:
        told = memory(model := chain(1), backward(model))
        assert repr(told).startswith(f"Memory(peak {told.profile.peak_bytes:,} bytes, backward")


class TestRefusals:
    def test_a_model_on_meta_in_a_world_must_be_materialized(self) -> None:
        with simulate({"dp": 2}), torch.device("meta"):
            model = chain(1)
            with pytest.raises(
                ShardscopeError, match=r"on meta.*world\.materialize\(model\) first"
            ):
                memory(model, backward(model))

    def test_lazy_parameters_have_no_size_yet(self) -> None:
        model = nn.LazyLinear(4)
        with pytest.raises(ShardscopeError, match="lazy parameters"):
            memory(model, lambda: None)

    def test_a_step_must_be_callable(self) -> None:
        with pytest.raises(ShardscopeError, match="got Tensor for its step"):
            memory(chain(1), rows())  # type: ignore[arg-type]

    def test_an_optimizer_must_be_one(self) -> None:
        with pytest.raises(ShardscopeError, match="got int for its optimizer"):
            memory(chain(1), lambda: None, 3)  # type: ignore[arg-type]

    def test_a_real_process_group_is_refused(self) -> None:
        torch.distributed.init_process_group(
            "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
        )
        try:
            with pytest.raises(ShardscopeError, match=r"real process group \(gloo\)"):
                memory(chain(1), lambda: None)
        finally:
            torch.distributed.destroy_process_group()


def test_a_recording_of_memory_says_that_it_is_one() -> None:
    model = nn.Linear(2, 2)
    told = memory(model, lambda: model(torch.ones(2, 2)).sum().backward())
    assert told.recording.run.instruments == ("memory",)
