"""Reads the files that people launch trainings with, and makes the job that they describe.

A shell script of Megatron-LM, torchrun, accelerate, DeepSpeed or Slurm, the JSON of DeepSpeed and of
transformers' Trainer, the YAML of accelerate, Automodel, axolotl and LLaMA-Factory, the TOML and the Python
of torchtitan, recipes of Megatron-Bridge. Nothing of them is run. ``docs/launchers.md`` lists the keys.
"""

from foretrain.launchers.launch import SUFFIXES, Launch, read_launch

__all__ = ["SUFFIXES", "Launch", "read_launch"]
