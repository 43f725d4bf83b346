"""HOW IT IS SHOWN: a Recording in; text, Perfetto, CSV out. Imports `record` alone."""

import random

# Rich draws a random number when it is imported. The program that shows something must not notice.
_state = random.getstate()
import rich.style  # noqa: E402, F401

random.setstate(_state)
