"""Measures a campaign: a grid of models, workers, cores, batches, samples, synchronisation and links."""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import itertools
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foretrain import schema
from foretrain.catalog import Catalog
from foretrain.errors import ForetrainError, InputError, invalid
from foretrain.files import read_lines, read_tables
from foretrain.interrupts import ended_as_interrupted
from foretrain.job import Job
from foretrain.measure.backends import Backend, CellFailed
from foretrain.measure.kinds import expect, kind_of
from foretrain.measure.links import INTERFACE, check_links, link_rate, link_text
from foretrain.measure.nvml import gpu_count
from foretrain.measure.resume import Resumed
from foretrain.measure.summary import Progress, Summary
from foretrain.measure.tasks import Protocol, Sync, WorkerTask, not_carried_out
from foretrain.run import Run

MakeJob = Callable[..., Job]
"""``foretrain.api.make_job``: a model's name and options to a job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """The dimensions of a campaign; a model is a name, or a table as the [model] section of a job file."""

    models: tuple[str | Mapping[str, Any], ...]
    workers: tuple[int, ...] = (1,)
    cores: tuple[int, ...] = (1,)
    batch: tuple[int, ...] = ()
    """Samples per step over all workers."""
    batch_per_worker: tuple[int, ...] = ()
    samples: tuple[int, ...] = ()
    """Sizes of the dataset; with them the epoch is timed."""
    sync: tuple[Sync, ...] = ("allreduce",)
    servers: tuple[int, ...] = (1,)
    """Processes that hold the parameters, for ``sync = "ps"``."""
    links: tuple[str, ...] = ()
    image: int | tuple[int, ...] | None = None
    sequence: int | None = None
    classes: int | None = None
    precision: str = "fp32"
    optimizer: str | None = None
    device: str = "cpu"

    def __post_init__(self) -> None:
        for name in ("models", "workers", "cores", "sync", "servers"):
            if not getattr(self, name):
                raise InputError(f"{name}: empty; give at least one")
        for name in ("workers", "cores", "servers", "batch", "batch_per_worker", "samples"):
            for value in getattr(self, name):
                if value < 1:
                    raise invalid(name, value, "1 or more")
        if bool(self.batch) == bool(self.batch_per_worker):
            either = "batch (samples per step over all workers) or batch_per_worker"
            raise InputError(f"batch: give {either}, one of the two")
        for link in self.links:
            link_rate(link)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One point of the grid: a job and how it is run."""

    job: Job
    cores: int
    link: str | None

    @property
    def sync(self) -> Sync:
        return "ps" if self.job.plan.servers else "allreduce"

    def key(self, backend: str) -> str:
        """Make a key that a cell shares with the run that it became."""
        return _key(self.job.to_dict(), backend, self.cores, self.link)

    @property
    def label(self) -> str:
        job = self.job
        scale = f"{job.plan.data} workers x {self.cores} cores, batch {job.workload.training.global_batch}"
        label = f"{job.workload.model.label}, {scale}, {self.sync}"
        return f"{label}, links {self.link}" if self.link else label

    def task(self, protocol: Protocol, interface: str, timeout_s: float) -> WorkerTask:
        return WorkerTask(
            job=self.job.to_dict(),
            base=str(self.job.workload.base.resolve()),
            cores=self.cores,
            timeout_s=timeout_s,
            protocol=protocol,
            interface=interface if self.link is None else INTERFACE,
        )


def _key(job: Mapping[str, Any], backend: str, cores: int, link: str | None) -> str:
    return hashlib.sha256(json.dumps([job, backend, cores, link], sort_keys=True).encode()).hexdigest()


# Reading a campaign


def read_campaign(path: Path, options: Mapping[str, Any]) -> list[Grid]:
    """The grids of a TOML file: its keys, or tables ``[[grid]]`` over them.

    ``options`` replace what the file says.
    """
    data = read_tables(path)
    try:
        grids = data.pop("grid", [{}])
        if not isinstance(grids, list) or not all(isinstance(grid, dict) for grid in grids):
            raise invalid("grid", grids, "tables [[grid]]")
        return [read_grid({**data, **grid, **options}) for grid in grids]
    except InputError as error:
        raise InputError(f"{path}: {error}") from error


def read_grid(data: Mapping[str, Any]) -> Grid:
    """A grid from a table; a single value stands for a list of one."""
    lists = {field.name for field in dataclasses.fields(Grid) if str(field.type).endswith("...]")}
    table = {
        name: [value] if name in lists and not isinstance(value, list | tuple) else value
        for name, value in data.items()
    }
    return schema.read(Grid, table, "")


