"""Plugins that run inside trainers, experiment trackers, notebooks and test runners.

`lightning.py` and `transformers.py` are callbacks for trainers; `training_loop.py` observes loops
that are written by hand, and `accelerate.py` and `ray.py` are based on it; `torchtitan.py` wraps
its trainer. All of them record with `callback_base.py`, and `rank_files.py` joins the files of all
ranks. `trackers.py` finds the experiment trackers of a run, to which `wandb.py`, `mlflow.py` and
`tensorboard.py` log. `notebook.py` has the magics of IPython. `pytest.py` is a pytest plugin, and
`assertions.py` the functions of `shardscope.testing`. Plugins may import every other package.
"""
