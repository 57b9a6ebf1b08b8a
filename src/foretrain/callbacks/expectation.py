"""Forecasts a job in a process of its own, so that the training process stays as it is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from foretrain.errors import ForetrainError
from foretrain.forecast import Estimate
from foretrain.job import Job

PATIENCE_S = 180.0


def expected(job: Job, predictor: str | Path, *, patience_s: float = PATIENCE_S) -> dict[str, Estimate]:
    """The quantities that ``foretrain predict`` gives; this process's random numbers and GPU stay."""
    with tempfile.TemporaryDirectory(prefix="foretrain-") as folder:
        file = Path(folder) / "job.json"
        file.write_text(json.dumps(job.seen_from(Path(folder)).to_dict()), encoding="utf-8")
        command = [sys.executable, "-m", "foretrain.cli", "predict", str(file), "--json"]
        command += ["--predictor", str(predictor)]
        try:
            done = subprocess.run(
                command, env=_environment(), capture_output=True, text=True, timeout=patience_s, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise ForetrainError(f"no answer within {patience_s:.0f} s") from error
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"it ended with code {done.returncode}"]
        raise ForetrainError(said[-1].removeprefix("foretrain: "))
    return {name: Estimate(**bounds) for name, bounds in json.loads(done.stdout)["quantities"].items()}


def _environment() -> dict[str, str]:
    """This package can be imported, no GPU is seen, and the child takes no part in a distributed training."""
    home = str(Path(__file__).parents[2])
    paths = os.pathsep.join([home, *filter(None, [os.environ.get("PYTHONPATH")])])
    distributed = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    kept = {name: value for name, value in os.environ.items() if name not in distributed}
    return {**kept, "PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": ""}
