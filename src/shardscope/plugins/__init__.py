"""Plugins that run inside trainers, experiment trackers, notebooks and test runners.

`lightning.py` and `transformers.py` are callbacks for trainers; `training_loop.py` observes loops
that are written by hand, and `accelerate.py` and `ray.py` are based on it; `torchtitan.py` wraps
its trainer. All of them record with `step_recorder.py`, which joins the files of all ranks, and
observe memory with `live_memory.py`. `trackers.py` finds the experiment trackers of a run, to which
`wandb.py`, `mlflow.py` and `tensorboard.py` log. `notebook.py` has the magics of IPython.
`pytest.py` is a pytest plugin, and `assertions.py` the functions of `shardscope.testing`. Plugins
may import every other package.
"""
