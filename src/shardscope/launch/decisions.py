"""Where a program decides by what only its rank sees, and what to change there.

A site is a line that reads a value, takes a batch, asks for the time, and so on. What a rank sees
there can be changed: so it is run as if its loss were NaN, its batch lacked an entry, or its data
ended earlier than those of other ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from msgspec import Struct

from shardscope._torch.process_groups.collective_inputs import ObjectInput, ValueInput
from shardscope.record import Source

DECISIONS = "decisions.json"
"""How the name of the file ends, in the scratch folder, with the decisions of a job."""


class SiteKind(StrEnum):
    """What a program does at a site."""

    VALUE = "value"  # reads a value of a tensor
    ROWS = "rows"  # selects elements of a tensor, as many as its values say
    BATCH = "batch"  # takes a batch of a data loader
    INPUT = "input"  # calls the model that is trained
    CLOCK = "clock"  # asks for the time
    SIGNAL = "signal"  # handles a signal
    FILE = "file"  # opens a file to read it
    EXISTS = "exists"  # asks whether a file exists
    SEED = "seed"  # seeds a random number generator
    OVERFLOW = "overflow"  # a gradient scaler steps an optimizer


class ChangeKind(StrEnum):
    """What is changed at a site."""

    NAN = "nan"  # the value, or all numbers of the batch
    ZERO = "zero"
    LARGE = "large"
    OPPOSITE = "opposite"  # True for False, and the reverse
    NO_ROWS = "no_rows"
    ALL_ROWS = "all_rows"
    FEWER_ROWS = "fewer_rows"  # one less
    SAME_ROWS = "same_rows"  # all rows are the first
    SHORTER = "shorter"  # sequences
    LONGER = "longer"
    SHORTER_SAMPLES = "shorter_samples"  # sequences, before the program collates them
    LONGER_SAMPLES = "longer_samples"
    WITHOUT = "without"  # an entry of the batch
    END = "end"  # of the data
    LATER = "later"  # than it is, from then on
    RAISED = "raised"  # an exception
    DELIVERED = "delivered"  # the signal
    OTHER = "other"  # seed, or strings of the batch
    FROZEN = "frozen"  # the parameters of a part of the model


class Site(Struct, frozen=True):
    """A line of the program, and what it reads or does there: `item()`, `DataLoader`, `SIGTERM`."""

    kind: SiteKind
    what: str
    source: Source | None = None

    @property
    def place(self) -> str:
        """`train.py:41`, or what happens if the line is not known."""
        return self.what if self.source is None else f"{self.source.file}:{self.source.line}"


class Pass(Struct, frozen=True):
    """One time that a rank came to a site.

    `num_calls` is how many collectives it had issued, `ranks` those that have the same value there
    as far as its own data or random numbers matter; None if nothing of its own does. `is_handled`
    says that the program catches exceptions there, `detail` what there is to change, `has_samples`
    that the program collates samples with sequences itself, `is_in_model` that the model runs
    or its batch is made,
    `has_strings` that the batch has strings, such as the kinds of its samples.
    """

    site: int
    number: int  # of the site's passes
    num_calls: int
    iteration: int  # how often the model was called before
    value: float | None = None
    dtype: str = ""
    ranks: tuple[int, ...] | None = None
    sources: tuple[str, ...] = ()
    is_handled: bool = False
    detail: tuple[str, ...] = ()
    has_samples: bool = False
    is_in_model: bool = False
    has_strings: bool = False


class Change(Struct, frozen=True, kw_only=True):
    """What to change where `ranks` come to a site for the time `number`, counted from 0.

    With `is_repeated`, also at all further passes in the same iteration.
    """

    site: Site
    number: int
    kind: ChangeKind
    ranks: tuple[int, ...]
    detail: str = ""
    is_repeated: bool = False


class Exchange(Struct, frozen=True):
    """The bytes that a rank's all-to-all sends to each member of the group, and expects of each.

    `order` is that of the collective among all of the rank.
    """

    order: int
    sent: tuple[int, ...]
    received: tuple[int, ...]


class Excess(Struct, frozen=True):
    """A rank sends other than the receiver expects in an all-to-all; sizes are in bytes."""

    sender: int
    receiver: int
    num_sent: int
    num_expected: int


def find_excess(
    first: Exchange, second: Exchange, ranks: tuple[int, int], members: Sequence[int]
) -> Excess | None:
    """Where two ranks of a group expect other than is sent; None if they agree, or are unknown."""
    ways = ((first, second, ranks), (second, first, ranks[::-1]))
    for sending, receiving, (sender, receiver) in ways:
        sent = dict(zip(members, sending.sent, strict=False)).get(receiver)
        expected = dict(zip(members, receiving.received, strict=False)).get(sender)
        if sent is not None and expected is not None and sent != expected:
            return Excess(sender, receiver, sent, expected)
    return None


class Decisions(Struct, frozen=True, kw_only=True):
    """What a rank has decided by: its sites and passes, what it drew and loaded, what was changed.

    `data` and `random` are hashes of all tensors that were data or random numbers until the end of
    each step, and until the end of the program; `num_values` is how many different values the data
    has, up to a limit. `changed` maps the index of a change to the number of collectives that the
    rank had issued before it. `num_flops` and `num_bytes` are those of the results of all ops, of a
    rank without data. `batches` are the labels of batches by their
    content. `unawaited` are the orders of collectives whose calls return at once.
    """

    rank: int
    sites: tuple[Site, ...]
    passes: tuple[Pass, ...]
    data: tuple[str, ...] = ()
    random: tuple[str, ...] = ()
    num_values: int = 0
    changed: dict[int, int] = {}
    num_steps: int = 0
    num_flops: int = 0
    num_bytes: int = 0
    inputs: tuple[ValueInput, ...] = ()
    object_inputs: tuple[ObjectInput, ...] = ()
    batches: frozenset[str] = frozenset()
    exchanges: tuple[Exchange, ...] = ()
    unawaited: tuple[int, ...] = ()
