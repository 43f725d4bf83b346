"""A bar on the terminal: what is being done, how much of the budget is used, what is left."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

__all__ = ["Teller", "shown_progress"]


@final
class Teller:
    """Is told what is being done, and shows it where somebody looks."""

    def __init__(self, progress: Progress | None, budget: int) -> None:
        self._progress = progress
        self._budget = budget
        self._task: TaskID | None = None
        if progress is not None:
            self._task = progress.add_task("starting", total=budget, left="")
        self._num_queries = 0
        self._began = time.monotonic()

    def doing(self, what: str) -> None:
        """Say what is being done now."""
        self._update(description=what)

    def asked(self, num_queries: int) -> None:
        """Say how often the backend has been called."""
        self._num_queries = num_queries
        self._update(completed=num_queries)

    def expect(self, num_left: int) -> None:
        """Say how many more calls the search expects."""
        pace = (time.monotonic() - self._began) / max(1, self._num_queries)
        total = min(self._budget, self._num_queries + num_left)
        self._update(total=total, left=f"about {pace * num_left:,.0f} s left")

    def _update(self, **changes: object) -> None:
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, **changes)  # type: ignore[arg-type]


@contextmanager
def shown_progress(budget: int) -> Iterator[Teller]:
    """A bar on standard error, if that is a terminal, for as long as the context lasts."""
    # Importing rich draws a random number, so that it waits until random state is preserved.
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield Teller(None, budget)
        return
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=20),
        TextColumn("{task.completed:.0f} of at most {task.total:.0f} compilations"),
        TextColumn("{task.fields[left]}", style="dim"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        yield Teller(progress, budget)
