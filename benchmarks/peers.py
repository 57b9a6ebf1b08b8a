"""Other tools that forecast trainings, each as a predictor, so that ``foretrain evaluate`` and ``foretrain
leaderboard`` score them on the same runs as our own:

    foretrain leaderboard data/h200_transformers.jsonl --predictor benchmarks/peers.py:MemTracker --out board

A tool is asked through its own functions and says what it says: nothing is corrected, refused for being
impossible, or given an interval. ``docs/peers.md`` has the settings and the
figures.
"""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import statistics
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar, Self
from unittest import mock

from foretrain.errors import ForetrainError, InputError, UnsupportedJob, first_line
from foretrain.forecast import Estimate, Forecast
from foretrain.job import Job
from foretrain.predictors.base import Predictor
from foretrain.run import Run

ADAM = ("adam", "adamw", "adam-fused", "adamw-fused")
SIXTEEN_BITS = ("amp-bf16", "amp-fp16", "bf16", "fp16")


class Peer(Predictor):
    """A tool of others: one figure without an interval, and no check of what it says."""

    needs: ClassVar[str]
    """The module that must be installed."""

    def fit(self, runs: Iterable[Run]) -> Self:
        return self

    def predict(self, job: Job) -> Forecast:
        try:
            figures = self.figures(job)
        except ImportError as error:
            raise InputError(f"{self.name}: {self.needs} is not installed ({first_line(error)})") from error
        return Forecast(
            job=job,
            predictor=self.name,
            quantities={name: Estimate(value, value, value) for name, value in figures.items()},
        )

    def figures(self, job: Job) -> dict[str, float]:
        """Quantities by name."""
        raise NotImplementedError

    def refuse(self, job: Job, what: str) -> UnsupportedJob:
        return UnsupportedJob(f"{self.name}: {job.workload.model.label}: {what}")


# What cannot be right counts against the tool: forecasts of peers are not checked, as those of others are.
Peer.predict = Peer.predict.__wrapped__  # type: ignore[attr-defined,method-assign]


@functools.lru_cache(maxsize=4)
def _module(job: Job) -> Any:
    """The job's model on meta."""
    from foretrain.capture.sources.models import load_model

    return load_model(job.workload, job.micro_batch).module


# accelerate estimate-memory


class AccelerateEstimate(Peer):
    """The column "Training using Adam" of ``accelerate estimate-memory``, of the model in hand instead of one
    on the Hub: parameters times a factor, for a batch of one."""

    name = "accelerate"
    needs = "accelerate"
    quantities = frozenset({"peak_memory_bytes"})

    def figures(self, job: Job) -> dict[str, float]:
        training = job.workload.training
        if training.mode != "train" or training.optimizer not in ADAM:
            raise self.refuse(job, "it knows training with Adam alone")
        if job.cluster.world_size > 1:
            raise self.refuse(job, "it knows one device alone")
        module = _module(job)  # before accelerate, which imports the model's library its own way
        from accelerate.commands.estimate import estimate_training_usage
        from accelerate.utils import calculate_maximum_sizes

        total, _ = calculate_maximum_sizes(module)
        dtype = "float16" if training.precision in SIXTEEN_BITS else "float32"
        return {"peak_memory_bytes": float(max(estimate_training_usage(total, dtype).values()))}


# DeepSpeed's estimators of ZeRO


