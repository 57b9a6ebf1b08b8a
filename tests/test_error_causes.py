"""Why a forecast is off: each rule of ``benchmarks/causes.py`` on figures by hand."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture(scope="module")
def causes() -> Iterator[Any]:
    sys.path.insert(0, str(BENCHMARKS))
    try:
        import causes

        yield causes
    finally:
        sys.path.remove(str(BENCHMARKS))


def figures(step_s: float, busy_s: float, kernels: float = 1000.0) -> dict[str, float]:
    return {"step_time_s": step_s, "device_busy_s": busy_s, "kernels": kernels}


@pytest.mark.parametrize(
    ("measured", "predicted", "more", "kind"),
    [
        (figures(0.10, 0.04), figures(0.06, 0.04), {}, "host, pace"),
        (figures(0.10, 0.04, 1400), figures(0.06, 0.04), {}, "host, other kernels"),
        ({**figures(0.10, 0.04), "host_issue_s": 0.05}, figures(0.06, 0.04), {}, "host, waiting"),
        (figures(0.10, 0.09), figures(0.06, 0.05), {}, "operators"),
        (figures(0.10, 0.04), figures(0.06, 0.04), {"elsewhere_s": {"other:1": 0.061}}, "machine"),
        (figures(0.10, 0.04), figures(0.06, 0.04), {"elsewhere_s": {"other:1": 0.1}}, "host, pace"),
        (figures(0.10, 0.04), figures(0.06, 0.04), {"spread_s": (0.05, 0.12)}, "unsteady"),
    ],
)
def test_what_was_measured_on_one_gpu_tells_the_cause(
    causes: Any, measured: dict[str, float], predicted: dict[str, float], more: dict[str, Any], kind: str
) -> None:
    found = causes.step_cause(causes.Case(measured=measured, predicted=predicted, **more))
    assert found.kind == kind
    assert not found.by_forecast


@pytest.mark.parametrize(("exposed_s", "kind"), [(0.5, "exposed communication"), (0.01, "operators")])
def test_of_many_devices_only_the_shares_of_the_forecast_speak(
    causes: Any, exposed_s: float, kind: str
) -> None:
    parts = {"computation": 1.0 - exposed_s, "exposed communication": exposed_s}
    case = causes.Case(
        measured={"step_time_s": 1.3}, predicted={"step_time_s": 1.0}, causes_s=parts, devices=8
    )
    found = causes.step_cause(case)
    assert (found.kind, found.by_forecast) == (kind, True)


@pytest.mark.parametrize(
    ("peaks", "reserved", "kind"),
    [((10.0, 10.0), (12.0, 14.0), "allocator"), ((10.0, 12.0), (12.0, 14.0), "activations"),
     ((10.0, 10.0), (12.0, 12.01), "fixed parts")],
)  # fmt: skip
def test_memory_is_off_by_tensors_by_what_is_cached_or_by_fixed_parts(
    causes: Any, peaks: tuple[float, float], reserved: tuple[float, float], kind: str
) -> None:
    predicted, true = (
        {"peak_memory_bytes": peak * 2**30, "reserved_memory_bytes": whole * 2**30}
        for peak, whole in zip(peaks, reserved, strict=True)
    )
    sizes = {"weights": 1.0 * 2**30, "activations": 9.0 * 2**30}
    case = causes.Case(measured=true, predicted=predicted, memory_bytes=sizes)
    assert causes.memory_cause(case, "reserved_memory_bytes").kind == kind
