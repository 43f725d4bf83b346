"""Writes a graph as a readable Python function."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import fx, nn

from shardscope._torch.dispatch import is_higher_order
from shardscope._torch.graph import (
    ENTER_AUTOCAST,
    ENTER_INFERENCE,
    EXIT_AUTOCAST,
    EXIT_INFERENCE,
    SET_GRAD_ENABLED,
    checkpoint_policy,
)
from shardscope.attribution.call_sites import user_line
from shardscope.compile.diagnose.repro.literals import (
    Names,
    comment,
    format_index,
    format_value,
    with_remark,
    wrap_call,
)
from shardscope.compile.diagnose.repro.user_code import Definitions
from shardscope.compile.diagnose.subgraph.op_names import (
    NotPrintable,
    format_target,
    module_to_import,
)

Refer = Callable[[Any], str]
_NUM_FLEX_ARGUMENTS = 7


@final
@dataclass
class FormattedCall:
    """A function and its arguments as source; for an autograd function, its class as well."""

    function: str
    parts: list[str]
    class_lines: list[str] = field(default_factory=list)  # with NAME in place of its name
    notes: list[str] = field(default_factory=list)


def format_call(
    node: fx.Node, args: list[str], kwargs: dict[str, str], refer: Refer
) -> FormattedCall:
    """The call of a higher-order op with formatted arguments; `refer` names other functions."""
    name = node.target.name()  # type: ignore[union-attr]
    named = [f"{key}={value}" for key, value in kwargs.items()]
    if name == "cond":
        return FormattedCall("torch.cond", [*args, *named])
    if name == "tag_activation_checkpoint":
        return _format_checkpoint(node, [*args, *named], refer)
    if name == "invoke_subgraph":
        return FormattedCall(
            f"torch.compiler.nested_compile_region({args[0]})", [*args[2:], *named]
        )
    if name == "autograd_function_apply":
        return FormattedCall("NAME.apply", args[2:], _format_class(node, *args[:2]))
    if name == "flex_attention":  # dynamo adds the tensors that its functions read
        args = args[:_NUM_FLEX_ARGUMENTS]
    return FormattedCall(format_target(node.target), [*args, *named])


def _format_checkpoint(node: fx.Node, parts: list[str], refer: Refer) -> FormattedCall:
    call = FormattedCall("torch.utils.checkpoint.checkpoint", parts)
    policy = checkpoint_policy(_body_of(node))
    if policy is not None:
        try:
            call.parts.append(f"context_fn={refer(policy)}")
        except NotPrintable as error:
            call.notes.append(f"The checkpoint's policy of what to keep is left out: {error}")
    return call


def _format_class(node: fx.Node, forward: str, backward: str) -> list[str]:
    """The class of an autograd function, rebuilt from its forward and backward graphs."""
    kwargs: dict[str, Any] = dict(node.kwargs)
    marks = [
        f"        ctx.{method}(*(outputs[i] for i in {list(kwargs[key])}))"
        for key, method in (
            ("non_differentiable_idx", "mark_non_differentiable"),
            ("dirty_idx", "mark_dirty"),
        )
        if kwargs.get(key)
    ]
    # Values that torch cannot save for backward, such as sizes, are stored as an attribute.
    is_saved_by_torch = len(kwargs.get("saved_for_backward_idx", ())) == _count_saved(node)
    save, saved = (
        ("ctx.save_for_backward(*saved)", "ctx.saved_tensors")
        if is_saved_by_torch
        else ("ctx.saved = saved", "ctx.saved")
    )
    return [
        "class NAME(torch.autograd.Function):",
        "    @staticmethod",
        "    def forward(ctx, *args):",
        f"        outputs, saved = {forward}(*args)",
        f"        {save}",
        *marks,
        "        return outputs",
        "",
        "    @staticmethod",
        "    def backward(ctx, *gradients):",
        f"        return {backward}(*gradients, *{saved})",
    ]


def _count_saved(node: fx.Node) -> int:
    """The number of values that forward saves for backward."""
    output = list(_body_of(node).graph.nodes)[-1]
    return len(output.args[0][1])


def _body_of(node: fx.Node) -> Any:
    """The first graph among the arguments of a higher-order op."""
    body: Any = node.args[0]
    owner: Any = node.graph.owning_module
    return owner.get_submodule(str(body.target))


_EXIT_OF = {ENTER_AUTOCAST: EXIT_AUTOCAST, ENTER_INFERENCE: EXIT_INFERENCE}


@final
@dataclass(frozen=True)
class Block:
    """A `with` statement that a node opens; None if the node closes the innermost one."""

    header: str | None


@final
@dataclass
class _Open:
    node: fx.Node
    was_enabled: bool | None  # whether gradients were enabled before the block


def find_blocks(nodes: Iterable[fx.Node]) -> dict[fx.Node, Block]:
    """The nodes that open and close modes; empty if they are not properly nested."""
    blocks: dict[fx.Node, Block] = {}
    stack: list[_Open] = []
    is_enabled = True
    for node in nodes:
        if node.op != "call_function":
            continue
        if node.target is SET_GRAD_ENABLED:
            enables = bool(node.args[0])
            if stack and stack[-1].was_enabled is enables:
                stack.pop()
                blocks[node] = Block(None)
            else:
                stack.append(_Open(node, is_enabled))
                blocks[node] = Block("torch.enable_grad()" if enables else "torch.no_grad()")
            is_enabled = enables
        elif node.target in _EXIT_OF:
            stack.append(_Open(node, None))
            blocks[node] = Block(_format_mode(node))
        elif node.target in _EXIT_OF.values():
            if not stack or stack.pop().node is not node.args[0]:
                return {}
            blocks[node] = Block(None)
    return blocks


def _format_mode(node: fx.Node) -> str:
    args: tuple[Any, ...] = node.args
    if node.target is ENTER_INFERENCE:
        return f"torch.inference_mode({format_value(args[0])})"
    names = ("device_type", "dtype", "enabled", "cache_enabled")
    arguments = dict(zip(names, args, strict=False)) | dict(node.kwargs)
    parts = [format_value(arguments.pop("device_type", "cpu"))]
    parts += [
        f"{name}={format_value(value)}"
        for name, value in arguments.items()
        if value is not None and (name, value) != ("enabled", True)
    ]
    return f"torch.autocast({', '.join(parts)})"


_BINARY = {
    operator.add: "+",
    operator.sub: "-",
    operator.mul: "*",
    operator.truediv: "/",
    operator.floordiv: "//",
    operator.mod: "%",
    operator.pow: "**",
    operator.matmul: "@",
    operator.and_: "&",
    operator.or_: "|",
    operator.xor: "^",
    operator.lshift: "<<",
    operator.rshift: ">>",
    operator.lt: "<",
    operator.le: "<=",
    operator.gt: ">",
    operator.ge: ">=",
    operator.eq: "==",
    operator.ne: "!=",
}
_UNARY = {operator.neg: "-", operator.pos: "+", operator.invert: "~", operator.inv: "~"}
_INDENT = "    "
_WIDTH = 100


@final
@dataclass
class Program:
    """Functions as source, and the arguments that the last one is called with."""

    lines: list[str] = field(default_factory=list)
    parameters: list[str] = field(default_factory=list)
    constants: list[Any] = field(default_factory=list)  # passed after the inputs
    notes: list[str] = field(default_factory=list)


def print_program(graph: fx.GraphModule, name: str, definitions: Definitions) -> Program:
    """The function `name` that computes what `graph` does, and the functions that it needs."""
    program = Program()
    _Printer(graph, program, definitions, definitions.names).print_as(name)
    return program


@final
class _Printer:
    """Writes one graph; graphs of higher-order ops in it get their own printers."""

    def __init__(
        self, graph: fx.GraphModule, program: Program, definitions: Definitions, names: Names
    ) -> None:
        self._graph = graph
        self._program = program
        self._definitions = definitions
        self._names = names
        self._expressions: dict[fx.Node, str] = {}
        self._attribute_names: dict[str, str] = {}  # variables by attribute path
        self._body: list[str] = []
        self._blocks: dict[fx.Node, Block] = {}
        self._depth = 1
        self._last_line = ""
        self.has_constants = False

    def print_as(self, name: str) -> list[str]:
        """Add the function to the program and return its parameters."""
        self._blocks = find_blocks(self._graph.graph.nodes)
        parameters = []
        for node in self._graph.graph.nodes:
            if node.op == "placeholder":
                self._expressions[node] = self._names.give_input(str(node.target))
                parameters.append(self._expressions[node])
            else:
                self._print_node(node)
        self._program.parameters[:] = [*parameters, *self._list_attribute_names()]
        head = wrap_call(f"def {name}", self._program.parameters, ":", indent="")
        self._program.lines += [*head, *self._body, "", ""]
        return parameters

    def _list_attribute_names(self) -> list[str]:
        return list(self._attribute_names.values())

    def _print_node(self, node: fx.Node) -> None:
        if node.op == "output":
            self._print_output(node.args[0])
        elif node.op == "get_attr":
            self._expressions[node] = self._name_attribute(str(node.target))
        elif node in self._blocks:
            self._print_block(self._blocks[node])
        elif node.target is operator.setitem:
            owner, index, value = (node.args[0], node.args[1], node.args[2])
            self._add(
                f"{self._format(owner)}[{format_index(index, self._name)}] = {self._format(value)}",
                node,
            )
        else:
            self._print_call(node)

    def _print_output(self, value: Any) -> None:
        line = f"return {self._format(value)}"
        indent = _INDENT * self._depth
        if isinstance(value, tuple) and len(indent + line) > _WIDTH:
            self._body += wrap_call("return ", [*map(self._format, value)], "", indent=indent)
        else:
            self._add(line)

    def _print_block(self, block: Block) -> None:
        if block.header is None:
            if self._body[-1].endswith(":") and self._body[-1].lstrip().startswith("with "):
                self._add("pass")
            self._depth -= 1
        else:
            self._add(f"with {block.header}:")
            self._depth += 1

    def _print_call(self, node: fx.Node) -> None:
        """Write an op on its own line."""
        operation = self._format_operation(node)
        name = ""
        if node.users:
            self._expressions[node] = name = self._names.give(node.name)
        left = f"{name} = " if name else ""
        if isinstance(operation, str):
            self._add(f"{left}{operation}", node)
            return
        function, parts = operation
        lines = wrap_call(f"{left}{function}", parts, "", indent=_INDENT * self._depth)
        self._body += with_remark(lines, self._remark(node))

    def _add(self, text: str, node: fx.Node | None = None) -> None:
        lines = [f"{_INDENT * self._depth}{text}"]
        self._body += with_remark(lines, "" if node is None else self._remark(node))

    def _remark(self, node: fx.Node) -> str:
        """The user's source line, only for the first of consecutive ops with the same line."""
        line = comment(user_line(node.meta.get("stack_trace") or ""), width=80)
        if line == self._last_line:
            return ""
        self._last_line = line
        return line

    def _name(self, node: fx.Node) -> str:
        if node not in self._expressions:
            raise NotPrintable(f"{node.name} has no value that a program could use.")
        return self._expressions[node]

    def _format(self, value: Any) -> str:
        text = format_value(value, self._name)
        self._definitions.import_for_literal(text)
        return text

    def _format_operation(self, node: fx.Node) -> str | tuple[str, list[str]]:
        """An expression, or a function and its arguments."""
        args, kwargs = node.args, node.kwargs
        if node.op == "call_method":
            return f"{self._as_owner(args[0])}.{node.target}", self._format_arguments(
                args[1:], kwargs
            )
        if node.op == "call_module":
            return self._name_attribute(str(node.target)), self._format_arguments(args, kwargs)
        target: Any = node.target
        if target in _BINARY and len(args) == 2 and not kwargs:
            left, right = (self._as_operand(operand) for operand in args)
            return f"{left} {_BINARY[target]} {right}"
        if target in _UNARY:
            return f"{_UNARY[target]}{self._as_operand(args[0])}"
        if target is operator.getitem:
            return f"{self._as_operand(args[0])}[{format_index(args[1], self._name)}]"
        if target is getattr and len(args) == 2 and str(args[1]).isidentifier():
            return f"{self._as_owner(args[0])}.{args[1]}"
        if is_higher_order(target):
            return self._format_higher_order(node)
        return self._format_target(target), self._format_arguments(args, kwargs)

    def _format_target(self, target: Any) -> str:
        try:
            text = format_target(target)
        except NotPrintable:
            return self._definitions.refer(target)
        self._definitions.add_import(module_to_import(text))
        return text

    def _format_higher_order(self, node: fx.Node) -> tuple[str, list[str]]:
        arguments = [self._format(argument) for argument in node.args]
        named = {name: self._format(value) for name, value in node.kwargs.items()}
        call = format_call(node, arguments, named, self._definitions.refer)
        if call.class_lines:
            name = self._names.give("Function")
            self._program.lines += [line.replace("NAME", name) for line in call.class_lines]
            self._program.lines += ["", ""]
            return f"{name}.apply", call.parts
        self._definitions.add_import(module_to_import(call.function))
        self._program.notes += call.notes
        return call.function, call.parts

    def _format_arguments(self, args: Any, kwargs: Any) -> list[str]:
        named = [
            f"{name}={self._format(value)}" if name.isidentifier() else f"**{{{name!r}: {value}}}"
            for name, value in kwargs.items()
        ]
        return [*(self._format(argument) for argument in args), *named]

    def _as_operand(self, value: Any) -> str:
        """A value as an operand, in parentheses if it is not a plain name or number."""
        text = self._format(value)
        return text if text[0].isalnum() and " " not in text else f"({text})"

    def _as_owner(self, value: Any) -> str:
        """A value before a dot, in parentheses if it is not a variable."""
        return self._format(value) if isinstance(value, fx.Node) else f"({self._format(value)})"

    def _name_attribute(self, path: str) -> str:
        """The name of the graph's attribute with this path: a function, a tensor or a module."""
        if path in self._attribute_names:
            return self._attribute_names[path]
        value = operator.attrgetter(path)(self._graph)
        if isinstance(value, fx.GraphModule):
            return self._print_body(value, path)
        if isinstance(value, torch.Tensor | nn.Module):
            self._attribute_names[path] = self._names.give(path)
            self._program.constants.append(value)
            return self._attribute_names[path]
        return self._format(value)

    def _print_body(self, body: fx.GraphModule, path: str) -> str:
        """Write a graph inside the graph as a function before it."""
        # Never wrap_body_0 or cond_true_0: dynamo uses these names for the graphs it captures.
        name = self._names.give(f"{re.sub(r'_[0-9]+$', '', path)}_fn")
        inner = Program(lines=self._program.lines, notes=self._program.notes)
        _Printer(body, inner, self._definitions, self._names).print_as(name)
        if inner.constants:
            raise NotPrintable(f"{path} holds tensors of its own.")
        return name
