"""Compares our FLOP counts with torch.utils.flop_counter, operator by operator, on whole training steps.

    python benchmarks/flop_counts.py

Exits 1 when a count differs. The weight gradient of a grouped convolution is the one known difference:
torch's counter does not divide it by the number of groups, so those calls are compared after the division.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

import reading
from foretrain.api import make_job
from foretrain.capture.sources.models import load_model
from foretrain.capture.tracing.tracer import trace_step
from foretrain.graph import OpGraph

MODELS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("resnet50", {"batch": 8}),
    ("resnext50_32x4d", {"batch": 8}),
    ("mobilenet_v3_large", {"batch": 8}),
    ("efficientnet_b0", {"batch": 8, "precision": "amp-bf16"}),
    ("convnext_tiny", {"batch": 8, "precision": "amp-bf16"}),
    ("vit_b_16", {"batch": 8, "precision": "amp-bf16"}),
    ("swin_t", {"batch": 8}),
    ("densenet121", {"batch": 8}),
    ("timm:coatnet_0_rw_224", {"batch": 8}),
    ("gpt2", {"batch": 2, "precision": "bf16"}),
    ("bert-base", {"batch": 2, "precision": "amp-bf16"}),
    ("t5-small", {"batch": 2}),
    ("llama-3.2-1b", {"batch": 1, "sequence": 1024, "precision": "bf16"}),
)


def grouped_excess(graph: OpGraph) -> int:
    """What torch's counter adds for the weight gradients of grouped convolutions."""
    excess = 0
    for op in graph.ops:
        groups = op.operator.args.get("groups", 1)
        if op.operator.name == "convolution_backward" and groups > 1 and op.operator.args["output_mask"][1]:
            excess += op.operator.flops // sum(op.operator.args["output_mask"][:2]) * (groups - 1)
    return excess


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter).parse_args()
    wrong = 0
    for name, options in MODELS:
        job = make_job(name, **options)
        loaded = load_model(job.workload, job.micro_batch)
        training = job.workload.training
        with FlopCounterMode(display=False) as counter:
            graph = trace_step(
                loaded.module,
                loaded.inputs,
                loaded.loss,
                samples=job.micro_batch,
                precision=training.precision,
                optimizer=training.optimizer,
            )
        ours: Counter[str] = Counter()
        for op in graph.ops:
            ours[op.operator.name] += op.operator.flops
        theirs = Counter(
            {
                str(packet).removeprefix("aten."): count
                for packet, count in counter.get_flop_counts()["Global"].items()
            }
        )
        if "convolution_backward" in theirs:
            theirs["convolution_backward"] -= grouped_excess(graph)
        differing = {
            operator: (ours[operator], count) for operator, count in theirs.items() if ours[operator] != count
        }
        wrong += bool(differing)
        print(f"{name:28s} {sum(theirs.values()):>22,d}  {differing or 'equal'}")
    print(
        f"{len(MODELS) - wrong} of {len(MODELS)} models equal to the last digit (torch {torch.__version__})"
    )
    sys.exit(wrong > 0)


if __name__ == "__main__":
    reading.run(main)
