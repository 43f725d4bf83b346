"""Which layouts an op may run in without communication, op by op, along one mesh axis."""
