"""Says what a transfer was worth: errors on left-out runs before and after it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import numpy as np

from foretrain.predictors.base import Report, Table
from foretrain.predictors.driple.features import TARGETS, Array, scaled


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferCheck:
    """Mean absolute errors on runs that were left out in turn, before a transfer and after it, by figure: of
    shares and utilisation in points, of bytes and memory relative."""

    network: str
    runs: int
    errors: Mapping[str, tuple[float, float]]

    @classmethod
    def of(cls, network: str, runs: int, before: Array, after: Array, measured: Array) -> Self:
        off = [np.abs(scaled(one) - scaled(measured)) for one in (before, after)]
        errors = {}
        for i, name in enumerate(TARGETS):
            comparable = np.isfinite(off[0][:, i]) & np.isfinite(off[1][:, i])
            if comparable.any() and np.ptp(measured[comparable, i]) > 0:
                errors[name] = float(off[0][comparable, i].mean()), float(off[1][comparable, i].mean())
        return cls(network=network, runs=runs, errors=errors)

    def report(self) -> Report:
        """Say what the transfer was worth."""
        rows = [(name, *errors) for name, errors in self.errors.items()]
        means = [float(np.mean([row[i] for row in rows])) if rows else None for i in (1, 2)]
        how = f"{self.network}: left out in turn, {self.runs} runs were forecast with these mean errors"
        return [how, Table(headings=("figure", "as it was", "tailored"), rows=(*rows, ("mean", *means)))]
