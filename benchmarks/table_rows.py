"""Turns rows of published tables into runs, where a job can say what was measured.

Each function takes a row (texts by column) and returns a run, or raises ``LeftOut`` with the reason. What a
table does not state and was filled in stands in ``provenance.inferred``, what was computed from which printed
figure in ``provenance.derived``.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

from table_models import SEGMENT

Row = Mapping[str, str]
Run = dict[str, Any]

MODELS = "table_models.py"


class LeftOut(Exception):
    """Why a row is no run."""


def number(row: Row, column: str, why: str) -> float:
    """A figure above zero."""
    try:
        value = float(row[column])
    except ValueError:
        value = 0.0
    if not value > 0:
        raise LeftOut(why)
    return value


def run(
    model: Mapping[str, Any],
    training: Mapping[str, Any],
    cluster: Mapping[str, Any],
    measured: Mapping[str, float],
    provenance: Mapping[str, Any],
    plan: Mapping[str, Any] | None = None,
) -> Run:
    job = {"model": dict(model), "training": {"mode": "train", **training}, "cluster": dict(cluster)}
    if plan:
        job["plan"] = dict(plan)
    return {"job": job, "measured": dict(measured), "provenance": dict(provenance)}


def own(function: str, **args: Any) -> dict[str, Any]:
    """A model of ``table_models.py``."""
    return {"source": "python", "name": f"{MODELS}:{function}"} | ({"args": args} if args else {})


# lambdal/deeplearning-benchmark: NVIDIA's DeepLearningExamples on workstations and clouds

_UNCLEAR_DEVICES = {"a100": "PCIe or SXM", "v100": "PCIe or SXM"}
_LAMBDA_DEVICES = {"v100-16gb": "v100-sxm-16gb"}
"""Lambda's cloud has one V100 of 16 GB, which other rows call SXM."""
_MEMORY_BYTES = {"v100-sxm-16gb": 16 * 2**30}
"""Of devices that are sold with more too."""
_WITH_TF32 = re.compile(r"a\d|rtx-30|rtx-a")
_LAMBDA_OTHERS = {
    "Transformer-XL-base": "no library has the model any longer, and memories of earlier segments",
    "Transformer-XL-large": "no library has the model any longer, and memories of earlier segments",
    "gnmt": "sequences of many lengths, which the table does not state",
    "tacotron2": "sequences of many lengths, which the table does not state",
    "maskrcnn": "images of many sizes, and kernels of its own",
}
_IMPOSSIBLE = {
    "pytorch/results/8xA100_80GB_SXM4/PyTorch_ncf_FP16": "22 times the samples per second of the same "
    "devices in other results"
}
_BERT = {
    "BERT-base-SQuAD": (768, 12),
    "BERT-large-SQuAD": (1024, 24),
}


def lambda_bench(row: Row) -> Run:
    name, device = row["model"], row["device"]
    if name in _LAMBDA_OTHERS:
        raise LeftOut(f"{name}: {_LAMBDA_OTHERS[name]}")
    throughput = number(row, "throughput", "no throughput: the run failed")
    if row["path"] in _IMPOSSIBLE:
        raise LeftOut(_IMPOSSIBLE[row["path"]])
    if device in _UNCLEAR_DEVICES:
        raise LeftOut(f"{device}: not stated whether {_UNCLEAR_DEVICES[device]}")
    if float(row["device0_used_memory_bytes"] or 0) > _MEMORY_BYTES.get(device, math.inf):
        raise LeftOut(f"{device}: more memory in use than it has, so it is another")
    batch = number(row, "global_batch", "no batch size")
    devices = int(row["devices"])
    if batch % devices:
        raise LeftOut("a batch that its devices do not share evenly")
    recent = row["stack"] == "pytorch-ngc22.09"
    if name == "waveglow" and row["precision"] == "amp" and recent:
        raise LeftOut("waveglow, amp in NGC 22.09: as fast as fp32, so what ran is unclear")
    inferred = ["cluster (links and host are not stated)", "training.optimizer (the example's script)"]
    model, training, samples = _lambda_model(name, row["precision"], recent, throughput, inferred)
    training |= {"global_batch": int(batch), "framework": "pytorch"}
    if training["precision"] == "fp32" and _WITH_TF32.match(device):
        training["precision"] = "tf32"
        inferred.append("training.precision (fp32 is TF32 on Ampere in NGC's containers)")
    measured = {"samples_per_s": samples, "step_time_s": batch / samples}
    return run(
        model,
        training,
        _lambda_cluster(row["system"], device, devices, row["nvlink"]),
        measured,
        {
            "source": "lambdal/deeplearning-benchmark",
            "path": row["path"],
            "label": f"{row['system']} {name} {row['precision']}",
            "stack": row["stack"],
            "torch": "1.13.0" if recent else "1.7.0",
            "inferred": inferred,
            "derived": {"step_time_s": "global_batch / throughput"},
            "note": "NVIDIA's DeepLearningExamples, whole training loop with data loading",
        },
    )


