"""The command that makes embeddings of architectures: ``embed train``."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Annotated, Any

import typer

from foretrain.cli.app import registry, say, told_if_interrupted
from foretrain.errors import InputError, unknown

embed = typer.Typer(
    help="Make the embeddings of architectures that predictddl learns from.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)
registry.add_typer(embed, name="embed")

_HYPERNETWORK = "hypernetwork"
_ANY_TYPES = ("cifar10", "text")
"""What a network for any dataset type is judged by."""


@embed.callback()
def _group() -> None:
    """Make the embeddings of architectures that predictddl learns from."""


@embed.command()
def train(
    *,
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="FILE", help="The embedding.", show_default=False)
    ],
    kinds: Annotated[
        list[str] | None,
        typer.Option(
            "--type",
            metavar="TYPE",
            help="A dataset type (cifar10, tiny-imagenet, imagenet, text) to train a network for; may be "
            "given several times. One for all of them where none is given.",
            show_default=False,
        ),
    ] = None,
    objective: Annotated[
        str,
        typer.Option(
            help="hypernetwork (weights of small networks), costs, histogram (of operators), white-box "
            "(times on random hardware) or contrastive (views of a graph)."
        ),
    ] = _HYPERNETWORK,
    steps: Annotated[int, typer.Option(min=1, help="Of training, for each network.")] = 400,
    sketches: Annotated[
        int, typer.Option(min=20, help="Random networks to learn from; hypernetworks draw small ones.")
    ] = 400,
    deepest: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Blocks of a random network at most (hypernetwork: 4, 3 of text; else 32).",
            show_default=False,
        ),
    ] = None,
    zoo: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="RUNS.jsonl", help="Learn from the models of these runs too.", show_default=False
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of everything that is random.")] = 0,
) -> None:
    """Train the networks that embed architectures; the same command goes on where it was interrupted."""
    from foretrain.files import check_target
    from foretrain.predictors.predictddl.predictor import embedding_module, training_module
    from foretrain.report.screen import progress

    check_target(out)
    training, types = training_module("training"), training_module("hypernetwork").TYPES
    if objective not in (known := (_HYPERNETWORK, *training.OVER_GRAPHS)):
        raise unknown("--objective", objective, known)
    for kind in kinds or ():
        if kind not in types:
            raise unknown("--type", kind, types)
    if zoo and objective == _HYPERNETWORK:
        raise InputError("--zoo: the hypernetwork objective learns from small networks that it can run")
    networks: dict[str, Any] = {}
    facts: dict[str, Any] = {}
    for kind in dict.fromkeys(kinds or ["any"]):
        part = out.with_name(f"{out.name}.{kind}.part")
        with told_if_interrupted(functools.partial(_kept, part)), progress(f"{kind}: steps") as advance:
            networks[kind], facts[kind] = training.train(
                _objective(objective, kind, sketches, deepest, zoo or [], seed),
                steps=steps, seed=seed, checkpoint=part, progress=advance,
            )  # fmt: skip
        figures = {name: value for name, value in facts[kind].items() if isinstance(value, float)}
        say(
            f"{kind}: "
            + ", ".join(f"{name.replace('_', ' ')} {value:.3f}" for name, value in figures.items())
        )
    embedding_module().Embedding(networks, {"objective": objective, "training": facts}).save(out)
    for kind in networks:
        out.with_name(f"{out.name}.{kind}.part").unlink(missing_ok=True)
    say(f"an embedding in {out}; use it with foretrain fit predictddl RUNS.jsonl --embedding {out} --out DIR")


def _kept(part: Path) -> str:
    if part.exists():
        return f"what was reached is in {part}; the same command goes on from there"
    return "nothing is kept yet"


def _objective(name: str, kind: str, sketches: int, deepest: int | None, zoo: list[Path], seed: int) -> Any:
    from foretrain.predictors.predictddl.predictor import training_module
    from foretrain.predictors.predictddl.zoo import sketched

    if name == _HYPERNETWORK:
        types = _ANY_TYPES if kind == "any" else [kind]
        return training_module("hypernetwork").Weights(types, deepest=deepest, seed=seed)
    graphs = [*sketched(kind, sketches, deepest), *(_captured(zoo) if zoo else [])]
    return training_module("training").OVER_GRAPHS[name](graphs, seed=seed)


def _captured(zoo: list[Path]) -> list[Any]:
    """The graphs of the models of runs, of which there is one at least."""
    from foretrain.predictors.predictddl.zoo import captured
    from foretrain.run import runs_of_file

    graphs = captured(run for path in zoo for run in runs_of_file(path))
    if not graphs:
        raise InputError("--zoo: no model of these runs can be traced and is small enough to learn from")
    return graphs
