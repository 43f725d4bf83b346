"""Whether a step fits into the device's memory, and which changes would help by how much."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import torch

from shardscope._torch.cuda.caching_allocator import CONTEXT_BYTES
from shardscope._torch.cuda.workspaces import CUBLAS_BYTES
from shardscope.record import (
    Finding,
    MemoryKind,
    MemoryProfile,
    Module,
    Parameter,
    Phase,
    Recording,
    Severity,
)
from shardscope.record.units import format_bytes
from shardscope.shard.memory.step_facts import StepFacts


class LayerGroup(NamedTuple):
    """Adjacent layers, such as `layers.0 … layers.31`."""

    name: str
    num_layers: int
    num_bytes: int
    largest_bytes: int
    freed_bytes: int  # if all layers but one kept only their outputs


def find_layers(
    profile: MemoryProfile, kind: MemoryKind, output_bytes: Mapping[str, int]
) -> Iterator[LayerGroup]:
    """For each outermost list of layers, the bytes of a kind that its layers hold at the peak.

    `output_bytes` are the sizes of the modules' outputs, by name.
    """
    groups: defaultdict[str, defaultdict[int, int]] = defaultdict(lambda: defaultdict(int))
    for use in profile.at_peak:
        prefix, number = _find_layer(use.module or "")
        if use.kind is kind and number is not None:
            groups[prefix][number] += use.num_bytes
    for prefix, layers in groups.items():
        if len(layers) > 1:
            name = f"{prefix}{min(layers)} … {prefix}{max(layers)}"
            largest = max(layers.values())
            inner = [
                max(0, num_bytes - output_bytes.get(f"{prefix}{number}", 0))
                for number, num_bytes in layers.items()
            ]
            freed = sum(inner) - max(inner)
            yield LayerGroup(name, len(layers), sum(layers.values()), largest, freed)


def _find_layer(name: str) -> tuple[str, int | None]:
    """Split a name at its first number: `layers.` and 3 for `layers.3.experts.0.up`."""
    parts = name.split(".")
    for index, part in enumerate(parts):
        if part.isascii() and part.isdecimal():
            return "".join(f"{prefix_part}." for prefix_part in parts[:index]), int(part)
    return name, None


NOT_COUNTED = "not-counted"
OUT_OF_MEMORY = "out-of-memory"
ADVICE = "memory-advice"

_WORTHWHILE = 0.02  # of the peak
_OTHER_AXES = {"pp", "pipe", "pipeline", "stage", "tp", "tensor", "ep", "expert"}
_TIGHT = 0.9  # of the device
_K = MemoryKind


class Advice(NamedTuple):
    """A change that saves memory, its subject, and how much it saves at most."""

    saved_bytes: int
    subject: str
    fact: str
    remedy: str


def needed_bytes(profile: MemoryProfile) -> int:
    """The memory that a device needs for the step: its peak and CUDA's context."""
    return max(profile.peak_bytes, profile.first_peak_bytes or 0) + CONTEXT_BYTES


def find_memory_problems(
    profile: MemoryProfile, recording: Recording, facts: StepFacts
) -> Iterator[Finding]:
    """Findings if the step (almost) exceeds the device's memory: by how much, then advice."""
    if profile.device_bytes is None:
        return
    needed, device = needed_bytes(profile), profile.device_bytes
    if needed <= device * _TIGHT:
        return
    all_advice = _advise(profile, recording, facts)
    advice = sorted(all_advice, key=lambda item: -item.saved_bytes)
    if needed > device:
        yield Finding(
            rule=OUT_OF_MEMORY,
            severity=Severity.ERROR,
            subject="step",
            fact=(
                f"a step needs {format_bytes(needed)}, {format_bytes(needed - device)} more than "
                f"the {format_bytes(device)} available; the peak is {_name_peak(profile)}"
            ),
            remedy=_summarize(advice, needed - device),
            rank=profile.rank,
            memory_bytes=needed - device,
        )
    for item in advice:
        yield Finding(
            rule=ADVICE,
            severity=Severity.INFO,
            subject=item.subject,
            fact=f"{item.fact}: up to {format_bytes(item.saved_bytes)} less",
            remedy=item.remedy,
            rank=profile.rank,
            memory_bytes=item.saved_bytes,
        )


def find_missing(rank: int, *, has_backward: bool, has_optimizer: bool) -> Iterator[Finding]:
    """A finding if backward or the optimizer did not run: training would need more memory."""
    if not has_backward:
        fact = "backward never ran, so gradients and optimizer state are not counted"
        remedy = "Call backward() in the step, unless you profile inference."
    elif not has_optimizer:
        fact = "no optimizer was stepped, so its state and temporaries are not counted"
        remedy = "Give memory() the optimizer; a target defines optimizer(model)."
    else:
        return
    yield Finding(
        rule=NOT_COUNTED,
        severity=Severity.INFO,
        subject="step",
        fact=fact,
        remedy=remedy,
        rank=rank,
    )


