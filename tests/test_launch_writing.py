"""Launch files that are written: they read as the job, say all of it, and have the keys of their launchers."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import json
import os
import runpy
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from foretrain.api import make_job
from foretrain.capture.sources.zoo import quiet_zoo_import
from foretrain.errors import InputError
from foretrain.estimate import Estimate
from foretrain.job import Job
from foretrain.launchers import read_launch
from foretrain.launchers.writing import TARGETS, Expected, write_launch
from foretrain.launchers.writing.folder import _USUAL
from foretrain.launchers.writing.schedulers import nodes_in_segment
from launch_plans import DEEPSPEED, EXPECTED, H100, JOBS, MEGATRON, TITAN, TORCH, essence, planned, with_steps

yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")

pytestmark = pytest.mark.xdist_group("launch")  # the table is written once

EVERYWHERE = {
    "launch.sh",
    "launch.json",
    "slurm.sbatch",
    "trainjob.yaml",
    "skypilot.yaml",
    "benchmark.py",
    "README.md",
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Every job of the table, written."""
    base = tmp_path_factory.mktemp("plans")
    found = {}
    for name in JOBS:
        job, target = planned(name, base)
        written = write_launch(job, base / name, expected=EXPECTED, target=target)
        assert {path.name for path in written} == {path.name for path in (base / name).iterdir()}
        found[name] = base / name
    return found


@pytest.mark.parametrize("name", JOBS)
def test_what_is_written_reads_as_the_job(name: str, folders: dict[str, Path]) -> None:
    job, _ = planned(name, folders[name].parent)
    launch = read_launch(folders[name] / "launch.sh")
    device = job.cluster.device.name
    if launch.job.cluster.device.name != device:  # which arguments of Megatron and torchtitan do not tell
        launch = read_launch(folders[name] / "launch.sh", device=device)
    assert essence(launch.job) == essence(job)
    assert not launch.unknown
    assert not launch.unmodelled
    if job.workload.training.steps is not None:
        assert launch.job.workload.training.steps == job.workload.training.steps


@pytest.mark.parametrize("file", ["slurm.sbatch", "trainjob.yaml", "skypilot.yaml"])
@pytest.mark.parametrize(
    "name", ["megatron-dense", "torchtitan-fsdp", "fsdp2-hsdp", "accelerate-hsdp", "deepspeed-zero2"]
)
def test_files_of_schedulers_lead_to_the_same_job(name: str, file: str, folders: dict[str, Path]) -> None:
    job, _ = planned(name, folders[name].parent)
    assert essence(read_launch(folders[name] / file).job) == essence(job)


def test_the_job_is_written_as_it_is(folders: dict[str, Path]) -> None:
    for name, folder in folders.items():
        job, _ = planned(name, folder.parent)
        assert Job.load(folder / "job.toml") == job.seen_from(folder)
    assert (
        tomllib.loads((folders["fsdp2-python"] / "job.toml").read_text())["model"]["name"] == "../net.py:net"
    )


def test_a_configuration_with_empty_values_is_written_as_json(tmp_path: Path) -> None:
    job = make_job("DeepSeek-V2-Lite", **TORCH, **H100, batch=8, shard="zero3")
    assert (job.workload.model.config or {})["q_lora_rank"] is None
    write_launch(job, tmp_path, expected=EXPECTED)
    assert Job.load(tmp_path / "job.json") == job.seen_from(tmp_path)
    assert essence(read_launch(tmp_path / "launch.sh").job) == essence(job)
    assert not (tmp_path / "job.toml").exists()


def test_every_folder_has_what_schedulers_need(folders: dict[str, Path]) -> None:
    for name, folder in folders.items():
        files = {path.name for path in folder.iterdir()}
        assert files >= EVERYWHERE
        assert ("ray_train.py" in files) == (not name.startswith(("megatron", "torchtitan")))
        assert os.access(folder / "launch.sh", os.X_OK)


