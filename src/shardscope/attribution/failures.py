"""Explains an exception of the user's program: a message, the source line, and a remedy."""

from __future__ import annotations

import os
import re
import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path

import torch

from shardscope.errors import ShardscopeError

_MAX_TEXT = 300  # characters of an exception's message

# What torch raises if a tensor without data is asked for its data. Its exceptions are known by
# name, because they live in private modules.
_DATA_ERRORS = ("DataDependentOutputException",)
_SHAPE_ERROR = "DynamicOutputShapeException"
_DATA_WORDS = re.compile(
    r"\bmeta\b.*\btensors?\b|no data!|\.numpy\(\) is not supported for tensor"
    r"|its data is not allocated yet|with unallocated storage"  # C++ that reads a fake tensor
)
_NO_DATA = (
    "The simulation runs on tensors without data: remove .item() and whatever else reads values, "
    "or run again with --data."
)
_NO_SHAPE = (
    "The shape of the op's result depends on values, and the simulation runs on tensors without "
    "data: use an op whose shapes do not, such as torch.where(mask, x, 0) for x[mask], or run "
    "again with --data."
)
_TWICE = "The process group already exists when TARGET is called: remove init_process_group()."
_NO_AXIS = "Give --mesh the axes that parallelize() uses."
_NO_KERNEL = (
    "The op has no kernel for tensors without data: register one with "
    "torch.library.register_fake, or run again with --data."
)
_OWN_KERNELS = (
    "Custom kernels do not run in a simulation: switch them off by an option of the program, or "
    "wrap them in ops with fake implementations (torch.library.register_fake)."
)
_NO_TRITON = (
    "Install it (pip install triton): it needs no GPU to be imported, and its kernels are skipped "
    "in a simulation."
)
_NO_PICKLE = (
    "Tensors without data cannot be pickled: leave out what copies them to other processes or "
    "files."
)
# Packages whose kernels need a GPU, and what their errors contain on a machine without one.
_KERNEL_PACKAGES = (
    "apex", "bitsandbytes", "causal_conv1d", "cupy", "deep_ep", "deep_gemm", "fbgemm_gpu",
    "flash_attn", "flash_attn_interface", "flashinfer", "mamba_ssm", "pynvml",
    "transformer_engine", "xformers",
)  # fmt: skip
_DRIVER_WORDS = re.compile(
    r"0 active drivers|lib(cuda|cudart|nccl|nvidia\S*|cublas\w*|cudnn\w*)\.so|NVML|CUDA_HOME"
)
_EXTENSIONS = os.path.join("torch", "utils", "cpp_extension.py")
_NO_FAKE = "no fake impl"
_PICKLE_WORDS = re.compile(r"(?i)can(no|')t pickle (local object|'weakref)")
# What torch says to a program that uses CUDA on a machine without it.
_CUDA_WORDS = re.compile(
    r"not compiled with CUDA enabled|no NVIDIA driver|No CUDA GPUs are available"
    r"|has no attribute '_cuda_\w+'"
)
_NO_CUDA = (
    "The program uses CUDA, which this machine does not have: write mesh.device_type for "
    '"cuda", or run without --data and --device, which simulates CUDA devices.'
)
_CPU_KERNEL = (
    "DTensor has no sharding rule for this kernel, which torch chooses on the CPU alone: run "
    "again with --device cuda, which needs no GPU, and without --data."
)
# How the names of wrappers begin whose message says less than the exception behind them.
_WRAPPERS = (
    "FakeTensorObservedException",
    "InternalTorchDynamoError",
    "LoweringException",
    "Observed",
    "TorchRuntimeError",
    "Unsupported",
)
_USER_CODE = re.compile(r'File "([^"]+)", line (\d+)')  # in a message of torch.compile's

_TERMINAL_CODES = re.compile(r"\x1b\[[0-9;]*m")  # colours and bold text

