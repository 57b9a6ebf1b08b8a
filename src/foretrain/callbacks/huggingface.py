"""Records every training of a Hugging Face ``Trainer``, from which the job follows.

trainer = Trainer(model, args, train_dataset=data, callbacks=[ForetrainCallback("runs.jsonl")])
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from foretrain.callbacks.jobs import JobLike, cluster_here, length, optimizer_name
from foretrain.callbacks.recorder import Recorder
from foretrain.errors import InputError, libraries_named

with libraries_named("ForetrainCallback", "huggingface"):
    import transformers

    from foretrain.capture.sources.transformers.configuration import ignored_keys

_TASKS = {
    "causal-lm": "CAUSAL_LM",
    "masked-lm": "MASKED_LM",
    "seq2seq-lm": "SEQ_TO_SEQ_CAUSAL_LM",
    "sequence-classification": "SEQUENCE_CLASSIFICATION",
    "token-classification": "TOKEN_CLASSIFICATION",
    "question-answering": "QUESTION_ANSWERING",
    "multiple-choice": "MULTIPLE_CHOICE",
    "image-classification": "IMAGE_CLASSIFICATION",
    "semantic-segmentation": "SEMANTIC_SEGMENTATION",
    "masked-image-modeling": "MASKED_IMAGE_MODELING",
    "audio-classification": "AUDIO_CLASSIFICATION",
    "ctc": "CTC",
    "speech-seq2seq": "SPEECH_SEQ_2_SEQ",
    "pretraining": "PRETRAINING",
}
"""Tasks of jobs, by the tables in which transformers keeps the class of each type of model."""

_NOT_SHAPE = frozenset(
    "transformers_version architectures dtype torch_dtype _name_or_path id2label label2id model_type "
    "use_cache".split()
)


class ForetrainCallback(transformers.TrainerCallback):  # type: ignore[misc]
    """Records every training of a ``Trainer`` into ``runs``.

    ``job`` holds what cannot be found or is to be recorded otherwise.

    Further options are those of ``Recorder``. A trainer does not tell its callbacks of failures: the run of a
    failed training is written when the trainer is gone, when it trains again, or when the program exits.
    """

    def __init__(self, runs: str | os.PathLike[str], job: JobLike | None = None, **options: Any) -> None:
        framework = f"transformers {transformers.__version__}"
        self.recorder = Recorder(runs, job=job, framework=framework, **options)
        self.recorder.end_with(self)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not state.is_world_process_zero:
            return
        observed = _observed(args, state, **kwargs)
        if not self.recorder.names_model:
            observed["model"] = model_section(kwargs["model"])
        self.recorder.begin(observed, total_steps=state.max_steps, done=state.global_step, main=True)

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.recorder.epoch_begin()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.recorder.step_begin()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.recorder.step_end()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.recorder.epoch_end()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        stopped = f"stopped at step {state.global_step} of {state.max_steps}"
        self.recorder.end(None if state.global_step >= state.max_steps else stopped)


def model_section(model: Any) -> dict[str, Any]:
    """The [model] section for a model of transformers: its task, and where its configuration is unusual."""
    config, name = getattr(model, "config", None), type(model).__name__
    task = _task(getattr(config, "model_type", ""), name)
    if config is None or task is None:
        example = 'ForetrainCallback(..., job={"model": ...})'
        raise InputError(f"job: {name} is not a class of transformers that a job can name; give {example}")
    usual = transformers.AutoConfig.for_model(config.model_type).to_dict()
    shape = {
        key: value
        for key, value in config.to_dict().items()
        if key not in _NOT_SHAPE and usual.get(key, ...) != value
    }
    for key in ignored_keys(config, shape):
        del shape[key]
    if "id2label" in usual and config.num_labels != len(usual["id2label"]):
        shape["num_labels"] = config.num_labels
    attention = getattr(config, "_attn_implementation", None)
    if attention not in (None, "sdpa"):
        shape["attn_implementation"] = attention
    return {"source": "transformers", "task": task, "config": {"model_type": config.model_type, **shape}}


def _task(model_type: str, class_name: str) -> str | None:
    tables = transformers.models.auto.modeling_auto
    for task, table in _TASKS.items():
        names = getattr(tables, f"MODEL_FOR_{table}_MAPPING_NAMES", {}).get(model_type, ())
        if class_name in ((names,) if isinstance(names, str) else names):
            return task
    return "base" if tables.MODEL_MAPPING_NAMES.get(model_type) == class_name else None


def _observed(
    args: Any, state: Any, *, model: Any, optimizer: Any = None, train_dataloader: Any = None, **_: Any
) -> dict[str, dict[str, Any]]:
    """Training, cluster and plan as the trainer has them."""
    devices, per_device = args.world_size * max(1, args.n_gpu), args.per_device_train_batch_size
    batch = per_device * devices * args.gradient_accumulation_steps
    on_gpu, epochs = args.device.type == "cuda", args.num_train_epochs if args.max_steps <= 0 else 0
    training = {
        "global_batch": batch,
        "precision": _precision(args, model),
        **({} if optimizer is None else {"optimizer": optimizer_name(optimizer)}),
        **({"compile": getattr(args, "torch_compile_mode", None) or True} if args.torch_compile else {}),
        **length(train_dataloader, batch, epochs=epochs, steps=state.max_steps),
        **_shapes(train_dataloader, per_device),
    }
    nodes = max(1, args.world_size // int(os.environ.get("LOCAL_WORLD_SIZE", args.world_size)))
    shard = _shard(args)
    plan = {
        **({"micro_batch": per_device} if per_device * devices < batch else {}),
        **({"shard": shard} if shard != "none" else {}),
        **({"recompute": "full"} if args.gradient_checkpointing else {}),
    }
    return {"training": training, "cluster": cluster_here(devices, nodes, on_gpu=on_gpu), "plan": plan}


def _precision(args: Any, model: Any) -> str:
    weights = str(getattr(model, "dtype", "")).rpartition(".")[2]
    if weights in ("bfloat16", "float16"):
        return "bf16" if weights == "bfloat16" else "fp16"
    return "amp-bf16" if args.bf16 else "amp-fp16" if args.fp16 else "tf32" if args.tf32 else "fp32"


def _shard(args: Any) -> str:
    """Say what DeepSpeed or FSDP keeps in pieces: with FSDP the weights too, unless it is told otherwise."""
    if stage := getattr(getattr(args, "deepspeed_plugin", None), "zero_stage", 0):
        return f"zero{stage}"
    if not args.fsdp:
        return "none"
    settings = args.fsdp_config if isinstance(args.fsdp_config, Mapping) else {}
    reshards = str(settings.get("reshard_after_forward", True)).lower()
    whole = reshards in ("false", "shard_grad_op") or "shard_grad_op" in str(args.fsdp)
    return "zero2" if whole else "zero3"


def _shapes(loader: Any, batch: int) -> dict[str, Any]:
    """Sequence length or image size of the first samples as a batch; the training sees nothing of it."""
    from foretrain.capture.tracing.guesses import draws_kept

    try:
        count = min(batch, len(loader.dataset))
        with draws_kept():
            inputs = loader.collate_fn([loader.dataset[i] for i in range(count)])
        for name in ("input_ids", "input_values"):
            if name in inputs:
                return {"sequence": int(inputs[name].shape[-1])}
        return {"image": list(inputs["pixel_values"].shape[-3:])} if "pixel_values" in inputs else {}
    except Exception:
        return {}
