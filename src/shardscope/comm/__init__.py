"""Collectives: tracing them, charging them to modules, and comparing ranks.

`trace` opens a `trace_session`, whose `recorder` notes each collective with its `collective_facts`
(group, bytes, cause) and writes it to the `rank_stream`. `findings` and `hang` compare the
`rank_calls` of a recording, without torch. `debug` is the drop-in for torch's CommDebugMode.
"""
