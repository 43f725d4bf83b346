"""The partitioner's intermediate representation: graph, placements, shard specs, mesh, symbolic
sizes.
"""
