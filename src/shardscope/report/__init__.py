"""Renders a Recording as text, HTML, Perfetto, CSV and other formats. Imports `record` alone."""

import random

# Importing Rich draws a random number, which must not change the random state of the user's run.
_state = random.getstate()
import rich.style  # noqa: E402, F401

random.setstate(_state)
