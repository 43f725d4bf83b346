"""Collectives: tracing them and charging them to modules.

`trace` installs the hooks; its `recorder` records each collective with its `collective_facts`
(group, bytes, cause). `findings` explains those that DTensor has inserted.
`debug` is the drop-in for torch's CommDebugMode.
"""
