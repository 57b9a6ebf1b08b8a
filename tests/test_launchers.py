"""Jobs from launch files: what is understood, what is not, what cannot be."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

import foretrain
from commands import run
from foretrain.api import job_of
from foretrain.cli.app import show
from foretrain.cli.job_options import _of_job
from foretrain.errors import InputError
from foretrain.job import Job
from foretrain.launchers import (
    Launch,
    automodel,
    axolotl,
    deepspeed,
    huggingface,
    megatron,
    read_launch,
    torchtitan,
)
from foretrain.launchers.expressions import evaluated
from foretrain.launchers.shell import commands_of
from foretrain.plan import Plan
from foretrain.report.launch import launch_tables
from foretrain.workload import Training

pytest.importorskip("yaml", reason="PyYAML is not installed")

FILES = Path(__file__).parent / "launch_files"
EXPECTED: dict[str, Any] = json.loads((FILES / "expected.json").read_text())


@pytest.mark.parametrize("name", EXPECTED)
def test_a_launch_file_is_the_job_that_it_describes(name: str) -> None:
    expected = EXPECTED[name]
    launch = read_launch(FILES / name, **expected["given"])
    assert launch.job.to_dict() == expected["job"]
    assert launch.framework == expected["framework"]
    assert [one.key for one in launch.unknown] == expected["unknown"]
    assert [one.key for one in launch.unmodelled] == expected["unmodelled"]
    assert len(launch.assumed) == expected["assumed"]


def test_every_golden_file_is_expected() -> None:
    assert {path.name for path in FILES.iterdir() if path.is_file()} == {*EXPECTED, "expected.json"}


def test_epochs_of_a_file_count_where_samples_are_given() -> None:
    training = read_launch(FILES / "axolotl_qlora.yml", samples=50_000).job.workload.training
    assert (training.samples, training.epochs) == (50_000, 4)
    steps = read_launch(FILES / "axolotl_qlora.yml", samples=50_000, steps=10).job.workload.training
    assert (steps.steps, steps.epochs) == (10, None)


def test_megatron_overlaps_what_its_arguments_ask_for(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    words = (
        "torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 4 --hidden-size 256 --num-attention-heads 8 "
        "--seq-length 128 --micro-batch-size 1 --global-batch-size 8 --bf16 --use-distributed-optimizer "
        "--tensor-model-parallel-size 2 --sequence-parallel"
    )
    script.write_text(words)
    assert read_launch(script).job.plan.overlap == {"tensor": False, "gradients": False, "parameters": False}
    script.write_text(f"{words} --tp-comm-overlap --overlap-grad-reduce")
    assert read_launch(script).job.plan.overlap == {"tensor": True, "gradients": True, "parameters": False}


def test_what_a_program_gives_the_trainer_is_read_from_its_code(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 2}, "bf16": {"enabled": true}}')
    (tmp_path / "tune.py").write_text(
        "import torch\n"
        "NAME = 'Qwen/Qwen2.5-7B'\n"
        "model = AutoModelForCausalLM.from_pretrained(NAME, torch_dtype=torch.bfloat16)\n"
        "peft = LoraConfig(r=32, target_modules=['q_proj', 'v_proj'], lora_alpha=16)\n"
        "def main(args):\n"
        "    return SFTConfig(per_device_train_batch_size=2, gradient_accumulation_steps=4, max_length=2048,\n"
        "                     learning_rate=args.lr, deepspeed='ds.json', bf16=True)\n"
    )
    (tmp_path / "run.sh").write_text("torchrun --nproc_per_node 4 tune.py --per_device_train_batch_size 1\n")
    launch = read_launch(tmp_path / "run.sh")
    training, plan = launch.job.workload.training, launch.job.plan
    assert launch.job.workload.model.title == "Qwen2.5-7B"
    assert (plan.micro_batch, training.global_batch, training.sequence) == (1, 16, 2048)
    assert (plan.shard, training.adapter and training.adapter.rank) == ("zero2", 32)
    assert [Path(file).name for file in launch.files] == ["run.sh", "tune.py", "ds.json"]


def test_versions_and_lists_are_set_as_they_are_written() -> None:
    words = ["training.framework_version=0.10", "plan.stages=3,4,4,2", "plan.recompute_modules=norms,mlp"]
    assert _of_job({"set": words}) == {
        "framework_version": "0.10", "stages": [3, 4, 4, 2], "recompute_modules": ["norms", "mlp"],
    }  # fmt: skip


def test_launch_files_are_compared(tmp_path: Path) -> None:
    for name, batch in (("a.sh", 1), ("b.sh", 2)):
        (tmp_path / name).write_text(
            "torchrun --nproc_per_node 2 pretrain_gpt.py --num-layers 4 --hidden-size 64 "
            "--num-attention-heads 4 --seq-length 32 --vocab-size 256 --global-batch-size 4 --bf16 "
            f"--micro-batch-size {batch}"
        )
    words = ["explain", str(tmp_path / "a.sh"), str(tmp_path / "b.sh"), "--predictor", "roofline"]
    assert "plan.micro_batch: 1 -> 2" in run(*words).output


def fields(launch: Launch) -> dict[str, str]:
    return {one.setting.key: one.field for one in launch.understood}


def written(folder: Path, **files: str) -> list[Path]:
    """Files by name, ``run_sh`` for run.sh."""
    paths = []
    for name, text in files.items():
        stem, _, suffix = name.rpartition("_")
        paths.append(folder / f"{stem}.{suffix}")
        paths[-1].write_text(text)
    return paths


def test_what_was_understood_names_its_line_and_field() -> None:
    launch = read_launch(FILES / "megatron_mixtral.sh")
    assert fields(launch)["--num-experts"] == "model.config.num_experts"
    assert fields(launch)["--overlap-grad-reduce"] == "plan.overlap.gradients"
    places = {one.setting.key: one.setting.where for one in launch.understood}
    assert places["--num-experts"] == "megatron_mixtral.sh:18"  # inside of a text of several lines
    assert places["--micro-batch-size"] == "megatron_mixtral.sh:25"
    assert "--lr" in [one.key for one in launch.ignored]
    assert json.loads(json.dumps(launch.to_dict()))["understood"][0]["where"] == "megatron_mixtral.sh:8"


def test_options_and_a_model_complete_and_override_a_file() -> None:
    launch = read_launch(
        FILES / "megatron_mixtral.sh", nodes=4, device="b200", global_batch=512, optimizer="sgd"
    )
    job = launch.job
    assert (job.cluster.nodes, job.cluster.device.name, job.plan.data) == (4, "b200", 8)
    assert (job.workload.training.global_batch, job.workload.training.optimizer) == (512, "sgd")
    other = read_launch(FILES / "torchtitan_llama3_8b.toml", model="llama-3-70b", devices=64)
    assert other.job.workload.model.label == "Meta-Llama-3-70B"
    assert other.job.workload.training.global_batch == 64


def test_accumulation_follows_where_devices_are_changed() -> None:
    launch = read_launch(FILES / "ds_zero3_offload.json", model="llama-3-8b", devices=16)
    assert (launch.job.accumulation, launch.job.workload.training.global_batch) == (4, 256)
    assert any("accumulation follows" in one for one in launch.assumed)


SHELL = """\
set -e
A=${NONE:-4}; : ${B:=$((A * 2 + 1))}
LIST=(--one $A   # a comment
      --two "x y")
