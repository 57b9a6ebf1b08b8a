"""Tells how fast jobs run that share a GPU: by measured pairs, by their manners, or by how they use it."""

from foretrain.scheduling.sharing.interference import (
    Alone,
    Interference,
    Manners,
    MannersOfKinds,
    MeasuredPairs,
    speed_beside,
)

__all__ = ["Alone", "Interference", "Manners", "MannersOfKinds", "MeasuredPairs", "speed_beside"]
