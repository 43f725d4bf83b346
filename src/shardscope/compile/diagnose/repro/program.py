"""A graph as the function that a person would have written."""

from __future__ import annotations

import operator
import re
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import fx, nn

from shardscope._torch.dispatch import is_higher_order
from shardscope.comm.lines import user_line
from shardscope.compile.diagnose.repro import bodies
from shardscope.compile.diagnose.repro.contexts import Block, find_blocks
from shardscope.compile.diagnose.repro.inlining import Definitions
from shardscope.compile.diagnose.repro.layout import lay_out_call, with_remark
from shardscope.compile.diagnose.repro.literals import spell_index, spell_value
from shardscope.compile.diagnose.repro.names import Names, comment
from shardscope.compile.diagnose.repro.spelling import NotPrintable, module_of, spell_target

__all__ = ["Program", "print_program"]

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
    """Functions in source, and what calls of the last of them have to bring."""

    lines: list[str] = field(default_factory=list)
    parameters: list[str] = field(default_factory=list)
    constants: list[Any] = field(default_factory=list)  # passed after the inputs
    notes: list[str] = field(default_factory=list)


def print_program(graph: fx.GraphModule, name: str, definitions: Definitions) -> Program:
    """The function `name` that computes what `graph` does, and the bodies that it needs."""
    program = Program()
    _Printer(graph, program, definitions, definitions.names).print_as(name)
    return program


