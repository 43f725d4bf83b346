"""Process groups without a network: simulated ones of any size, and ranks as threads."""
