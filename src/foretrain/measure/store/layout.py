"""Describes the tables of a store, and brings those of earlier versions up to date."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NamedTuple

from foretrain.measure.store.entries import COLUMNS

if TYPE_CHECKING:
    import sqlalchemy as sa

LAYOUT = 2
"""The version of the tables; a store with newer ones is not touched. Layout 1 had no predictors."""


class Tables(NamedTuple):
    """Holds the tables of a store."""

    version: sa.Table
    runs: sa.Table
    measured: sa.Table
    predictors: sa.Table
    predictor_files: sa.Table


@functools.cache
def store_tables() -> Tables:
    """Describe the tables of a store."""
    import sqlalchemy as sa
    from sqlalchemy.dialects.postgresql import JSONB

    schema = sa.MetaData()
    version = sa.Table(
        "foretrain_store", schema, sa.Column("layout", sa.Integer, primary_key=True, autoincrement=False)
    )
    runs = sa.Table(
        "foretrain_runs",
        schema,
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True),
        sa.Column("hash", sa.String(64), nullable=False, unique=True),
        *(sa.Column(name, sa.Text, nullable=False, index=True) for name in COLUMNS),
        sa.Column("created", sa.DateTime(timezone=True), nullable=False),
        sa.Column("format", sa.Integer, nullable=False),
        sa.Column("base", sa.Text, nullable=False),
        sa.Column("run", sa.JSON().with_variant(JSONB, "postgresql"), nullable=False),
    )
    measured = sa.Table(
        "foretrain_measured",
        schema,
        sa.Column("run_id", sa.ForeignKey(runs.c.id, ondelete="CASCADE"), primary_key=True),
        sa.Column("quantity", sa.Text, primary_key=True, index=True),
        sa.Column("value", sa.Double, nullable=False),
    )
    predictors = sa.Table(
        "foretrain_predictors",
        schema,
        sa.Column("name", sa.Text, primary_key=True),
        sa.Column("predictor", sa.Text, nullable=False),
        sa.Column("created", sa.DateTime(timezone=True), nullable=False),
        sa.Column("about", sa.JSON().with_variant(JSONB, "postgresql"), nullable=False),
        sa.Column("version", sa.String(64), nullable=False),
    )
    predictor_files = sa.Table(
        "foretrain_predictor_files",
        schema,
        sa.Column("name", sa.ForeignKey(predictors.c.name, ondelete="CASCADE"), primary_key=True),
        sa.Column("path", sa.Text, primary_key=True),
        sa.Column("content", sa.LargeBinary, nullable=False),
    )
    return Tables(version, runs, measured, predictors, predictor_files)


def _add_predictors(connection: sa.Connection) -> None:
    tables = store_tables()
    tables.version.metadata.create_all(connection, tables=[tables.predictors, tables.predictor_files])


MIGRATIONS = {2: _add_predictors}
"""What makes each layout of the one before it."""
