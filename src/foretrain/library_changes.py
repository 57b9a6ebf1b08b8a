"""Tells what earlier versions of libraries do otherwise than later ones: a run is forecast as the version
that it was measured with runs it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LibraryChange:
    """Says what a library does from a version on, in models of some types."""

    name: str
    library: str
    known_from: tuple[int, int]
    """The oldest version of which it is known what was done before."""
    since: tuple[int, int]
    models: frozenset[str] | None
    """Types of models of transformers; None for whatever is traced."""

    def concerns(self, source: str, model_type: str | None) -> bool:
        """Whether a model may run what changed; of a user's file it is not known what it builds."""
        return self.models is None or source == "python" or model_type in self.models

    def is_undone(self, wanted: str, installed: str) -> bool:
        """Whether the wanted version lies before it, and the installed one does not."""
        return self.known_from <= _numbers(wanted) < self.since <= _numbers(installed)


SOFTCAP = LibraryChange(
    name="soft-capped scores without sdpa",
    library="transformers",
    known_from=(4, 48),
    since=(5, 21),
    models=frozenset({"gemma2", "t5gemma", "vaultgemma"}),
)
"""Earlier versions run scaled_dot_product_attention and leave the soft cap of its scores out
(``_supports_sdpa`` of ``modeling_gemma2.py``); later ones write attention out."""
POSITION_BIAS = LibraryChange(
    name="position bias in rows",
    library="transformers",
    known_from=(5, 17),
    since=(5, 20),
    models=frozenset(
        "longt5 mt5 pix2struct pop2piano switch_transformers t5 udop umt5 wav2vec2_bert "
        "wav2vec2_conformer".split()
    ),
)
"""Earlier versions give scaled_dot_product_attention a position bias as it lies, which no fused kernel takes
where heads lie side by side; later ones copy it first (``sdpa_attention.py``)."""
ATTENTION = LibraryChange(
    name="attention as one operator", library="torch", known_from=(1, 8), since=(2, 0), models=None
)
"""Before, ``scaled_dot_product_attention`` was not there: libraries wrote products and softmax out."""
CHANGES = (SOFTCAP, POSITION_BIAS, ATTENTION)
LIBRARIES = tuple(sorted({change.library for change in CHANGES}))


def changes_undone(
    wanted: Mapping[str, str], installed: Mapping[str, str], source: str, model_type: str | None
) -> tuple[LibraryChange, ...]:
    """List the changes that are to be undone, for models of a source and, of transformers, a type."""
    return tuple(
        change
        for change in CHANGES
        if change.library in wanted
        and change.library in installed
        and change.concerns(source, model_type)
        and change.is_undone(wanted[change.library], installed[change.library])
    )


def libraries_that_matter(
    provenance: Mapping[str, object], source: str, model_type: str | None
) -> dict[str, str]:
    """The versions in a run's provenance on which it depends what its model runs."""
    return {
        change.library: version
        for change in CHANGES
        if change.concerns(source, model_type)
        and isinstance(version := provenance.get(change.library), str)
        and change.known_from <= _numbers(version) < change.since
    }


def _numbers(version: str) -> tuple[int, int]:
    """Major and minor; what is no version lies before all."""
    parts = version.split(".")[:2]
    return (int(parts[0]), int(parts[1])) if len(parts) == 2 and all(map(str.isdigit, parts)) else (0, 0)
