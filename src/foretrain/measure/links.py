"""Joins network namespaces by links of limited rate, so that workers talk as if each had its own machine."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Self

from foretrain.errors import InputError, invalid
from foretrain.units import parse_rate

INTERFACE = "eth0"
"""The name of the link inside each namespace."""

_UNITS = (("Gbit", 1e9), ("Mbit", 1e6), ("kbit", 1e3))
_PREFIX = "ftn"
_CLONE_NEWNET = 0x40000000
_BURST_S, _LEAST_BURST_BYTES = 0.004, 262144
"""What may be sent at once: so long at the link's rate, and no less than so much."""
_QUEUE_S = 0.05
_NETWORK = "10.213.0"
_HOST = f"{_NETWORK}.254"


def link_rate(text: str) -> float:
    """Bytes per second of "1Gbit", "10 Gbit/s" or "100 MB/s"."""
    try:
        return parse_rate(text if "/" in text or text.endswith("bps") else f"{text}/s", "links")
    except InputError as error:
        raise invalid("links", text, 'a rate such as "1Gbit" or "100 MB/s"') from error


def link_text(rate_bytes_per_s: float) -> str:
    """Write a rate as ``link_rate`` reads it, in the largest unit that fits.

    >>> [link_text(rate) for rate in (125e6, 1.25e9, 12.5e6)]
    ['1Gbit', '10Gbit', '100Mbit']
    """
    bits = 8 * rate_bytes_per_s
    unit, size = next(((unit, size) for unit, size in _UNITS if bits >= size), ("bit", 1.0))
    return f"{bits / size:.10g}{unit}"


def check_links() -> None:
    """Whether this machine lets us make namespaces and limit links."""
    if os.geteuid() != 0:
        raise InputError("links: network namespaces need root; run as root, or without --links")
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            raise InputError(f"links: {tool!r} is not installed; install iproute2, or run without --links")


def address(index: int) -> str:
    """Give the address of the namespace with this number in a fabric."""
    return f"{_NETWORK}.{index + 1}"


class Fabric:
    """Makes a namespace per worker in the ``with`` block, each with a link of ``rate_bytes_per_s`` both
    ways."""

    def __init__(self, workers: int, rate_bytes_per_s: float) -> None:
        if not 1 <= workers <= 250:
            raise InputError(f"links: {workers} workers do not fit; from 1 to 250 do")
        self._rate = rate_bytes_per_s
        self.namespaces = [f"{_PREFIX}{os.getpid()}x{i}" for i in range(workers)]
        self.bridge = f"{_PREFIX}{os.getpid()}b"

    def __enter__(self) -> Self:
        check_links()
        remove_stale()
        try:
            _ip("link", "add", self.bridge, "type", "bridge")
            _ip("link", "set", self.bridge, "up")
            for index, name in enumerate(self.namespaces):
                self._join(name, f"{address(index)}/24")
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._remove()

    def limit(self, rate_bytes_per_s: float) -> None:
        """Give all links another rate."""
        self._rate = rate_bytes_per_s
        for name in self.namespaces:
            self._limit_both(name)

    def host(self) -> str:
        """Give this machine itself an address among the namespaces, by a link without a limit."""
        _ip("address", "add", f"{_HOST}/24", "dev", self.bridge)
        return _HOST

    def _join(self, name: str, address: str) -> None:
        _ip("netns", "add", name)
        _ip("link", "add", name, "type", "veth", "peer", "name", INTERFACE, "netns", name)
        _ip("link", "set", name, "master", self.bridge, "up")
        _ip("-n", name, "address", "add", address, "dev", INTERFACE)
        _ip("-n", name, "link", "set", INTERFACE, "up")
        _ip("-n", name, "link", "set", "lo", "up")
        self._limit_both(name)

    def _limit_both(self, name: str) -> None:
        self._limit([], name)
        self._limit(["-n", name], INTERFACE)

    def _limit(self, where: list[str], interface: str) -> None:
        """A token bucket on what leaves this end: the worker's limits sending, the bridge's receiving."""
        rate, burst = f"{self._rate * 8:.0f}bit", f"{max(_LEAST_BURST_BYTES, self._rate * _BURST_S):.0f}b"
        bucket = ["tbf", "rate", rate, "burst", burst, "latency", f"{_QUEUE_S * 1e3:.0f}ms"]
        _run("tc", *where, "qdisc", "replace", "dev", interface, "root", *bucket)

    def _remove(self) -> None:
        _remove([self.bridge, *self.namespaces])


def enter(namespace: str) -> None:
    """Move this thread, and those that it starts, into a namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path(f"/run/netns/{namespace}").open() as file:
        if libc.setns(file.fileno(), _CLONE_NEWNET):
            reason = os.strerror(ctypes.get_errno())
            raise InputError(f"links: namespace {namespace} cannot be entered ({reason})")


def remove_stale() -> None:
    """Take away what campaigns left that were killed."""
    folders = [folder for folder in map(Path, ("/run/netns", "/sys/class/net")) if folder.is_dir()]
    names = {path.name for folder in folders for path in folder.iterdir()}
    owners = {name: re.fullmatch(rf"{_PREFIX}(\d+)(x\d+|b)", name) for name in names}
    _remove([name for name, match in owners.items() if match and not Path(f"/proc/{match[1]}").exists()])


def _remove(names: list[str]) -> None:
    """Namespaces take their links with them; what is not there is no error."""
    for name in names:
        for words in (("netns", "delete", name), ("link", "delete", name)):
            with contextlib.suppress(InputError):
                _ip(*words)


def _ip(*words: str) -> None:
    _run("ip", *words)


def _run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise InputError(f"links: '{' '.join(words)}' failed: {' '.join(done.stderr.split())}")
