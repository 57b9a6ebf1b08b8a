"""Finds predictors by name, by file and class, and by the folder of a saved one; each is imported when it is
asked for."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

from foretrain.errors import InputError, unknown
from foretrain.predictors.base import FILE, Predictor, read_saved

_WHERE = {
    "cherrypick": "foretrain.predictors.cherrypick:CherryPickPredictor",
    "deletepop": "foretrain.predictors.deletepop:DeletePopPredictor",
    "driple": "foretrain.predictors.driple:DriplePredictor",
    "ernest": "foretrain.predictors.ernest:ErnestPredictor",
    "flops": "foretrain.predictors.flops_regression:FlopsPredictor",
    "joined": "foretrain.predictors.joined:JoinedPredictor",
    "predictddl": "foretrain.predictors.predictddl:PredictDDLPredictor",
    "ray_models": "foretrain.predictors.ray_models:RayModelsPredictor",
    "roofline": "foretrain.predictors.roofline:RooflinePredictor",
    "scaledl": "foretrain.predictors.scaledl:ScaleDLPredictor",
}

DEFAULT = "deletepop"
"""The predictor that ``foretrain predict`` uses."""

_SAVED = re.compile(r"(?P<what>.+?\.py:\w+|[^@]+)@(?P<folder>.+)")


def names() -> tuple[str, ...]:
    """The predictors that come with foretrain."""
    return tuple(_WHERE)


def known() -> tuple[str, ...]:
    """List all predictors that have a name: those that come with foretrain, and those that packages
    install."""
    from foretrain.predictors.plugins import installed

    return tuple(dict.fromkeys((*_WHERE, *installed())))


def get(name: str | Path | None = None) -> Predictor:
    """A new predictor with its default settings, or a saved one; the usual one where none is named.

    ``name`` is that of a predictor, ``file.py:Class`` for one of the user's own, or the folder of a saved
    one. A folder never says which file to run, so a saved one of the user's own is ``file.py:Class@FOLDER``.
    """
    from foretrain.predictors.plugins import told_in_one_line

    name = DEFAULT if name is None else name
    kind, folder = class_of(name), folder_of(name)
    with told_in_one_line(kind):
        return kind() if folder is None else kind.load(folder)


def class_of(name: str | Path) -> type[Predictor]:
    """The class of the predictor that ``get`` finds by this name."""
    folder = folder_of(name)
    if folder is not None and not (folder / FILE).exists():
        raise InputError(f"predictor: the folder {folder} has no {FILE}; foretrain fit makes one")
    saved = _SAVED.fullmatch(str(name))
    if folder is None or saved is not None:
        return _class(saved["what"] if saved else str(name))
    saved_name = read_saved(folder)["predictor"]
    if saved_name not in known():
        raise InputError(
            f"{folder / FILE}: a saved {saved_name!r}, which neither comes with foretrain nor is installed; "
            f"name its class as well: file.py:Class@{folder}"
        )
    return _class(saved_name)


def is_name(word: str) -> bool:
    """Whether a word can be the name of a predictor, wherever its file or folder may be."""
    from foretrain.predictors.plugins import is_in_file

    return (
        word in known()
        or is_in_file(word)
        or _SAVED.fullmatch(word) is not None
        or (Path(word) / FILE).is_file()
    )


def folder_of(name: str | Path) -> Path | None:
    """Name the folder of a saved predictor; None for a new one.

    >>> folder_of("ernest"), folder_of("mine.py:Mine@fitted/mine")
    (None, PosixPath('fitted/mine'))
    """
    if name in _WHERE:
        return None
    if Path(name).is_dir():
        return Path(name)
    saved = _SAVED.fullmatch(str(name))
    return Path(saved["folder"]) if saved else None


def name_of_saved(name: str, folder: Path) -> str:
    """Write what ``get`` takes for the predictor of this name, once it is saved in a folder.

    >>> name_of_saved("ernest", Path("mine")), name_of_saved("ernest", Path("ernest"))
    ('mine', './ernest')
    """
    saved = _SAVED.fullmatch(name)
    unsaved = saved["what"] if saved else name
    if ".py:" in unsaved:
        return f"{unsaved}@{folder}"
    return f"./{folder}" if str(folder) in known() else str(folder)


def _class(name: str) -> type[Predictor]:
    if name in _WHERE:
        module, _, attribute = _WHERE[name].partition(":")
        shipped: type[Predictor] = getattr(importlib.import_module(module), attribute)
        return shipped
    from foretrain.predictors import plugins

    if plugins.is_in_file(name):
        kind = plugins.class_in_file(name)
        if kind.name in known():
            raise InputError(
                f"predictor {name}: the name {kind.name!r} is taken by a predictor that is known"
            )
        return kind
    if name in plugins.installed():
        return plugins.class_installed(name)
    raise unknown("predictor", name, known())
