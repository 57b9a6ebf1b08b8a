"""The command that learns from all runs at hand: ``learn`` fits every predictor that can, and keeps the best
for each kind of job as what ``predict`` uses."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foretrain.cli import completion
from foretrain.cli.app import registry, say, say_left_out, show
from foretrain.cli.job_options import CatalogOption
from foretrain.errors import InputError

if TYPE_CHECKING:
    from foretrain.catalog import Catalog
    from foretrain.cluster import Cluster
    from foretrain.predictors.base import Predictor
    from foretrain.run import Run


@registry.command()
def learn(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(metavar="RUNS.jsonl", help="Measured runs.", show_default=False),
    ] = None,
    *,
    store: Annotated[
        str | None,
        typer.Option(help="Runs of a database as well, such as sqlite:///runs.db; 'mine' is your own store."),
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(
            metavar="DEVICE|FILE",
            help="Only runs on this device, or on those of a cluster or job file.",
            autocompletion=completion.devices,
        ),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="Keep it under this name, and let predict use it from now on.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="DIR", help="Keep it in a folder for --predictor.")
    ] = None,
    predictors: Annotated[
        str | None, typer.Option(metavar="NAMES", help="The predictors that are joined, with commas.")
    ] = None,
    folds: Annotated[int, typer.Option(min=2, help="Parts of the runs that are left out in turn.")] = 4,
    most: Annotated[int, typer.Option(min=8, help="Runs that are left out at most.")] = 240,
    off: Annotated[
        bool, typer.Option("--off", help="Let predict use what comes with foretrain again.")
    ] = False,
    catalog: CatalogOption = None,
) -> None:
    """Fit every predictor that can learn from these runs, score each on runs left out, and keep the best for
    each kind of job."""
    from foretrain.predictors import usual

    if off:
        before = usual.stop()
        say("nothing learned was in use" if before is None else f"{before} is no longer used by predict")
        return
    if not runs and store is None:
        raise typer.BadParameter("give files of runs, --store, or both")
    if (name is None) == (out is None):
        raise typer.BadParameter("give --name (predict uses it from now on) or --out DIR, one of the two")
    folder = usual.place(name) if name is not None else out
    assert folder is not None
    all_runs = [*_of_files(runs or []), *(_of_store(store) if store is not None else [])]
    kept = all_runs if cluster is None else _on(all_runs, cluster)
    if not kept:
        raise InputError(
            "runs: there are none to learn from"
            + (f" on {cluster}" if cluster is not None and all_runs else "")
        )
    predictor = _joined(predictors, folds, most)
    _learn(predictor, kept, folder)
    if name is None:
        say(f"{predictor.name} in {folder}; use it with --predictor {folder}")
    else:
        usual.use(name)
        say(f"{name} is what predict uses from now on; foretrain learn --off ends that, {usual.VARIABLE}="
            "deletepop or --predictor deletepop passes it by")  # fmt: skip


def _joined(names: str | None, folds: int, most: int) -> Predictor:
    from foretrain.predictors.joined.members import read_names
    from foretrain.predictors.joined.predictor import JoinedPredictor, Joining

    wanted = Joining().predictors if names is None else read_names(names, "predictors")
    return JoinedPredictor(joining=Joining(predictors=wanted, folds=folds, most=most))


def _learn(predictor: Predictor, runs: Sequence[Run], folder: Path) -> None:
    from foretrain.files import check_target
    from foretrain.predictors.learning import learn_into
    from foretrain.report.screen import progress
    from foretrain.report.tables import figures_table

    check_target(folder, folder=True)
    with progress("learning") as predictor.progress:
        taken = learn_into(folder, predictor, runs)
    say_left_out(predictor.left_out_)
    say(f"learned from {taken:,} of {len(runs):,} runs")
    for part in predictor.report():
        if isinstance(part, str):
            say(part)
        else:
            show(figures_table(part))


def _of_files(paths: Sequence[Path]) -> list[Run]:
    from foretrain.run import runs_of_file

    return [run for path in dict.fromkeys(paths) for run in runs_of_file(path)]


def _of_store(where: str) -> list[Run]:
    from foretrain.measure.store import default_store, open_runs

    return [run for _, run in open_runs(default_store() if where == "mine" else where, report=say)]


def _on(runs: Sequence[Run], cluster: str) -> list[Run]:
    """Select the runs on the devices of a cluster, by the name of a device or by a file that has it."""
    from foretrain.catalog import Catalog

    path, known = Path(cluster), Catalog.load()
    if path.suffix in (".toml", ".json"):
        wanted = {group.device.name for group in _cluster_in(path, known).groups}
    else:
        wanted = {known.device(cluster, "cluster").name}
    return [run for run in runs if {group.device.name for group in run.job.cluster.groups} <= wanted]


def _cluster_in(path: Path, catalog: Catalog) -> Cluster:
    """The [cluster] of a job file, or a file that is one."""
    from foretrain.cluster import Cluster
    from foretrain.files import read_tables

    document = read_tables(path)
    try:
        return Cluster.read(document.get("cluster", document), catalog)
    except (AttributeError, InputError) as error:
        raise InputError(f"{path}: {error}") from error
