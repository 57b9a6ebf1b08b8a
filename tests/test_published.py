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


PRODUCT = ["device", "dtype", "m", "n", "k", "latency_s", "kernel", "framework", "version"]
ATTENTION = ["device", "dtype", "batch", "sequence", "heads", "kv_heads", "head_dim", "latency_s", "kernel"]


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


def test_products_of_aiconfigurator(tmp_path: Path) -> None:
    def row(dtype: str, kernel: str, framework: str) -> dict[str, Any]:
        sizes = {"m": 256, "n": 512, "k": 1024}
        return {"device": "b200", "dtype": dtype, **sizes, "latency_s": 1e-5, "kernel": kernel,
                "framework": framework}  # fmt: skip

    write(
        tmp_path / "aic_gemm.csv.gz", PRODUCT,
        row("bfloat16", "torch.nn.functional.linear", "vllm"),
        row("fp8", "sglang_sgl_kernel_fp8_scaled_mm", "sglang"),
        row("fp8", "CutlassFP8ScaledMMLinearKernel", "vllm"),
        row("fp8_block", "sglang_deepgemm_gemm_nt_f8f8bf16", "sglang"),
        row("fp8_block", "DeepGemmFp8BlockScaledMMKernel", "vllm"),
        row("nvfp4", "sglang_flashinfer_cutedsl_nvfp4", "sglang"),
    )  # fmt: skip
    linear, plain, casting, blocks, packed = read_published(tmp_path)
    assert (linear.name, linear.inputs[1].strides) == ("mm", (1, 1024))
    assert {one.flops for one in (linear, plain, casting, blocks, packed)} == {2 * 256 * 512 * 1024}
    assert {one.name for one in (plain, casting, blocks, packed)} == {"_scaled_mm"}
    assert [one.args["library"] for one in (plain, casting, blocks, packed)] == [
        "cutlass", "cutlass", "deepgemm", "cutedsl"
    ]  # fmt: skip
    assert plain.inputs[2].shape == (256, 1)
    assert casting.bytes == plain.bytes + 256 * 1024, "its input is read in bf16"
    assert blocks.inputs[2].shape == (256, 8), "the host's time of the other framework is left out"
    assert packed.inputs[0].shape == (256, 512)


def test_attention_of_aiconfigurator_is_taken_where_it_is_the_kernel_s(tmp_path: Path) -> None:
    def row(seconds: float, shared: int, kernel: str) -> dict[str, Any]:
        sizes = {"batch": 2, "sequence": 512, "heads": 8, "kv_heads": shared, "head_dim": 64}
        return {"device": "h200-sxm-141gb", "dtype": "bfloat16", **sizes, "latency_s": seconds,
                "kernel": kernel}  # fmt: skip

    write(
        tmp_path / "aic_attention.csv.gz", ATTENTION,
        row(1e-3, 2, "vllm_flash_attn"), row(1e-3, 1, "vllm_flash_attn_fa3"),
        row(1e-4, 1, "vllm_flash_attn_fa3"), row(1e-3, 8, "vllm_flash_attn_fa3"),
    )  # fmt: skip
    flash, cudnn = read_published(tmp_path)
    assert flash.name == "_scaled_dot_product_flash_attention"
    assert cudnn.name == "_scaled_dot_product_cudnn_attention"
    assert [cudnn.inputs[0].shape, cudnn.inputs[1].shape] == [(2, 8, 512, 64), (2, 1, 512, 64)]
    assert cudnn.args == {"is_causal": True}
