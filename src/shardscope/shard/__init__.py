"""What each rank holds and computes, by four instruments that are independent of each other.

`audit` lists parameters with their placements, `coverage` finds the ops that DTensor shards,
`memory` measures a rank's memory during a step, `phases` times named parts of a step. Each is the
module of that name in its folder.
"""
