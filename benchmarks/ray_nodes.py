"""Measures epochs on a Ray cluster of four nodes on one machine, joined by links whose rate is varied.

    python benchmarks/ray_nodes.py --out runs.jsonl [--budget 520] [--cells 20] [--repeats 3] [--quick]
    python benchmarks/ray_nodes.py --out runs.jsonl --core 0.05 --on 1 --longest 40 --budget 3300

Each node is a Ray node (``ray start``) of four cores of the machine in a network namespace of its own; its
link is limited by a token bucket (root, ip and tc; where there are none, nodes are not apart and no link is
limited). On every node wait actors of one, two and four cores; the workers of a cell are so many of one size,
spread over as few nodes as hold them at the same number each. Cells (models, workers, cores, links, size of
the data) are drawn so that values occur alike, and all are measured once before any is measured again, each
time in another order, one at a time. With ``--quick`` two nodes, few cells and short ones, to see it work.

Where the machine has no sixteen cores, ``--core 0.05`` makes cores of a twentieth of a real one: the threads
of a worker share a quota of the kernel's scheduler, as a container with a limit on its CPUs does. Batches are
then a quarter as large, links slower and epochs longer. With ``--on 1`` all workers stay on that real core,
before anything else that the scheduler puts there, and Ray's own processes stay off it.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import itertools
import json
import os
import random
import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foretrain.errors import ForetrainError, InputError
from foretrain.job import Job
from foretrain.measure.links import INTERFACE, Fabric, address, check_links, enter, link_rate, link_text
from foretrain.measure.tasks import Protocol, WorkerTask

PORT = 6379
FILE = "ray_nodes_models.py"
DATA = Path(__file__).resolve().parents[1] / "data"
LINKS_BYTES_PER_S = tuple(map(link_rate, ("500Mbit", "1Gbit", "2Gbit", "10Gbit")))
"""Of nodes with whole cores."""
SLOW_LINKS_BYTES_PER_S = tuple(map(link_rate, ("2Gbit", "4Gbit", "8Gbit", "20Gbit")))
"""Of nodes with parts of cores, times that part: smaller batches leave less computing to each exchange."""
SLOW_PART = 4
"""By which batches are smaller with parts of cores, so that warm-up steps do not take most of the time."""
WHOLE = Protocol(seconds=0.3, min_steps=5, epoch_limit_s=40.0, points=20)
SLOW = Protocol(seconds=1.0, min_steps=3, epoch_limit_s=120.0, points=20)
QUOTAS = Path("/sys/fs/cgroup/cpu")
PERIOD_US = 20_000
"""In which a quota is given out: short beside a step, long beside a tick of the scheduler (4 ms)."""
SHARES = 2**18
"""Weight of a group with a quota; of any other process 1024."""
LOG = sys.stderr


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """A model, the samples of a worker in a step, and what is known about it ahead, to plan the time."""

    model: dict[str, str]
    training: dict[str, Any]
    batch: int
    step_s: float
    megabytes: float


MODELS = {
    "squeezenet1_1": Trained(
        model={"source": "torchvision", "name": "squeezenet1_1"},
        training={"image": 32, "classes": 10},
        batch=16,
        step_s=0.022,
        megabytes=2.9,
    ),
    "convnet": Trained(
        model={"source": "python", "name": f"{FILE}:convnet"},
        training={},
        batch=16,
        step_s=0.03,
        megabytes=2.5,
    ),
    "mlp": Trained(
        model={"source": "python", "name": f"{FILE}:mlp"}, training={}, batch=64, step_s=0.025, megabytes=4.8
    ),
    "transformer": Trained(
        model={"source": "python", "name": f"{FILE}:transformer"},
        training={"optimizer": "adamw"},
        batch=8,
        step_s=0.04,
        megabytes=2.1,
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A cell: a model, its workers with their cores, the link of a node, and the size of the data in batches
    of one worker. A core is ``core`` of a real one."""

    name: str
    workers: int
    cores: int
    link: str | None
    batches: int
    core: float = 1.0

    @property
    def nodes(self) -> int:
        """As few as hold the workers, with the same number on each, but four as soon as that is possible."""
        return next(n for n in (4, 3, 2, 1) if self.workers % n == 0)

    @property
    def batch(self) -> int:
        """Of a worker."""
        return MODELS[self.name].batch // (SLOW_PART if self.core < 1 else 1)

    @property
    def samples(self) -> int:
        return self.batches * self.batch

    def seconds(self) -> float:
        """About how long an epoch lasts."""
        known, each = MODELS[self.name], self.workers // self.nodes
        step_s, each_s = known.step_s / self.cores**0.6, 0.003 if self.workers > 1 else 0.0
        if self.core < 1:  # as first tries took
            step_s, each_s = 0.7 * known.step_s / self.cores**0.9 / self.core, 0.4 * each_s / self.core
        step_s += each_s * self.workers
        if self.link is not None:
            step_s += 1.5 * known.megabytes * 1e6 * min(each, 2) / link_rate(self.link)
        return float(self.batches / self.workers * step_s)

    def job(self, *, limited: bool) -> dict[str, Any]:
        known = MODELS[self.name]
        inside = {"devices_per_node": self.workers, "nodes": 1}
        if limited and self.link is not None:
            network = {"kind": "ethernet", "bandwidth": link_rate(self.link)}
            inside = {"devices_per_node": self.workers // self.nodes, "nodes": self.nodes}
            inside |= {"inter_node": network}  # type: ignore[dict-item]
        training = {**known.training, "global_batch": self.batch * self.workers, "samples": self.samples}
        data = {
            "model": known.model,
            "training": training,
            "cluster": {"device": "cpu", "cores_per_device": self.cores, **inside},
            "plan": {"data": self.workers},
        }
        return Job.read(data, base=DATA).to_dict()


def points(
    count: int, seed: int, *, longest_s: float, nodes: int = 4, node_cores: int = 4, core: float = 1.0
) -> list[Point]:
    """``count`` cells of each model in which values occur about alike."""
    drawn, chosen = random.Random(seed), []
    rates = LINKS_BYTES_PER_S if core == 1 else SLOW_LINKS_BYTES_PER_S
    links = [link_text(core * rate) for rate in rates]
    for name in MODELS:
        every = [
            Point(name=name, workers=workers, cores=cores, link=link, batches=batches, core=core)
            for workers, cores, batches in itertools.product(
                (1, 2, 3, 4, 6, 8, 12, 16), (1, 2, 4), (16, 32, 64, 128, 256, 512)
            )
            for link in (links if workers > 1 else (None,))
        ]
        fitting = [
            point
            for point in every
            if point.nodes <= nodes
            and point.workers // point.nodes * point.cores <= node_cores
            and point.batches >= 2 * point.workers
            and point.seconds() <= longest_s
        ]
        seen: Counter[Any] = Counter()

        def values(point: Point) -> list[Any]:
            one = [(field, getattr(point, field)) for field in ("workers", "cores", "link", "batches")]
            return [*one, *itertools.combinations(one, 2)]

        for _ in range(min(count, len(fitting))):
            tried = drawn.sample(fitting, min(60, len(fitting)))
            best = min(tried, key=lambda point: sum(seen[value] for value in values(point)))
            fitting.remove(best)
            seen.update(values(best))
            chosen.append(best)
    return chosen


# The cluster


class Cluster:
    """A head and nodes in the ``with`` block, each node in a namespace of its own where that can be."""

    def __init__(
        self, nodes: int, cores: int, folder: Path, core: float = 1.0, on: Sequence[int] = ()
    ) -> None:
        self.nodes, self.cores, self._folder, self._core = nodes, cores, folder, core
        self._others = sorted(os.sched_getaffinity(0) - set(on)) or list(on)
        self.fabric: Fabric | None = None
        self._begun: list[subprocess.Popen[bytes]] = []
        self._undone = contextlib.ExitStack()

    def __enter__(self) -> Cluster:
        import ray

        host = "127.0.0.1"
        try:
            check_links()
            self.fabric = self._undone.enter_context(Fabric(self.nodes, link_rate("10Gbit")))
            host = self.fabric.host()
        except InputError as error:
            self.fabric = None
            say(f"no limited links: {error}")
        try:
            head = ["--head", f"--port={PORT}", f"--node-ip-address={host}", "--num-cpus=0"]
            self._start("head", [*head, "--include-dashboard=false"], self._enter(None))
            wait(lambda: answers(host), 60, "the head")
            time.sleep(2)
            ray.init(
                address=f"{host}:{PORT}", log_to_driver=False, logging_level="ERROR", _node_ip_address=host
            )
            self._undone.callback(ray.shutdown)
            for index in range(self.nodes):
                where = host if self.fabric is None else address(index)
                holds = [f"--num-cpus={3 * self.cores}", f"--resources={json.dumps({f'node{index}': 100})}"]
                words = [f"--address={host}:{PORT}", f"--node-ip-address={where}", *holds]
                self._start(f"node{index}", words, self._enter(index))
                wait(lambda: sum(node["Alive"] for node in ray.nodes()) == len(self._begun), 90, "a node")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(Exception):
            import ray

            ray.shutdown()
        for turn in (self._begun[1:], self._begun[:1]):  # the head last, as nodes take leave of it
            for process in turn:
                process.terminate()
            for process in turn:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=10)
                process.kill()
        self._undone.close()

    def limit(self, link: str | None) -> None:
        if self.fabric is not None and link is not None:
            self.fabric.limit(link_rate(link))

    def _enter(self, index: int | None) -> Callable[[], None]:
        """What a node's process does before Ray: goes to its cores and its namespace; the head has none."""
        node_cores = set(self._others)
        if self._core == 1 and index is not None:
            first, count = index * self.cores, len(self._others)
            node_cores = {self._others[(first + i) % count] for i in range(self.cores)}

        def before() -> None:
            os.sched_setaffinity(0, node_cores)
            if self.fabric is not None and index is not None:
                enter(self.fabric.namespaces[index])

        return before

    def _start(self, name: str, words: Sequence[str], before: Callable[[], None]) -> None:
        log = (self._folder / f"{name}.log").open("wb")
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"]
        command += ["--object-store-memory=100000000", *words]
        environment = {**os.environ, "RAY_AUTH_MODE": "disabled", "GLOO_SOCKET_IFNAME": self.interface}
        if self._core < 1:  # threads that wait by spinning use up the quota of those that work
            environment["OMP_WAIT_POLICY"] = "PASSIVE"
        self._begun.append(
            subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, preexec_fn=before
            )
        )

    @property
    def interface(self) -> str:
        return "lo" if self.fabric is None else INTERFACE


