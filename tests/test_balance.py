"""Layers of a pipeline over groups that differ: by the speed of devices, and no more than fit."""

from __future__ import annotations

from typing import Any

import pytest

from foretrain.forecast import Forecast, usable_memory
from foretrain.job import Job
from foretrain.predictors import get
from planning import LLAMA, mixed

FAST, SLOW = ("h100-sxm-80gb", 4, 1), ("l4", 2, 2)
LARGE = {**LLAMA, "hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32}
"""Layers that take 3 GB each to train."""

pytestmark = pytest.mark.usefixtures("cache")


def predict(job: Job) -> Forecast:
    return get("roofline").predict(job)


def layers(forecast: Forecast) -> list[int]:
    assert forecast.step is not None
    return [sum(block.is_layer for block in stage.blocks) for stage in forecast.step.layout.stages]


def step_s(forecast: Forecast) -> float:
    return forecast["step_time_s"].median


def on(*groups: tuple[str, int, int], config: dict[str, Any] = LLAMA, **plan: Any) -> Forecast:
    plan = {"pipeline": 2, "micro_batch": 4, **plan}
    return predict(mixed(*groups, config=config, plan=plan, global_batch=32))


@pytest.mark.parametrize(
    "plan",
    [
        {},
        {"pipeline": 4},
        {"shard": "zero1", "recompute": "full"},
        {"tensor": 2},
        {"schedule": "interleaved", "virtual_stages": 2},
        {"schedule": "zbv"},
        {"schedule": "gpipe"},
    ],
    ids=str,
)
@pytest.mark.parametrize("groups", [(FAST, SLOW), (SLOW, FAST)], ids=["fast first", "slow first"])
def test_slower_devices_get_fewer_layers_and_the_step_takes_no_longer(
    groups: tuple[tuple[str, int, int], ...], plan: dict[str, Any]
) -> None:
    by_speed, even = on(*groups, **plan), on(*groups, balance="even", **plan)
    counts, half = layers(by_speed), by_speed.job.plan.pipeline // 2
    assert sum(counts) == sum(layers(even)) == 8
    first, last = sum(counts[:half]), sum(counts[half:])
    assert (first > last) == (groups[0] == FAST)
    assert step_s(by_speed) < step_s(even)


def test_even_is_respected_and_so_are_given_stages() -> None:
    even, given = on(FAST, SLOW, balance="even"), on(FAST, SLOW, stages=[6, 2])
    assert layers(even) == [4, 4]
    assert layers(given) == [6, 2]
    (words,) = [note for note in even.assumptions if "dealt out" in note]
    assert words.startswith('layers are dealt out alike (plan.balance = "speed" looks at devices): h100')
    assert any("as plan.stages says: h100-sxm-80gb has 6 on 1 stage" in note for note in given.assumptions)


def test_a_pipeline_is_by_speed_where_the_plan_does_not_say_and_a_batch_is_not() -> None:
    assert layers(on(FAST, SLOW)) == layers(on(FAST, SLOW, balance="speed"))
    assert mixed(FAST, SLOW).balance == "even"
    assert mixed(FAST, FAST, plan={"pipeline": 2}).balance == "even"
    assert mixed(FAST, SLOW, plan={"pipeline": 2}).balance == "speed"


def test_the_forecast_says_how_layers_were_dealt_out() -> None:
    forecast = on(FAST, SLOW, pipeline=4)
    (words,) = [note for note in forecast.assumptions if "dealt out" in note]
    assert words.startswith("layers are dealt out by the speed of stages: h100-sxm-80gb takes ")
    first, last = layers(forecast)[:2], layers(forecast)[2:]
    assert f"gets {len(first)} x {first[0]} on 2 stages, l4 takes " in words
    assert f"gets {len(last)} x {last[0]} on 2 stages" in words


def test_no_device_gets_more_layers_than_fit() -> None:
    """An L4 is faster in bf16 than a V100, and smaller."""
    groups, config = (("l4", 1, 1), ("v100-sxm-32gb", 1, 1)), {**LARGE, "num_hidden_layers": 16}
    forecast = on(*groups, config=config, micro_batch=1)
    counts = layers(forecast)
    (words,) = [note for note in forecast.assumptions if "dealt out" in note]
    assert "(no more fit on stage 0)" in words
    assert forecast.fits
    for rank in forecast.ranks:
        assert rank.capacity_bytes is not None
        assert rank.needed_bytes <= usable_memory(forecast.job, rank.capacity_bytes)
    more = on(*groups, config=config, micro_batch=1, stages=[counts[0] + 2, counts[1] - 2])
    assert step_s(more) < step_s(forecast)
    fullest = more.ranks[0]
    assert fullest.needed_bytes > 0.9 * usable_memory(more.job, fullest.capacity_bytes or 0.0)


def test_where_nothing_fits_the_forecast_says_so() -> None:
    forecast = on(("l4", 1, 1), ("t4", 1, 1), config={**LARGE, "num_hidden_layers": 24}, micro_batch=1)
    assert not forecast.fits
    assert any("no distribution fits all devices" in note for note in forecast.assumptions)


def test_whether_a_stage_fits_is_asked_of_its_own_device() -> None:
    """What is too much for an L4 lies on an H100."""
    forecast = on(("h100-sxm-80gb", 1, 1), ("l4", 1, 1), config={**LARGE, "num_hidden_layers": 16})
    assert forecast.fits
    assert forecast.ranks[0].allocated_bytes > 24e9 > forecast.ranks[1].allocated_bytes
    assert [round((rank.capacity_bytes or 0) / 1e9) for rank in forecast.ranks] == [85, 24]


@pytest.mark.parametrize(
    "plan", [{}, {"pipeline": 4, "shard": "zero1"}, {"pipeline": 1, "tensor": 2}], ids=str
)
def test_groups_alike_are_one_cluster(plan: dict[str, Any]) -> None:
    apart, together = on(FAST, FAST, **plan), on(("h100-sxm-80gb", 4, 2), **plan)
    assert {name: one.median for name, one in apart.quantities.items()} == pytest.approx(
        {name: one.median for name, one in together.quantities.items()}
    )
    assert layers(apart) == layers(together)
    assert apart.ranks == together.ranks


def test_groups_as_fast_as_one_another_share_layers_alike() -> None:
    """Nodes of two and of four of the same device are groups that differ."""
    forecast = on(("h100-sxm-80gb", 4, 1), ("h100-sxm-80gb", 2, 2), pipeline=4, stages=[2, 2, 2, 2])
    alike = on(("h100-sxm-80gb", 4, 2), pipeline=4, stages=[2, 2, 2, 2])
    assert step_s(forecast) == pytest.approx(step_s(alike), rel=0.05)


@pytest.mark.parametrize("groups", [(FAST, ("l4", 4, 1)), (FAST, SLOW)], ids=["nodes alike", "nodes of two"])
def test_a_batch_follows_the_speed_of_devices(groups: tuple[tuple[str, int, int], ...]) -> None:
    even, by_speed = (on(*groups, pipeline=1, balance=balance) for balance in ("even", "speed"))
    assert step_s(by_speed) < step_s(even)
    assert any("in proportion to" in note for note in by_speed.assumptions)
