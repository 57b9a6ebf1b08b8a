"""Turns rows of MLPerf Training and of mmdetection's zoo into runs; ``table_rows.py`` has the others."""

from __future__ import annotations

import re
from typing import Any

from table_rows import LeftOut, Row, Run, number, own, run

# mmdetection: peak memory and time of detectors on eight V100

_CONFIG = re.compile(
    r"(?P<kind>faster|mask|retinanet|fcos)(?:-rcnn)?_(?P<body>r18|r50|r101|x101-32x4d|x101-64x4d|x101-32x8d)"
    r"(?P<caffe>-caffe)?_fpn(?P<head>_gn-head)?_?(?P<amp>amp-)?(?P<gn>gn-head)?-?(?P<epochs>1x|2x)_coco\.py"
)
_CONFIG_1 = re.compile(
    r"(?P<kind>Faster R-CNN|Mask R-CNN|RetinaNet) (?P<body>R-50|R-101|X-101-32x4d|X-101-64x4d)-FPN"
    r" (?P<style>caffe|pytorch) (?P<epochs>1x)"
)
_IMAGE_OF_PEAK = {"height": 800, "width": 1333}
"""The largest that a batch of images of one orientation is scaled to."""
_USUAL_IMAGE = {"height": 800, "width": 1066}
"""COCO's usual 480 x 640, scaled."""


def mmdetection_zoo(row: Row) -> Run:
    first = row["framework"].endswith("pytorch1.x")
    if first:
        match = _CONFIG_1.fullmatch(row["model"])
        folders_match = True
    else:
        path = row["config"]
        match = _CONFIG.fullmatch(path.rpartition("/")[2])
        folders_match = path.split("/")[-2:-1] in (["faster_rcnn"], ["mask_rcnn"], ["retinanet"], ["fcos"])
    if match is None or not folders_match:
        raise LeftOut("a detector, a head or a schedule that torchvision's parts do not make")
    if not row["accelerator"].endswith(("V100", "SXM2")) or row["devices"] != "8":
        raise LeftOut("another machine than the zoo's eight V100")
    in_gb = row["metric"] == "peak_memory_per_gpu"
    value = number(row, "value", "no figure")
    kind = {"Faster R-CNN": "faster", "Mask R-CNN": "mask", "RetinaNet": "retinanet"}.get(
        match["kind"], match["kind"]
    )
    body = match["body"].lower().replace("r-", "r").replace("x-", "x")
    args: dict[str, Any] = {"backbone": body, **(_IMAGE_OF_PEAK if in_gb else _USUAL_IMAGE)}
    if (match["style"] == "caffe") if first else match["caffe"]:
        args["caffe"] = True
    mixed = not first and bool(match["amp"])
    return run(
        own("batched_retinanet", one_kernel=True, **args)
        if kind == "retinanet"
        else own("detector", kind=kind, **args),
        {
            "global_batch": 16,
            "precision": "amp-fp16" if mixed else "fp32",
            "optimizer": "sgd",
            "framework": "pytorch",
        },
        {
            "device": "v100-sxm-32gb",
            "devices_per_node": 8,
            "nodes": 1,
            "node": "dgx-1-v100",
        },
        {"peak_memory_bytes": value * 1000 * 2**20} if in_gb else {"step_time_s": value},
        {
            "source": row["source"],
            "path": row["path"],
            "commit": row["commit"],
            "label": row["model"],
            "memory": "largest allocated on one rank (mmcv's log); 1 GB taken as 1,000 MiB",
            "inferred": [
                "training.global_batch (two images per device)",
                "model (torchvision's parts; norms as norm_eval has them; image of the usual size, for "
                "memory of the largest; one operator for the focal loss, which is one kernel)",
                "cluster (eight V100 behind NVLink)",
            ],
        },
        {"data": 8, "micro_batch": 2},
    )


# MLPerf Training