def _lambda_model(
    name: str, precision: str, recent: bool, throughput: float, inferred: list[str]
) -> tuple[dict[str, Any], dict[str, Any], float]:
    """Model, what is trained how, and samples per second."""
    # apex until 2020: O1 casts around operators, as autocast; O2 keeps weights in fp16 beside fp32 copies
    mixed: dict[str, Any] = {"precision": "amp-fp16"}
    halves: dict[str, Any] = {"precision": "fp16", "master_weights": True}
    kept = {"precision": "fp32"} if precision.startswith("fp32") else mixed
    by_level_2 = kept if precision.startswith("fp32") or recent else halves
    if name == "resnet50":
        inferred.append("training.channels_last (the script's default; the table does not state it)")
        training = {"image": 224, "classes": 1000, "optimizer": "sgd"}
        # the script's --fp16 of that time casts the network, norms apart
        training |= halves if precision == "fp16" else kept
        return {"source": "torchvision", "name": "resnet50"}, training, throughput
    if name in _BERT:
        width, layers = _BERT[name]
        inferred.append("model.config (vocabulary padded to 30528)")
        config = {
            "model_type": "bert", "hidden_size": width, "intermediate_size": 4 * width,
            "num_hidden_layers": layers, "num_attention_heads": width // 64,
            "max_position_embeddings": 512, "vocab_size": 30528, "attn_implementation": "eager",
        }  # fmt: skip
        model = {"source": "transformers", "task": "question-answering", "config": config}
        in_fp32 = precision.startswith("fp32")
        training = {"sequence": 384, "optimizer": "adam" if in_fp32 else "adam-fused"}
        return model, training | (kept if in_fp32 else halves), throughput
    if name == "SSD300-ResNet50":
        return own("ssd300"), {"optimizer": "sgd"} | by_level_2, throughput
    if name == "ncf":
        inferred.append("training.precision, model (the example's defaults over MovieLens-20M)")
        return own("neumf"), {"optimizer": "adam-fused"} | by_level_2, throughput
    if name == "waveglow":
        inferred.append(f"samples of {SEGMENT} audio samples (the example's segment length)")
        return own("waveglow"), {"optimizer": "adam"} | kept, throughput / SEGMENT
    raise LeftOut(f"{name}: not known")


def _lambda_cluster(system: str, device: str, devices: int, nvlink: str) -> dict[str, Any]:
    device = _LAMBDA_DEVICES.get(device, device)
    cluster: dict[str, Any] = {"device": device, "devices_per_node": devices, "nodes": 1}
    if system.startswith("p3."):
        return cluster | {"node": system}
    if system.endswith("A100_p4"):
        return cluster | {"node": "p4d.24xlarge"}
    if "a100-sxm" in device:
        return cluster | {"node": "hgx-a100"}
    if devices > 1:
        kind = "nvlink-mesh" if "v100-sxm" in device else "nvlink-pair" if nvlink == "yes" else "pcie"
        cluster["intra_node"] = {"kind": kind}
    return cluster


# BigScience on Jean Zay: Megatron-DeepSpeed on nodes of four V100

_GPT_WIDTH = 8192
_GPT_LAYERS = {"52B": 64, "39B": 48}
"""Of width 8,192, which gives the printed size within 1 %; the width that gives others is not clear."""
_SEQUENCES = {"experiments/tr3m-1B3.md": 2048, "experiments/tr8-104B.md": 2048}
_BILLIONS = {"experiments/tr3m-1B3.md": 1.3, "experiments/tr8-104B.md": 104.0}
"""As the sources put it into TFLOP/s = billions x passes x 2 x sequence x batch / (seconds x devices)."""


