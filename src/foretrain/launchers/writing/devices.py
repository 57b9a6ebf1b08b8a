"""Spells devices of the catalogue as SkyPilot, Ray and Kubernetes do."""

from __future__ import annotations

from foretrain.catalog import Device

SKYPILOT = {
    "k80": "K80", "p4": "P4", "p100-pcie-16gb": "P100", "p100-sxm-16gb": "P100", "v100-pcie-16gb": "V100",
    "v100-sxm-16gb": "V100", "v100-pcie-32gb": "V100-32GB", "v100-sxm-32gb": "V100-32GB", "t4": "T4",
    "a10": "A10", "a10g": "A10G", "a16": "A16", "a30": "A30", "a40": "A40", "a100-pcie-40gb": "A100",
    "a100-sxm-40gb": "A100", "a100-pcie-80gb": "A100-80GB", "a100-sxm-80gb": "A100-80GB", "l4": "L4",
    "l40": "L40", "l40s": "L40S", "h100-pcie-80gb": "H100", "h100-sxm-80gb": "H100",
    "h200-sxm-141gb": "H200", "h200-nvl-141gb": "H200", "gh200-96gb": "GH200", "gh200-144gb": "GH200",
    "b200": "B200", "b300": "B300", "gb200": "GB200", "gb300": "GB300", "rtx-5090": "RTX5090",
    "rtx-a4000": "A4000", "rtx-a5000": "A5000", "rtx-a6000": "A6000", "rtx-6000-ada": "RTX6000-Ada",
    "rtx-pro-6000": "RTXPRO6000", "mi300x": "MI300X",
}  # fmt: skip
"""Names of SkyPilot's catalogue."""

RAY = {
    "k80": "K80", "p4": "P4", "p100-pcie-16gb": "P100", "p100-sxm-16gb": "P100", "t4": "T4", "l4": "L4",
    "v100-pcie-16gb": "V100", "v100-sxm-16gb": "V100", "v100-pcie-32gb": "V100", "v100-sxm-32gb": "V100",
    "a10g": "A10G", "a100-pcie-40gb": "A100", "a100-sxm-40gb": "A100", "a100-pcie-80gb": "A100",
    "a100-sxm-80gb": "A100", "h100-pcie-80gb": "H100", "h100-sxm-80gb": "H100",
}  # fmt: skip
"""Types of ``ray.util.accelerators``; others are not asked for by type."""

_RESOURCES = {"nvidia": "nvidia.com/gpu", "amd": "amd.com/gpu"}


def kubernetes_resource(device: Device) -> str:
    """Name the resource that a pod asks for."""
    return "cpu" if device.is_cpu else _RESOURCES.get(device.vendor, "nvidia.com/gpu")


def cloud_of(node: str | None) -> str | None:
    """Whose machine a node of the catalogue is, by its name; None where it is no cloud's.

    >>> cloud_of("p5.48xlarge"), cloud_of("a3-highgpu-8g"), cloud_of("ND96isr_H100_v5"), cloud_of("dgx-h100")
    ('aws', 'gcp', 'azure', None)
    """
    if node is None:
        return None
    if "." in node:
        return "aws"
    if node.startswith(("a2-", "a3-", "a4-", "g2-")):
        return "gcp"
    return "azure" if node.startswith(("NC", "ND", "NV")) else None
