"""Whether the captured program computes what the model itself does.

Export does not keep everything: backward functions of the user's own, hooks on tensors, regions
without gradients inside others. What is lost there, no comparison with the program would find.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardscope._torch.programs import flatten, unflatten
from shardscope.errors import ParallelError
from shardscope.numerics.widen import jitter_
from shardscope.parallel.capture import WithLoss
from shardscope.parallel.flow import Flow, Role, Value
from shardscope.parallel.parity.compare import compare
from shardscope.parallel.parity.execute import named_buffers, named_parameters
from shardscope.parallel.parity.outcome import Outcome
from shardscope.parallel.parity.steady import Steady
from shardscope.record import FINE, TensorKind

__all__ = ["check_faithful"]

_FINE = {*FINE, "rounded"}


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
    with Steady():  # type: ignore[no-untyped-call]
        right = _run(original, flow, example, trained)
        moved = _run(original, flow, example, trained, is_jittered=True)
        found = captured()
    verdicts = compare(right, None, found, jittered=[(moved, None)])
    wrong = [one for one in verdicts if one.agreement not in _FINE]
    if not wrong:
        return
    first = wrong[0]
    what = {
        TensorKind.GRADIENT: f"another gradient of {first.name}",
        TensorKind.BUFFER: f"another {first.name}",
    }.get(first.kind, f"another output {first.name}")
    raise ParallelError(
        f"torch.export's program of the model computes {what} than the model itself "
        f"({str(first.agreement).replace('_', ' ')}), before anything is cut. It does not keep "
        "custom backward functions, hooks on tensors, in-place writes under no_grad(), or such "
        "regions inside others. Write what is affected without them."
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
    with torch.enable_grad() if trained else torch.no_grad():
        results = flatten(own(*args, **kwargs))[0]
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


def _inputs(flow: Flow) -> list[tuple[Value, Role]]:
    return [(value, role) for value, role in flow.inputs if role.kind == "input"]


def _name(name: str, root: nn.Module) -> str:
    """As the program has it: a model that was captured with a loss stands inside another."""
    return name.removeprefix("model.") if isinstance(root, WithLoss) else name
