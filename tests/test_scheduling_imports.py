"""Logs of clusters that people run: Slurm's accounting, Kubernetes and Kueue, SWF with limits."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from foretrain.errors import InputError
from foretrain.scheduling.answers.queue_now import queue_now
from foretrain.scheduling.clusters import read_machines
from foretrain.scheduling.machines import device_named
from foretrain.scheduling.traces import read_trace, write_trace

SACCT = """\
JobID|JobName|User|Account|Partition|Submit|Start|End|State|Timelimit|ElapsedRaw|AllocTRES
101|bert|ann|nlp|gpu|2026-01-05T10:00:00|2026-01-05T10:05:00|2026-01-05T11:05:00|COMPLETED|02:00:00|3600|billing=8,cpu=8,gres/gpu:a100=4,gres/gpu=4,mem=64G,node=1
101.batch|batch||nlp||2026-01-05T10:05:00|2026-01-05T10:05:00|2026-01-05T11:05:00|COMPLETED||3600|cpu=8,mem=64G,node=1
101.extern|extern||nlp||2026-01-05T10:05:00|2026-01-05T10:05:00|2026-01-05T11:05:00|COMPLETED||3600|billing=8
101.0|python||nlp||2026-01-05T10:05:00|2026-01-05T10:05:00|2026-01-05T11:05:00|COMPLETED||3600|cpu=8,gres/gpu=4
102_1|sweep|bob|cv|gpu,long|2026-01-05T10:01:00|2026-01-05T10:10:00|2026-01-05T10:40:00|TIMEOUT|00:30:00|1800|cpu=4,gres/gpu=1
102_2|sweep|bob|cv|gpu|2026-01-05T10:01:00|2026-01-05T10:10:00|2026-01-05T10:20:00|CANCELLED by 1001|1-00:00:00|600|cpu=4,gres/gpu=1
102_[3-9]|sweep|bob|cv|gpu|2026-01-05T10:01:00|Unknown|Unknown|PENDING|1-00:00:00|0|
103|gan|cyd|cv|gpu|2026-01-05T10:02:00|2026-01-05T10:03:00|2026-01-05T10:33:00|PREEMPTED|UNLIMITED|1800|gres/gpu:v100=2
103|gan|cyd|cv|gpu|2026-01-05T10:33:00|2026-01-05T10:40:00|2026-01-05T11:40:00|COMPLETED|UNLIMITED|3600|gres/gpu:v100=2
104|cpu|dan|etl|cpu|2026-01-05T10:03:00|2026-01-05T10:04:00|2026-01-05T10:05:00|COMPLETED|01:00:00|60|cpu=1
105|late|dan|etl|gpu|2026-01-05T10:04:00|None|2026-01-05T10:05:00|CANCELLED by 7|01:00:00|0|gres/gpu=1
"""


def _file(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_slurms_accounting_gives_jobs_with_limits_users_accounts_and_partitions(tmp_path: Path) -> None:
    trace = read_trace(_file(tmp_path, "jobs.txt", SACCT))
    assert trace.format == "sacct"
    jobs = {job.name: job for job in trace.jobs}
    assert sorted(jobs) == ["101", "102_1", "102_2", "103"]
    assert (jobs["101"].gpus, jobs["101"].device, jobs["101"].duration_s) == (4, "a100", 3600.0)
    assert (jobs["101"].user, jobs["101"].group, jobs["101"].partition) == ("ann", "nlp", "gpu")
    assert (jobs["101"].limit_s, jobs["102_2"].limit_s, jobs["103"].limit_s) == (7200.0, 86400.0, None)
    assert jobs["102_1"].partition == "gpu"


def test_a_job_that_was_queued_again_keeps_its_first_submission_and_its_last_run(tmp_path: Path) -> None:
    trace = read_trace(_file(tmp_path, "jobs.txt", SACCT))
    again = next(job for job in trace.jobs if job.name == "103")
    assert (again.arrival_s, again.duration_s, again.device) == (120.0, 3600.0, "v100")
    assert trace.malformed.counts == {
        "an earlier try of a job that was queued again": 1,
        "pending: how long it takes is not known yet": 1,
        "a job without GPUs": 1,
        "a job that never ran": 1,
    }


def test_older_and_other_fields_of_sacct_are_read_too(tmp_path: Path) -> None:
    text = (
        "JobID|Submit|State|Elapsed|AllocGRES|TimelimitRaw|\n"
        "1|2026-01-05T10:00:00|COMPLETED|1-00:00:30|gpu:4|1440|\n"
        "2|2026-01-05T10:00:00|COMPLETED|nonsense|gpu:v100:2|60|\n"
        "3|2026-01-05T10:00:00|COMPLETED|\n"
    )
    trace = read_trace(_file(tmp_path, "old.txt", text))
    assert [(job.name, job.gpus, job.duration_s, job.limit_s) for job in trace.jobs] == [
        ("1", 4, 86430.0, 86400.0)
    ]
    assert trace.malformed.counts == {
        "Elapsed is not a time": 1,
        "another number of cells than the heading": 1,
    }


def _pod(name: str, gpus: dict[str, str], **more: Any) -> dict[str, Any]:
    ended = {"terminated": {"startedAt": "2026-01-05T10:01:00Z", "finishedAt": "2026-01-05T10:31:00Z"}}
    return {
        "kind": "Pod",
        "metadata": {"name": name, "namespace": "team", "creationTimestamp": "2026-01-05T10:00:00Z", **more},
        "spec": {"containers": [{"resources": {"requests": gpus}}]},
        "status": {"startTime": "2026-01-05T10:01:00Z", "containerStatuses": [{"state": ended}]},
    }


def _kueue() -> dict[str, Any]:
    template = {"spec": {"priority": 5, "containers": [{"resources": {"limits": {"nvidia.com/gpu": "8"}}}]}}
    job = {
        "kind": "Job",
        "metadata": {
            "name": "train",
            "namespace": "team",
            "uid": "j1",
            "creationTimestamp": "2026-01-05T10:00:00Z",
        },
        "spec": {"parallelism": 2, "template": template},
        "status": {"startTime": "2026-01-05T10:10:00Z", "completionTime": "2026-01-05T12:10:00Z"},
    }
    workload = {
        "kind": "Workload",
        "metadata": {
            "name": "job-train", "namespace": "team", "uid": "w1", "creationTimestamp": "2026-01-05T10:00:00Z",
            "ownerReferences": [{"kind": "Job", "uid": "j1"}],
        },
        "spec": {"queueName": "lab", "priority": 100, "maximumExecutionTimeSeconds": 10800,
                 "podSets": [{"count": 2, "template": template}]},
        "status": {
            "admission": {"clusterQueue": "research"},
            "conditions": [
                {"type": "Admitted", "status": "True", "lastTransitionTime": "2026-01-05T10:10:00Z"},
                {"type": "Finished", "status": "True", "lastTransitionTime": "2026-01-05T12:10:00Z"},
            ],
        },
    }  # fmt: skip
    of_job = _pod("train-0", {"nvidia.com/gpu": "8"}, ownerReferences=[{"kind": "Job", "uid": "j1"}])
    sliced = _pod("notebook", {"nvidia.com/mig-2g.20gb": "1"})
    without = _pod("web", {"cpu": "1"})
    return {
        "kind": "List",
        "items": [workload, job, of_job, sliced, without, {"kind": "Service", "metadata": {}}],
    }


def test_a_workload_stands_for_its_job_and_its_pods(tmp_path: Path) -> None:
    trace = read_trace(_file(tmp_path, "cluster.json", json.dumps(_kueue())))
    assert trace.format == "kubernetes"
    jobs = {job.name: job for job in trace.jobs}
    assert sorted(jobs) == ["team/job-train", "team/notebook"]
    train, notebook = jobs["team/job-train"], jobs["team/notebook"]
    assert (train.gpus, train.duration_s, train.limit_s, train.priority) == (16, 7200.0, 10800.0, 100.0)
    assert (train.group, train.user) == ("research", "team")
    assert (notebook.gpus, notebook.share, notebook.duration_s) == (1, 2 / 7, 1800.0)
    assert trace.malformed.counts == {"without GPUs": 1, "a Service, which is no job": 1}


def test_jobs_without_kueue_stand_for_themselves(tmp_path: Path) -> None:
    only_jobs = {"kind": "List", "items": _kueue()["items"][1:3]}
    (job,) = read_trace(_file(tmp_path, "jobs.json", json.dumps(only_jobs, indent=1))).jobs
    assert (job.name, job.gpus, job.duration_s, job.priority) == ("team/train", 16, 7200.0, 5.0)


def test_what_has_not_ended_is_counted_and_other_json_is_refused(tmp_path: Path) -> None:
    document = _kueue()
    del document["items"][0]["status"]["conditions"][1]
    trace = read_trace(_file(tmp_path, "cluster.json", json.dumps(document)))
    assert trace.malformed.counts["a Workload that has not started or not ended"] == 1
    with pytest.raises(InputError, match="holds none of Workload, Job, Pod"):
        read_trace(_file(tmp_path, "other.json", '{"items": [{"kind": "Node"}]}'))
    with pytest.raises(InputError, match="table of throughputs"):
        read_trace(_file(tmp_path, "other.json", '{"v100": {}}'))


def test_requested_times_of_swf_are_limits_and_survive_our_own_format(tmp_path: Path) -> None:
    line = "7 60 5 300 4 -1 -1 4 600 -1 1 12 3 -1 2 -1 -1 -1"
    trace = read_trace(_file(tmp_path, "log.swf", f"; comment\n{line}\n"))
    (job,) = trace.jobs
    assert (job.limit_s, job.user, job.group) == (600.0, "user 12", "queue 2")
    write_trace(tmp_path / "own.csv", trace.jobs)
    assert read_trace(tmp_path / "own.csv").jobs == trace.jobs


QUEUE = """\
JobID|User|Account|Submit|Start|End|State|Timelimit|ElapsedRaw|AllocTRES|ReqTRES
1|ann|nlp|2026-01-05T08:00:00|2026-01-05T08:00:00|2026-01-05T08:30:00|COMPLETED|01:00:00|1800|gres/gpu=4|gres/gpu=4
2|ann|nlp|2026-01-05T08:00:00|2026-01-05T08:00:00|2026-01-05T08:45:00|COMPLETED|01:00:00|2700|gres/gpu=4|gres/gpu=4
3|bob|nlp|2026-01-05T09:00:00|2026-01-05T09:00:00|Unknown|RUNNING|02:00:00|3600|gres/gpu=4|gres/gpu=4
4|ann|nlp|2026-01-05T09:30:00|Unknown|Unknown|PENDING|01:00:00|0||gres/gpu=4
5_[1-2]|ann|nlp|2026-01-05T09:40:00|Unknown|Unknown|PENDING|01:00:00|0||gres/gpu=2
"""


@pytest.mark.parametrize(
    ("format", "text", "message"),
    [
        ("sacct", "a,b\n1,2\n", "not the text of sacct --parsable2 with JobID, Submit, State (has no JobID)"),
        ("tiresias", "duration,num_gpu\n1,2\n", "has no column job_id, which the format tiresias needs"),
        ("philly", "timestamp,duration,num_gpus\n0,2,1\n", "has no column cluster, which the format philly"),
        ("kubernetes", "a,b\n", "not the JSON of kubectl get -o json"),
        ("kubernetes", '{"items": ' + "[" * 100_000, "not the JSON of kubectl get -o json (it is nested too"),
        ("kubernetes", '{"items": 3}', "not the JSON of kubectl get -o json"),
        ("kubernetes", '{"items": [3, null]}', "holds none of Workload, Job, Pod"),
        ("own", f"name,arrival_s,gpus,duration_s\n{'x' * 200_000},0,1,1\n", "field larger than field limit"),
    ],
)
def test_a_file_of_another_format_than_named_is_one_line(
    tmp_path: Path, format: str, text: str, message: str
) -> None:
    path = tmp_path / "log"
    path.write_text(text)
    with pytest.raises(InputError) as refused:
        read_trace(path, format)
    assert str(refused.value).startswith(f"{path}: {message}")


def test_a_broken_gzip_file_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv.gz"
    whole = gzip.compress(b"name,arrival_s,gpus,duration_s\na,0,1,3\n" * 300)
    path.write_bytes(whole[:20] + b"\x00\xff\xff\x13" + whole[24:])
    with pytest.raises(InputError, match="cannot be read"):
        read_trace(path)


def test_times_that_are_no_times_are_no_jobs(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("name,arrival_s,gpus,duration_s\na,1e300,1,5\nb,0,1,1e300\nc,0,1,5\n")
    trace = read_trace(path)
    assert [job.name for job in trace.jobs] == ["c"]
    assert set(trace.malformed.counts) == {"arrival_s is not valid", "duration_s is not valid"}


def test_the_queue_as_it_stands_has_what_runs_and_what_waits_as_long_as_history_tells(tmp_path: Path) -> None:
    found = queue_now(_file(tmp_path, "queue.txt", QUEUE))
    assert found is not None
    assert (found.running, found.waiting, found.history) == (1, 3, 2)
    jobs = {job.name: job for job in found.trace.jobs}
    # of limits, 0.5 and 0.75 were used: a job of 2 h that has run for 1 h is one of the longer
    assert jobs["3"].duration_s == pytest.approx(0.75 * 7200 - 3600)
    assert jobs["3"].limit_s == 3600.0
    assert jobs["4"].duration_s == pytest.approx(0.625 * 3600)
    assert [job.name for job in sorted(found.trace.jobs, key=lambda job: job.arrival_s)] == [
        "3",
        "4",
        "5_1",
        "5_2",
    ]
    assert queue_now(_file(tmp_path, "log.swf", "7 60 5 300 4 -1 -1 4 600 -1 1 12 3 -1 2 -1 -1 -1\n")) is None


def test_kueue_queue_as_it_stands(tmp_path: Path) -> None:
    document = _kueue()
    del document["items"][0]["status"]["conditions"][1]
    found = queue_now(_file(tmp_path, "cluster.json", json.dumps(document)))
    assert found is not None
    assert (found.running, found.waiting) == (1, 0)
    (job,) = found.trace.jobs
    assert job.gpus == 16


@pytest.mark.parametrize(("key", "waits"), [("metadata", False), ("spec", False), ("status", True)])
def test_an_item_of_kubernetes_without_a_table_is_counted_and_the_others_are_read(
    tmp_path: Path, key: str, waits: bool
) -> None:
    pods = [_pod(name, {"nvidia.com/gpu": "1"}) for name in ("good", "bad")]
    pods[1][key] = None
    trace = read_trace(_file(tmp_path, "pods.json", json.dumps({"items": pods})))
    assert [job.name for job in trace.jobs] == ["team/good"]
    assert trace.malformed.total == 1
    found = queue_now(_file(tmp_path, "pods.json", json.dumps({"items": pods})))
    assert (found is not None and found.waiting == 1) is waits


def test_labels_owners_and_selectors_that_are_null_are_none(tmp_path: Path) -> None:
    job = _kueue()["items"][1]
    job["metadata"] |= {"labels": None, "ownerReferences": None}
    job["spec"]["template"]["spec"]["nodeSelector"] = None
    trace = read_trace(_file(tmp_path, "jobs.json", json.dumps({"items": [job]})))
    assert [(each.name, each.gpus, each.group) for each in trace.jobs] == [("team/train", 16, "team")]
    assert trace.malformed.total == 0


def _swf(**cells: str) -> str:
    places = {"number": 0, "run": 3, "held": 4, "asked": 7, "limit": 8}
    line = "7 60 5 300 4 -1 -1 4 600 -1 1 12 3 -1 2 -1 -1 -1".split()
    for name, cell in cells.items():
        line[places[name]] = cell
    return " ".join(line)


@pytest.mark.parametrize(
    ("cells", "why"),
    [
        ({"run": "nan"}, "a field is not a number"),
        ({"limit": "inf"}, "a field is not a number"),
        ({"held": "nan"}, "a field is not a number"),
        ({"held": "inf"}, "a field is not a number"),
        ({"number": "nan"}, "a field is not a number"),
        ({"held": "1.9"}, "no whole number of processors"),
        ({"run": "1e11"}, "duration_s is not valid"),
    ],
)
def test_a_line_of_swf_that_is_no_job_is_counted(tmp_path: Path, cells: dict[str, str], why: str) -> None:
    trace = read_trace(_file(tmp_path, "log.swf", f"{_swf(number='8')}\n{_swf(**cells)}\n"))
    assert [job.name for job in trace.jobs] == ["8"]
    assert trace.malformed.counts == {why: 1}


@pytest.mark.parametrize("gpus", ["inf", "nan", "1.9"])
def test_a_line_of_gavel_without_a_whole_number_of_devices_is_counted(tmp_path: Path, gpus: str) -> None:
    cells = ["net", "run", "/", "--steps", "1", "100", "{}", "1", "-1", "0"]
    lines = ["\t".join([*cells[:6], each, *cells[7:]]) for each in ("2", gpus)]
    trace = read_trace(_file(tmp_path, "gavel.trace", "\n".join(lines)))
    assert [job.gpus for job in trace.jobs] == [2]
    assert trace.malformed.total == 1


def test_every_task_of_an_array_with_a_step_waits(tmp_path: Path) -> None:
    text = QUEUE.replace("5_[1-2]", "5_[1-7:3]")
    found = queue_now(_file(tmp_path, "queue.txt", text))
    assert found is not None
    assert [job.name for job in found.trace.jobs] == ["3", "4", "5_1", "5_4", "5_7"]
    for odd in ("5_[1-]", "5_[,]", "5_[1-3:0]"):
        as_one = queue_now(_file(tmp_path, "queue.txt", QUEUE.replace("5_[1-2]", odd)))
        assert as_one is not None
        assert [job.name for job in as_one.trace.jobs] == ["3", "4", odd]


def test_blanks_after_the_commas_of_a_heading_count_for_nothing(tmp_path: Path) -> None:
    text = "name, arrival_s, gpus, duration_s, group\na, 5, 2, 30, lab\n"
    (job,) = read_trace(_file(tmp_path, "own.csv", text)).jobs
    assert (job.name, job.gpus, job.duration_s, job.group) == ("a", 2, 30.0, "lab")


@pytest.mark.parametrize(
    ("name", "cluster", "meant"),
    [
        ("NVIDIA-H100-80GB-HBM3", "8x8xh100,8x8xv100", "h100"),
        ("tesla_v100-sxm2-16gb", "8x8xh100,8x8xv100", "v100"),
        ("NVIDIA-A100-SXM4-40GB-SHARED", "1x8xa100-sxm-40gb,1x8xa100-sxm-80gb", "a100-sxm-40gb"),
        ("NVIDIA-H100-80GB-HBM3-MIG-3g.40gb", "1x8xh100@3g.40gb+4g.40gb", "h100-sxm-80gb@3g.40gb"),
        ("a100", "1x8xa100-sxm-40gb,1x8xa100-sxm-80gb", None),
        ("NVIDIA-B200", "8x8xh100", None),
        ("house-made", "8x8xh100", None),
    ],
)
def test_a_device_is_known_by_the_name_that_its_driver_gives_it(
    name: str, cluster: str, meant: str | None
) -> None:
    devices = list(dict.fromkeys(machine.device for machine in read_machines(cluster)))
    assert device_named(name.lower(), devices) == meant
