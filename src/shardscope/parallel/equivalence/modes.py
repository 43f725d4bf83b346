"""The modes, training or evaluation, that modules are called in, where results depend on them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import final

from torch import nn

_DROPOUT = (
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
    nn.AlphaDropout,
    nn.FeatureAlphaDropout,
)


@final
@dataclass(frozen=True)
class ModuleMode:
    """The modes in which a module is called with gradients in a step: True for training.

    Of `is_random` modules only the random numbers depend on it, so that no result shows it.
    """

    modes: frozenset[bool]
    is_random: bool = False


def depends_on_mode(module: nn.Module) -> bool:
    """Whether what a module computes can depend on `module.training`."""
    if type(module).__module__.startswith("torch."):
        is_norm = getattr(module, "track_running_stats", None) is True
        return is_norm or isinstance(module, nn.RReLU) or draws_in_training(module)
    return draws_in_training(module) or _reads_mode(type(module))


def draws_in_training(module: nn.Module) -> bool:
    """Whether a module is one of torch's that drops elements in training."""
    if isinstance(module, _DROPOUT):
        return module.p > 0
    return isinstance(module, nn.RNNBase | nn.MultiheadAttention) and module.dropout > 0


def _reads_mode(kind: type[nn.Module]) -> bool:
    """Whether a method of the user's class of modules mentions `training`."""
    functions = (
        value
        for base in kind.__mro__
        if not base.__module__.startswith("torch.")
        for value in vars(base).values()
        if isinstance(value, FunctionType)
    )
    return any("training" in function.__code__.co_names for function in functions)


def list_differing(
    reference: Mapping[str, ModuleMode], ranks: Sequence[Mapping[str, ModuleMode]]
) -> Iterator[tuple[str, bool, list[bool]]]:
    """Modules whose modes differ, with the single device's mode and that of each rank.

    They differ if ranks have no mode in common; or, where only random numbers depend on it, the
    ranks and the single device. A rank that does not call the module counts like the others.
    """
    for name in dict.fromkeys(name for rank in ranks for name in rank):
        known = [rank[name] for rank in ranks if name in rank]
        single = reference.get(name)
        compared = [*known, single] if single is not None and known[0].is_random else known
        if frozenset.intersection(*(mode.modes for mode in compared if mode is not None)):
            continue
        right = True if single is None else True in single.modes
        yield (
            name,
            right,
            [
                right if name not in rank or right in rank[name].modes else not right
                for rank in ranks
            ],
        )
