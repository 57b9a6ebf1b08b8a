"""Trains a small model on the CPU and records the training as a run, with a forecast beside it.

    python examples/recording.py [runs.jsonl]
    foretrain runs list --store runs.jsonl
    foretrain evaluate runs.jsonl

The loop is one of your own with a ``Recorder``; Hugging Face ``Trainer``, Lightning and Ray Train have a
callback each (docs/callbacks.md).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from foretrain.callbacks import Recorder

BATCH, WIDTH, CLASSES, STEPS = 64, 256, 10, 40


def build(batch: int) -> tuple[nn.Module, torch.Tensor]:
    """The model and its inputs, as ``foretrain predict recording.py:build`` calls it too."""
    wide = 4 * WIDTH
    layers = nn.Linear(WIDTH, wide), nn.GELU(), nn.Linear(wide, WIDTH), nn.GELU(), nn.Linear(WIDTH, CLASSES)
    return nn.Sequential(*layers), torch.randn(batch, WIDTH)


JOB: dict[str, dict[str, Any]] = {
    "model": {"source": "python", "name": f"{Path(__file__).resolve()}:build"},
    "training": {"global_batch": BATCH, "optimizer": "adamw", "steps": STEPS},
    "cluster": {"device": "cpu", "cores_per_device": 1},
}
"""What is trained, in the tables of a job file."""


def main(runs: str) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, inputs = build(BATCH)
    targets = inputs[:, :CLASSES].argmax(dim=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with Recorder(runs, job=JOB) as recorder:
        for _ in range(STEPS):
            recorder.step_begin()
            loss = nn.functional.cross_entropy(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            recorder.step_end()
    print(f"loss {loss.item():.3f}; a run was added to {runs}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "runs.jsonl")
