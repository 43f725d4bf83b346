"""Loads TARGETs: a file or module with functions that build a model, its input and its sharding."""

from __future__ import annotations

import importlib
import importlib.util
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from msgspec.structs import replace
from torch import nn

from shardscope.attribution.failures import describe_failure
from shardscope.attribution.tensors import tensors_in
from shardscope.errors import TargetError
from shardscope.record import Recording
from shardscope.report.text.style import shorten

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

    def train_step(model, batch, optimizer):    # optional: for parity, instead of step
        optimizer.zero_grad()
        model(batch).sum().backward()
        optimizer.step()
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
    train_step: Callable[..., Any] | None = None
    parallel_train_step: Callable[..., Any] | None = None


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
        train_step=_optional_function(module, target, "train_step"),
        parallel_train_step=_optional_function(module, target, "parallel_train_step"),
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
