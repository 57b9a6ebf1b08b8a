"""Command lines in; jobs, and calls of the library, out. Errors that the user can mend are one line on stderr, with exit code 2."""

from __future__ import annotations

import functools
import inspect
import json
import time
import tomllib
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

import typer
from typer.core import TyperGroup

from foretrain.errors import ForetrainError, InputError, invalid, unknown
from foretrain.files import read_text

if TYPE_CHECKING:
    from rich.console import RenderableType

    from foretrain.catalog import Catalog
    from foretrain.forecast import Forecast
    from foretrain.job import Job
    from foretrain.predictors.base import Predictor


class _Commands(TyperGroup):
    """All commands, with one way to report what went wrong."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except ForetrainError as error:
            _say(" ".join(str(error).splitlines()))
            raise typer.Exit(2) from error
        except KeyboardInterrupt as error:
            _say("interrupted")
            raise typer.Exit(130) from error


app = typer.Typer(
    cls=_Commands,
    help="Know how long a training run takes, how much memory it needs and what it costs, before you run it.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """The ``foretrain`` command."""
    app(prog_name="foretrain")


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import PackageNotFoundError, version

        try:
            typer.echo(f"foretrain {version('foretrain')}")
        except PackageNotFoundError:
            typer.echo("foretrain (from source, not installed)")
        raise typer.Exit


@app.callback()
def _foretrain(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    pass


# Jobs from the command line


class JobOptions:
    """The options that describe a job; each overrides the field of the job file that ``_PLACES`` names."""

    source: Annotated[str | None, typer.Option(help="Where MODEL comes from: timm, torchvision, transformers, python, onnx, graph.")]
    device: Annotated[str | None, typer.Option(help="Device of the catalogue, such as h100 or rtx-4090.")]
    devices: Annotated[int | None, typer.Option(help="Devices in all.")]
    nodes: Annotated[int | None, typer.Option(help="Nodes that the devices are spread over.")]
    node: Annotated[str | None, typer.Option(help="Node of the catalogue, such as dgx-h100: fills in the links.")]
    cores_per_device: Annotated[int | None, typer.Option(help="Cores of each worker, for --device cpu.")]
    batch: Annotated[int | None, typer.Option(help="Samples per optimizer step, over all devices.")]
    image: Annotated[str | None, typer.Option(help="Image side, or channels,height,width.")]
    sequence: Annotated[int | None, typer.Option(help="Tokens per sample.")]
    classes: Annotated[int | None, typer.Option(help="Classes of a classifier.")]
    precision: Annotated[str | None, typer.Option(help="fp32, tf32, amp-bf16, amp-fp16, bf16, fp16 or fp8.")]
    optimizer: Annotated[str | None, typer.Option(help="sgd, adamw, adam, adafactor, lamb, ...")]
    mode: Annotated[str | None, typer.Option(help="train or infer.")]
    samples: Annotated[int | None, typer.Option(help="Samples per epoch.")]
    epochs: Annotated[float | None, typer.Option(help="Epochs of the whole training.")]
    steps: Annotated[int | None, typer.Option(help="Steps of the whole training, instead of epochs.")]
    micro_batch: Annotated[int | None, typer.Option(help="Samples that a device handles at once.")]
    channels_last: Annotated[bool | None, typer.Option(help="Images in channels-last layout.", show_default=False)]
    catalog: Annotated[Path | None, typer.Option(help="Your own devices, nodes and prices (TOML).")]


_OPTIONS = get_type_hints(JobOptions, include_extras=True)
_PLACES = {
    "source": "model", "device": "cluster", "node": "cluster", "nodes": "cluster", "cores_per_device": "cluster", "batch": "training", "image": "training",
    "sequence": "training", "classes": "training", "precision": "training", "optimizer": "training", "mode": "training",
    "samples": "training", "epochs": "training", "steps": "training", "channels_last": "training", "micro_batch": "plan",
}  # fmt: skip
_FIELDS = {"batch": "global_batch"}
_INSTEAD = {"epochs": "steps", "steps": "epochs"}
"""An option that is given replaces the field of the file that would contradict it."""

Options = dict[str, Any]
"""The job options that were given, by name."""


def _with_job_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of ``JobOptions``; it receives those that were given as ``options``."""

    @functools.wraps(command)
    def run(**values: Any) -> None:
        command(options={name: value for name in _OPTIONS if (value := values.pop(name)) is not None}, **values)

    own = [parameter for parameter in inspect.signature(command, eval_str=True).parameters.values() if parameter.name != "options"]
    more = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=hint) for name, hint in _OPTIONS.items()]
    run.__signature__ = inspect.Signature([parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own] + more)  # type: ignore[attr-defined]
    return run


def _job(target: str, options: Options) -> Job:
    """A job file with the options over it, or a model's name with the options around it."""
    from foretrain.api import make_job
    from foretrain.catalog import Catalog

    path = Path(target)
    catalog = Catalog.load(options.get("catalog"))
    if path.suffix == ".jsonl":
        raise InputError(f"{target}: a file of many jobs is given with --jobs")
    if path.suffix not in (".toml", ".json"):
        given = {name: value for name, value in options.items() if name != "catalog"}
        if "image" in given:
            given["image"] = _image(given["image"])
        return make_job(target, **given, catalog=catalog)
    text = read_text(path)
    try:
        data = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
        return _read_job(data, options, catalog, path.parent)
    except (InputError, ValueError) as error:
        raise InputError(f"{path}: {error}") from error


