"""Traces of every format are read, what is malformed is counted, and the generator repeats itself."""

import gzip
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretrain.errors import InputError
from foretrain.scheduling import TraceJob
from foretrain.scheduling.clusters import read_machines
from foretrain.scheduling.estimates import LogNormal, ResidualEstimates
from foretrain.scheduling.traces import read_trace, write_trace
from foretrain.scheduling.workload import TraceGenerator

SAMPLES = {
    "philly": "timestamp,duration,num_gpus,gpu_time,cluster\n2017-10-09 07:01:55,66.0,2,66.0,vc\n",
    "helios": "job_id,user,vc,jobname,gpu_num,cpu_num,node_num,state,"
    "submit_time,start_time,end_time,duration,queue\n"
    "7,u,vc,train,2,8,1,COMPLETED,2020-04-01 00:00:03,2020-04-01 00:00:05,2020-04-01 00:01:11,66,2\n",
    "alibaba-2020": "j1,worker,2.0,Terminated,100.0,166.0,600.0,30.0,100.0,V100\n",
    "alibaba-2023": "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,qos,pod_phase,"
    "creation_time,deletion_time,scheduled_time\n"
    "p,1,1,2,1000,,LS,Running,10,80,14\n",
    "alibaba-2025": "instance_sn,role,app_name,gpu_request,creation_time,scheduled_time,deletion_time\n"
    "i,HN,app,2,10,14,80\n",
    "pollux": "time,name,application,num_replicas,batch_size,duration\n5,j,bert,2,32,66\n",
    "tiresias": "job_id,num_gpu,submit_time,iterations,model_name,duration,interval\n1,2,0,10,vgg16,66,0\n",
    "swf": "; a comment\n1 0 5 66 2 -1 -1 2 99 -1 1 1 1 1 3 -1 -1 -1\n",
    "own": "name,arrival_s,duration_s,gpus\na,3,66,2\n",
}


@pytest.mark.parametrize("format", SAMPLES)
def test_each_format_is_known_by_its_look(format: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.csv.gz"
    path.write_bytes(gzip.compress(SAMPLES[format].encode()))
    trace = read_trace(path)
    assert trace.format == format
    (job,) = trace.jobs
    assert (job.arrival_s, job.duration_s, job.gpus) == (0.0, 66.0, 2)
    assert not trace.malformed.total


def test_gavel_in_both_forms(tmp_path: Path) -> None:
    path = tmp_path / "gavel.trace"
    path.write_text(
        "LM\tpython3 x\tdir\t--steps\t1\t100\t2\t1\t-1.0\t30\nLM\tpython3 x\t--steps\t1\t100\t40.0\t4\n"
        "LM\tbroken\n"
    )
    trace = read_trace(path)
    assert [(job.steps, job.gpus, job.arrival_s) for job in trace.jobs] == [(100, 2, 30), (100, 4, 40)]
    assert trace.malformed.lines() == ["1 line left out: neither seven nor ten fields (first in line 3)"]


def test_malformed_lines_are_counted_by_reason(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("name,arrival_s,duration_s,gpus\na,0,5,1\nb,x,5,1\nc,0,-5,1\nd,0,5\ne,0,5,0.5\nf,1,,1\n")
    trace = read_trace(path)
    assert [job.name for job in trace.jobs] == ["a"]
    assert trace.malformed.counts == {
        "arrival_s is not a number": 1,
        "duration_s is not above zero": 1,
        "another number of cells than the heading": 1,
        "gpus is not a whole number of at least 1": 1,
        "neither duration_s nor steps": 1,
    }
    path.write_text("name,arrival_s,duration_s,gpus\nb,x,5,1\n")
    with pytest.raises(InputError, match="holds no jobs in the format own"):
        read_trace(path)
    path.write_text("sn,cpu_milli,memory_mib,gpu,model\nnode-0,1,1,2,P100\n")
    with pytest.raises(InputError, match="a list of nodes; --cluster takes it, not a trace of jobs"):
        read_trace(path)
    assert [(machine.device, machine.gpus) for machine in read_machines(str(path))] == [("p100", 2)]
    path.write_text("what,is,this\n")
    with pytest.raises(InputError, match="not a trace of a known format"):
        read_trace(path)


@given(st.integers(0, 5))
def test_generated_jobs_repeat_and_survive_a_round_trip(
    tmp_path_factory: pytest.TempPathFactory, seed: int
) -> None:
    trace = TraceGenerator(jobs=20, elastic=0.5, seed=seed).trace()
    assert trace == TraceGenerator(jobs=20, elastic=0.5, seed=seed).trace()
    path = tmp_path_factory.mktemp("traces") / "own.csv"
    write_trace(path, trace.jobs)
    assert read_trace(path).jobs == trace.jobs


def test_a_job_checks_itself() -> None:
    with pytest.raises(InputError, match="gpus: 0 is not a whole number"):
        TraceJob(name="a", arrival_s=0, duration_s=1, gpus=0)
    with pytest.raises(InputError, match="duration_s: missing"):
        TraceJob(name="a", arrival_s=0, gpus=1)
    with pytest.raises(InputError, match=r"generate\.jobs: 'x' is not a number"):
        TraceGenerator.read("jobs=x")


def test_estimates_have_the_error_they_are_asked_for(tmp_path: Path) -> None:
    job = TraceJob(name="a", arrival_s=0, duration_s=1, gpus=1)
    errors = [abs(LogNormal(0.2, seed=1).factor(job, number) - 1) for number in range(4000)]
    assert sum(errors) / len(errors) == pytest.approx(0.2, abs=0.02)
    path = tmp_path / "evaluation.json"
    rows = [
        {"predictor": "a", "quantity": "step_time_s", "predicted": 1.1, "measured": 1.0},
        {"predictor": "a", "quantity": "total_time_s", "predicted": 7.0, "measured": 1.0},
        {"predictor": "b", "quantity": "total_time_s", "predicted": 0.6, "measured": 2.0},
        {"predictor": "b", "quantity": "kernels", "predicted": 9, "measured": 1},
    ]
    path.write_text(json.dumps({"runs": rows}))
    found = ResidualEstimates.load(path)
    assert {name: each.factor(job, 3) for name, each in found.items()} == pytest.approx({"a": 1.1, "b": 0.3})
    assert found["b"].mape == pytest.approx(0.7)
    path.write_text("{}")
    with pytest.raises(InputError, match="not a result of foretrain evaluate"):
        ResidualEstimates.load(path)
