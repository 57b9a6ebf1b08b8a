"""Reads names of devices and nodes whatever their case, their separators and the words around them."""

from __future__ import annotations

import re

GIGABYTES = re.compile(r"\d+gb")
SAME_MEMORY = 0.05
"""How far the memory of a device may be from the size in its name, as a share."""

_SAYS_NOTHING = frozenset(
    "nvidia amd intel tesla geforce quadro instinct radeon graphics gpu accelerator card generation "
    "ac edition workstation server blackwell oam mega hbm hbm2 hbm2e hbm3 hbm3e gddr6 gddr6x gddr7".split()
)
"""Words around the name of a device that no other device is told from it by."""


def plain(name: str) -> str:
    """Names match whatever their case and separators: "RTX 3090" is rtx-3090."""
    return name.strip().lower().replace(" ", "-").replace("_", "-")


def telling_words(name: str) -> frozenset[str]:
    """List the words that tell a device from others in a name, in any order.

    >>> sorted(telling_words("NVIDIA A100 80GB PCIe")), sorted(telling_words("Tesla V100-SXM2-32GB"))
    (['80gb', 'a100', 'pcie'], ['32gb', 'sxm', 'v100'])
    """
    text = re.sub(r"\b(\d+)\s*-?(gib|gb|g)\b", r"\1gb", plain(name))
    text = re.sub(r"\bsxm\d\b", "sxm", re.sub(r"\b(rtx|gtx)(?=[a-z]?\d)", r"\1-", text))
    text = re.sub(r"\blaptop\b|\bmax-q\b", "mobile", re.sub(r"(?<=\d{4})(ti|super)\b", r"-\1", text))
    return frozenset(re.split(r"[^a-z0-9.]+", text)) - _SAYS_NOTHING - {""}
