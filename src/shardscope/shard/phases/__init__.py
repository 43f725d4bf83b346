"""`phases`: how long named parts of a step take, on the host and on the device."""
