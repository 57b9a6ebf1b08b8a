"""Holds what launch files say, each setting with its place, and what a job makes of it."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, get_args, get_type_hints

from foretrain.errors import InputError
from foretrain.job import SPELLED
from foretrain.plan import Plan
from foretrain.workload import Training

Read = Callable[[Any], Any]
"""A value as a job has it, None where it leaves the matter open; a ValueError says what is allowed."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One key of a launch file."""

    key: str
    """As its file spells it."""
    value: Any
    where: str
    """File and line, such as ``run.sh:12``."""

    @property
    def unresolved(self) -> bool:
        """Whether the value is only known when a script runs."""
        return isinstance(self.value, str) and "$" in self.value

    def refused(self, allowed: str) -> InputError:
        return InputError(f"{self.where}: {self.key}: {self.value!r} is not {allowed}")

    @property
    def words(self) -> str:
        """Write the key with its value for people."""
        listed = self.value if isinstance(self.value, list) else [self.value]
        value = " ".join(" ".join(map(str, listed)).split())
        if self.key.startswith("-"):
            return self.key if self.value is True else f"{self.key} {value}"
        return f"{self.key} = {value}" if self.key else value


@dataclass(frozen=True, slots=True)
class Key:
    """Says what a key of a launcher means: a field of a job, of ``run`` or of ``own``, and how its value
    reads.

    ``run`` has what every launcher says and no job does in this way (``RUN_FIELDS``); ``own`` what a
    framework's reader puts together with others.
    """

    field: str
    read: Read = lambda value: value
    shown: str = ""
    """What of the job it decides, where ``field`` is none."""


Keys = Mapping[str, Key]

RUN_FIELDS = {
    "run.micro": "plan.micro_batch",
    "run.accumulation": "training.global_batch",
    "run.batch": "training.global_batch",
    "run.micro_tokens": "plan.micro_batch",
    "run.batch_tokens": "training.global_batch",
    "run.pipeline_micro": "plan.micro_batch",
    "run.devices": "cluster",
    "run.shard_degree": "plan.data",
    "run.model": "model",
    "run.device": "cluster.device",
}
"""What launchers say otherwise than jobs do, and the field that each decides."""


@dataclass(frozen=True, slots=True)
class Understood:
    """A setting and the field of the job that it decides."""

    setting: Setting
    field: str


@dataclass(slots=True)
class Reading:
    """The tables of a job as they come together, and what became of each setting."""

    tables: dict[str, dict[str, Any]] = field(default_factory=dict)
    sources: dict[str, tuple[Setting, str]] = field(default_factory=dict)
    """The setting that each field is from, and who reads it."""
    understood: list[Understood] = field(default_factory=list)
    ignored: list[Setting] = field(default_factory=list)
    """What changes no forecast."""
    unmodelled: list[Setting] = field(default_factory=list)
    """What would change one, and no job can say."""
    unknown: list[Setting] = field(default_factory=list)
    assumed: list[str] = field(default_factory=list)

    def put(self, path: str, value: Any, setting: Setting, reader: str) -> None:
        """Set a field; another value of it from another reader is refused."""
        before = self.sources.get(path)
        if before is not None and before[1] != reader and self.get(path) != value:
            earlier = before[0]
            raise InputError(
                f"{setting.where}: {setting.words} contradicts {earlier.words} ({earlier.where})"
            )
        self.sources[path] = setting, reader
        self.set(path, value)

    def set(self, path: str, value: Any) -> None:
        """Set a field without a source."""
        *parents, last = path.split(".")
        table: dict[str, Any] = self.tables
        for parent in parents:
            table = table.setdefault(parent, {})
        table[last] = value

    def get(self, path: str, default: Any = None) -> Any:
        table: Any = self.tables
        for name in path.split("."):
            if not isinstance(table, Mapping) or name not in table:
                return default
            table = table[name]
        return table

    def default(self, path: str, value: Any, why: str = "") -> None:
        """Set a field that nothing has set, and say so where ``why`` is given."""
        if self.get(path) is None:
            self.set(path, value)
            if why:
                self.assumed.append(f"{path} = {value}: {why}")

    def whose(self, path: str) -> Setting | None:
        """The setting that a field is from."""
        source = self.sources.get(path)
        return None if source is None else source[0]

    def said(self, path: str, otherwise: str) -> str:
        """The setting that a field is from, as a message names it."""
        setting = self.whose(path)
        return otherwise if setting is None else setting.words

    def where(self, *paths: str) -> str:
        """The place of the first of these fields that a file gives, in front of a message."""
        setter = next((setting for path in paths if (setting := self.whose(path)) is not None), None)
        return "" if setter is None else f"{setter.where}: "