def cells(
    grids: Sequence[Grid], make_job: MakeJob, *, base: Path = Path(), home: Path = Path()
) -> list[Cell]:
    """List all cells, in an order in which the first so many already span models and sizes.

    Files of models are looked up from ``base``; the jobs name them from ``home``, where the runs will be.
    """
    where = _Where(make_job=make_job, catalog=Catalog.load(), base=base, home=home)
    return interleaved([cell for grid in grids for cell in _cells(grid, where)])


def read_cells(path: Path, *, home: Path, limited: bool = True) -> list[Cell]:
    """The cells of a file of jobs (``foretrain design`` writes one) or runs, in its order.

    Where links can be limited, CPU workers of a job on several nodes get links of the rate that joins them.
    """
    expect(path, "jobs", "runs", command="measure campaign")
    catalog, wanted = Catalog.load(), []
    for number, line in read_lines(path):
        try:
            table = schema.convert(line, Mapping[str, Any], "job")
            how = schema.convert(table.get("provenance") or {}, Mapping[str, Any], "provenance")
            job = Job.read(table.get("job", table), catalog=catalog, base=path.parent).seen_from(home)
            wanted.append(cell_of(job, how, limited=limited))
        except ForetrainError as error:
            raise InputError(f"{path}:{number}: {error}") from error
    return wanted


def cell_of(job: Job, how: Mapping[str, Any], *, limited: bool = True) -> Cell:
    """The cell that measures a job, run as ``how`` (its provenance) says, or as its cluster does."""
    device = job.cluster.device
    environment = {
        name: schema.convert(how.get(name), hint, f"provenance.{name}")
        for name, hint in (("cores_per_worker", int | None), ("link", str | None))
    }
    cores = device.cores if device.is_cpu else environment["cores_per_worker"]
    link = environment["link"] if limited else None
    if link is None and limited and device.is_cpu and job.cluster.nodes > 1:
        link = link_text(job.cluster.inter_node.bandwidth_bytes_per_s)
    return Cell(job=job, cores=cores or 1, link=link)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Where:
    make_job: MakeJob
    catalog: Catalog
    base: Path
    home: Path


def _cells(grid: Grid, where: _Where) -> Iterator[Cell]:
    batches = [(batch, 1) for batch in grid.batch] or [(batch, 0) for batch in grid.batch_per_worker]
    servers = [servers for sync in grid.sync for servers in (grid.servers if sync == "ps" else (0,))]
    dimensions = (grid.workers, grid.cores, batches, grid.samples or (None,), servers, grid.links or (None,))
    for model in grid.models:
        sections = _sections(grid, model, where)
        for workers, cores, (batch, whole), samples, serving, link in itertools.product(*dimensions):
            training = {**sections["training"], "global_batch": batch if whole else batch * workers}
            data = {
                "model": sections["model"],
                "training": training if samples is None else {**training, "samples": samples},
                "cluster": _cluster(grid, workers, cores, link, where.catalog),
                "plan": {"data": workers, "servers": serving},
            }
            job = _without_scaler(Job.read(data, catalog=where.catalog, base=where.base))
            yield Cell(job=job.seen_from(where.home), cores=cores, link=link)


def _without_scaler(job: Job) -> Job:
    """Leave the gradient scaler out, as workers train in amp-fp16."""
    if not job.workload.training.scales_loss:
        return job
    training = dataclasses.replace(job.workload.training, grad_scaler=False)
    return dataclasses.replace(job, workload=dataclasses.replace(job.workload, training=training))


def _sections(grid: Grid, model: str | Mapping[str, Any], where: _Where) -> dict[str, dict[str, Any]]:
    """The model and training sections that all cells of a model share."""
    options = ("sequence", "classes", "precision", "optimizer")
    training = {name: value for name in options if (value := getattr(grid, name)) is not None}
    named: dict[str, Any] = {"model": dict(model), "training": {}} if isinstance(model, Mapping) else {}
    if isinstance(model, str):
        named = where.make_job(model, device="cpu", cores_per_device=1, batch=1, **training).to_dict()
    if grid.image is not None:
        training["image"] = grid.image
    return {"model": named["model"], "training": {**named["training"], **training}}


def _cluster(grid: Grid, workers: int, cores: int, link: str | None, catalog: Catalog) -> dict[str, Any]:
    """Workers of one machine are devices of one node; with links of their own, nodes of one device."""
    device = catalog.device(grid.device, "device")
    cluster: dict[str, Any] = {"device": device.name}
    if device.is_cpu:
        cluster["cores_per_device"] = cores
    if link is None:
        return {**cluster, "devices_per_node": workers, "nodes": 1}
    network = {"kind": "ethernet", "bandwidth": link_rate(link)}
    return {**cluster, "devices_per_node": 1, "nodes": workers, "inter_node": network}