def answers(host: str) -> bool:
    import socket

    with contextlib.suppress(OSError), socket.create_connection((host, PORT), timeout=1):
        return True
    return False


def wait(ready: Callable[[], bool], seconds: float, what: str) -> None:
    until = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > until:
            raise SystemExit(f"{what} did not answer in {seconds:.0f} s")
        time.sleep(0.2)


@contextlib.contextmanager
def weighted(name: str) -> Iterator[Path]:
    """A group of processes that come before others, in the ``with`` block."""
    if not (QUOTAS / "cpu.cfs_quota_us").exists():
        raise InputError(f"core: there are no quotas of processors in {QUOTAS} (cgroup, version 1)")
    group = QUOTAS / name
    group.mkdir(exist_ok=True)
    try:
        (group / "cpu.shares").write_text(str(SHARES))
        yield group
    finally:
        for _ in range(100):  # it can go when its processes have gone
            with contextlib.suppress(OSError):
                group.rmdir()
                break
            time.sleep(0.1)


def limit(group: Path, cores: float) -> None:
    """Let the processes of a group have so much of the machine's cores together."""
    (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
    (group / "cpu.cfs_quota_us").write_text(str(round(cores * PERIOD_US)))


class Worker:
    """An actor: stays on its cores, or within the quota of its group, and takes part in one cell after the
    other."""

    def __init__(self, first: int, cores: int, group: str | None, on: Sequence[int] = ()) -> None:
        os.environ["OMP_NUM_THREADS"] = str(cores)
        available = sorted(on or os.sched_getaffinity(0))
        self._cores = sorted({available[(first + i) % len(available)] for i in range(cores)})
        if group is not None:
            (Path(group) / "cgroup.procs").write_text(str(os.getpid()))
        for thread in Path("/proc/self/task").iterdir():
            with contextlib.suppress(OSError):
                os.sched_setaffinity(int(thread.name), self._cores if group is None else available)
        import torch

        import foretrain.measure.models
        import foretrain.measure.worker  # noqa: F401
        from foretrain.capture.sources.zoo import import_zoo

        torch.set_num_threads(cores)
        import_zoo("torchvision")

    def ready(self) -> list[int]:
        return self._cores

    def run(self, task: str, rank: int, local_rank: int, meeting: str) -> str | None:
        import torch.distributed as dist

        from foretrain.measure.worker import measure

        read = WorkerTask.from_json(task)
        about = {"rank": rank, "world_size": read.processes, "init_method": f"file://{meeting}"}
        timeout = datetime.timedelta(seconds=read.timeout_s)
        dist.init_process_group("gloo", timeout=timeout, **about)  # type: ignore[arg-type]
        try:
            result = measure(read, rank, local_rank, self._cores)
        finally:
            dist.destroy_process_group()
        return json.dumps(result) if rank == 0 else None


Actors = dict[tuple[int, int, int], Any]


def actors(
    nodes: int,
    node_cores: int,
    sizes: Sequence[int],
    core: float,
    groups: contextlib.ExitStack,
    on: Sequence[int] = (),
) -> Actors:
    """By node, cores and place among those of their size; each has imported torch."""
    import ray

    remote, made, quotas = ray.remote(Worker), {}, {}
    for node, cores in itertools.product(range(nodes), sizes):
        for place in range(node_cores // cores):
            needs = {"num_cpus": cores, "resources": {f"node{node}": 0.01}}
            group = None
            if core < 1:
                name = f"foretrain-{os.getpid()}-{node}-{cores}-{place}"
                group = str(path := groups.enter_context(weighted(name)))
                quotas[path] = cores * core
            made[node, cores, place] = remote.options(**needs).remote(place * cores, cores, group, on)
    pinned = ray.get([actor.ready.remote() for actor in made.values()], timeout=400)
    for path, share in quotas.items():
        limit(path, share)
    say(f"{len(made)} actors on cores {dict(zip(made, pinned, strict=True))}")
    return made


def run(point: Point, cluster: Cluster, made: Actors, folder: Path) -> dict[str, Any]:
    """One cell, as the result of its first worker."""
    import ray

    limited = cluster.fabric is not None
    cluster.limit(point.link)
    job = point.job(limited=limited)
    task = WorkerTask(
        job=job,
        base=str(DATA),
        cores=point.cores,
        timeout_s=60.0 / point.core,
        protocol=WHOLE if point.core == 1 else SLOW,
        interface=cluster.interface,
    )
    each, meeting = point.workers // point.nodes, folder / uuid.uuid4().hex
    taking_part = [
        made[node, point.cores, place].run.remote(task.to_json(), node * each + place, place, str(meeting))
        for node in range(point.nodes)
        for place in range(each)
    ]
    result = json.loads(ray.get(taking_part, timeout=90 / point.core)[0])
    meeting.unlink(missing_ok=True)
    how = {
        "backend": "ray",
        "ray": ray.__version__,
        "cores_per_worker": point.cores,
        "sync": "allreduce",
        "link": point.link if limited else None,
        "machines": 1,
        "ray_nodes": point.nodes,
        "workers_per_node": each,
        "core": point.core,
    }
    return {"job": job, "measured": result["measured"], "provenance": {**result["provenance"], **how}}


def passes(
    chosen: Sequence[Point], repeats: int, seed: int, took_s: dict[Point, float], until_s: float
) -> Iterator[tuple[int, Point]]:
    """Every cell once, in one order, then again in another; of what there is no time for, the longest cells
    stay at one measurement."""
    again = list(chosen)
    for repeat in range(repeats):
        if repeat == 1:
            again = within(again, took_s, (until_s - (time.monotonic() - BEGUN)) / (repeats - 1))
            say(f"{len(again)} of {len(chosen)} cells are measured again")
        random.Random(f"{seed} {repeat}").shuffle(again)
        for point in tuple(again):
            yield repeat, point


def within(chosen: Sequence[Point], took_s: dict[Point, float], budget_s: float) -> list[Point]:
    """Those that did not fail, less the longest until the rest fits."""
    kept = sorted((point for point in chosen if point in took_s), key=lambda point: took_s[point])
    while kept and 1.03 * sum(took_s[point] for point in kept) > budget_s:
        kept.pop()
    return kept


def say(text: str) -> None:
    print(f"{time.monotonic() - BEGUN:7.1f} s  {text}", file=LOG, flush=True)


def cpus(text: str) -> tuple[int, ...]:
    return tuple(int(word) for word in text.split(","))


BEGUN = time.monotonic()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--logs", type=Path, help="a folder; what Ray's processes print")
    parser.add_argument("--budget", type=float, default=520.0, help="seconds, from the start of this program")
    parser.add_argument("--cells", type=int, default=20, help="of each model")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--longest", type=float, default=6.0, help="seconds that an epoch may be expected to last"
    )
    parser.add_argument("--core", type=float, default=1.0, help="what a core is of a real one, at most 1")
    parser.add_argument("--on", type=cpus, default=(), help="real cores of the workers, with commas")
    parser.add_argument("--seed", type=int, default=20)
    parser.add_argument("--plan", action="store_true", help="print the cells and the time they may take")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    nodes, node_cores = (2, min(4, max(1, (os.cpu_count() or 2) // 2))) if options.quick else (4, 4)
    cells, longest_s = (1, 0.5 / options.core) if options.quick else (options.cells, options.longest)
    core = options.core
    chosen = points(cells, options.seed, longest_s=longest_s, nodes=nodes, node_cores=node_cores, core=core)
    if options.plan:
        for point in chosen:
            print(f"{point.seconds():6.2f} s  {point}")
        total_s = sum(point.seconds() for point in chosen)
        print(f"{len(chosen)} cells, {total_s:.0f} s of epochs, {options.repeats} times")
        return 0
    folder = options.logs or options.out.parent
    folder.mkdir(parents=True, exist_ok=True)
    failed = 0
    with (
        contextlib.ExitStack() as groups,
        Cluster(nodes, node_cores, folder, core, options.on) as cluster,
        options.out.open("a") as out,
    ):
        sizes = sorted({point.cores for point in chosen})
        made = actors(nodes, node_cores, sizes, core, groups, options.on)
        times_s: dict[Point, float] = {}
        cells_in_turn = passes(chosen, options.repeats, options.seed, times_s, options.budget)
        for order, (repeat, point) in enumerate(cells_in_turn):
            begun = time.monotonic()
            if begun - BEGUN + times_s.get(point, 0.0) > options.budget:
                say(f"time is up after {order} cells")
                break
            try:
                line = run(point, cluster, made, folder)
            except ForetrainError:
                raise
            except Exception as error:
                failed += 1
                say(f"failed: {point}: {type(error).__name__}: {' '.join(str(error).split())[:600]}")
                if failed >= 3:
                    return 1
                continue
            took_s = times_s[point] = time.monotonic() - begun
            now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
            line["provenance"] |= {"repeat": repeat, "order": order, "time": now, "seconds": round(took_s, 2)}
            out.write(json.dumps(line, separators=(",", ":")) + "\n")
            out.flush()
            step_s, epoch_s = (line["measured"][name] for name in ("step_time_s", "epoch_time_s"))
            cell = f"{point.name} {point.workers} x {point.cores}, {point.link}, {point.samples}"
            say(f"{repeat} {cell}: step {step_s:.4f}, epoch {epoch_s:.3f}, {took_s:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
