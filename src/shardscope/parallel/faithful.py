"""Whether the captured program computes what the model itself does.

Export does not keep everything: backward functions of the user's own, hooks on tensors, regions
without gradients inside others. What is lost there, no comparison with the program would find.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, final

import torch
from torch import Tensor, nn

from shardscope._torch.dispatch import TorchDispatchMode
from shardscope._torch.programs import flatten, unflatten
from shardscope.errors import ParallelError
from shardscope.numerics.widen import jitter_
from shardscope.parallel.blame import explained
from shardscope.parallel.capture import WithLoss, expand_objects
from shardscope.parallel.flow import Flow, Role, Value
from shardscope.parallel.parity.compare import compare
from shardscope.parallel.parity.execute import named_buffers, named_parameters
from shardscope.parallel.parity.outcome import Outcome
from shardscope.parallel.parity.steady import Steady
from shardscope.record import FINE, TensorKind

__all__ = ["check_faithful"]


def check_faithful(
    original: Callable[[], nn.Module],
    flow: Flow,
    example: Any,
    trained: Sequence[str],
    captured: Callable[[], Outcome],
) -> None:
    """Compare the model with what `captured` computes, with nothing drawn at random.

    `original` gives a copy of the model. `trained` names the parameters whose gradients are
    compared; none where it is not trained.
    """
    with Steady(), _PassDropoutGradient():  # type: ignore[no-untyped-call]
        right = _run(original, flow, example, trained)
        moved = _run(original, flow, example, trained, is_jittered=True)
        found = captured()
    verdicts = compare(right, None, found, jittered=[(moved, None)])
    wrong = [one for one in verdicts if one.agreement not in FINE]
    if not wrong:
        return
    first = wrong[0]
    what = {
        TensorKind.GRADIENT: f"the gradient of {first.name}",
        TensorKind.BUFFER: f"what {first.name} is after the call",
    }.get(first.kind, f"output {first.name}")
    raise ParallelError(
        f"torch.export's program differs from the model itself in {what} "
        f"({str(first.agreement).replace('_', ' ')}), before it is partitioned. torch.export does "
        "not keep custom backward functions, hooks on tensors, in-place writes under no_grad(), or "
        "such regions inside others. Write what is affected without them."
    )


def _run(
    original: Callable[[], nn.Module],
    flow: Flow,
    example: Any,
    trained: Sequence[str],
    *,
    is_jittered: bool = False,
) -> Outcome:
    own = original()
    leaves, tree = flatten(example)
    given = [one.detach().clone() if isinstance(one, Tensor) else one for one in leaves]
    args, kwargs = unflatten(given, tree)
    if is_jittered:
        args, kwargs = jitter_(own, (args, kwargs))
    before = {name: one.detach().clone() for name, one in named_buffers(own)}
    torch.manual_seed(0)
    with _blaming_the_model(own), torch.enable_grad() if trained else torch.no_grad():
        results = flatten(expand_objects(own(*args, **kwargs))[0])[0]
        if trained:
            results[0].backward()
    names = [role.name for _, role in flow.outputs if role.kind == "output"]
    outputs = [
        (f"[{name}]", one.detach())
        for name, one in zip(names, results, strict=True)
        if isinstance(one, Tensor)
    ]
    gradients = {_name(name, own): one.grad for name, one in named_parameters(own)}
    buffers = {_name(name, own): one.detach() for name, one in named_buffers(own)}
    changed = {
        _name(name, own)
        for name, one in named_buffers(own)
        if not torch.equal(torch.nan_to_num(before[name]), torch.nan_to_num(one.detach()))
    }
    written = {role.name for _, role in flow.outputs if role.kind == "input mutation"}
    for (_, role), one in zip(_inputs(flow), flatten((args, kwargs))[0], strict=True):
        if role.name in written:
            buffers[role.name] = one.detach()
            changed.add(role.name)
    kept = {name: one for name in trained if (one := gradients.get(name)) is not None}
    return Outcome(outputs, kept, buffers, frozenset(changed))


@final
class _PassDropoutGradient(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Differentiates a dropout that lets everything pass as what it then is: the identity.

    Its backward would scale gradients by 1 / (1 - p), which the other spelling of dropout, by
    bernoulli, does not: a program that was made functional has one where the model has the other.
    """

    supports_higher_order_operators = True  # torch would refuse to run them

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.native_dropout_backward.default:
            return args[0].clone()
        return func(*args, **(kwargs or {}))


def _blaming_the_model(model: nn.Module) -> AbstractContextManager[None]:
    has_loss = isinstance(model, WithLoss)
    name = type(model.model if has_loss else model).__name__
    call = "loss(model(*args, **kwargs), *targets).backward()" if has_loss else "model(*args)"
    return explained(
        f"{name} itself fails in eager mode on these inputs",
        f"Make {call} work, or pass verify=False to skip the comparison.",
    )


def _inputs(flow: Flow) -> list[tuple[Value, Role]]:
    return [(value, role) for value, role in flow.inputs if role.kind == "input"]


def _name(name: str, root: nn.Module) -> str:
    """As the program has it: a model that was captured with a loss stands inside another."""
    return name.removeprefix("model.") if isinstance(root, WithLoss) else name