class DeepSpeedEstimate(Peer):
    """``estimate_zero2_model_states_mem_needs`` and ``estimate_zero3_...``, without offloading: weights,
    gradients and the state of Adam in mixed precision, no activations."""

    name = "deepspeed"
    needs = "deepspeed"
    quantities = frozenset({"peak_memory_bytes"})

    def figures(self, job: Job) -> dict[str, float]:
        from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs
        from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs

        training, cluster, plan = job.workload.training, job.cluster, job.plan
        if training.mode != "train" or training.optimizer not in ADAM:
            raise self.refuse(job, "it knows training with Adam alone")
        if training.precision not in SIXTEEN_BITS:
            raise self.refuse(job, "it knows mixed precision alone")
        if plan.tensor * plan.pipeline * plan.context != 1:
            raise self.refuse(job, "it knows data parallelism alone")
        module = _module(job)
        parameters = sum(one.numel() for one in module.parameters())
        places = {"num_gpus_per_node": cluster.world_size // cluster.nodes, "num_nodes": cluster.nodes}
        if plan.shard == "zero3":
            layers = (list(layer.parameters(recurse=False)) for layer in module.modules())
            largest = max(sum(one.numel() for one in layer) for layer in layers)
            _, held, _ = estimate_zero3_model_states_mem_needs(
                parameters, largest, cpu_offload=False, cpu_offload_params=False, **places
            )
        elif plan.shard == "zero2" or cluster.world_size == 1:
            _, held = estimate_zero2_model_states_mem_needs(parameters, cpu_offload=False, **places)
        else:
            raise self.refuse(job, f"it knows ZeRO 2 and 3, not plan.shard = {plan.shard!r}")
        return {"peak_memory_bytes": float(held)}


# llm-analysis


class LlmAnalysis(Peer):
    """``LLMAnalysis.training`` of llm-analysis: FLOPs over the peak rate times an efficiency, memory by its
    formulas. The efficiency is its default, 1, until ``fit`` finds the one that suits runs best."""

    name = "llm-analysis"
    needs = "llm_analysis"
    quantities = frozenset({"step_time_s", "peak_memory_bytes"})
    efficiency_: float | None = None

    def fit(self, runs: Iterable[Run]) -> Self:
        """The efficiency that makes half of the steps too long and half too short."""
        ratios = []
        self.efficiency_ = None
        for run in runs:
            with contextlib.suppress(UnsupportedJob):
                if (measured_s := run.measured.get("step_time_s")) is not None:
                    ratios.append(self.figures(run.job)["step_time_s"] / measured_s)
        if not ratios:
            raise InputError(f"{self.name}: no run that it can do has a step_time_s")
        self.efficiency_ = min(1.0, statistics.median(ratios))
        return self

    def figures(self, job: Job) -> dict[str, float]:
        from llm_analysis.analysis import ActivationRecomputation, DSZeRO, LLMAnalysis
        from llm_analysis.config import DtypeConfig, ParallelismConfig

        training, plan = job.workload.training, job.plan
        if training.mode != "train" or training.precision not in SIXTEEN_BITS:
            raise self.refuse(job, "asked of training in 16 bits alone")
        if plan.context > 1 or plan.expert > 1 or plan.recompute not in ("none", "selective", "full"):
            raise self.refuse(job, "it has no such plan")
        logging.getLogger("llm_analysis").setLevel(logging.ERROR)
        analysis = LLMAnalysis(
            self._model(job),
            self._device(job),
            DtypeConfig(),
            ParallelismConfig(tp_size=plan.tensor, pp_size=plan.pipeline, dp_size=plan.data),
            flops_efficiency=self.efficiency_,
        )
        with self._told(job), contextlib.redirect_stdout(io.StringIO()):
            said = analysis.training(
                batch_size_per_gpu=job.micro_batch,
                gradient_accumulation_steps=job.accumulation,
                seq_len=training.sequence,
                activation_recomputation=ActivationRecomputation[plan.recompute.upper()],
                ds_zero=DSZeRO(int(plan.shard.removeprefix("zero")) if plan.shard != "none" else 0),
            )
        return {
            "step_time_s": float(said["latency_per_iter"]),
            "peak_memory_bytes": float(said["(weight+op_state+grad+act)_memory_per_gpu"]),
        }

    @contextlib.contextmanager
    def _told(self, job: Job) -> Iterator[None]:
        """What it asserts is why it cannot do a job."""
        try:
            yield
        except AssertionError as error:
            raise self.refuse(job, first_line(error)) from error

    def _model(self, job: Job) -> Any:
        from llm_analysis.config import ModelConfig

        if job.workload.model.source != "transformers" or job.workload.model.task != "causal-lm":
            raise self.refuse(job, "it knows decoders of transformers alone")
        config = _module(job).config
        wide = next(
            (value for name in ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size")
             if (value := getattr(config, name, None))),
            4 * config.hidden_size,
        )  # fmt: skip
        experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None) or 1
        with self._told(job):
            return ModelConfig(
                name=config.model_type,
                num_layers=config.num_hidden_layers,
                n_head=config.num_attention_heads,
                hidden_dim=config.hidden_size,
                vocab_size=config.vocab_size,
                max_seq_len=job.workload.training.sequence,
                num_key_value_heads=getattr(config, "num_key_value_heads", None),
                ffn_embed_dim=wide,
                expansion_ratio=wide / config.hidden_size,
                model_type=config.model_type,
                moe_num_experts=experts,
                moe_top_k=getattr(config, "num_experts_per_tok", None) or 1,
            )

    def _device(self, job: Job) -> Any:
        """Its figures of the device, from our catalogue: it has no H200."""
        from llm_analysis.config import GPUConfig

        device = job.cluster.device
        if device.is_cpu:
            raise self.refuse(job, "it knows GPUs alone")
        return GPUConfig(
            name=device.name,
            mem_per_GPU_in_GB=device.memory_bytes / 2**30,
            hbm_bandwidth_in_GB_per_sec=device.memory_bytes_per_s / 1e9,
            intra_node_bandwidth_in_GB_per_sec=450,
            intra_node_min_message_latency=8e-6,
            peak_fp16_TFLOPS=device.peak_flops("bf16") / 1e12,
        )


# torch's own tools