def bigscience_v100(row: Row) -> Run:
    if row["path"] == "experiments/gpt2-16gb-nodes.md":
        raise LeftOut("architecture not stated, nor the batch")
    if row["path"] == "experiments/gpt2.md":
        return _bigscience_gpt2(row)
    return _bigscience_printed(row)


def _bigscience_gpt2(row: Row) -> Run:
    printed = json.loads(row["row"])
    layers = _GPT_LAYERS.get(printed.get("Size", ""))
    if "ZeRO" in row["section"] or "Zero" in row["section"]:
        raise LeftOut("ZeRO with offload: what of it is offloaded is not stated")
    if layers is None:
        raise LeftOut("architecture not stated, and not told by the number of parameters")
    time = re.fullmatch(r"([\d.]+)s?", printed["Speed"])
    assert time is not None
    data, pipeline = int(printed["DP"]), int(printed["PP"])
    tensor = int(row["devices"]) // (data * pipeline)
    micro, batch = int(float(row["micro_batch"])), int(float(row["global_batch"]))
    if tensor != 4:
        raise LeftOut("degrees that do not make four devices of a tensor group")
    plan = {"data": data, "tensor": tensor, "pipeline": pipeline, "micro_batch": micro, "recompute": "full"}
    if printed.get("DS") == "Y":
        plan["shard"] = "zero1"
    return _bigscience_run(
        row,
        {"n_embd": _GPT_WIDTH, "n_layer": layers, "n_head": 32, "n_positions": 1024},
        {"global_batch": batch, "sequence": 1024},
        plan,
        float(time[1]),
        [
            "model.config (width and layers by the number of parameters; heads as in the 104B model)",
            "plan.tensor (TP_SIZE in the text above the table)",
            *(["plan.shard (DeepSpeed's ZeRO-1)"] if "shard" in plan else []),
        ],
    )


def _bigscience_printed(row: Row) -> Run:
    """Rows whose batch only the printed TFLOP/s tell."""
    printed = json.loads(row["row"])
    time, teraflops = float(printed["Speed"]), float(printed["TFlops"])
    sequence, billions = _SEQUENCES[row["path"]], _BILLIONS[row["path"]]
    devices = int(row["devices"])
    batch, recompute = 0, "full"
    for passes, how in ((4, "full"), (3, "none")):
        # TFLOP/s = billions x passes x 2 x sequence x batch / (time x devices x 1000)
        found = teraflops * time * devices * 1000 / (billions * passes * 2 * sequence)
        # Seconds are printed whole: half of one is the uncertainty.
        nearest = next((one for one in (512, 1024, 2048) if abs(found / one - 1) < 0.5 / time + 0.005), 0)
        if nearest:
            batch, recompute = nearest, how
            break
    if not batch:
        raise LeftOut("TFLOP/s that no usual batch gives")
    hints = json.loads(row["architecture_hints"])
    large = "NHIDDEN" in hints
    config: dict[str, int] = {
        "n_embd": hints["NHIDDEN"] if large else 2048,
        "n_layer": hints["NLAYERS"] if large else 24,
        "n_head": hints["NHEADS"] if large else 16,
        "n_positions": sequence,
    }
    plan: dict[str, Any] = {
        "data": int(printed["DP"]), "tensor": int(printed["TP"]), "pipeline": int(printed["PP"]),
        "micro_batch": int(printed["MBS"]), "recompute": recompute, "shard": "zero1",
    }  # fmt: skip
    inferred = [
        "training.global_batch (the one that gives the printed TFLOP/s)",
        "plan.recompute (four passes in the printed TFLOP/s, or three)",
    ]
    if not large:
        inferred.append("model.config (the published 1.3B model of that experiment)")
    if plan["pipeline"] > config["n_layer"]:
        raise LeftOut("more stages than the layers in the text above the table")
    if row["section"] == "BNB":
        raise LeftOut("bitsandbytes: which of the optimizer's states are in 8 bits is not stated")
    return _bigscience_run(row, config, {"global_batch": batch, "sequence": sequence}, plan, time, inferred)


