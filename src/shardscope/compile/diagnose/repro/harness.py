"""What is the same in all repros: each of these functions is pasted as it stands here.

So they know nothing but torch, Python and each other; `check` is pasted from numerics/plain.py,
and `SessionClock` from isolation/session_clock.py.
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

from shardscope.compile.diagnose.isolation.session_clock import SessionClock
from shardscope.numerics.plain import check

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
    """Call the function; what it returns, what it leaves in its inputs, and gradients, by name."""
    torch.manual_seed(0)
    leaves = {
        name: find_leaf(one)
        for name, one in list_parts("input", inputs).items()
        if torch.is_tensor(one) and one.requires_grad
    }
    with torch.set_grad_enabled(with_gradients):
        outputs = function(*inputs)
    parts = list_parts("output", outputs)
    after = {f"{name} afterwards": one for name, one in list_parts("input", inputs).items()}
    found = {
        name: one.detach().clone() if torch.is_tensor(one) else one
        for name, one in (parts | after).items()
    }
    tensors = {name: one for name, one in parts.items() if torch.is_tensor(one)}
    roots = {name: one for name, one in tensors.items() if one.requires_grad and one.numel()}
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


def list_parts(name: str, value: Any, depth: int = 8) -> dict[str, Any]:
    """The dense tensors and plain values in something, by name, and the order of what is in it."""
    found: dict[str, Any] = {}
    if torch.is_tensor(value):
        if not value.is_nested:
            return {name: value if value.layout is torch.strided else value.to_dense()}
        items: Any = enumerate(value.unbind())
    elif value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        return {name: value}
    elif isinstance(value, (set, frozenset)):
        return {name: str(sorted(map(str, value)))}
    elif isinstance(value, dict):
        items, found[f"the keys of {name}"] = value.items(), str([str(key) for key in value])
    elif isinstance(value, torch.nn.Module):
        items = vars(value).items()
    elif hasattr(value, "__array__"):
        return {name: torch.as_tensor(value)}
    elif hasattr(value, "__len__") and hasattr(value, "__getitem__"):
        items = ((place, value[place]) for place in range(len(value)))
        found[f"the length of {name}"] = len(value)
    else:
        items = () if callable(value) else getattr(value, "__dict__", {}).items()
    for key, one in items if depth else ():
        found |= list_parts(f"{name} {key}", one, depth - 1)
    return found


def find_leaf(tensor: torch.Tensor) -> torch.Tensor:
    """What an input that autograd computed was computed from, or a leaf itself."""
    made_by: Any = tensor.grad_fn
    return tensor if made_by is None else getattr(made_by.next_functions[0][0], "variable", tensor)


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
    exact = run_exactly(run, function, make_inputs(), with_gradients)
    return find_difference(run(compiled, make_inputs(), with_gradients), eager, exact)


def find_wrong_state(function: Any, compiled: Any, make_inputs: Any, with_gradients: bool) -> str:
    """Which global or class attribute the compiled function leaves with a wrong value, if any."""

    def run_and_read(call: Any, inputs: Any, with_gradients: bool) -> dict[str, Any]:
        before = list_variables(function, inputs)
        saved = {name: copy_if_possible(value) for name, (_, _, value) in before.items()}
        found: dict[str, Any] = {}
        try:
            run(call, inputs, with_gradients)
        finally:
            for name, (owner, key, value) in list_variables(function, inputs).items():
                found |= list_parts(f"{name} afterwards", value)
                if isinstance(owner, type):
                    setattr(owner, key, saved[name]) if name in saved else delattr(owner, key)
                else:
                    owner.update({key: saved[name]}) if name in saved else owner.pop(key)
        return found

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
    """Globals and class attributes that code outside of libraries names: owner, key and value."""
    found: dict[str, tuple[Any, str, Any]] = {}
    libraries = ("torch", "numpy", *sys.stdlib_module_names)
    plain = (type(None), bool, int, float, complex, str, bytes, torch.Tensor)
    seen, waiting = {}, [function, *inputs]
    while waiting:
        value = waiting.pop()
        while hasattr(value, "__wrapped__"):  # by a decorator such as torch.no_grad()
            value = value.__wrapped__
        home = str(getattr(value, "__module__", "")).partition(".")[0]
        if id(value) in seen or home in libraries:
            continue
        seen[id(value)] = value
        if isinstance(value, (list, tuple)):
            waiting += value
        elif isinstance(value, torch.nn.Module):
            waiting += [type(module) for module in value.modules()]
        elif isinstance(value, type):
            for key, attribute in vars(value).items():
                if callable(attribute) or hasattr(attribute, "__get__"):
                    waiting.append(attribute)
                elif not key.startswith("__"):
                    found[f"{value.__name__}.{key}"] = value, key, attribute
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
                        one = scope.get(key)
                        if callable(one) or isinstance(one, torch.nn.Module):
                            waiting.append(one)
                        elif isinstance(one, type(sys)) or key not in scope:
                            continue
                        elif isinstance(one, plain) or not is_library:
                            found[prefix + key] = scope, key, one
                            waiting.append(type(one))
            cells = value.__closure__ or ()
            waiting += [cell.cell_contents for cell in cells if cell != type(cell)()]
    return found


def find_difference(found: Any, eager: Any, exact: Any) -> str:
    """The first value of the compiled function that is missing, unexpected or wrong, or nothing."""
    for name in eager | found:
        if name not in found or name not in eager:
            return f"{name} is {'missing' if name in eager else 'not there in eager mode'}"
        true = [exact[name]] if name in exact else None
        fact = str(check([found[name]], [eager[name]], true))  # type: ignore[no-untyped-call]
        if fact:
            return fact.replace("output 0", name)
    return ""


def run_exactly(how: Any, function: Any, inputs: Any, with_gradients: bool) -> dict[str, Any]:
    """What the function gives in double precision; nothing where it has no such thing."""
    torch.manual_seed(0)
    before = torch.get_rng_state()
    try:
        with Widened():
            exact: dict[str, Any] = how(
                function, [in_double(one) for one in inputs], with_gradients
            )
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
    """The error that was expected of the compiled function, or nothing; others are raised."""
    try:
        run(function, make_inputs(), with_gradients)
    except Exception:  # noqa: BLE001 - what has no gradients may still be compiled
        run(function, make_inputs(), False)
    try:
        run(compiled, make_inputs(), with_gradients)
    except (Exception, SystemExit) as error:
        found = same_error(error, expected)
        if not found:
            raise
        return found
    return ""


def find_missing_error(function: Any, compiled: Any, make_inputs: Any, with_gradients: bool) -> str:
    """That the compiled function does not raise the error that the function itself raises."""
    try:
        run(function, make_inputs(), False)
    except Exception as error:  # noqa: BLE001 - of whatever kind
        raised: Any = error
    else:
        raise RuntimeError("The function itself raises nothing.")
    try:
        run(compiled, make_inputs(), False)
    except Exception as error:  # noqa: BLE001 - of whatever kind
        kinds = (type(error).__name__, type(raised).__name__)
        return "" if kinds[0] == kinds[1] else f"{kinds[0]} is raised instead of {kinds[1]}"
    return f"{type(raised).__name__} is not raised"


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
        raise RuntimeError(f"The child ran or slept for {limit_s} seconds and did not finish.")
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
    return f"it ran or slept for {limit_s} seconds and did not finish" if code is None else ""


def run_child(limit_s: float) -> int | None:
    """The exit code of this script run once more, to compile and call; None if it takes longer."""
    command = [sys.executable, os.path.abspath(__file__), "--child", *sys.argv[1:]]
    # In the session of this process, so that whoever times that one sees it wait for a processor.
    child = subprocess.Popen(command, stdout=subprocess.PIPE, process_group=0)
    assert child.stdout is not None
    child.stdout.readline()  # it says when it begins: importing torch takes long by itself
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
