"""Jobs whose forecasts are frozen in ``golden.json``, and the command that freezes them anew and says what
changed.

``python tests/golden.py`` prints the differences; ``python tests/golden.py --write`` also keeps the new
figures.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from foretrain import predictors
from foretrain.job import Job
from foretrain.run import read_runs

FILE = Path(__file__).parent / "golden.json"
STEPS = Path(__file__).parents[1] / "data" / "h200_steps.jsonl"

ONE_DEVICE = {
    "resnet50": 4, "vgg16": 2, "densenet121": 1, "efficientnet_b0": 2, "mobilenet_v2": 1, "squeezenet1_0": 0,
    "googlenet": 1,
    "vit_b_32": 1, "shufflenet_v2_x1_0": 1, "llama": 3, "bert": 2, "gpt2": 4, "gpt_neox": 1, "t5": 1,
    "opt": 0, "distilbert": 1,
    "mistral": 0, "qwen2": 0, "xlnet": 0, "custom_models.py:lstm": 1, "custom_models.py:mlp": 0,
    "custom_models.py:transformer_encoder": 2, "custom_models.py:dcgan": 0, "convmixer_768_32": 1,
    "poolformer_s24": 2,
    "mobilevit_s": 1, "pit_s_224": 0, "resmlp_24_224": 3, "ghostnet_100": 1, "dla34": 2,
}  # fmt: skip
"""Which of the runs of a model in ``data/h200_steps.jsonl``, by its place among them."""

LLAMA = {
    "source": "transformers", "task": "causal-lm",
    "config": {"model_type": "llama", "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8,
               "num_attention_heads": 16, "num_key_value_heads": 8, "vocab_size": 32000},
}  # fmt: skip
MIXTRAL = {
    "source": "transformers", "task": "causal-lm",
    "config": {"model_type": "mixtral", "hidden_size": 1024, "intermediate_size": 2048,
    "num_hidden_layers": 4,
               "num_attention_heads": 16, "num_key_value_heads": 8, "num_local_experts": 8,
               "vocab_size": 32000},
}  # fmt: skip
RESNET = {"source": "torchvision", "name": "resnet50"}
BERT = {
    "source": "transformers",
    "task": "masked-lm",
    "config": {"model_type": "bert", "num_hidden_layers": 4, "max_position_embeddings": 1024},
}


def _text(batch: int, precision: str = "bf16", **more: Any) -> dict[str, Any]:
    return {
        "global_batch": batch,
        "sequence": 1024,
        "precision": precision,
        "optimizer": "adamw",
        "steps": 1000,
        **more,
    }


def _images(batch: int, precision: str = "amp-bf16", **more: Any) -> dict[str, Any]:
    return {
        "global_batch": batch,
        "image": 224,
        "precision": precision,
        "samples": 1281167,
        "epochs": 90,
        **more,
    }


def _node(name: str, nodes: int = 1) -> dict[str, Any]:
    return {"node": name, "nodes": nodes}


H100 = {"device": "h100-sxm-80gb"}
MANY_DEVICES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "compile": (LLAMA, _text(8, compile=True), H100, {}),
    "accumulation": (LLAMA, _text(16), H100, {"micro_batch": 2}),
    "recompute full": (LLAMA, _text(8), H100, {"recompute": "full"}),
    "recompute selective": (LLAMA, _text(8), H100, {"recompute": "selective"}),
    "offload": (LLAMA, _text(8), H100, {"offload": True}),
    "inference": (BERT, _text(16, mode="infer"), H100, {}),
    "megatron on one device": (LLAMA, _text(8, framework="megatron"), H100, {"micro_batch": 2}),
    "one CPU": (RESNET, _images(16, "fp32"), {"device": "cpu", "cores_per_device": 4}, {}),
    "DDP in a node": (RESNET, _images(512), _node("dgx-a100"), {}),
    "DDP, fp32, two nodes": (RESNET, _images(512, "fp32"), _node("g4dn.12xlarge", 2), {}),
    "DDP, compile": (BERT, _text(64, "amp-bf16", compile=True), _node("dgx-h100"), {}),
    "AdaptDL": (RESNET, _images(512, "fp32", framework="adaptdl"), _node("g4dn.12xlarge", 4),
    {"micro_batch": 16}),
    "ZeRO 1": (LLAMA, _text(64), _node("dgx-h100"), {"shard": "zero1"}),
    "ZeRO 2": (LLAMA, _text(64), _node("dgx-h100", 2), {"shard": "zero2", "micro_batch": 2}),
    "ZeRO 3": (LLAMA, _text(128, "amp-bf16"), _node("dgx-a100", 2), {"shard": "zero3", "micro_batch": 4}),
    "llm-foundry": (LLAMA, _text(64, "amp-bf16", framework="llm-foundry"), _node("hgx-a100-800g"),
    {"shard": "zero3"}),
    "torchtitan": (LLAMA, _text(64, framework="torchtitan"), _node("dgx-h100"), {"shard": "zero3",
    "recompute": "selective"}),
    "fms-fsdp": (LLAMA, _text(64, framework="fms-fsdp"), _node("dgx-h100"), {"shard": "zero3",
    "recompute": "full"}),
    "tensor": (LLAMA, _text(32), _node("dgx-h100"), {"tensor": 4}),
    "tensor and sequence, Megatron": (
        LLAMA, _text(32, framework="megatron"), _node("dgx-h100"), {"tensor": 8, "sequence_parallel": True,
        "micro_batch": 2},
    ),
    "pipeline, gpipe": (LLAMA, _text(32), _node("dgx-h100"), {"pipeline": 4, "micro_batch": 2,
    "schedule": "gpipe"}),
    "pipeline, 1f1b, nanotron": (
        LLAMA, _text(64, framework="nanotron"), _node("p5.48xlarge", 2), {"pipeline": 2, "tensor": 2,
        "micro_batch": 2},
    ),
    "pipeline, interleaved, Megatron": (
        LLAMA, _text(64, framework="megatron"), _node("dgx-h100", 2),
        {"pipeline": 4, "tensor": 2, "micro_batch": 1, "schedule": "interleaved", "virtual_stages": 2,
        "shard": "zero1"},
    ),
    "InternEvo": (LLAMA, _text(64, framework="internevo"), _node("dgx-a100", 2), {"tensor": 2,
    "shard": "zero1", "micro_batch": 2}),
    "fp8, Megatron": (LLAMA, _text(64, "fp8", framework="megatron"), _node("dgx-h100"), {"tensor": 2,
    "shard": "zero1", "micro_batch": 4}),
    "context": (LLAMA, _text(16), _node("dgx-h100"), {"context": 4}),
    "experts, Megatron": (
        MIXTRAL, _text(32, framework="megatron"), _node("gb200-nvl72", 2), {"expert": 4, "shard": "zero1",
        "micro_batch": 2},
    ),
    "experts": (MIXTRAL, _text(32), _node("dgx-h100"), {"expert": 8}),
    "offload, many": (LLAMA, _text(64), _node("dgx-h100"), {"shard": "zero2", "offload": True}),
    "four CPU workers": (RESNET, _images(64, "fp32"), {"device": "cpu", "cores_per_device": 2,
    "devices_per_node": 4}, {}),
    "parameter servers": (RESNET, _images(64, "fp32"), {"device": "cpu", "cores_per_device": 2, "nodes": 4},
    {"servers": 2}),
    "asynchronous": (
        RESNET, _images(64, "fp32"), {"device": "cpu", "cores_per_device": 2, "nodes": 4}, {"servers": 1,
        "asynchronous": True},
    ),
    "mixed, even": (
        RESNET, _images(512), {"groups": [{"device": "a100-sxm-80gb", "nodes": 2}, {"device": "v100-sxm-32gb",
        "nodes": 2}]}, {},
    ),
    "mixed, by speed": (
        RESNET, _images(512), {"groups": [{"device": "a100-sxm-80gb", "nodes": 2}, {"device": "v100-sxm-32gb",
        "nodes": 2}]},
        {"balance": "speed"},
    ),
}  # fmt: skip

BY_OTHERS = {
    "roofline": ("resnet50", "bert", "tensor", "ZeRO 3", "recompute full"),
    "scaledl": ("resnet50", "bert", "gpt2", "accumulation", "tensor", "ZeRO 3"),
}
"""Jobs that other white-box predictors than the default forecast too."""


def jobs() -> dict[str, Job]:
    """The frozen jobs by name."""
    by_label: dict[str, list[Job]] = {}
    for _, run in read_runs(STEPS):
        by_label.setdefault(run.job.workload.model.label, []).append(run.job)
    found = {label: by_label[label][place] for label, place in ONE_DEVICE.items()}
    for name, (model, training, cluster, plan) in MANY_DEVICES.items():
        found[name] = Job.read({"model": model, "training": training, "cluster": cluster, "plan": plan})
    return found


def cases() -> Iterator[tuple[str, str]]:
    """Predictor and job by name, for every frozen forecast."""
    for name in (*ONE_DEVICE, *MANY_DEVICES):
        yield predictors.DEFAULT, name
    for predictor, names in BY_OTHERS.items():
        yield from ((predictor, name) for name in names)


def figures(predictor: str, job: Job) -> dict[str, float]:
    """Everything that a forecast gives, by name: medians, and the lower and upper end of the 80 %
    interval."""
    forecast = predictors.get(predictor).predict(job)
    estimates = {**forecast.quantities, "cost": forecast.cost, "energy_j": forecast.energy_j}
    result: dict[str, float] = {}
    for name, estimate in estimates.items():
        if estimate is not None:
            result |= {name: estimate.median, f"{name} low": estimate.low, f"{name} high": estimate.high}
    return result | {f"memory: {name}": float(size) for name, size in forecast.memory_by_category.items()}


def differences(
    old: Mapping[str, float], new: Mapping[str, float], tolerance: float
) -> dict[str, tuple[float | None, float | None]]:
    """Figures that appear, vanish, or change by more than ``tolerance`` of their size."""
    return {
        name: (old.get(name), new.get(name))
        for name in sorted({*old, *new})
        if name not in old
        or name not in new
        or abs(old[name] - new[name]) > tolerance * max(abs(old[name]), abs(new[name]))
    }


def frozen() -> dict[str, dict[str, float]]:
    loaded: dict[str, dict[str, float]] = json.loads(FILE.read_text())
    return loaded


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="keep the new figures")
    parser.add_argument("--tolerance", type=float, default=1e-9, help="relative change that is not told")
    given = parser.parse_args()
    old = frozen() if FILE.exists() else {}
    known, new = jobs(), {}
    for predictor, name in cases():
        key = f"{predictor}: {name}"
        new[key] = figures(predictor, known[name])
        for figure, (before, after) in differences(old.get(key, {}), new[key], given.tolerance).items():
            if not figure.endswith((" low", " high")):
                change = f" ({after / before - 1:+.2%})" if before and after is not None else ""
                print(f"{key}: {figure}: {before} -> {after}{change}")
    if given.write:
        FILE.write_text(json.dumps(new, indent=1) + "\n")


if __name__ == "__main__":
    main()
