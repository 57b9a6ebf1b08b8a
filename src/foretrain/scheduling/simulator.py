"""Simulates a trace on machines under a policy; the same input gives the same result, bit for bit."""

from __future__ import annotations

import contextlib
import gc
import math
from collections.abc import Callable, Iterator, Sequence
from heapq import heappop
from typing import TYPE_CHECKING

from foretrain.errors import ForetrainError, InputError, first_line
from foretrain.scheduling.active import Active
from foretrain.scheduling.breakdowns import Breakdowns, Strike
from foretrain.scheduling.capabilities import refuse_what_is_not_honoured
from foretrain.scheduling.estimates import Estimates, Exact
from foretrain.scheduling.jobs import TraceJob
from foretrain.scheduling.kernel import Events, Kind
from foretrain.scheduling.machines import (
    FULL,
    Allocation,
    DoubleAllocation,
    Machine,
    Machines,
    Pool,
    memory_of,
)
from foretrain.scheduling.migration import migrate_all
from foretrain.scheduling.patience import MOST_ACTS, Patience
from foretrain.scheduling.placement import Packed, Placement
from foretrain.scheduling.places import Places
from foretrain.scheduling.rates import Rates
from foretrain.scheduling.result import Result, Segments
from foretrain.scheduling.settings import Settings
from foretrain.scheduling.sharing.mates import Mates
from foretrain.scheduling.speeds import Speeds, TraceSpeeds
from foretrain.units import format_seconds

if TYPE_CHECKING:
    from foretrain.scheduling.policies.base import Policy

__all__ = ["Active", "PolicyError", "Settings", "Simulation"]

_FINISH, _LIMIT = int(Kind.FINISH), int(Kind.LIMIT)
_MOST_FUTILE = 10_000
"""Failures or preemptions in a row by which a job gets no further than it was."""


class PolicyError(ForetrainError):
    """A policy did what no policy may; the message names it."""


_Taken = tuple[Allocation, float, float, float, float]
"""What changes of a job that is taken off, for the case that it is started again at the same moment: its
GPUs, what it has done, GPU time received and spent in overhead, run time."""


