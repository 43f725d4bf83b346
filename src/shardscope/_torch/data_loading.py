"""The batches that data loaders yield to a program."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from torch.utils.data import IterableDataset, default_collate

from shardscope._torch.private import find_class

_LoaderIterator = find_class(
    "torch.utils.data.dataloader._BaseDataLoaderIter", "compare the batches of data loaders"
)


@contextmanager
def watched_batches(take: Callable[[Callable[[], Any]], Any]) -> Iterator[None]:
    """Let `take` draw each batch of a data loader until the context ends.

    It is called with a function that draws the loader's own next batch, and returns what the
    program gets.
    """
    draw = getattr(_LoaderIterator, "__next__", None)
    if draw is None:
        yield
        return

    @functools.wraps(draw)
    def draw_next(iterator: Any) -> Any:
        return take(functools.partial(draw, iterator))

    with mock.patch.object(_LoaderIterator, "__next__", draw_next):
        yield


def describe_batches(draw: Any) -> str:
    """What a loader draws from, and whether it knows how many batches there are.

    `draw` is what `watched_batches` calls `take` with.
    """
    dataset = getattr(draw.args[0], "_dataset", None)
    name = type(dataset).__name__
    is_endless = isinstance(dataset, IterableDataset)
    return f"DataLoader of the iterable {name}" if is_endless else f"DataLoader of {name}"


def is_list_of_samples(draw: Any, batch: Any) -> bool:
    """Whether a batch is a list with an entry for each sample; torch's own collation makes none."""
    collate = getattr(draw.args[0], "_collate_fn", None)
    return isinstance(batch, list) and collate is not default_collate