class MemTracker(Peer):
    """The peak that ``torch.distributed._tools.mem_tracker.MemTracker`` sees in a step after the first, when
    the optimizer has its state."""

    name = "MemTracker"
    needs = "torch"
    quantities = frozenset({"peak_memory_bytes"})

    def figures(self, job: Job) -> dict[str, float]:
        import torch
        from torch.distributed._tools.mem_tracker import MemTracker as Tracker

        from foretrain.capture.tracing.nested import tensors_in

        peaks: list[int] = []

        @contextlib.contextmanager
        def watch(module: Any, inputs: Any, state: list[Any]) -> Iterator[None]:
            tracker = Tracker()
            tracker.memory_tracking = {}  # type: ignore[assignment]  # its own has weak keys and takes minutes
            tracker.track_external(module, *tensors_in(inputs), *state)
            with mock.patch("torch.distributed._tools.mem_tracker.deepcopy", _copied), tracker:
                yield
            peaks.append(tracker.get_tracker_snapshot("peak")[torch.device("meta")]["Total"])

        _watch_step(self, job, watch)
        return {"peak_memory_bytes": float(peaks[-1])}


class RuntimeEstimator(Peer):
    """``torch.distributed._tools.runtime_estimator.RuntimeEstimator``, by its cost model (a roofline)."""

    name = "RuntimeEstimator"
    needs = "torch"
    quantities = frozenset({"step_time_s", "device_busy_s"})

    def figures(self, job: Job) -> dict[str, float]:
        from torch.distributed._tools.runtime_estimator import RuntimeEstimator as Estimator

        from foretrain.capture.tracing.optimizers import StepFunction

        times_ms: list[float] = []
        update = StepFunction.__call__

        @contextlib.contextmanager
        def watch(_module: Any, _inputs: Any, _state: list[Any]) -> Iterator[None]:
            estimator, passes_ms = Estimator(), 0.0

            def noted(step: StepFunction) -> None:
                nonlocal passes_ms
                passes_ms = estimator.total_runtime
                update(step)

            with (
                _device_known(job),
                mock.patch.object(StepFunction, "__call__", noted),
                estimator("operator-level-cost-model"),
            ):
                yield
            times_ms.append(estimator.total_runtime + (job.accumulation - 1) * passes_ms)

        _watch_step(self, job, watch)
        return dict.fromkeys(sorted(self.quantities), times_ms[-1] * 1e-3)


Watch = Callable[[Any, Any, list[Any]], contextlib.AbstractContextManager[None]]
"""What a step runs in, by its module, its inputs and the state of its optimizer."""


def _watch_step(peer: Peer, job: Job, watch: Watch) -> None:
    """Run a micro-batch and the update after it inside ``watch``, as our own capture runs them.

    The tools are meant for fake tensors on a GPU. Here tensors are on meta, and our capture lets torch take
    the ways (casts of autocast, kernels of attention) that it takes on a GPU, and tells models the values
    that they ask for; on fake tensors transformers takes those of a compiler: other masks, other kernels.
    """
    from foretrain.capture import _trace
    from foretrain.capture.tracing import tracer

    training = job.workload.training
    if job.cluster.world_size > 1 or training.compile or training.precision == "fp8":
        raise peer.refuse(job, "asked of eager steps on one device alone")
    run = tracer._run

    def watched(recorder: Any, module: Any, inputs: Any, loss: Any, step: Any, *how: Any) -> None:
        with watch(module, inputs, [] if step is None else list(step.state_tensors())):
            run(recorder, module, inputs, loss, step, *how)

    with mock.patch.object(tracer, "_run", watched):
        try:
            graph = _trace(job, job.micro_batch)
        except UnsupportedJob:
            raise
        except Exception as error:
            first = _first_of(error)
            raise peer.refuse(job, f"{type(first).__name__}: {first_line(first)}") from error
    if job.plan.recompute != "none" and not graph.recomputes:
        raise peer.refuse(job, f"plan.recompute: {job.plan.recompute!r} cannot be run")


def _first_of(error: BaseException) -> BaseException:
    """The error that others followed, of the tool or of torch."""
    chain = [error]
    while (earlier := chain[-1].__cause__ or chain[-1].__context__) is not None and earlier not in chain:
        chain.append(earlier)
    return next((one for one in reversed(chain) if not isinstance(one, ForetrainError)), error)


def _copied(snapshot: Any) -> Any:
    """A copy of a tracker's dictionaries of numbers, for which ``deepcopy`` takes minutes of a step."""
    if not isinstance(snapshot, dict):
        return snapshot
    return {name: _copied(value) for name, value in snapshot.items()}


@contextlib.contextmanager
def _device_known(job: Job) -> Iterator[None]:
    """What the cost model asks of the GPU that it takes for there, from our catalogue."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    device = job.cluster.device
    rates = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64"}

    def tflops(dtype: Any) -> float:
        return device.peak_flops(rates[dtype]) / 1e12

    estimator, asked = "torch.distributed._tools.runtime_estimator", "torch.utils._runtime_estimation"
    with (
        mock.patch(f"{estimator}.active_fake_mode", FakeTensorMode),
        mock.patch("torch.cuda.is_available", return_value=True),
        mock.patch(f"{asked}.get_device_tflops", tflops),
        mock.patch(f"{asked}.get_gpu_dram_gbps", return_value=device.memory_bytes_per_s / 1e9),
    ):
        yield
