"""The partitioner's intermediate representation: what its passes read and rewrite.

A program is a `ShardingGraph` of values, op nodes and reshards (`graph.py`). Along each axis of a
`Mesh` (`mesh.py`), each value has a placement (`Replicate`, `Shard`, `Partial`) and each op node a
`Strategy`, the placements of its inputs and outputs. A `ShardSpec` (`shard_spec.py`) is a tensor's
shape with its placements along all axes; the local shape at a `MeshCoordinate` follows from it.
Sizes are numbers or sympy expressions (`SymbolicSizes`). `shard_tensor` and `unshard_tensor` apply
placements to real tensors.
"""
