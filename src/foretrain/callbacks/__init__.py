"""Records a Run of every training with Hugging Face, Lightning, Ray or a loop of your own."""

from foretrain.callbacks.recorder import Recorder

__all__ = ["Recorder"]
