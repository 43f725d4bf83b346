"""Runs training programs, unmodified, as ranks of a cluster that is not there.

`api.run` starts a warm process (`server`), which has imported torch and forks a process for each
rank and instrument. In it, `rank_process` simulates what torchrun, CUDA and c10d would provide and
runs the `program`; `steps` counts its steps and ends it; `instruments` observe them. With
`real=True`, torchrun starts the ranks instead (`real_rank`).
"""
