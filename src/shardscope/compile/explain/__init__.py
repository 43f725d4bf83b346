"""`explain(fn, …)`: how many graphs torch.compile makes of a function, and where it breaks.

`explain.py` observes dynamo and logs frames and graphs (`frames.py`). `assemble.py` makes an
explanation of them, with graph breaks by source line (`break_sites.py`) and the guards that failed
(`guards.py`). `compare.py` compares the ranks of a recording; `torch_api.py` has torch's names.
"""
