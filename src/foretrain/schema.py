"""Reads dataclasses from TOML or JSON: unknown keys, missing keys and wrong types are one clear line each."""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar, get_args, get_origin

from foretrain.errors import InputError, invalid, unknown

T = TypeVar("T")


def quantity(parse: Callable[[Any, str], float], **kwargs: Any) -> Any:
    """A dataclass field whose text form ("80 GiB") is read by ``parse``; inside it is a plain SI number."""
    return dataclasses.field(metadata={"parse": parse}, **kwargs)


def read(cls: type[T], section: object, path: str) -> T:
    """Build ``cls`` from ``section``; ``path`` ("training") is the prefix of the field names in errors."""
    if not isinstance(section, Mapping):
        raise invalid(path, section, "a table of keys and values")
    fields, hints = _shape(typing.cast(Any, cls))
    for key in section:
        if key not in fields:
            name = str(key).replace("\n", " ")
            raise unknown(f"{path}.{name}" if path else name, key, fields, "a known key; allowed are")
    values: dict[str, Any] = {}
    for name, field in fields.items():
        where = f"{path}.{name}" if path else name
        if name in section:
            parse, value = field.metadata.get("parse"), section[name]
            if parse is None or value is None:
                values[name] = convert(value, hints[name], where)
            else:
                values[name] = parse(value, where)
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise InputError(f"{where}: missing; it is required")
    return cls(**values)


def convert(value: Any, hint: Any, where: str) -> Any:
    """``value`` as the annotated type ``hint``; an error names the field, the value and what is allowed."""
    origin = get_origin(hint)
    if hint is Any or hint is object:
        return value
    if origin is Literal:
        boolean = any(isinstance(choice, bool) for choice in get_args(hint))
        if value not in get_args(hint) or isinstance(value, bool) != boolean:
            raise unknown(where, value, map(str, get_args(hint)))
        return value
    if origin in (typing.Union, types.UnionType):
        return _convert_union(value, get_args(hint), where)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return value if isinstance(value, hint) else read(hint, value, where)
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise invalid(where, value, "a list")
        item_hints = get_args(hint)
        if len(item_hints) == 2 and item_hints[1] is Ellipsis:
            return tuple(convert(item, item_hints[0], f"{where}[{i}]") for i, item in enumerate(value))
        if len(item_hints) != len(value):
            raise invalid(where, value, f"a list of {len(item_hints)} values")
        return tuple(
            convert(item, item_hint, f"{where}[{i}]")
            for i, (item, item_hint) in enumerate(zip(value, item_hints, strict=True))
        )
    if origin in (dict, Mapping) or hint in (dict, Mapping) or getattr(origin, "__name__", "") == "Mapping":
        if not isinstance(value, Mapping):
            raise invalid(where, value, "a table of keys and values")
        item = get_args(hint)[1] if get_args(hint) else Any
        return {str(key): convert(inner, item, f"{where}.{key}") for key, inner in value.items()}
    if hint is int and isinstance(value, int) and abs(value) > _MOST:
        raise invalid(where, value, "a number of at most 2^63")
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            raise invalid(where, value, "a number of at most 1.8e308") from None
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        raise invalid(where, value, _NAMES.get(hint, hint.__name__))
    if isinstance(value, str) and "\0" in value:
        raise invalid(where, value, "a text without NUL")  # no file can be called so
    return value


_MOST = 2**63 - 1
"""What tensors and arrays count with."""
_NAMES: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    str: "a text",
    bool: "true or false",
    type(None): "empty",
}


def _convert_union(value: Any, choices: tuple[Any, ...], where: str) -> Any:
    if value is None and type(None) in choices:
        return None
    choices = tuple(choice for choice in choices if choice is not type(None))
    for choice in choices:
        try:
            return convert(value, choice, where)
        except InputError:
            if len(choices) == 1:
                raise
    allowed = " or ".join(
        "a list"
        if get_origin(choice) is tuple
        else "a table"
        if get_origin(choice) is Mapping
        else _NAMES.get(choice, str(choice))
        for choice in choices
    )
    raise invalid(where, value, allowed)


@functools.cache
def _shape(cls: Any) -> tuple[dict[str, dataclasses.Field[Any]], dict[str, Any]]:
    """The readable fields of a dataclass and their resolved annotations, worked out once per class."""
    return {field.name: field for field in dataclasses.fields(cls) if field.init}, typing.get_type_hints(cls)