def interleaved(cells: Sequence[Cell]) -> list[Cell]:
    """Take a cell of each model in turn, its sizes in bit-reversed order, each model starting elsewhere."""
    by_model: dict[str, list[Cell]] = {}
    for cell in cells:
        by_model.setdefault(json.dumps(cell.job.to_dict()["model"], sort_keys=True), []).append(cell)
    rows = [spread(of_model, start) for start, of_model in enumerate(by_model.values())]
    return [cell for turn in itertools.zip_longest(*rows) for cell in turn if cell is not None]


def spread(items: Sequence[Any], start: int = 0) -> list[Any]:
    """The items from ``start`` on, round and round, so that any first few lie far apart.

    >>> spread([1, 2, 3, 4, 5, 6, 7, 8])
    [1, 5, 3, 7, 2, 6, 4, 8]
    """
    bits = max(1, (len(items) - 1).bit_length())
    reversed_bits = [int(f"{i:0{bits}b}"[::-1], 2) for i in range(2**bits)]
    return [items[(i + start) % len(items)] for i in reversed_bits if i < len(items)]


# Running


def run_campaign(
    wanted: Sequence[Cell],
    out: Path,
    backend: Backend,
    *,
    protocol: Protocol | None = None,
    interface: str = "lo",
    timeout_s: float = 600.0,
    retry_failed: bool = False,
    budget_s: float | None = None,
    progress: Progress = lambda done, total: None,
    say: Callable[[str], None] = lambda line: None,
) -> Summary:
    """Measure the cells that ``out`` does not hold yet; each run is on disk before the next cell begins."""
    _check(wanted, backend)

    def key(cell: Cell) -> str:
        return cell.key(backend.name)

    todo = Resumed(wanted, out, key, _key_of, retry_failed=retry_failed, progress=progress)
    with ended_as_interrupted(), backend:
        for cell in todo.within(budget_s, todo.wanted):
            line = _run_cell(cell, backend, cell.task(protocol or Protocol(), interface, timeout_s))
            todo.write(line)
            if "error" in line:
                say(f"failed: {cell.label}: {line['error']}")
    return todo.summary


def _run_cell(cell: Cell, backend: Backend, task: WorkerTask) -> dict[str, Any]:
    """The run of one cell as it is written, or what is written when it fails."""
    begun = time.monotonic()
    how = {"backend": backend.name, "cores_per_worker": cell.cores, "sync": cell.sync, "link": cell.link}
    try:
        _check_job(cell, backend)
        result = backend.run(task, link_bytes_per_s=None if cell.link is None else link_rate(cell.link))
    except CellFailed as error:
        return {"job": cell.job.to_dict(), **how, "error": str(error), "time": _now()}
    about = {**result["provenance"], **how, "time": _now(), "seconds": round(time.monotonic() - begun, 2)}
    return Run(job=cell.job, measured=result["measured"], provenance=about).to_dict()


def _check_job(cell: Cell, backend: Backend) -> None:
    """A run must say how it ran: no option of its job that was not carried out."""
    job = cell.job
    if (option := not_carried_out(job, training={"mode": "train", "allocator": None})) is not None:
        raise CellFailed(f"{option} cannot be measured in a campaign")
    if job.workload.training.scales_loss:
        what = "training.grad_scaler: amp-fp16 scales its loss, which cannot be measured in a campaign"
        raise CellFailed(f"{what}; give false")
    in_node = job.cluster.devices_per_node
    if job.cluster.nodes > 1 and backend.name != "ray" and (cell.link is None or in_node > 1):
        several = f"{job.cluster.nodes} nodes of {in_node}"
        raise CellFailed(f"cluster.nodes: {several} are not on this machine; --on ray measures on a cluster")


def _key_of(line: Any) -> str | None:
    """The key of the cell that became this run or this failure; None for a run that no campaign made."""
    if (kind := kind_of(line)) not in ("runs", "failures"):
        raise InputError(f"one of {kind}, not a run; give another --out")
    try:
        how = line if "error" in line else line["provenance"]
        return _key(Job.read(line["job"]).to_dict(), how["backend"], how["cores_per_worker"], how["link"])
    except (KeyError, TypeError, ForetrainError):
        return None


def _check(wanted: Sequence[Cell], backend: Backend) -> None:
    """Refuse what can be refused before the first cell."""
    if any(cell.link is not None for cell in wanted):
        if backend.name != "local":
            raise InputError(f"links: only --on local limits links, not --on {backend.name}")
        check_links()
    on_gpu = [cell.job.cluster.device.name for cell in wanted if not cell.job.cluster.device.is_cpu]
    if on_gpu and backend.name != "ray" and gpu_count() == 0:
        raise InputError(f"device: {on_gpu[0]!r} needs an NVIDIA GPU, and there is none here")


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
