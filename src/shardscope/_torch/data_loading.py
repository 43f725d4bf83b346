"""The batches that data loaders yield to a program."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, final
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


@final
class RecordedFetch:
    """How a loader makes a batch in this process: the indices of the samples, and the samples.

    `samples` is None unless the program collates samples itself, or there is one in a batch:
    torch's own function makes batches of samples of one shape only.
    """

    def __init__(self, fetcher: Any) -> None:
        self._fetch = fetcher.fetch
        self._collate = fetcher.collate_fn
        self.is_single: bool = not fetcher.auto_collation
        self.indices: Any = None
        self.samples: list[Any] | None = None

    def fetch(self, indices: Any) -> Any:
        """Called for the loader's own function, which it calls."""
        self.indices = indices
        return self._fetch(indices)

    def collate_samples(self, samples: Any) -> Any:
        """Called for the program's function, which it calls."""
        self.samples = [samples] if self.is_single else list(samples)
        return self._collate(samples)

    def collate(self, samples: list[Any]) -> Any:
        """The batch of other samples."""
        return self._collate(samples[0] if self.is_single else samples)


@contextmanager
def recorded_fetch(draw: Any) -> Iterator[RecordedFetch | None]:
    """Record how a loader makes its next batch, until the context ends.

    `draw` is what `watched_batches` calls `take` with. None if worker processes make the batch.
    """
    fetcher = getattr(draw.args[0], "_dataset_fetcher", None)
    if fetcher is None:
        yield None
        return
    recorded = RecordedFetch(fetcher)
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(fetcher, "fetch", recorded.fetch))
        if recorded.is_single or fetcher.collate_fn is not default_collate:
            replaced = mock.patch.object(fetcher, "collate_fn", recorded.collate_samples)
            stack.enter_context(replaced)
        yield recorded


def is_list_of_samples(draw: Any, batch: Any) -> bool:
    """Whether a batch is a list with an entry for each sample; torch's own collation makes none."""
    collate = getattr(draw.args[0], "_collate_fn", None)
    is_collated = getattr(draw.args[0], "_auto_collation", False)
    return isinstance(batch, list) and is_collated and collate is not default_collate
