"""A training program of one's own behind a launch script: it is what is trained, as if it were named."""

from __future__ import annotations

from pathlib import Path

import pytest

from foretrain.errors import InputError
from foretrain.launchers import Launch, read_launch
from foretrain.predictors import get

pytest.importorskip("torch", reason="a program is run until it has made a step")
pytestmark = pytest.mark.usefixtures("shared_cache")

TRAIN = """
import argparse, torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--amp", action="store_true")
args = parser.parse_args()
model = nn.Linear(16, 4).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    x = torch.randn(args.batch_size, 16).cuda()
    with torch.autocast("cuda", torch.bfloat16, enabled=args.amp):
        loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 2}}')
    return tmp_path


def launched(folder: Path, command: str, model: str | None = None) -> Launch:
    (folder / "run.sh").write_text(f"{command}\n")
    return read_launch(folder / "run.sh", model=model)


def test_it_is_trained_with_the_options_of_the_script(folder: Path) -> None:
    launch = launched(folder, "torchrun --nproc_per_node 4 train.py --batch-size 24 --seed $MORE --amp")
    job = launch.job
    assert (job.workload.model.source, job.workload.model.name) == ("python", "train.py")
    assert job.workload.model.args == {"batch-size": "24", "amp": True}
    training = job.workload.training
    assert (training.global_batch, training.precision, training.optimizer) == (96, "amp-bf16", "adamw")
    assert job.plan.data == 4
    assert [one.field for one in launch.understood if one.setting.key == "--batch-size"] == ["model.args"]
    assert [one.value for one in launch.unknown] == ["$MORE"]
    assert not any("Trainer" in line for line in launch.assumed)
    assert get("roofline").predict(job)["step_time_s"].median > 0


def test_without_options_each_device_takes_the_batch_of_the_code(folder: Path) -> None:
    training = launched(folder, "torchrun --nproc_per_node 2 train.py").job.workload.training
    assert (training.global_batch, training.precision) == (16, "fp32")


def test_named_once_more_it_keeps_its_options(folder: Path) -> None:
    command = "torchrun --nproc_per_node 4 train.py --batch-size 24"
    named = launched(folder, command, model=str(folder / "train.py")).job.workload
    assert named.model.args == {"batch-size": "24"}
    assert named.training.global_batch == 96


def test_behind_another_launcher_it_has_to_be_named(folder: Path) -> None:
    command = "deepspeed --num_gpus 4 train.py --deepspeed_config ds.json"
    with pytest.raises(
        InputError, match=r"no model is named in it; give MODEL, such as .*train\.py itself or"
    ):
        launched(folder, command)
    job = launched(folder, command, model=str(folder / "train.py")).job
    assert (job.plan.shard, job.workload.training.optimizer, job.workload.training.global_batch) == (
        "zero2", "adamw", 32,
    )  # fmt: skip
    assert get("roofline").predict(job).fits


@pytest.mark.parametrize("program", ["../train.py", "missing.py", "broken.py", "model.py"])
def test_other_programs_are_not_run(program: str, folder: Path) -> None:
    (folder / "inner").mkdir()
    (folder / "inner" / "broken.py").write_text("x = (")
    (folder / "inner" / "model.py").write_text("def build(batch): raise SystemExit\n")
    with pytest.raises(InputError, match="no model is named in it"):
        launched(folder / "inner", f"torchrun --nproc_per_node 4 {program}")
