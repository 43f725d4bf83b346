"""Several small programs as one: most of what a small one takes, it takes once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

from torch import Tensor, nn

from parallel_cases.case import Case

__all__ = ["group", "together"]

_NUM_CASES = 8


class Each(nn.Module):
    """The results of all models on one input."""

    def __init__(self, models: Iterable[nn.Module]) -> None:
        super().__init__()
        self.models = nn.ModuleList(models)

    def forward(self, x: Tensor) -> list[object]:
        return [model(x) for model in self.models]


def together(cases: Sequence[Case]) -> Case:
    """One case of cases that are called and cut alike; none has parameters of another."""
    first = cases[0]
    plan = {
        f"models.{index}.{name}": style
        for index, case in enumerate(cases)
        for name, style in case.plan.items()
    }
    return Case(
        " & ".join(case.name for case in cases),
        lambda: Each(case.make() for case in cases),
        first.give,
        plan,
        mesh=first.mesh,
        runs=first.runs,
        trains=first.trains,
        by_hand=False,
    )


def group(cases: Iterable[Case]) -> Iterator[list[Case]]:
    """Cases that can be put together; those that draw numbers stay alone."""

    def kind(case: Case) -> tuple[bool, str, tuple[int, ...], str]:
        (given,), _ = case.given()
        return case.trains, case.mesh, tuple(given.shape), case.name if case.is_random else ""

    for _, alike in groupby(sorted(cases, key=kind), kind):
        left = list(alike)
        while left:
            yield left[:_NUM_CASES]
            del left[:_NUM_CASES]
