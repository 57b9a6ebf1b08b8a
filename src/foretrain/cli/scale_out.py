"""Defines the options of commands that fan out: ``--processes N`` and ``--ray [ADDRESS]``, whose value may
be left out."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

ProcessesOption = Annotated[
    int, typer.Option(min=1, help="Processes of this machine to spread the work over.")
]
RayOption = Annotated[
    str | None,
    typer.Option(
        "--ray",
        metavar="[ADDRESS]",
        help="Spread the work over a Ray cluster: auto, host:port, "
        "ray://host:port, or local for one on this machine; "
        "without ADDRESS the one that runs here, else local.",
        show_default=False,
    ),
]


class ScaleOut(TyperCommand):
    """A command with a ``RayOption``: ``app.command(cls=ScaleOut)``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, with_address(args))


def with_address(words: Sequence[str]) -> list[str]:
    """A bare ``--ray`` gets the address that it stands for, as Typer knows no options whose value may be left
    out.

    >>> lines = (["--ray", "--out", "x"], ["--ray", "head:6379"], ["--ray", "trace.csv"])
    >>> tuple(with_address(words) for words in lines)
    (['--ray=any', '--out', 'x'], ['--ray', 'head:6379'], ['--ray=any', 'trace.csv'])
    """
    if "--ray" not in words:
        return list(words)
    from foretrain.fanout.cluster import ANY, is_address

    end = words.index("--") if "--" in words else len(words)
    bare = {i for i in range(end) if words[i] == "--ray" and not (i + 1 < end and is_address(words[i + 1]))}
    return [f"--ray={ANY}" if i in bare else word for i, word in enumerate(words)]


def hush_ray() -> None:
    """Keep what Ray says of lost workers off the screen, where results go; to be called before Ray is
    imported."""
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", ".*")


def one_thread() -> None:
    """Numerics in one thread, here as in every worker, as sums in another order differ in their last bits;
    before torch is imported."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
