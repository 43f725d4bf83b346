"""Records of `memory`: a rank's memory during a step, by kind and module."""

from __future__ import annotations

from enum import StrEnum

from shardscope.record.base import Record
from shardscope.record.ranks import Natural, Rank
from shardscope.record.source import Phase


class MemoryKind(StrEnum):
    """What memory is used for."""

    PARAMETERS = "parameters"  # and buffers
    GRADIENTS = "gradients"
    OPTIMIZER_STATE = "optimizer_state"
    ACTIVATIONS = "activations"  # kept for backward, and the step's inputs
    GATHERED = "gathered"  # parameters that FSDP has gathered
    COMMUNICATION = "communication"  # what collectives read and write
    TEMPORARIES = "temporaries"  # everything else, including workspaces of kernels


class MemoryUse(Record, frozen=True, kw_only=True, gc=False):
    """Bytes of one kind that belong to one module, or to none."""

    kind: MemoryKind
    module: str | None
    num_bytes: Natural


class MemorySample(Record, frozen=True, kw_only=True, gc=False):
    """Memory at one moment; `order` counts allocations and releases."""

    order: Natural
    phase: Phase
    module: str | None
    num_bytes: tuple[Natural, ...]  # one for each kind, in the order of MemoryKind


class MemoryProfile(Record, frozen=True, kw_only=True, gc=False):
    """A step's memory on one rank.

    Bytes are those of the allocator's blocks, as `torch.cuda.max_memory_allocated` counts them.
    `peak_bytes` and the fields below it are those of a step that starts with optimizer state;
    `first_peak_bytes` is that of the first step, which creates it. `reserved_bytes` is the most
    that the allocator has reserved on the device in both, which is more where free blocks do not
    fit. None means not recorded.
    """

    rank: Rank
    peak_bytes: Natural
    peak_order: Natural
    peak_phase: Phase
    peak_module: str | None = None
    at_peak: tuple[MemoryUse, ...] = ()
    samples: tuple[MemorySample, ...] = ()
    first_peak_bytes: Natural | None = None
    reserved_bytes: Natural | None = None
    needed_bytes: Natural | None = None  # of a device: the peak, and what CUDA takes beside it
    device_bytes: Natural | None = None  # what the device has, if that was asked
