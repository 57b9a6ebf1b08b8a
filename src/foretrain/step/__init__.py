"""The one engine from a job to the parts of its step: layout, playback, memory, assembly."""
