"""Slows jobs down that share a GPU, by three figures of each or by pairs that were measured.

A job beside others takes ``max(1, needs + bears * sum of their pressures)`` times as long as alone. ``needs``
is the share of its own step in which it wants the device (the rest is the host's, and hides waiting),
``bears`` is how much longer it takes for every unit of pressure, ``pressure`` how much it keeps others
waiting. A job that wants the device all the time, beside another such, has needs = bears = pressure = 1 and
half its speed: the device takes turns.
"""

from __future__ import annotations

import ast
import gzip
import math
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from foretrain.errors import InputError, invalid
from foretrain.files import parse_json, read_text
from foretrain.scheduling.sharing.batches import BatchSizes

Pair = tuple[str, str, str]
"""A device, a kind of job, and the kind beside it."""

_NO_TABLE = (
    *(OSError, EOFError, zlib.error, ValueError, KeyError, TypeError),
    *(AttributeError, SyntaxError, IndexError, ZeroDivisionError),
)
"""What reading something else than a table raises."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manners:
    """How a job behaves beside others."""

    needs: float = 1.0
    bears: float = 1.0
    pressure: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.needs <= 1:
            raise invalid("needs", self.needs, "a share between 0 and 1")
        for name in ("bears", "pressure"):
            if not 0 <= getattr(self, name) < math.inf:
                raise invalid(name, getattr(self, name), "a number of at least 0")


def speed_beside(job: Manners, others: Iterable[Manners]) -> float:
    """Speed of a job beside others, over that alone.

    >>> speed_beside(Manners(), [Manners()])
    0.5
    >>> speed_beside(Manners(needs=0.25, bears=0.25), [Manners()])
    1.0
    """
    together = math.fsum(other.pressure for other in others)
    return 1.0 if not together else 1.0 / max(1.0, job.needs + job.bears * together)


class Interference(ABC):
    """What sharing costs."""

    @abstractmethod
    def speed(self, device: str, kind: str, others: Sequence[str]) -> float:
        """Speed of a kind of job beside others on one GPU, over that alone; 0 where they cannot share."""

    def memory_bytes(self, kind: str) -> float:
        """Of the device's memory that a kind of job takes; 0 where it is not known."""
        return 0.0


class Alone(Interference):
    """No cost: every job is as fast as alone."""

    def speed(self, device: str, kind: str, others: Sequence[str]) -> float:
        return 1.0


class MannersOfKinds(Interference):
    """By three figures for each kind of job; a kind that is not known wants the device all the time."""

    def __init__(self, kinds: Mapping[str, Manners], otherwise: Manners | None = None) -> None:
        self._kinds, self._otherwise = dict(kinds), otherwise or Manners()

    def of(self, kind: str) -> Manners:
        return self._kinds.get(kind, self._otherwise)

    def speed(self, device: str, kind: str, others: Sequence[str]) -> float:
        return speed_beside(self.of(kind), [self.of(other) for other in others])


class MeasuredPairs(Interference):
    """By pairs that were measured, else by those of other batch sizes of the same model, else by manners.
    Beside several others, the slowdowns multiply."""

    def __init__(self, pairs: Mapping[Pair, float], otherwise: Interference | None = None) -> None:
        bad = next((value for value in pairs.values() if not 0 <= value < math.inf), None)
        if bad is not None:
            raise invalid("pairs", bad, "speeds beside another job over speeds alone, of at least 0")
        self._pairs, self._otherwise = dict(pairs), otherwise or MannersOfKinds({})
        self._devices = {device for device, _, _ in self._pairs}
        self._sizes = BatchSizes(kind for _, kind, _ in self._pairs)
        self._forecast: dict[Pair, float | None] = {}

    @classmethod
    def load(cls, path: Path, otherwise: Interference | None = None) -> MeasuredPairs:
        """From Gavel's ``simulation_throughputs.json``: jobs on one GPU each; 0 where two did not fit."""
        try:
            text = gzip.decompress(path.read_bytes()).decode() if path.suffix == ".gz" else read_text(path)
            document = parse_json(text)
            pairs = {
                (device, kind, other): float(rates[partner][0]) / float(rates["null"])
                for device, entries in document.items()
                for key, rates in entries.items()
                for kind, gpus in [ast.literal_eval(key)]
                for partner in rates
                if partner != "null" and gpus == 1 and float(rates["null"]) > 0
                for other, others_gpus in [ast.literal_eval(partner)]
                if others_gpus == 1
            }
        except _NO_TABLE as error:
            raise InputError(f"{path}: not a table of throughputs with pairs of jobs ({error})") from error
        if not pairs:
            raise InputError(f"{path}: holds no pairs of jobs on one GPU")
        return cls(pairs, otherwise)

    @property
    def pairs(self) -> Mapping[Pair, float]:
        return self._pairs

    def speed(self, device: str, kind: str, others: Sequence[str]) -> float:
        name = device if device in self._devices else device.partition("-")[0]
        product = 1.0
        for other in others:
            found = self._pairs.get((name, kind, other))
            if found is None:
                found = self._by_other_batches(name, kind, other)
            product *= self._otherwise.speed(device, kind, [other]) if found is None else found
        return product

    def _by_other_batches(self, device: str, kind: str, other: str) -> float | None:
        """Of a pair that was not measured; both jobs may be of batch sizes that were not."""
        pair = (device, kind, other)
        if pair not in self._forecast:

            def beside(one: str) -> float | None:
                measured = self._pairs.get((device, kind, one))
                if measured is not None:
                    return measured
                return self._sizes.speed(kind, lambda size: self._pairs.get((device, size, one)))

            found = beside(other)
            self._forecast[pair] = self._sizes.speed(other, beside) if found is None else found
        return self._forecast[pair]
