"""Renders recordings: as text, HTML, Markdown, CSV and in the formats of other tools.

`show.py` has the public functions `show` and `diff`. `model/` computes what several renderers need;
`text/`, `html/`, `export/` and `tui/` render one recording, `compare/` the changes between two.
Imports no other package but `record`, and no torch.
"""

import random

# Importing Rich draws a random number, which must not change the random state of the user's run.
_state = random.getstate()
import rich.style  # noqa: E402, F401

random.setstate(_state)
