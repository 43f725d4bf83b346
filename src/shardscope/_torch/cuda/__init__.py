"""A simulated CUDA device: its runtime, kernel choices, autocast and workspaces."""