_OURS = str(Path(__file__).resolve().parents[1]) + os.sep
_TORCH = str(Path(torch.__file__).parent) + os.sep
_STANDARD = tuple(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib"))
_INSTALLED = ("site-packages", "dist-packages")


def describe_failure(error: BaseException) -> str:
    """An exception of the user's program in one line, with the user's innermost source line."""
    place = find_line(error) or _find_user_code(error)
    inner = _unwrap(error)
    message, cause = _summarize(inner), _find_cause(inner)
    if cause is not None and _read(cause) not in _read(inner):
        message += f", because of {_summarize(cause)}"
    return message if place is None else f"{message} ({place[0]}, line {place[1]})"


def suggest_remedy(error: BaseException, *, has_data: bool) -> str:
    """A remedy for the exception if one is known, else an empty string."""
    for link in _chain(error):
        message, kind = _read(link), type(link).__name__
        if not has_data and kind == _SHAPE_ERROR:
            return _NO_SHAPE
        remedy = "" if has_data else _suggest_for_kernels(link, message)
        if remedy:
            return remedy
        if not has_data and (kind in _DATA_ERRORS or _DATA_WORDS.search(message)):
            return _NO_DATA
        if not has_data and kind == "UnsupportedOperatorException":
            return _NO_KERNEL
        if _CUDA_WORDS.search(message):
            return _NO_CUDA
        if kind == "NotImplementedError" and "_for_cpu" in message:
            return _CPU_KERNEL
        if "initialize the default process group twice" in message:
            return _TWICE
        if "mesh_dim_name" in message:
            return _NO_AXIS
    return ""


def _suggest_for_kernels(error: BaseException, message: str) -> str:
    """A remedy for an error of custom kernels, or of code that pickles tensors without data."""
    package = (getattr(error, "name", None) or "").partition(".")[0]
    if isinstance(error, ModuleNotFoundError) and package in ("triton", *_KERNEL_PACKAGES):
        return _NO_TRITON if package == "triton" else _OWN_KERNELS
    frames = traceback.extract_tb(error.__traceback__)
    if any(frame.filename.endswith(_EXTENSIONS) for frame in frames):
        return _OWN_KERNELS
    if _NO_FAKE in message:
        return _NO_KERNEL
    if _PICKLE_WORDS.search(message):
        return _NO_PICKLE
    return _OWN_KERNELS if _DRIVER_WORDS.search(message) else ""


def _unwrap(error: BaseException) -> BaseException:
    """The exception behind a wrapper of torch.compile that does not repeat its message."""
    names = ((link, type(link).__name__) for link in _chain(error))
    return next((link for link, name in names if not name.startswith(_WRAPPERS)), error)


def _find_cause(error: BaseException) -> BaseException | None:
    """The exception at the end of the chain of `raise … from`; None if there is no chain."""
    causes = [error]
    while causes[-1].__cause__ is not None and causes[-1].__cause__ not in causes:
        causes.append(causes[-1].__cause__)
    return causes[-1] if len(causes) > 1 else None


def _summarize(error: BaseException) -> str:
    message = _TERMINAL_CODES.sub("", _read(error))
    lines = list(filter(None, map(str.strip, message.splitlines())))
    kind = type(error).__name__
    if not lines:
        return kind
    text = f"{lines[0]} {lines[1]}" if lines[0].endswith(":") and len(lines) > 1 else lines[0]
    if isinstance(error, ShardscopeError):
        return f"{kind}: {text.rstrip(' .')}"  # it names the remedy
    if len(text) > _MAX_TEXT:
        text = text.partition(". ")[0]  # the first sentence has the fact
    return f"{kind}: {_shorten(text.rstrip(' .:'))}"


def _shorten(text: str) -> str:
    if len(text) <= _MAX_TEXT:
        return text
    return f"{text[: _MAX_TEXT // 3]}…{text[-_MAX_TEXT * 2 // 3 + 1 :]}"


def _read(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - an exception's own __str__ may fail
        return ""


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The exception and the chain of its causes."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or current.__context__


def _find_user_code(error: BaseException) -> tuple[str, int | None] | None:
    """The user's line that torch.compile names in its message, if no frame shows it."""
    _, separator, after = _read(error).partition("from user code:")
    places = _USER_CODE.findall(after) if separator else []
    user_lines = [(file, int(line)) for file, line in places if not file.startswith(_TORCH)]
    return user_lines[-1] if user_lines else None


def find_line(error: BaseException) -> tuple[str, int | None] | None:
    """The file and line of the user's code in which an exception was raised, if there is one."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(("<", _OURS, _TORCH))
    ]
    installed = [frame for frame in frames if set(_INSTALLED) & {*Path(frame.filename).parts}]
    user_frames = [
        frame
        for frame in frames
        if frame not in installed and not frame.filename.startswith(_STANDARD)
    ]
    # A target may be an installed module: then use the last line of an installed package.
    frame = next(reversed(user_frames or installed), None)
    return None if frame is None else (frame.filename, frame.lineno)
