"""Lists operators of ranks of language models to measure: layers cut by tensor and context parallelism, with
sequences of 2,048 to 131,072 tokens.

``python benchmarks/rank_operators.py --known data/ops_h200*.parquet --out list.jsonl``, then ``foretrain
measure ops list.jsonl``. Models, degrees and sizes are drawn at random.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
from pathlib import Path
from typing import Any

import reading
from foretrain.capture import capture_rank
from foretrain.costs.measured import load_columns
from foretrain.errors import ForetrainError
from foretrain.graph.opset import communicates, traits
from foretrain.job import Job
from foretrain.measure.instances import Instance, collect, save_instances

WIDTHS = (
    (2048, 16, 128), (2560, 20, 128), (3072, 24, 128), (3584, 28, 128), (4096, 32, 128), (4608, 32, 128),
    (5120, 40, 128), (5376, 32, 168), (6144, 48, 128), (8192, 64, 128), (12288, 96, 128), (16384, 128, 128),
    (2048, 32, 64), (3072, 32, 96), (4096, 16, 256),
)  # fmt: skip
"""Hidden size, heads and their width."""
SEQUENCES = (2048, 4096, 8192, 8192, 16384, 32768, 65536, 131072)
MOST_FLOPS, MOST_BYTES = 3e13, 16e9
"""Of one operator that is measured: 50 ms and a few copies of its tensors."""


def jobs(count: int, seed: int) -> list[Job]:
    """One layer of a model on a node each."""
    draw = random.Random(seed)
    made: list[Job] = []
    while len(made) < count:
        hidden, heads, width = draw.choice(WIDTHS)
        groups = draw.choice([g for g in (1, 4, 8) if heads % g == 0])
        tensor, context = draw.choice((1, 1, 2, 4, 8)), draw.choice((1, 1, 1, 2, 4))
        sequence = draw.choice(SEQUENCES)
        if heads // groups % tensor or tensor * context > 8 or sequence // context > 65536:
            continue
        config = {
            "model_type": draw.choice(("llama", "llama", "qwen3", "gpt_neox")),
            "hidden_size": hidden, "num_attention_heads": heads, "num_key_value_heads": heads // groups,
            "head_dim": width, "intermediate_size": 256 * round(hidden * draw.uniform(2.5, 4.2) / 256),
            "num_hidden_layers": 1, "vocab_size": draw.choice((32000, 128256, 152064)),
            "max_position_embeddings": sequence,
        }  # fmt: skip
        if config["model_type"] == "gpt_neox":
            for name in ("num_key_value_heads", "head_dim"):
                del config[name]
        made.append(_job(config, sequence, draw.choice((1, 1, 2, 4)), tensor, context))
    return made


def _job(config: dict[str, Any], sequence: int, batch: int, tensor: int, context: int) -> Job:
    batch = max(1, min(batch, 32768 // sequence))
    training = {
        "global_batch": 8 * batch // (tensor * context),
        "sequence": sequence,
        "precision": "bf16",
        "optimizer": "sgd-plain",
    }
    plan = {"tensor": tensor, "context": context, "sequence_parallel": tensor > 1, "micro_batch": batch}
    model = {"source": "transformers", "task": "causal-lm", "config": config}
    return Job.read({"model": model, "training": training, "cluster": {"node": "dgx-h200"}, "plan": plan})


def _is_part_of_attention(one: Instance) -> bool:
    """Attention of fewer queries than keys: a context rank's, whose mask torch's own call does not have."""
    if traits(one.name).kind != "attention":
        return False
    first = int(traits(one.name).backward)
    return one.inputs[first].shape[2] != one.inputs[first + 1].shape[2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--known", type=Path, nargs="*", default=[], help="Datasets of measured operators.")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    known = {key for path in arguments.known for key in load_columns(path)["key"]}
    graphs = []
    for job in jobs(arguments.jobs, arguments.seed):
        try:
            graphs.append((capture_rank(job), "bf16"))
        except ForetrainError as error:
            print(f"left out: {error}", file=sys.stderr)
    drawn = [
        one
        for one in collect(graphs)
        if one.phase != "optimizer"
        and one.key not in known
        and not communicates(one.name)
        and not _is_part_of_attention(one)
        and one.flops < MOST_FLOPS
        and one.bytes < MOST_BYTES
    ]
    random.Random(arguments.seed).shuffle(drawn)
    heavy = [one for one in drawn if traits(one.name).kind in ("attention", "product")]
    light = [one for one in drawn if traits(one.name).kind not in ("attention", "product")]
    both = itertools.zip_longest(heavy, light[: len(heavy)])
    save_instances(arguments.out, [one for pair in both for one in pair if one is not None])


if __name__ == "__main__":
    reading.run(main)
