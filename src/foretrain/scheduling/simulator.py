"""Simulates a trace on machines under a policy; the same input gives the same result, bit for bit."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from foretrain.errors import ForetrainError, InputError, first_line
from foretrain.scheduling.estimates import Estimates, Exact
from foretrain.scheduling.failures import FailureModel
from foretrain.scheduling.jobs import TraceJob
from foretrain.scheduling.kernel import Events, Kind
from foretrain.scheduling.machines import FULL, Allocation, DoubleAllocation, Machine, Machines, Pool, packed
from foretrain.scheduling.placement import Packed, Placement
from foretrain.scheduling.result import Result, Segment
from foretrain.scheduling.speeds import Speeds, TraceSpeeds

if TYPE_CHECKING:
    from foretrain.scheduling.policies.base import Policy


_MOST_ACTS = 20
"""Starts at one moment, per job in the cluster, after which a policy is taken to go round in circles."""


class PolicyError(ForetrainError):
    """A policy did what no policy may; the message names it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What else shapes a simulation.

    Costs in seconds: a checkpoint before a job is taken off, a restart before it works again.
    """

    checkpoint_s: float = 0.0
    restart_s: float = 0.0
    checkpoint_every_s: float = 1800.0
    """A job that fails loses what it did since its last checkpoint."""
    sharing: bool = False
    """Whether jobs that need a share of a GPU may have one to themselves (False) or share it (True)."""
    failures: FailureModel = field(default_factory=FailureModel)
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("checkpoint_s", "restart_s"):
            if not 0 <= getattr(self, name) < math.inf:
                raise InputError(f"settings.{name}: {getattr(self, name)!r} is not a time of at least 0")
        if not self.checkpoint_every_s > 0:
            every_s = self.checkpoint_every_s
            raise InputError(f"settings.checkpoint_every_s: {every_s!r} is not a time above 0")


@dataclass(slots=True, eq=False, repr=False)
class Active:
    """A job in the cluster, as policies see it. They read it; only the simulator writes."""

    number: int
    spec: TraceJob
    work: float
    estimated_work: float
    nominal_rate: float
    """Work per second on the GPUs it asks for."""
    pools: tuple[Pool, ...] = ()
    gpus: int = field(init=False)
    arrival_s: float = field(init=False)
    done: float = 0.0
    rate: float = 0.0
    since_s: float = 0.0
    ready_s: float = 0.0
    allocation: Allocation | None = None
    version: int = 0
    attained_gpu_s: float = 0.0
    lost_gpu_s: float = 0.0
    overhead_gpu_s: float = 0.0
    overhead_s: float = 0.0
    first_start_s: float | None = None
    starts: int = 0
    preemptions: int = 0
    failures: int = 0

    def __post_init__(self) -> None:
        self.gpus, self.arrival_s = self.spec.gpus, self.spec.arrival_s

    @property
    def is_running(self) -> bool:
        return self.allocation is not None

    def __repr__(self) -> str:
        return f"Active({self.spec.name!r})"


class Simulation:
    """The cluster over time. Policies act on it by ``start``, ``preempt`` and ``resize``."""

    def __init__(
        self,
        jobs: Sequence[TraceJob],
        machines: Sequence[Machine],
        policy: Policy,
        *,
        placement: Placement | None = None,
        speeds: Speeds | None = None,
        estimates: Estimates | None = None,
        settings: Settings | None = None,
        tell: Callable[[int], None] = lambda _: None,
    ) -> None:
        self.now = 0.0
        self.machines = Machines(machines)
        self.policy = policy
        self.settings = settings or Settings()
        self._placement = placement or Packed()
        self._speeds = speeds or TraceSpeeds()
        self._events = Events()
        self._failures = self.settings.failures.starts(self.settings.seed)
        self._tell = tell
        self._segments: list[Segment] = []
        self._acts = 0
        self._rates: dict[tuple[str, int, str, tuple[int, ...]], float] = {}
        self._finish_s: list[float] = [math.nan] * len(jobs)
        self.running: dict[int, Active] = {}
        self.waiting: dict[int, Active] = {}
        self._usable: dict[tuple[str | None, str, int], tuple[Pool, ...]] = {}
        self.jobs = [self._activate(number, job, estimates or Exact()) for number, job in enumerate(jobs)]
        self._order = sorted(self.jobs, key=lambda job: (job.arrival_s, job.number))

    def _activate(self, number: int, job: TraceJob, estimates: Estimates) -> Active:
        work, pools = self._speeds.work(job), self._usable_by(job)
        nominal = max(self._packed_rate(job, pool, job.gpus) for pool in pools)
        return Active(number, job, work, work * estimates.factor(job, number), nominal, pools)

    def _usable_by(self, job: TraceJob) -> tuple[Pool, ...]:
        """The pools that have a job's device, enough GPUs and a speed for it; none is an error."""
        key = (job.device, job.kind, job.gpus)
        if key not in self._usable:
            allowed = [pool for pool in self.machines.pools if job.device in (None, pool.device)]
            most = max((pool.size for pool in allowed), default=0)
            if most < job.fewest:
                needs = f"{job.fewest} GPUs of {job.device or 'one kind'}"
                raise InputError(f"trace: job {job.name!r} needs {needs} and the cluster has {most}")
            large = [pool for pool in allowed if pool.size >= job.fewest]
            usable = tuple(pool for pool in large if self._packed_rate(job, pool, job.gpus) > 0)
            if not usable:
                raise InputError(
                    f"trace: job {job.name!r} ({job.kind}) runs on none of the cluster's devices"
                )
            self._usable[key] = usable
        return self._usable[key]

    # What policies may ask

    def pools_for(self, job: Active) -> tuple[Pool, ...]:
        """Where a job can run at all, in the order of the cluster."""
        return job.pools

    def pool_for(self, job: Active, gpus: int | None = None) -> Pool | None:
        """Where a job would run now: the fastest pool with enough free GPUs; None when there is none."""
        count = job.gpus if gpus is None else gpus
        pools = self.pools_for(job)
        if len(pools) == 1:
            pool = pools[0]
            return pool if pool.free >= count or self._sharable(job, pool) else None
        best, best_rate = None, 0.0
        for pool in pools:
            if pool.free >= count or self._sharable(job, pool):
                rate = self._packed_rate(job.spec, pool, count)
                if rate > best_rate:
                    best, best_rate = pool, rate
        return best

    def fits(self, job: Active, gpus: int | None = None) -> bool:
        """Whether so many GPUs (else those asked for) are free for a job."""
        return self.pool_for(job, gpus) is not None

    def remaining_s(self, job: Active) -> float:
        """Estimated time left on the GPUs that a job has, or asks for; 0 once it outlives its estimate."""
        rate = job.rate if job.allocation is not None and job.rate > 0 else job.nominal_rate
        wait = max(job.ready_s - self.now, 0.0) if job.allocation is not None else 0.0
        return wait + max(job.estimated_work - self.done(job), 0.0) / rate

    def remaining_nominal_s(self, job: Active, *, truly: bool = False) -> float:
        """The same on the fastest GPUs, wherever it runs, so that jobs compare; ``truly`` is for oracles."""
        return max((job.work if truly else job.estimated_work) - self.done(job), 0.0) / job.nominal_rate

    def done(self, job: Active) -> float:
        """Work done so far."""
        if job.allocation is None:
            return job.done
        return job.done + max(self.now - max(job.since_s, job.ready_s), 0.0) * job.rate

    def attained_gpu_s(self, job: Active) -> float:
        """GPU time received so far."""
        held = 0.0 if job.allocation is None else (self.now - job.since_s) * job.allocation.gpus
        return job.attained_gpu_s + held

    def rate_on(self, job: Active, gpus: int) -> float:
        """Work per second on so many GPUs of the fastest device, packed; for policies that choose sizes."""
        return max(self._packed_rate(job.spec, pool, gpus) for pool in self.pools_for(job))

    # What policies may do

    def start(
        self, job: Active, *, gpus: int | None = None, pool: Pool | None = None, on: Allocation | None = None
    ) -> None:
        """Run a waiting job: on GPUs that the placement chooses, or on those given."""
        self._known(job, "start")
        self._acts += 1
        name = f"job {job.spec.name!r}"
        if self._acts > _MOST_ACTS * (len(self.waiting) + len(self.running) + 1):
            endless = f"starts jobs {self._acts:,} times at one moment and comes to no end"
            raise self._misbehaved(f"{endless} (last: {job.spec.name!r})")
        if job.allocation is not None:
            raise self._misbehaved(f"starts {name}, which is running already")
        if job.number not in self.waiting:
            raise self._misbehaved(f"starts {name}, which is not waiting (finished, or not yet there)")
        count = job.gpus if gpus is None else gpus
        if not job.spec.fewest <= count <= job.spec.most:
            allowed = f"{job.spec.fewest} to {job.spec.most}"
            raise self._misbehaved(f"gives {name} {count} GPUs; it takes {allowed}")
        allocation = on if on is not None else self._place(job, count, pool)
        if allocation.gpus != count or sum(allocation.shape) != count:
            raise self._misbehaved(f"gives {name} {sum(allocation.shape)} GPUs where it says {count}")
        try:
            self.machines.take(allocation)
        except (DoubleAllocation, IndexError) as error:
            reason = f"gives {name} GPUs that it cannot have: {first_line(error)}"
            raise self._misbehaved(reason) from error
        del self.waiting[job.number]
        self._run(job, allocation)

    def preempt(self, job: Active) -> None:
        """Take a running job off its GPUs; it waits again, and what it did is kept."""
        self._known(job, "preempt")
        if job.allocation is None:
            raise self._misbehaved(f"preempts job {job.spec.name!r}, which is not running")
        job.preemptions += 1
        job.overhead_s = self.settings.checkpoint_s + self.settings.restart_s
        self._stop(job, "preempted")
        self._wait(job)

    def resize(self, job: Active, gpus: int) -> None:
        """Give a running job more or fewer GPUs, by a checkpoint and a restart."""
        if job.allocation is not None and job.allocation.gpus == gpus:
            return
        self.preempt(job)
        job.preemptions -= 1
        self.start(job, gpus=gpus)

    def wake(self, job: Active, time_s: float) -> None:
        """Have ``policy.timer(job)`` called at a time, unless the job stops running before."""
        self._events.push(time_s, Kind.TIMER, job, job.version)

    # The clock

    def run(self) -> Result:
        """Until every job is done."""
        self._call(self.policy.begin, self)
        self._set_outages()
        if self.policy.interval_s is not None and self._order:
            self._events.push(self._order[0].arrival_s, Kind.ROUND, None)
        arrived, finished, count = 0, 0, len(self._order)
        while finished < count:
            next_event = self._events.next_s
            next_arrival = self._order[arrived].arrival_s if arrived < count else None
            if next_event is None and next_arrival is None:
                raise self._stuck()
            self.now = min(time for time in (next_event, next_arrival) if time is not None)
            changed = False
            while (time := self._events.next_s) is not None and time <= self.now:
                _, kind, _, about, version = self._events.pop()
                if kind == Kind.FINISH:
                    if version == about.version:
                        self._finish(about)
                        finished += 1
                        changed = True
                        if not finished % 256:
                            self._tell(finished)
                else:
                    changed |= self._handle(kind, about, version, over=arrived == count)
            while arrived < count and self._order[arrived].arrival_s <= self.now:
                self._wait(self._order[arrived])
                arrived += 1
                changed = True
            if changed:
                self._acts = 0
                self._call(self.policy.decide, self)
        self._tell(finished)
        return self._result()

    def _handle(self, kind: int, about: object, version: int, *, over: bool) -> bool:
        """An event that is no end of a job; whether anything changed."""
        if kind == Kind.ROUND:
            if not self.running and not self.waiting and over:
                return False
            if over and not self.running and not self._events and not self._can_start():
                raise self._stuck()
            assert self.policy.interval_s is not None
            self._events.push(self.now + self.policy.interval_s, Kind.ROUND, None)
            self._call(self.policy.round, self)
            return True
        if kind == Kind.REPAIR:
            assert isinstance(about, int)
            self.machines.bring_up(about)
            self._set_failure(about)
            return True
        if kind == Kind.NODE_FAILURE:
            assert isinstance(about, tuple)
            return self._fail_node(*about)
        assert isinstance(about, Active)
        if version != about.version:
            return False
        if kind == Kind.JOB_FAILURE:
            self._fail(about, "failed")
        else:
            self._call(self.policy.timer, self, about)
        return True

    def _can_start(self) -> bool:
        return any(self.fits(job, job.spec.fewest) for job in self.waiting.values())

    def _stuck(self) -> PolicyError:
        first = next(iter(self.waiting.values()))
        who = f"first: {first.spec.name!r}, {first.gpus} GPUs; {self.machines.free} are free"
        return self._misbehaved(f"leaves {len(self.waiting):,} jobs waiting for ever ({who})")

    # What happens to jobs

    def _wait(self, job: Active) -> None:
        self.waiting[job.number] = job
        self._call(self.policy.waits, self, job)

    def _place(self, job: Active, count: int, pool: Pool | None) -> Allocation:
        pool = pool or self.pool_for(job, count)
        if pool is None or (pool.free < count and not self._sharable(job, pool)):
            free = self.machines.free if pool is None else pool.free
            raise self._misbehaved(f"starts job {job.spec.name!r} on {count} GPUs, and {free} are free")
        share = self._share(job)
        if share < FULL:
            place = self.machines.sharable(pool.number, share)
            if place is not None:
                return Allocation(pool.number, ((place[0], 1 << place[1]),), 1, share)
        picked = self.machines.pick(pool.number, self._placement.choose(self.machines, pool, count))
        return picked if share == FULL else Allocation(pool.number, picked.parts, 1, share)

    def _share(self, job: Active) -> int:
        return max(1, round(job.spec.share * FULL)) if self.settings.sharing and job.spec.share < 1 else FULL

    def _sharable(self, job: Active, pool: Pool) -> bool:
        return (share := self._share(job)) < FULL and self.machines.sharable(pool.number, share) is not None

    def _run(self, job: Active, allocation: Allocation) -> None:
        job.allocation = allocation
        job.starts += 1
        job.since_s = self.now
        job.ready_s = self.now + job.overhead_s
        job.overhead_gpu_s += job.overhead_s * allocation.gpus
        job.overhead_s = 0.0
        if job.first_start_s is None:
            job.first_start_s = self.now
        device = self.machines.pools[allocation.pool].device
        job.rate = self._rate(job.spec, device, allocation.shape)
        if job.rate <= 0:
            raise self._misbehaved(f"runs job {job.spec.name!r} on {device}, where it cannot run")
        self.running[job.number] = job
        finish_s = job.ready_s + max(job.work - job.done, 0.0) / job.rate
        self._events.push(finish_s, Kind.FINISH, job, job.version)
        until = self._failures.of_job(job.number, job.starts, allocation.gpus)
        if until < math.inf:
            self._events.push(self.now + until, Kind.JOB_FAILURE, job, job.version)

    def _stop(self, job: Active, reason: str) -> None:
        """Off its GPUs, with what it did counted."""
        allocation = job.allocation
        assert allocation is not None
        job.done = self.done(job)
        job.attained_gpu_s += (self.now - job.since_s) * allocation.gpus
        unused = max(job.ready_s - self.now, 0.0)
        job.overhead_gpu_s -= unused * allocation.gpus
        self._segments.append(Segment(job.number, job.since_s, self.now, reason, allocation))
        self.machines.give_back(allocation)
        job.allocation = None
        job.version += 1
        del self.running[job.number]

    def _finish(self, job: Active) -> None:
        self._stop(job, "finished")
        job.done = job.work
        self._finish_s[job.number] = self.now
        self._call(self.policy.finished, self, job)

    def _fail(self, job: Active, reason: str) -> None:
        """Back to the last checkpoint, and to the queue."""
        allocation = job.allocation
        assert allocation is not None
        worked = max(self.now - max(job.since_s, job.ready_s), 0.0)
        lost_s = worked % self.settings.checkpoint_every_s
        rate = job.rate
        job.failures += 1
        self._stop(job, reason)
        job.done = max(job.done - lost_s * rate, 0.0)
        job.lost_gpu_s += lost_s * allocation.gpus
        job.overhead_s = self.settings.restart_s
        self._wait(job)

    # What happens to nodes

    def _set_outages(self) -> None:
        nodes = len(self.machines.machines)
        for outage in self.settings.failures.outages:
            if outage.node >= nodes:
                raise InputError(f"failures: node {outage.node} is not one of the cluster's {nodes}")
            self._events.push(outage.time_s, Kind.NODE_FAILURE, (outage.node, outage.repair_s))
        for node in range(nodes):
            self._set_failure(node)

    def _set_failure(self, node: int) -> None:
        until = self._failures.of_node(node)
        if until < math.inf:
            self._events.push(self.now + until, Kind.NODE_FAILURE, (node, None))

    def _fail_node(self, node: int, repair_s: float | None) -> bool:
        if not self.machines.is_up(node):
            return False
        for job in list(self.running.values()):
            if job.allocation and any(part[0] == node for part in job.allocation.parts):
                self._fail(job, "node failed")
        self.machines.take_down(node)
        repair_s = self._failures.repair_of(node) if repair_s is None else repair_s
        self._events.push(self.now + repair_s, Kind.REPAIR, node)
        return True

    # Small things

    def _rate(self, job: TraceJob, device: str, shape: tuple[int, ...]) -> float:
        key = (job.kind, job.gpus, device, shape)
        rate = self._rates.get(key)
        if rate is None:
            rate = self._rates[key] = self._speeds.rate(job, device, shape)
        return rate

    def _packed_rate(self, job: TraceJob, pool: Pool, gpus: int) -> float:
        return self._rate(job, pool.device, packed(gpus, len(pool.by_free) - 1))

    def _known(self, job: object, verb: str) -> None:
        if not isinstance(job, Active) or job not in self.jobs[job.number : job.number + 1]:
            raise self._misbehaved(f"wants to {verb} {job!r}, which is no job of this simulation")

    def _misbehaved(self, what: str) -> PolicyError:
        return PolicyError(f"policy {self.policy.name}: {what}")

    def _call(self, hook: Callable[..., None], *arguments: object) -> None:
        try:
            hook(*arguments)
        except ForetrainError:
            raise
        except (Exception, SystemExit) as error:
            reason = f"{hook.__name__} raised {type(error).__name__}: {first_line(error)}"
            raise self._misbehaved(reason) from error

    def _result(self) -> Result:
        return Result.of(self.policy.name, self.jobs, self._finish_s, self._segments, self.machines.machines)
