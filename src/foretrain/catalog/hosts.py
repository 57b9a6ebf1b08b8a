"""Reads hosts, the CPUs that issue operators to a GPU: entries of the catalogue, and profiles of machines."""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from foretrain import schema
from foretrain.errors import InputError, invalid
from foretrain.files import parse_json, write_atomically

KIND = "host profile"
PARTS: Mapping[str, tuple[str, ...]] = {
    "forward": ("convolutions.forward", "transformer.forward"),
    "backward": ("convolutions.backward", "transformer.backward"),
    "optimizer": ("convolutions.optimizer", "transformer.optimizer"),
}
"""The phases of a step, and the benchmarks that tell how fast a host issues each."""

_NEAR, _UNEVEN = 1.15, 1.4
"""Of what the fastest core takes: up to the one, others are as fast; beyond the other, it is told."""

_AROUND = re.compile(
    r"\((r|tm)\)|@.*$|,.*$|^\d+x\s|\b(intel|amd|nvidia|cpu|processor|\d+-cores?|\d+(st|nd|rd|th) gen)\b"
)
"""What stands around the name of a CPU: signs, the vendor, sockets, cores, the clock."""


def cpu_words(name: str) -> str:
    """The name of a CPU without the words around it.

    >>> cpu_words("Intel(R) Xeon(R) CPU E5-2698 v4 @ 2.20GHz"), cpu_words("AMD EPYC 7763 64-Core Processor")
    ('xeon e5-2698 v4', 'epyc 7763')
    """
    return " ".join(_AROUND.sub(" ", name.lower()).split())


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """A CPU that issues operators. Fields are those of ``catalog/hosts.toml``, and the speeds that a profile
    gives for each phase of a step."""

    name: str = "measured"
    cpu: str = ""
    cores: int | None = None
    year: int | None = None
    speed: float = 1.0
    """Beside the host that the shipped figures come from."""
    forward: float | None = None
    backward: float | None = None
    optimizer: float | None = None
    """The same for one phase, where it was measured."""
    measured: str = ""
    """The day of its profile; empty where only its name is known."""
    aliases: tuple[str, ...] = ()
    series: tuple[str, ...] = ()
    usual_until: int | None = None
    source: str = ""

    def __post_init__(self) -> None:
        for name in ("speed", *PARTS):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise invalid(f"hosts.{self.name}.{name}", value, "a number above 0")

    def speed_of(self, phase: str) -> float:
        """Give the speed of a phase: its own, or that of all."""
        own: float | None = getattr(self, phase) if phase in PARTS else None
        return self.speed if own is None else own

    def to_dict(self) -> dict[str, Any]:
        """Write what a job keeps of a profile."""
        kept = ("cpu", "cores", "speed", *PARTS, "measured")
        return {name: value for name in kept if (value := getattr(self, name)) not in (None, "")}


def read_host(value: Any, where: str) -> str | Host:
    """A name or a file; or the speeds of a machine, as a job keeps them."""
    if isinstance(value, str):
        return value
    if not isinstance(value, Mapping | Host):
        raise invalid(where, value, "a name, a file of foretrain measure host, or a table of speeds")
    host: Host = schema.convert(value, Host, where)
    return host if host.measured else dataclasses.replace(host, measured="as given")


def named_host(name: str, hosts: Iterable[Host]) -> Host | None:
    """The host whose models are called so; the longest of the spellings that fit tells most."""
    words = cpu_words(name)
    fits = [
        (len(one.replace("*", "").replace("?", "")), host)
        for host in hosts
        for one in host.series
        if fnmatch.fnmatchcase(words, one)
    ]
    return max(fits, key=lambda fit: fit[0])[1] if fits else None


def usual_host(device_year: int, hosts: Iterable[Host]) -> Host | None:
    """Choose the host that is usual beside devices of a year; None where it is as fast as the one measured
    on."""
    usual = {host.usual_until: host for host in hosts if host.usual_until is not None}
    return next((usual[year] for year in sorted(usual) if device_year <= year), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostProfile:
    """Holds what benchmarks took on a machine, in seconds per call, on a GPU (``cuda``) and on the CPU
    alone."""

    cpu: str
    cores: int
    torch: str
    python: str
    date: str
    device: str | None = None
    seconds: Mapping[str, Mapping[str, float]]
    spread: Mapping[str, Mapping[str, tuple[float, float]]] = field(default_factory=dict)
    """Of each part of a step: eight in ten rounds lie between these multiples of the median."""
    rounds: Mapping[str, int] = field(default_factory=dict)
    core_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds of a call of interpreted code on each core, by its number."""
    speeds: Mapping[str, float] = field(default_factory=dict)
    """Of the phases, beside the host that the shipped figures come from: of the reference alone."""

    def __post_init__(self) -> None:
        for place, of in self.seconds.items():
            for names in PARTS.values():
                for name in names:
                    if not of.get(name, 0.0) > 0:
                        raise InputError(f"seconds.{place}.{name}: missing, or not above 0")

    @classmethod
    def load(cls, path: Path) -> HostProfile:
        try:
            document = parse_json(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise InputError(f"{path}: cannot be read ({error.strerror})") from error
        except ValueError:
            document = None
        if not isinstance(document, Mapping) or document.get("kind") != KIND:
            raise InputError(f"{path}: not a host profile; foretrain measure host -o FILE writes one")
        try:
            return schema.read(cls, {key: value for key, value in document.items() if key != "kind"}, "")
        except InputError as error:
            raise InputError(f"{path}: {error}") from error

    def save(self, path: Path) -> None:
        write_atomically(path, json.dumps({"kind": KIND, **self.to_dict()}, indent=1) + "\n")

    def to_dict(self) -> dict[str, Any]:
        rounded: dict[str, Any] = _rounded(dataclasses.asdict(self))
        return rounded

    @property
    def fast_cores(self) -> list[str]:
        """List the cores on which interpreted code is fast, where others are much slower: they are shared
        with other machines, or of another kind. A training that keeps to them is as fast as they are."""
        least, most = min(self.core_s.values(), default=0.0), max(self.core_s.values(), default=0.0)
        near = [core for core, seconds in self.core_s.items() if seconds < _NEAR * least]
        return near if most > _UNEVEN * least else []

    def host(self) -> Host:
        """The host that the profile describes."""
        return self.beside(_reference())

    def beside(self, reference: HostProfile) -> Host:
        """The host of this machine, from how much faster it is than a reference whose speeds are known: on a
        GPU where both have one, else on the CPU alone."""
        place = "cuda" if "cuda" in self.seconds and "cuda" in reference.seconds else "cpu"
        own, other = self.seconds[place], reference.seconds[place]
        speeds = {
            part: reference.speeds.get(part, 1.0)
            * math.exp(sum(math.log(other[name] / own[name]) for name in names) / len(names))
            for part, names in PARTS.items()
        }
        forward, backward, optimizer = (float(f"{speeds[part]:.3g}") for part in PARTS)
        mean = float(f"{(forward * backward * optimizer) ** (1 / 3):.3g}")
        return Host(
            cpu=self.cpu,
            cores=self.cores,
            measured=self.date[:10],
            speed=mean,
            forward=forward,
            backward=backward,
            optimizer=optimizer,
        )


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, Mapping):
        return {key: _rounded(each) for key, each in value.items()}
    return [_rounded(each) for each in value] if isinstance(value, list | tuple) else value


REFERENCE = Path(__file__).with_name("reference_host.json")
"""The profile of a machine on which jobs ran that were also measured on the host of the shipped figures."""


@functools.cache
def _reference() -> HostProfile:
    return HostProfile.load(REFERENCE)
