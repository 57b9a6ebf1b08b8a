"""Operators to seconds: on the device (roofline, or a learned model in its place) and on the host that issues them."""
