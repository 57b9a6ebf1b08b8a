"""Writes the files that launch a job: of Megatron-LM, torchtitan, plain PyTorch, DeepSpeed and accelerate,
for Slurm, Kubernetes, SkyPilot and Ray, with a benchmark that holds the forecast against what is measured."""

from foretrain.launchers.writing.expected import Expected
from foretrain.launchers.writing.folder import TARGETS, launch_texts, refusal, write_launch

__all__ = ["TARGETS", "Expected", "launch_texts", "refusal", "write_launch"]
