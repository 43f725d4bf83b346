"""TARGETs: a file or module that says how to build a model, feed it and shard it."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from shardscope.errors import TargetError

__all__ = ["Program", "describe_failure", "load_program", "run_default_step"]

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
"""


@dataclass(frozen=True)
class Program:
    """What a TARGET defines."""

    name: str
    model: Callable[[], nn.Module]
    batch: Callable[[nn.Module], Any]
    parallelize: Callable[[nn.Module, Any], Any] | None
    step: Callable[[nn.Module, Any], Any]


def load_program(target: str) -> Program:
    """Import TARGET, a path to a .py file or a dotted module name, and take what it defines."""
    module = _import(target)
    for name, purpose in (("model", "build the model"), ("batch", "make its input")):
        if not callable(getattr(module, name, None)):
            raise TargetError(
                f"{target} defines no function {name}(), so there is no way to {purpose}. "
                f"A target looks like this:\n\n{EXAMPLE}"
            )
    return Program(
        name=Path(target).stem if target.endswith(".py") else target.rpartition(".")[2],
        model=module.model,
        batch=module.batch,
        parallelize=_optional_function(module, target, "parallelize"),
        step=_optional_function(module, target, "step") or run_default_step,
    )


def _optional_function(module: ModuleType, target: str, name: str) -> Callable[..., Any] | None:
    value = getattr(module, name, None)
    if value is not None and not callable(value):
        raise TargetError(
            f"{target} defines {name} as {type(value).__name__}, not as a function. "
            f"Define it as shown here, or leave it out:\n\n{EXAMPLE}"
        )
    return value


def _import(target: str) -> ModuleType:
    is_file = target.endswith(".py") or Path(target).exists()
    try:
        return _import_file(Path(target)) if is_file else importlib.import_module(target)
    except TargetError:
        raise
    except ModuleNotFoundError as error:
        if not is_file and error.name and target.startswith(error.name):
            raise TargetError(
                f"There is no file or module {target!r} here. Give the path of a .py file "
                "(train.py) or the dotted name of an importable module (package.train)."
            ) from error
        raise TargetError(f"{target} could not be imported: {describe_failure(error)}.") from error
    except (Exception, SystemExit) as error:
        raise TargetError(f"{target} could not be imported: {describe_failure(error)}.") from error


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        fact = "is a folder" if path.is_dir() else "does not exist"
        raise TargetError(f"{path} {fact}. Give the path of a .py file that defines model().")
    name = "shardscope_target_" + "".join(c if c.isalnum() else "_" for c in path.stem)
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise TargetError(f"{path} is not a Python file. Give the path of one, ending in .py.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look their module up
    sys.path.insert(0, str(path.parent.resolve()))
    spec.loader.exec_module(module)
    return module


def describe_failure(error: BaseException) -> str:
    """An exception of the user's program in one line, with the innermost line that is theirs."""
    text = str(error).strip().splitlines()
    said = f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_theirs(frame)]
    return said if not frames else f"{said} ({frames[-1].filename}, line {frames[-1].lineno})"


def _is_theirs(frame: traceback.FrameSummary) -> bool:
    ours = str(Path(__file__).resolve().parents[1])
    theirs = not frame.filename.startswith((ours, "<", str(Path(torch.__file__).parent)))
    return theirs and "importlib" not in frame.filename


def run_default_step(model: nn.Module, batch: Any) -> None:
    """Forward and backward: the sum of every output that has a gradient is the loss."""
    if isinstance(batch, Mapping):
        output = model(**batch)
    elif isinstance(batch, (tuple, list)):
        output = model(*batch)
    else:
        output = model(batch)
    losses = [tensor.float().sum() for tensor in _tensors(output) if tensor.requires_grad]
    if losses:
        torch.autograd.backward(losses)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
    elif is_dataclass(value):
        for field in fields(value):
            yield from _tensors(getattr(value, field.name))
