"""Set-up of pipeline stages in a simulated world, where no message of another stage arrives.

Before the first step, stages vote on whether all of them have static shapes, and if not exchange
shapes. A simulated stage assumes that the others vote as it does. The collectives of this set-up
are issued and recorded, because real ranks issue them too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, final
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as pipeline_schedules
from torch.overrides import TorchFunctionMode

from shardscope._torch.fakes import is_fake
from shardscope.errors import WorldError

__all__ = ["lonely_stages"]

# torch 2.14 and newer skip the set-up in a group whose backend is called "fake".
_NOT_FAKE = "simulated"


@contextmanager
def lonely_stages() -> Iterator[None]:
    """Let pipeline stages set up without messages of their neighbours until the context ends."""
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
    """Returns this rank's own vote for `.item()` of a vote without data."""

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


def _no_answer(stage: Any, source: int, wanted: str) -> WorldError:
    return WorldError(
        f"Pipeline stage {stage.stage_index} infers the shapes of its {wanted} from stage "
        f"{source}, which does not run in a simulated world. Pass input_args and output_args to "
        "PipelineStage (meta tensors suffice, with requires_grad=True where gradients flow back)."
    )
