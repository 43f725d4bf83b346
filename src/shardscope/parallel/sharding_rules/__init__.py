"""Sharding rules, lowerings and decompositions of ops, one module for each family of ops.

A sharding rule lists the strategies of an `OpCall` along one mesh axis: the placements of inputs
and outputs with which each rank can run the op on its local tensors, without communication. A
lowering writes the op into one rank's program where local arguments differ from the global ones,
such as the sizes of a reshape. A decomposition expresses an op by others that can be sharded.

To add an op, write these functions in the module of its family, with the helpers of `builders.py`
(rules, decompositions) and `masking.py` (lowerings), and the decorators of `registry.py`.
"""