def test_scripts_and_programs_are_well_formed(folders: dict[str, Path]) -> None:
    scripts = [
        str(path)
        for folder in folders.values()
        for path in folder.iterdir()
        if path.suffix in (".sh", ".sbatch")
    ]
    checked = subprocess.run(
        ["bash", "-c", 'for one in "$@"; do bash -n "$one" || exit 1; done', "_", *scripts], check=False
    )
    assert checked.returncode == 0
    programs = {path.read_text() for folder in folders.values() for path in folder.glob("*.py")}
    for text in programs:
        tree = ast.parse(text)
        imported = {one.module for one in ast.walk(tree) if isinstance(one, ast.ImportFrom)}
        assert not any(str(module).startswith("foretrain") for module in imported)


def test_every_file_says_what_it_is_for(folders: dict[str, Path]) -> None:
    for folder in folders.values():
        readme = (folder / "README.md").read_text()
        for path in folder.iterdir():
            if path.name != "README.md":
                assert f"`{path.name}`" in readme
            if path.suffix not in (".json", "") or path.name == "README.md":
                assert "Written by foretrain" in "\n".join(path.read_text().split("\n")[:3])


def test_files_of_others_stay(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "launch.sh").write_text("old")
    job, _ = planned("fsdp2-hsdp", tmp_path)
    write_launch(job, tmp_path, expected=EXPECTED)
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert "torchrun" in (tmp_path / "launch.sh").read_text()


# Limits of time


def test_limits_are_the_upper_end_and_a_margin(tmp_path: Path) -> None:
    job, _ = planned("fsdp2-hsdp", tmp_path)
    write_launch(job, tmp_path, expected=EXPECTED)
    assert "#SBATCH --time=1-12:17:00\n" in (tmp_path / "slurm.sbatch").read_text()
    document = yaml.safe_load((tmp_path / "trainjob.yaml").read_text())
    assert document["spec"]["activeDeadlineSeconds"] == 130_620  # 130,000 s and ten minutes, in whole minutes
    assert document["metadata"]["labels"]["kueue.x-k8s.io/max-exec-time-seconds"] == "130620"
    steps = Expected(step_time_s=Estimate(1.0, 0.5, 2.0))
    assert steps.limit_s(with_steps(job, 300)) == 1200
    assert steps.limit_s(job) == 2640  # the thousand steps that are run where the job says none


def test_nodes_of_a_rack_stay_together(tmp_path: Path) -> None:
    job, _ = planned("megatron-rack", tmp_path)
    assert nodes_in_segment(job) == 8
    spread = make_job("llama-3-8b", **MEGATRON, node="gb200-nvl72", nodes=32, micro_batch=1, batch=128)
    assert nodes_in_segment(spread) == 16  # of the 18 that a domain has, and that divide 32
    write_launch(spread, tmp_path, expected=EXPECTED)
    assert "#SBATCH --segment=16\n" in (tmp_path / "slurm.sbatch").read_text()
    alone, _ = planned("megatron-dense", tmp_path)
    assert nodes_in_segment(alone) is None


# Keys of launchers

TRAINJOB = {
    "": {"apiVersion", "kind", "metadata", "spec"},
    "spec": {"suspend", "activeDeadlineSeconds", "runtimeRef", "trainer"},
    "trainer": {"image", "numNodes", "numProcPerNode", "command", "args", "env", "resourcesPerNode"},
}
SKYPILOT = {"name", "num_nodes", "workdir", "resources", "setup", "run"}
RESOURCES = {"infra", "accelerators", "network_tier", "ordered"}
ZERO = {
    "stage", "overlap_comm", "contiguous_gradients", "reduce_scatter", "stage3_gather_16bit_weights_on_model_save",
    "zero_hpz_partition_size", "offload_optimizer",
}  # fmt: skip
DEEPSPEED_KEYS = {
    "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping", "bf16",
    "fp16", "torch_autocast", "zero_optimization", "optimizer", "tensor_parallel", "expert_parallel", "compile",
    "communication_data_type", "steps_per_print", "wall_clock_breakdown",
}  # fmt: skip