def _name_peak(profile: MemoryProfile) -> str:
    where = f" of {profile.peak_module}" if profile.peak_module else ""
    return f"in {'the ' if not where else ''}{profile.peak_phase}{where}"


def _summarize(advice: list[Advice], excess: int) -> str:
    saved = 0
    for count, item in enumerate(advice, 1):
        saved += item.saved_bytes
        if saved >= excess:
            first = "The first piece of advice below" if count == 1 else f"The first {count} below"
            return f"{first} could be enough: run this again after each change."
    if not advice:
        return "Use smaller batches or shorter sequences, or more ranks to shard over."
    return (
        f"All advice below together saves at most {format_bytes(saved)}, which is not enough: use "
        "smaller batches or shorter sequences as well, or more ranks to shard over."
    )


def _advise(profile: MemoryProfile, recording: Recording, facts: StepFacts) -> Iterator[Advice]:
    worthwhile = profile.peak_bytes * _WORTHWHILE
    for find in _SOURCES:
        for advice in find(profile, recording, facts):
            if advice.saved_bytes >= worthwhile:
                yield advice


def _checkpoint(profile: MemoryProfile, recording: Recording, facts: StepFacts) -> Iterator[Advice]:
    """Checkpoint repeated layers whose activations are all kept."""
    if facts.is_recomputing:
        return
    for layers in find_layers(profile, _K.ACTIVATIONS, facts.output_bytes):
        yield Advice(
            layers.freed_bytes,
            layers.name,
            f"activations of {layers.num_layers} layers take {format_bytes(layers.num_bytes)} "
            f"at the peak, those of one {format_bytes(layers.largest_bytes)}",
            "Run each layer under torch.utils.checkpoint.checkpoint(layer, …, "
            "use_reentrant=False): it saves only the layer's input and recomputes the rest.",
        )


def _shard(profile: MemoryProfile, recording: Recording, facts: StepFacts) -> Iterator[Advice]:
    """Shard parameters that are replicated along an axis."""
    instead = " in place of DistributedDataParallel" if facts.is_ddp else ""
    for axis in recording.run.axes:
        if axis.size == 1 or not _may_shard_over(axis.name, recording, facts):
            continue
        replicated_bytes = int(
            sum(
                _settled_bytes(profile, module) * _share_unsharded(module, axis.name)
                for module in recording.modules
            )
        )
        yield Advice(
            int(replicated_bytes * (1 - 1 / axis.size)),
            f"mesh axis {axis.name}",
            f"parameters that all {axis.size} ranks along {axis.name} replicate take "
            f"{format_bytes(replicated_bytes)} including gradients and optimizer state",
            f'Shard them{instead}: fully_shard(layer, mesh=mesh["{axis.name}"]) for each layer, '
            "then for the model.",
        )


def _may_shard_over(axis: str, recording: Recording, facts: StepFacts) -> bool:
    """Whether FSDP may shard over an axis: not over a pipeline's or tensor parallelism's."""
    if facts.fsdp_axes:
        return axis in facts.fsdp_axes
    parameters = (parameter for module in recording.modules for parameter in module.parameters)
    is_taken = any(_is_sharded(parameter, axis) for parameter in parameters)
    return not is_taken and axis.lower() not in _OTHER_AXES


def _settled_bytes(profile: MemoryProfile, module: Module) -> int:
    """A module's bytes for parameters, optimizer state and gradients at the peak."""
    state_bytes = _by_module(profile, (_K.PARAMETERS, _K.OPTIMIZER_STATE)).get(module.name, 0)
    gradients = _by_module(profile, (_K.GRADIENTS,)).get(module.name, 0)
    return state_bytes + min(gradients, sum(map(_local_bytes, module.parameters)))


def _share_unsharded(module: Module, axis: str) -> float:
    sizes = {parameter.name: _local_bytes(parameter) for parameter in module.parameters}
    total = sum(sizes.values())
    unsharded_bytes = sum(
        sizes[parameter.name] for parameter in module.parameters if not _is_sharded(parameter, axis)
    )
    return unsharded_bytes / total if total else 0.0


def _is_sharded(parameter: Parameter, axis: str) -> bool:
    axis_placements = zip(parameter.axes, parameter.placements, strict=False)
    return any(name == axis and "Shard" in placement for name, placement in axis_placements)


def _local_bytes(parameter: Parameter) -> int:
    dtype = getattr(torch, parameter.dtype, torch.float32)
    return math.prod(parameter.local_shape) * int(dtype.itemsize)


