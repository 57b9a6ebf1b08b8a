"""Turns operators and collectives into seconds on a device, a host or a link."""
