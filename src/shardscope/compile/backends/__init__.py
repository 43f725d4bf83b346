"""Debugging backends, by the names that torch.compile knows them under, and injectors of faults."""