def test_documents_have_the_keys_of_kubernetes_and_skypilot(folders: dict[str, Path]) -> None:
    for folder in folders.values():
        job = yaml.safe_load((folder / "trainjob.yaml").read_text())
        assert set(job) == TRAINJOB[""]
        assert set(job["spec"]) == TRAINJOB["spec"]
        assert set(job["spec"]["trainer"]) == TRAINJOB["trainer"]
        assert job["apiVersion"] == "trainer.kubeflow.org/v1alpha1"
        task = yaml.safe_load((folder / "skypilot.yaml").read_text())
        assert set(task) == SKYPILOT
        assert set(task["resources"]) <= RESOURCES


def test_skypilot_is_offered_what_runs_from_the_same_files(tmp_path: Path) -> None:
    job = make_job("llama-3-8b", **TORCH, device="h200", devices=8, batch=64, shard="zero3")
    others = [
        make_job("llama-3-8b", **TORCH, node="p5.48xlarge", batch=64, shard="zero3"),
        make_job("llama-3-8b", **TORCH, device="a100", devices=8, batch=64, shard="zero3", recompute="full"),
        make_job("llama-3-8b", **TORCH, device="a100", devices=16, batch=64, shard="zero3"),
        make_job("llama-3-8b", **TORCH, device="a100", devices=8, batch=64, shard="zero3"),
    ]
    write_launch(job, tmp_path, expected=EXPECTED, alternatives=others)
    ordered = yaml.safe_load((tmp_path / "skypilot.yaml").read_text())["resources"]["ordered"]
    assert ordered == [
        {"accelerators": "H200:8"}, {"infra": "aws", "accelerators": "H100:8"}, {"accelerators": "A100-80GB:8"},
    ]  # fmt: skip
    assert read_launch(tmp_path / "skypilot.yaml").job.cluster.device.name == "h200-sxm-141gb"
    readme = (tmp_path / "README.md").read_text()
    assert "has another plan, and needs a folder of its own" in readme
    assert "has another number of nodes" in readme


def test_deepspeed_reads_its_configuration(folders: dict[str, Path]) -> None:
    configs = {
        name: json.loads((folder / "ds_config.json").read_text())
        for name, folder in folders.items()
        if (folder / "ds_config.json").exists()
    }
    assert len(configs) == 7
    for config in configs.values():
        assert set(config) <= DEEPSPEED_KEYS
        assert set(config["zero_optimization"]) <= ZERO
    runtime = pytest.importorskip(
        "deepspeed.runtime.config", reason="DeepSpeed is not installed: keys alone are checked"
    )

    class Ranks:
        def get_data_parallel_world_size(self) -> int:
            return self.count

        count = 1

    for name, config in configs.items():
        job, _ = planned(name, folders[name].parent)
        ranks = Ranks()
        ranks.count = job.plan.data or 1
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(runtime.dist, "get_rank", lambda: 0)
            read = runtime.DeepSpeedConfig(config, mpu=ranks)
        assert (read.train_batch_size, read.zero_config.stage) == (
            job.workload.training.global_batch,
            int(job.plan.shard.removeprefix("zero")),
        )


