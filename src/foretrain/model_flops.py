"""Holds the parameters and the FLOPs of a job's step, and what a time per step makes of them: FLOP/s and
MFU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from foretrain.estimate import Estimate


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFlops:
    """Counts FLOPs and parameters of the whole job: all ranks and micro-batches of one optimizer step
    together."""

    parameters: int
    """Of the whole model, each shared one counted once."""
    trainable: int | None
    """Those of them that are trained; None where the graph does not tell."""
    flops: float
    """Of the forward and the backward pass as the model defines them: without what is computed again, and
    without the optimizer. A multiply-add counts as two."""
    recomputed: float
    """What the plan's recomputation adds to them."""
    samples: int
    tokens: int | None
    """Samples and, where they are sequences, tokens of a step."""
    devices: int
    peak_flops_per_s: float | None
    """Dense, of all devices together, in ``peak_format``; None for CPUs, which the catalogue knows by their
    kind alone."""
    peak_format: str

    @property
    def per_sample(self) -> float:
        return self.flops / self.samples

    @property
    def per_token(self) -> float | None:
        return self.flops / self.tokens if self.tokens else None

    @property
    def peak_per_device(self) -> float | None:
        return None if self.peak_flops_per_s is None else self.peak_flops_per_s / self.devices

    def rate(self, step_time: Estimate) -> Estimate:
        """Model FLOP/s of a device."""
        return step_time.inverse(self.flops / self.devices)

    def mfu(self, step_time: Estimate) -> Estimate | None:
        """Model FLOPs utilisation: model FLOPs over what the devices could do in the time at their peak."""
        return step_time.inverse(self.flops / self.peak_flops_per_s) if self.peak_flops_per_s else None

    def hfu(self, step_time: Estimate) -> Estimate | None:
        """Hardware FLOPs utilisation: the same with what is computed again."""
        done = self.flops + self.recomputed
        return step_time.inverse(done / self.peak_flops_per_s) if self.peak_flops_per_s else None

    def samples_per_device(self, step_time: Estimate) -> Estimate:
        """Samples per second of a device."""
        return step_time.inverse(self.samples / self.devices)

    def tokens_per_device(self, step_time: Estimate) -> Estimate | None:
        """Tokens per second of a device."""
        return step_time.inverse(self.tokens / self.devices) if self.tokens else None

    def to_dict(self, step_time: Estimate | None) -> dict[str, Any]:
        """Plain values; rates are estimates where the time of a step is known."""
        rates: dict[str, Estimate | None] = {}
        if step_time is not None:
            rates = {
                "flops_per_s_per_device": self.rate(step_time),
                "samples_per_s_per_device": self.samples_per_device(step_time),
                "tokens_per_s_per_device": self.tokens_per_device(step_time),
                "mfu": self.mfu(step_time),
                "hfu": self.hfu(step_time),
            }
        return {
            "parameters": self.parameters,
            "trainable_parameters": self.trainable,
            "flops_per_step": self.flops,
            "recomputed_flops_per_step": self.recomputed,
            "flops_per_sample": self.per_sample,
            "flops_per_token": self.per_token,
            "peak_flops_per_s_per_device": self.peak_per_device,
            "peak_format": self.peak_format,
            **{name: None if rate is None else rate.to_dict() for name, rate in rates.items()},
        }
