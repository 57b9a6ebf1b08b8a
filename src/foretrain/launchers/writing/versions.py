"""Names the versions that launch files are written for, and stamps files with them."""

from __future__ import annotations

from foretrain import __version__

VERSIONS = {
    "torch": "PyTorch 2.13",
    "megatron": "Megatron-LM core 0.20",
    "torchtitan": "torchtitan 0.3.0 and main of 2026-08-21",
    "torchtitan-toml": "torchtitan v0.2.2",
    "accelerate": "accelerate 1.15",
    "deepspeed": "DeepSpeed 0.19",
    "transformers": "transformers 5.22",
    "slurm": "Slurm 23.11",
    "kubeflow": "Kubeflow Trainer v2.3 (v1alpha1) and Kueue v0.19",
    "skypilot": "SkyPilot 0.14",
    "ray": "Ray 2.60",
}
"""Of each launcher, in words; keys change between versions, so every file says which it is for."""


def stamp(*names: str) -> str:
    """Write what a file says of itself, in one line."""
    return f"Written by {writer()} for {', '.join(VERSIONS[name] for name in names)}."


def writer() -> str:
    return f"foretrain {__version__}"
