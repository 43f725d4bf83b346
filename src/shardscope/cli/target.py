"""Loads TARGETs: a file or module with functions that build a model, its input and its sharding;
explains exceptions that these functions raise.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import shlex
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from msgspec.structs import replace
from torch import nn

from shardscope.attribution.tensors import tensors_in
from shardscope.errors import TargetError
from shardscope.record import Recording
from shardscope.report.model.names import shorten

_MAX_TEXT = 300  # characters of an exception's message

# What torch raises if a tensor without data is asked for its data. Its exceptions are known by
# name, because they live in private modules.
_DATA_ERRORS = ("DataDependentOutputException", "DynamicOutputShapeException")
_DATA_WORDS = re.compile(
    r"\bmeta\b.*\btensors?\b|no data!|\.numpy\(\) is not supported for tensor"
    r"|its data is not allocated yet"  # C++ that reads a fake tensor
    r"|Can't pickle local object 'WeakValueDictionary"  # torch.save() of a fake tensor
)
_NO_DATA = (
    "The simulation runs on tensors without data: remove .item() and whatever else reads values, "
    "or run again with --data."
)
_TWICE = "The process group already exists when TARGET is called: remove init_process_group()."
_NO_AXIS = "Give --mesh the axes that parallelize() uses."
_NO_KERNEL = (
    "The op has no kernel for tensors without data: register one with "
    "torch.library.register_fake, or run again with --data."
)
# What torch says to a program that uses CUDA on a machine without it.
_CUDA_WORDS = re.compile(
    r"not compiled with CUDA enabled|no NVIDIA driver|has no attribute '_cuda_\w+'"
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

_OURS = str(Path(__file__).resolve().parents[1]) + os.sep
_TORCH = str(Path(torch.__file__).parent) + os.sep
_STANDARD = tuple(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib"))
_INSTALLED = ("site-packages", "dist-packages")


def describe_failure(error: BaseException) -> str:
    """An exception of the user's program in one line, with the user's innermost source line."""
    place = _find_line(error) or _find_user_code(error)
    message = _summarize(_unwrap(error))
    return message if place is None else f"{message} ({place[0]}, line {place[1]})"


def suggest_remedy(error: BaseException, *, has_data: bool) -> str:
    """A remedy for the exception if one is known, else an empty string."""
    for link in _chain(error):
        message, kind = _read(link), type(link).__name__
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


def _unwrap(error: BaseException) -> BaseException:
    """The exception behind a wrapper of torch.compile that does not repeat its message."""
    names = ((link, type(link).__name__) for link in _chain(error))
    return next((link for link, name in names if not name.startswith(_WRAPPERS)), error)


def _summarize(error: BaseException) -> str:
    lines = list(filter(None, map(str.strip, _read(error).splitlines())))
    kind = type(error).__name__
    if not lines:
        return kind
    text = f"{lines[0]} {lines[1]}" if lines[0].endswith(":") and len(lines) > 1 else lines[0]
    if len(text) > _MAX_TEXT:
        text = text.partition(". ")[0]  # the first sentence has the fact
    return f"{kind}: {shorten(text.rstrip(' .:'), _MAX_TEXT)}"


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


def _find_line(error: BaseException) -> tuple[str, int | None] | None:
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


EXAMPLE = """\
    import torch
    from torch import nn

    def model():
        return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))

    def batch(model):
        return torch.randn(8, 64)

    def parallelize(model, mesh):        # optional
        from torch.distributed.fsdp import fully_shard
        return fully_shard(model, mesh=mesh)

    def step(model, batch):              # optional: forward and backward by default
        model(batch).sum().backward()

    plan = {"0": "colwise"}              # optional: for shardscope parallelize, and for audit

    def loss(output):                    # optional: for parallelize --training
        return output.sum()

    def optimizer(model):                # optional: stepped after each step, for memory
        return torch.optim.AdamW(model.parameters())
