"""`diagnose(fn, …)`: checks a compiled function against eager execution, and locates what is wrong.

The pipeline captures the graphs of a function and compares each with eager execution. Compiled code
runs in a worker process (`worker`). A failing graph is minimized, its stage bisected
(`stage_bisect`), and written as a script (`repro`).
"""
