"""Reports when a program waits for a send or receive that it has issued without waiting.

`isend`, `irecv` and `batch_isend_irecv` return work; the program waits for it later, and only then
depends on the other rank.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch.distributed import distributed_c10d


@contextmanager
def awaited_transfers(
    count_issued: Callable[[], int], wait_for: Callable[[int], None]
) -> Iterator[None]:
    """Call `wait_for` before the program waits for a send or receive, until the context ends.

    It gets its number among all collectives; `count_issued` returns how many have been issued.
    """
    pending: dict[int, tuple[Any, int]] = {}  # by id of the work, which is kept alive

    def watch(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def issue(*args: Any, **kwargs: Any) -> Any:
            first = count_issued()
            result = function(*args, **kwargs)
            works = result if isinstance(result, list) else [result]
            if count_issued() - first == len(works):
                pending.update({id(work): (work, first + i) for i, work in enumerate(works)})
            return result

        return issue

    wait: Any = dist.Work.wait

    def wait_watched(work: Any, *args: Any, **kwargs: Any) -> Any:
        known = pending.pop(id(work), None)
        if known is not None:
            wait_for(known[1])
        return wait(work, *args, **kwargs)

    with ExitStack() as stack:
        for name in ("isend", "irecv", "batch_isend_irecv"):
            watched = watch(getattr(distributed_c10d, name))
            for owner in (dist, distributed_c10d):
                stack.enter_context(mock.patch.object(owner, name, watched))
        stack.callback(setattr, dist.Work, "wait", wait)
        setattr(dist.Work, "wait", wait_watched)  # noqa: B010 - mypy has it otherwise
        yield