def _read_job(data: Any, options: Options, catalog: Catalog, base: Path) -> Job:
    from foretrain.job import Job

    return Job.read(_overridden(data, options) if isinstance(data, Mapping) else data, catalog=catalog, base=base)


def _overridden(data: Mapping[str, Any], options: Options) -> dict[str, Any]:
    """The tables of a job file with the options in place of their fields."""
    job = {name: dict(section) if isinstance(section, Mapping) else section for name, section in data.items()}
    for name, value in options.items():
        if name in _PLACES and isinstance(section := job.setdefault(_PLACES[name], {}), dict):
            section[_FIELDS.get(name, name)] = _image(value) if name == "image" else value
            section.pop(_INSTEAD.get(name), None)
    cluster = job.get("cluster")
    if isinstance(cluster, dict):
        if "node" in options and "device" not in options:
            cluster.pop("device", None)
        if "devices" in options:
            cluster["devices_per_node"] = _spread(options["devices"], cluster.get("nodes", 1))
    return job


def _spread(devices: int, nodes: object) -> int:
    if not isinstance(nodes, int) or nodes < 1 or devices % nodes:
        raise InputError(f"devices: {devices} does not divide over nodes = {nodes}")
    return devices // nodes


def _image(text: str) -> int | list[int]:
    sides = text.replace("x", ",").split(",")
    if len(sides) not in (1, 3) or not all(side.strip().isdigit() for side in sides):
        raise invalid("training.image", text, "a side length or channels,height,width")
    return int(text) if len(sides) == 1 else [int(side) for side in sides]


# Commands

PredictorOption = Annotated[str | None, typer.Option("--predictor", help="Predictor by name.")]
JsonFlag = Annotated[bool, typer.Option("--json", help="JSON, in SI units.")]


@app.command()
@_with_job_options
def predict(
    *,
    target: Annotated[str | None, typer.Argument(metavar="JOB.toml|JOB.json|MODEL", show_default=False)] = None,
    jobs: Annotated[Path | None, typer.Option(help="Many jobs, one JSON object a line.")] = None,
    out: Annotated[Path | None, typer.Option(help="Where the forecasts of --jobs go (else to the screen).")] = None,
    predictor: PredictorOption = None,
    as_json: JsonFlag = False,
    breakdown: Annotated[Literal["layer", "operator", "phase"] | None, typer.Option(help="Where the time goes.")] = None,
    depth: Annotated[int | None, typer.Option(min=1, help="Names that a layer is cut to in --breakdown layer.")] = None,
    trace: Annotated[Path | None, typer.Option(help="Write the step as a Chrome trace, for Perfetto.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write a report to open in a browser.")] = None,
    options: Options,
) -> None:
    """Forecast time, memory and cost of a job file or a model; options override the file."""
    from foretrain import predictors

    if (target is None) == (jobs is None):
        raise typer.BadParameter("give a job file, a model, or --jobs (and only one of them)")
    if jobs is not None and (trace or html or breakdown):
        raise typer.BadParameter("--trace, --html and --breakdown are for one job, not for --jobs")
    if jobs is None and out is not None:
        raise typer.BadParameter("--out is for --jobs; --json prints one forecast, --trace and --html write files")
    chosen = predictors.get(predictor or predictors.DEFAULT)
    if jobs is not None:
        _predict_many(jobs, out, options, chosen)
        return
    forecast = chosen.predict(_job(str(target), options))
    _write_files(forecast, trace, html)
    if as_json:
        from foretrain.report import to_json

        typer.echo(to_json(forecast, breakdown))
        return
    from foretrain.report.text import breakdown_table, summary

    _show(summary(forecast), *([breakdown_table(forecast, breakdown, depth=depth)] if breakdown else []))


def _write_files(forecast: Forecast, trace: Path | None, html: Path | None) -> None:
    if trace is not None:
        from foretrain.report import write_trace

        _say(f"{write_trace(forecast, trace):,} events in {trace}")
    if html is not None:
        from foretrain.report.html import write_html

        write_html(forecast, html)
        _say(f"report in {html}")


@app.command()
def evaluate(
    runs: Annotated[list[Path], typer.Argument(metavar="RUNS.jsonl...", help="Files of measured runs.")],
    predictor: Annotated[list[str] | None, typer.Option(help="Predictor by name; may be given several times.")] = None,
    split: Annotated[
        str | None, typer.Option(help="random, leave-model-out, leave-device-out or extrapolate: learn on the other runs.")
    ] = None,
    json_out: Annotated[Path | None, typer.Option("--json", metavar="OUT", help="Write figures and runs as JSON.")] = None,
) -> None:
    """Errors of predictors on measured runs."""
    from foretrain import predictors
    from foretrain.evaluate import evaluate as score
    from foretrain.report.screen import progress
    from foretrain.report.tables import evaluation_table

    with progress("forecasts") as advance:
        document = score(runs, predictors=predictor or [predictors.DEFAULT], split=split, progress=advance).to_dict()
    if json_out is not None:
        from foretrain.files import write_atomically
        from foretrain.report import dump

        write_atomically(json_out, dump(document))
        _say(f"{len(document['results']):,} results, {len(document['runs']):,} comparisons in {json_out}")
    _show(evaluation_table(document["results"]))