"""


@dataclass(frozen=True)
class Program:
    """What a TARGET defines."""

    name: str
    model: Callable[[], nn.Module]
    batch: Callable[[nn.Module], Any]
    parallelize: Callable[[nn.Module, Any], Any] | None
    step: Callable[[nn.Module, Any], Any]
    plan: Mapping[str, Any] | None = None
    optimizer: Callable[[nn.Module], Any] | None = None
    loss: Callable[[Any], torch.Tensor] | None = None


def load_program(target: str) -> Program:
    """Import TARGET, a path to a .py file or a dotted module name, and take what it defines."""
    module = _import(target)
    for name, purpose in (("model", "build the model"), ("batch", "make its input")):
        value = _optional_function(module, target, name)
        if value is None:
            raise TargetError(
                f"{target} defines no function {name}(), so there is no way to {purpose}. "
                "A target looks like this:",
                example=EXAMPLE,
            )
    return Program(
        name=name_target(target),
        model=module.model,
        batch=module.batch,
        parallelize=_optional_function(module, target, "parallelize"),
        step=_optional_function(module, target, "step") or run_default_step,
        plan=_optional_plan(module, target),
        optimizer=_optional_function(module, target, "optimizer"),
        loss=_optional_function(module, target, "loss"),
    )


def name_target(target: str) -> str:
    """`train` for both train.py and package.train."""
    return Path(target).stem if _is_file(target) else target.rpartition(".")[2]


def check_file(target: str) -> None:
    """Raise TargetError if TARGET is a path, and not that of a file."""
    if _is_file(target) and not os.path.isfile(target):
        fact = "is a folder" if os.path.isdir(target) else "does not exist"
        raise TargetError(f"{target} {fact}. Give the path of a .py file that defines model().")


def _optional_function(module: ModuleType, target: str, name: str) -> Callable[..., Any] | None:
    value = getattr(module, name, None)
    # A loss may be a module, which can be called like a function; a model is built by one.
    is_built = name == "model" and isinstance(value, nn.Module)
    if value is not None and (is_built or not callable(value)):
        raise TargetError(
            f"{target} defines {name} as {type(value).__name__}, not as a function. "
            "Define it as shown here:",
            example=EXAMPLE,
        )
    return value


def _optional_plan(module: ModuleType, target: str) -> Mapping[str, Any] | None:
    value = getattr(module, "plan", None)
    if value is not None and not isinstance(value, Mapping):
        raise TargetError(
            f"{target} defines plan as {type(value).__name__}, not as a dict. Give patterns of "
            "module names with their styles, as parallelize_module takes them, or leave it out."
        )
    return value


def _import(target: str) -> ModuleType:
    if not target.strip():
        raise TargetError("The TARGET is empty. Give the path of a .py file, such as train.py.")
    is_file = _is_file(target)
    try:
        return _import_file(Path(target)) if is_file else _import_module(target)
    except (TargetError, KeyboardInterrupt):
        raise
    except BaseException as error:  # a program may also call sys.exit()
        if not is_file and _is_missing(target, error):
            raise TargetError(
                f"There is no file or module {shorten(target, 80)!r} here. Give the path of a .py "
                "file (train.py) or the dotted name of an importable module (package.train)."
            ) from error
        fact = f"{target} could not be imported: {describe_failure(error)}."
        hint = _suggest_dotted_name(Path(target)) if is_file and _is_relative(error) else ""
        raise TargetError(fact + hint) from error


def _is_file(target: str) -> bool:
    # os.path, unlike Path, returns False and does not raise for a name that is too long.
    is_package = target.isidentifier() and os.path.isfile(os.path.join(target, "__init__.py"))
    return target.endswith(".py") or (os.path.exists(target) and not is_package)


def _is_missing(target: str, error: BaseException) -> bool:
    """Whether it is the target that was not found, and not something that it imports."""
    if not isinstance(error, ModuleNotFoundError) or not error.name:
        return False
    return f"{target}.".startswith(f"{error.name}.")


def _is_relative(error: BaseException) -> bool:
    return isinstance(error, ImportError) and "relative import" in str(error)


def _suggest_dotted_name(path: Path) -> str:
    """Suggest the dotted name of a file in a package, which relative imports need."""
    folder, name = path.resolve().parent, path.stem
    folder, name = folder.parent, f"{folder.name}.{name}"
    while (folder / "__init__.py").is_file() and folder != folder.parent:
        folder, name = folder.parent, f"{folder.name}.{name}"
    where = "" if folder == Path.cwd() else f", in the folder {folder}"
    return f" It belongs to a package: name it {name}, not by its path{where}."


def _import_module(name: str) -> ModuleType:
    # `python -m` looks in the current folder first; an installed command does not by itself.
    sys.path.insert(0, os.getcwd())
    return importlib.import_module(name)


def _import_file(path: Path) -> ModuleType:
    check_file(str(path))
    name = "shardscope_target_" + "".join(c if c.isalnum() else "_" for c in path.stem)
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise TargetError(f"{path} is not a Python file. Give the path of one, ending in .py.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look their module up
    sys.path.insert(0, str(path.parent.resolve()))
    spec.loader.exec_module(module)
    return module


def run_default_step(model: nn.Module, batch: Any) -> None:
    """Forward and backward: the sum of every output that has a gradient is the loss."""
    args, kwargs = split_batch(batch)
    output = model(*args, **kwargs)
    losses = [tensor.float().sum() for tensor in tensors_in(output) if tensor.requires_grad]
    if losses:
        torch.autograd.backward(losses)


def split_batch(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A batch as a model is called with it: a mapping by name, a sequence by position."""
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return (tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)), {}


def add_outputs(output: Any) -> torch.Tensor:
    """The loss of a program that names none: the sum of every output that can have a gradient."""
    losses = [tensor.float().sum() for tensor in tensors_in(output) if tensor.is_floating_point()]
    if not losses:
        raise TargetError(
            "The model returns no floating-point tensor, so there is no loss to differentiate. "
            "Return one, or define loss(output)."
        )
    return torch.stack(losses).sum() if len(losses) > 1 else losses[0]


def name_command(recording: Recording) -> Recording:
    """The recording with shardscope's command line instead of the `sys.argv` of the program."""
    command = shlex.join(["shardscope", *sys.argv[1:]])
    return replace(recording, run=replace(recording.run, command=command))


@contextmanager
def isolated_argv(target: str) -> Iterator[None]:
    """Give the program a `sys.argv` of its own; restore that and `sys.path` afterwards."""
    # Our options are not the program's: its argparse would refuse them and exit.
    argv, path = sys.argv, sys.path[:]
    sys.argv = [target]
    try:
        yield
    finally:
        sys.argv = argv
        sys.path[:] = path
