"""The functions that all repro scripts share; their source is pasted into the scripts.

So they use nothing but torch, Python and each other; `check` is pasted from
`numerics/standalone.py`, and `SessionClock` from `worker/process.py`.
"""

from __future__ import annotations

import copy
import os
import re
import signal
import subprocess
import sys
from typing import Any, final

import torch

from shardscope.compile.diagnose.worker.process import SessionClock
from shardscope.numerics import check

__all__ = [
    "SessionClock",
    "Widened",
    "as_ones",
    "copy_if_possible",
    "draw_cotangent",
    "find_crash",
    "find_difference",
    "find_error",
    "find_hang",
    "find_leaf",
    "find_missing_error",
    "find_unrest",
    "find_wrong_numbers",
    "find_wrong_state",
    "in_double",
    "list_parts",
    "list_variables",
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
    """Call the function; returns results, inputs after the call, and gradients, by name."""
    torch.manual_seed(0)
    leaves = {
        name: find_leaf(value)
        for name, value in list_parts("input", inputs).items()
        if torch.is_tensor(value) and value.requires_grad
    }
    with torch.set_grad_enabled(with_gradients):
        outputs = function(*inputs)
    parts = list_parts("output", outputs)
    after = {f"{name} afterwards": value for name, value in list_parts("input", inputs).items()}
    results = {
        name: value.detach().clone() if torch.is_tensor(value) else value
        for name, value in (parts | after).items()
    }
    tensors = {name: value for name, value in parts.items() if torch.is_tensor(value)}
    roots = {
        name: tensor for name, tensor in tensors.items() if tensor.requires_grad and tensor.numel()
    }
    if not with_gradients or not roots or not leaves:
        wait_for_device()
        return results
    gradients = torch.autograd.grad(
        list(roots.values()),
        list(leaves.values()),
        [draw_cotangent(name, tensor) for name, tensor in roots.items()],
        allow_unused=True,
    )
    for (name, leaf), gradient in zip(leaves.items(), gradients, strict=True):
        results[f"gradient of {name}"] = torch.zeros_like(leaf) if gradient is None else gradient
    wait_for_device()
    return results


def list_parts(name: str, value: Any, depth: int = 8) -> dict[str, Any]:
    """The dense tensors and plain values in a value, by name, and the order of containers."""
    parts: dict[str, Any] = {}
    if torch.is_tensor(value):
        if not value.is_nested:
            return {name: value if value.layout is torch.strided else value.to_dense()}
        items: Any = enumerate(value.unbind())
    elif value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        return {name: value}
    elif isinstance(value, (set, frozenset)):
        return {name: str(sorted(map(str, value)))}
    elif isinstance(value, dict):
        items, parts[f"the keys of {name}"] = value.items(), str([str(key) for key in value])
    elif isinstance(value, torch.nn.Module):
        items = vars(value).items()
    elif hasattr(value, "__array__"):
        return {name: torch.as_tensor(value)}
    elif hasattr(value, "__len__") and hasattr(value, "__getitem__"):
        items = ((index, value[index]) for index in range(len(value)))
        parts[f"the length of {name}"] = len(value)
    else:
        items = () if callable(value) else getattr(value, "__dict__", {}).items()
    for key, item in items if depth else ():
        parts |= list_parts(f"{name} {key}", item, depth - 1)
    return parts


def find_leaf(tensor: torch.Tensor) -> torch.Tensor:
    """The leaf that a non-leaf input was computed from, or a leaf itself."""
    grad_fn: Any = tensor.grad_fn
    return tensor if grad_fn is None else getattr(grad_fn.next_functions[0][0], "variable", tensor)


def wait_for_device() -> None:
    """Synchronize, so that a failing kernel raises here and not at the next use of the device."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()


def draw_cotangent(name: str, output: torch.Tensor) -> torch.Tensor:
    """The same nonzero numbers in each run, exact in all precisions."""
    generator = torch.Generator().manual_seed(sum(name.encode()))
    if output.is_complex():
        numbers = torch.randn(output.shape, generator=generator, dtype=torch.complex64)
    else:
        integers = torch.randint(-64, 64, output.shape, generator=generator, dtype=torch.int64)
        numbers = (2 * integers + 1) / 64
    return numbers.to(output.device, output.dtype)


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
        args = [
            widen(argument) if isinstance(argument, torch.dtype) else argument for argument in args
        ]
        kwargs = kwargs or {}
        kwargs = {k: widen(v) if isinstance(v, torch.dtype) else v for k, v in kwargs.items()}
        return func(*args, **kwargs)


def find_wrong_numbers(function: Any, compiled: Any, make_inputs: Any, with_gradients: bool) -> str:
    """What the compiled function computes wrongly; empty if nothing."""
    eager = run(function, make_inputs(), with_gradients)
    exact = run_exactly(run, function, make_inputs(), with_gradients)
    return find_difference(run(compiled, make_inputs(), with_gradients), eager, exact)


def find_wrong_state(function: Any, compiled: Any, make_inputs: Any, with_gradients: bool) -> str:
    """Which global or class attribute has a wrong value after the compiled function; or empty."""

    def run_and_read(call: Any, inputs: Any, with_gradients: bool) -> dict[str, Any]:
        before = list_variables(function, inputs)
        saved = {name: copy_if_possible(value) for name, (_, _, value) in before.items()}
        values: dict[str, Any] = {}
        try:
            run(call, inputs, with_gradients)
        finally:
            for name, (owner, key, value) in list_variables(function, inputs).items():
                values |= list_parts(f"{name} afterwards", value)
                if isinstance(owner, type):
                    setattr(owner, key, saved[name]) if name in saved else delattr(owner, key)
                else:
                    owner.update({key: saved[name]}) if name in saved else owner.pop(key)
        return values

    eager = run_and_read(function, make_inputs(), with_gradients)
    exact = run_exactly(run_and_read, function, make_inputs(), with_gradients)
    return find_difference(run_and_read(compiled, make_inputs(), with_gradients), eager, exact)


def copy_if_possible(value: Any) -> Any:
    """A deep copy, or the value itself where it cannot be copied."""
    try:
        return copy.deepcopy(value)
    except Exception:  # noqa: BLE001 - objects such as locks raise errors of any kind
        return value


def list_variables(function: Any, inputs: Any) -> dict[str, tuple[Any, str, Any]]:
    """Globals and class attributes that code outside libraries refers to: owner, key and value."""
    named_variables: dict[str, tuple[Any, str, Any]] = {}
    libraries = ("torch", "numpy", *sys.stdlib_module_names)
    plain = (type(None), bool, int, float, complex, str, bytes, torch.Tensor)
    visited, waiting = {}, [function, *inputs]
    while waiting:
        value = waiting.pop()
        while hasattr(value, "__wrapped__"):  # by a decorator such as torch.no_grad()
            value = value.__wrapped__
        home = str(getattr(value, "__module__", "")).partition(".")[0]
        if id(value) in visited or home in libraries:
            continue
        visited[id(value)] = value
        if isinstance(value, (list, tuple)):
            waiting += value
        elif isinstance(value, torch.nn.Module):
            waiting += [type(module) for module in value.modules()]
        elif isinstance(value, type):
            for key, attribute in vars(value).items():
                if callable(attribute) or hasattr(attribute, "__get__"):
                    waiting.append(attribute)
                elif not key.startswith("__"):
                    named_variables[f"{value.__name__}.{key}"] = value, key, attribute
        elif hasattr(value, "__code__"):
            variables = value.__globals__
            codes = [value.__code__]
            for code in codes:
                codes += [constant for constant in code.co_consts if hasattr(constant, "co_names")]
                names = [key for key in code.co_names if key in variables]
                modules = [key for key in names if isinstance(variables[key], type(sys))]
                scopes = [("", variables), *((f"{key}.", vars(variables[key])) for key in modules)]
                for prefix, scope in scopes:
                    is_library = str(scope.get("__name__", "")).partition(".")[0] in libraries
                    for key in code.co_names:
                        attribute_value = scope.get(key)
                        if callable(attribute_value) or isinstance(
                            attribute_value, torch.nn.Module
                        ):
                            waiting.append(attribute_value)
                        elif isinstance(attribute_value, type(sys)) or key not in scope:
                            continue
                        elif isinstance(attribute_value, plain) or not is_library:
                            named_variables[prefix + key] = scope, key, attribute_value
                            waiting.append(type(attribute_value))
            cells = value.__closure__ or ()
            waiting += [cell.cell_contents for cell in cells if cell != type(cell)()]
    return named_variables


def find_difference(compiled: Any, eager: Any, exact: Any) -> str:
    """The first value of the compiled function that is missing, unexpected or wrong; or empty."""
    for name in eager | compiled:
        if name not in compiled or name not in eager:
            return f"{name} is {'missing' if name in eager else 'not there in eager mode'}"
        true = [exact[name]] if name in exact else None
        fact = str(check([compiled[name]], [eager[name]], true))  # type: ignore[no-untyped-call]
        if fact:
            return fact.replace("output 0", name)
    return ""


def run_exactly(how: Any, function: Any, inputs: Any, with_gradients: bool) -> dict[str, Any]:
    """The results in double precision; empty if the function does not support it."""
    torch.manual_seed(0)
    before = torch.get_rng_state()
    try:
        with Widened():
            exact: dict[str, Any] = how(
                function, [in_double(value) for value in inputs], with_gradients
            )
    except Exception:  # noqa: BLE001 - not every op supports double precision
        return {}
    # Random numbers in double precision are different numbers.
    return exact if torch.equal(before, torch.get_rng_state()) else {}


def find_unrest(function: Any, compiled: Any, make_inputs: Any, with_gradients: bool) -> str:
    """Which result of the compiled function changes between calls; empty if none."""
    first = run(compiled, make_inputs(), with_gradients)
    for _ in range(10):
        try:
            again = run(compiled, make_inputs(), with_gradients)
        except Exception as error:  # noqa: BLE001 - any error; the first call had none
            return f"a further call fails: {type(error).__name__}: {error}"
        for name, value in first.items():
            if name not in again or check([again[name]], [value], None):  # type: ignore[no-untyped-call]
                return f"{name} differs between two calls with the same inputs"
    return ""


def find_error(
    function: Any,
    compiled: Any,
    make_inputs: Any,
    with_gradients: bool,
    expected: tuple[str, str],
) -> str:
    """The expected error of the compiled function; empty if none. Other errors are raised."""
    try:
        run(function, make_inputs(), with_gradients)
    except Exception:  # noqa: BLE001 - without gradients it may still be compiled
        run(function, make_inputs(), False)
    try:
        run(compiled, make_inputs(), with_gradients)
    except (Exception, SystemExit) as error:
        text = same_error(error, expected)
        if not text:
            raise
        return text
    return ""


def find_missing_error(function: Any, compiled: Any, make_inputs: Any, with_gradients: bool) -> str:
    """Whether the compiled function lacks an error that the function itself raises."""
    try:
        run(function, make_inputs(), False)
    except Exception as error:  # noqa: BLE001 - any error
        raised: Any = error
    else:
        raise RuntimeError("The function itself raises nothing.")
    try:
        run(compiled, make_inputs(), False)
    except Exception as error:  # noqa: BLE001 - any error
        kinds = (type(error).__name__, type(raised).__name__)
        return "" if kinds[0] == kinds[1] else f"{kinds[0]} is raised instead of {kinds[1]}"
    return f"{type(raised).__name__} is not raised"


def same_error(error: BaseException | None, expected: tuple[str, str]) -> str:
    """The text of the error or of one of its causes that has the expected type and message."""
    while error is not None:
        if (type(error).__name__, plain_words(str(error))) == expected:
            return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
        error = getattr(error, "inner_exception", None) or error.__cause__ or error.__context__
    return ""


def plain_words(text: str) -> str:
    """The first line of an error message, or the first error of a C++ compiler.

    Numbers, shapes, addresses, files and user-defined names are removed: they differ in a smaller
    program.
    """
    lines = text.strip().splitlines() or [""]
    line = next((candidate for candidate in lines if " error: " in candidate), lines[0])
    line = re.sub(r"[\w.~-]*(?:/[\w.@+-]+)+(?::\d+)?|<?[\w-]+>?\.py(?::\d+)?", "/", line)
    line = re.sub("0x[0-9a-fA-F]+", "0x", re.sub(r"(/[\w.+-]+){2,}", "/…", line))
    line = re.sub(r"'[^'\n]*'|\"[^\"\n]*\"|`[^`\n]*`", "'…'", line)
    line = re.sub(r"%\w+|\b([a-zA-Z]\w*?)(?:_\d+)+\b", lambda match: match[1] or "%", line)
    line = re.sub(r"\d+(\.\d+)?(e[-+]?\d+)?", "#", line)
    return re.sub(r"[\[(]#(, ?#)*,?[\])]", "[#]", line)[:200]


def find_crash(limit_s: float) -> str:
    """How a process that runs the compiled function died; empty if it did not."""
    code = run_child(limit_s)
    if code is None:
        raise RuntimeError(f"The child ran or slept for {limit_s} seconds and did not finish.")
    if code == 2:
        raise RuntimeError("The child raised an error: see above.")
    if code < 0:
        return f"the process died by {signal.Signals(-code).name}"
    return f"the process ended with exit code {code}" if code else ""


def find_hang(limit_s: float) -> str:
    """That a process that runs the compiled function does not finish; empty if it does."""
    code = run_child(limit_s)
    if code:
        raise RuntimeError(f"The child ended with exit code {code}.")
    return f"it ran or slept for {limit_s} seconds and did not finish" if code is None else ""


def run_child(limit_s: float) -> int | None:
    """The exit code of this script in a child that compiles and calls; None after the limit."""
    command = [sys.executable, os.path.abspath(__file__), "--child", *sys.argv[1:]]
    # In the session of this process, so that a clock of this session sees it wait for a CPU.
    child = subprocess.Popen(command, stdout=subprocess.PIPE, process_group=0)
    assert child.stdout is not None
    child.stdout.readline()  # printed when it begins: importing torch takes long
    clock = SessionClock(child.pid)
    while clock.look() < limit_s:
        try:
            child.communicate(timeout=0.2)
        except subprocess.TimeoutExpired:
            continue
        return child.returncode
    os.killpg(child.pid, signal.SIGKILL)
    child.communicate()
    return None


def in_double(value: Any) -> Any:
    """A tensor in double precision."""
    if not torch.is_tensor(value) or not (value.is_floating_point() or value.is_complex()):
        return value
    wide = value.detach().to(torch.complex128 if value.is_complex() else torch.float64)
    wide.requires_grad_(value.requires_grad)
    return wide if value.is_leaf else wide.clone()


def without_gradient(value: Any) -> Any:
    """A tensor that does not require grad."""
    return value.detach() if torch.is_tensor(value) else value


def make_contiguous(value: Any) -> Any:
    """A contiguous copy of a tensor."""
    if not torch.is_tensor(value) or value.is_contiguous():
        return value
    return value.detach().contiguous().requires_grad_(value.requires_grad)


def as_ones(value: Any) -> Any:
    """A tensor of ones, if it is a floating-point tensor."""
    if not torch.is_tensor(value) or not value.is_floating_point():
        return value
    return torch.ones_like(value).detach().requires_grad_(value.requires_grad)