@final
class _Printer:
    """Prints one graph; the graphs of bodies in it get printers of their own."""

    def __init__(
        self, graph: fx.GraphModule, program: Program, definitions: Definitions, names: Names
    ) -> None:
        self._graph = graph
        self._program = program
        self._definitions = definitions
        self._names = names
        self._spelt: dict[fx.Node, str] = {}
        self._held: dict[str, str] = {}  # attributes of the graph, and what they are called
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
                self._spelt[node] = self._names.give_input(str(node.target))
                parameters.append(self._spelt[node])
            else:
                self._print_node(node)
        self._program.parameters[:] = [*parameters, *self._list_held()]
        head = lay_out_call(f"def {name}", self._program.parameters, ":", indent="")
        self._program.lines += [*head, *self._body, "", ""]
        return parameters

    def _list_held(self) -> list[str]:
        return list(self._held.values())

    def _print_node(self, node: fx.Node) -> None:
        if node.op == "output":
            self._print_output(node.args[0])
        elif node.op == "get_attr":
            self._spelt[node] = self._hold(str(node.target))
        elif node in self._blocks:
            self._print_block(self._blocks[node])
        elif node.target is operator.setitem:
            owner, index, value = (node.args[0], node.args[1], node.args[2])
            self._add(
                f"{self._spell(owner)}[{spell_index(index, self._name)}] = {self._spell(value)}",
                node,
            )
        else:
            self._print_call(node)

    def _print_output(self, value: Any) -> None:
        line = f"return {self._spell(value)}"
        indent = _INDENT * self._depth
        if isinstance(value, tuple) and len(indent + line) > _WIDTH:
            self._body += lay_out_call("return ", [*map(self._spell, value)], "", indent=indent)
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
        """One op on a line of its own."""
        operation = self._spell_operation(node)
        name = ""
        if node.users:
            self._spelt[node] = name = self._names.give(node.name)
        left = f"{name} = " if name else ""
        if isinstance(operation, str):
            self._add(f"{left}{operation}", node)
            return
        function, parts = operation
        lines = lay_out_call(f"{left}{function}", parts, "", indent=_INDENT * self._depth)
        self._body += with_remark(lines, self._remark(node))

    def _add(self, text: str, node: fx.Node | None = None) -> None:
        lines = [f"{_INDENT * self._depth}{text}"]
        self._body += with_remark(lines, "" if node is None else self._remark(node))

    def _remark(self, node: fx.Node) -> str:
        """The user's line, once for all ops that it makes."""
        line = comment(user_line(node.meta.get("stack_trace") or ""), width=80)
        if line == self._last_line:
            return ""
        self._last_line = line
        return line

    def _name(self, node: fx.Node) -> str:
        if node not in self._spelt:
            raise NotPrintable(f"{node.name} has no value that a program could use.")
        return self._spelt[node]

    def _spell(self, value: Any) -> str:
        text = spell_value(value, self._name)
        self._definitions.import_for_literal(text)
        return text

    def _spell_operation(self, node: fx.Node) -> str | tuple[str, list[str]]:
        """An expression, or a function and its arguments."""
        args, kwargs = node.args, node.kwargs
        if node.op == "call_method":
            return f"{self._as_owner(args[0])}.{node.target}", self._spell_arguments(
                args[1:], kwargs
            )
        if node.op == "call_module":
            return self._hold(str(node.target)), self._spell_arguments(args, kwargs)
        target: Any = node.target
        if target in _BINARY and len(args) == 2 and not kwargs:
            left, right = (self._as_operand(one) for one in args)
            return f"{left} {_BINARY[target]} {right}"
        if target in _UNARY:
            return f"{_UNARY[target]}{self._as_operand(args[0])}"
        if target is operator.getitem:
            return f"{self._as_operand(args[0])}[{spell_index(args[1], self._name)}]"
        if target is getattr and len(args) == 2 and str(args[1]).isidentifier():
            return f"{self._as_owner(args[0])}.{args[1]}"
        if is_higher_order(target):
            return self._spell_higher_order(node)
        return self._spell_target(target), self._spell_arguments(args, kwargs)

    def _spell_target(self, target: Any) -> str:
        try:
            text = spell_target(target)
        except NotPrintable:
            return self._definitions.refer(target)
        self._definitions.add_import(module_of(text))
        return text

    def _spell_higher_order(self, node: fx.Node) -> tuple[str, list[str]]:
        spelt = [self._spell(one) for one in node.args]
        named = {name: self._spell(value) for name, value in node.kwargs.items()}
        call = bodies.spell_call(node, spelt, named, self._definitions.refer)
        if call.class_lines:
            name = self._names.give("Function")
            self._program.lines += [line.replace("NAME", name) for line in call.class_lines]
            self._program.lines += ["", ""]
            return f"{name}.apply", call.parts
        self._definitions.add_import(module_of(call.function))
        self._program.notes += call.notes
        return call.function, call.parts

    def _spell_arguments(self, args: Any, kwargs: Any) -> list[str]:
        named = [
            f"{name}={self._spell(value)}" if name.isidentifier() else f"**{{{name!r}: {value}}}"
            for name, value in kwargs.items()
        ]
        return [*(self._spell(one) for one in args), *named]

    def _as_operand(self, value: Any) -> str:
        """A value next to an operator: numbers with a sign keep it to themselves."""
        text = self._spell(value)
        return text if text[0].isalnum() and " " not in text else f"({text})"

    def _as_owner(self, value: Any) -> str:
        """A value before a dot."""
        return self._spell(value) if isinstance(value, fx.Node) else f"({self._spell(value)})"

    def _hold(self, path: str) -> str:
        """The name of what the graph has under a path: a body, a tensor, or a module."""
        if path in self._held:
            return self._held[path]
        value = operator.attrgetter(path)(self._graph)
        if isinstance(value, fx.GraphModule):
            return self._print_body(value, path)
        if isinstance(value, torch.Tensor | nn.Module):
            self._held[path] = self._names.give(path)
            self._program.constants.append(value)
            return self._held[path]
        return self._spell(value)

    def _print_body(self, body: fx.GraphModule, path: str) -> str:
        """A graph inside the graph becomes a function before it."""
        # Never wrap_body_0 or cond_true_0: dynamo would take it for the graph that it makes of it.
        name = self._names.give(f"{re.sub(r'_[0-9]+$', '', path)}_fn")
        inner = Program(lines=self._program.lines, notes=self._program.notes)
        _Printer(body, inner, self._definitions, self._names).print_as(name)
        if inner.constants:
            raise NotPrintable(f"{path} holds tensors of its own.")
        return name
