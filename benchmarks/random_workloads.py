"""Draws random workloads to measure operators of: architectures of any family, in the ways that people run
them.

``python benchmarks/random_workloads.py --count 300 --seed 1 --out jobs.jsonl``, then ``foretrain measure ops
jobs.jsonl``.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import reading

DEVICE = "h200-sxm-141gb"
TEXT: dict[str, dict[str, Any]] = {
    "llama": {
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
    },
    "gpt2": {"n_embd": 1024, "n_layer": 4, "n_head": 16},
    "bert": {"num_hidden_layers": 4},
    "roberta": {"num_hidden_layers": 4, "max_position_embeddings": 1026},
    "qwen2": {
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
    },
    "gemma2": {
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
    },
    "opt": {"hidden_size": 1024, "num_hidden_layers": 4, "ffn_dim": 4096},
    "bloom": {"hidden_size": 1024, "n_layer": 4, "n_head": 16},
    "falcon": {"hidden_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 16},
    "phi3": {
        "hidden_size": 1536,
        "intermediate_size": 4096,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
    },
}
TASKS = {"bert": "masked-lm", "roberta": "masked-lm"}


def workload(draw: random.Random, architectures: Sequence[str]) -> dict[str, Any]:
    """One job on one device, forward only in two of five."""
    training: dict[str, Any] = {
        "mode": "infer" if draw.random() < 0.4 else "train",
        "precision": draw.choice(["fp32", "amp-bf16", "bf16", "amp-fp16", "tf32"]),
    }
    if draw.random() < 0.25:
        kind = draw.choice(list(TEXT))
        config = {
            "model_type": kind,
            "num_hidden_layers": 4,
            "vocab_size": 32000,
            "pad_token_id": 0,
            **TEXT[kind],
        }
        task = TASKS.get(kind, "causal-lm")
        model: dict[str, Any] = {"source": "transformers", "task": task, "config": config}
        training |= {"sequence": draw.choice([64, 128, 384, 512, 1024]), "optimizer": "adamw"}
        training["global_batch"] = draw.choice([1, 2, 4, 8, 16, 32])
    else:
        model = {"source": "timm", "name": draw.choice(architectures)}
        training |= {"channels_last": draw.random() < 0.3, "optimizer": draw.choice(["sgd", "adamw"])}
        training["global_batch"] = draw.choice([1, 2, 4, 8, 16, 32, 64, 128])
    return {"model": model, "training": training, "cluster": {"device": DEVICE}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    from foretrain.capture.sources.zoo import import_zoo, quiet_zoo_import

    quiet_zoo_import()
    timm = import_zoo("timm")
    draw = random.Random(arguments.seed)
    names = sorted({name.split(".")[0] for name in timm.list_models(pretrained=False)})
    small = [
        name for name in names if not any(word in name for word in ("huge", "giant", "gigantic", "xxl", "7b"))
    ]
    jobs = [workload(draw, small) for _ in range(arguments.count)]
    arguments.out.write_text("".join(json.dumps(job) + "\n" for job in jobs))


if __name__ == "__main__":
    reading.run(main)
