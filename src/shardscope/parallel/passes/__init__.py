"""The partitioner's passes: constraints, propagation, decomposition, lowering, gradients,
schedule.
"""
