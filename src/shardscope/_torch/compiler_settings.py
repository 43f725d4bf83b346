"""What the user told torch and its compilers, as lines that tell another process the same."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress

import torch

__all__ = ["apply_settings", "read_settings"]

_CONFIGS = ("torch._dynamo.config", "torch._functorch.config", "torch._inductor.config")
# torch sets these by itself when it compiles.
_ITS_OWN = (
    "torch._functorch.config.fake_tensor_allow_unsafe_data_ptr_access ",
    "torch._inductor.config.deterministic ",
)
_FLAGS = {
    "torch.backends.cudnn.benchmark": False,
    "torch.backends.cudnn.deterministic": False,
    "torch.backends.cudnn.allow_tf32": True,
}


def read_settings() -> tuple[str, ...]:
    """Lines of Python for all that is not as torch has it by default."""
    return (*_read_torch(), *_read_configs())


def _read_torch() -> Iterator[str]:
    if torch.get_default_dtype() is not torch.float32:
        yield f"torch.set_default_dtype({torch.get_default_dtype()})"
    if torch.get_float32_matmul_precision() != "highest":
        yield f"torch.set_float32_matmul_precision({torch.get_float32_matmul_precision()!r})"
    if torch.are_deterministic_algorithms_enabled():
        warns = torch.is_deterministic_algorithms_warn_only_enabled()
        yield f"torch.use_deterministic_algorithms(True, warn_only={warns})"
    for name, default in _FLAGS.items():
        module, _, flag = name.rpartition(".")
        value = getattr(sys.modules[module], flag)
        if value != default:
            yield f"{name} = {value!r}"


def _read_configs() -> Iterator[str]:
    for name in _CONFIGS:
        if name in sys.modules:  # nobody has changed what nobody has loaded
            told = sys.modules[name].codegen_config().splitlines()
            lines = [line for line in told if not line.startswith(_ITS_OWN)]
            yield from ([f"import {name}", *lines] if lines else [])


def apply_settings(lines: Sequence[str]) -> None:
    """Do as the lines say; what this process does not understand is left as it is."""
    for line in lines:
        if line.startswith("import "):
            importlib.import_module(line.removeprefix("import "))
        else:
            with suppress(Exception):
                exec(line, {"torch": torch})
