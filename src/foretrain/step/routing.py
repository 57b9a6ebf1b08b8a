"""Says how much longer a step may take because tokens do not choose their experts evenly."""

from __future__ import annotations

import math

import numpy as np

from foretrain.dispatching import spreads_by_chance
from foretrain.forecast import Factors
from foretrain.graph import Operator
from foretrain.graph.opset import traits
from foretrain.step.play import Step

SEEN_SKEW = 0.6
"""Rows of the fullest of 64 experts beyond the mean, over the mean, under an auxiliary loss: 0.72 and 0.52 in
models of 1 and 3 billion parameters (Wang et al. 2024, arXiv 2408.15664, MaxVio; 0.04 where biases balance
the load instead)."""


def uneven_share(step: Step) -> float:
    """Give what the step may take longer, as a share of it, where the plan does not say how full the fullest
    rank is: benchmarks force balance, trainings do not. Several experts of a rank are fuller and emptier
    ones."""
    plan, graph = step.layout.job.plan, step.layout.graph
    if plan.expert == 1 or plan.expert_imbalance is not None or not spreads_by_chance(plan):
        return 0.0
    products = (one for one in graph.operators if traits(one.name).kind == "grouped product")
    local = max((one.inputs[1].shape[0] for one in products if len(one.inputs[1].shape) == 3), default=1)
    return _share_of_experts(step) * SEEN_SKEW / math.sqrt(local)


def widened(factors: Factors, share: float) -> Factors:
    """Widen the intervals, with longer steps in them."""
    return factors._replace(high=factors.high * (1 + share), high_95=factors.high_95 * (1 + share))


def _share_of_experts(step: Step) -> float:
    """Give the share of the time of a rank's calls that goes to experts and to rows on their way."""
    stage = step.layout.stages[-1]
    layout = step.layout.at(stage)
    of_experts = np.array([_is_of_experts(one) for one in layout.graph.operators], dtype=np.bool_)
    calls = stage.calls
    seconds = layout.calls.device_s[calls]
    own = of_experts[layout.graph.operator_index[calls]]
    return float(seconds[own].sum() / (seconds.sum() or 1.0))


def _is_of_experts(operator: Operator) -> bool:
    of = traits(operator.name).kind
    return of in ("grouped product", "routing") or (of == "collective" and operator.overload == "expert")
