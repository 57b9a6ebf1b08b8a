"""Callbacks that record a Run for every training and show how much time is left: Hugging Face, Lightning, Ray, or a loop of your own."""

from foretrain.callbacks.recorder import Recorder

__all__ = ["Recorder"]
