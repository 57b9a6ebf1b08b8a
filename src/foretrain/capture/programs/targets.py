"""Says what the names of a Python file are, by its text alone: models, training steps, scripts."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from foretrain.errors import CaptureError, InputError, unknown

Kind = Literal["builder", "step", "script", "lightning", "trainer"]
"""``builder``: gives a model; ``step``: trains when it is called; ``script``: trains when the file is run."""

BATCH_NAMES = tuple(
    re.compile(pattern)
    for pattern in (
        "batch",
        "batch_?(size|sz)",
        "((micro|mini|local|global|train|input|per_device|per_gpu|n|num)_?)+batch(_?(size|sz))?",
        "batch(_size)?_per_(device|gpu|rank)",
        "bsz?",
        "b",
        "(n_|num_)?samples",
        "n",
    )
)
"""Whole names that functions take the batch by; of several, the one that comes first here."""

_TRAINS = frozenset({"backward", "manual_backward", "fit"})
_OPTIMIZERS = re.compile(r"(^|[._])(o|opt|optim|optimi[sz]er)\w*\.step$", re.IGNORECASE)
_TRAINERS = re.compile(r"(\w*Trainer)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFile:
    """The names that a file defines, and what its text says of them."""

    path: Path
    functions: dict[str, ast.FunctionDef | ast.AsyncFunctionDef] = field(default_factory=dict)
    classes: dict[str, ast.ClassDef] = field(default_factory=dict)
    assigned: dict[str, ast.expr] = field(default_factory=dict)
    body: list[ast.stmt] = field(default_factory=list)
    """What runs when the file is run, the part under ``__name__ == "__main__"`` included."""

    relative: int = 0
    """The most folders that a relative import goes up."""

    @property
    def root(self) -> Path:
        """The folder from which the file is run: its own, or the one above its package, where it is in one
        (``python -m package.train``)."""
        folder, up = self.path.resolve().parent, self.relative
        while up > 0 or (folder / "__init__.py").is_file():
            folder, up = folder.parent, up - 1
        return folder

    def kind(self, name: str) -> Kind:
        """What ``name`` is; no name is the file itself."""
        if not name:
            return "script"
        if name in self.classes:
            return "lightning" if self.is_lightning(name) else "builder"
        if name in self.functions:
            return "step" if self.trains(self.functions[name]) else "builder"
        if name in self.assigned and _TRAINERS.search(_called(self.assigned[name])):
            return "trainer"
        return "builder"

    def is_lightning(self, name: str) -> bool:
        return any(
            base.endswith("LightningModule") or (base in self.classes and self.is_lightning(base))
            for base in map(_dotted, self.classes[name].bases)
            if base != name
        )

    def is_module(self, name: str) -> bool:
        return any(
            base.endswith(("Module", "PreTrainedModel")) or (base in self.classes and self.is_module(base))
            for base in map(_dotted, self.classes[name].bases)
            if base != name
        )

    def trains(self, node: ast.AST, seen: frozenset[str] = frozenset()) -> bool:
        """Whether running this code makes a backward pass, itself or by what it calls in this file."""
        for call in (one for one in ast.walk(node) if isinstance(one, ast.Call)):
            name = _dotted(call.func)
            last = name.rpartition(".")[2]
            if last in _TRAINS and "." in name:
                return True
            if last == "train" and not call.args and "trainer" in name.lower():
                return True
            if last == "step" and not call.args and _OPTIMIZERS.search(name):
                return True
            given = (*call.args, *(keyword.value for keyword in call.keywords))
            handed = [one.id for one in given if isinstance(one, ast.Name)]
            if any(self._trains_when_called(one, seen) for one in (name, *handed)):
                return True
        return False

    def _trains_when_called(self, name: str, seen: frozenset[str]) -> bool:
        """Whether a function or class of this file trains; one that is handed on is taken to be called."""
        own = self.functions.get(name) or (
            None if name not in self.classes or self.is_module(name) else self.classes[name]
        )
        return own is not None and name not in seen and self.trains(own, seen | {name})

    def is_script(self) -> bool:
        """Whether running the file trains something."""
        return any(self.trains(statement) for statement in self.body)

    def candidates(self) -> list[str]:
        """The names that may be forecast, the likeliest kind alone."""
        public = [name for name in self.functions if not name.startswith("_")]
        takes_batch = [name for name in public if batch_parameter(self.functions[name]) is not None]
        groups: tuple[list[str], ...] = (
            [name for name in self.assigned if self.kind(name) == "trainer"],
            [name for name in takes_batch if self.kind(name) == "builder" and _returns(self.functions[name])],
            [name for name in self.classes if self.is_lightning(name)],
            [name for name in public if self.kind(name) == "step"],
            self._outermost_modules(),
            [name for name in public if _returns(self.functions[name])],
        )
        return next((group for group in groups if group), [])

    def _outermost_modules(self) -> list[str]:
        """Classes of modules that no other class of the file is made of."""
        modules = [name for name in self.classes if self.is_module(name) and not name.startswith("_")]
        parts = {
            node.id
            for name in modules
            for node in ast.walk(self.classes[name])
            if isinstance(node, ast.Name) and node.id != name
        }
        return [name for name in modules if name not in parts]


def read_source(path: Path) -> SourceFile:
    """Read a file of Python; a mistake in it is one line."""
    try:
        return _read(path, path.stat().st_mtime_ns)
    except OSError as error:
        raise InputError(f"model.name: {str(path)!r} cannot be read ({error.strerror})") from error


@functools.lru_cache(maxsize=64)
def _read(path: Path, _changed: int) -> SourceFile:
    try:
        tree = ast.parse(path.read_bytes(), filename=str(path))
    except SyntaxError as error:
        line = "" if error.lineno is None else f" (line {error.lineno})"
        raise CaptureError(f"model {path}: SyntaxError: {error.msg}{line}") from error
    except ValueError as error:
        raise CaptureError(f"model {path}: is no text of Python ({error})") from error
    levels = (node.level for node in ast.walk(tree) if isinstance(node, ast.ImportFrom))
    source = SourceFile(path=path, relative=max(levels, default=0))
    for node in _top_level(tree.body):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            source.functions[node.name] = node
        elif isinstance(node, ast.ClassDef):
            source.classes[node.name] = node
        elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            source.assigned.update({name.id: node.value for name in targets if isinstance(name, ast.Name)})
            source.body.append(node)
        elif not isinstance(node, ast.Import | ast.ImportFrom):
            source.body.append(node)
    return source


def _top_level(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a file, those under a condition too."""
    for node in body:
        yield node
        if isinstance(node, ast.If):
            yield from _top_level([*node.body, *node.orelse])
        elif isinstance(node, ast.Try):
            yield from _top_level(node.body)