def take(
    reading: Reading,
    settings: Iterable[Setting],
    keys: Keys,
    reader: str,
    *,
    ignored: str = "",
    unmodelled: str = "",
    name: Callable[[str], str] = str,
) -> None:
    """Put settings into the fields that a table of keys names; ``ignored`` and ``unmodelled`` are patterns,
    split at blanks."""
    nothing, lacking = ignored.split(), unmodelled.split()
    for setting in settings:
        plain = name(setting.key)
        key = keys.get(plain)
        if key is not None and setting.unresolved and _is_switch(key.read):
            setting = Setting(setting.key, True, setting.where)  # the variable behind it is another word
        if key is not None and setting.unresolved:
            reading.unknown.append(setting)
        elif key is not None:
            _take_one(reading, setting, key, reader)
        elif any(fnmatch.fnmatchcase(plain, pattern) for pattern in lacking):
            off = str(setting.value).lower() in _NO
            (reading.ignored if off else reading.unmodelled).append(setting)
        elif any(fnmatch.fnmatchcase(plain, pattern) for pattern in nothing):
            reading.ignored.append(setting)
        else:
            reading.unknown.append(setting)


def _is_switch(read: Read) -> bool:
    return read in (yes, no) or isinstance(read, When)


_NOUNS = {"plan": Plan, "training": Training}


def _can_be_said(path: str, value: Any) -> bool:
    """Whether a job has such a field, and the field such a value where it is one of a few."""
    section, _, rest = path.partition(".")
    if section not in _NOUNS:
        return True
    hint = get_type_hints(_NOUNS[section]).get(rest.partition(".")[0])
    choices = [one for part in get_args(hint) or () for one in get_args(part)]
    return hint is not None and (not isinstance(value, str) or not choices or value in choices)


def _take_one(reading: Reading, setting: Setting, key: Key, reader: str) -> None:
    try:
        value = key.read(setting.value)
    except ValueError as error:
        raise setting.refused(str(error)) from error
    shown = key.shown or RUN_FIELDS.get(key.field, key.field)
    if not _can_be_said(key.field, value):
        reading.unmodelled.append(setting)
        return
    reading.understood.append(Understood(setting, shown))
    if value is not None:
        reading.put(key.field, value, setting, reader)


def dashed(key: str) -> str:
    """The key of an option: ``--micro-batch-size`` is ``micro_batch_size``."""
    return key.lstrip("-").replace("-", "_")


# What values are


def whole(value: Any) -> int | None:
    """A count of at least one; ``auto``, nothing and a count below zero leave it open.

    >>> whole("8"), whole(5e8), whole("1_024"), whole("auto"), whole(-1)
    (8, 500000000, 1024, None, None)
    """
    if value is None or str(value).lower() in ("auto", "none", "null", ""):
        return None
    number = _number(value)
    if isinstance(value, bool) or number is None or number != int(number) or number == 0:
        raise ValueError("a whole number of at least 1")
    return int(number) if number > 0 else None


def count(value: Any) -> int | None:
    """A count that may be zero, which is as good as nothing.

    >>> count("0"), count(2)
    (None, 2)
    """
    return None if value in (0, "0", None, False) else whole(value)


def share(value: Any) -> float | None:
    """A number above zero."""
    number = None if value is None else _number(value)
    if value is not None and number is None:
        raise ValueError("a number")
    return number


def _number(value: Any) -> float | None:
    try:
        return float(str(value).replace("_", ""))
    except ValueError:
        return None


_YES = ("true", "yes", "on", "1", "y", "t")
_NO = ("false", "no", "off", "0", "n", "f", "none", "null", "")


def yes(value: Any) -> bool | None:
    """A switch, as shells, YAML and Python write it.

    >>> yes("True"), yes(True), yes("no"), yes("auto")
    (True, True, False, None)
    """
    text = str(value).lower()
    if text == "auto":
        return None
    if text not in (*_YES, *_NO):
        raise ValueError("true or false")
    return text in _YES


def no(value: Any) -> bool | None:
    """A switch that turns something off."""
    switched = yes(value)
    return None if switched is None else not switched


@dataclass(frozen=True, slots=True)
class When:
    """A switch that means a value when it is on, and nothing when it is off."""

    meant: Any

    def __call__(self, value: Any) -> Any:
        return self.meant if yes(value) else None


def one_of(names: Mapping[str, Any]) -> Read:
    """Read one of a few names, in any case."""

    def read(value: Any) -> Any:
        text = str(value).lower()
        if text not in names:
            raise ValueError(f"one of {', '.join(names)}")
        return names[text]

    return read


def spelled(name: str) -> Read:
    """Read what the field of a job reads by itself: an optimizer, a precision, a schedule."""

    def read(value: Any) -> Any:
        try:
            return SPELLED[name](value, name)
        except InputError as error:
            raise ValueError(_allowed(str(error))) from error

    return read


def _allowed(message: str) -> str:
    """Take what is allowed out of a message ``field: value is not ...``."""
    _, separator, allowed = message.partition(" is not ")
    return allowed if separator else f"clear: {message.partition(': ')[2]}"


def text(value: Any) -> str | None:
    return None if value in (None, "", "none", "null") else str(value)


DTYPES = {
    "fp32": "fp32", "float32": "fp32", "torch.float32": "fp32", "bf16": "bf16", "bfloat16": "bf16",
    "torch.bfloat16": "bf16", "fp16": "fp16", "float16": "fp16", "torch.float16": "fp16", "fp8": "fp8",
    "half": "fp16", "float": "fp32",
}  # fmt: skip
"""Formats of numbers as libraries name them."""

dtype = one_of(DTYPES)
