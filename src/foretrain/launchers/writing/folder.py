"""Writes the folder that launches a job: its files for a framework, for schedulers, and a benchmark."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from foretrain.errors import InputError, unknown
from foretrain.files import write_atomically
from foretrain.job import Job
from foretrain.job_files import write_job_file
from foretrain.launchers.writing import accelerate, deepspeed, fsdp2, megatron, torchtitan
from foretrain.launchers.writing.devices import RAY
from foretrain.launchers.writing.expected import Expected
from foretrain.launchers.writing.fsdp2 import job_file
from foretrain.launchers.writing.launch_script import allocator_of, launch_script
from foretrain.launchers.writing.limits import check_common
from foretrain.launchers.writing.readme import readme
from foretrain.launchers.writing.schedulers import job_name, skypilot_task, slurm_script, trainjob
from foretrain.launchers.writing.target_files import TargetFiles, program_text
from foretrain.launchers.writing.versions import stamp

_WRITERS: dict[str, Callable[[Job], TargetFiles]] = {
    "megatron": megatron.write,
    "torchtitan": torchtitan.write,
    "fsdp2": fsdp2.write,
    "deepspeed": deepspeed.write,
    "accelerate": accelerate.write,
}
TARGETS = tuple(_WRITERS)
_USUAL = {"pytorch": "fsdp2", "megatron": "megatron", "torchtitan": "torchtitan", "deepspeed": "deepspeed"}
"""The target of each framework where none is named."""
_FRAMEWORKS = {
    "megatron": ("megatron",),
    "torchtitan": ("torchtitan",),
    "fsdp2": ("pytorch",),
    "deepspeed": ("deepspeed",),
    "accelerate": ("pytorch", "deepspeed"),
}
"""Whose jobs each target launches: a forecast of one framework says little of another."""
_PACKAGES = {
    "megatron": "megatron-core transformer-engine[pytorch]",
    "torchtitan": "torchtitan",
    "fsdp2": "torch",
    "deepspeed": "torch transformers accelerate deepspeed",
    "accelerate": "torch transformers accelerate",
}
_WITH_RAY = ("fsdp2", "accelerate", "deepspeed")
"""Targets whose training is a function, which Ray Train calls."""


def write_launch(
    job: Job,
    folder: Path,
    *,
    expected: Expected,
    target: str | None = None,
    alternatives: Sequence[Job] = (),
) -> list[Path]:
    """Write the files that launch a job into a folder, and say which they are.

    ``target`` is one of megatron, torchtitan, fsdp2, deepspeed and accelerate; without it, what follows from
    the job's framework. ``alternatives`` are the next best jobs, of which SkyPilot is offered those that run
    from the same files. What a target cannot say is an InputError; other files of the folder stay.
    """
    name = _target(job, target)
    check_common(job)
    own_job = job.seen_from(folder)
    target_files = _WRITERS[name](own_job)
    texts = {"launch.sh": launch_script(own_job, target_files), **target_files.files}
    about = {
        job_file(own_job): "the job: `foretrain predict` forecasts it, train.py and benchmark.py read it",
        "launch.sh": _usage(own_job),
        **target_files.about,
    }
    notes = list(target_files.notes)
    texts["slurm.sbatch"] = slurm_script(own_job, expected)
    about["slurm.sbatch"] = "starts launch.sh on Slurm: `sbatch --account=A --partition=P slurm.sbatch`"
    texts["trainjob.yaml"] = trainjob(own_job, expected)
    about["trainjob.yaml"] = (
        "a TrainJob of Kubeflow in a queue of Kueue: name your image and queue, then `kubectl apply -f`"
    )
    task = skypilot_task(own_job, alternatives, _packages(own_job, name))
    if task is None:
        notes.append(f"no skypilot.yaml: SkyPilot has no name for {own_job.cluster.device.name}")
    else:
        texts["skypilot.yaml"], left_out = task
        about["skypilot.yaml"] = "a task of SkyPilot: `sky launch skypilot.yaml`"
        notes += dict.fromkeys(f"skypilot.yaml: {why}" for why in left_out)
    stamps = ("ray", "torch")
    if name in _WITH_RAY:
        texts["ray_train.py"] = program_text("ray_train", stamp(*stamps))
        about["ray_train.py"] = "the same training by Ray Train: `python ray_train.py` on a cluster's head"
    else:
        notes.append(f"no ray_train.py: the training of {name} is a program, not a function")
    texts["benchmark.py"] = program_text("benchmark", stamp(*target_files.stamps))
    about["benchmark.py"] = (
        "`python benchmark.py` runs 20 steps, adds a run to runs.jsonl and says whether the forecast held"
    )
    texts["launch.json"] = json.dumps(_settings(own_job, name, expected, target_files), indent=2) + "\n"
    about["launch.json"] = "what benchmark.py and ray_train.py know of the plan, with the forecast"
    texts["README.md"] = readme(
        own_job, expected, target=name, stamps=target_files.stamps, about=about, notes=notes
    )
    write_job_file(job, folder / job_file(own_job), stamp=stamp(*target_files.stamps))
    for file, text in texts.items():
        write_atomically(folder / file, text)
        if file.endswith((".sh", ".sbatch")):
            (folder / file).chmod(0o755)
    return [folder / job_file(own_job), *(folder / file for file in texts)]


def launch_texts(job: Job, target: str | None = None) -> dict[str, str]:
    """Write the script and the settings that it reads, by name: without programs and what schedulers take."""
    check_common(job)
    target_files = _WRITERS[_target(job, target)](job)
    settings = {name: text for name, text in target_files.files.items() if not name.endswith(".py")}
    return {"launch.sh": launch_script(job, target_files), **settings}


def refusal(job: Job, target: str) -> str:
    """Why a target cannot launch a job, in words; empty where it can."""
    try:
        check_common(job)
        _WRITERS[_target(job, target)](job)
    except InputError as error:
        return str(error)
    return ""


def _target(job: Job, asked: str | None) -> str:
    framework = job.workload.training.framework
    if asked is not None and asked not in TARGETS:
        raise unknown("target", asked, TARGETS)
    if asked is None and framework not in _USUAL:
        possible = ", ".join(f"{one} (target {target})" for one, target in _USUAL.items())
        raise InputError(f"training.framework: {framework!r} has no launch files; these have: {possible}")
    name = asked or _USUAL[framework]
    if framework not in _FRAMEWORKS[name]:
        wanted = " or ".join(_FRAMEWORKS[name])
        raise InputError(
            f"training.framework: {framework!r} is not what target {name} launches; forecast it with {wanted}"
        )
    return name


def _usage(job: Job) -> str:
    if job.cluster.nodes == 1:
        return "starts the training: `bash launch.sh`"
    return (
        f"starts the training, on each of the {job.cluster.nodes} nodes: "
        "`MASTER_ADDR=first-node NODE_RANK=0 bash launch.sh`, with the number of the node from 0 on"
    )


def _packages(job: Job, target: str) -> str:
    """List the packages that a machine needs."""
    source = job.workload.model.source
    extra = {"transformers": "transformers", "timm": "timm", "torchvision": "torchvision"}.get(source, "")
    adapters = "peft" if job.workload.training.adapter is not None else ""
    words = f"{_PACKAGES[target]} {extra if target == 'fsdp2' else ''} {adapters}".split()
    return " ".join(dict.fromkeys(words))


def _settings(job: Job, target: str, expected: Expected, target_files: TargetFiles) -> dict[str, object]:
    cluster = job.cluster
    allocator = allocator_of(job)
    environment = dict(target_files.environment)
    if allocator is not None:
        environment |= {"PYTORCH_ALLOC_CONF": allocator, "PYTORCH_CUDA_ALLOC_CONF": allocator}
    if target == "accelerate":
        environment |= accelerate.environment(job)
    return {
        "name": job_name(job),
        "target": target,
        "job": job_file(job),
        "workers": cluster.world_size,
        "device": cluster.device.name,
        "cores_per_worker": cluster.device.cores if cluster.device.is_cpu else None,
        "ray_accelerator": RAY.get(cluster.device.name),
        "allocator": allocator,
        "environment": environment,
        "forecast": expected.to_dict(),
    }
