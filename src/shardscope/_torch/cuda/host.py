"""The simulated host of this process: its GPUs, which of them is current, and streams and events.

Nothing runs on the GPUs, so that streams order nothing and events are always complete. A time or
another measurement of a GPU that is asked for is not known: see `answer_measurement`.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self, final

import torch

from shardscope._torch.cuda.device_memory import DeviceMemory
from shardscope._torch.cuda.gpus import DEFAULT_GPU, GPUS, GpuProperties
from shardscope.errors import WorldError

OnUnknown = Callable[[str, str], None]
"""Called with a call that measures a GPU, and with what the program got instead."""


class _Current(threading.local):
    index = 0
    stream: Stream | None = None


current = _Current()
"""The current device and stream of each thread."""


@final
class Host:
    """How many GPUs the simulated host has, and which; what the program has set on them."""

    num_devices = 8
    gpu: GpuProperties = GPUS[DEFAULT_GPU]
    is_initialized = True  # whether the program has used a GPU
    memory: DeviceMemory | None = None
    on_unknown: OnUnknown | None = None
    sync_debug_mode = 0
    memory_fraction = 1.0


host = Host()


def note_use() -> None:
    """Note that the program uses a GPU: torch initializes CUDA then.

    A mesh that is made before selects the GPU of the process by its local rank.
    """
    host.is_initialized = True


def num_devices() -> int:
    """How many GPUs the simulated host has."""
    return host.num_devices


def simulated_memory() -> DeviceMemory | None:
    """The memory of the simulated GPUs; None outside of a simulated world."""
    return host.memory


def current_index() -> int:
    """The index of this thread's current CUDA device."""
    note_use()
    return current.index


def set_current(index: int, stream: Stream | None) -> None:
    """Set this thread's current device and stream."""
    current.index, current.stream = index, stream


def read_index(device: Any = None) -> int:
    """The index of a device as torch.cuda accepts it: an int, a name, a device or None."""
    if device is None:
        return current.index
    if isinstance(device, int):
        index = device
    else:
        named = torch.device(device)
        if named.type != "cuda":
            raise ValueError(f"Expected a cuda device, but got: {named}")
        index = current.index if named.index is None else named.index
    if not -1 <= index < host.num_devices:
        raise WorldError(
            f"CUDA device {index} was named, but a simulated host has devices 0 to "
            f"{host.num_devices - 1}. Choose one of those."
        )
    return index


def set_device(device: Any) -> None:
    """`torch.cuda.set_device`; a negative index has no effect."""
    index = read_index(device)
    note_use()
    if index >= 0:
        current.index = index


def answer_measurement(name: str) -> float:
    """NaN for a measurement of a GPU, such as a time or a temperature, and a gap that says so.

    Without anything that reports gaps, as in `simulate`, it is refused.
    """
    if host.on_unknown is None:
        raise WorldError(
            f"{name}() was called in a simulated world, where nothing runs on a device, no time "
            "passes and nothing can be measured. Leave the call out."
        )
    host.on_unknown(f"{name}()", "the program got nan: nothing is measured on a simulated GPU")
    return math.nan


@final
class Event:
    """A CUDA event that is always complete: nothing runs on a simulated device."""

    def __init__(self, enable_timing: bool = False, *_: Any, **__: Any) -> None:
        self.enable_timing = enable_timing
        self.device = torch.device("cuda", current.index)
        self.cuda_event = self.event_id = 0

    def record(self, stream: Stream | None = None) -> None: ...

    def wait(self, stream: Stream | None = None) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, end_event: Event) -> float:
        """NaN, with a gap: no time passes on a simulated device."""
        return answer_measurement("torch.cuda.Event.elapsed_time")

    def ipc_handle(self) -> bytes:
        """Refused: other processes have simulated devices of their own."""
        raise WorldError(
            "torch.cuda.Event.ipc_handle() was called in a simulated world, where processes share "
            "no device. Leave the call out, or run on a machine with a GPU."
        )


_stream_ids = itertools.count(1)


@final
class Stream:
    """A CUDA stream on which nothing runs."""

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        self.device = torch.device("cuda", read_index(device))
        self.device_index = self.device.index
        self.priority = priority
        self.device_type = 1  # CUDA's, in C++
        self.cuda_stream = self.stream_id = next(_stream_ids)
        self._before: list[Stream | None] = []

    def wait_stream(self, stream: Stream) -> None: ...

    def wait_event(self, event: Event) -> None: ...

    def record_event(self, event: Event | None = None) -> Event:
        return event or Event()

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def is_capturing(self) -> bool:
        return False

    def __enter__(self) -> Self:
        self._before.append(current.stream)
        current.stream = self
        return self

    def __exit__(self, *_: object) -> None:
        current.stream = self._before.pop()


DEFAULT_STREAM = Stream()
DEFAULT_STREAM.cuda_stream = DEFAULT_STREAM.stream_id = 0


def current_stream(device: Any = None) -> Stream:
    """The stream of this thread; the default stream is the same for all devices."""
    return current.stream or DEFAULT_STREAM


def set_stream(stream: Stream) -> None:
    """Make a stream this thread's current one."""
    current.stream = stream


@contextmanager
def on_stream(stream: Stream | None) -> Iterator[None]:
    """`with torch.cuda.stream(…)`, without effect for None."""
    if stream is None:
        yield
    else:
        with stream:
            yield


@final
class OnDevice:
    """`with torch.cuda.device(…)` or `device_of(…)`: without effect for a CPU tensor."""

    def __init__(self, device: Any) -> None:
        self.idx = device.get_device() if isinstance(device, torch.Tensor) else read_index(device)
        self.prev_idx = -1

    def __enter__(self) -> None:
        self.prev_idx = current.index
        set_device(self.idx)

    def __exit__(self, *_: object) -> None:
        set_device(self.prev_idx)
