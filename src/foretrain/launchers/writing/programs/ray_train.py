"""Runs the training of train.py on a Ray cluster, with Ray Train.

python ray_train.py [--steps 20]

Each worker has this folder as its working directory; a model's file outside of it must be there too.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
from pathlib import Path
from typing import Any

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, get_device

FOLDER = Path(__file__).resolve().parent


def train_worker(settings: dict[str, Any]) -> None:
    """Train in a worker; Ray has made the process group."""
    os.environ.update(settings["environment"])
    program = importlib.import_module("train")
    os.chdir(Path(str(program.__file__)).parent)  # where Ray has put this folder
    if settings["target"] == "fsdp2":
        job = program.Job.load(Path(settings["job"]))
        program.train(job, device=get_device(), steps=settings["steps"])
    else:
        arguments = Path("training_arguments.json")
        program.train(arguments, Path(settings["job"]), steps=settings["steps"])


def trainer(launch: dict[str, Any], steps: int | None) -> TorchTrainer:
    on_gpu = launch["device"] != "cpu"
    cores = {"CPU": launch["cores_per_worker"]} if launch["cores_per_worker"] else {}
    return TorchTrainer(
        train_worker,
        train_loop_config={**launch, "steps": steps},
        scaling_config=ScalingConfig(
            num_workers=launch["workers"],
            use_gpu=on_gpu,
            resources_per_worker={**({"GPU": 1} if on_gpu else {}), **cores} or None,
            accelerator_type=launch["ray_accelerator"],
            placement_strategy="PACK",
        ),
        run_config=RunConfig(
            name=launch["name"],
            storage_path=os.environ.get("RAY_STORAGE"),
            failure_config=FailureConfig(max_failures=3),
        ),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains with Ray Train.")
    parser.add_argument("--steps", type=int, help="instead of those that the job says")
    given = parser.parse_args()
    launch = json.loads((FOLDER / "launch.json").read_text(encoding="utf-8"))
    ray.init(runtime_env={"working_dir": str(FOLDER), "env_vars": launch["environment"]})
    trainer(launch, given.steps).fit()


if __name__ == "__main__":
    main()
