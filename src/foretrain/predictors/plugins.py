"""Finds predictors that do not come with foretrain: a class in a file that the user names, or one that a
package installed."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

from foretrain.errors import ForetrainError, InputError, first_line
from foretrain.predictors.base import Predictor
from foretrain.tracebacks import raised_at

GROUP = "foretrain.predictors"
"""The entry points by which packages offer predictors."""

_IN_FILE = re.compile(r"(?P<path>.+\.py):(?P<attribute>[^\W\d]\w*)")


def is_in_file(name: str) -> bool:
    """Whether a predictor is named by its file and class.

    >>> is_in_file("mine.py:Mine"), is_in_file("ernest"), is_in_file("mine.py")
    (True, False, False)
    """
    return _IN_FILE.fullmatch(name) is not None


@functools.cache
def installed() -> dict[str, EntryPoint]:
    """The predictors that packages offer, by name."""
    return {point.name: point for point in entry_points(group=GROUP)}


def class_installed(name: str) -> type[Predictor]:
    """The class that a package offers by this name."""
    point = installed()[name]
    title = f"predictor {name} ({point.value})"
    try:
        loaded = point.load()
    except (Exception, SystemExit) as error:
        raise _not_loaded(title, error) from error
    kind = _checked(title, loaded)
    if kind.name != name:
        raise InputError(f"{title}: it calls itself {kind.name!r}; entry point and name must be the same")
    return kind


def class_in_file(name: str) -> type[Predictor]:
    """The class that ``file.py:Class`` names; the file is run once for as long as its content stays the
    same."""
    path, attribute = _parts(name)
    if not path.is_file():
        raise InputError(f"predictor {name}: there is no file {path}")
    module = _module(f"predictor {name}", path)
    if not hasattr(module, attribute):
        raise InputError(f"predictor {name}: {path} has no {attribute}{_offers(module)}")
    return _checked(f"predictor {name}", getattr(module, attribute))


@contextlib.contextmanager
def told_in_one_line(kind: type[Predictor]) -> Iterator[None]:
    """Tell in one line, with its place, what the code of a class raises in the block that does not come with
    foretrain."""
    try:
        yield
    except ForetrainError:
        raise
    except Exception as error:
        if kind.__module__.partition(".")[0] == "foretrain":
            raise
        where = raised_at(error)
        at = f" (at {where})" if where else ""
        raise InputError(
            f"predictor {kind.__name__}: {type(error).__name__}: {first_line(error)}{at}"
        ) from error


def file_of(kind: type[Predictor]) -> Path | None:
    """The file that a class was read from by ``class_in_file``; None for any other class."""
    module = sys.modules.get(kind.__module__)
    if module is None or not kind.__module__.startswith(_PREFIX):
        return None
    return Path(str(module.__file__))


_PREFIX = "foretrain_plugin_"


def _parts(name: str) -> tuple[Path, str]:
    match = _IN_FILE.fullmatch(name)
    assert match is not None
    return Path(match["path"]), match["attribute"]


def _module(title: str, path: Path) -> object:
    content = path.read_bytes()
    name = f"{_PREFIX}{path.stem}_{hashlib.sha256(bytes(path.resolve()) + content).hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        exec(compile(content, str(path), "exec"), module.__dict__)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise _not_loaded(title, error) from error
    return module


def _not_loaded(title: str, error: BaseException) -> InputError:
    return InputError(f"{title}: cannot be loaded ({type(error).__name__}: {first_line(error)})")


def _offers(module: object) -> str:
    """The predictors that a file does have, for the error where it lacks the one asked for."""
    kinds = [
        name
        for name, value in vars(module).items()
        if inspect.isclass(value) and issubclass(value, Predictor) and value.__module__ == module.__name__  # type: ignore[attr-defined]
    ]
    return f" (it has {', '.join(kinds)})" if kinds else ""


def _checked(title: str, candidate: object) -> type[Predictor]:
    """A class that the program can make a predictor of, with no more than its name."""
    if not inspect.isclass(candidate) or not issubclass(candidate, Predictor):
        raise InputError(f"{title}: is not a class derived from foretrain.predictors.base.Predictor")
    if inspect.isabstract(candidate):
        raise InputError(f"{title}: lacks {', '.join(sorted(candidate.__abstractmethods__))}")
    for field in ("name", "quantities"):
        if not hasattr(candidate, field):
            raise InputError(f"{title}: lacks the class variable {field}")
    needed = [
        parameter.name
        for parameter in inspect.signature(candidate).parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    if needed:
        raise InputError(
            f"{title}: its constructor needs {', '.join(needed)}; every setting has to have a default"
        )
    return candidate