def _bigscience_run(
    row: Row,
    config: Mapping[str, Any],
    training: Mapping[str, Any],
    plan: Mapping[str, Any],
    time_s: float,
    inferred: list[str],
) -> Run:
    rows = 128 * int(plan["tensor"])
    vocabulary = -(-50257 // rows) * rows
    device = "v100-sxm-16gb" if row["section"] == "16GB node" else row["device"]
    return run(
        {
            "source": "transformers",
            "task": "causal-lm",
            "config": {"model_type": "gpt2", **config, "vocab_size": vocabulary},
        },
        {
            **training,
            "precision": "fp16",
            "master_weights": True,
            "optimizer": "adam",
            "framework": "megatron",
            "framework_version": "2.5",
        },
        {
            "device": device,
            "devices_per_node": 4,
            "nodes": int(row["nodes"]),
            "intra_node": {"kind": "nvlink-mesh"},
            "inter_node": {"kind": "infiniband", "bandwidth": "400 Gb/s", "nics": 4},
        },
        {"step_time_s": time_s},
        {
            "source": "bigscience-workshop/bigscience",
            "path": row["path"],
            "line": row["line"],
            "commit": row["commit"],
            "label": f"{row['model']} {row['section']}",
            "host": "Intel Xeon Gold 6248",
            "inferred": [
                *inferred,
                "cluster (Jean Zay: four V100 and four Omni-Path links of 100 Gb/s in a node)",
                "training.framework_version (Megatron-LM of spring 2021)",
            ],
        },
        plan,
    )


# NeuSight: GPT-2 large on four A100


def neusight_4gpu(row: Row) -> Run:
    degrees = {name: int(row[name]) for name in ("data", "tensor", "pipeline")}
    plan: dict[str, Any] = dict(degrees)
    plan["micro_batch"] = int(row["global_batch"]) // degrees["data"] // int(row["micro_batches"])
    if degrees["pipeline"] > 1:
        plan["schedule"] = "gpipe"
    return run(
        {
            "source": "transformers",
            "task": "causal-lm",
            "config": {
                "model_type": "gpt2", "n_embd": 1280, "n_layer": 36, "n_head": 20, "n_positions": 1024,
                "vocab_size": 50257, "attn_implementation": "eager",
            },
        },
        {
            "global_batch": int(row["global_batch"]),
            "sequence": int(row["sequence"]),
            "precision": row["precision"],
            "optimizer": "sgd-plain",
            "framework": "pytorch",
        },
        {
            "device": row["device"],
            "devices_per_node": 4,
            "nodes": 1,
            "intra_node": {"kind": "nvswitch"},
        },
        {"step_time_s": number(row, "forward_backward_time_s", "no time")},
        {
            "source": "sitar-lab/NeuSight",
            "path": row["path"],
            "label": f"{row['model']} {row['devices']} devices",
            "inferred": [
                "training.optimizer (none ran; one without state is in the forecast, below 2 % of it)",
                "cluster.intra_node (links are not stated)",
                "plan.schedule",
            ],
            "derived": {"step_time_s": "forward plus backward time"},
        },
        plan,
    )  # fmt: skip


# modded-nanogpt: records of training GPT-2 on eight H100

_RECORDS: dict[str, tuple[dict[str, Any], str]] = {
    "2024-10-10_Muon": ({"vocabulary": 50_257, "heads": 12, "modern": False}, "none"),
    "2024-10-14_ModernArch": ({}, "none"),
    "2024-10-17_DistributedMuon": ({}, "zero1"),
    "2024-10-18_PyTorch25": ({}, "zero1"),
    "2024-11-03_UntieEmbed": ({"tied": False}, "zero1"),
}
"""Records whose scripts a plain model says: arguments of the model, and who updates matrices."""


def modded_nanogpt(row: Row) -> Run:
    if row["record"] not in _RECORDS:
        raise LeftOut("a model that later records changed in ways the table does not state")
    args, shard = _RECORDS[row["record"]]
    return run(
        own("speed_gpt", **args),
        {
            "global_batch": 512,
            "precision": "amp-bf16",
            "optimizer": "muon",
            "compile": True,
            "framework": "pytorch",
        },
        {"device": row["device"], "devices_per_node": 8, "nodes": 1, "node": "hgx-h100"},
        {"step_time_s": number(row, "step_time_s", "no step time")},
        {
            "source": "KellerJordan/modded-nanogpt",
            "path": row["path"],
            "label": row["record"],
            "torch": row["torch"].split("+")[0],
            "inferred": [
                "model (the record's script, from its description)",
                "training.global_batch (8*64 sequences of 1,024 tokens)",
                "cluster.node",
                *(["plan.shard (Newton-Schulz of each matrix on one rank)"] if shard != "none" else []),
            ],
        },
        {"data": 8, "micro_batch": 64, "shard": shard},
    )
