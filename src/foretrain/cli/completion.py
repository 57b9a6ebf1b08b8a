"""Completes values on the command line: names of the catalogue, of predictors, of models and of settings."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, get_args

import typer

Completion = Callable[[str], list[str]]


def _matching(names: Iterable[str], start: str) -> list[str]:
    """The names that begin so, whatever the case, in the case of what was typed: the shell drops others."""
    return [start + name[len(start) :] for name in names if name.lower().startswith(start.lower())]


def devices(incomplete: str) -> list[str]:
    from foretrain.catalog import Catalog

    return _matching(Catalog.load().names("devices"), incomplete)


def nodes(incomplete: str) -> list[str]:
    from foretrain.catalog import Catalog

    return _matching(Catalog.load().names("nodes"), incomplete)


def hosts(incomplete: str) -> list[str]:
    from foretrain.catalog import Catalog

    return _matching(Catalog.load().names("hosts"), incomplete)


def predictor_names(incomplete: str) -> list[str]:
    from foretrain import predictors

    return _matching(predictors.known(), incomplete)


def models(incomplete: str) -> list[str]:
    """Names of presets, with and without their organisation, those of torchvision and timm once something is
    typed, and files that begin so; where there are none, the shell goes on with files."""
    from foretrain.library_names import shipped_names
    from foretrain.model_names import preset_spellings

    names = _matching(preset_spellings(), incomplete)
    if incomplete:
        libraries = shipped_names()
        names += sorted(_matching(libraries["torchvision"] | libraries["timm"], incomplete))
    return [*names, *_files(incomplete)] if names else []


def _files(start: str) -> list[str]:
    """Of this folder, those that begin so."""
    return sorted(path.name for path in Path().iterdir() if start and path.name.startswith(start))


def names_in(module: str, table: str) -> Completion:
    """The keys of a table, by the module that has it and by its name."""

    def complete(incomplete: str) -> list[str]:
        return _matching(getattr(importlib.import_module(f"foretrain.{module}"), table), incomplete)

    return complete


def optimizers(incomplete: str) -> list[str]:
    from foretrain.workload import OPTIMIZERS

    return _matching(OPTIMIZERS, incomplete)


def many(complete: Completion) -> Completion:
    """The last of values with commas between them."""

    def last(incomplete: str) -> list[str]:
        before, comma, start = incomplete.rpartition(",")
        return [before + comma + value for value in complete(start)]

    return last


def devices_and_nodes(incomplete: str) -> list[str]:
    return [*devices(incomplete), *nodes(incomplete)]


def kinds_and_names(incomplete: str) -> list[str]:
    """Complete the kinds that ``foretrain catalog`` lists, and names that it knows."""
    from foretrain.catalog_entries import KINDS

    kinds = _matching(KINDS, incomplete)
    return kinds if kinds or not incomplete else devices_and_nodes(incomplete)


def names_of_kind(ctx: typer.Context, incomplete: str) -> list[str]:
    from foretrain.catalog import Catalog
    from foretrain.catalog_entries import KINDS, entries

    kind = ctx.params.get("kind")
    return _matching(entries(kind, None, Catalog.load()), incomplete) if kind in KINDS else []


def policies(incomplete: str) -> list[str]:
    from foretrain.scheduling.policies import names

    return _matching(names(), incomplete)


def splits(incomplete: str) -> list[str]:
    from foretrain.evaluate.folds import SPLITS

    return _matching(SPLITS, incomplete)


def published_tables(incomplete: str) -> list[str]:
    from foretrain.validation import tables

    return _matching(tables(), incomplete)


def setting(name: str) -> Completion:
    """The values of a setting of jobs, by the name of its type: ``Precision``."""

    def complete(incomplete: str) -> list[str]:
        from foretrain import job, workload

        kind = getattr(workload if hasattr(workload, name) else job, name)
        values: tuple[Any, ...] = get_args(kind)
        return _matching(map(str, values), incomplete)

    return complete
