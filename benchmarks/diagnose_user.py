"""What a user of ours writes: the script that asks what is wrong. It prints the answer as JSON."""

from __future__ import annotations

import json
import os

from torch_user_script import TASK, load, set_config

from shardscope import diagnose

if __name__ == "__main__":
    function, args = load()
    set_config()
    found = diagnose(
        function, *args, backend=TASK["backend"], options=TASK["options"] or None
    ).diagnosis
    told = {
        "condition": found.condition,
        "stage": found.stage,
        "part": found.part,
        "ops": [one.op for one in found.suspects],
        "lines": [
            f"{os.path.basename(one.source.file)}:{one.source.line}" if one.source else ""
            for one in found.suspects
        ],
        "is_minimal": found.is_minimal,
        "is_verified": found.is_verified,
        "num_calls": found.num_queries,
        "notes": found.notes,
    }
    print("diagnosis: " + json.dumps(told))