def test_transformers_takes_the_arguments_of_its_trainer(folders: dict[str, Path], tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    quiet_zoo_import()
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    files = [folder / "training_arguments.json" for folder in folders.values()]
    for file in filter(Path.exists, files):
        wanted = json.loads(file.read_text())
        here = {name: value for name, value in wanted.items() if name not in ("deepspeed", "tf32", "fsdp")}
        with pytest.MonkeyPatch.context() as patched:  # it sets variables that tell accelerate
            patched.setattr(os, "environ", dict(os.environ))
            read = transformers.TrainingArguments(**{**here, "use_cpu": True, "output_dir": str(tmp_path)})
        for name in ("per_device_train_batch_size", "gradient_accumulation_steps", "max_steps", "bf16"):
            assert getattr(read, name) == wanted.get(name, False)
        assert wanted.get("fsdp", True) is True


def test_accelerate_reads_its_configuration(folders: dict[str, Path]) -> None:
    args = pytest.importorskip("accelerate.commands.config.config_args", reason="accelerate is not installed")
    kinds = {}
    for name, folder in folders.items():
        if (folder / "accelerate.yaml").exists():
            read = args.load_config_from_file(str(folder / "accelerate.yaml"))
            job, _ = planned(name, folder.parent)
            assert (read.num_processes, read.num_machines) == (job.cluster.world_size, job.cluster.nodes)
            kinds[name.removeprefix("accelerate-")] = read.distributed_type.value
    assert kinds == {
        "ddp": "MULTI_GPU", "hsdp": "FSDP", "tensor-context": "FSDP", "lora": "MULTI_GPU", "bf16-sgd": "MULTI_GPU",
        "one-device": "NO", "deepspeed": "DEEPSPEED",
    }  # fmt: skip


def test_torchtitan_takes_its_configuration(folders: dict[str, Path]) -> None:
    try:
        importlib.import_module("torchtitan.models.llama3.config_registry")
    except Exception as error:
        pytest.skip(f"torchtitan is not installed with all that it needs ({error})")
    for name in ("torchtitan-fsdp", "torchtitan-hsdp-tensor", "torchtitan-experts", "torchtitan-ddp"):
        config = runpy.run_path(str(folders[name] / "torchtitan_plan.py"))["plan"]()
        job, _ = planned(name, folders[name].parent)
        assert config.parallelism.tensor_parallel_degree == job.plan.tensor


def test_torchtitan_is_told_all_degrees_by_both_files(folders: dict[str, Path]) -> None:
    folder = folders["torchtitan-hsdp-tensor"]
    in_toml = read_launch(folder / "torchtitan.toml", nodes=8, devices_per_node=8).job
    in_samples = read_launch(
        f"{folder / 'torchtitan_plan.py'}:plan_in_samples", nodes=8, devices_per_node=8
    ).job
    in_tokens = read_launch(
        f"{folder / 'torchtitan_plan.py'}:plan_in_tokens", nodes=8, devices_per_node=8
    ).job
    job, _ = planned("torchtitan-hsdp-tensor", folder.parent)
    assert essence(in_toml) == essence(in_samples) == essence(in_tokens) == essence(job)
    assert not (folders["torchtitan-toml-alone"] / "torchtitan_plan.py").exists()
    assert "no torchtitan_plan.py" in (folders["torchtitan-toml-alone"] / "README.md").read_text()


def test_megatron_feeds_its_devices_as_its_parts_need(tmp_path: Path) -> None:
    def connections(**options: Any) -> str | None:
        job = make_job(
            "mixtral-8x7b", **{**MEGATRON, **H100, "nodes": 2, "batch": 64, "shard": "zero1", **options}
        )
        write_launch(job, tmp_path, expected=EXPECTED)
        lines = (tmp_path / "launch.sh").read_text().split("\n")
        return next(
            (one.partition("=")[2] for one in lines if one.startswith("export CUDA_DEVICE_MAX")), None
        )

    assert connections(tensor=2, sequence_parallel=True) == "1"
    assert connections(node="dgx-b200", tensor=2, sequence_parallel=True) is None
    assert connections(shard="zero3") == "8"
    assert connections(expert=8, overlap={"experts": True}) == "32"
    assert connections() is None


# What cannot be

CANNOT: list[tuple[str, str | None, dict[str, Any], str]] = [
    ("llama-3-8b", None, {**TORCH, "framework": "nanotron", "precision": "bf16"}, "training.framework: 'nanotron' has no launch files; these have: pytorch (target fsdp2)"),
    ("llama-3-8b", "nobody", TORCH, "target: 'nobody' is not one of accelerate, deepspeed"),
    ("llama-3-8b", "megatron", TORCH, "training.framework: 'pytorch' is not what target megatron launches; forecast it with megatron"),
    ("llama-3-8b", None, {**TORCH, "mode": "infer"}, "training.mode: 'infer'"),
    ("resnet18", None, {"devices": 2, "servers": 1, "image": 64}, "plan.servers: 1 cannot be launched"),
    ("llama-3-8b", None, {**TORCH, "devices": 8, "shard": "zero2", "batch": 8}, "plan.shard: 'zero2' is not something that target fsdp2 can launch; it takes none, zero1 or zero3"),
    ("llama-3-8b", None, {**TORCH, "devices": 8, "pipeline": 2}, "plan.pipeline: 2 is not something that target fsdp2 can launch"),
    ("llama-3-8b", None, {**TORCH, "devices": 8, "tensor": 2, "batch": 8}, "plan.shard: 'none'"),
    ("llama-3-8b", None, {**TORCH, "adapter": "lora:8"}, "training.adapter"),
    ("llama-3-8b", None, {**TORCH, "optimizer": "lamb"}, "training.optimizer: 'lamb'"),
    ("llama-3-8b", None, {**TORCH, "checkpoint_every": "1h"}, "training.checkpoint_every: '1h'"),
    ("maskrcnn_resnet50_fpn", None, {"image": 224}, "model.name: 'maskrcnn_resnet50_fpn'"),
    ("resnet50", "accelerate", {"image": 224}, "model.source: 'torchvision' is not something that target accelerate can launch"),
    ("stable-diffusion-v1-5", None, {}, "model.source: 'diffusion'"),
    ("gemma-2-9b", None, MEGATRON, "model: 'gemma2' is not one of llama, mistral, qwen2"),
    ("bert-base-uncased", None, MEGATRON, "model: 'bert' is not one of llama, mistral, qwen2"),
    ("pythia-1b", None, MEGATRON, "model.config.use_parallel_residual"),
    ("llama-3-8b", None, {**MEGATRON, "recompute": "operators"}, "plan.recompute: 'operators'"),
    ("llama-3-8b", None, {**MEGATRON, "devices": 8, "pipeline": 8, "schedule": "zbv", "batch": 8}, "plan.schedule: 'zbv'"),
    ("llama-3-8b", None, {**MEGATRON, "devices": 8, "pipeline": 4, "schedule": "interleaved", "batch": 8}, "plan.virtual_stages: missing"),
    ("deepseek-v3", None, {**MEGATRON, "devices": 8, "pipeline": 8, "batch": 8}, "61 layers do not divide; give plan.stages"),
    ("mistral-7b", None, TITAN, "model: Mistral-7B-v0.1 is not one that torchtitan has"),
    ("llama-3-8b", None, {**TITAN, "optimizer": "sgd"}, "training.optimizer: 'sgd'"),
    ("llama-3-8b", None, {**TITAN, "shard": "zero1", "devices": 8, "batch": 8}, "plan.shard: 'zero1'"),
    ("llama-3-8b", None, {**DEEPSPEED, "devices": 8, "shard": "zero3", "replicate": 2, "batch": 8}, "plan.replicate: 2"),
    ("llama-3-8b", None, {**DEEPSPEED, "devices": 8, "context": 2, "batch": 8}, "plan.context: 2"),
    ("mixtral-8x7b", None, {**DEEPSPEED, "devices": 8, "expert": 8, "shard": "zero3", "batch": 8}, "plan.expert: 8"),
    ("llama-3-8b", "accelerate", {**TORCH, "devices": 8, "shard": "zero1", "batch": 8}, "plan.shard: 'zero1'"),
    ("llama-3-8b", "accelerate", {**TORCH, "devices": 8, "tensor": 2, "batch": 8}, "plan.tensor: 2"),
]  # fmt: skip


@pytest.mark.parametrize(("model", "target", "options", "answer"), CANNOT)
def test_what_a_target_cannot_say_is_refused_in_a_line(
    model: str, target: str | None, options: dict[str, Any], answer: str, tmp_path: Path
) -> None:
    job = make_job(model, **options)
    with pytest.raises(InputError) as error:
        write_launch(job, tmp_path / "plan", expected=EXPECTED, target=target)
    assert answer in str(error.value)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "plan").exists()


