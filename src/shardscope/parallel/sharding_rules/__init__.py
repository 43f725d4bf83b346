"""Sharding rules by op family: the strategies of each op along one mesh axis, lowerings,
decompositions.
"""
