"""Records what a model reads while it is traced: files, environment variables, packages."""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib.metadata
import importlib.util
import os
import sys
import sysconfig
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from foretrain.capture.reads import LIBRARY_VARIABLES, Reads, digest, version

_LIBRARIES = frozenset("foretrain torch torchvision timm transformers huggingface_hub numpy".split())
"""Whose versions a graph knows anyway: what they ask of the environment is not the model's doing."""

_OF_THE_SHELL = frozenset("_ COLUMNS LINES OLDPWD PWD PYTEST_CURRENT_TEST SHLVL TERM".split())
"""Variables that differ from one command to the next, and say nothing of a model."""


class Recording:
    """What the code of a model reads in this thread while it is on."""

    def __init__(self, model: Path) -> None:
        self._model, self._folder = str(model.absolute()), str(model.absolute().parent)
        self._inside = f"{self._folder}{os.sep}"
        self._thread = threading.get_ident()
        self._opened: set[str] = set()
        self._written: set[str] = set()
        self._variables: set[str] = set()
        self._listed: dict[int, str] = {}

    def is_of(self, model: Path) -> bool:
        return self._thread == threading.get_ident() and self._model == str(model.absolute())

    def opened(self, path: Any, mode: Any, flags: Any) -> None:
        if threading.get_ident() != self._thread or not isinstance(path, str | bytes | os.PathLike):
            return
        name = str(Path(os.fsdecode(path)).absolute())
        writes = any(sign in mode for sign in "wax+") if isinstance(mode, str) else False
        if writes or (isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR)):
            self._written.add(name)
        elif name not in self._written and (name.startswith(self._inside) or _by_model(sys._getframe(2))):
            self._opened.add(name)
            for module in self._modules(sys._getframe(2)):
                _read_by.setdefault(module, _ModuleReads()).files.update(_own([name]))

    def asked(self, variable: str, frame: FrameType) -> None:
        if threading.get_ident() != self._thread or variable in _OF_THE_SHELL:
            return
        if self._listed.get(id(variable)) is not variable and _by_model(frame, _LIBRARIES):
            self._variables.add(variable)
            for module in self._modules(frame):
                _read_by.setdefault(module, _ModuleReads()).variables.add(variable)

    def listed(self, variable: str) -> None:
        """A variable that going over all of them has given out: looking up that very string is no question of
        the model's. Strings of one letter are the same object everywhere."""
        if len(variable) > 1:
            self._listed[id(variable)] = variable

    def _modules(self, frame: FrameType | None) -> Iterator[str]:
        """The files of the user whose code is running, without those of the model's folder, which are
        imported anew each time."""
        while frame is not None and (package := _package(name := frame.f_code.co_filename)) != "foretrain":
            if package is None and not _is_standard(name) and not name.startswith(self._inside):
                yield name
            frame = frame.f_back

    def reads(self) -> Reads:
        """What was read, with the modules that the code of the model names, loaded before or not."""
        files = {_source(name) for name in self._opened if not _is_standard(name)}
        packages = {found for name in files if (found := _package(name)) is not None}
        files = _own(files)
        variables = set(self._variables)
        _follow_imports(self._model, Path(self._folder), files, packages, variables)
        _remember(name for name in files if name.endswith(".py"))
        variables |= {name for package in packages for name in LIBRARY_VARIABLES.get(package, ())}
        return Reads(
            files=frozenset(seen for name in files for seen in self._seen(name)),
            variables=frozenset(variables),
            packages=frozenset(_distribution(name) for name in packages if name != "foretrain"),
        )

    def _seen(self, name: str) -> Iterator[str]:
        """A file of the model's folder from there; another one by its place as well, if the folder moves."""
        relative = os.path.relpath(name, self._folder)
        yield relative
        if relative.startswith(os.pardir):
            yield name


@contextlib.contextmanager
def recording(model: Path) -> Iterator[Recording]:
    """Record in this block what the model of a file reads; a block inside of another is part of that one."""
    global _active
    if _active is not None and _active.is_of(model):
        yield _active
        return
    _forget_changed()
    _listen()
    before, _active = _active, Recording(model)
    kind, os.environ.__class__ = os.environ.__class__, _Asked
    try:
        yield _active
    finally:
        os.environ.__class__ = kind
        _active = before
        _remember({name for module, reads in _read_by.items() for name in (module, *reads.files)})


def _by_model(frame: FrameType | None, others: frozenset[str] = frozenset()) -> bool:
    """Whether code of the user has something done: itself or through a package, which is neither one of
    ``others`` nor is being imported."""
    while frame is not None:
        name = frame.f_code.co_filename
        if not _is_standard(name):
            package = _package(name)
            if package is None:
                return True
            if package in others or package == "foretrain" or frame.f_code.co_name == "<module>":
                return False
        frame = frame.f_back
    return False


_active: Recording | None = None