def test_what_only_the_forecast_knows_is_told(tmp_path: Path) -> None:
    job = make_job(
        "llama-3-8b", **TORCH, devices=8, batch=64, shard="zero3", micro_batch=1, loader_rate=10.0, evaluate_every=100,
        evaluate_samples=64, steps=1000, framework_version="2.12",
    )  # fmt: skip
    write_launch(job, tmp_path, expected=EXPECTED)
    readme = (tmp_path / "README.md").read_text()
    for field in (
        "training.loader_rate = 10.0",
        "training.evaluate_every = 100",
        "training.framework_version = 2.12",
    ):
        assert f"- {field}: " in readme
    assert "--keep-whole-gradients" in readme
    assert "expandable_segments:True" in readme


def test_every_field_is_said_noted_or_refused() -> None:
    """No field of a plan can be dropped: a change that a target has no word for is an error."""
    job = make_job("llama-3-8b", **TORCH, devices=8, batch=64, shard="zero3")
    odd = dataclasses.replace(job, plan=dataclasses.replace(job.plan, balance="speed"))
    with pytest.raises(InputError, match=r"plan\.balance: 'speed' is not something that target fsdp2"):
        write_launch(odd, Path("nowhere"), expected=EXPECTED)


# Any plan

MODELS = {"megatron": ("llama-3-8b", "qwen3-30b-a3b", "gpt2"), "torchtitan": ("llama-3-8b", "qwen3-30b-a3b"),
          "fsdp2": ("llama-3-8b", "gpt2"), "deepspeed": ("llama-3-8b", "mixtral-8x7b"),
          "accelerate": ("qwen3-8b",)}  # fmt: skip
