"""Whether a launcher such as torchrun started this process, as which of how many."""

from __future__ import annotations

import os

# What torch.distributed needs to meet the others; RANK alone may be left over from anything.
_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def is_launched() -> bool:
    """Whether torchrun, or something like it, started this process as one of several."""
    numbers = (os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE"))
    return all(os.environ.get(name) for name in _NEEDED) and all(map(str.isdecimal, numbers))


def launched_rank() -> int:
    """This process's rank, as it was launched."""
    return int(os.environ["RANK"])


def num_launched() -> int:
    """How many processes were launched."""
    return int(os.environ["WORLD_SIZE"])


def is_first() -> bool:
    """Whether this process speaks for all: it is rank 0, or there are no others."""
    return not is_launched() or launched_rank() == 0
