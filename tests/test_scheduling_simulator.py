"""Tests the simulator: preemption, failures, shares, elastic jobs, kinds of devices, misbehaving policies."""

import math
from pathlib import Path

import pytest

from foretrain.errors import InputError
from foretrain.forecast import Estimate, Forecast
from foretrain.job import Job
from foretrain.scheduling import (
    Machine,
    Policy,
    PolicyError,
    Settings,
    Simulation,
    TraceJob,
    metrics,
    policies,
)
from foretrain.scheduling.checkpointing import CheckpointedSpeeds
from foretrain.scheduling.clusters import read_machines
from foretrain.scheduling.failures import FailureModel, Outage, read_outages
from foretrain.scheduling.machines import Allocation, DoubleAllocation, Machines
from foretrain.scheduling.metrics import metrics_by_group, utilization_over_time
from foretrain.scheduling.placement import PLACEMENTS, placement
from foretrain.scheduling.simulator import Active
from foretrain.scheduling.speeds import PredictedSpeeds, ThroughputTable, TraceSpeeds

TWO = [Machine(device="v100", gpus=2)] * 2


def job(name: str, arrival: float, duration: float, gpus: int = 1, **more: object) -> TraceJob:
    return TraceJob(name=name, arrival_s=arrival, duration_s=duration, gpus=gpus, **more)  # type: ignore[arg-type]


def test_first_in_first_out_by_hand() -> None:
    jobs = [job("a", 0, 10, 3), job("b", 1, 5, 2), job("c", 2, 1)]
    result = Simulation(jobs, TWO, policies.get("fifo")).run()
    assert result.start_s.tolist() == [0, 10, 10]
    assert result.finish_s.tolist() == [10, 15, 11]
    found = metrics(result)
    assert found.average_jct_s == pytest.approx((10 + 14 + 9) / 3)
    assert found.utilization == pytest.approx((30 + 10 + 1) / (4 * 15))
    times, held = utilization_over_time(result, 15)
    assert held[:3] == pytest.approx([0.75] * 3)
    assert held[10] == pytest.approx(0.75)
    assert len(times) == 15


def test_a_preempted_job_pays_for_its_checkpoint_and_restart() -> None:
    jobs = [job("long", 0, 100), job("short", 10, 5)]
    settings = Settings(checkpoint_s=2.0, restart_s=3.0)
    result = Simulation(jobs, [Machine(device="v100", gpus=1)], policies.get("srtf"), settings=settings).run()
    assert result.finish_s.tolist() == [10 + 5 + 5 + 90, 15]
    assert result.overhead_gpu_s.sum() == 5
    assert [segment.reason for segment in result.segments] == ["preempted", "finished", "finished"]


def test_an_outage_sends_a_job_back_to_its_last_checkpoint() -> None:
    outage = FailureModel(outages=(Outage(time_s=25.0, node=0, repair_s=15.0),))
    settings = Settings(checkpoint_every_s=10.0, restart_s=1.0, failures=outage)
    result = Simulation(
        [job("a", 0, 40)], [Machine(device="v100", gpus=1)], policies.get("fifo"), settings=settings
    ).run()
    assert result.lost_gpu_s.sum() == 5
    assert result.finish_s[0] == 25 + 15 + 1 + 20
    assert [segment.reason for segment in result.segments] == ["node failed", "finished"]


def test_failures_do_not_depend_on_the_policy() -> None:
    model = FailureModel(job_mtbf_gpu_s=100.0)
    first, again, other = (model.starts(seed).of_job(7, 1, {"v100": 2}) for seed in (3, 3, 4))
    assert first == again != other
    assert math.isinf(FailureModel().starts(0).of_node(0, Machine(device="v100", gpus=1)))