COMMON = {
    "megatron": MEGATRON,
    "torchtitan": TITAN,
    "fsdp2": TORCH,
    "deepspeed": DEEPSPEED,
    "accelerate": TORCH,
}
SHARDS = {"megatron": ("none", "zero1", "zero2", "zero3"), "torchtitan": ("none", "zero3"),
          "fsdp2": ("none", "zero1", "zero3"), "deepspeed": ("none", "zero1", "zero2", "zero3"),
          "accelerate": ("none", "zero3")}  # fmt: skip


@st.composite
def plans(draw: st.DrawFn) -> tuple[str, Job]:
    """A target and a job that the forecast takes; whether the target can launch it is not asked."""
    target = draw(st.sampled_from(TARGETS))
    degree = st.sampled_from((1, 1, 2, 4))
    nodes, batch = draw(st.sampled_from((1, 2, 4))), draw(st.sampled_from((64, 128, 256)))
    options: dict[str, Any] = {
        **COMMON[target],
        "node": "dgx-h100", "nodes": nodes, "batch": batch,
        "micro_batch": draw(st.sampled_from((1, 2))),
        "sequence": 1024,
        "shard": draw(st.sampled_from(SHARDS[target])),
        "tensor": draw(degree),
        "recompute": draw(st.sampled_from(("none", "full"))),
    }  # fmt: skip
    if options["tensor"] > 1 and target in ("megatron", "torchtitan"):
        options["sequence_parallel"] = draw(st.booleans()) or target == "megatron"
    if target in ("megatron", "torchtitan"):
        options |= {
            "pipeline": draw(degree),
            "context": draw(st.sampled_from((1, 1, 2))),
            "expert": draw(degree),
        }
        if options["pipeline"] > 1 and draw(st.booleans()):
            options |= {"schedule": "interleaved", "virtual_stages": 2}
    if options["shard"] == "zero3" and target != "deepspeed":
        options["replicate"] = draw(st.sampled_from((1, 2)))
    if target == "torchtitan" and draw(st.booleans()):
        options |= {"compile": True}
    if target in ("fsdp2", "deepspeed", "accelerate"):
        options["offload"] = draw(st.booleans())
    model = draw(st.sampled_from(MODELS[target]))
    if options.get("expert", 1) > 1 and "a3b" not in model:
        options["expert"] = 1
    try:
        return target, make_job(model, **options)
    except InputError:
        assume(False)
        raise AssertionError from None


@settings(max_examples=40, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
@given(plans())
def test_any_plan_reads_back_or_is_refused(
    tmp_path_factory: pytest.TempPathFactory, made: tuple[str, Job]
) -> None:
    target, job = made
    folder = tmp_path_factory.mktemp("any")
    refusals = []
    try:
        write_launch(job, folder, expected=EXPECTED, target=target)
    except InputError as error:
        refusals.append(str(error))
    if refusals:
        assert "can launch" in refusals[0]
        assert not list(folder.iterdir())
        return
    assert essence(read_launch(folder / "launch.sh", device="h100").job) == essence(job)


def test_each_framework_with_files_has_a_usual_target() -> None:
    assert set(_USUAL.values()) <= set(TARGETS)
