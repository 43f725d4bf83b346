"""What is the same in all repros: each of these functions is pasted as it stands here.

So they know nothing but torch, Python and each other; `check` is pasted from numerics/plain.py.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from typing import Any, final

import torch

from shardscope.numerics.plain import check

__all__ = [
    "Widened",
    "as_ones",
    "draw_cotangent",
    "find_crash",
    "find_error",
    "find_hang",
    "find_unrest",
    "find_wrong_numbers",
    "flatten",
    "in_double",
    "make_contiguous",
    "plain_words",
    "run",
    "run_child",
    "run_exactly",
    "same_error",
    "wait_for_device",
    "without_gradient",
]


def run(function: Any, inputs: Any, with_gradients: bool) -> dict[str, Any]:
    """Call the function; its outputs, what it left in its inputs, and gradients, by name."""
    torch.manual_seed(0)
    with torch.set_grad_enabled(with_gradients):
        outputs = function(*inputs)
    named = {f"output {i}": one for i, one in enumerate(outputs) if torch.is_tensor(one)}
    tensors = {f"input {i}": one for i, one in enumerate(inputs) if torch.is_tensor(one)}
    found = {name: one.detach().clone() for name, one in named.items()}
    found |= {f"{name} afterwards": one.detach().clone() for name, one in tensors.items()}
    roots = {name: one for name, one in named.items() if one.requires_grad and one.numel()}
    leaves = {name: one for name, one in tensors.items() if one.requires_grad}
    if not with_gradients or not roots or not leaves:
        wait_for_device()
        return found
    gradients = torch.autograd.grad(
        list(roots.values()),
        list(leaves.values()),
        [draw_cotangent(name, one) for name, one in roots.items()],
        allow_unused=True,
    )
    for (name, leaf), gradient in zip(leaves.items(), gradients, strict=True):
        found[f"gradient of {name}"] = torch.zeros_like(leaf) if gradient is None else gradient
    wait_for_device()
    return found


def flatten(value: Any) -> tuple[Any, ...]:
    """The tensors and numbers in whatever a function returns."""
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, (list, tuple)):
        return tuple(inner for one in value for inner in flatten(one))
    if hasattr(value, "__dict__") and not torch.is_tensor(value) and not callable(value):
        return tuple(one for one in vars(value).values() if torch.is_tensor(one))
    return (value,)


def wait_for_device() -> None:
    """A kernel that fails does so here, and not wherever the device is used next."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()


def draw_cotangent(name: str, output: torch.Tensor) -> torch.Tensor:
    """The same numbers each time, none zero, which all precisions can hold."""
    generator = torch.Generator().manual_seed(sum(name.encode()))
    if output.is_complex():
        drawn = torch.randn(output.shape, generator=generator, dtype=torch.complex64)
    else:
        whole = torch.randint(-64, 64, output.shape, generator=generator, dtype=torch.int64)
        drawn = (2 * whole + 1) / 64
    return drawn.to(output.device, output.dtype)


@final
class Widened(torch.overrides.TorchFunctionMode):
    """Computes in double precision whatever dtype the function asks for."""

    NARROW = (torch.float32, torch.float16, torch.bfloat16)
    CASTS = ("float", "half", "bfloat16")

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def widen(value: Any) -> Any:
            return torch.float64 if value in self.NARROW else value

        if getattr(func, "__name__", "") in self.CASTS:
            return args[0].double()
        args = [widen(one) if isinstance(one, torch.dtype) else one for one in args]
        kwargs = kwargs or {}
        kwargs = {k: widen(v) if isinstance(v, torch.dtype) else v for k, v in kwargs.items()}
        return func(*args, **kwargs)


def find_wrong_numbers(function: Any, compiled: Any, make_inputs: Any, with_gradients: bool) -> str:
    """What the compiled function computes wrongly, or nothing."""
    eager = run(function, make_inputs(), with_gradients)
    exact = run_exactly(function, make_inputs(), with_gradients)
    found = run(compiled, make_inputs(), with_gradients)
    for name, value in eager.items():
        true = [exact[name]] if name in exact else None
        fact = str(check([found.get(name)], [value], true))  # type: ignore[no-untyped-call]
        if fact:
            return fact.replace("output 0", name)
    return ""


def run_exactly(function: Any, inputs: Any, with_gradients: bool) -> dict[str, Any]:
    """What the function gives in double precision; nothing where it has no such thing."""
    torch.manual_seed(0)
    before = torch.get_rng_state()
    try:
        with Widened():
            exact = run(function, [in_double(one) for one in inputs], with_gradients)
    except Exception:  # noqa: BLE001 - not everything is made for double precision
        return {}
    # What is drawn at random in double precision is something else.
    return exact if torch.equal(before, torch.get_rng_state()) else {}


