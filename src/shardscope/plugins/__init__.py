"""Plugins that run inside trainers and test runners.

`lightning.py` and `transformers.py` are callbacks for trainers, both based on `callback_base.py`;
`pytest.py` is a pytest plugin, and `assertions.py` the functions of `shardscope.testing`. Plugins
may import every other package.
"""
