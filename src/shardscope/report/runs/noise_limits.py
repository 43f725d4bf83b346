"""How much of a deviation between two runs rounding explains.

A deviation is measured by two figures of the full tensors a and b with n elements: the difference
of their norms, over the norm, and that of their sums, over the norm and the root of n. By the
reverse triangle inequality and that of Cauchy and Schwarz, both are at most |a - b| / |a|, the
relative error of the elements. An error that is independent from element to element moves them by a
root of n less; one that is common to all elements, such as of a scale, moves the norm by all of it.

With u the unit roundoff of the coarsest dtype that the step has used so far, d the number of module
calls before, and w the relative error that the weights have gathered in earlier steps, the limit is

    1e-6  +  4 u  +  (16 u + 8 w) √(1 + d) / √n

of which the first term is the error of our own sums, in float32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import final

_MEASUREMENT = 1e-6
_COMMON = 4.0  # units of roundoff, of a factor that all elements share
_INDEPENDENT = 16.0
_DRIFT = 8.0
_EXACT = 1e-12  # relative, of sums of integers in float64
_SETTING = 1e-6
_MAX_DRIFT = 1.0

# Half the distance from one to the next number.
_ROUNDOFF = {
    "float64": 2.0**-53,
    "float32": 2.0**-24,
    "float16": 2.0**-11,
    "bfloat16": 2.0**-8,
    "complex64": 2.0**-24,
    "complex128": 2.0**-53,
    "float8_e4m3fn": 2.0**-4,
    "float8_e4m3fnuz": 2.0**-4,
    "float8_e5m2": 2.0**-3,
    "float8_e5m2fnuz": 2.0**-3,
}


def find_roundoff(dtype: str) -> float:
    """The unit roundoff of a dtype; 0 for integers."""
    return _ROUNDOFF.get(dtype, 0.0)


@dataclass
class _Update:
    """What tells how far an optimizer can carry the error of one parameter's gradient."""

    num_elements: int
    norm: float
    deviation: float


@final
@dataclass
class NoiseLimits:
    """The limits of the tensors of a run, in the order of execution.

    `least` is a limit from the user, below which no deviation counts.
    """

    least: float = 0.0
    roundoff: float = 0.0  # of the coarsest dtype so far
    drift: float = 0.0  # relative error of the elements of the weights, gathered in earlier steps
    num_calls: int = 0
    _updates: list[_Update] = field(default_factory=list)

    def begin_step(self) -> None:
        """A step begins: what it computes depends on no call before."""
        self.num_calls = 0
        self._updates = []

    def note_dtype(self, *dtypes: str) -> None:
        """Tensors of these dtypes are computed from here on."""
        self.roundoff = max(self.roundoff, *map(find_roundoff, dtypes))

    def note_precision(self, roundoff: float) -> None:
        """Matrix products round their inputs, as TF32 does."""
        self.roundoff = max(self.roundoff, roundoff)

    def for_computed(self, num_elements: int) -> float:
        """The limit of an output, a gradient or a loss."""
        spread = math.sqrt((1 + self.num_calls) / max(1, num_elements))
        independent = (_INDEPENDENT * self.roundoff + _DRIFT * self.drift) * spread
        return max(self.least, _MEASUREMENT + _COMMON * self.roundoff + independent)

    def for_given(self, dtypes: Sequence[str], num_elements: int) -> float:
        """The limit of an input, or of a weight that no step has changed yet."""
        if not any(map(find_roundoff, dtypes)):
            return max(self.least, _EXACT)
        roundoff = max(map(find_roundoff, dtypes)) if len(set(dtypes)) > 1 else 0.0
        spread = _INDEPENDENT / math.sqrt(max(1, num_elements))
        return max(self.least, _MEASUREMENT + roundoff * (1 + spread))

    def for_setting(self) -> float:
        """The limit of a number that the program sets."""
        return max(self.least, _SETTING)

    def for_updated(
        self,
        num_elements: int,
        norm: float,
        *,
        roundoff: float,
        learning_rate: float,
        gradient_noise: float,
        num_steps: int = 1,
        is_scaled: bool = True,
    ) -> float:
        """The limit of a parameter after `num_steps` steps of an optimizer.

        Args:
            num_elements: Of the parameter.
            norm: Of the parameter.
            roundoff: The unit roundoff of its dtype.
            learning_rate: The most by which a step changes an element, if `is_scaled`.
            gradient_noise: The relative error of the elements of the gradient, at most 1.
            num_steps: How many steps were made since parameters were last compared.
            is_scaled: Whether the optimizer divides by the size of the gradient, as Adam does.
                Elements whose gradient is all noise then move by up to the learning rate in either
                direction: a share of the elements that is about `gradient_noise`.
        """
        if not norm:
            return max(self.least, _MEASUREMENT)
        share = math.sqrt(gradient_noise) if is_scaled else gradient_noise
        moved = _DRIFT * num_steps * learning_rate * share / norm
        drifted = _DRIFT * self.drift / math.sqrt(max(1, num_elements))
        rounded = _INDEPENDENT * roundoff * math.sqrt(num_steps / max(1, num_elements))
        limit = _MEASUREMENT + _COMMON * roundoff + rounded + moved + drifted
        return max(self.least, limit)

    def find_gradient_noise(self, norm: float, num_elements: int, usual_rms: float) -> float:
        """The relative error of the elements of a gradient; 1 if it is all noise.

        Gradients far below the usual size, as of the bias of keys in attention, are the remainder
        of larger terms that cancel.
        """
        error = (_INDEPENDENT * self.roundoff + _DRIFT * self.drift) * math.sqrt(1 + self.num_calls)
        rms = norm / math.sqrt(max(1, num_elements))
        return min(1.0, error * max(1.0, usual_rms / rms)) if rms else 1.0

    def note_update(self, num_elements: int, norm: float, deviation: float) -> None:
        """A parameter agrees after the step, with this deviation."""
        self._updates.append(_Update(num_elements, norm, deviation))

    def end_step(self) -> None:
        """Measure the drift of the weights from the deviations of all parameters.

        Errors that are independent show in a norm or sum divided by the root of n.
        """
        total = math.fsum(update.norm**2 for update in self._updates)
        if total:
            errors = (
                (update.deviation * update.norm) ** 2 * update.num_elements
                for update in self._updates
            )
            self.drift = min(_MAX_DRIFT, max(self.drift, math.sqrt(math.fsum(errors) / total)))
