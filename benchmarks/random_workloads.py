"""Draws random workloads to measure operators of: architectures of any family, in the ways that people run
them.

``python benchmarks/random_workloads.py --count 300 --seed 1 --out jobs.jsonl``, then ``foretrain measure ops
jobs.jsonl``. With ``--adapters``, language models of any width whose layers have adapters of any rank.
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


def adapted(draw: random.Random) -> dict[str, Any]:
    """A training of adapters, of two layers and few words: what they add is in each layer."""
    kind = draw.choice(["llama", "llama", "qwen2", "mistral", "phi3", "opt", "gpt2", "bert"])
    width = 128 * draw.randint(6, 40)
    heads = width // draw.choice([64, 128])
    inner = 128 * round(width * draw.choice([2.0, 2.7, 3.5, 4.0, 5.8]) / 128)
    config: dict[str, Any] = {"model_type": kind, "num_hidden_layers": 2, "vocab_size": 4096}
    if kind == "gpt2":
        config = {"model_type": kind, "n_layer": 2, "vocab_size": 4096, "n_embd": width, "n_head": heads}
        config["n_positions"] = 4096
    else:
        config |= {"hidden_size": width, "num_attention_heads": heads}
        config |= {"ffn_dim" if kind == "opt" else "intermediate_size": inner, "pad_token_id": 0}
        shared = [one for one in (1, 2, 4, 8) if heads % one == 0]
        if kind in ("llama", "qwen2", "mistral", "phi3"):
            config["num_key_value_heads"] = heads // draw.choice(shared)
        if kind in ("bert", "opt"):
            config["max_position_embeddings"] = 4096
    precision, base = draw.choice(
        [("bf16", None), ("bf16", None), ("amp-bf16", "bf16"), ("amp-bf16", None), ("amp-fp16", "fp16")]
    )
    adapter: dict[str, Any] = {"kind": draw.choice(["lora", "lora", "qlora"])}
    adapter["rank"] = draw.choice([4, 8, 8, 16, 16, 32, 64, 128])
    adapter |= {} if base is None else {"base": base}
    if precision == "bf16" and draw.random() < 0.5:
        adapter["precision"] = "bf16"
    if draw.random() < 0.2:
        adapter["dropout"] = 0.05
    training: dict[str, Any] = {"mode": "train", "precision": precision, "optimizer": "adamw"}
    training["adapter"] = adapter
    training["sequence"] = draw.choice([128, 256, 512, 1024, 2048])
    training["global_batch"] = draw.choice([1, 2, 4, 8, 16])
    model = {"source": "transformers", "task": TASKS.get(kind, "causal-lm"), "config": config}
    return {"model": model, "training": training, "cluster": {"device": DEVICE}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--adapters", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    draw = random.Random(arguments.seed)
    if arguments.adapters:
        jobs = [adapted(draw) for _ in range(arguments.count)]
        arguments.out.write_text("".join(json.dumps(job) + "\n" for job in jobs))
        return
    from foretrain.capture.sources.zoo import import_zoo, quiet_zoo_import

    quiet_zoo_import()
    timm = import_zoo("timm")
    names = sorted({name.split(".")[0] for name in timm.list_models(pretrained=False)})
    small = [
        name for name in names if not any(word in name for word in ("huge", "giant", "gigantic", "xxl", "7b"))
    ]
    jobs = [workload(draw, small) for _ in range(arguments.count)]
    arguments.out.write_text("".join(json.dumps(job) + "\n" for job in jobs))


if __name__ == "__main__":
    reading.run(main)
