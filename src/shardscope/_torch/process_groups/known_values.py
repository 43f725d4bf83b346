"""Values that stay known across collectives whose ranks run one after the other.

A rank that runs alone does not see what the others send. Where the inputs of a collective have
known values, as a flag or a count has, the other ranks are taken to have the same; unless their
inputs are known from an earlier run, in which they were noted as `Post`s.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, final

import torch
import torch.distributed as dist

from shardscope._torch.collectives.events import CollectiveEvent
from shardscope._torch.collectives.schema import reduce_op_name, tensors_in
from shardscope._torch.dispatch import disable_dispatch_modes
from shardscope._torch.fake import FakeTensor
from shardscope._torch.process_groups.collective_inputs import (
    GroupInputs,
    GroupKey,
    ObjectInput,
    ValueInput,
)
from shardscope._torch.process_groups.collective_semantics import (
    CollectiveRequest,
    collective_results,
)
from shardscope._torch.process_groups.host_data import copy_mark, set_constant
from shardscope.errors import CollectiveError

_MAX_VALUES = 64  # of a tensor that is noted


@final
class KnownValues:
    """Keeps values known across collectives; other ranks' inputs are those of `set_inputs`."""

    def __init__(self) -> None:
        self.inputs: list[ValueInput] = []
        self.object_inputs: list[ObjectInput] = []
        self._group_values: dict[tuple[GroupKey, int], GroupInputs] = {}
        self._group_objects: dict[tuple[GroupKey, int], GroupInputs] = {}
        self._object_numbers: Counter[GroupKey] = Counter()
        self._before = threading.local()
        self._keys: dict[int, GroupKey] = {}  # by id of the group
        self._numbers: Counter[GroupKey] = Counter()
        self._counts: Counter[tuple[int, int]] = Counter()  # of groups, by size and stride

    def set_inputs(self, group_inputs: Iterable[GroupInputs]) -> None:
        """Learn what the members of groups give to some of their collectives."""
        for inputs in group_inputs:
            known = self._group_objects if inputs.objects else self._group_values
            known[inputs.group, inputs.number] = inputs

    def exchange_objects(self, group: Any, content: bytes) -> Sequence[bytes] | None:
        """Note what this rank gives; returns what each member gives, if that is known."""
        key = self._find_key(group)
        number = self._object_numbers[key]
        self._object_numbers[key] += 1
        self.object_inputs.append(ObjectInput(key, number, content))
        inputs = self._group_objects.get((key, number))
        return None if inputs is None else inputs.objects

    def before(self, event: CollectiveEvent) -> None:
        """Note the known values: a collective that writes to a tensor clears them."""
        known: dict[int, torch.Tensor] = {}
        for single in event.singles():
            call = single.read()
            key = self._find_key(call.group)
            number = self._numbers[key]
            self._numbers[key] += 1
            constants = [_find_constant(tensor) for tensor in call.inputs]
            known |= {
                id(tensor): constant
                for tensor, constant in zip(call.inputs, constants, strict=True)
                if constant is not None
            }
            self._before.place = key, number
            if constants and all(c is not None and c.numel() <= _MAX_VALUES for c in constants):
                noted = _note_values(key, number, single, constants)
                if all(map(math.isfinite, itertools.chain.from_iterable(noted.values))):
                    self.inputs.append(noted)  # JSON has no others
        self._before.values = known

    def amend(self, event: CollectiveEvent, result: Any) -> Any:
        """Set the values of the outputs."""
        known: dict[int, torch.Tensor] = getattr(self._before, "values", {})
        call = event.read()
        outputs = call.outputs
        if outputs is None:  # a functional collective, or one that overwrites its input
            outputs = tensors_in(result) if not event.op.startswith("c10d.") else call.inputs
        layout = event.layout.reduce_op
        is_sum = layout is not None and reduce_op_name(event.args[layout]) == "sum"
        with disable_dispatch_modes():
            if self._set_outputs(event, outputs):
                return result
            for index, output in enumerate(outputs):
                source = call.inputs[index % len(call.inputs)] if call.inputs else None
                constant = known.get(id(source))
                if source is not output and isinstance(output, FakeTensor):
                    copy_mark(source, output)
                if constant is not None and isinstance(output, FakeTensor):
                    values = constant * call.group.size() if is_sum else constant
                    _set_values(output, values)
        return result

    def _set_outputs(self, event: CollectiveEvent, outputs: Sequence[torch.Tensor]) -> bool:
        """Compute the outputs from the inputs of all ranks, if they are known."""
        place: tuple[GroupKey, int] | None = getattr(self._before, "place", None)
        inputs = None if place is None else self._group_values.get(place)
        if inputs is None:
            return False
        call = event.read()
        dtype = (call.inputs or outputs)[0].dtype
        layout = event.layout.reduce_op
        reduction = "" if layout is None else reduce_op_name(event.args[layout]) or ""
        shapes = [tensor.shape for tensor in call.inputs]
        requests = [
            CollectiveRequest(
                str(call.kind),
                [
                    torch.tensor(values, dtype=dtype).view(shape)
                    for values, shape in zip(own, shapes, strict=False)
                ],
                root=call.peer or 0,
                reduction=reduction.upper(),
            )
            for own in inputs.values
        ]
        try:
            results = collective_results(requests)[dist.get_rank(call.group)]
        except (CollectiveError, KeyError, RuntimeError):
            return False  # the ranks do not issue the same, which is found elsewhere
        if len(results) > len(outputs):  # gathered into one tensor
            results = [torch.cat([part.reshape(-1) for part in results])]
        for output, values in zip(outputs, results, strict=False):
            _set_output(output, values)
        return True

    def _find_key(self, group: Any) -> GroupKey:
        key = self._keys.get(id(group))
        if key is None:
            ranks = dist.get_process_group_ranks(group)
            stride = ranks[1] - ranks[0] if len(ranks) > 1 else 1
            shape = (len(ranks), stride)
            key = self._keys[id(group)] = GroupKey(*shape, self._counts[shape])
            self._counts[shape] += 1
        return key


def _find_constant(tensor: torch.Tensor) -> torch.Tensor | None:
    """The values of a tensor without data, or of a small one with data; None if not known."""
    if isinstance(tensor, FakeTensor):
        return tensor.constant  # type: ignore[no-any-return]
    return tensor.detach() if type(tensor) is torch.Tensor and not tensor.is_meta else None


def _note_values(
    key: GroupKey, number: int, event: CollectiveEvent, constants: Sequence[torch.Tensor | None]
) -> ValueInput:
    call = event.read()
    layout = event.layout.reduce_op
    with disable_dispatch_modes():
        values = tuple(tuple(map(float, c.flatten().tolist())) for c in constants if c is not None)
    return ValueInput(
        key,
        number,
        str(call.kind),
        "" if layout is None else reduce_op_name(event.args[layout]) or "",
        call.peer or 0,
        values,
    )


def _set_values(output: Any, values: torch.Tensor) -> None:
    """Set what is known of an output: as many copies of the input as it has room for."""
    if values.numel() and not output.numel() % values.numel():
        copies = values.reshape(-1).repeat(output.numel() // values.numel())
        set_constant(output, copies.view(tuple(output.shape)))


def _set_output(output: Any, values: torch.Tensor) -> None:
    if output.numel() != values.numel():
        return
    if isinstance(output, FakeTensor):
        set_constant(output, values.view(tuple(output.shape)))
    else:
        with torch.no_grad():
            output.copy_(values.view(output.shape))