def test_devices_and_nodes_that_fail_more_often_are_told_apart() -> None:
    model = FailureModel(job_mtbf_gpu_s=1e4, job_mtbf_of={"k80": 1e2}, node_mtbf_s=1e6)
    draws = model.starts(0)
    on_one, on_other, on_both = (
        draws.of_job(0, 1, gpus) for gpus in ({"v100": 1}, {"k80": 1}, {"v100": 1, "k80": 1})
    )
    assert on_other == pytest.approx(on_one / 100)
    assert on_both == pytest.approx(1 / (1 / on_one + 1 / on_other)), "rates add up over a mixed gang"
    good, bad = Machine(device="v100", gpus=1), Machine(device="v100", gpus=1, mtbf_s=1e3)
    assert model.starts(0).of_node(0, bad) == pytest.approx(model.starts(0).of_node(0, good) / 1000)
    machines = [Machine(device="v100", gpus=1, mtbf_s=200.0), Machine(device="v100", gpus=1)]
    jobs = [job(name, 0, 20_000) for name in "ab"]
    around = Settings(failures=FailureModel(repair_s=10.0), checkpoint_every_s=50.0)
    result = Simulation(jobs, machines, policies.get("fifo"), settings=around).run()
    failed = {each.allocation.parts[0][0] for each in result.segments if each.reason == "node failed"}
    assert failed == {0}


def test_outages_are_read_and_checked(tmp_path: Path) -> None:
    path = tmp_path / "outages.csv"
    path.write_text("time_s,node,repair_s\n5,1,10\n")
    assert read_outages(path) == [Outage(time_s=5.0, node=1, repair_s=10.0)]
    path.write_text("time_s,node,repair_s\n5,x,10\n")
    with pytest.raises(InputError, match=r"outages\.csv:2"):
        read_outages(path)


def test_jobs_share_a_gpu_only_when_they_may() -> None:
    jobs = [job(name, 0, 10, share=0.4) for name in "abc"]
    one = [Machine(device="v100", gpus=1)]
    apart = Simulation(jobs, one, policies.get("fifo")).run()
    together = Simulation(jobs, one, policies.get("fifo"), settings=Settings(sharing=True)).run()
    assert apart.finish_s.tolist() == [10, 20, 30]
    assert together.finish_s.tolist() == [10, 10, 20]
    assert metrics(together).utilization == pytest.approx(0.6)


def test_elastic_jobs_grow_and_shrink() -> None:
    jobs = [job("a", 0, 5000, 2, least_gpus=1, most_gpus=4), job("b", 400, 500, 2, least_gpus=1, most_gpus=4)]
    result = Simulation(jobs, TWO, policies.get("pollux"), speeds=TraceSpeeds(parallel=1.0)).run()
    sizes = [segment.allocation.gpus for segment in result.segments if segment.job == 0]
    assert max(sizes) == 4
    assert min(sizes) < 4
    assert result.finish_s[0] < 5000


def test_a_gang_stays_on_one_kind_of_device_and_takes_the_fastest() -> None:
    machines = read_machines("k80=2,v100=2")
    table = ThroughputTable(
        {("k80", "net", 1): 1.0, ("v100", "net", 1): 4.0, ("k80", "net", 2): 2.0, ("v100", "net", 2): 8.0}
    )
    jobs = [TraceJob(name=name, arrival_s=0, steps=80, gpus=2, kind="net") for name in "ab"]
    result = Simulation(jobs, machines, policies.get("fifo"), speeds=table).run()
    assert result.finish_s.tolist() == [10, 40]
    with pytest.raises(InputError, match="needs 3 GPUs of one kind and the cluster has 2"):
        Simulation([job("wide", 0, 1, 3)], machines, policies.get("fifo"))


@pytest.mark.parametrize("policy", policies.names())
def test_every_policy_ends_on_devices_of_different_speed(policy: str) -> None:
    table = ThroughputTable(
        {
            (device, "net", gpus): rate * gpus
            for device, rate in (("k80", 1.0), ("v100", 9.0))
            for gpus in (1, 2)
        }
    )
    jobs = [
        TraceJob(name=str(n), arrival_s=5.0 * n, steps=100 + 37 * (n % 5), gpus=1 + n % 2, kind="net")
        for n in range(30)
    ]
    result = Simulation(jobs, read_machines("k80=2,v100=2"), policies.get(policy), speeds=table).run()
    assert (result.finish_s > result.arrival_s).all()


