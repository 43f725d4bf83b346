"""Placements, styles and plans as users write them; what `audit` and `parallelize` share."""