LIST+=(--three 'three')
if [[ "$A" == "4" && $B -gt 8 ]]; then C=yes; elif [ -z "$A" ]; then C=no; else C=never; fi
case $C in
  no|never) D=1 ;;
  y*) D=2 ;;
esac
[ -n "$UNSET" ] && D=3 || E=5
NAME=/some/where/model.bin
cat <<EOF > out.txt
program --not-this
EOF
X=1 program "${LIST[@]}" --count ${#LIST[@]} --d=$D --e $E --name ${NAME##*/} --stem ${NAME%.*} \\
  --host $(hostname) --rank $RANK "$@" 2>&1 | tee log
"""


def test_a_script_is_followed_without_being_run(tmp_path: Path) -> None:
    (script,) = written(tmp_path, run_sh=SHELL)
    command = next(one for one in commands_of(script) if one.words[0].text == "program")
    assert [word.text for word in command.words[1:]] == [
        "--one", "4", "--two", "x y", "--three", "three", "--count", "6", "--d=2", "--e", "5",
        "--name", "model.bin", "--stem", "/some/where/model", "--host", "$(...)", "--rank", "$RANK",
    ]  # fmt: skip
    assert command.words[3].line == 4
    assert command.variables["X"].text == "1"
    assert command.variables["B"].text == "9"
    assert not (tmp_path / "out.txt").exists()


@pytest.mark.parametrize(
    ("text", "number"), [("8*(2+1)", 24), ("7//2", 3), ("-3 % 2", 1), ("__import__('os')", None)]
)
def test_arithmetic_is_of_whole_numbers_alone(text: str, number: int | None) -> None:
    assert evaluated(text) == number


MEGATRON = (
    "--num-layers 8 --hidden-size 256 --num-attention-heads 8 --seq-length 512 --max-position-embeddings 512 "
    "--micro-batch-size 1 --global-batch-size 16 --vocab-size 1000"
)
TORCHRUN = "torchrun --nnodes 1 --nproc-per-node 8 pretrain_gpt.py"


def of_megatron(folder: Path, more: str) -> dict[str, Any]:
    (script,) = written(folder, run_sh=f"{TORCHRUN} {MEGATRON} {more}\n")
    return read_launch(script).job.to_dict()


@pytest.mark.parametrize(
    ("more", "kind"),
    [
        ("", "gpt2"),
        ("--swiglu --normalization RMSNorm --position-embedding-type rope", "llama"),
        ("--swiglu --normalization RMSNorm --position-embedding-type rope --add-qkv-bias", "qwen2"),
        ("--swiglu --normalization RMSNorm --position-embedding-type rope --qk-layernorm", "qwen3"),
        (
            "--squared-relu --position-embedding-type rope --group-query-attention --num-query-groups 2",
            "nemotron",
        ),
        ("--num-experts 8 --moe-router-topk 2 --swiglu", "mixtral"),
        ("--num-experts 8 --qk-layernorm --moe-ffn-hidden-size 64", "qwen3_moe"),
        ("--num-experts 8 --moe-shared-expert-intermediate-size 64", "qwen2_moe"),
        ("--num-experts 8 --multi-latent-attention --q-lora-rank 64 --kv-lora-rank 32", "deepseek_v3"),
    ],
)
def test_megatron_arguments_are_the_type_with_the_same_layers(more: str, kind: str, tmp_path: Path) -> None:
    assert of_megatron(tmp_path, more)["model"]["config"]["model_type"] == kind


@pytest.mark.parametrize(
    ("more", "section", "field", "value"),
    [
        ("--fp8-format hybrid --fp8-recipe tensorwise --bf16", "training", "fp8", "current"),
        ("--cuda-graph-impl full_iteration", "training", "graphs", "step"),
        ("--cuda-graph-impl local", "training", "graphs", "layers"),
        ("--use-precision-aware-optimizer --exp-avg-dtype bf16", "training", "optimizer_state", "bf16"),
        ("--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads", "plan", "shard", "zero2"),
        ("--use-megatron-fsdp --data-parallel-sharding-strategy no_shard", "plan", "shard", None),
        ("--use-torch-fsdp2", "plan", "shard", "zero3"),
        ("--pipeline-model-parallel-size 4 --decoder-first-pipeline-num-layers 1 --decoder-last-pipeline-num-layers 3",
         "plan", "stages", [1, 2, 2, 3]),
        ("--pipeline-model-parallel-size 2 --account-for-embedding-in-pipeline-split "
         "--account-for-loss-in-pipeline-split", "plan", "stages", [4, 4]),
        ("--pipeline-model-parallel-size 4 --pipeline-model-parallel-layout 'Et|(t|)*6t,L'", "plan", "virtual_stages", 2),
        ("--recompute-granularity full --recompute-method block --recompute-num-layers 4", "plan",
         "recompute_every", 2),
        ("--context-parallel-size 2 --cp-comm-type a2a", "plan", "context_exchange", "alltoall"),
        ("--no-overlap-p2p-communication --pipeline-model-parallel-size 2", "plan", "overlap", {"messages": False}),
        ("--moe-token-dispatcher-type flex --num-experts 8 --expert-model-parallel-size 2", "plan", "dispatcher", "deepep"),
        ("--moe-expert-capacity-factor 1.5 --num-experts 8", "plan", "expert_capacity", 1.5),
        ("--optimizer-cpu-offload", "plan", "offload", True),
        ("--num-distributed-optimizer-instances 2 --use-distributed-optimizer", "plan", "replicate", 2),
    ],
)  # fmt: skip
def test_megatron_arguments_are_fields(
    more: str, section: str, field: str, value: Any, tmp_path: Path
) -> None:
    assert of_megatron(tmp_path, more)[section].get(field) == value


def test_what_a_plan_has_no_use_for_is_left_out(tmp_path: Path) -> None:
    idle = "--cp-comm-type p2p --tp-comm-overlap --sequence-parallel --moe-token-dispatcher-type alltoall "
    idle += "--fp8-param-gather --num-distributed-optimizer-instances 2 --expert-tensor-parallel-size 1"
    assert of_megatron(tmp_path, idle)["plan"] == {"data": 8, "micro_batch": 1}


def test_other_programs_of_megatron_have_other_models(tmp_path: Path) -> None:
    (script,) = written(tmp_path, run_sh=f"torchrun --nproc-per-node 8 pretrain_bert.py {MEGATRON}\n")
    model = read_launch(script).job.workload.model
    assert (model.model_type, model.task) == ("bert", "masked-lm")
    script.write_text(f"torchrun --nproc-per-node 8 pretrain_mamba.py {MEGATRON}\n")
    with pytest.raises(InputError, match=r"run.sh: no model is named in it; give MODEL"):
        read_launch(script)


def test_slurm_headers_say_nodes_and_devices(tmp_path: Path) -> None:
    text = (
        f"#SBATCH --nodes=2 --ntasks-per-node=4 --gres=gpu:a100:4\nsrun python pretrain_gpt.py {MEGATRON}\n"
    )
    (script,) = written(tmp_path, run_sh=text)
    cluster = read_launch(script).job.cluster
    assert (cluster.nodes, cluster.devices_per_node, cluster.device.name) == (2, 4, "a100-sxm-80gb")


ACCELERATE = "distributed_type: {}\nnum_processes: 8\nnum_machines: 1\n"
DEEPSPEED = (
    '{{"train_batch_size": {}, "train_micro_batch_size_per_gpu": 2,\n "gradient_accumulation_steps": 4}}'
)


@pytest.mark.parametrize(
    ("files", "answer"),
    [
        ({"ds_json": DEEPSPEED.format(100)},
         "ds.json:1: train_batch_size = 100 is not train_micro_batch_size_per_gpu = 2 x "
         "gradient_accumulation_steps = 4 x 8 data-parallel ranks = 64"),
        ({"run_sh": f"{TORCHRUN} {MEGATRON} \\\n --tensor-model-parallel-size 3\n"},
         "run.sh:2: --tensor-model-parallel-size 3 = 3 does not divide the 8 devices"),
        ({"run_sh": f"{TORCHRUN} {MEGATRON} --tensor-model-parallel-size some"},
         "run.sh:1: --tensor-model-parallel-size: 'some' is not a whole number of at least 1"),
        ({"run_sh": f"{TORCHRUN} {MEGATRON} --moe-token-dispatcher-type nope"},
         "run.sh:1: --moe-token-dispatcher-type: 'nope' is not one of alltoall, alltoall_seq, allgather, flex"),
        ({"run_sh": f"#SBATCH --nodes=4\n{TORCHRUN} {MEGATRON}"},
         "run.sh:2: --nnodes 1 contradicts --nodes 4 (run.sh:1)"),
        ({"run_sh": f"{TORCHRUN} {MEGATRON} --global-batch-size 12"},
         "run.sh:1: --global-batch-size 12 does not divide over --micro-batch-size 1 x 8 data-parallel ranks"),
        ({"run_sh": f"{TORCHRUN} {MEGATRON} --pipeline-model-parallel-size 4 --pipeline-model-parallel-layout 'Et|t|t|L'"},
         "has 4 stages with 3 layers, not 8 on 4 ranks"),
        ({"run_sh": "echo nothing\n"}, "run.sh: no command that starts a training"),
        ({"plan_yaml": "some: 1\n"}, "plan.yaml: none of its keys tells whose file it is"),
        ({"plan_yaml": "a: [1\n"}, "not YAML"),
        ({"ds_json": "{"}, "ds.json: not JSON"),
        ({"plan_yaml": ACCELERATE.format("SOME")},
         "plan.yaml:1: distributed_type: 'SOME' is not one of no, multi_gpu, multi_cpu, tp, fsdp, deepspeed, megatron_lm"),
        ({"plan_yaml": ACCELERATE.format("FSDP") + "parallelism_config: {dp_shard_size: 3, dp_replicate_size: 2}\n"},
         "plan.yaml:4: parallelism_config.dp_shard_size = 3 x 2 replicas is not the 8 data-parallel ranks"),
        ({"run_sh": "deepspeed --num_gpus 8 train.py --deepspeed ds.json --per_device_train_batch_size 3",
          "ds_json": DEEPSPEED.format(64)},
         "run.sh:1: --per_device_train_batch_size 3 contradicts train_micro_batch_size_per_gpu = 2 (ds.json:1)"),
        ({"titan_toml": '[model]\nname = "llama3"\nflavor = "9B"\n[training]\nseq_len = 8\n'},
         "titan.toml:3: model.flavor: llama3 9b is not one of llama3 8b"),
        ({"job_toml": "[model]\n[training]\n[cluster]\n"}, "job.toml: a job file already; give it without --from"),
        ({"plan_py": "import torchtitan\nx = 1\n"}, "plan.py: no function that returns a configuration"),
        ({"plan_py": "def f():\n    return Config(a=1)\n"}, "imports neither torchtitan nor megatron.bridge"),
        ({"x_yml": "base_model: nobody/knows-this-one\nmicro_batch_size: 1\n"}, "x.yml:1: model: 'nobody/knows-this-one'"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_one_line_with_key_and_place(
    files: dict[str, str], answer: str, tmp_path: Path
) -> None:
    paths = written(tmp_path, **files)
    named = (
        "llama-3-8b" if "x_yml" not in files and "run_sh" not in files and "titan_toml" not in files else None
    )
    with pytest.raises(InputError) as error:
        read_launch(paths[0], model=named)
    assert answer in str(error.value)
    assert "\n" not in str(error.value)


def test_files_are_given_together_or_followed(tmp_path: Path) -> None:
    script = (
        "deepspeed --num_gpus 8 train.py --model_name_or_path Qwen/Qwen3-8B --max_length 1024 --bf16 {}\n"
    )
    settings = '{"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 2}'
    run_sh, ds_json = written(tmp_path, run_sh=script.format(""), ds_json=settings)
    together = read_launch(run_sh, ds_json).job
    run_sh.write_text(script.format("--deepspeed somewhere/else/ds.json"))
    followed = read_launch(run_sh).job
    assert together == followed
    assert (followed.plan.shard, followed.micro_batch) == ("zero3", 2)
    assert (followed.workload.training.framework, followed.workload.training.master_weights) == (
        "deepspeed",
        True,
    )
    ds_json.unlink()
    launch = read_launch(run_sh)
    assert any("is not there: read without it" in one for one in launch.assumed)


def test_host_files_and_settings_of_fsdp_are_read(tmp_path: Path) -> None:
    script = (
        "deepspeed --hostfile hosts.txt train.py --model_name_or_path Qwen/Qwen3-8B --max_length 1024 --bf16 "
        "--fsdp full_shard --fsdp_config fsdp.json --per_device_train_batch_size 1\n"
    )
    run_sh, *_ = written(
        tmp_path,
        run_sh=script,
        hosts_txt="# two\nworker-1 slots=4\nworker-2 slots=4\n",
        fsdp_json='{"activation_checkpointing": true, "reshard_after_forward": false, "xla": false}',
    )
    launch = read_launch(run_sh)
    assert (launch.job.cluster.nodes, launch.job.cluster.devices_per_node) == (2, 4)
    assert (launch.job.plan.recompute, launch.job.plan.reshard, launch.job.plan.shard) == (
        "full",
        False,
        "zero3",
    )


def test_what_only_a_running_script_knows_is_told(tmp_path: Path) -> None:
    (script,) = written(
        tmp_path, run_sh=f"torchrun --nnodes $WORLD --nproc-per-node 8 pretrain_gpt.py {MEGATRON} $MORE\n"
    )
    launch = read_launch(script)
    assert [one.words for one in launch.unknown] == ["--nnodes $WORLD"]
    assert launch.job.cluster.nodes == 1
    assert "cluster.nodes = 1: no file says" in launch.assumed


def test_predict_reads_launch_files_and_writes_the_job(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    net = "import torch\n\ndef net(batch):\n    return torch.nn.Linear(8, 8), (torch.zeros(batch, 8),)\n"
    settings, file = written(tmp_path, ds_json='{"train_batch_size": 8, "odd": 1}', net_py=net)
    words = ["predict", f"{file}:net", "--from", str(settings), "--device", "a100", "--devices", "2"]
    more = ["--set", "plan.overlap.gradients=true", "--write-job", str(tmp_path / "job.toml"), "--json"]
    result = run(*words, *more)
    assert result.exit_code == 0, result.output
    job = Job.load(tmp_path / "job.toml")
    assert job.cluster.device.name == "a100-sxm-80gb"
    assert job.plan.overlap == {"gradients": True}
    document = json.loads(result.stdout)
    assert document["launch"]["unknown"] == [{"key": "odd", "value": 1, "where": "ds.json:1"}]
    assert document["job"]["plan"] == job.to_dict()["plan"]
    assert job.workload.model.name == "net.py:net"  # beside the job


def test_what_was_read_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    launch = read_launch(FILES / "axolotl_qlora.yml", device="a100")
    show(*launch_tables(launch))
    shown = " ".join(capsys.readouterr().out.split())
    assert "9 lora_r = 32 training.adapter.rank" in shown
    assert "not known: made_up_key = 3 (axolotl_qlora.yml:24)" in shown
    assert "changes nothing: datasets, sample_packing, lora_alpha, learning_rate" in shown
    assert "assumed: 8 devices: a whole node; no file says; give --devices" in shown


def test_scripts_are_jobs_wherever_a_job_is_asked_for() -> None:
    assert job_of(FILES / "torchtitan_run.sh").cluster.world_size == 64
    launch = foretrain.read_launch(FILES / "torchtitan_plan.py:base")
    assert job_of(launch, {"sequence": 1024}).workload.training.sequence == 1024


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        ("predict --from nothing.sh", "nothing.sh: there is no such file"),
        ("predict resnet50 --set plan.nope=1", "plan.nope: 'nope' is not a known key"),
        ("predict resnet50 --set nope.nope=1", "nope.nope: 'nope' is not a section of a job"),
        ("predict resnet50 --set plan", "--set: 'plan' is not of the form section.field=value"),
    ],
)
def test_commands_that_cannot_be(words: str, answer: str) -> None:
    result = run(*words.split())
    assert result.exit_code == 2
    assert answer in result.stderr


DOCS = Path(__file__).parents[1] / "docs"


def test_every_key_is_documented() -> None:
    text = (DOCS / "launchers.md").read_text()
    readers = (megatron, torchtitan, deepspeed, huggingface, axolotl, automodel)
    keys = {key for reader in readers for key in reader.KEYS}
    assert not {key for key in keys if f"`{key}`" not in text}


def test_every_field_of_training_and_plan_is_documented() -> None:
    text = (DOCS / "formats.md").read_text()
    named = {field.name for noun in (Training, Plan) for field in dataclasses.fields(noun)}
    assert not {name for name in named if not re.search(rf"\b{name}\b", text)}
