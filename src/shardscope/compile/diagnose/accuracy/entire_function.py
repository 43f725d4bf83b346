"""Compares an entire function under torch.compile with eager execution."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, final

import torch
from torch import Tensor, nn

from shardscope._torch.dynamo import is_compiling, patched_inductor, watched_compiles
from shardscope._torch.random_state import preserved_random_state, seed_generators
from shardscope.attribution.tensors import map_tensors
from shardscope.compile.call_state import describe_values, list_uncompared, walk_call, walk_values
from shardscope.compile.diagnose.accuracy.check_result import (
    CheckResult,
    describe_error,
    describe_text,
    find_cause,
    find_failing_line,
    format_error,
    make_eager_failure,
    make_signature,
    message_of,
)
from shardscope.compile.diagnose.accuracy.compare import check_determinism, compare_runs
from shardscope.compile.diagnose.accuracy.judge import (
    CompiledRunFailure,
    name_compiling,
    resolve_backend,
)
from shardscope.compile.diagnose.subgraph import (
    Compiler,
    PhaseCallback,
    RunValues,
    compute_gradients,
    find_leaf,
    ignore_phase,
    is_non_leaf,
    make_non_leaf,
    synchronize_device,
)
from shardscope.compile.preserved_state import preserved_code_state
from shardscope.errors import ShardscopeError
from shardscope.numerics import (
    RandomRounding,
    RngUseMode,
    convert_model_to_fp64,
    fp64_mode,
    main_dtype,
    to_fp64,
)
from shardscope.record import Condition, SuspectOp

NamedValue = tuple[str, Any]
_MAX_LAYOUTS = 3  # number of notes on layouts
Program = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]
ProgramFactory = Callable[[], Program]
"""Creates a function and its arguments; equal in each call, and sharing no state."""


def check_function_accuracy(
    make: ProgramFactory,
    compiler: Compiler,
    *,
    report_phase: PhaseCallback = ignore_phase,
    seed: int = 0,
) -> CheckResult:
    """Compile a function, run it, and return how it compares with eager execution.

    Resets dynamo before and after, so run it in a process of its own. Raises CompileError
    if the function fails in the same way with and without the compiler.
    """
    runs = ProgramRuns(make, seed=seed)
    with preserved_random_state():
        _ = runs.eager_error
        outcome = _check_accuracy(runs, compiler, report_phase)
    return replace(outcome, notes=tuple(dict.fromkeys(runs.notes)))


def _check_accuracy(
    runs: ProgramRuns, compiler: Compiler, report_phase: PhaseCallback
) -> CheckResult:
    compiled_run = _CompiledRun(runs, compiler, report_phase)
    try:
        with patched_inductor(compiler.config):
            first = compiled_run.run()
            if runs.eager_error is not None:
                return describe_missing_error(runs.eager_error.error, runs.eager_error.suspects)
            outcome = _compare_runs(compiled_run, first, compiler)
            if not outcome.is_bad:
                runs.notes += _compare_layouts(first, runs.eager)
            return outcome
    except CompiledRunFailure as failure:
        return failure.outcome
    finally:
        torch.compiler.reset()


def describe_missing_error(error: Exception, suspects: tuple[SuspectOp, ...]) -> CheckResult:
    """The outcome of a function that raises an error which the compiled one does not raise."""
    return CheckResult(
        Condition.MISSING_ERROR,
        f"it returns, and eager execution raises {format_error(error)}",
        error=describe_text(error),
        signature=make_signature(error),
        suspects=suspects,
    )


def _compare_errors(error: BaseException, eager: EagerError) -> CheckResult:
    """The outcome of a function that raises both compiled and in eager execution.

    Errors of the same type or message count as equal: dynamo wraps some errors, and turns a failed
    assertion about a tensor into a RuntimeError.
    """
    cause = find_cause(error)
    is_same = message_of(cause).strip() == message_of(eager.error).strip() != ""
    if is_compiling(cause) or isinstance(cause, type(eager.error)) or is_same:
        raise make_eager_failure(eager.error) from eager.error
    return CheckResult(
        Condition.DIFFERENT_ERROR,
        f"it raises {format_error(cause)}, and eager execution raises {format_error(eager.error)}",
        error=describe_text(cause),
        signature=make_signature(cause),
        suspects=eager.suspects,
    )


def _compare_runs(compiled_run: _CompiledRun, first: RunValues, compiler: Compiler) -> CheckResult:
    outcome = compare_runs(first, compiled_run.runs)
    if outcome.condition not in (Condition.WRONG_RESULT, Condition.NAN):
        return outcome
    if compiled_run.runs.uses_rng and _differs_only_in_random_numbers(compiled_run.runs, compiler):
        return CheckResult(Condition.RNG, f"only its random numbers differ: {outcome.fact}")
    return check_determinism(outcome, first, compiled_run.run, compiled_run.runs)


def _compare_layouts(compiled: RunValues, eager: RunValues) -> list[str]:
    """A note on each returned tensor whose strides or storage differ from eager execution."""
    return [
        f"{name} has {layout}, and {eager.layouts[name]} in eager execution. That is no error by "
        "itself, and not part of the verdict."
        for name, layout in compiled.layouts.items()
        if layout != eager.layouts.get(name, layout)
    ][:_MAX_LAYOUTS]


def _describe_layouts(outputs: Sequence[NamedValue], state: Iterable[NamedValue]) -> dict[str, str]:
    """The strides of each returned tensor, and the tensor that it shares memory with, if any."""
    owners: dict[int, str] = {}
    layouts = {}
    for tensors, is_output in ((state, False), (outputs, True)):
        for name, value in tensors:
            if type(value) not in (Tensor, nn.Parameter) or value.layout is not torch.strided:
                continue
            if value.is_meta or not value.numel():
                continue
            owner = owners.setdefault(value.untyped_storage().data_ptr(), name)
            if is_output:
                pairs = zip(value.shape, value.stride(), strict=True)
                strides = [step if size > 1 else 0 for size, step in pairs]
                memory = "memory of its own" if owner == name else f"the memory of {owner}"
                layouts[name] = f"the strides {strides} and {memory}"
    return layouts


def _differs_only_in_random_numbers(runs: ProgramRuns, compiler: Compiler) -> bool:
    """Whether inductor is correct with eager's random numbers; other backends lack this option."""
    if compiler.backend != "inductor" or compiler.config.get("fallback_random"):
        return False
    config = {**compiler.config, "fallback_random": True}
    return not _check_accuracy(runs, replace(compiler, config=config), ignore_phase).is_bad