@contextlib.contextmanager
def _nothing_collected() -> Iterator[None]:
    """Let nobody look for cycles: nothing here makes any, and among a million jobs it takes long."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


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
        truth: Estimates | None = None,
        settings: Settings | None = None,
        tell: Callable[[int], None] = lambda _: None,
    ) -> None:
        self.now = 0.0
        self.machines = Machines(machines)
        self.policy = policy
        self.settings = settings or Settings()
        refuse_what_is_not_honoured(policy.name, self.settings.options, policy.honours)
        pairs = self.settings.pairs
        self._mates = None if pairs is None else Mates(pairs, memory_of(machines), self.settings.least_speed)
        self._kills = self.settings.rules.kill
        self._rates = Rates(speeds or TraceSpeeds(), self.machines, mixed=self.settings.mixed_gangs)
        self._places = Places(self.machines, self._rates, placement or Packed(), self.settings, self._mates)
        self._events = Events()
        self._failures = self.settings.failures.starts(self.settings.seed)
        self._jobs_fail = self.settings.failures.jobs_fail
        outages = self.settings.failures.outages
        self._breakdowns = Breakdowns(outages, self._failures, self.machines, self._events)
        self._tell = tell
        self._segments = Segments()
        self._patience = Patience()
        self._awaited_s = -math.inf
        self._taken: dict[int, _Taken] = {}
        self._finish_s: list[float] = [math.nan] * len(jobs)
        self.running: dict[int, Active] = {}
        self.waiting: dict[int, Active] = {}
        self._truth, believed = truth, estimates or Exact()
        believed.begin(jobs, self._rates.time_s)
        with _nothing_collected():
            self.jobs = [self._activate(number, job, believed) for number, job in enumerate(jobs)]
        self._count = len(self.jobs)
        self._order = sorted(self.jobs, key=lambda job: (job.arrival_s, job.number))

    def _activate(self, number: int, job: TraceJob, estimates: Estimates) -> Active:
        work, (pools, nominal) = self._rates.work(job), self._rates.usable_by(job)
        if self._truth is not None:
            work *= self._truth.factor(job, number)
        belief = estimates.belief(job, number)
        active = Active(number, job, work, work * belief.median, nominal, pools)
        active.believed_most = work * belief.high
        return active

    # What policies may ask

    def pools_for(self, job: Active) -> tuple[Pool, ...]:
        """Where a job can run at all, in the order of the cluster."""
        return job.pools

    def pool_for(self, job: Active, gpus: int | None = None) -> Pool | None:
        """Where a job would run now: the fastest pool with enough free GPUs; None when there is none."""
        return self._places.pool_for(job, job.gpus if gpus is None else gpus)

    def fastest(self, job: Active, left: Sequence[int]) -> Pool | None:
        """The fastest pool where a job's GPUs would go into what is ``left`` of each, by its number."""
        return self._places.fastest(job, left)

    def fits(self, job: Active, gpus: int | None = None) -> bool:
        """Whether so many GPUs (else those asked for) are free for a job."""
        return self._places.fits(job, job.gpus if gpus is None else gpus)

    def remaining_s(self, job: Active) -> float:
        """Estimated time left on the GPUs that a job has, or asks for; 0 once it outlives its estimate."""
        rate = job.rate if job.allocation is not None and job.rate > 0 else job.nominal_rate
        wait = max(job.ready_s - self.now, 0.0) if job.allocation is not None else 0.0
        left = job.estimated_work - self.done(job)
        return wait + left / rate if left > 0 else wait

    def expected_s(self, job: Active) -> float:
        """The same of a job that runs; once it outlives its estimate, up to the upper end of what is believed
        of it, and beyond that as long again as it is late."""
        late = self.done(job) - job.estimated_work
        if late <= 0:
            return self.remaining_s(job)
        more = job.believed_most - job.estimated_work
        return (more - late if more > late else late) / job.rate

    def remaining_nominal_s(self, job: Active, *, truly: bool = False) -> float:
        """The same on the fastest GPUs, wherever it runs, so that jobs compare; ``truly`` is for oracles."""
        done = job.done
        if job.allocation is not None and self.now > job.ready_s:
            done += (self.now - job.ready_s) * job.rate
        left = (job.work if truly else job.estimated_work) - done
        return left / job.nominal_rate if left > 0 else 0.0

    def done(self, job: Active) -> float:
        """Work done so far."""
        if job.allocation is None:
            return job.done
        return job.done + (self.now - job.ready_s) * job.rate if self.now > job.ready_s else job.done

    def attained_gpu_s(self, job: Active) -> float:
        """GPU time received so far."""
        held = 0.0 if job.allocation is None else (self.now - job.since_s) * job.allocation.gpus
        return job.attained_gpu_s + held

    def sizes(self, job: Active) -> tuple[int, ...]:
        """On how many GPUs it can run, of those that it takes; rising."""
        return self._rates.sizes(job.spec)

    def rate_on(self, job: Active, gpus: int) -> float:
        """Work per second on so many GPUs of the fastest device, packed; for policies that choose sizes."""
        return max(self._rates.packed(job.spec, pool, gpus) for pool in job.pools)

    def rate_in(self, job: Active, pool: Pool, gpus: int) -> float:
        """The same in one pool; 0 where the job cannot run."""
        return self._rates.packed(job.spec, pool, gpus)

    # What policies may do

    def start(
        self, job: Active, *, gpus: int | None = None, pool: Pool | None = None, on: Allocation | None = None
    ) -> None:
        """Run a waiting job: on GPUs that the placement chooses, or on those given."""
        if not isinstance(job, Active) or self.waiting.get(job.number) is not job:
            raise self._not_waiting(job)
        self._patience.acts += 1
        if self._patience.acts > MOST_ACTS and self._patience.too_many(self.waiting, self.running):
            endless = f"starts jobs {self._patience.acts:,} times at one moment and comes to no end"
            raise self._misbehaved(f"{endless} (last: {job.spec.name!r})")
        count = job.gpus if gpus is None else gpus
        if count != job.gpus and not job.spec.fewest <= count <= job.spec.most:
            allowed = f"{job.spec.fewest} to {job.spec.most}"
            raise self._misbehaved(f"gives job {job.spec.name!r} {count} GPUs; it takes {allowed}")
        if job.number in self._taken and on is None and self._keeps(job, count, pool):
            return
        allocation = self._place(job, count, pool) if on is None else on
        if on is not None and (on.gpus != count or sum(on.shape) != count):
            wrong = f"{sum(on.shape)} GPUs where it says {count}"
            raise self._misbehaved(f"gives job {job.spec.name!r} {wrong}")
        try:
            self.machines.take(allocation)
        except (DoubleAllocation, IndexError) as error:
            reason = f"gives job {job.spec.name!r} GPUs that it cannot have: {first_line(error)}"
            raise self._misbehaved(reason) from error
        del self.waiting[job.number]
        self._run(job, allocation)

    def _keeps(self, job: Active, count: int, pool: Pool | None) -> bool:
        """Whether a job taken off at this very moment goes on with its GPUs, as if nothing had happened."""
        taken = self._taken[job.number]
        allocation = taken[0]
        if allocation.gpus != count or (pool is not None and pool.number != allocation.pool):
            return False
        if not self.machines.has(allocation):
            return False
        self.machines.take(allocation)
        del self._taken[job.number], self.waiting[job.number]
        self._segments.take_back(job.number)
        job.preemptions -= 1
        job.fruitless = max(job.fruitless - 1, 0)
        job.overhead_s = 0.0
        job.allocation, job.done, job.attained_gpu_s, job.overhead_gpu_s, job.ran_s = taken
        self.running[job.number] = job
        if self._mates is not None:
            self._joined(job)
        self._set_end(job)
        return True

    def preempt(self, job: Active) -> None:
        """Take a running job off its GPUs; it waits again, and what it did is kept."""
        self._known(job, "preempt")
        if job.allocation is None:
            raise self._misbehaved(f"preempts job {job.spec.name!r}, which is not running")
        job.fruitless = 0 if self.now > job.ready_s else job.fruitless + 1
        if job.fruitless > _MOST_FUTILE:
            raise self._thrashing(job)
        taken = (job.allocation, job.done, job.attained_gpu_s, job.overhead_gpu_s, job.ran_s)
        job.preemptions += 1
        self._stop(job, "preempted")
        self._events.prune()
        self._taken[job.number] = taken
        job.overhead_s = self.settings.checkpoint_s + self.settings.restart_s
        self._wait(job)

    def resize(self, job: Active, gpus: int) -> None:
        """Give a running job more or fewer GPUs, by a checkpoint and a restart."""
        if job.allocation is not None and job.allocation.gpus == gpus:
            return
        self.preempt(job)
        job.preemptions -= 1
        del self._taken[job.number]
        self.start(job, gpus=gpus)

    def migrate(self, job: Active, pool: Pool) -> None:
        """Move a running job to another pool, by a checkpoint and a restart; it does not wait."""
        assert job.allocation is not None
        gpus = job.allocation.gpus
        self._stop(job, "migrated")
        job.overhead_s = self.settings.checkpoint_s + self.settings.restart_s
        allocation = self._place(job, gpus, pool)
        self.machines.take(allocation)
        self._run(job, allocation)
        self._call(self.policy.moved, self, job)

    def wake(self, job: Active, time_s: float) -> None:
        """Have ``policy.timer(job)`` called at a time, unless the job stops running before."""
        self._events.push(time_s, Kind.TIMER, job, job.version)

    def decide_at(self, time_s: float) -> None:
        """Have ``policy.decide`` called at a time, whatever else happens; until then jobs may wait for it."""
        self._events.push(time_s, Kind.WAKE, None)
        self._awaited_s = max(self._awaited_s, time_s)

    # The clock

    def run(self) -> Result:
        """Until every job is done."""
        with _nothing_collected():
            return self._run_all()

    def _run_all(self) -> Result:
        self._call(self.policy.begin, self)
        if self.policy.interval_s is not None and self._order:
            self._events.push(self._order[0].arrival_s, Kind.ROUND, None)
        events, order, decide = self._events, self._order, self.policy.decide
        heap, patience = events.heap, self._patience
        arrived, finished, count = 0, 0, len(order)
        while finished < count:
            next_s = heap[0][0] if heap else None
            if arrived < count and (next_s is None or order[arrived].arrival_s < next_s):
                self.now = order[arrived].arrival_s
            elif next_s is None:
                raise self._stuck()
            else:
                self.now = next_s
            now, changed = self.now, False
            while heap and heap[0][0] <= now:
                _, kind, _, about, version = heappop(heap)
                if kind <= _LIMIT:
                    if version == about.version:
                        self._finish(about, "finished" if kind == _FINISH else "killed")
                        finished += 1
                        changed = True
                        if not finished % 256:
                            self._tell(finished)
                else:
                    arrival_s = order[arrived].arrival_s if arrived < count else math.inf
                    changed |= self._handle(kind, about, version, arrival_s)
            while arrived < count and order[arrived].arrival_s <= now:
                self._wait(order[arrived])
                arrived += 1
                changed = True
            if changed:
                patience.acts = 0
                try:
                    decide(self)
                except ForetrainError:
                    raise
                except (Exception, SystemExit) as error:
                    raise self._raised(decide, error) from error
                if self._taken:
                    self._taken.clear()
                if self.settings.migrate and not self.waiting:
                    migrate_all(self)
                if arrived == count and self.waiting and not self.running:
                    if patience.stands_too_long(could_start=self._can_start()):
                        raise self._stuck()
                elif patience.stood:
                    patience.goes_on()
        self._tell(finished)
        return self._result()

    def _handle(self, kind: int, about: object, version: int, arrival_s: float) -> bool:
        """An event that is no end of a job; whether anything changed."""
        if kind == Kind.ROUND:
            return self._round(arrival_s)
        if kind == Kind.WAKE:
            return True
        if kind == Kind.REPAIR:
            assert isinstance(about, int)
            return self._breakdowns.repaired(about, self.now)
        if kind == Kind.NODE_FAILURE:
            assert isinstance(about, Strike)
            return self._fail_node(about)
        assert isinstance(about, Active)
        if version != about.version:
            return False
        if kind == Kind.JOB_FAILURE:
            self._fail(about, "failed")
        else:
            self._call(self.policy.timer, self, about)
        return True

    def _round(self, arrival_s: float) -> bool:
        """A round of the policy; where nothing runs or waits the next one is the first from an arrival on."""
        assert self.policy.interval_s is not None
        rounds = 1
        if not self.running and not self.waiting:
            if arrival_s == math.inf:
                return False
            rounds = max(1, math.ceil((arrival_s - self.now) / self.policy.interval_s))
        self._events.push(self.now + rounds * self.policy.interval_s, Kind.ROUND, None)
        self._call(self.policy.round, self)
        return True

    def _can_start(self) -> bool:
        """Whether the policy could start a job, and waits for no moment that it has asked for."""
        return self.now >= self._awaited_s and any(
            self.fits(job, gpus) for job in self.waiting.values() for gpus in self.sizes(job)[:1]
        )

    def _stuck(self) -> PolicyError:
        first = next(iter(self.waiting.values()))
        who = f"first: {first.spec.name!r}, {first.gpus} GPUs; {self.machines.free} are free"
        return self._misbehaved(f"leaves {len(self.waiting):,} jobs waiting for ever ({who})")

    # What happens to jobs

    def _wait(self, job: Active) -> None:
        self.waiting[job.number] = job
        try:
            self.policy.waits(self, job)
        except ForetrainError:
            raise
        except (Exception, SystemExit) as error:
            raise self._raised(self.policy.waits, error) from error

    def _place(self, job: Active, count: int, pool: Pool | None) -> Allocation:
        allocation = self._places.find(job, count, pool)
        if allocation is None:
            free = self.machines.free if pool is None else pool.free
            raise self._misbehaved(f"starts job {job.spec.name!r} on {count} GPUs, and {free} are free")
        return allocation

    def _joined(self, job: Active) -> None:
        """A job that now holds a part of a GPU slows down whoever is there, and is slowed down."""
        assert job.allocation is not None
        if self._mates is not None and job.allocation.share < FULL:
            for other in self._mates.joins(job):
                self._change_speed(other)
            device = self.machines.pools[job.allocation.pool].device
            job.rate = self._rates.on(job.spec, job.allocation) * self._mates.speed(job, device)

    def _left(self, job: Active) -> None:
        assert job.allocation is not None
        if self._mates is not None and job.allocation.share < FULL:
            for other in self._mates.leaves(job):
                self._change_speed(other)

    def _change_speed(self, job: Active) -> None:
        """Of a job that goes on beside others than before."""
        assert job.allocation is not None
        assert self._mates is not None
        device = self.machines.pools[job.allocation.pool].device
        self._note_checkpoint(job)
        job.done = self.done(job)
        job.ready_s = max(job.ready_s, self.now)
        job.rate = self._rates.on(job.spec, job.allocation) * self._mates.speed(job, device)
        job.version += 1
        self._set_end(job)

    def _run(self, job: Active, allocation: Allocation) -> None:
        job.allocation = allocation
        job.starts += 1
        job.since_s = self.now
        job.ready_s = job.kept_s = self.now + job.overhead_s
        job.kept = job.done
        if job.overhead_s:
            job.overhead_gpu_s += job.overhead_s * allocation.gpus
            job.overhead_s = 0.0
        if job.first_start_s is None:
            job.first_start_s = self.now
        pools = job.pools
        if (
            len(allocation.parts) == 1
            and allocation.gpus == job.gpus
            and len(pools) == 1
            and allocation.pool == pools[0].number
        ):
            job.rate = job.nominal_rate  # as most jobs: on one node, of the only pool that they can use
        else:
            job.rate = self._rates.on(job.spec, allocation)
        if job.rate <= 0:
            device = self.machines.pools[allocation.pool].device
            raise self._misbehaved(f"runs job {job.spec.name!r} on {device}, where it cannot run")
        self.running[job.number] = job
        if self._mates is not None:
            self._joined(job)
        self._set_end(job)

    def _set_end(self, job: Active) -> None:
        """When a job that runs will be done, or fail."""
        assert job.allocation is not None
        left = job.work - job.done
        self._events.push(
            job.ready_s + left / job.rate if left > 0 else job.ready_s, _FINISH, job, job.version
        )
        if self._kills and job.spec.limit_s is not None:
            left_s = max(job.spec.limit_s - job.ran_s, 0.0)
            self._events.push(job.since_s + left_s, _LIMIT, job, job.version)
        if self._jobs_fail:
            gpus = self.machines.gpus_by_device(job.allocation)
            until = self._failures.of_job(job.number, job.starts, gpus)
            if until < math.inf:
                self._events.push(job.since_s + until, Kind.JOB_FAILURE, job, job.version)

    def _stop(self, job: Active, reason: str) -> None:
        """Off its GPUs, with what it did counted."""
        allocation, now = job.allocation, self.now
        assert allocation is not None
        if now > job.ready_s:
            job.done += (now - job.ready_s) * job.rate
        held_s = now - job.since_s
        job.attained_gpu_s += held_s * allocation.gpus
        job.ran_s += held_s
        if job.ready_s > now:
            job.overhead_gpu_s -= (job.ready_s - now) * allocation.gpus
        self._segments.add(job.number, job.since_s, now, reason, allocation)
        if self._mates is not None:
            self._left(job)
        self.machines.give_back(allocation)
        job.allocation = None
        job.version += 1
        del self.running[job.number]

    def _finish(self, job: Active, reason: str) -> None:
        self._stop(job, reason)
        if reason == "finished":
            job.done = job.work
        self._finish_s[job.number] = self.now
        try:
            self.policy.finished(self, job)
        except ForetrainError:
            raise
        except (Exception, SystemExit) as error:
            raise self._raised(self.policy.finished, error) from error

    def _fail(self, job: Active, reason: str) -> None:
        """Back to the last checkpoint, and to the queue."""
        allocation = job.allocation
        assert allocation is not None
        self._note_checkpoint(job)
        lost_s = max(self.now - job.kept_s, 0.0)
        job.failures += 1
        self._stop(job, reason)
        job.done = job.kept
        job.futile = job.futile + 1 if job.done <= job.furthest else 0
        job.furthest = max(job.furthest, job.done)
        if job.futile > _MOST_FUTILE:
            raise InputError(
                f"failures: job {job.spec.name!r} fails {_MOST_FUTILE:,} times in a row before its next "
                "checkpoint; give longer times between failures, or a shorter checkpoint_every"
            )
        job.lost_gpu_s += lost_s * allocation.gpus
        job.overhead_s = self.settings.restart_s
        job.ran_s = 0.0
        self._wait(job)

    def _note_checkpoint(self, job: Active) -> None:
        """Keep what a job had done at its last checkpoint. It works and writes in turns; its speed has not
        changed since this was noted last."""
        turn_s = self.settings.checkpoint_every_s + self._rates.checkpoint_write_s(job.spec)
        since_s = self.now - job.kept_s
        if since_s >= turn_s:
            since_s %= turn_s
            job.kept, job.kept_s = self.done(job) - since_s * job.rate, self.now - since_s

    def _fail_node(self, strike: Strike) -> bool:
        if not self._breakdowns.strikes(strike, self.now):
            return False
        for job in list(self.running.values()):
            if job.allocation and any(part[0] == strike.node for part in job.allocation.parts):
                self._fail(job, "node failed")
        self.machines.take_down(strike.node)
        return True

    # Small things

    def _thrashing(self, job: Active) -> PolicyError:
        costs_s = self.settings.checkpoint_s + self.settings.restart_s
        about = f"a checkpoint and a restart take {format_seconds(costs_s)}"
        often = f"{_MOST_FUTILE:,} times in a row before it is at work again"
        return self._misbehaved(f"takes job {job.spec.name!r} off {often}; {about}, give less")

    def _not_waiting(self, job: Active) -> PolicyError:
        """Why a job cannot be started."""
        self._known(job, "start")
        if job.allocation is not None:
            return self._misbehaved(f"starts job {job.spec.name!r}, which is running already")
        not_there = "which is not waiting (finished, or not yet there)"
        return self._misbehaved(f"starts job {job.spec.name!r}, {not_there}")

    def _known(self, job: object, verb: str) -> None:
        if not isinstance(job, Active) or job.number >= self._count or self.jobs[job.number] is not job:
            raise self._misbehaved(f"wants to {verb} {job!r}, which is no job of this simulation")

    def _misbehaved(self, what: str) -> PolicyError:
        return PolicyError(f"policy {self.policy.name}: {what}")

    def _call(self, hook: Callable[..., None], *arguments: object) -> None:
        try:
            hook(*arguments)
        except ForetrainError:
            raise
        except (Exception, SystemExit) as error:
            raise self._raised(hook, error) from error

    def _raised(self, hook: Callable[..., None], error: BaseException) -> PolicyError:
        """Whatever a policy raised, in a line that names it."""
        return self._misbehaved(f"{hook.__name__} raised {type(error).__name__}: {first_line(error)}")

    def _result(self) -> Result:
        machines, taken_back = self.machines.machines, self._breakdowns.taken_back
        return Result.of(self.policy.name, self.jobs, self._finish_s, self._segments, machines, taken_back)