def test_placements_choose_as_they_say() -> None:
    machines = Machines(read_machines("4x4xv100", rack=2))
    machines.take(Allocation(0, ((0, 0b11),), 2))
    pool = machines.pools[0]
    chosen = {name: PLACEMENTS[name]().choose(machines, pool, 2) for name in PLACEMENTS}
    assert chosen["packed"] == [(0, 2)]
    assert chosen["spread"] == [(1, 1), (2, 1)]
    assert placement("topology").choose(machines, pool, 6) in ([(1, 4), (0, 2)], [(0, 2), (1, 4)])
    assert all(sum(count for _, count in counts) == 2 for counts in chosen.values())
    assert all(sum(c for _, c in placement(name).choose(machines, pool, 14)) == 14 for name in PLACEMENTS)
    with pytest.raises(InputError, match="did you mean packed"):
        placement("pakced")
    with pytest.raises(DoubleAllocation, match="GPU 0 of node 0"):
        machines.take(Allocation(0, ((0, 0b01),), 1))


class SlowerAcrossNodes:
    """A stand-in for a predictor: a step takes 1 s, and 0.5 s more over a network."""

    name = "made-up"

    def predict(self, job: Job) -> Forecast:
        step_s = 1.0 + 0.5 * (job.cluster.nodes > 1)
        return Forecast(
            job=job,
            predictor=self.name,
            quantities={"step_time_s": Estimate(median=step_s, low=step_s, high=step_s)},
        )


def test_a_predictor_makes_placements_over_two_nodes_slower() -> None:
    template = Job.read(
        {
            "model": {"source": "torchvision", "name": "resnet18"},
            "training": {"global_batch": 32, "image": 224},
            "cluster": {"device": "v100-sxm-16gb", "devices_per_node": 2},
        }
    )
    speeds = PredictedSpeeds(SlowerAcrossNodes(), {"resnet18": template})  # type: ignore[arg-type]
    machines = read_machines("2x2xv100-sxm-16gb")
    jobs = [TraceJob(name="a", arrival_s=0, steps=100, gpus=2, kind="resnet18"), job("other", 0, 70.0)]
    ends = {
        name: Simulation(jobs, machines, policies.get("fifo"), speeds=speeds, placement=placement(name))
        .run()
        .finish_s.tolist()
        for name in ("packed", "spread")
    }
    assert ends == {"packed": [100, 70], "spread": [150, 70]}


def test_figures_of_each_virtual_cluster() -> None:
    jobs = [job("a", 0, 10, group="x"), job("b", 0, 30, group="y"), job("c", 0, 20, group="x")]
    groups = metrics_by_group(Simulation(jobs, TWO, policies.get("fifo")).run())
    assert {name: each.average_jct_s for name, each in groups.items()} == {"x": 15, "y": 30}


class Misbehaving(Policy):
    name = "mine"

    def __init__(self, act: str) -> None:
        self._act = act

    def decide(self, cluster: Simulation) -> None:
        waiting = next(iter(cluster.waiting.values()), None)
        if waiting is not None:
            getattr(self, self._act)(cluster, waiting)

    def nothing(self, cluster: Simulation, job: Active) -> None:
        pass

    def twice(self, cluster: Simulation, job: Active) -> None:
        cluster.start(job)
        cluster.start(job)

    def same_gpu(self, cluster: Simulation, job: Active) -> None:
        for each in list(cluster.waiting.values()):
            cluster.start(each, on=Allocation(0, ((0, 1),), 1))

    def unknown(self, cluster: Simulation, job: Active) -> None:
        cluster.start(Active(7, job.spec, 1.0, 1.0, 1.0))

    def stop_waiting(self, cluster: Simulation, job: Active) -> None:
        cluster.preempt(job)

    def too_many(self, cluster: Simulation, job: Active) -> None:
        cluster.start(job, gpus=3)

    def crash(self, cluster: Simulation, job: Active) -> None:
        raise ZeroDivisionError("by nought")

    def circles(self, cluster: Simulation, job: Active) -> None:
        while True:
            cluster.start(job)
            cluster.preempt(job)


@pytest.mark.parametrize(
    ("act", "told"),
    [
        ("nothing", "leaves 2 jobs waiting for ever .first: 'a'"),
        ("twice", "starts job 'a', which is running already"),
        ("same_gpu", "gives job 'b' GPUs that it cannot have: GPU 0 of node 0 is not free"),
        ("unknown", "wants to start Active.'a'., which is no job of this simulation"),
        ("stop_waiting", "preempts job 'a', which is not running"),
        ("too_many", "gives job 'a' 3 GPUs; it takes 1 to 1"),
        ("crash", "decide raised ZeroDivisionError: by nought"),
        ("circles", "comes to no end"),
    ],
)
def test_a_policy_that_misbehaves_is_stopped_by_name(act: str, told: str) -> None:
    with pytest.raises(PolicyError, match=f"^policy mine: .*{told}"):
        Simulation([job("a", 0, 1), job("b", 0, 1)], TWO, Misbehaving(act)).run()


