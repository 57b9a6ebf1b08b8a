"""Counts what a server does, in the text format of Prometheus."""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

from foretrain.estimate import Estimate

Labels = tuple[str, ...]

LATENCIES_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 60.0)
RATIOS = (0.5, 0.67, 0.8, 0.9, 0.95, 1.0, 1.05, 1.1, 1.25, 1.5, 2.0)


class Counter:
    """A number that grows, by labels."""

    kind = "counter"

    def __init__(self, name: str, words: str, labels: Sequence[str] = ()) -> None:
        self.name, self.words, self._labels = name, words, tuple(labels)
        self._counts: dict[Labels, float] = defaultdict(float)

    def add(self, *labels: str, by: float = 1.0) -> None:
        self._counts[labels] += by

    def value(self, *labels: str) -> float:
        return self._counts[labels]

    def lines(self) -> Iterator[str]:
        for labels, count in sorted(self._counts.items()):
            yield f"{self.name}{_braces(self._labels, labels)} {count:g}"


class Gauge:
    """A number that is asked for."""

    kind = "gauge"

    def __init__(self, name: str, words: str, ask: Callable[[], float]) -> None:
        self.name, self.words, self._ask = name, words, ask

    def lines(self) -> Iterator[str]:
        yield f"{self.name} {self._ask():g}"


class Histogram:
    """Counts how often a number was at most each bound, by labels."""

    kind = "histogram"

    def __init__(self, name: str, words: str, bounds: Sequence[float], labels: Sequence[str] = ()) -> None:
        self.name, self.words, self._bounds, self._labels = name, words, tuple(bounds), tuple(labels)
        self._counts: dict[Labels, list[int]] = defaultdict(lambda: [0] * (len(bounds) + 1))
        self._sums: dict[Labels, float] = defaultdict(float)

    def observe(self, value: float, *labels: str) -> None:
        self._counts[labels][bisect.bisect_left(self._bounds, value)] += 1
        self._sums[labels] += value

    def lines(self) -> Iterator[str]:
        names = (*self._labels, "le")
        for labels, counts in sorted(self._counts.items()):
            total = 0
            for bound, count in zip((*self._bounds, "+Inf"), counts, strict=True):
                total += count
                yield f"{self.name}_bucket{_braces(names, (*labels, str(bound)))} {total}"
            yield f"{self.name}_sum{_braces(self._labels, labels)} {self._sums[labels]:g}"
            yield f"{self.name}_count{_braces(self._labels, labels)} {total}"


def _braces(names: Labels, values: Labels) -> str:
    """
    >>> print(_braces(("path", "status"), ("/v1", "200")))
    {path="/v1",status="200"}
    """
    pairs = (f'{name}="{_escaped(value)}"' for name, value in zip(names, values, strict=True))
    return f"{{{','.join(pairs)}}}" if names else ""


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


class ServerMetrics:
    """Counts what a server does."""

    def __init__(self) -> None:
        self.requests = Counter(
            "foretrain_requests_total", "Requests that were answered.", ("method", "path", "status")
        )
        self.latencies = Histogram(
            "foretrain_request_seconds", "Time to an answer.", LATENCIES_S, ("method", "path")
        )
        self.remembered = Counter(
            "foretrain_forecasts_total", "Forecasts, by where they came from.", ("source",)
        )
        self.runs = Counter("foretrain_runs_total", "Runs that were uploaded.", ("state",))
        self.ratios = Histogram(
            "foretrain_forecast_ratio",
            "Forecast over measured, of uploaded runs.",
            RATIOS,
            ("quantity", "predictor"),
        )
        self.errors = Counter(
            "foretrain_forecast_absolute_error_sum",
            "Sum of |forecast / measured - 1| of uploaded runs.",
            ("quantity", "predictor"),
        )
        self.covered = Counter(
            "foretrain_forecast_covered_total",
            "Uploaded runs that the 80 % interval holds.",
            ("quantity", "predictor"),
        )
        self.unscored = Counter(
            "foretrain_runs_unscored_total", "Uploaded runs without a forecast to compare.", ("why",)
        )
        self._gauges: list[Gauge] = []

    def watch(self, name: str, words: str, ask: Callable[[], float]) -> None:
        self._gauges.append(Gauge(name, words, ask))

    def score(self, quantity: str, predictor: str, measured: float, forecast: Estimate) -> None:
        """Compare a forecast with what was measured."""
        if measured <= 0:
            return
        ratio = forecast.median / measured
        self.ratios.observe(ratio, quantity, predictor)
        self.errors.add(quantity, predictor, by=abs(ratio - 1))
        self.covered.add(quantity, predictor, by=float(forecast.low <= measured <= forecast.high))

    def text(self) -> str:
        kept: list[Counter | Gauge | Histogram] = [
            self.requests, self.latencies, self.remembered, self.runs, self.ratios, self.errors, self.covered,
            self.unscored, *self._gauges,
        ]  # fmt: skip
        lines: list[str] = []
        for one in kept:
            lines += [f"# HELP {one.name} {one.words}", f"# TYPE {one.name} {one.kind}", *one.lines()]
        return "\n".join(lines) + "\n"
