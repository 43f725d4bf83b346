"""Whether a step fits into the device's memory, and what to change, by how much each would help."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from shardscope._torch.workspaces import CUBLAS_BYTES
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
from shardscope.record.words import format_bytes
from shardscope.shard.circumstances import Circumstances
from shardscope.shard.layers import find_layers

__all__ = [
    "ADVICE",
    "CONTEXT_BYTES",
    "NOT_COUNTED",
    "OUT_OF_MEMORY",
    "find_memory_problems",
    "find_missing",
    "needed_bytes",
]

NOT_COUNTED = "not-counted"
OUT_OF_MEMORY = "out-of-memory"
ADVICE = "memory-advice"

CONTEXT_BYTES = 621 << 20
"""What CUDA itself took of an H200 before the first tensor, by torch 2.11; NCCL takes more."""

_WORTHWHILE = 0.02  # of the peak
_OTHER_AXES = {"pp", "pipe", "pipeline", "stage", "tp", "tensor", "ep", "expert"}
_TIGHT = 0.9  # of the device
_K = MemoryKind


class Advice(NamedTuple):
    """A change, what it is about, and how much it would save at most."""

    saved_bytes: int
    subject: str
    fact: str
    remedy: str


def needed_bytes(profile: MemoryProfile) -> int:
    """What a device must have for the step: its peak, and what CUDA takes beside it."""
    return max(profile.peak_bytes, profile.first_peak_bytes or 0) + CONTEXT_BYTES


def find_memory_problems(
    profile: MemoryProfile, recording: Recording, circumstances: Circumstances
) -> Iterator[Finding]:
    """Nothing if there is room; else what is too much, and advice, the most helpful first."""
    if profile.device_bytes is None:
        return
    needed, device = needed_bytes(profile), profile.device_bytes
    if needed <= device * _TIGHT:
        return
    told = _advise(profile, recording, circumstances)
    advice = sorted(told, key=lambda one: -one.saved_bytes)
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
        )
    for one in advice:
        yield Finding(
            rule=ADVICE,
            severity=Severity.INFO,
            subject=one.subject,
            fact=f"{one.fact}: up to {format_bytes(one.saved_bytes)} less",
            remedy=one.remedy,
            rank=profile.rank,
        )


def find_missing(rank: int, *, has_backward: bool, has_optimizer: bool) -> Iterator[Finding]:
    """What training would hold and this step did not: nobody should take one for the other."""
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
    for count, one in enumerate(advice, 1):
        saved += one.saved_bytes
        if saved >= excess:
            first = "The first piece of advice below" if count == 1 else f"The first {count} below"
            return f"{first} could be enough: run this again after each change."
    if not advice:
        return "Use smaller batches or shorter sequences, or more ranks to shard over."
    return (
        f"All advice below together saves at most {format_bytes(saved)}, which is not enough: use "
        "smaller batches or shorter sequences as well, or more ranks to shard over."
    )


def _advise(
    profile: MemoryProfile, recording: Recording, circumstances: Circumstances
) -> Iterator[Advice]:
    worthwhile = profile.peak_bytes * _WORTHWHILE
    for find in _SOURCES:
        for advice in find(profile, recording, circumstances):
            if advice.saved_bytes >= worthwhile:
                yield advice


def _checkpoint(
    profile: MemoryProfile, recording: Recording, circumstances: Circumstances
) -> Iterator[Advice]:
    """Repeated layers whose activations are all kept need not keep but those of one."""
    if circumstances.is_recomputing:
        return
    for layers in find_layers(profile, _K.ACTIVATIONS, circumstances.output_bytes):
        yield Advice(
            layers.freed_bytes,
            layers.name,
            f"activations of {layers.num_layers} layers take {format_bytes(layers.num_bytes)} "
            f"at the peak, those of one {format_bytes(layers.largest_bytes)}",
            "Run each layer under torch.utils.checkpoint.checkpoint(layer, …, "
            "use_reentrant=False): it saves only the layer's input and recomputes the rest.",
        )


def _shard(
    profile: MemoryProfile, recording: Recording, circumstances: Circumstances
) -> Iterator[Advice]:
    """Parameters that every rank along an axis has whole."""
    instead = " in place of DistributedDataParallel" if circumstances.is_ddp else ""
    for axis in recording.run.axes:
        if axis.size == 1 or not _may_shard_over(axis.name, recording, circumstances):
            continue
        whole = int(
            sum(
                _settled_bytes(profile, module) * _share_unsharded(module, axis.name)
                for module in recording.modules
            )
        )
        yield Advice(
            int(whole * (1 - 1 / axis.size)),
            f"mesh axis {axis.name}",
            f"parameters that all {axis.size} ranks along {axis.name} replicate take "
            f"{format_bytes(whole)} including gradients and optimizer state",
            f'Shard them{instead}: fully_shard(layer, mesh=mesh["{axis.name}"]) for each layer, '
            "then for the model.",
        )


def _may_shard_over(axis: str, recording: Recording, circumstances: Circumstances) -> bool:
    """Whether an axis is free for FSDP: not a pipeline's, not tensor parallelism's."""
    if circumstances.fsdp_axes:
        return axis in circumstances.fsdp_axes
    parameters = (one for module in recording.modules for one in module.parameters)
    is_taken = any(_is_sharded(one, axis) for one in parameters)
    return not is_taken and axis.lower() not in _OTHER_AXES


def _settled_bytes(profile: MemoryProfile, module: Module) -> int:
    """What a module holds for its parameters at the peak, but for gradients on their way."""
    held = _by_module(profile, (_K.PARAMETERS, _K.OPTIMIZER_STATE)).get(module.name, 0)
    gradients = _by_module(profile, (_K.GRADIENTS,)).get(module.name, 0)
    return held + min(gradients, sum(map(_local_bytes, module.parameters)))


def _share_unsharded(module: Module, axis: str) -> float:
    sizes = {one.name: _local_bytes(one) for one in module.parameters}
    total = sum(sizes.values())
    whole = sum(sizes[one.name] for one in module.parameters if not _is_sharded(one, axis))
    return whole / total if total else 0.0


def _is_sharded(parameter: Parameter, axis: str) -> bool:
    placed = zip(parameter.axes, parameter.placements, strict=False)
    return any(name == axis and "Shard" in placement for name, placement in placed)


def _local_bytes(parameter: Parameter) -> int:
    dtype = getattr(torch, parameter.dtype, torch.float32)
    return math.prod(parameter.local_shape) * int(dtype.itemsize)


def _fuse_optimizer(
    profile: MemoryProfile, recording: Recording, circumstances: Circumstances
) -> Iterator[Advice]:
    """An optimizer that works on lists of tensors copies them all."""
    if profile.peak_phase is Phase.OPTIMIZER and circumstances.works_on_lists:
        yield Advice(
            _temporaries_outside(profile),
            "optimizer",
            "the peak is in the optimizer, whose temporaries are as large as the parameters",
            "Create it with fused=True, which needs no temporaries."
            if circumstances.can_fuse
            else "Create it with foreach=False, which updates one parameter at a time.",
        )


def _shrink_state(
    profile: MemoryProfile, recording: Recording, circumstances: Circumstances
) -> Iterator[Advice]:
    state = _at_peak(profile, _K.OPTIMIZER_STATE)
    parameters = [one for module in recording.modules for one in module.parameters]
    count = sum(math.prod(one.local_shape) for one in parameters if one.is_trainable)
    if state > 4 * count:
        yield Advice(
            state - 2 * count,
            "optimizer",
            f"its state takes {format_bytes(state)}, {state / max(1, count):.0f} bytes for each "
            "parameter",
            "Use an optimizer with 8-bit state (torchao, bitsandbytes), or one with less state.",
        )


def _chunk_loss(
    profile: MemoryProfile, recording: Recording, circumstances: Circumstances
) -> Iterator[Advice]:
    """Logits, and their copies, gradients and logarithms, at the end of a language model."""
    if profile.peak_phase not in (Phase.BACKWARD, Phase.OUTSIDE):
        return
    held = circumstances.loss_bytes
    yield Advice(
        held * 7 // 8,
        "loss",
        f"tensors computed outside any module, such as the loss, take "
        f"{format_bytes(held)} at the peak",
        "Compute output layer and loss in pieces (say eight) of the sequence, each under "
        "torch.utils.checkpoint, and do not cast all logits to fp32 at once.",
    )


def _reshard(
    profile: MemoryProfile, recording: Recording, circumstances: Circumstances
) -> Iterator[Advice]:
    if not circumstances.fsdp_axes:
        return
    for kind, what in ((_K.GATHERED, "gathered parameters"), (_K.COMMUNICATION, "buffers")):
        held = _at_peak(profile, kind)
        yield Advice(
            held // 2,
            "FSDP",
            f"{what} take {format_bytes(held)} at the peak",
            "Gather less at a time: call fully_shard on smaller modules, and leave "
            "reshard_after_forward=True.",
        )


def _share_buckets(
    profile: MemoryProfile, recording: Recording, circumstances: Circumstances
) -> Iterator[Advice]:
    """DDP copies gradients into its buckets, unless they live there."""
    if circumstances.copies_gradients:
        held = _at_peak(profile, _K.COMMUNICATION)
        yield Advice(
            min(held, _at_peak(profile, _K.GRADIENTS)),
            "DistributedDataParallel",
            f"its buckets, copies of the gradients, take {format_bytes(held)} at the peak",
            "Create it with gradient_as_bucket_view=True, so gradients are views of its buckets.",
        )


def _clear_gradients(
    profile: MemoryProfile, recording: Recording, circumstances: Circumstances
) -> Iterator[Advice]:
    """Gradients that are still there when the next step begins."""
    if not profile.samples or profile.peak_phase is Phase.OPTIMIZER:
        return
    kept = profile.samples[0].num_bytes[list(MemoryKind).index(_K.GRADIENTS)]
    yield Advice(
        kept,
        "gradients",
        f"the step begins with {format_bytes(kept)} of the previous step's gradients",
        "Call optimizer.zero_grad() right after optimizer.step().",
    )


def _by_module(profile: MemoryProfile, kinds: tuple[MemoryKind, ...]) -> dict[str, int]:
    held: dict[str, int] = {}
    for use in profile.at_peak:
        if use.kind in kinds and use.module is not None:
            held[use.module] = held.get(use.module, 0) + use.num_bytes
    return held


def _temporaries_outside(profile: MemoryProfile) -> int:
    """Temporaries of no module's, but for cuBLAS's workspaces, which nothing makes smaller."""
    return max(0, _at_peak(profile, _K.TEMPORARIES, None) - 2 * CUBLAS_BYTES)


_ANY = object()


def _at_peak(profile: MemoryProfile, kind: MemoryKind, module: object = _ANY) -> int:
    return sum(
        use.num_bytes
        for use in profile.at_peak
        if use.kind is kind and (module is _ANY or use.module == module)
    )


_Source = Callable[[MemoryProfile, Recording, Circumstances], Iterator[Advice]]
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
