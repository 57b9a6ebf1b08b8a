"""Published operator sets, read as calls of torch's operators: small files in the formats of the real
ones."""

from __future__ import annotations

import csv
import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from foretrain.errors import InputError
from foretrain.measure.published import read_published

ETS = ["op", "phase", "dtype", "shape", "device_s"]
NEUSIGHT = [
    "device",
    "op",
    "B",
    "M",
    "N",
    "K",
    "H",
    "c_in",
    "c_out",
    "kernel",
    "size",
    "stride",
    "padding",
    "latency_s",
]


def write(path: Path, columns: list[str], *rows: dict[str, Any]) -> None:
    with gzip.open(path, "wt", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)


def ets(op: str, phase: str, dtype: str, **shape: Any) -> dict[str, Any]:
    return {"op": op, "phase": phase, "dtype": dtype, "shape": json.dumps(shape), "device_s": 1e-4}


def test_a_folder_without_them_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"has none of ets_t4\.csv\.gz"):
        list(read_published(tmp_path))


def test_ets(tmp_path: Path) -> None:
    conv = {"in": [2, 8, 16, 16], "weight": [4, 8, 3, 3], "stride": [2, 2], "pad": [1, 1], "groups": 1}
    write(
        tmp_path / "ets_t4.csv.gz", ETS,
        ets("conv2d", "forward", "fp16", **conv), ets("conv2d", "backward", "fp16", **conv),
        ets("batch_norm", "forward", "fp16", **{"in": [2, 8, 4, 4]}), ets("batch_norm", "forward", "fp32",
        **{"in": [2, 8, 4, 4]}),
        ets("linear", "forward", "fp32", **{"in": [2, 5, 8], "weight": [16, 8], "bias": True}),
        ets("nothing_known", "forward", "fp32"),
    )  # fmt: skip
    found = {f"{one.name} {one.inputs[0].dtype}": one for one in read_published(tmp_path)}
    assert found.keys() == {
        "convolution float16", "convolution_backward float16", "native_batch_norm float16",
        "cudnn_batch_norm float32", "addmm float32",
    }  # fmt: skip
    assert {one.device for one in found.values()} == {"t4"}
    forward, backward = found["convolution float16"], found["convolution_backward float16"]
    assert forward.flops == 2 * (2 * 4 * 8 * 8) * 8 * 3 * 3
    assert forward.bytes == 2 * (2 * 8 * 16 * 16 + 4 * 8 * 3 * 3 + 2 * 4 * 8 * 8)
    assert backward.flops == 2 * forward.flops
    assert found["addmm float32"].flops == 2 * 10 * 8 * 16


def test_neusight(tmp_path: Path) -> None:
    write(
        tmp_path / "neusight_fp32.csv.gz", NEUSIGHT,
        {"device": "p4", "op": "bmm", "B": 2, "M": 3, "N": 4, "K": 5, "latency_s": 1e-3},
        {"device": "p4", "op": "addu", "B": 2, "H": 8, "latency_s": 1e-3},
        {"device": "p4", "op": "ln", "B": 2, "H": 8, "latency_s": 1e-3},
        {"device": "a100-pcie-80gb", "op": "conv", "B": 1, "c_in": 3, "c_out": 4, "kernel": 3, "size": 8,
        "stride": 1, "padding": 1, "latency_s": 1e-3},
    )  # fmt: skip
    found = {one.name: one for one in read_published(tmp_path)}
    assert found.keys() == {"bmm", "add", "native_layer_norm"}, "convolutions without TF32 are of no job"
    assert found["bmm"].flops == 2 * 2 * 3 * 4 * 5
    assert len(found["add"].inputs) == 1
