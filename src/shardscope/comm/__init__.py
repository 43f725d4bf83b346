"""Collectives: tracing them, charging them to modules, and comparing ranks.

`trace` installs the hooks; its `recorder` records each collective with its `collective_facts`
(group, bytes, cause). `findings` and `hang` compare the `rank_calls` of a recording, without torch.
`debug` is the drop-in for torch's CommDebugMode.
"""
