"""Collectives: tracing them, charging them to modules, and comparing ranks.

`trace` records every collective of a step. The recorder observes them, `match` and `hang`
compare the ranks of a recording, `debug` is the drop-in for torch's CommDebugMode.
"""
