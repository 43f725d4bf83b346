"""`explain(fn, …)`: how many graphs torch.compile makes of a function, and where it breaks."""
