"""Which values of which training steps a trace samples."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from shardscope.errors import TraceError
from shardscope.record.patterns import matches_inside


@dataclass(frozen=True, kw_only=True)
class ValueSamples:
    """Which values a trace samples.

    Args:
        steps: The training steps, counted from 1; None means every step.
        outputs: Inputs of the model, outputs of every module call, and their gradients.
        gradients: Gradients of parameters, before and after clipping.
        parameters: Parameters before and after the step, and buffers.
        modules: A pattern; only matching modules, their children and parameters are sampled.

    Examples:
        >>> trace(model, values=ValueSamples(steps=range(1, 100, 10), modules="layers.*"))
    """

    steps: Collection[int] | None = None
    outputs: bool = True
    gradients: bool = True
    parameters: bool = True
    modules: str = "**"

    def includes(self, name: str) -> bool:
        """Whether a module or parameter of this name is sampled."""
        return self.modules == "**" or matches_inside(self.modules, name)


Values = bool | int | Collection[int] | ValueSamples | None


def read_samples(values: Values) -> ValueSamples | None:
    """What the argument `values` of `trace` means: None if nothing is sampled."""
    if values is None or values is False:
        return None
    if isinstance(values, ValueSamples):
        return values
    if values is True:
        return ValueSamples()
    steps = [values] if isinstance(values, int) else values
    if not isinstance(steps, Collection) or not all(
        isinstance(step, int) and step > 0 for step in steps
    ):
        raise TraceError(
            f"trace() got values={values!r:.60}. Give True, a training step counted from 1, "
            "several such as range(1, 11), or ValueSamples(steps=…, modules=…)."
        )
    return ValueSamples(steps=frozenset(steps))