@app.command()
@_with_job_options
def capture(
    *,
    target: Annotated[str, typer.Argument(metavar="JOB.toml|JOB.json|MODEL", show_default=False)],
    out: Annotated[Path, typer.Option("--out", "-o", help="Where the graph goes, such as graph.json.zst.", show_default=False)],
    options: Options,
) -> None:
    """Write the operator graph of one step, for machines without torch."""
    from foretrain.capture import capture_job
    from foretrain.report.tables import graph_table

    graph = capture_job(_job(target, options))
    graph.save(out)
    _show(graph_table(graph))
    _say(f"{out.stat().st_size:,} bytes in {out}")


@app.command()
def catalog(
    kind: Annotated[Literal["devices", "nodes", "models", "prices"], typer.Argument(show_default=False)],
    name: Annotated[str | None, typer.Argument(help="Everything about one of them.", show_default=False)] = None,
    file: Annotated[Path | None, typer.Option("--catalog", help="Your own devices, nodes and prices (TOML).")] = None,
    as_json: JsonFlag = False,
) -> None:
    """What is known: devices, nodes, models and prices, each with its source."""
    from foretrain.catalog import Catalog
    from foretrain.report import tables

    known = Catalog.load(file)
    entries = _entries(kind, name, known)
    if as_json:
        from foretrain.report import dump

        typer.echo(dump(entries if name is None else next(iter(entries.values()))))
    else:
        _show(tables.details(next(iter(entries.values()))) if name is not None else tables.listing(kind, entries, known))


def _entries(kind: str, name: str | None, known: Catalog) -> dict[str, dict[str, Any]]:
    """Catalogue entries by name: all of a kind, or the one that is asked for."""
    from foretrain.api import model_presets
    from foretrain.report.tables import as_dict

    if kind in ("devices", "nodes"):
        find: Callable[[str, str], Any] = known.device if kind == "devices" else known.node
        found = [find(one, kind) for one in (known.names(kind) if name is None else [name])]  # type: ignore[arg-type]
        return {entry.name: as_dict(entry) for entry in found}
    table = model_presets() if kind == "models" else {one: as_dict(price) for one in known.names("prices") if (price := known.price(one))}
    if name is None:
        return dict(table)
    if name not in table:
        raise unknown(kind, name, table)
    return {name: {"name": name, **table[name]}}


# Many jobs


def _predict_many(path: Path, out: Path | None, options: Options, predictor: Predictor) -> None:
    """One line out per job in, in order, each as soon as it is known; a job that fails does not stop the rest."""
    from foretrain.catalog import Catalog
    from foretrain.report.lines import JsonLines
    from foretrain.report.screen import progress

    if out is not None and out.exists() and out.samefile(path):
        raise InputError(f"--out: {str(out)!r} is the file of jobs itself")
    lines = [(number, line) for number, line in enumerate(read_text(path).splitlines(), start=1) if line.strip()]
    known = Catalog.load(options.get("catalog"))
    start = time.monotonic()
    where = "" if out is None else f", in {out}"
    failed = 0
    with JsonLines(out) as results:
        try:
            with progress("jobs") as advance:
                for number, line in lines:
                    answer = _answer(line, options, known, path.parent, predictor)
                    failed += "error" in answer
                    results.write({"line": number, **answer})
                    advance(results.count, len(lines))
        except KeyboardInterrupt:
            _say(f"interrupted: {results.count:,} of {len(lines):,} jobs done{where}")
            raise typer.Exit(130) from None
    _say(f"{len(lines):,} jobs, {failed:,} failed, {time.monotonic() - start:.1f} s{where}")
    if failed:
        raise typer.Exit(1)


def _answer(line: str, options: Options, known: Catalog, base: Path, predictor: Predictor) -> dict[str, Any]:
    """The forecast of one job, or why there is none; a bug is told with its traceback and does not cost the other jobs."""
    try:
        data = json.loads(line)
        job = _read_job(data["job"] if isinstance(data, Mapping) and "job" in data else data, options, known, base)
        return {"forecast": predictor.predict(job).to_dict()}
    except ForetrainError as error:
        return {"error": str(error)}
    except json.JSONDecodeError as error:
        return {"error": f"not JSON ({error})"}
    except Exception as error:
        traceback.print_exc()
        return {"error": f"internal error: {type(error).__name__}: {error}"}


def _say(message: str) -> None:
    """A line for people, beside the results."""
    typer.echo(f"foretrain: {message}", err=True)


def _show(*parts: RenderableType) -> None:
    from foretrain.report.screen import show

    show(*parts)


if __name__ == "__main__":
    main()
