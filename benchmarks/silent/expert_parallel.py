"""Expert parallelism of the decoder's experts: tokens travel to the ranks of their experts."""

from __future__ import annotations

import torch
import torch.distributed as dist
from benchmarks.silent.correct_by_hand import AllToAll, Group, keep_part
from benchmarks.silent.decoder import GroupedExperts
from torch import Tensor, nn


class TokenDispatcher:
    """Sends the sorted tokens of this rank to the experts' ranks, and their results back."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.splits: tuple[list[int], list[int]] = [], []
        self.order = torch.zeros(0)

    def send(self, _: nn.Module, inputs: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Before the experts: the tokens for those of this rank, from all ranks, sorted."""
        tokens, counts = inputs
        size = dist.get_world_size(self.group)
        counts_here = torch.empty_like(counts)  # by rank, and by expert of this rank
        dist.all_to_all_single(counts_here, counts, group=self.group)
        per_rank = counts.view(size, -1).sum(1).tolist()
        per_source = counts_here.view(size, -1).sum(1).tolist()
        self.splits = per_rank, per_source
        received = AllToAll.apply(tokens, per_rank, per_source, self.group)
        num_local = len(counts) // size
        experts = torch.arange(num_local).repeat(size).repeat_interleave(counts_here)
        self.order = experts.argsort(stable=True)
        return received[self.order], counts_here.view(size, -1).sum(0)

    def send_back(self, _: nn.Module, __: object, results: Tensor) -> Tensor:
        """After the experts: the results of this rank's tokens, in the order they had."""
        unsorted = torch.empty_like(results).index_copy(0, self.order, results)
        per_rank, per_source = self.splits
        sent: Tensor = AllToAll.apply(unsorted, per_source, per_rank, self.group)
        return sent


def distribute_experts(experts: GroupedExperts, group: Group) -> None:
    """Keep this rank's experts, and exchange tokens before and after them."""
    for name in ("w1", "w2", "w3"):
        keep_part(experts, name, 0, group)
    dispatcher = TokenDispatcher(group)
    experts.register_forward_pre_hook(dispatcher.send)
    experts.register_forward_hook(dispatcher.send_back)
