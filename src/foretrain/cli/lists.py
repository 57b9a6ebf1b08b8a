"""Reads the values of options that take several, with commas between them."""

from __future__ import annotations

from foretrain.errors import invalid


def words(field: str, text: str | None) -> tuple[str, ...]:
    """Read words; nothing where the option is not given, one at least where it is.

    >>> words("devices", "h100, a100"), words("devices", None)
    (('h100', 'a100'), ())
    """
    parts = tuple(word.strip() for word in (text or "").split(",") if word.strip())
    if text is not None and not parts:
        raise invalid(field, text, "names or numbers with commas between them")
    return parts


def whole_numbers(field: str, text: str | None) -> tuple[int, ...]:
    """Read whole numbers; nothing where the option is not given.

    >>> whole_numbers("samples", "1e6,50000")
    (1000000, 50000)
    """
    try:
        values = [float(word) for word in words(field, text)]
    except ValueError:
        values = [0.5]
    if not all(map(float.is_integer, values)):
        raise invalid(field, text, "whole numbers with commas between them")
    return tuple(map(int, values))


def sides(field: str, text: str) -> int | list[int]:
    """Read the size of an image: the length of its side, or channels, height and width.

    >>> sides("image", "224"), sides("image", "3,224,192"), sides("image", "1x28x28")
    (224, [3, 224, 192], [1, 28, 28])
    """
    parts = text.replace("x", ",").split(",")
    if len(parts) not in (1, 3) or not all(part.strip().isdigit() for part in parts):
        raise invalid(field, text, "a side length or channels,height,width")
    return int(text) if len(parts) == 1 else list(map(int, parts))
