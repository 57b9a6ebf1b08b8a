"""Prepares jobs and their measured figures for Driple's networks, and reads figures from their answers."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from foretrain.capture import capture_job
from foretrain.graph import OpGraph
from foretrain.job import Job
from foretrain.predictors.base import Predictor
from foretrain.predictors.deletepop import DeletePopPredictor
from foretrain.predictors.driple.features import (
    NETWORK_FIGURES,
    TARGETS,
    Array,
    Groups,
    certain,
    directed_groups,
    graph_key,
    reference_groups,
    scaled,
    setting_columns,
    unscaled,
)  # fmt: skip
from foretrain.predictors.driple.whitebox import Levels, Whitebox
from foretrain.predictors.neural import neural_module

if TYPE_CHECKING:
    from foretrain.predictors.driple.network import Samples


@dataclass(frozen=True, eq=False, kw_only=True)
class Cases:
    """Jobs as the networks see them: distinct graphs, the setting of each job, and the schedule's word on its
    resources."""

    graphs: Sequence[Groups]
    graph_of: np.ndarray[Any, np.dtype[np.int64]]
    settings: Array
    schedule: Array
    """The white-box figures of each job, scaled; no columns in the reference."""
    certain: np.ndarray[Any, np.dtype[np.bool_]]
    """For each job, the figures that the schedule knows for certain."""
    measured: Array
    """The figures of each run; not a number for a job that has not run."""

    @classmethod
    def of(
        cls, jobs: Sequence[Job], measured: Sequence[Array] | None = None, *, improved: bool = True,
        levels: Levels | None = None,
        schedules: Predictor | None = None,
    ) -> Cases:  # fmt: skip
        """``levels`` and ``schedules`` are what the white-box figures come from."""
        keys = [graph_key(job) for job in jobs]
        graphs = {key: capture_job(job) for key, job in dict(zip(keys, jobs, strict=True)).items()}
        places = {key: number for number, key in enumerate(graphs)}
        whitebox = Whitebox(schedules or deletepop(), levels)
        schedule = [scaled(whitebox.figures(job)) for job in jobs] if improved else []
        settings = [
            np.concatenate([setting_columns(job, graphs[key]), says])
            for job, key, says in zip(jobs, keys, schedule, strict=False)
        ]
        return cls(
            graphs=[_groups(graph, improved) for graph in graphs.values()],
            graph_of=np.array([places[key] for key in keys], dtype=np.int64),
            settings=np.array(settings).reshape(len(jobs), -1),
            schedule=np.array(schedule).reshape(len(jobs), -1),
            certain=np.array([certain(job) for job in jobs]).reshape(len(jobs), -1),
            measured=np.stack(measured)
            if measured is not None
            else np.full((len(jobs), len(TARGETS)), np.nan),
        )

    def part(self, rows: Sequence[int]) -> Cases:
        """Keep these jobs alone."""
        index = np.array(rows, dtype=np.int64)
        columns = {
            name: getattr(self, name)[index]
            for name in ("graph_of", "settings", "schedule", "certain", "measured")
        }
        return Cases(graphs=self.graphs, **columns)

    def samples(self) -> Samples:
        """Give what a network learns: in the reference the scaled figures themselves, else how far they lie
        from the schedule's.

        Of an idle network there is nothing to learn.
        """
        targets = scaled(self.measured)
        if self.schedule.shape[1]:
            targets = targets - self.schedule
            targets[self.certain & NETWORK_FIGURES] = np.nan
        samples: Samples = network_module().Samples(
            graphs=self.graphs, graph_of=self.graph_of, settings=self.settings, targets=targets
        )
        return samples.part(range(len(self.graph_of)))

    def figures(self, learned: Array) -> Array:
        """Figures from what a network says of these jobs, but for those that the schedule knows."""
        if not self.schedule.shape[1]:
            return unscaled(learned)
        figures = unscaled(self.schedule + learned)
        figures[self.certain] = unscaled(self.schedule)[self.certain]
        return figures


def _groups(graph: OpGraph, improved: bool) -> Groups:
    return directed_groups(graph) if improved else reference_groups(graph)


@functools.lru_cache(maxsize=1)
def deletepop() -> DeletePopPredictor:
    return DeletePopPredictor()


def network_module() -> ModuleType:
    return neural_module("foretrain.predictors.driple.network", "driple")


def tailoring_module() -> ModuleType:
    return neural_module("foretrain.predictors.driple.tailoring", "driple")
