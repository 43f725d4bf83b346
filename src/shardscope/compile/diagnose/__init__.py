"""`diagnose(fn, …)`: checks a compiled function against eager execution, and locates what is wrong.

The pipeline captures the graphs of a function and compares each with eager execution (`accuracy`).
Compiled code runs in a worker process (`worker`, `worker_tasks`). A failing graph is reduced to the
fewest ops that fail (`minimize`, `subgraph`), its stage bisected (`stage_bisect`), and written as a
script (`repro`). docs/diagnose-internals.md shows the two processes and the four result types.
"""
