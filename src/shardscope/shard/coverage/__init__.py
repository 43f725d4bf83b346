"""`coverage(model, …)`: which ops of a model shard, found by dispatching and computing them."""
