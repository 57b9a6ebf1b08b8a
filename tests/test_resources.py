"""Resource series: what the sampler records, and the twelve figures that a series is reduced to."""

from __future__ import annotations

import itertools
import socket
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretrain.errors import InputError
from foretrain.measure.nvml import Gpu, gpu_count
from foretrain.measure.resources import (
    FIGURES,
    RESOURCES,
    CpuMeter,
    Sampler,
    Series,
    interface_bytes,
    mean_figures,
    spans,
    twelve_figures,
)

durations = st.floats(0.001, 1.0)
shares = st.floats(0.0, 1.0)
rates = st.floats(0.0, 1e9)


@st.composite
def series(draw: st.DrawFn, *, least: int = 0) -> Series:
    rows = draw(st.lists(st.tuples(durations, shares, shares, rates, rates), min_size=least, max_size=40))
    ends, now = [], 0.0
    for row in rows:
        now += row[0]
        ends.append(now)
    columns = list(zip(*(row[1:] for row in rows), strict=True)) or [()] * 4
    return Series(ends_s=tuple(ends), **dict(zip(RESOURCES, columns, strict=True)))


@given(series(), st.floats(0.0, 0.99), st.sampled_from(RESOURCES))
def test_spans_add_up_to_the_length_and_alternate(one: Series, threshold: float, name: str) -> None:
    found = spans(one, name, threshold)
    assert sum(span.length_s for span in found) == pytest.approx(one.length_s)
    assert all(before.active != after.active for before, after in itertools.pairwise(found))


@given(series(least=1), st.floats(0.0, 0.99))
def test_figures_are_bounded_by_the_series(one: Series, threshold: float) -> None:
    figures = twelve_figures(one, threshold)
    assert list(figures) == [f"{name}_{figure}" for name in RESOURCES for figure in FIGURES]
    for name in RESOURCES:
        assert 0 <= figures[f"{name}_idle_s"] <= one.length_s * (1 + 1e-9)
        assert 0 <= figures[f"{name}_active_s"] <= one.length_s * (1 + 1e-9)
        assert 0 <= figures[f"{name}_peak"] <= max(getattr(one, name)) * (1 + 1e-9)
        assert (figures[f"{name}_peak"] == 0) == (figures[f"{name}_active_s"] == 0)


@given(series(least=1), st.floats(0.0, 0.99))
def test_a_higher_threshold_is_never_longer_active(one: Series, threshold: float) -> None:
    def active(limit: float) -> float:
        return sum(span.length_s for span in spans(one, "device_utilization", limit) if span.active)

    assert active(threshold) <= active(threshold / 2) + 1e-9


@given(series(least=1), st.integers(1, 50))
def test_downsampling_keeps_length_and_means(one: Series, points: int) -> None:
    less = one.downsampled(points)
    assert len(less.ends_s) <= points
    assert less.length_s == one.length_s
    for name in RESOURCES:
        assert less.mean(name) == pytest.approx(one.mean(name), rel=1e-9, abs=1e-9)


def constant(value: float, n: int = 4) -> Series:
    return Series(ends_s=tuple(range(1, n + 1)), **dict.fromkeys(RESOURCES, (value,) * n))


def test_all_active_has_no_idle_time_and_all_idle_no_active() -> None:
    busy, idle = twelve_figures(constant(1e6)), twelve_figures(constant(0.0))
    for name in RESOURCES:
        assert (busy[f"{name}_idle_s"], busy[f"{name}_active_s"], busy[f"{name}_peak"]) == (0.0, 4.0, 1e6)
        assert (idle[f"{name}_idle_s"], idle[f"{name}_active_s"], idle[f"{name}_peak"]) == (4.0, 0.0, 0.0)


def test_chatter_on_an_idle_network_is_not_activity() -> None:
    assert twelve_figures(constant(500.0))["network_rx_active_s"] == 0


def test_peaks_are_averaged_over_bursts() -> None:
    values = (0.2, 0.6, 0.0, 1.0, 0.0)
    one = Series(
        ends_s=(1, 2, 3, 4, 5),
        device_utilization=values,
        memory_utilization=values,
        network_rx=(0,) * 5,
        network_tx=(0,) * 5,
    )
    figures = twelve_figures(one)
    assert figures["device_utilization_peak"] == pytest.approx(0.8)
    assert figures["device_utilization_active_s"] == pytest.approx(1.5)
    assert mean_figures([figures, figures]) == pytest.approx(figures)


@pytest.mark.parametrize("threshold", [-0.1, 1.0])
def test_a_threshold_is_a_share(threshold: float) -> None:
    with pytest.raises(InputError, match="threshold"):
        twelve_figures(constant(1.0), threshold)


def test_a_series_that_does_not_fit_together_is_refused() -> None:
    with pytest.raises(InputError, match=r"series.network_rx: has 0 samples"):
        Series(ends_s=(1.0,), device_utilization=(1.0,), memory_utilization=(1.0,))
    with pytest.raises(InputError, match="do not increase"):
        Series(ends_s=(1.0, 1.0), **dict.fromkeys(RESOURCES, (0.0, 0.0)))


def test_series_survive_json() -> None:
    one = constant(0.25)
    assert Series.read(one.to_dict()) == one


def test_the_sampler_sees_work_and_rest() -> None:
    """However long the machine takes: what was worked is in the series, and the rest is low."""
    before = time.process_time()
    with Sampler(CpuMeter(cores=1), period_s=0.02) as sampler:
        while time.process_time() < before + 0.3:
            sum(range(1000))
        time.sleep(0.5)
        worked_s = time.process_time() - before
    seen = sampler.series
    assert seen.length_s > 0.55
    assert seen.mean("device_utilization") * seen.length_s == pytest.approx(worked_s, abs=0.1)
    assert min(seen.device_utilization[len(seen.ends_s) // 3 :]) < 0.2
    assert 0 < seen.memory_utilization[0] < 1


def test_the_sampler_counts_loopback_in_both_directions() -> None:
    left, right = _connected()
    reader = threading.Thread(target=lambda: list(iter(lambda: right.recv(1 << 16), b"")))
    reader.start()
    with Sampler(CpuMeter(cores=1), period_s=0.02) as sampler:
        left.sendall(b"x" * 20_000_000)
        left.close()
        reader.join()
        time.sleep(0.05)
    right.close()
    assert sampler.series.mean("network_tx") * sampler.series.length_s > 15e6
    assert sampler.series.mean("network_rx") * sampler.series.length_s > 15e6


def _connected() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        left = socket.create_connection(server.getsockname())
        right, _ = server.accept()
    return left, right


def test_an_unknown_interface_is_one_line() -> None:
    with pytest.raises(InputError, match="'nope0' is not a network interface of this machine: "):
        interface_bytes("nope0")


@pytest.mark.skipif(gpu_count() > 0, reason="there is a GPU here")
def test_no_gpu_is_one_line() -> None:
    with pytest.raises(InputError, match="device: NVML"):
        Gpu(0)
