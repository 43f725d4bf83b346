"""One rank's program and its tensors, to be called as the model was."""

from __future__ import annotations

from typing import Any, final

import torch
from torch import nn
from torch.export import ExportedProgram

from shardscope.parallel.flow import Flow
from shardscope.parallel.layouts import Seat
from shardscope.parallel.running.function import write_function
from shardscope.parallel.running.inputs import Inputs
from shardscope.parallel.running.results import Results
from shardscope.parallel.running.state import State

__all__ = ["RankModule"]


@final
class RankModule(nn.Module):
    """Has the rank's share of parameters and buffers under the model's names.

    It computes no gradients: those of collectives depend on what follows them. A program that is
    made for training has a module that does.
    """

    def __init__(
        self, source: ExportedProgram, flow: Flow, exported: ExportedProgram, seat: Seat
    ) -> None:
        super().__init__()
        self._program = _Program(self, source, flow, exported, seat)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the model returns, of this rank's inputs."""
        if not torch.is_grad_enabled():
            return self._program.call(args, kwargs)
        with torch.no_grad():
            return self._program.call(args, kwargs)


@final
class _Program:
    """All that a call needs, under one name of the module: the others are the model's."""

    def __init__(
        self,
        root: nn.Module,
        source: ExportedProgram,
        flow: Flow,
        exported: ExportedProgram,
        seat: Seat,
    ) -> None:
        roles = [role for _, role in flow.inputs]
        graph_module = exported.graph_module
        function = write_function(graph_module, is_input=[one.kind == "input" for one in roles])
        self._run = function.run
        self._inputs = Inputs(source, flow, seat)
        self._results = Results(source, flow)
        self._state = State(
            root, exported.state_dict, {**exported.constants, **function.attributes}
        )
        names = [role.name for role in roles if role.kind != "input"]
        self._state.arrange([*names, *function.attributes])

    def call(self, args: Any, kwargs: Any) -> Any:
        inputs = self._inputs.take(args, kwargs)
        state = self._state.values()
        return self._results.give(self._run(state, inputs), state, inputs)
