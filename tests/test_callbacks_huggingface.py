"""Tests trainings with Hugging Face's Trainer: the job follows from it and the run is recorded."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("accelerate", reason="accelerate is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")

import torch

from foretrain.capture.sources.zoo import import_zoo
from foretrain.errors import InputError
from foretrain.evaluate import evaluate
from foretrain.run import Run, read_runs


@pytest.fixture(scope="module")
def hf() -> Any:
    import_zoo("torchvision")
    import transformers

    transformers.logging.set_verbosity_error()
    return transformers


@pytest.fixture(scope="module")
def callback(hf: Any) -> Callable[..., Any]:
    from foretrain.callbacks.huggingface import ForetrainCallback

    def make(runs: Path, *args: Any, **options: Any) -> Any:
        return ForetrainCallback(runs, *args, **{"predictor": None, "show": lambda line: None, **options})

    return make


class Data(torch.utils.data.Dataset[dict[str, Any]]):
    """Forty short texts; one of them may be broken."""

    def __init__(self, broken: int | None = None) -> None:
        self.broken = broken

    def __len__(self) -> int:
        return 40

    def __getitem__(self, i: int) -> dict[str, Any]:
        if i == self.broken:
            raise RuntimeError("this sample cannot be read")
        ids = torch.arange(i, i + 24) % 50
        return {"input_ids": ids, "labels": ids}


def make_trainer(hf: Any, folder: Path, callbacks: list[Any], data: Any = None, **options: Any) -> Any:
    hf.set_seed(0)
    config = hf.AutoConfig.for_model(
        "gpt2", n_layer=1, n_embd=16, n_head=2, vocab_size=50, n_positions=32, bos_token_id=0, eos_token_id=0
    )
    model = hf.AutoModelForCausalLM.from_config(config)
    usual: dict[str, Any] = {
        "use_cpu": True,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "per_device_train_batch_size": 2,
    }
    args = hf.TrainingArguments(
        str(folder / "out"), **{**usual, "gradient_accumulation_steps": 2, "num_train_epochs": 2, **options}
    )
    return hf.Trainer(model, args, train_dataset=data or Data(), callbacks=callbacks)


def only_run(path: Path) -> Run:
    [(_, run)] = read_runs(path)
    return run


def test_a_training_is_recorded_with_the_job_that_it_was(
    hf: Any, callback: Callable[..., Any], tmp_path: Path
) -> None:
    runs = tmp_path / "runs.jsonl"
    make_trainer(hf, tmp_path, [callback(runs)]).train()
    run = only_run(runs)
    model, training = run.job.workload.model, run.job.workload.training
    assert (model.source, model.task) == ("transformers", "causal-lm")
    assert model.config is not None
    assert {name: model.config[name] for name in ("model_type", "n_layer", "n_embd", "vocab_size")} == {
        "model_type": "gpt2",
        "n_layer": 1,
        "n_embd": 16,
        "vocab_size": 50,
    }
    assert (
        training.global_batch,
        training.sequence,
        training.precision,
        training.samples,
        training.epochs,
    ) == (4, 24, "fp32", 40, 2)
    assert training.optimizer in ("adamw", "adamw-fused")
    assert run.job.micro_batch == 2
    assert run.job.cluster.device.is_cpu
    assert run.provenance["steps"] == training.total_steps == 20
    assert {"step_time_s", "samples_per_s", "tokens_per_s", "epoch_time_s", "total_time_s"} <= set(
        run.measured
    )
    assert run.measured["step_time_s"] < run.measured["epoch_time_s"] < run.measured["total_time_s"]
    [scored] = [
        row for row in evaluate([runs], predictors=["roofline"]).runs if row.quantity == "step_time_s"
    ]
    assert scored.measured == run.measured["step_time_s"]


def test_the_training_itself_is_the_same_with_and_without(
    hf: Any, callback: Callable[..., Any], tmp_path: Path
) -> None:
    plain = make_trainer(hf, tmp_path, [], max_steps=4).train()
    watched = make_trainer(hf, tmp_path, [callback(tmp_path / "runs.jsonl")], max_steps=4).train()
    assert watched.training_loss == plain.training_loss


def test_a_training_that_fails_is_recorded_when_its_trainer_is_gone(
    hf: Any, callback: Callable[..., Any], tmp_path: Path
) -> None:
    runs = tmp_path / "runs.jsonl"
    trainer = make_trainer(
        hf, tmp_path, [callback(runs)], Data(broken=39), train_sampling_strategy="sequential"
    )
    with pytest.raises(RuntimeError, match="this sample cannot be read"):
        trainer.train()
    assert not runs.exists()
    del trainer
    gc.collect()
    run = only_run(runs)
    assert run.provenance["interrupted"] == "the training did not end"
    assert run.provenance["steps"] == 9
    assert "step_time_s" in run.measured
    assert "total_time_s" not in run.measured


def test_a_training_that_is_stopped_early_says_so(
    hf: Any, callback: Callable[..., Any], tmp_path: Path
) -> None:
    class Stop(hf.TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_training_stop = state.global_step >= 6

    make_trainer(hf, tmp_path, [callback(tmp_path / "runs.jsonl"), Stop()]).train()
    assert only_run(tmp_path / "runs.jsonl").provenance["interrupted"] == "stopped at step 6 of 20"


def test_what_the_user_says_of_the_job_stands(hf: Any, callback: Callable[..., Any], tmp_path: Path) -> None:
    own = callback(
        tmp_path / "runs.jsonl",
        {"training": {"sequence": 20}, "cluster": {"device": "cpu", "cores_per_device": 3}},
    )
    make_trainer(hf, tmp_path, [own], max_steps=6).train()
    job = only_run(tmp_path / "runs.jsonl").job
    assert (job.workload.training.sequence, job.cluster.device.cores, job.workload.training.steps) == (
        20,
        3,
        6,
    )


def test_a_model_that_no_job_can_name_is_one_line_before_the_training(
    hf: Any, callback: Callable[..., Any], tmp_path: Path
) -> None:
    trainer = make_trainer(hf, tmp_path, [callback(tmp_path / "runs.jsonl")])

    class Own(type(trainer.model)):  # type: ignore[misc]
        pass

    trainer.model.__class__ = Own
    with pytest.raises(InputError, match="job: Own is not a class of transformers that a job can name"):
        trainer.train()
    assert trainer.state.global_step == 0


@pytest.mark.parametrize(
    ("auto", "task", "config"),
    [
        (
            "AutoModelForSequenceClassification",
            "sequence-classification",
            {
                "model_type": "bert",
                "hidden_size": 24,
                "num_attention_heads": 2,
                "num_hidden_layers": 1,
                "num_labels": 5,
            },
        ),
        (
            "AutoModelForSeq2SeqLM",
            "seq2seq-lm",
            {"model_type": "t5", "d_model": 16, "num_layers": 1, "num_heads": 2},
        ),
        (
            "AutoModelForImageClassification",
            "image-classification",
            {
                "model_type": "vit",
                "image_size": 32,
                "patch_size": 8,
                "hidden_size": 24,
                "num_attention_heads": 2,
                "num_hidden_layers": 1,
                "num_labels": 10,
            },
        ),
        (
            "AutoModelForCausalLM",
            "causal-lm",
            {
                "model_type": "llama",
                "hidden_size": 32,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "intermediate_size": 48,
                "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"},
            },
        ),
        (
            "AutoModel",
            "base",
            {"model_type": "bert", "hidden_size": 24, "num_attention_heads": 2, "num_hidden_layers": 1},
        ),
    ],
)
def test_the_section_of_a_model_builds_the_same_model(
    hf: Any, auto: str, task: str, config: dict[str, Any]
) -> None:
    from foretrain.callbacks.huggingface import model_section

    def built(config: dict[str, Any]) -> Any:
        own = dict(config)
        with torch.device("meta"):
            return getattr(hf, auto).from_config(hf.AutoConfig.for_model(own.pop("model_type"), **own))

    model = built(config)
    section = model_section(model)
    assert section["task"] == task
    assert len(section["config"]) <= len(config) + 3
    assert [weight.shape for weight in built(section["config"]).parameters()] == [
        weight.shape for weight in model.parameters()
    ]
