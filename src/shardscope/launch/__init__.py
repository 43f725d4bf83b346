"""Runs training programs, unmodified, as ranks of a simulated cluster.

`api.run` starts a warm process (`server`), which has imported torch and forks a process for each
rank and instrument. In it, `rank_process` simulates what torchrun, CUDA and c10d would provide and
runs the `program`; `instruments` count and observe its steps, and end it after the last. With
`real=True`, torchrun starts the ranks instead (`real_rank`).
"""
