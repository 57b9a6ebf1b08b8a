"""Answers what is asked of a server: forecasts from memory or by workers, errands, and runs of the store."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import json
import logging
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from foretrain.api import job_of
from foretrain.catalog import Catalog
from foretrain.errors import ForetrainError, InputError
from foretrain.estimate import Estimate
from foretrain.files import parse_json
from foretrain.measure.store import Added, Entry, Filter, Store
from foretrain.planner.space import HELD
from foretrain.predictors import DEFAULT
from foretrain.run import Run
from foretrain.schema import read
from foretrain.serve.errands import Errand, Errands
from foretrain.serve.learned import LearnedPredictors
from foretrain.serve.metrics import ServerMetrics
from foretrain.serve.pool import Busy, Hears, NeedsTorchWorker, TaskRefused, WorkerPool
from foretrain.serve.requests import (
    ExplainRequest,
    LeaderboardRequest,
    LearnRequest,
    PlanRequest,
    PredictRequest,
    RunsQuery,
    ScheduleRequest,
    reading,
)
from foretrain.serve.safety import Folders
from foretrain.serve.settings import ServerSettings
from foretrain.workload import FILE_SOURCES

log = logging.getLogger("foretrain.serve")

Asked = TypeVar("Asked", PredictRequest, PlanRequest)
ROOFLINE = "roofline"
_TO_SCORE = 1000
"""Uploaded runs that wait to be compared with their forecasts, at most."""
_ELSEWHERE = Path("/uploaded")
"""Where the files of uploaded models would lie: nowhere."""
_MOST_SCORED = 2000
"""Runs that predictors are compared on, the newest."""
_KEPT_SCORES = 16
_COMPARED = ("step_time_s", "peak_memory_bytes")


class Service:
    """Everything behind the routes; ``start`` and ``close`` belong to one event loop."""

    def __init__(self, settings: ServerSettings) -> None:
        self.settings, self.metrics = settings, ServerMetrics()
        self.catalog = Catalog.load()
        self.store = Store.open(settings.db)
        self._folders = Folders(settings.allow)
        self._forecasts: OrderedDict[bytes, bytes] = OrderedDict()
        self._forecasts_bytes = 0
        self._scores: OrderedDict[str, bytes] = OrderedDict()
        self._uploads = 0

    async def start(self) -> None:
        limits, count = self.settings.limits, self.settings.processes
        memory = limits.memory_bytes
        self._quick = WorkerPool(
            count, torch=False, waiting=limits.waiting, seconds=limits.forecast_s, memory_bytes=memory,
            field="job", wait_s=limits.wait_s,
        )  # fmt: skip
        self._tracing = WorkerPool(
            count, torch=True, waiting=limits.waiting, seconds=limits.capture_s, memory_bytes=memory,
            field="model",
        )  # fmt: skip
        self._long = WorkerPool(
            count, torch=True, waiting=limits.waiting_jobs, seconds=limits.job_s, memory_bytes=memory,
            field="job",
        )  # fmt: skip
        self.errands = Errands(most=count + limits.waiting_jobs, kept=limits.kept_jobs)
        self._state = tempfile.TemporaryDirectory(prefix="foretrain-serve-")
        self.predictors = LearnedPredictors(self.store, Path(self._state.name))
        self._unscored: asyncio.Queue[Entry] = asyncio.Queue(maxsize=_TO_SCORE)
        self._scoring = asyncio.create_task(self._score_all())
        for name, pool in (("quick", self._quick), ("tracing", self._tracing), ("long", self._long)):
            self.metrics.watch(f"foretrain_{name}_tasks", "Tasks that run or wait.", _asked(pool))
        await self._quick.warm()

    async def close(self) -> None:
        self._scoring.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._scoring
        await self.errands.close()
        for pool in (self._quick, self._tracing, self._long):
            await pool.close()
        self.store.close()
        self._state.cleanup()

    async def is_ready(self) -> bool:
        """Whether the store answers."""
        try:
            await asyncio.to_thread(self.store.page, limit=1)
        except ForetrainError:
            return False
        return True

    # Forecasts

    async def predict(self, body: object) -> bytes:
        """A forecast as JSON: one that was given before, or by a worker, with torch where there is no
        graph."""
        asked = self._checked(read(PredictRequest, body, ""))
        return await self._answer("predict", asked.predictor, [asked], _as_table(asked))

    async def record(self, body: object) -> bytes:
        """Forecast as ``predict`` does, with what a page draws of it."""
        asked = self._checked(read(PredictRequest, body, ""))
        return await self._answer("record", asked.predictor, [asked], _as_table(asked))

    async def explain(self, body: object) -> bytes:
        """Two forecasts and why they differ."""
        asked = read(ExplainRequest, body, "")
        both = [self._checked(one) for one in asked.both]
        a, b = (_as_table(one) for one in both)
        for one in (a, b):
            del one["predictor"]
        return await self._answer("explain", asked.predictor, both, {**_as_table(asked), "a": a, "b": b})

    async def _answer(
        self, do: str, predictor: str, targets: Sequence[PredictRequest], request: Mapping[str, Any]
    ) -> bytes:
        where, version = await self.predictors.find(predictor)
        key = self._key(do, targets, request, version)
        if key is not None and key in self._forecasts:
            self._forecasts.move_to_end(key)
            self.metrics.remembered.add("memory")
            return self._forecasts[key]
        answer = await self._forecast(
            {"do": do, "request": request, "where": where, "ray": self.settings.ray}
        )
        if key is not None:
            self._keep(key, answer)
        return answer

    def _keep(self, key: bytes, answer: bytes) -> None:
        limits = self.settings.limits
        self._forecasts[key] = answer
        self._forecasts_bytes += len(answer)
        while len(self._forecasts) > limits.kept_forecasts or self._forecasts_bytes > limits.kept_bytes:
            _, gone = self._forecasts.popitem(last=False)
            self._forecasts_bytes -= len(gone)

    async def _forecast(self, task: Mapping[str, Any]) -> bytes:
        try:
            answer = await self._quick.run(task)
            self.metrics.remembered.add("graph")
        except NeedsTorchWorker:
            answer = await self._tracing.run(task)
            self.metrics.remembered.add("torch")
        return answer

    def _key(
        self, do: str, targets: Sequence[PredictRequest], request: Mapping[str, Any], version: str
    ) -> bytes | None:
        """Make a key of what a forecast depends on; None where it may change: of files, and of the cluster
        that is there."""
        for target in targets:
            completed = target.job is not None and not target.options and "cluster" not in target.job
            if completed or self._folders.names_file(target.model, target.job):
                return None
        text = json.dumps([do, request, version], sort_keys=True)
        return hashlib.sha256(text.encode(errors="surrogatepass")).digest()

    def _checked(self, asked: Asked) -> Asked:
        """A request of a job in which nothing names a file that may not be named."""
        with reading("job"):
            options = self._folders.checked_tables(asked.options, "options")
            model = None if asked.model is None else self._folders.checked_model(asked.model)
            job = None if asked.job is None else self._folders.checked_job(asked.job)
            config = None
            if asked.config is not None:
                config = self._folders.checked_tables(asked.config, "config", but=("config._name_or_path",))
        return dataclasses.replace(asked, options=options, model=model, job=job, config=config)

    # Errands

    async def plan(self, body: object) -> Errand:
        asked = self._checked(read(PlanRequest, body, ""))
        if asked.job is not None:
            await asyncio.to_thread(_check_job, asked)
        where, _ = await self.predictors.find(asked.predictor)
        return self._begin("plan", {"do": "plan", "request": _as_table(asked), "where": where})

    async def schedule(self, body: object) -> Errand:
        asked = read(ScheduleRequest, body, "")
        self._folders.checked_tables(_as_table(asked), "", but=("trace",))
        return self._begin("schedule", {"do": "schedule", "request": _as_table(asked)})

    def _begin(self, kind: str, task: Mapping[str, Any]) -> Errand:
        whole = {**task, "ray": self.settings.ray, "processes": self.settings.processes, "progress": True}
        return self.errands.begin(kind, lambda hears: self._long.run(whole, hears))

    async def learn(self, body: object) -> Errand:
        asked = read(LearnRequest, body, "")
        return self.errands.begin("learn", lambda hears: self._learn(asked, hears))

    async def _learn(self, asked: LearnRequest, hears: Hears) -> bytes:
        """Runs go to a worker by a file, and what it learned comes back by a folder: it knows no store."""
        with tempfile.TemporaryDirectory(prefix="foretrain-learn-", dir=self._state.name) as name:
            runs, folder = Path(name) / "runs.jsonl", Path(name) / "learned"
            refused = await asyncio.to_thread(self._write_runs, asked, runs)
            task = {"do": "learn", "request": _as_table(asked), "runs": str(runs), "folder": str(folder)}
            result = json.loads(await self._long.run({**task, "progress": True}, hears))
            files = await asyncio.to_thread(_files_in, folder)
        about = {"runs": result["runs"], "filter": _filter_of(asked)}
        kept = await asyncio.to_thread(
            self.store.keep_predictor, asked.name, result["predictor"], files, about
        )
        self.predictors.forget()
        return json.dumps({**result, "version": kept.version, "models_in_files": refused}).encode()

    async def leaderboard(self, body: object) -> Errand:
        """Predictors beside the runs that are kept; what nothing has changed since is given again."""
        asked = read(LeaderboardRequest, body, "")
        learned = await self.predictors.all()
        names = asked.predictors or (DEFAULT, ROOFLINE, *learned)
        where, versions = {}, {}
        for name in names:
            where[name], versions[name] = await self.predictors.find(name)
        return self.errands.begin(
            "leaderboard", lambda hears: self._score_runs(asked, where, versions, hears)
        )

    async def _score_runs(
        self, asked: LeaderboardRequest, where: Mapping[str, str], versions: Mapping[str, str], hears: Hears
    ) -> bytes:
        with tempfile.TemporaryDirectory(prefix="foretrain-runs-", dir=self._state.name) as name:
            runs = Path(name) / "runs.jsonl"
            refused = await asyncio.to_thread(self._write_runs, asked, runs, _MOST_SCORED)
            content = await asyncio.to_thread(runs.read_bytes)
            request = _as_table(asked)
            key = json.dumps([request, versions, hashlib.sha256(content).hexdigest()], sort_keys=True)
            if key not in self._scores:
                task = {"do": "leaderboard", "request": request, "where": where, "runs": str(runs)}
                result = json.loads(await self._long.run({**task, "progress": True}, hears))
                learned = [name for name, version in versions.items() if version != name]
                whole = {**result, "models_in_files": refused, "learned_here": learned}
                self._scores[key] = json.dumps(whole).encode()
                while len(self._scores) > _KEPT_SCORES:
                    self._scores.popitem(last=False)
        return self._scores[key]

    def _write_runs(
        self, asked: LearnRequest | LeaderboardRequest, path: Path, last: int | None = None
    ) -> int:
        """The runs of a question as a file; returns how many are left out for models in files."""
        refused = 0
        with path.open("w", encoding="utf-8") as file:
            for entry in self.store.entries(_filter(asked, self.catalog), last=last):
                try:
                    file.write(json.dumps(self._of_file_that_is_allowed(entry)) + "\n")
                except InputError:
                    refused += 1
        return refused

    def _of_file_that_is_allowed(self, entry: Entry) -> Mapping[str, Any]:
        """A run whose model is in no file, or in one that may be named, by its whole path."""
        job = entry.document["job"]
        if job["model"]["source"] not in FILE_SOURCES:
            return entry.document
        model = {**job["model"], "name": str(Path(entry.base) / job["model"]["name"])}
        return {**entry.document, "job": self._folders.checked_job({**job, "model": model})}

    # Runs

    @contextlib.contextmanager
    def uploading(self) -> Iterator[None]:
        """While a large body is here; only so many are at once."""
        if self._uploads >= self.settings.limits.uploads:
            raise Busy(f"{self._uploads} uploads are under way already; try again later")
        self._uploads += 1
        try:
            yield
        finally:
            self._uploads -= 1

    async def add_runs(self, body: bytes) -> Added:
        """Keep runs, all or none; they are on disk when this returns."""
        entries = await asyncio.to_thread(lambda: list(self._entries(body)))
        if not entries:
            raise InputError("runs: empty; one JSON object a line is needed")
        added = await asyncio.to_thread(self.store.add, entries)
        self.metrics.runs.add("new", by=added.new)
        self.metrics.runs.add("known", by=added.known)
        for entry in entries:
            if entry.id in added.ids:
                with contextlib.suppress(asyncio.QueueFull):
                    self._unscored.put_nowait(entry)
        return added

    def _entries(self, body: bytes) -> Iterator[Entry]:
        for number, line in enumerate(body.split(b"\n"), start=1):
            if line.strip():
                try:
                    yield self._entry(line)
                except ForetrainError as error:
                    raise InputError(f"line {number}: {error}") from error

    def _entry(self, line: bytes) -> Entry:
        try:
            data = parse_json(line)
        except ValueError as error:
            raise InputError(f"not JSON ({error})") from error
        with reading("run"):
            if isinstance(data, Mapping) and isinstance(data.get("job"), Mapping):
                but = ("job.model.name", "job.model.title")
                self._folders.checked_tables(data["job"], "job", but=but)
            return Entry.of(Run.read(data, catalog=self.catalog, base=_ELSEWHERE))

    async def runs(self, query: RunsQuery) -> dict[str, Any]:
        where = _filter(query, self.catalog)
        page = await asyncio.to_thread(lambda: self.store.page(where, after=query.after, limit=query.limit))
        total = await asyncio.to_thread(self.store.count, where)
        return {"runs": [entry_table(entry) for entry in page[0]], "next": page[1], "total": total}

    async def run(self, id: str) -> dict[str, Any]:
        return entry_table(await asyncio.to_thread(self.store.get, id))

    # Forecasts against what was measured

    async def _score_all(self) -> None:
        """Compare uploaded runs with their forecasts, one by one, where the graph is there."""
        while True:
            entry = await self._unscored.get()
            try:
                await self._score(entry)
            except (NeedsTorchWorker, Busy):
                self.metrics.unscored.add("no graph, or busy")
            except (TaskRefused, ForetrainError):
                self.metrics.unscored.add("not forecast")
            except Exception:
                log.exception("run %s", entry.short_id)

    async def _score(self, entry: Entry) -> None:
        job = self._of_file_that_is_allowed(entry)["job"]
        task = {"do": "predict", "request": {"job": job}, "where": DEFAULT}
        quantities = json.loads(await self._quick.run(task))["quantities"]
        for name in _COMPARED:
            if name in quantities and name in entry.document["measured"]:
                measured = entry.document["measured"][name]
                self.metrics.score(name, DEFAULT, measured, Estimate(**quantities[name]))


def _check_job(asked: PlanRequest) -> None:
    """Refuse, before a search begins, a job that is none."""
    with reading("job"):
        job_of(asked.job, {name: value for name, value in asked.options.items() if name not in HELD})


def entry_table(entry: Entry) -> dict[str, Any]:
    created = {} if entry.created is None else {"created": entry.created.isoformat()}
    return {"id": entry.id, **created, "run": entry.document}


def _filter_of(query: RunsQuery | LearnRequest | LeaderboardRequest) -> dict[str, str]:
    names = [field.name for field in dataclasses.fields(Filter)]
    return {name: value for name in names if (value := getattr(query, name)) is not None}


def _filter(query: RunsQuery | LearnRequest | LeaderboardRequest, catalog: Catalog) -> Filter:
    """Devices by the catalogue's name where it knows one: runs are kept under it."""
    given = _filter_of(query)
    if "device" in given:
        with contextlib.suppress(InputError):
            given["device"] = catalog.device(given["device"]).name
    return Filter(**given)


def _as_table(asked: Any) -> dict[str, Any]:
    """A request without what it leaves out."""
    table = {field.name: getattr(asked, field.name) for field in dataclasses.fields(asked)}
    return {name: value for name, value in table.items() if value is not None}


def _asked(pool: WorkerPool) -> Callable[[], float]:
    return lambda: pool.asked


def _files_in(folder: Path) -> dict[str, bytes]:
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}
