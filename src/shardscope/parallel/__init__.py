"""Making it parallel: plan, propagate, partition, parity, on exported programs."""
