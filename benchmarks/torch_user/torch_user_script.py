"""What a user writes: the script that fails, and the one that bisects.

python torch_user_script.py run
python torch_user_script.py bisect
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from typing import Any

import torch
from torch_user_backend import count

TASK = json.loads(os.environ["TORCH_USER_TASK"])


def load() -> tuple[Any, Any]:
    """The function and its arguments."""
    module, _, name = TASK["program"].partition(":")
    torch.manual_seed(0)
    return getattr(importlib.import_module(module), name)(**TASK["arguments"])


def set_config() -> None:
    """Tell Inductor what the task says."""
    for name, value in TASK["config"].items():
        *path, last = name.split(".")
        section = torch._inductor.config
        for part in path:
            section = getattr(section, part)
        setattr(section, last, value)


def compile_with(function: Any) -> Any:
    set_config()
    backend = "inductor" if TASK["backend"] == "inductor" else "counted"
    return torch.compile(function, backend=backend)


def differentiate(outputs: Any, inputs: list[torch.Tensor]) -> list[Any]:
    outputs = list(outputs) if isinstance(outputs, tuple | list) else [outputs]
    pulled = [one for one in outputs if one.requires_grad]
    if pulled and inputs:
        ones = [torch.ones_like(one) for one in pulled]
        outputs += torch.autograd.grad(pulled, inputs, ones, allow_unused=True)
    return outputs


def run(function: Any, args: Any) -> list[Any]:
    torch.manual_seed(0)
    leaves = [one for one in args if isinstance(one, torch.Tensor) and one.requires_grad]
    return differentiate(function(*args), leaves)


def is_right() -> bool:
    """Whether the compiled function does what the function does, as users look at it."""
    count()
    torch.compiler.reset()
    function, args = load()
    try:
        expected, got = run(function, args), run(compile_with(function), args)
        torch.testing.assert_close(got, expected)
    except Exception:  # noqa: BLE001 - whatever it is, it is not right
        return False
    return True


def bisect() -> None:
    """Print what torch's bisector finds."""
    from torch._inductor.compiler_bisector import CompilerBisector

    result = CompilerBisector.do_bisect(is_right)
    found = [] if result is None else [result.backend, result.subsystem, str(result.debug_info)]
    print(json.dumps({"found": [part for part in found if part]}))


if __name__ == "__main__":
    if sys.argv[1] == "bisect":
        bisect()
    else:
        function, args = load()
        run(compile_with(function), args)
