"""Turns text for people into SI numbers and back: "80 GiB", "3h", "$4.10/h", "400 Gb/s"."""

from __future__ import annotations

import math
import re

from foretrain.errors import invalid

_DECIMAL = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40, "Pi": 2.0**50}
_PREFIX = {**_DECIMAL, **_BINARY}
_SECONDS = {
    "us": 1e-6,
    "ms": 1e-3,
    "s": 1.0,
    "sec": 1.0,
    "min": 60.0,
    "m": 60.0,
    "h": 3600.0,
    "d": 86400.0,
    "day": 86400.0,
    "days": 86400.0,
    "w": 604800.0,
}
_NUMBER = r"([0-9]*\.?[0-9]+(?:[eE][-+]?[0-9]+)?)"


def parse_bytes(value: float | str, field: str = "size") -> float:
    """Bytes from a number or from text such as "80 GiB", "25MB"."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    match = re.fullmatch(rf"\s*{_NUMBER}\s*([kKMGTP]i?)?B?\s*", str(value))
    if match is None:
        raise invalid(field, value, 'a size such as "80 GiB" or "25 MB"')
    return float(match[1]) * _PREFIX[match[2] or ""]


LEAST_BARE_MEMORY = 2**20
"""Bytes below which a device's memory needs its unit: ``70`` was meant in some other one."""


def parse_memory(value: float | str, field: str) -> float:
    """Bytes of a device's memory, as ``parse_bytes`` reads them."""
    size_bytes = parse_bytes(value, field)
    if size_bytes < LEAST_BARE_MEMORY:
        raise invalid(field, value, 'a size with its unit, such as "70 GiB"')
    return size_bytes


LEAST_BARE_RATE = 1e6
"""Bytes per second below which a rate needs its unit: ``bandwidth = 400`` was meant in some other one."""


def parse_rate(value: float | str, field: str = "bandwidth") -> float:
    """Bytes per second from a number or text: "900 GB/s" are bytes, "400 Gb/s" (Gbit/s, Gbps) are bits."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        if 0 < value < LEAST_BARE_RATE:
            allowed = f"bytes per second of at least {LEAST_BARE_RATE:,.0f}"
            raise invalid(field, value, f'a rate with its unit, such as "400 Gb/s", or {allowed}')
        return float(value)
    match = re.fullmatch(rf"\s*{_NUMBER}\s*([kKMGTP]i?)?(B/s|b/s|bit/s|bps)\s*", str(value))
    if match is None:
        raise invalid(field, value, 'a rate such as "900 GB/s" or "400 Gb/s"')
    return float(match[1]) * _PREFIX[match[2] or ""] / (1.0 if match[3] == "B/s" else 8.0)


def parse_seconds(value: float | str, field: str = "time") -> float:
    """Seconds from a number or from text such as "3h", "1d 12h", "90 min"."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    parts = re.findall(rf"{_NUMBER}\s*([a-z]+)", str(value))
    rest = re.sub(rf"{_NUMBER}\s*([a-z]+)|\s", "", str(value))
    if not parts or rest or any(unit not in _SECONDS for _, unit in parts):
        raise invalid(field, value, 'a time such as "3h", "1d 12h" or "90 min"')
    return sum(float(number) * _SECONDS[unit] for number, unit in parts)


def parse_price(value: float | str, field: str = "price") -> float:
    """Dollars per hour from a number or from text such as "$4.10/h"."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    match = re.fullmatch(rf"\s*\$?\s*{_NUMBER}\s*(?:/\s*h(?:our)?)?\s*", str(value))
    if match is None:
        raise invalid(field, value, 'a price per hour such as "$4.10/h"')
    return float(match[1])


def parse_dollars(value: float | str, field: str = "cost") -> float:
    """Dollars from a number or from text such as "$5,000"."""
    try:
        return float(str(value).strip().removeprefix("$").replace(",", ""))
    except ValueError as error:
        raise invalid(field, value, "a number of dollars, such as 5000") from error


def counted(count: int, noun: str) -> str:
    """Write a number of things for people.

    >>> counted(1, "core"), counted(1200, "core")
    ('1 core', '1,200 cores')
    """
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def format_bytes(size_bytes: float) -> str:
    """Write bytes for people, in binary units: 85899345920 -> "80 GiB"."""
    for unit, scale in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(size_bytes) >= scale:
            return f"{_three_digits(size_bytes / scale)} {unit}"
    return f"{size_bytes:.0f} B"


def format_seconds(time_s: float) -> str:
    """Write a time for people: 0.00123 -> "1.23 ms", 11520 -> "3 h 12 min"."""
    if not math.isfinite(time_s):
        return str(time_s)
    for unit, ratio, smaller in (("d", 24, "h"), ("h", 60, "min"), ("min", 60, "s")):
        if time_s >= _SECONDS[unit]:
            return _two_units(time_s / _SECONDS[unit], unit, ratio, smaller)
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if time_s >= scale:
            return f"{_three_digits(time_s / scale)} {unit}"
    return f"{time_s * 1e9:.0f} ns" if time_s else "0 s"


def format_count(value: float, unit: str = "") -> str:
    """Write a number for people, in decimal units: 4.09e9 -> "4.09 G"; with a unit, "4.09 GFLOP"."""
    for prefix, scale in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= scale:
            return f"{_three_digits(value / scale)} {prefix}{unit}"
    return f"{_three_digits(value)} {unit}".rstrip()


def format_dollars(amount: float) -> str:
    """Write dollars for people: "$0.42", "$1,234"; less than a cent is "$0.0031"."""
    if 0 < amount < 0.01:
        return f"${amount:.2g}" if amount >= 1e-4 else "<$0.0001"
    return f"${amount:,.2f}" if amount < 1000 else f"${amount:,.0f}"


def format_quantity(name: str, value: float) -> str:
    """A measured or forecast value by the unit that ends its name.

    >>> format_quantity("step_time_s", 0.25), format_quantity("tokens_per_s", 52300.0)
    ('250 ms', '52,300')
    """
    if name.endswith("_s") and not name.endswith("per_s"):
        return format_seconds(value)
    if name.endswith("_bytes"):
        return format_bytes(value)
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _two_units(value: float, unit: str, ratio: int, smaller: str) -> str:
    whole, rest = divmod(round(value * ratio), ratio)
    return f"{whole:,d} {unit} {rest} {smaller}" if rest else f"{whole:,d} {unit}"


def _three_digits(value: float) -> str:
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}" if value else "0"