@final
@dataclass(frozen=True)
class EagerError:
    """The error of a function in eager execution, and the op and line that raise it."""

    error: Exception
    suspects: tuple[SuspectOp, ...]


@final
class _CompiledRun:
    """Compiles and runs fresh copies of a function, and stores the current phase."""

    def __init__(self, runs: ProgramRuns, compiler: Compiler, report_phase: PhaseCallback) -> None:
        self.runs = runs
        self._compiler = compiler
        self._report_phase = report_phase
        self._backend = resolve_backend(compiler)
        self.phase = "compiling"

    def run(self) -> RunValues:
        """Compile and run a fresh copy; raises CompiledRunFailure."""
        torch.compiler.reset()
        self._enter_phase("compiling")

        def compile(function: Callable[..., Any]) -> Callable[..., Any]:
            compiled: Callable[..., Any] = torch.compile(
                function, backend=self._backend, dynamic=self._compiler.dynamic
            )
            return compiled

        try:
            with watched_compiles(self._begin_compiling, self._end_compiling):
                return self.runs.run(compile, report_phase=self._enter_phase)
        except ShardscopeError:
            raise
        except (Exception, SystemExit) as error:  # any error is an outcome
            own = self.runs.eager_error
            outcome = (
                describe_error(error, self.phase) if own is None else _compare_errors(error, own)
            )
            raise CompiledRunFailure(outcome) from error

    def _enter_phase(self, phase: str) -> None:
        self.phase = phase
        self._report_phase(phase)

    def _begin_compiling(self, is_backward: bool) -> None:
        self._report_phase(name_compiling(is_backward))

    def _end_compiling(self) -> None:
        self._enter_phase("running" if self.phase == "compiling" else self.phase)


