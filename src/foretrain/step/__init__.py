"""Turns a job into the parts of its step, by one engine: layout, playback, memory, assembly."""