def _fuse_optimizer(
    profile: MemoryProfile, recording: Recording, facts: StepFacts
) -> Iterator[Advice]:
    """Use a fused optimizer: one that works on lists of tensors copies them all."""
    if profile.peak_phase is Phase.OPTIMIZER and facts.works_on_lists:
        yield Advice(
            _temporaries_outside(profile),
            "optimizer",
            "the peak is in the optimizer, whose temporaries are as large as the parameters",
            "Create it with fused=True, which needs no temporaries."
            if facts.can_fuse
            else "Create it with foreach=False, which updates one parameter at a time.",
        )


def _shrink_state(
    profile: MemoryProfile, recording: Recording, facts: StepFacts
) -> Iterator[Advice]:
    state = _at_peak(profile, _K.OPTIMIZER_STATE)
    parameters = [parameter for module in recording.modules for parameter in module.parameters]
    count = sum(
        math.prod(parameter.local_shape) for parameter in parameters if parameter.is_trainable
    )
    if state > 4 * count:
        yield Advice(
            state - 2 * count,
            "optimizer",
            f"its state takes {format_bytes(state)}, {state / max(1, count):.0f} bytes for each "
            "parameter",
            "Use an optimizer with 8-bit state (torchao, bitsandbytes), or one with less state.",
        )


def _chunk_loss(profile: MemoryProfile, recording: Recording, facts: StepFacts) -> Iterator[Advice]:
    """Compute the loss in chunks: a language model's logits and their copies are large."""
    if profile.peak_phase not in (Phase.BACKWARD, Phase.OUTSIDE):
        return
    loss_bytes = facts.loss_bytes
    yield Advice(
        loss_bytes * 7 // 8,
        "loss",
        f"tensors computed outside any module, such as the loss, take "
        f"{format_bytes(loss_bytes)} at the peak",
        "Compute output layer and loss in chunks (eight, for example) of the sequence, each under "
        "torch.utils.checkpoint, and do not cast all logits to fp32 at once.",
    )


def _reshard(profile: MemoryProfile, recording: Recording, facts: StepFacts) -> Iterator[Advice]:
    if not facts.fsdp_axes:
        return
    for kind, what in ((_K.GATHERED, "gathered parameters"), (_K.COMMUNICATION, "buffers")):
        num_bytes = _at_peak(profile, kind)
        yield Advice(
            num_bytes // 2,
            "FSDP",
            f"{what} take {format_bytes(num_bytes)} at the peak",
            "Gather less at a time: call fully_shard on smaller modules, and leave "
            "reshard_after_forward=True.",
        )


def _share_buckets(
    profile: MemoryProfile, recording: Recording, facts: StepFacts
) -> Iterator[Advice]:
    """Let gradients be views of DDP's buckets, instead of copies."""
    if facts.copies_gradients:
        bucket_bytes = _at_peak(profile, _K.COMMUNICATION)
        yield Advice(
            min(bucket_bytes, _at_peak(profile, _K.GRADIENTS)),
            "DistributedDataParallel",
            f"its buckets, copies of the gradients, take {format_bytes(bucket_bytes)} at the peak",
            "Create it with gradient_as_bucket_view=True, so gradients are views of its buckets.",
        )


def _clear_gradients(
    profile: MemoryProfile, recording: Recording, facts: StepFacts
) -> Iterator[Advice]:
    """Clear gradients that are still there when the next step begins."""
    if not profile.samples or profile.peak_phase is Phase.OPTIMIZER:
        return
    gradient_bytes = profile.samples[0].num_bytes[list(MemoryKind).index(_K.GRADIENTS)]
    yield Advice(
        gradient_bytes,
        "gradients",
        f"the step begins with {format_bytes(gradient_bytes)} of the previous step's gradients",
        "Call optimizer.zero_grad() right after optimizer.step().",
    )


def _by_module(profile: MemoryProfile, kinds: tuple[MemoryKind, ...]) -> dict[str, int]:
    bytes_by_module: dict[str, int] = {}
    for use in profile.at_peak:
        if use.kind in kinds and use.module is not None:
            bytes_by_module[use.module] = bytes_by_module.get(use.module, 0) + use.num_bytes
    return bytes_by_module


def _temporaries_outside(profile: MemoryProfile) -> int:
    """Temporaries outside of modules, without cuBLAS's workspaces, which cannot be reduced."""
    return max(0, _at_peak(profile, _K.TEMPORARIES, None) - 2 * CUBLAS_BYTES)


_ANY = object()


def _at_peak(profile: MemoryProfile, kind: MemoryKind, module: object = _ANY) -> int:
    return sum(
        use.num_bytes
        for use in profile.at_peak
        if use.kind is kind and (module is _ANY or use.module == module)
    )


_Source = Callable[[MemoryProfile, Recording, StepFacts], Iterator[Advice]]
_SOURCES: tuple[_Source, ...] = (
    _checkpoint,
    _shard,
    _fuse_optimizer,
    _shrink_state,
    _chunk_loss,
    _reshard,
    _share_buckets,
    _clear_gradients,
)