def find_unrest(function: Any, compiled: Any, make_inputs: Any, with_gradients: bool) -> str:
    """Which result of the compiled function changes from call to call, or nothing."""
    first = run(compiled, make_inputs(), with_gradients)
    for _ in range(10):
        try:
            again = run(compiled, make_inputs(), with_gradients)
        except Exception as error:  # noqa: BLE001 - whatever it is, the first call had none
            return f"a further call fails: {type(error).__name__}: {error}"
        for name, value in first.items():
            if not torch.equal(value.nan_to_num(), again[name].nan_to_num()):
                return f"{name} differs between two calls with the same inputs"
    return ""


def find_error(
    function: Any,
    compiled: Any,
    make_inputs: Any,
    with_gradients: bool,
    expected: tuple[str, str],
) -> str:
    """The error that was expected of the compiled function, or nothing; others are raised."""
    run(function, make_inputs(), with_gradients)
    try:
        run(compiled, make_inputs(), with_gradients)
    except (Exception, SystemExit) as error:
        found = same_error(error, expected)
        if not found:
            raise
        return found
    return ""


def same_error(error: BaseException | None, expected: tuple[str, str]) -> str:
    """The error's text, if it or what caused it has the type and says what was expected."""
    while error is not None:
        if (type(error).__name__, plain_words(str(error))) == expected:
            return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
        error = getattr(error, "inner_exception", None) or error.__cause__ or error.__context__
    return ""


def plain_words(text: str) -> str:
    """What an error says in its first line, or of a C++ compiler's words the first error.

    Without numbers, shapes, addresses, files and names that somebody gave: a smaller program has
    others.
    """
    lines = text.strip().splitlines() or [""]
    line = next((one for one in lines if " error: " in one), lines[0])
    line = re.sub(r"[\w.~-]*(?:/[\w.@+-]+)+(?::\d+)?|<?[\w-]+>?\.py(?::\d+)?", "/", line)
    line = re.sub("0x[0-9a-fA-F]+", "0x", re.sub(r"(/[\w.+-]+){2,}", "/…", line))
    line = re.sub(r"'[^'\n]*'|\"[^\"\n]*\"|`[^`\n]*`", "'…'", line)
    line = re.sub(r"%\w+|\b([a-zA-Z]\w*?)(?:_\d+)+\b", lambda found: found[1] or "%", line)
    line = re.sub(r"\d+(\.\d+)?(e[-+]?\d+)?", "#", line)
    return re.sub(r"[\[(]#(, ?#)*,?[\])]", "[#]", line)[:200]


def find_crash(limit_s: float) -> str:
    """How a process that runs the compiled function died, or nothing."""
    code = run_child(limit_s)
    if code is None:
        raise RuntimeError(f"The child did not finish within {limit_s} seconds.")
    if code == 2:
        raise RuntimeError("The child raised an error: see above.")
    if code < 0:
        return f"the process died by {signal.Signals(-code).name}"
    return f"the process ended with exit code {code}" if code else ""


def find_hang(limit_s: float) -> str:
    """That a process that runs the compiled function does not finish, or nothing."""
    code = run_child(limit_s)
    if code:
        raise RuntimeError(f"The child ended with exit code {code}.")
    return f"it did not finish within {limit_s} seconds" if code is None else ""


def run_child(limit_s: float) -> int | None:
    """The exit code of this script run once more, to compile and call; None if it takes longer."""
    command = [sys.executable, os.path.abspath(__file__), "--child", *sys.argv[1:]]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
    assert child.stdout is not None
    child.stdout.readline()  # it says when it begins: importing torch takes long by itself
    try:
        child.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        child.communicate()
        return None
    return child.returncode


def in_double(value: Any) -> Any:
    """A tensor in double precision."""
    if not torch.is_tensor(value) or not (value.is_floating_point() or value.is_complex()):
        return value
    wide = value.detach().to(torch.complex128 if value.is_complex() else torch.float64)
    return wide.requires_grad_(value.requires_grad)


def without_gradient(value: Any) -> Any:
    """A tensor that asks for no gradient."""
    return value.detach() if torch.is_tensor(value) else value


def make_contiguous(value: Any) -> Any:
    """A tensor whose elements lie in order."""
    if not torch.is_tensor(value) or value.is_contiguous():
        return value
    return value.detach().contiguous().requires_grad_(value.requires_grad)


def as_ones(value: Any) -> Any:
    """A tensor of ones, where it has rounded numbers."""
    if not torch.is_tensor(value) or not value.is_floating_point():
        return value
    return torch.ones_like(value).detach().requires_grad_(value.requires_grad)
