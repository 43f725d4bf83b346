"""Ops that take functions, as people call them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, final

from torch import fx

from shardscope._torch.graph_nodes import checkpoint_policy
from shardscope.compile.diagnose.repro.spelling import NotPrintable, spell_target

__all__ = ["Call", "spell_call"]

Refer = Callable[[Any], str]
_NUM_FLEX_ARGUMENTS = 7


@final
@dataclass
class Call:
    """What is called, with which arguments; for an autograd function, its class as well."""

    function: str
    parts: list[str]
    class_lines: list[str] = field(default_factory=list)  # with NAME for its name
    notes: list[str] = field(default_factory=list)


def spell_call(node: fx.Node, args: list[str], kwargs: dict[str, str], refer: Refer) -> Call:
    """The call of a higher-order op whose arguments are spelt; `refer` names other functions."""
    name = node.target.name()  # type: ignore[union-attr]
    named = [f"{key}={value}" for key, value in kwargs.items()]
    if name == "cond":
        return Call("torch.cond", [*args, *named])
    if name == "tag_activation_checkpoint":
        return _spell_checkpoint(node, [*args, *named], refer)
    if name == "invoke_subgraph":
        return Call(f"torch.compiler.nested_compile_region({args[0]})", [*args[2:], *named])
    if name == "autograd_function_apply":
        return Call("NAME.apply", args[2:], _spell_class(node, *args[:2]))
    if name == "flex_attention":  # of tensors that its functions use, dynamo finds out by itself
        args = args[:_NUM_FLEX_ARGUMENTS]
    return Call(spell_target(node.target), [*args, *named])


def _spell_checkpoint(node: fx.Node, parts: list[str], refer: Refer) -> Call:
    call = Call("torch.utils.checkpoint.checkpoint", parts)
    policy = checkpoint_policy(_body_of(node))
    if policy is not None:
        try:
            call.parts.append(f"context_fn={refer(policy)}")
        except NotPrintable as error:
            call.notes.append(f"The checkpoint's policy of what to keep is left out: {error}")
    return call


def _spell_class(node: fx.Node, forward: str, backward: str) -> list[str]:
    """The autograd function that dynamo took apart."""
    given: dict[str, Any] = dict(node.kwargs)
    marks = [
        f"        ctx.{method}(*(outputs[i] for i in {list(given[key])}))"
        for key, method in (
            ("non_differentiable_idx", "mark_non_differentiable"),
            ("dirty_idx", "mark_dirty"),
        )
        if given.get(key)
    ]
    # What torch does not keep for backward itself, such as sizes, is kept as an attribute.
    is_kept = len(given.get("saved_for_backward_idx", ())) == _count_saved(node)
    keep, kept = (
        ("ctx.save_for_backward(*saved)", "ctx.saved_tensors")
        if is_kept
        else ("ctx.saved = saved", "ctx.saved")
    )
    return [
        "class NAME(torch.autograd.Function):",
        "    @staticmethod",
        "    def forward(ctx, *args):",
        f"        outputs, saved = {forward}(*args)",
        f"        {keep}",
        *marks,
        "        return outputs",
        "",
        "    @staticmethod",
        "    def backward(ctx, *gradients):",
        f"        return {backward}(*gradients, *{kept})",
    ]


def _count_saved(node: fx.Node) -> int:
    """How many values forward hands to backward."""
    output = list(_body_of(node).graph.nodes)[-1]
    return len(output.args[0][1])


def _body_of(node: fx.Node) -> Any:
    """The first graph that an op takes."""
    body: Any = node.args[0]
    owner: Any = node.graph.owning_module
    return owner.get_submodule(str(body.target))
