"""Completes values on the command line: names of the catalogue, of predictors, of models and of settings."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, get_args

Completion = Callable[[str], list[str]]


def _matching(names: Iterable[str], start: str) -> list[str]:
    """The names that begin so, whatever the case."""
    return [name for name in names if name.lower().startswith(start.lower())]


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
    """Names of presets, with and without their organisation; where none begins so, the shell goes on with
    files."""
    from foretrain.model_names import preset_spellings

    return _matching(preset_spellings(), incomplete)


def optimizers(incomplete: str) -> list[str]:
    from foretrain.workload import OPTIMIZERS

    return _matching(OPTIMIZERS, incomplete)


def setting(name: str) -> Completion:
    """The values of a setting of jobs, by the name of its type: ``Precision``."""

    def complete(incomplete: str) -> list[str]:
        from foretrain import job, workload

        kind = getattr(workload if hasattr(workload, name) else job, name)
        values: tuple[Any, ...] = get_args(kind)
        return _matching(map(str, values), incomplete)

    return complete
