"""Running a fragment step by step, on copies of everything that it could change."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from contextlib import ExitStack
from types import TracebackType
from typing import Any, final

import torch
from torch import fx, nn

from shardscope.compile.diagnose.cutting.units import Switches, split_into_steps
from shardscope.compile.diagnose.cutting.values import copy_tensor, tensors_in
from shardscope.compile.diagnose.fragment import Fragment
from shardscope.compile.diagnose.judging.copies import copy_inputs
from shardscope.compile.diagnose.leaves import make_computed

__all__ = ["EagerRun", "copy_state"]


@final
class EagerRun:
    """A run under way. Random numbers come from `seed`; the generators are put back afterwards."""

    def __init__(self, fragment: Fragment, *, seed: int) -> None:
        graph = fragment.graph.graph
        self.steps = split_into_steps(graph)
        self._has_grad = fragment.with_gradients
        self._seed = seed
        self._switches = Switches(self.steps)
        self._num_done = 0
        self._last_uses = self._find_last_uses()
        self._cleanup = ExitStack()
        self._devices = {one.device.index for one in tensors_in(fragment.inputs) if one.is_cuda}
        self._interpreter = _Interpreter(fragment)
        self.values: dict[fx.Node, Any] = self._interpreter.env

    def __enter__(self) -> EagerRun:
        self._cleanup.enter_context(torch.random.fork_rng(devices=sorted(self._devices)))
        self._cleanup.enter_context(torch.set_grad_enabled(self._has_grad))
        torch.manual_seed(self._seed)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with self._cleanup:
            # A run that ends halfway has turned on what later steps turn off.
            for nodes in self.steps[self._num_done :]:
                if nodes[0] in self._switches:
                    self._run(nodes)

    def execute(self, nodes: tuple[fx.Node, ...]) -> None:
        """Run the next step."""
        assert nodes == self.steps[self._num_done]
        self._num_done += 1
        self._run(nodes)

    def _run(self, nodes: Iterable[fx.Node]) -> None:
        for node in nodes:
            self.values[node] = self._interpreter.run_node(node)

    def forget(self) -> None:
        """Let go of what no later step reads."""
        for node in self._last_uses.get(self._num_done - 1, ()):
            self.values.pop(node, None)

    def _find_last_uses(self) -> dict[int, list[fx.Node]]:
        last: dict[fx.Node, int] = {}
        for index, nodes in enumerate(self.steps):
            for node in nodes:
                last[node] = index
                last.update(dict.fromkeys(node.all_input_nodes, index))
        by_step: dict[int, list[fx.Node]] = {}
        for node, index in last.items():
            by_step.setdefault(index, []).append(node)
        return by_step


@final
class _Interpreter(fx.Interpreter):
    """Has the inputs and the attributes of a graph, and has run nothing yet."""

    def __init__(self, fragment: Fragment) -> None:
        graph = fragment.graph.graph
        super().__init__(fragment.graph, garbage_collect_values=False, graph=graph)
        self._state = copy_state(fragment.graph, graph.nodes)
        with torch.set_grad_enabled(fragment.with_gradients):
            self.args_iter = iter([_leave_leaf(one) for one in copy_inputs(fragment.inputs)])
        for node in graph.nodes:
            if node.op in ("placeholder", "get_attr"):
                self.env[node] = self.run_node(node)

    def fetch_attr(self, target: str) -> Any:
        """The copy of what a node names."""
        return self._state[target]


def _leave_leaf(value: Any) -> Any:
    """A program may write to what came out of another op, but not to a leaf: so it is none."""
    needs_gradient = isinstance(value, torch.Tensor) and value.requires_grad
    return make_computed(value) if needs_gradient and torch.is_grad_enabled() else value


def copy_state(root: nn.Module, nodes: Iterable[fx.Node]) -> dict[str, Any]:
    """What these nodes name of a module; copied if running the graph could change it."""
    targets = [str(node.target) for node in nodes if node.op in ("get_attr", "call_module")]
    return {target: _copy(_find(root, target)) for target in targets}


def _find(root: nn.Module, target: str) -> Any:
    found: Any = root
    for name in target.split("."):
        found = getattr(found, name)
    return found


def _copy(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return copy_tensor(value).requires_grad_(value.requires_grad)
    # The bodies of higher-order ops have no state of their own, and may not be copyable.
    has_state = isinstance(value, nn.Module) and bool(value.state_dict())
    return copy.deepcopy(value) if has_state else value
