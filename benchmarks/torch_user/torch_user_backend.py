"""The backend under test, under a name that a fresh process knows, and without options.

torch's minifier writes a script that names the backend and forgets what it was told, so what it was
told comes from the environment. Each call is counted.
"""

from __future__ import annotations

import json
import os
from typing import Any

__all__ = ["count", "counted"]


def count() -> None:
    """One more call of the backend."""
    with open(os.environ["TORCH_USER_COUNTS"], "a") as file:
        file.write("1\n")


def counted(gm: Any, example_inputs: Any) -> Any:
    """What the environment says, called with the options that it says."""
    from torch import nn
    from torch._dynamo.backends.registry import lookup_backend

    count()
    task = json.loads(os.environ["TORCH_USER_TASK"])
    options = {"options": task["options"]} if task["options"] else {}
    compiled = lookup_backend(task["backend"])(gm, example_inputs, **options)
    # The accuracy minifier asks for parameters, and takes it for a pass if there are none to ask:
    # it is given a module, lest it fail at once on every backend that returns a function.
    module = nn.Module()
    module.forward = compiled
    return module
