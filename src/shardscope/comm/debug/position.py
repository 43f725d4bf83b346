"""Where each thread is in the model, cheaply enough to be asked for every op.

Collectives are rare and may walk the stack; ops are not, so this remembers instead: a module that
was called inside the backward now running is being recomputed.
"""

from __future__ import annotations

import sys
import threading
from typing import Any, NamedTuple, final

import torch
from torch import nn

from shardscope._torch.autograd import (
    NO_GRAPH_TASK,
    current_graph_task,
    current_node,
    next_sequence_number,
    node_origin,
)
from shardscope._torch.recompute import find_recomputed, method_owner, reentrant_nodes
from shardscope.comm.calls import ModuleCalls
from shardscope.comm.names import NO_MODULE, ModuleNames
from shardscope.comm.stack import find_backward_caller, read_stack

__all__ = ["GLOBAL", "Position", "Positions"]

GLOBAL = "Global"
"""torch's name for what encloses every module."""


class Position(NamedTuple):
    """The module at work, and in which pass."""

    module: str
    is_backward: bool
    is_recompute: bool


class _Call(NamedTuple):
    module: str
    graph_task: int


class _Thread(threading.local):
    def __init__(self) -> None:
        self.calls: list[_Call] = []
        self.task = NO_GRAPH_TASK
        self.caller = 0  # the thread that called backward `task`


@final
class Positions:
    """A watcher of module calls, to be told of each after `calls` was."""

    def __init__(self, names: ModuleNames, calls: ModuleCalls) -> None:
        self._names = names
        self._calls = calls
        self._thread = _Thread()

    def enter(self, _: nn.Module) -> None:
        """`calls` knows the module by now."""
        call = _Call(self._name(self._calls.running()), current_graph_task())
        self._thread.calls.append(call)

    def exit(self, _: nn.Module) -> None:
        """The innermost call on this thread has ended."""
        calls = self._thread.calls
        if calls:  # a call that began before we watched ends without one
            calls.pop()

    def running(self) -> list[str]:
        """The modules called on this thread, outermost first."""
        return [call.module for call in self._thread.calls]

    def current(self) -> Position:
        """Where this thread is."""
        task = current_graph_task()
        calls = self._thread.calls
        is_backward = task != NO_GRAPH_TASK
        if calls and calls[-1].graph_task == task:
            return Position(calls[-1].module, is_backward, is_backward)
        if not is_backward:
            return Position(GLOBAL, False, False)
        function = find_recomputed(sys._getframe())
        module = method_owner(function)
        index = self._worker(task) if module is None else self._names.find(module)
        return Position(self._name(index), True, function is not None)

    def _worker(self, task: int) -> int:
        """The module whose backward is at work, or whose checkpointed function is recomputed."""
        node = current_node()
        if node is None:  # a callback at the end of backward
            return NO_MODULE
        maker = self._maker(node, task)
        if maker == NO_MODULE:  # perhaps made as a function of some module's was recomputed
            makers = (self._maker(node, task) for node in reentrant_nodes(sys._getframe()))
            maker = next((maker for maker in makers if maker != NO_MODULE), NO_MODULE)
        return maker

    def _maker(self, node: Any, task: int) -> int:
        origin = node_origin(node)
        if isinstance(origin, torch.Tensor):
            return self._names.owner_of(origin)
        caller = self._caller(task)
        reached = next_sequence_number() if caller == threading.get_ident() else None
        maker = self._calls.maker_of(origin, caller, reached=reached)
        return NO_MODULE if maker is None else maker

    def _caller(self, task: int) -> int:
        """The thread that called backward, looked for once in each."""
        thread = self._thread
        if thread.task != task:
            stack = read_stack(sys._getframe())
            if not stack.backward_caller:
                find_backward_caller(stack)
            thread.task, thread.caller = task, stack.backward_caller
        return thread.caller

    def _name(self, index: int) -> str:
        return self._names.name(index) or GLOBAL