_ACCELERATORS = (
    (r"A100-SXM\d?-80GB", "a100-sxm-80gb"),
    (r"A100-SXM\d?-40GB", "a100-sxm-40gb"),
    (r"A100-PCIe-80GB", "a100-pcie-80gb"),
    (r"A100-PCIe-40GB", "a100-pcie-40gb"),
    (r"H100-SXM\d?-80GB", "h100-sxm-80gb"),
    (r"H100-PCIe-80GB", "h100-pcie-80gb"),
    (r"A30\b", "a30"),
    (r"A40\b", "a40"),
    (r"L40S\b", "l40s"),
    (r"L40\b", "l40"),
    (r"L4\b", "l4"),
)
_OPEN_IMAGES = 1_170_301
"""Images that an epoch of the RetinaNet benchmark has."""
_MLPERF_OTHERS = {
    "ResNet-50": "MXNet with norms fused into convolutions",
    "3D-UNet": "MXNet",
    "SSD-ResNet34": "MXNet, or a network of its own in half precision throughout",
    "BERT-large": "sequences without their padding, of many lengths",
    "MaskRCNN": "images of many sizes, and kernels of its own",
    "DLRM": "HugeCTR, tables over many devices",
    "DLRM-DCNv2": "HugeCTR, tables over many devices",
    "RNN-T": "sequences of many lengths",
    "GNMT": "sequences of many lengths",
    "Transformer-big": "sequences of many lengths",
    "MiniGo": "reinforcement learning",
    "GPT3-175B": "in the package already (foretrain validate)",
}


def mlperf_training(row: Row) -> Run:
    benchmark = row["benchmark"]
    if benchmark in _MLPERF_OTHERS:
        raise LeftOut(f"{benchmark}: {_MLPERF_OTHERS[benchmark]}")
    throughput = number(row, "throughput", "no throughput in the log")
    batch = int(number(row, "global_batch", "no batch size"))
    device = next(
        (name for pattern, name in _ACCELERATORS if re.search(pattern, row["accelerator"], re.IGNORECASE)), ""
    )
    if not device:
        raise LeftOut("an accelerator that is no GPU of NVIDIA, or not said exactly")
    cluster = _mlperf_cluster(row, device)
    if benchmark == "RetinaNet":
        if not 0.98 < float(row["train_samples"]) * batch / _OPEN_IMAGES < 1.05:
            raise LeftOut("RetinaNet: whether the log counts images or batches is unclear")
        rate = throughput * batch
        model = own("batched_retinanet", backbone="x50-32x4d", classes=264, frozen_norm=True)
        training: dict[str, Any] = {"precision": "amp-fp16", "optimizer": "adam-fused", "channels_last": True}
        training |= {"compile": True, "graphs": "step"}
        note = (
            "NVIDIA's implementation: losses of the whole batch, pointwise operators fused by the jit, CUDA "
            "graphs; stated as compiled"
        )
        derived = {"step_time_s": "1 / throughput, which the log counts in batches"}
    elif benchmark == "StableDiffusion-v2":
        rate = throughput
        model = {"source": "diffusion", "name": "stable-diffusion-2-1"}
        training = {"precision": "amp-fp16", "optimizer": "adamw-fused", "channels_last": True, "image": 512}
        training["graphs"] = "step"
        note = "the network alone: the frozen encoder of prompts, which ran too, is not in the job"
        derived = {"step_time_s": "global_batch / throughput"}
    else:
        raise LeftOut(f"{benchmark}: not known")
    devices = cluster["devices_per_node"] * cluster["nodes"]
    accumulation = int(float(row["gradient_accumulation"] or 1))
    if batch % (devices * accumulation):
        raise LeftOut("a batch that its devices do not share evenly")
    return run(
        model,
        {"global_batch": batch, "framework": "pytorch", **training},
        cluster,
        {"samples_per_s": rate, "step_time_s": batch / rate},
        {
            "source": f"mlcommons/training_results_{row['round']}",
            "path": row["path"],
            "commit": row["commit"],
            "label": f"{row['submitter']} {row['system']}",
            "host": row["cpu"],
            "container": row["framework"],
            "inferred": [
                "training.precision, training.optimizer, training.channels_last, training.compile, "
                "training.graphs (NVIDIA's implementation, which the others submitted too)",
                "cluster (links between devices by the product)",
            ],
            "derived": derived,
            "note": note,
        },
        {"data": devices, "micro_batch": batch // (devices * accumulation)},
    )


def _mlperf_cluster(row: Row, device: str) -> dict[str, Any]:
    devices, nodes = (
        int(number(row, "devices", "no number of devices")),
        int(number(row, "nodes", "no nodes")),
    )
    if devices % nodes:
        raise LeftOut("nodes with different numbers of devices")
    each = devices // nodes
    cluster: dict[str, Any] = {"device": device, "devices_per_node": each, "nodes": nodes}
    if "-sxm-" in device:
        if each == 8:
            return cluster | {"node": f"hgx-{device.partition('-')[0]}"}
        cluster["intra_node"] = {"kind": "nvlink-mesh"}
    elif each > 1:
        bridged = "nvbridge" in row["system"].lower()
        cluster["intra_node"] = {"kind": "nvlink-pair" if bridged else "pcie"}
    if nodes > 1:
        raise LeftOut("several nodes whose network is not stated")
    return cluster
