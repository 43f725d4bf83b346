"""Pipeline stages that have no neighbours to ask: a simulated stage goes by what it was told.

Before the first step, stages vote on whether all of them know their shapes, and if not send them
along. Nothing arrives in a simulated world, so a stage takes the others to have voted as it does.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.distributed.pipelining import PipelineStage

from shardscope.errors import WorldError

__all__ = ["lonely_stages"]


@contextmanager
def lonely_stages() -> Iterator[None]:
    """Let pipeline stages start without their neighbours until the context ends."""
    with ExitStack() as stack:
        # torch before 2.13 asks no neighbour for the shapes of a stage that was given them.
        for name, wrap in (
            ("_warmup_forward_vote", _vote_alone),
            ("_warmup_backward_result", _vote_alone),
            ("_recv_meta", _refuse_to_ask),
        ):
            original = getattr(PipelineStage, name, None)
            if original is not None:
                _replace(stack, name, wrap(original))
        yield


def _replace(stack: ExitStack, name: str, function: Any) -> None:
    holder = next(cls for cls in PipelineStage.__mro__ if name in vars(cls))
    stack.callback(setattr, holder, name, vars(holder)[name])
    setattr(holder, name, function)


def _vote_alone(original: Any) -> Any:
    def vote(stage: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        result = original(stage, *args, **kwargs)
        is_told = stage._user_meta.is_complete_for_forward()
        return torch.tensor([int(is_told)], dtype=result.dtype, device=result.device)

    return vote


def _refuse_to_ask(_: Any) -> Any:
    def receive(stage: Any, source: int) -> Any:
        wanted = "inputs" if source < stage.stage_index else "gradients"
        raise WorldError(
            f"Pipeline stage {stage.stage_index} asks stage {source} for the shapes of its "
            f"{wanted}, and in a simulated world nobody answers. Give PipelineStage its "
            "input_args and output_args (tensors on meta will do, with requires_grad=True where "
            "gradients flow back)."
        )

    return receive