def test_policies_come_by_name_or_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "my.py"
    path.write_text(
        "from foretrain.scheduling.policies.fifo import Fifo\nclass Mine(Fifo):\n    pass\nclass Other:\n"
        "    pass\n"
    )
    assert policies.get(f"{path}:Mine").name == f"{path}:Mine"
    assert policies.get("fifo").name == "fifo"
    with pytest.raises(InputError, match="Other is not a"):
        policies.get(f"{path}:Other")
    with pytest.raises(InputError, match="did you mean srtf"):
        policies.get("srft")


@pytest.mark.parametrize("policy", policies.names())
def test_jobs_stay_off_devices_that_they_cannot_run_on(policy: str) -> None:
    table = ThroughputTable(
        {
            ("k80", "small", 2): 1.0,
            ("v100", "small", 2): 3.0,
            ("v100", "large", 2): 2.0,
            ("k80", "large", 2): 0.0,
        }
    )
    jobs = [
        TraceJob(name=str(n), arrival_s=3.0 * n, steps=40 + n % 7, gpus=2, kind=("small", "large")[n % 2])
        for n in range(24)
    ]
    result = Simulation(jobs, read_machines("2x2xk80,1x2xv100"), policies.get(policy), speeds=table).run()
    for segment in result.segments:
        node = segment.allocation.parts[0][0]
        assert node == 2 or jobs[segment.job].kind == "small"


@pytest.mark.parametrize("repairs_s", [(50.0, 5000.0), (5010.0, 20.0)])
def test_a_node_that_is_struck_while_it_is_away_comes_back_when_both_are_over(
    repairs_s: tuple[float, float],
) -> None:
    first, second = (
        Outage(time_s=time_s, node=0, repair_s=repair_s)
        for time_s, repair_s in zip((10.0, 20.0), repairs_s, strict=True)
    )
    failures = FailureModel(outages=(first, second))
    machines = [Machine(device="v100", gpus=8)]
    result = Simulation(
        [job("a", 0, 1000, 8)], machines, policies.get("fifo"), settings=Settings(failures=failures)
    ).run()
    assert [(each.start_s, each.end_s) for each in result.segments] == [(0, 10), (5020, 6020)]


def test_a_node_that_is_taken_away_while_a_failure_is_repaired_stays_away() -> None:
    model = FailureModel(node_mtbf_s=1e4, repair_s=1e3)
    draws = model.starts(0)
    fails_s, repair_s = draws.of_node(0, Machine(device="v100", gpus=1)), draws.repair_of(0)
    away = Outage(time_s=fails_s + repair_s / 2, node=0, repair_s=1e6)
    around = Settings(failures=FailureModel(node_mtbf_s=1e4, repair_s=1e3, outages=(away,)))
    jobs = [job("a", 0, fails_s + 10)]
    result = Simulation(jobs, [Machine(device="v100", gpus=1)], policies.get("fifo"), settings=around).run()
    assert [each.start_s for each in result.segments][:2] == [0, away.time_s + 1e6]


def test_a_checkpoint_that_is_not_written_to_its_end_keeps_nothing() -> None:
    """Of 40 s a job of eight GPUs works for 30 and writes for 10: after 39 s all is lost, after 85 s five."""
    machines = [Machine(device="v100", gpus=8)]
    speeds = CheckpointedSpeeds(TraceSpeeds(), 30.0, 10.0)
    for time_s, lost_s in ((39.0, 39.0), (85.0, 5.0)):
        outage = FailureModel(outages=(Outage(time_s=time_s, node=0, repair_s=1.0),))
        around = Settings(checkpoint_every_s=30.0, failures=outage)
        jobs = [job("a", 0, 100, 8)]
        result = Simulation(jobs, machines, policies.get("fifo"), speeds=speeds, settings=around).run()
        assert result.lost_gpu_s.sum() == pytest.approx(8 * lost_s)
        assert result.finish_s[0] == pytest.approx(1 + lost_s + 100 * 40 / 30)
