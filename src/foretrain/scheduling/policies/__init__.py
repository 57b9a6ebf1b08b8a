"""Finds policies by name, and those of the user by file and class: ``my.py:Mine``."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Mapping
from pathlib import Path

from foretrain.errors import InputError, first_line, unknown
from foretrain.scheduling.policies.base import Policy

__all__ = ["Policy", "get", "names"]

_HERE = "foretrain.scheduling.policies"
_WHERE = {
    "fifo": f"{_HERE}.fifo:Fifo",
    "sjf": f"{_HERE}.priority:ShortestJobFirst",
    "srtf": f"{_HERE}.priority:ShortestRemainingTimeFirst",
    "oracle": f"{_HERE}.priority:Oracle",
    "backfill": f"{_HERE}.backfill:EasyBackfill",
    "conservative": f"{_HERE}.conservative:ConservativeBackfill",
    "tiresias": f"{_HERE}.tiresias:Tiresias",
    "themis": f"{_HERE}.themis:Themis",
    "pollux": f"{_HERE}.elastic:Pollux",
    "optimus": f"{_HERE}.elastic:Optimus",
    "afs": f"{_HERE}.afs:ApatheticFutureShare",
    "edf": f"{_HERE}.edf:EarliestDeadlineFirst",
    "gandiva": f"{_HERE}.gandiva:Gandiva",
    "gittins": f"{_HERE}.gittins:Gittins",
    "kueue": f"{_HERE}.kueue:Kueue",
    "lucid": f"{_HERE}.lucid:Lucid",
    "multifactor": f"{_HERE}.multifactor:Multifactor",
    "qssf": f"{_HERE}.qssf:QuasiShortestServiceFirst",
    "sia": f"{_HERE}.sia:Sia",
    "shockwave": f"{_HERE}.shockwave:Shockwave",
}


def names() -> tuple[str, ...]:
    return tuple(_WHERE)


def get(name: str, parameters: Mapping[str, float | int | bool | tuple[float, ...]] | None = None) -> Policy:
    """A new policy, by name or as ``file.py:Class``; with parameters of its own where they are given."""
    if name in _WHERE:
        module, _, attribute = _WHERE[name].partition(":")
        policy: type[Policy] = getattr(importlib.import_module(module), attribute)
        known = [each for each in inspect.signature(policy.__init__).parameters if each != "self"]
        for parameter in parameters or {}:
            if parameter not in known:
                raise unknown(f"policy {name}: parameter", parameter, known)
        return policy(**(parameters or {}))
    path, colon, attribute = name.rpartition(":")
    if not colon or not path.endswith(".py"):
        raise unknown("policy", name, _WHERE, "a class as file.py:Class or one of")
    return _from_file(name, Path(path), attribute)


def _from_file(name: str, path: Path, attribute: str) -> Policy:
    if not path.is_file():
        raise InputError(f"policy {name}: there is no file {path}")
    spec = importlib.util.spec_from_file_location(f"foretrain_policy_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        policy = getattr(module, attribute)()
    except (Exception, SystemExit) as error:
        raise InputError(
            f"policy {name}: cannot be loaded ({type(error).__name__}: {first_line(error)})"
        ) from error
    if not isinstance(policy, Policy):
        raise InputError(f"policy {name}: {attribute} is not a foretrain.scheduling.policies.Policy")
    type(policy).name = name
    return policy