@functools.cache
def _listen() -> None:
    """Hear of every file that Python opens; a hook cannot be taken away again."""

    def hear(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and _active is not None:
            _active.opened(*arguments)

    sys.addaudithook(hear)


class _Asked(type(os.environ)):  # type: ignore[misc]
    """The environment, which tells of each variable that is asked for."""

    def __getitem__(self, key: str) -> str:
        if _active is not None and isinstance(key, str):
            _active.asked(key, sys._getframe(1))
        value: str = super().__getitem__(key)
        return value

    def __iter__(self) -> Iterator[str]:
        for key in super().__iter__():
            if _active is not None:
                _active.listed(key)
            yield key


# Places

_SYSTEM = ("/proc/", "/sys/", "/dev/")


@functools.cache
def _places() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Folders of the standard library, and of installed packages."""
    paths = sysconfig.get_paths()
    standard = {os.path.realpath(paths[name]) for name in ("stdlib", "platstdlib")}
    standard |= {str(Path(os.__file__).resolve().parent)}
    installed = {paths["purelib"], paths["platlib"]} | {
        folder for folder in sys.path if Path(folder).name in ("site-packages", "dist-packages")
    }
    installed |= {os.path.realpath(folder) for folder in installed}
    return tuple(f"{one}{os.sep}" for one in standard), tuple(f"{one}{os.sep}" for one in installed)


_OURS = f"{Path(__file__).resolve().parents[1]}{os.sep}"


@functools.cache
def _package(name: str) -> str | None:
    """The installed package that a file belongs to, by the name it is imported by."""
    if name.startswith(_OURS):
        return "foretrain"
    for folder in _places()[1]:
        if name.startswith(folder):
            return Path(name[len(folder) :]).parts[0].removesuffix(".py")
    return None


def _is_standard(name: str) -> bool:
    if name.startswith("<"):  # what runs from memory, such as the machinery of imports
        return True
    return _package(name) is None and name.startswith(_places()[0])


def _source(name: str) -> str:
    """The file whose bytecode was opened, where that was read in its place."""
    if not name.endswith(".pyc"):
        return name
    with contextlib.suppress(ValueError):
        return importlib.util.source_from_cache(name)
    return name


def _own(names: Iterable[str]) -> set[str]:
    """Those files that are neither the system's, nor Python's, nor of installed packages; sources in the
    place of their bytecode."""
    sources = {_source(name) for name in names if not _is_standard(name)}
    return {name for name in sources if _package(name) is None and not name.startswith(_SYSTEM)}


@functools.cache
def _distribution(package: str) -> str:
    """The name that a package was installed by."""
    if version(package) is not None:
        return package
    return importlib.metadata.packages_distributions().get(package, [package])[0]


# Modules


def _follow_imports(
    model: str, folder: Path, files: set[str], packages: set[str], variables: set[str]
) -> None:
    """Add what the code of the model and of its modules imports: files and installed packages, those too that
    were loaded before, with what they read then, and the places beside the model where a module is missed."""
    unread, done = [model, *(name for name in files if name.endswith(".py"))], set[str]()
    while unread:
        if (name := unread.pop()) in done:
            continue
        done.add(name)
        if (before := _read_by.get(name)) is not None:
            files |= before.files
            variables |= before.variables
            unread += (file for file in before.files if file.endswith(".py"))
        for top in _imported(name):
            found = set(_loaded(top))
            packages |= {package for one in found if (package := _package(one)) is not None}
            own = {one for one in found if _package(one) is None}
            beside = {str(folder / f"{top}.py"), str(folder / top / "__init__.py")}
            files |= own if found else beside
            unread += own
    files.discard(model)


def _imported(path: str) -> set[str]:
    """The first names of the modules that a file of Python imports, wherever it does."""
    try:
        tree = ast.parse(Path(path).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return set()
    names = set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.split(".")[0])
    return names - sys.stdlib_module_names


def _loaded(top: str) -> Iterator[str]:
    """The files of a module and of all below it that are loaded."""
    for name, module in list(sys.modules.items()):
        if name == top or name.startswith(f"{top}."):
            file = getattr(module, "__file__", None)
            if isinstance(file, str) and Path(file).is_absolute() and not _is_standard(file):
                yield file


@dataclass(frozen=True, slots=True)
class _ModuleReads:
    """What a module of the user has read, when it was imported or since."""

    files: set[str] = field(default_factory=set)
    variables: set[str] = field(default_factory=set)


_read_by: dict[str, _ModuleReads] = {}
"""By the files of modules that stay loaded from one trace of this process to the next, which read no more."""

_files_before: dict[str, str | None] = {}
_variables_before: dict[str, str | None] = {}
"""Modules that models were traced with in this process, what they read, and what stood there."""


def _remember(files: Iterable[str]) -> None:
    for name in files:
        if name not in _files_before:
            _files_before[name] = digest(Path(name))
    for name in {name for reads in _read_by.values() for name in reads.variables} - set(_variables_before):
        _variables_before[name] = os.environ.get(name)


def _forget_changed() -> None:
    """Modules that were edited since, or have read what was, are imported anew, with the packages that they
    are part of and the modules that import them."""
    files = {name for name, before in _files_before.items() if digest(Path(name)) != before}
    variables = {name for name, before in _variables_before.items() if os.environ.get(name) != before}
    changed = files | {
        module for module, reads in _read_by.items() if reads.files & files or reads.variables & variables
    }
    if changed:
        loaded = {
            name: file
            for name, module in list(sys.modules.items())
            if name != "__main__" and isinstance(file := getattr(module, "__file__", None), str)
        }
        tops, more = set[str](), {name.split(".")[0] for name, file in loaded.items() if file in changed}
        while more:
            tops |= more
            users = {
                name for name, file in loaded.items() if file in _files_before and _imported(file) & more
            }
            more = {name.split(".")[0] for name in users} - tops
        gone = [name for name in sys.modules if name.split(".")[0] in tops]
        changed |= {loaded[name] for name in gone if name in loaded}
        for name in gone:
            del sys.modules[name]
    for name in changed:
        _files_before.pop(name, None)
        _read_by.pop(name, None)
    for name in variables:
        del _variables_before[name]
