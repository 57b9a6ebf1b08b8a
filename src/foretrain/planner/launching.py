"""Writes the plans of a search as folders with the files that launch them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from foretrain.errors import InputError
from foretrain.files import make_folder, write_atomically
from foretrain.forecast import Forecast
from foretrain.job import Job
from foretrain.job_files import write_job_file
from foretrain.launchers.writing import TARGETS, Expected, refusal, write_launch
from foretrain.launchers.writing.fsdp2 import job_file
from foretrain.planner.outcome import Option, Plans


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """A folder of a plan."""

    option: Option
    folder: Path
    refused: str = ""
    """Why it has the job alone: what its framework's files cannot say."""


def check_launchable(target: str) -> None:
    """Refuse a framework that no launch files are written for."""
    if target not in TARGETS:
        raise InputError(
            f"out: launch files of {target} are not written; --framework {', '.join(TARGETS)} have some"
        )


def unlaunchable(job: Job, target: str) -> str:
    """Say what of a plan its framework has no word for; empty where there is nothing. A model that it does
    not know is another matter: no plan changes that."""
    why = refusal(job, target) if target in TARGETS else ""
    return why if why.startswith("plan.") else ""


def write_plans(plans: Plans, folder: Path) -> list[Written]:
    """A folder for each plan that keeps within the goal, ``plan-1`` for the best, and ``plans.json``."""
    check_launchable(plans.target)
    kept = [option for option in plans if not option.misses]
    written = []
    for number, option in enumerate(kept, start=1):
        own = folder / f"plan-{number}"
        make_folder(own)
        others = [other.job for other in kept if other is not option]
        try:
            write_launch(
                option.job, own, expected=_expected(option.forecast), target=plans.target, alternatives=others
            )
            written.append(Written(option=option, folder=own))
        except InputError as error:
            write_job_file(option.job, own / job_file(option.job))
            written.append(Written(option=option, folder=own, refused=str(error)))
    write_atomically(folder / "plans.json", json.dumps(plans.to_dict(), indent=2) + "\n")
    return written


def _expected(forecast: Forecast) -> Expected:
    quantities = forecast.quantities
    return Expected(
        step_time_s=forecast["step_time_s"],
        total_time_s=quantities.get("total_time_s"),
        peak_memory_bytes=quantities.get("peak_memory_bytes"),
        reserved_memory_bytes=quantities.get("reserved_memory_bytes"),
    )