@final
class ProgramRuns:
    """The eager runs of a function, each on a fresh copy."""

    def __init__(self, make: ProgramFactory, *, seed: int = 0) -> None:
        self._make = make
        self._seed = seed
        self._perturbed: list[RunValues] = []
        self._again: list[RunValues] = []
        self._is_roundable = True
        self._with_backward = True  # compute gradients; False if eager execution cannot
        self.notes: list[str] = []  # on state that the last run could not compare

    @cached_property
    def eager_error(self) -> EagerError | None:
        """The error that the function raises in eager execution; None if it returns."""
        return self._run_eagerly if isinstance(self._run_eagerly, EagerError) else None

    @property
    def eager(self) -> RunValues:
        """The result of eager execution."""
        if isinstance(self._run_eagerly, EagerError):
            raise make_eager_failure(self._run_eagerly.error) from self._run_eagerly.error
        return self._run_eagerly

    @cached_property
    def _run_eagerly(self) -> RunValues | EagerError:
        try:
            return self.run()
        except Exception:  # noqa: BLE001 - not every result is differentiable
            self._with_backward = False
        try:
            return self.run()
        except Exception as error:  # noqa: BLE001 - the compiled function should raise it too
            return EagerError(error, self._find_suspects(error))

    def _find_suspects(self, error: Exception) -> tuple[SuspectOp, ...]:
        ops = _FailingOp()
        try:
            self.run(context=ops)
        except Exception:  # noqa: BLE001 - it is known to fail
            return find_failing_line(error, op=ops.name)
        return find_failing_line(error)

    @cached_property
    def exact(self) -> RunValues | None:
        """The result in double precision; None where an op does not support it."""
        try:
            return self.run(is_exact=True)
        except Exception:  # noqa: BLE001 - then it is compared with eager execution only
            return None

    @cached_property
    def uses_rng(self) -> bool:
        """Whether the function draws random numbers."""
        watching = RngUseMode()
        self.run(context=watching)
        return watching.has_drawn

    def run_perturbed(self, count: int) -> Sequence[RunValues]:
        """Up to `count` results with perturbed rounding; fewer if such a run fails."""
        while len(self._perturbed) < count and self._is_roundable:
            try:
                self._perturbed.append(self.run(context=RandomRounding(len(self._perturbed) + 1)))
            except Exception:  # noqa: BLE001 - perturbed numbers may make the program fail
                self._is_roundable = False
        return self._perturbed[:count]

    def run_again(self, count: int) -> Sequence[RunValues]:
        """`count` further results of eager execution."""
        while len(self._again) < count:
            self._again.append(self.run())
        return self._again[:count]

    def run(
        self,
        compile: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None,
        *,
        context: AbstractContextManager[Any] | None = None,
        is_exact: bool = False,
        report_phase: PhaseCallback = ignore_phase,
    ) -> RunValues:
        """Create the function and run it, compiled by `compile` if given."""
        function, args, kwargs = self._make()
        with preserved_code_state(function):
            if is_exact:
                context = fp64_mode(_find_dtype(function, args, kwargs))
                args, kwargs = _widen(function, args, kwargs)
            leaves = _find_leaves(function, args, kwargs)
            seed_generators(self._seed)
            # Torch.compile wrappers in the program itself must not run in the eager reference.
            eager = torch.compiler.set_stance("force_eager") if compile is None else nullcontext()
            with eager, context or nullcontext():
                call = function if compile is None else compile(function)
                outputs = call(*args, **kwargs)
                synchronize_device()
                return self._collect(outputs, (function, args, kwargs), leaves, report_phase)

    def _collect(
        self, outputs: Any, program: Program, leaves: dict[str, Tensor], report_phase: PhaseCallback
    ) -> RunValues:
        """Results, state after the call, and gradients; gradients are computed unless the call did
        so.
        """
        results, state = walk_values("output", outputs), walk_call(*program)
        outputs_by_name = list(results)
        values = describe_values(outputs_by_name)
        after = describe_values(state)
        values |= {f"{name}, after the call": value for name, value in after.items()}
        self.notes = [*dict.fromkeys([*list_uncompared(results), *list_uncompared(state)])]
        is_complete = results.is_complete and state.is_complete
        gradients = {
            f"gradient of {name}": leaf.grad.detach().clone()
            for name, leaf in leaves.items()
            if leaf.grad is not None
        }
        layouts = _describe_layouts(outputs_by_name, state)
        if gradients or not self._with_backward:
            return RunValues(values, gradients, is_complete, layouts)
        report_phase("backward")
        pulled = compute_gradients(
            {name: value for name, value in outputs_by_name if isinstance(value, Tensor)}, leaves
        )
        synchronize_device()
        return RunValues(values, pulled, is_complete, layouts)


def _find_leaves(*program: Any) -> dict[str, Tensor]:
    """The leaf tensors that a call can reach and that require gradients, each listed once."""
    tensors = {
        id(value): (name, find_leaf(value))
        for name, value in reversed(list(walk_call(*program)))
        if isinstance(value, Tensor) and value.requires_grad
    }
    return {name: leaf for name, leaf in reversed(tensors.values()) if leaf.is_leaf}


def _widen(*program: Any) -> tuple[Any, Any]:
    """The arguments in double precision; models are converted in place."""
    function, args, kwargs = program

    def change(tensor: Tensor) -> Tensor:
        wide = to_fp64(tensor.detach()).requires_grad_(tensor.requires_grad)
        return make_non_leaf(wide) if is_non_leaf(tensor) else wide

    for module in _find_modules(function, args, kwargs):
        convert_model_to_fp64(module)
    widened_args, widened_kwargs = map_tensors((args, kwargs), change)
    return widened_args, widened_kwargs


def _find_modules(*program: Any) -> list[nn.Module]:
    """The modules that a call can reach, without their submodules."""
    modules: list[nn.Module] = []
    inner: set[int] = set()
    for _, value in walk_call(*program):
        if isinstance(value, nn.Module) and id(value) not in inner:
            modules.append(value)
            inner.update(id(module) for module in value.modules())
    return modules


def _find_dtype(*program: Any) -> torch.dtype:
    modules = _find_modules(*program)
    if modules:
        return main_dtype(modules[0])
    tensors = (value for _, value in walk_call(*program) if isinstance(value, Tensor))
    floats = [tensor.dtype for tensor in tensors if tensor.is_floating_point()]
    return max(set(floats), key=floats.count, default=torch.get_default_dtype())


@final
class _FailingOp(torch.overrides.TorchFunctionMode):
    """Records the name of the torch function that raises."""

    def __init__(self) -> None:
        super().__init__()
        self.name = ""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return func(*args, **(kwargs or {}))
        except Exception:
            self.name = torch.overrides.resolve_name(func) or ""
            raise
