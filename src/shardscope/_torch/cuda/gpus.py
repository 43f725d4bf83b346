"""GPUs that can be simulated, with the properties that torch reads from them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, final

from shardscope.errors import WorldError


@final
class _NoPropertyError(WorldError, AttributeError):
    """A property that is not known: `hasattr` is False."""


@final
class GpuProperties(SimpleNamespace):
    """The result of `torch.cuda.get_device_properties`.

    `uuid` and `pci_bus_id`, which differ between the GPUs of a host, are made from the index.
    """

    name: str
    major: int
    minor: int
    total_memory: int  # bytes

    def __getattr__(self, name: str) -> Any:
        raise _NoPropertyError(
            f"torch.cuda.get_device_properties().{name} was read in a simulated world on a machine "
            "without a GPU, where it is not known. Leave it out, or run on a machine with a GPU."
        )

    def at(self, index: int) -> GpuProperties:
        """The properties of the GPU with that index."""
        uuid = f"00000000-0000-0000-0000-{index:012x}"
        identity = {"uuid": uuid, "pci_domain_id": 0, "pci_bus_id": index, "pci_device_id": 0}
        return GpuProperties(**vars(self), **identity)


def _describe(name: str, capability: tuple[int, int], **properties: int) -> GpuProperties:
    return GpuProperties(
        name=name,
        major=capability[0],
        minor=capability[1],
        max_threads_per_multi_processor=2048,
        max_threads_per_block=1024,
        warp_size=32,
        is_integrated=0,
        is_multi_gpu_board=0,
        regs_per_multiprocessor=65536,
        shared_memory_per_block=48 << 10,
        gcnArchName=name,
        **properties,
    )


# The H200's properties were read by torch 2.11. Memory of the others is what torch printed for them
# in public logs, the least where logs differ; the rest is from NVIDIA's data sheets. Their clock
# rates were not read on such a GPU; nothing here depends on them.
GPUS = {
    "h200": _describe(
        "NVIDIA H200",
        (9, 0),
        total_memory=143_155 << 20,
        multi_processor_count=132,
        clock_rate=1_980_000,  # kHz
        memory_clock_rate=3_201_000,
        L2_cache_size=60 << 20,
        memory_bus_width=6016,
        shared_memory_per_block_optin=227 << 10,
        shared_memory_per_multiprocessor=228 << 10,
    ),
    "h100": _describe(
        "NVIDIA H100 80GB HBM3",
        (9, 0),
        total_memory=81_082 << 20,
        multi_processor_count=132,
        clock_rate=1_980_000,  # kHz
        memory_clock_rate=2_619_000,
        L2_cache_size=50 << 20,
        memory_bus_width=5120,
        shared_memory_per_block_optin=227 << 10,
        shared_memory_per_multiprocessor=228 << 10,
    ),
    "a100": _describe(
        "NVIDIA A100-SXM4-80GB",
        (8, 0),
        total_memory=81_049 << 20,
        multi_processor_count=108,
        clock_rate=1_410_000,  # kHz
        memory_clock_rate=1_593_000,
        L2_cache_size=40 << 20,
        memory_bus_width=5120,
        shared_memory_per_block_optin=163 << 10,
        shared_memory_per_multiprocessor=164 << 10,
    ),
    "b200": _describe(
        "NVIDIA B200",
        (10, 0),
        total_memory=182_631 << 20,
        multi_processor_count=148,
        clock_rate=1_965_000,  # kHz
        memory_clock_rate=3_996_000,
        L2_cache_size=126 << 20,
        memory_bus_width=7680,
        shared_memory_per_block_optin=227 << 10,
        shared_memory_per_multiprocessor=228 << 10,
    ),
}
DEFAULT_GPU = "h200"
