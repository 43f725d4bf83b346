"""Set-up of pipeline stages without messages from other stages; meshes that are compared in
constant time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, final
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as pipeline_schedules
from torch.overrides import TorchFunctionMode

from shardscope._torch.fake import is_fake
from shardscope.errors import WorldError

# torch 2.14 and newer skip the set-up in a group whose backend is called "fake".
_NOT_FAKE = "simulated"


@contextmanager
def isolated_stages() -> Iterator[None]:
    """Set up pipeline stages without messages from their neighbours until the context ends."""
    schedule = pipeline_schedules._PipelineSchedule
    with ExitStack() as stack:
        for owner, name, wrap in (
            (PipelineStage, "_warmup_forward_vote", _vote_alone),  # 2.13 and 2.14
            (PipelineStage, "_warmup_backward_result", _vote_alone),  # 2.13 and 2.14
            (schedule, "_warmup_p2p", _prepare_as_real_ranks_do),  # 2.13 and 2.14
            (schedule, "_initialize_pipeline_distributed_state", _prepare_as_real_ranks_do),  # 2.15
            (PipelineStage, "_recv_meta", _refuse_to_ask),  # 2.13 and newer
            (PipelineStage, "_shape_inference", _refuse_to_infer),  # 2.11 and 2.12
        ):
            original = getattr(owner, name, None)
            if original is not None:
                _replace(stack, owner, name, wrap(original))
        yield


def _replace(stack: ExitStack, owner: type, name: str, function: Any) -> None:
    holder = next(cls for cls in owner.__mro__ if name in vars(cls))
    stack.callback(setattr, holder, name, vars(holder)[name])
    setattr(holder, name, function)


def _vote_alone(original: Any) -> Any:
    def vote(stage: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        result = original(stage, *args, **kwargs)
        has_shapes = stage._user_meta.is_complete_for_forward()
        return torch.tensor([int(has_shapes)], dtype=result.dtype, device=result.device)

    return vote


def _prepare_as_real_ranks_do(original: Any) -> Any:
    def prepare(schedule: Any, stages: Any, *args: Any, **kwargs: Any) -> None:
        _refuse_edge_groups(stages)
        with patch.object(dist, "get_backend", lambda group=None: _NOT_FAKE), _OwnVote():
            original(schedule, stages, *args, **kwargs)

    return prepare


@final
class _OwnVote(TorchFunctionMode):
    """Returns this rank's vote for `.item()` of a fake tensor, which has no data."""

    def __init__(self) -> None:
        super().__init__()
        self._vote = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.tensor:
            (self._vote,) = args[0]
        if func is torch.Tensor.item and is_fake(args[0]):
            return self._vote
        return func(*args, **(kwargs or {}))


def _refuse_edge_groups(stages: Any) -> None:
    for stage in stages:
        if getattr(stage, "p2p_per_edge", False):
            raise WorldError(
                f"Pipeline stage {stage.stage_index} needs one process group per neighbour, which "
                "torch can only split from a group with real connections; a simulated group has "
                "none. Set torch.distributed.config.pipeline_per_edge_p2p to False."
            )


def _refuse_to_ask(_: Any) -> Any:
    def receive(stage: Any, source: int) -> Any:
        raise _no_answer(stage, source, "inputs" if source < stage.stage_index else "gradients")

    return receive


def _refuse_to_infer(original: Any) -> Any:
    def infer(stage: Any, *args: Any, **kwargs: Any) -> Any:
        source = stage.stage_index - 1
        if source >= 0 and stage.stage_index_to_group_rank[source] != stage.group_rank:
            raise _no_answer(stage, source, "inputs")
        return original(stage, *args, **kwargs)

    return infer


def _no_answer(stage: Any, source: int, tensors: str) -> WorldError:
    return WorldError(
        f"Pipeline stage {stage.stage_index} infers the shapes of its {tensors} from stage "
        f"{source}, which does not run in a simulated world. Pass input_args and output_args to "
        "PipelineStage (meta tensors suffice, with requires_grad=True where gradients flow back)."
    )


@final
class _RankMap(tuple[int, ...]):
    """A tuple of ranks that meshes share, so that it is mostly compared with itself."""

    def __eq__(self, value: object) -> bool:
        return self is value or super().__eq__(value)

    def __ne__(self, value: object) -> bool:
        return not self == value

    __hash__ = tuple.__hash__


@contextmanager
def shared_rank_maps() -> Iterator[None]:
    """Make meshes that are created in the context share equal lists of ranks."""
    rank_maps: dict[_RankMap, _RankMap] = {}
    original = DeviceMesh.__init__

    def initialize(mesh: Any, *args: Any, **kwargs: Any) -> None:
        original(mesh, *args, **kwargs)
        flat = getattr(mesh, "_flatten_rank_map", None)
        if flat is not None:
            ranks = _RankMap(flat)
            mesh._flatten_rank_map = rank_maps.setdefault(ranks, ranks)

    setattr(DeviceMesh, "__init__", initialize)  # noqa: B010 - mypy has it otherwise
    try:
        yield
    finally:
        setattr(DeviceMesh, "__init__", original)  # noqa: B010