def pick(path: Path) -> str:
    """The one name of a file that can be forecast; none (an empty one) where running it trains."""
    source = read_source(path)
    if source.is_script():
        return ""
    names = source.candidates()
    if len(names) == 1:
        return names[0]
    if not names:
        raise InputError(
            f"model.name: {str(path)!r} defines no model, training step or trainer; "
            "a function that takes batch and returns a module is one"
        )
    raise InputError(
        f"model.name: {str(path)!r} has several that may be meant: "
        + ", ".join(f"{path.name}:{name}" for name in names)
    )


def located(name: str, base: Path) -> tuple[Path, str]:
    """The file and the name in it that a model goes by; the one that can be forecast where it says none."""
    file, target = split_name(name)
    path = Path(file) if Path(file).is_absolute() else base / file
    if not path.is_file():
        raise InputError(f"model.name: {str(path)!r} is not a file")
    return path, target or pick(path)


def split_name(name: str) -> tuple[str, str]:
    """The file and the name in it: ``train.py:make`` or ``train.py``."""
    file, colon, target = name.rpartition(":")
    return (file, target) if colon and file.endswith(".py") else (name, "")


def kind_of(path: Path, target: str) -> Kind:
    source = read_source(path)
    known = {*source.functions, *source.classes, *source.assigned}
    if target and "." not in target and target not in known and not _has_imports_of(path, target):
        shown = sorted(name for name in known if not name.startswith("_"))
        raise unknown("model.name", target, shown, f"a name of {path}; it has")
    return source.kind(target)


def _has_imports_of(path: Path, target: str) -> bool:
    text = path.read_text(encoding="utf-8", errors="replace")
    imported = re.search(rf"\bimport\b[^\n#]*(\b{re.escape(target)}\b|\*)", text)
    return imported is not None or "globals()" in text


def batch_parameter(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str | None:
    names = [one.arg for one in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
    return next((name for pattern in BATCH_NAMES for name in names if pattern.fullmatch(name)), None)


def is_batch_name(name: str) -> bool:
    return any(pattern.fullmatch(name) for pattern in BATCH_NAMES)


def imported(tree: ast.AST) -> Iterator[str]:
    """The dotted names of all that a file imports, relative ones without their dots."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (one.name for one in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{one.name}" if node.module else one.name for one in node.names)


def is_data(node: ast.FunctionDef | ast.AsyncFunctionDef, parameter: str) -> bool:
    """Whether a parameter is used as data is: taken apart, looked into, or asked for its parts."""
    for one in ast.walk(node):
        if isinstance(one, ast.Subscript | ast.Attribute) and _is_name(one.value, parameter):
            return True
        if isinstance(one, ast.Starred) and _is_name(one.value, parameter):
            return True
        if isinstance(one, ast.Assign) and _is_name(one.value, parameter):
            return any(isinstance(target, ast.Tuple | ast.List) for target in one.targets)
        if isinstance(one, ast.For | ast.comprehension) and _is_name(one.iter, parameter):
            return True
    return False


def _is_name(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _returns(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any(isinstance(one, ast.Return) and one.value is not None for one in ast.walk(node))


def _called(node: ast.expr) -> str:
    return _dotted(node.func) if isinstance(node, ast.Call) else ""


def _dotted(node: ast.expr) -> str:
    """``a.b.c`` of a name, an attribute, or a call; of the attributes of anything else, the last ones."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    if isinstance(node, ast.Call):
        return _dotted(node.func)
    return ""
