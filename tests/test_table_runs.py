"""Rows of published tables become runs that the product reads, or say why not; all rows here are made up."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from foretrain.capture import capture_job
from foretrain.evaluate import evaluate
from foretrain.predictors.roofline import RooflinePredictor
from foretrain.run import Run

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"

LAMBDA = {
    "system": "A6000",
    "device": "rtx-a6000",
    "nvlink": "",
    "devices": "2",
    "model": "resnet50",
    "precision": "amp",
    "global_batch": "128",
    "stack": "pytorch-ngc22.09",
    "throughput": "1000",
    "device0_used_memory_bytes": "",
    "path": "results/a",
}
BIGSCIENCE = {
    "device": "v100-sxm-32gb",
    "devices": "64",
    "nodes": "16",
    "model": "gpt-52B",
    "global_batch": "1024",
    "micro_batch": "4",
    "section": "Megatron",
    "path": "experiments/gpt2.md",
    "line": "1",
    "commit": "c",
    "architecture_hints": "{}",
    "row": json.dumps({"Size": "52B", "DP": "1", "PP": "16", "Speed": "100s", "TFlops": "50"}),
}
PRINTED = {
    **BIGSCIENCE,
    "devices": "8",
    "nodes": "2",
    "path": "experiments/tr3m-1B3.md",
    "section": "32GB node",
}
NEUSIGHT = {
    "model": "gpt2_large",
    "device": "a100-sxm-40gb",
    "devices": "4",
    "precision": "fp32",
    "global_batch": "4",
    "sequence": "1024",
    "data": "1",
    "tensor": "4",
    "pipeline": "1",
    "micro_batches": "1",
    "forward_backward_time_s": "0.5",
    "path": "p",
}
NANOGPT = {
    "record": "2024-10-18_PyTorch25",
    "device": "h100-sxm-80gb",
    "step_time_s": "0.2",
    "path": "p",
    "torch": "2.5.0+cu124",
}
ZOO = {
    "source": "zoo",
    "model": "faster",
    "config": "configs/faster_rcnn/faster-rcnn_r50_fpn_1x_coco.py",
    "accelerator": "V100",
    "devices": "8",
    "framework": "mmdetection",
    "metric": "peak_memory_per_gpu",
    "value": "4.0",
    "path": "p",
    "commit": "c",
}
MLPERF = {
    "benchmark": "RetinaNet", "accelerator": "NVIDIA A100-SXM4-80GB", "devices": "8", "nodes": "1",
    "global_batch": "256", "throughput": "4.0", "train_samples": "4572", "gradient_accumulation": "1", "round": "v9",
    "submitter": "s", "system": "x", "cpu": "AMD EPYC 7742", "framework": "PyTorch", "path": "p", "commit": "c",
}  # fmt: skip


@pytest.fixture(scope="module")
def tables() -> Iterator[Any]:
    sys.path.insert(0, str(BENCHMARKS))
    try:
        import tables

        yield tables
    finally:
        sys.path.remove(str(BENCHMARKS))


def converted(tables: Any, name: str, row: dict[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = tables.TABLES[name][1](row)
    return found


@pytest.mark.parametrize(
    ("name", "row"),
    [
        *(
            ("lambda_bench", {**LAMBDA, "model": model, "precision": precision})
            for model in ("resnet50", "BERT-base-SQuAD", "SSD300-ResNet50", "ncf")
            for precision in ("amp", "fp32/tf32")
        ),
        ("lambda_bench", {**LAMBDA, "model": "waveglow", "precision": "fp32/tf32"}),
        ("bigscience_v100", BIGSCIENCE),
        ("neusight_4gpu", NEUSIGHT),
        ("modded_nanogpt", NANOGPT),
        ("mmdetection_zoo", ZOO),
        ("mlperf_training", MLPERF),
        ("mlperf_training", {**MLPERF, "benchmark": "StableDiffusion-v2", "throughput": "900"}),
    ],
)
def test_a_row_becomes_a_run_that_is_read(tables: Any, name: str, row: dict[str, str]) -> None:
    run = Run.read(converted(tables, name, row))
    assert run.measured
    assert run.provenance["inferred"]


def test_a_batch_is_that_of_all_devices_and_gives_the_time(tables: Any) -> None:
    run = converted(tables, "lambda_bench", LAMBDA)
    assert run["measured"] == {"samples_per_s": 1000.0, "step_time_s": 0.128}
    assert run["job"]["cluster"]["intra_node"] == {"kind": "pcie"}
    mlperf = converted(tables, "mlperf_training", MLPERF)
    assert mlperf["measured"]["step_time_s"] == 0.25  # its log counts batches


def test_fp32_is_tf32_where_the_device_has_it(tables: Any) -> None:
    for device, expected in (("rtx-a6000", "tf32"), ("rtx-2080-ti", "fp32"), ("a100-sxm-40gb", "tf32")):
        run = converted(tables, "lambda_bench", {**LAMBDA, "device": device, "precision": "fp32/tf32"})
        assert run["job"]["training"]["precision"] == expected


@pytest.mark.parametrize(("teraflops", "recompute"), [("48.0", "full"), ("36.0", "none")])
def test_printed_teraflops_tell_batch_and_recomputation(tables: Any, teraflops: str, recompute: str) -> None:
    # 1.3 billion parameters x 4 (or 3) passes x 2 x 2048 x 512 / (28.4 s x 8 devices) is 48.0 (or 36.0) TFLOP/s
    printed = {"DP": "8", "TP": "1", "PP": "1", "MBS": "2", "Speed": "28.4", "TFlops": teraflops}
    run = converted(tables, "bigscience_v100", {**PRINTED, "row": json.dumps(printed)})
    assert run["job"]["training"]["global_batch"] == 512
    assert run["job"]["plan"]["recompute"] == recompute


@pytest.mark.parametrize(
    ("name", "row", "reason"),
    [
        ("lambda_bench", {**LAMBDA, "throughput": ""}, "the run failed"),
        ("lambda_bench", {**LAMBDA, "global_batch": ""}, "no batch size"),
        ("lambda_bench", {**LAMBDA, "device": "v100"}, "PCIe or SXM"),
        ("lambda_bench", {**LAMBDA, "model": "gnmt"}, "sequences of many lengths"),
        (
            "lambda_bench",
            {**LAMBDA, "device": "v100-sxm-16gb", "device0_used_memory_bytes": "3e10"},
            "more memory in use",
        ),
        (
            "bigscience_v100",
            {**BIGSCIENCE, "row": json.dumps({"Size": "18B", "Speed": "1s"})},
            "architecture",
        ),
        (
            "bigscience_v100",
            {**PRINTED, "row": json.dumps({"Speed": "50", "TFlops": "1"})},
            "no usual batch",
        ),
        ("modded_nanogpt", {**NANOGPT, "record": "2026-01-01_Other"}, "does not state"),
        ("mmdetection_zoo", {**ZOO, "config": "configs/htc/htc_r50_fpn_1x_coco.py"}, "torchvision"),
        ("mmdetection_zoo", {**ZOO, "accelerator": "TITANXP"}, "another machine"),
        ("mlperf_training", {**MLPERF, "benchmark": "MiniGo"}, "reinforcement"),
        ("mlperf_training", {**MLPERF, "accelerator": "TPU v3"}, "no GPU"),
        ("mlperf_training", {**MLPERF, "train_samples": "1170301"}, "images or batches"),
    ],
)
def test_what_a_job_cannot_say_is_left_out_with_a_reason(
    tables: Any, name: str, row: dict[str, str], reason: str
) -> None:
    with pytest.raises(tables.LeftOut, match=reason):
        converted(tables, name, row)


def written(path: Path, rows: list[dict[str, str]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def test_tables_become_files_that_evaluate_scores(
    tables: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tables").mkdir()
    written(tmp_path / "tables" / "lambda_bench.csv", [LAMBDA, {**LAMBDA, "model": "gnmt"}])
    out = tmp_path / "out"
    arguments = ["tables.py", "--data", str(tmp_path), "--out", str(out), "--only", "lambda_bench"]
    monkeypatch.setattr(sys, "argv", arguments)
    tables.main()
    assert "1 runs, 1 rows left out" in capsys.readouterr().out
    assert list(json.loads((out / "left_out.json").read_text())) == ["lambda_bench"]
    results = evaluate([out / "lambda_bench.jsonl"], predictors=[RooflinePredictor()]).results
    assert {result.quantity for result in results} >= {"step_time_s"}


@pytest.mark.parametrize("function", ["ssd300", "neumf", "waveglow", "batched_retinanet"])
def test_models_can_be_traced(function: str) -> None:
    job: dict[str, dict[str, Any]] = {
        "model": {"source": "python", "name": f"{BENCHMARKS / 'table_models.py'}:{function}"},
        "training": {"global_batch": 2},
        "cluster": {"device": "h100-sxm-80gb"},
    }
    if function == "batched_retinanet":
        job["model"] |= {"args": {"height": 128, "width": 160, "backbone": "r18"}}
    graph = capture_job(Run.read({"job": job, "measured": {"step_time_s": 1.0}}).job)
    assert graph.ops
