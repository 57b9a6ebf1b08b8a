"""Jobs and runs: they survive every round trip, refuse what cannot be, and say which field of which line is
wrong."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from foretrain.cluster import Catalog
from foretrain.errors import InputError
from foretrain.job import Job, read_jobs
from foretrain.plan import Plan
from foretrain.quantities import QUANTITIES
from foretrain.run import Run, read_runs
from foretrain.workload import OPTIMIZERS, PRECISIONS, Model, Training

CATALOG = Catalog()
SMALL: dict[str, Any] = {
    "model": {"source": "timm", "name": "resnet50"},
    "training": {"global_batch": 64, "image": 224},
    "cluster": {"device": "h100-sxm-80gb", "devices_per_node": 4, "nodes": 2},
}


def read(section: str = "model", **changes: Any) -> Job:
    return Job.read({**SMALL, section: {**SMALL.get(section, {}), **changes}}, catalog=CATALOG)


# Round trips

WORDS = st.text("abcdefghijklmnopqrstuvwxyz0123456789_ é\"'\\", min_size=1, max_size=10)
VALUES = st.recursive(
    st.booleans() | st.integers(-(2**53), 2**53) | st.floats(-1e6, 1e6) | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=6,
)
TABLES = st.dictionaries(WORDS, VALUES, max_size=3)
MODELS = (
    st.fixed_dictionaries(
        {"source": st.sampled_from(["timm", "torchvision", "onnx", "graph"]), "name": WORDS},
        optional={"args": TABLES},
    )
    | st.fixed_dictionaries(
        {"source": st.just("python"), "name": WORDS.map("{}.py:make".format)}, optional={"args": TABLES}
    )
    | st.fixed_dictionaries(
        {
            "source": st.just("transformers"),
            "config": TABLES.map(lambda table: {**table, "model_type": "llama"}),
        },
        optional={"task": st.sampled_from(["causal-lm", "masked-lm"])},
    )
)
SIZES = {
    "image": st.integers(1, 512)
    | st.tuples(st.integers(1, 4), st.integers(1, 512), st.integers(1, 512)).map(list),
    "sequence": st.integers(1, 4096),
    "classes": st.integers(1, 1000),
}
LENGTHS: st.SearchStrategy[dict[str, Any]] = st.sampled_from(
    [{}, {"steps": 7}, {"samples": 10}, {"samples": 1000, "epochs": 2.5}, {"samples": 1000, "epochs": 90}]
)
CHOICES = {
    "mode": st.sampled_from(["train", "infer"]),
    "precision": st.sampled_from(PRECISIONS),
    "optimizer": st.sampled_from(OPTIMIZERS),
    "framework": st.sampled_from(["pytorch", "megatron"]),
    "channels_last": st.booleans(),
    "compile": st.sampled_from([False, True, "reduce-overhead", "max-autotune"]),
    "adapter": st.sampled_from(
        ["lora:16", {"kind": "qlora", "rank": 4, "targets": ["q_proj", "v_proj"], "dropout": 0.1}]
    ),
}
PLANS = st.fixed_dictionaries(
    {
        "data": st.integers(1, 6),
        "tensor": st.integers(1, 4),
        "pipeline": st.integers(1, 3),
        "context": st.integers(1, 2),
    },
    optional={
        "shard": st.sampled_from(["none", "zero1", "zero2", "zero3"]),
        "schedule": st.sampled_from(["gpipe", "1f1b", "interleaved"]),
        "recompute": st.sampled_from(["none", "selective", "operators", "full"]),
        "sequence_parallel": st.booleans(),
        "micro_batch": st.integers(1, 4),
    },
)


@st.composite
def documents(draw: st.DrawFn) -> dict[str, Any]:
    """Valid jobs, as a file would hold them."""
    plan: dict[str, Any] = draw(PLANS)
    world = plan["data"] * plan["tensor"] * plan["pipeline"] * plan["context"]
    batch = plan["data"] * plan.get("micro_batch", 1) * draw(st.integers(1, 5))
    training: dict[str, Any] = draw(
        st.fixed_dictionaries({"global_batch": st.just(batch)}, optional={**SIZES, **CHOICES})
    ) | draw(LENGTHS)
    if training.get("precision") == "fp8":
        training.pop("adapter", None)
    if draw(st.booleans()):
        del plan["data"]
    cluster = {"device": draw(st.sampled_from(["h100-sxm-80gb", "l4"])), "nodes": world}
    model: dict[str, Any] = draw(MODELS)
    if model["source"] in ("timm", "torchvision"):
        training.pop("sequence", None)
    return {"model": model, "training": training, "cluster": cluster, "plan": plan}


@given(documents())
def test_a_job_survives_dict_and_json(document: dict[str, Any]) -> None:
    job = Job.read(document, catalog=CATALOG)
    again = Job.read(json.loads(json.dumps(job.to_dict())), catalog=CATALOG)
    assert again == job
    assert again.to_dict() == job.to_dict()


@given(documents())
def test_toml_and_json_say_the_same(document: dict[str, Any]) -> None:
    text = "\n".join(f"{key} = {as_toml(value)}" for key, value in document.items())
    assert Job.read(tomllib.loads(text), catalog=CATALOG) == Job.read(
        json.loads(json.dumps(document)), catalog=CATALOG
    )


@given(documents(), st.dictionaries(st.sampled_from(sorted(QUANTITIES)), st.floats(1e-9, 1e12), max_size=4))
def test_a_run_survives_dict_and_json(document: dict[str, Any], measured: dict[str, float]) -> None:
    run = Run.read({"job": document, "measured": measured, "provenance": {"label": "x"}}, catalog=CATALOG)
    assert Run.read(json.loads(json.dumps(run.to_dict())), catalog=CATALOG) == run


def test_a_run_names_the_version_of_a_library_where_it_matters_what_it_runs() -> None:
    def libraries(model_type: str, version: str) -> dict[str, str]:
        model = {"source": "transformers", "config": {"model_type": model_type}}
        document = {"job": {**SMALL, "model": model}, "measured": {}, "provenance": {"transformers": version}}
        run = Run.read(document, catalog=CATALOG)
        assert Run.read(json.loads(json.dumps(run.to_dict())), catalog=CATALOG) == run
        return dict(run.job.workload.model.libraries)

    assert libraries("gemma2", "5.17.0") == {"transformers": "5.17.0"}
    assert libraries("t5", "5.19.0") == {"transformers": "5.19.0"}
    assert libraries("gemma2", "5.22.0") == libraries("llama", "5.17.0") == libraries("t5", "5.20.1") == {}
    old = {"job": SMALL, "measured": {}, "provenance": {"torch": "1.12.1+cu113", "transformers": "5.17.0"}}
    assert Run.read(old, catalog=CATALOG).job.workload.model.libraries == {"torch": "1.12.1+cu113"}


@pytest.mark.parametrize(
    ("libraries", "message"),
    [({"numpy": "1.0"}, r"^model\.libraries: 'numpy'"), ({"transformers": "new"}, r"^model\.libraries\.tra")],
)
def test_versions_of_libraries_are_checked(libraries: dict[str, str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Job.read({**SMALL, "model": {**SMALL["model"], "libraries": libraries}}, catalog=CATALOG)


@pytest.mark.parametrize(
    ("training", "source", "scales"),
    [
        ({"precision": "amp-fp16"}, "mine", True),
        ({"precision": "amp-fp16"}, "huggingface/pytorch-image-models", False),
        ({"precision": "amp-fp16", "grad_scaler": False}, "mine", False),
        ({"precision": "amp-fp16", "mode": "infer"}, "mine", False),
        ({"precision": "amp-bf16"}, "mine", False),
    ],
)
def test_half_precision_scales_its_loss_unless_it_is_said_otherwise(
    training: dict[str, Any], source: str, scales: bool
) -> None:
    document = {**SMALL, "training": {**SMALL["training"], **training}}
    run = Run.read({"job": document, "measured": {}, "provenance": {"source": source}}, catalog=CATALOG)
    assert run.job.workload.training.scales_loss is scales


@pytest.mark.parametrize(
    ("task", "sequence", "source", "fields"),
    [
        ("masked-lm", 128, "NVIDIA/DeepLearningExamples", (20, None)),
        ("masked-lm", 512, "NVIDIA/DeepLearningExamples", (80, None)),
        ("question-answering", 384, "NVIDIA/DeepLearningExamples", (None, "eager")),
        ("masked-lm", 128, "mine", (None, None)),
    ],
)
def test_nvidias_bert_answers_for_masked_tokens_and_writes_its_attention_out(
    task: str, sequence: int, source: str, fields: tuple[int | None, str | None]
) -> None:
    document = {
        **SMALL,
        "model": {"source": "transformers", "task": task, "config": {"model_type": "bert"}},
        "training": {"global_batch": 8, "sequence": sequence},
    }
    run = Run.read({"job": document, "measured": {}, "provenance": {"source": source}}, catalog=CATALOG)
    training = run.job.workload.training
    assert (training.predicted_tokens, training.attention) == fields


def test_a_scaler_is_of_half_precision() -> None:
    training = {"global_batch": 8, "precision": "bf16", "grad_scaler": True}
    with pytest.raises(InputError, match=r"^training\.grad_scaler: true needs training with precision amp-f"):
        Job.read({**SMALL, "training": training}, catalog=CATALOG)


def test_the_sample_job_of_the_documentation_is_a_job() -> None:
    text = (Path(__file__).parents[1] / "docs" / "formats.md").read_text(encoding="utf-8")
    sample = text.partition("```toml\n[model]")[2].partition("```")[0]
    job = Job.read(tomllib.loads(f"[model]{sample}"), catalog=CATALOG)
    assert job.cluster.world_size == 128


def as_toml(value: Any) -> str:
    if isinstance(value, dict):
        return (
            "{"
            + ", ".join(
                f"{json.dumps(key, ensure_ascii=False)} = {as_toml(inner)}" for key, inner in value.items()
            )
            + "}"
        )
    if isinstance(value, list):
        return "[" + ", ".join(map(as_toml, value)) + "]"
    return json.dumps(value, ensure_ascii=False)


def test_toml_and_json_files_load_alike_and_remember_their_folder(tmp_path: Path) -> None:
    (tmp_path / "job.json").write_text(json.dumps(SMALL))
    (tmp_path / "job.toml").write_text("\n".join(f"{key} = {as_toml(value)}" for key, value in SMALL.items()))
    one, other = (Job.load(tmp_path / name) for name in ("job.json", "job.toml"))
    assert one == other
    assert one.workload.base == tmp_path


def test_the_canonical_form_leaves_out_what_is_the_default() -> None:
    job = Job.read({**SMALL, "plan": {"tensor": 1, "shard": "none"}}, catalog=CATALOG)
    assert job.to_dict()["plan"] == {"data": 8}
    assert job.to_dict()["training"] == {"mode": "train", "global_batch": 64, "image": 224}


# Plans and batches


@given(documents())
def test_the_product_of_a_plan_is_the_world_size(document: dict[str, Any]) -> None:
    job = Job.read(document, catalog=CATALOG)
    plan = job.plan
    assert plan.data is not None
    assert plan.data * plan.tensor * plan.pipeline * plan.context == job.cluster.world_size


@given(documents())
def test_micro_batches_add_up_to_the_global_batch(document: dict[str, Any]) -> None:
    job = Job.read(document, catalog=CATALOG)
    assert job.plan.data is not None
    assert job.micro_batch * job.accumulation * job.plan.data == job.workload.training.global_batch


@given(documents(), st.integers(2, 7))
def test_a_plan_with_another_product_is_refused_with_every_term(
    document: dict[str, Any], factor: int
) -> None:
    assume("data" in document["plan"])
    document["plan"]["data"] *= factor
    document["training"]["global_batch"] *= factor
    with pytest.raises(
        InputError,
        match=rf"^plan: data {document['plan']['data']} x tensor \d+ x pipeline \d+ x context \d+ = \d+, but",
    ):
        Job.read(document, catalog=CATALOG)


@pytest.mark.parametrize(
    ("section", "changes", "message"),
    [
        ("plan", {"tensor": 3}, "plan: tensor 3 x pipeline 1 x context 1 = 3 does not divide the 8 devices"),
        (
            "plan",
            {"data": 4},
            "plan: data 4 x tensor 1 x pipeline 1 x context 1 = 4, but the cluster has 8 devices",
        ),
        ("plan", {"expert": 3}, "plan.expert: 3 does not divide the 8 devices"),
        ("plan", {"micro_batch": 3}, "plan.micro_batch: 3 x data 8 = 24 does not divide the global batch 64"),
        ("plan", {"data": 0}, "plan.data: 0 is not 1 or more"),
        ("plan", {"micro_batch": 0}, "plan.micro_batch: 0 is not 1 or more"),
        (
            "plan",
            {"shard": "zero4"},
            "plan.shard: 'zero4' is not one of none, zero1, "
            "zero2, zero3 (did you mean zero3 or zero2 or zero1?)",
        ),
        ("training", {"global_batch": 12}, "training.global_batch: 12 does not divide over plan.data = 8"),
        ("training", {"global_batch": 0}, "training.global_batch: 0 is not a number greater than zero"),
        (
            "training",
            {"allocator": "max_split_size_mb:64,expandable:True"},
            "training.allocator.expandable: 'expandable' is not one of expandable_segments, "
            "garbage_collection_threshold, max_split_size_mb, roundup_power2_divisions "
            "(did you mean expandable_segments?)",
        ),
        (
            "training",
            {"allocator": "max_split_size_mb:20"},
            "training.allocator.max_split_size_mb: '20' is not above 20",
        ),
        (
            "training",
            {"allocator": "roundup_power2_divisions:3"},
            "training.allocator.roundup_power2_divisions: 3 is not a power of two",
        ),
        (
            "training",
            {"image": [224, 224]},
            "training.image: [224, 224] is not a side length or [channels, height, width]",
        ),
        ("training", {"image": 0}, "training.image: 0 is not greater than zero"),
        (
            "training",
            {"steps": 5, "epochs": 2, "samples": 9},
            "training.steps: 5 and training.epochs: 2.0 are both given; give one",
        ),
        (
            "training",
            {"epochs": 2},
            "training.samples: missing; training.epochs needs the number of samples in an epoch",
        ),
        (
            "training",
            {"master_weights": True},
            "training.master_weights: true needs precision "
            "bf16, fp16 or fp8; fp32 already keeps fp32 weights",
        ),
        ("model", {"name": None}, "model.name: missing; a timm model is given by name"),
        ("model", {"task": "causal-lm"}, "model.task: only a transformers model has it, not source = 'timm'"),
        (
            "model",
            {"source": "python", "name": "net"},
            'model.name: \'net\' is not of the form "path/to/file.py:function" or "path/to/file.py"',
        ),
        (
            "model",
            {"source": "transformers", "name": None},
            "model.config: missing; a transformers model needs its configuration, with model_type in it",
        ),
        (
            "model",
            {"source": "transformers", "name": None, "config": {}},
            'model.config.model_type: missing; for example "llama" or "bert"',
        ),
        (
            "model",
            {"source": "transformers", "config": {"model_type": "llama"}},
            "model.name: 'resnet50' is not used; model.config.model_type names a transformers model",
        ),
        (
            "model",
            {"source": "transformers", "name": None, "config": {"model_type": "llama"}, "args": {"a": 1}},
            "model.args: a transformers model has its settings in model.config",
        ),
        ("training", {"sequence": 8}, "training.sequence: 8 is not used by a timm model"),
    ],
)
def test_what_cannot_be_is_refused_by_field_value_and_what_is_allowed(
    section: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError) as caught:
        read(section, **changes)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("section", "changes", "start", "hint"),
    [
        (
            "training",
            {"precision": "amp-bf61"},
            "training.precision: 'amp-bf61' is not one of amp-bf16,",
            "amp-bf16",
        ),
        ("training", {"optimizer": "adamm"}, "training.optimizer: 'adamm' is not one of", "adam"),
        (
            "training",
            {"globalbatch": 4},
            "training.globalbatch: 'globalbatch' is not a known key",
            "global_batch",
        ),
        ("model", {"source": "tim"}, "model.source: 'tim' is not one of diffusion, graph, onnx,", "timm"),
        (
            "plan",
            {"schedule": "1f1"},
            "plan.schedule: '1f1' is not one of 1f1b, dualpipe, gpipe, interleaved",
            "1f1b",
        ),
        (
            "cluster",
            {"device": "h100-smx-80gb"},
            "cluster.device: 'h100-smx-80gb' is not one of",
            "h100-sxm-80gb",
        ),
    ],
)
def test_a_near_miss_is_suggested(section: str, changes: dict[str, Any], start: str, hint: str) -> None:
    with pytest.raises(InputError) as caught:
        read(section, **changes)
    assert str(caught.value).startswith(start)
    assert "did you mean" in str(caught.value)
    assert hint in str(caught.value).partition("did you mean")[2]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_length_that_is_not_finite_is_refused(value: float) -> None:
    with pytest.raises(InputError, match=r"training\.epochs"):
        read("training", epochs=value, samples=10)


@pytest.mark.parametrize("value", ["NaN", "Infinity", "0", "-0.5"])
@pytest.mark.parametrize("name", ["step_time_s", "epoch_time_s", "samples_per_s"])
def test_a_run_time_that_cannot_be_is_refused_with_its_line(tmp_path: Path, name: str, value: str) -> None:
    good = json.dumps({"job": SMALL, "measured": {"step_time_s": 0.1}})
    path = tmp_path / "runs.jsonl"
    path.write_text(f'{good}\n{{"job": {json.dumps(SMALL)}, "measured": {{"{name}": {value}}}}}\n')
    said = rf"^{path}:2: measured\.{name}: {float(value.replace('Infinity', 'inf'))} is not a finite number"
    with pytest.raises(InputError, match=f"{said} above zero$"):
        list(read_runs(path, catalog=CATALOG))


def test_a_figure_of_a_run_may_be_zero_but_not_below() -> None:
    Run.read({"job": SMALL, "measured": {"network_tx_bytes_per_s": 0}}, catalog=CATALOG)
    with pytest.raises(InputError, match=r"^measured\.power_w: -1.0 is not a finite number, zero or above$"):
        Run.read({"job": SMALL, "measured": {"power_w": -1}}, catalog=CATALOG)
    sampled = {"resources": {"figures": {"network_tx_peak": float("nan")}}}
    with pytest.raises(InputError, match=r"^provenance\.resources\.figures\.network_tx_peak: nan"):
        Run.read({"job": SMALL, "measured": {}, "provenance": sampled}, catalog=CATALOG)


def test_a_job_has_sections_and_no_others() -> None:
    with pytest.raises(InputError, match=r"^plna: 'plna' is not a known section; .*\(did you mean plan\?\)$"):
        Job.read({**SMALL, "plna": {}}, catalog=CATALOG)
    for section in SMALL:
        with pytest.raises(InputError, match=f"^{section}: missing"):
            Job.read({key: value for key, value in SMALL.items() if key != section}, catalog=CATALOG)
    with pytest.raises(InputError, match=r"^job: 5 is not a table"):
        Job.read(5)


# What follows from a job


def test_steps_follow_from_samples_and_epochs() -> None:
    training = Training(global_batch=100, samples=1001, epochs=2)
    assert (training.steps_per_epoch, training.total_steps) == (11, 22)
    assert Training(global_batch=8, steps=5).total_steps == 5
    assert Training(global_batch=8).total_steps is None


def test_an_image_is_a_side_or_a_shape() -> None:
    assert Training(global_batch=1, image=32).image_shape == (3, 32, 32)
    assert Training(global_batch=1, image=(1, 28, 30)).image_shape == (1, 28, 30)
    assert Training(global_batch=1).image_shape is None


def test_a_model_has_a_short_name_for_people() -> None:
    assert Model(source="timm", name="resnet50").label == "resnet50"
    assert Model(source="python", name="models/net.py:make").label == "net.py:make"
    assert Model(source="transformers", config={"model_type": "llama"}).label == "llama"


def test_the_default_plan_is_data_parallelism_over_all_devices() -> None:
    assert read().plan == Plan(data=8)
    assert read("plan", tensor=2, pipeline=2).plan.data == 2


# Files of lines


def test_a_bad_line_is_named_by_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "jobs.jsonl"
    wrong = {**SMALL, "training": {"global_batch": -1}}
    path.write_text(f"{json.dumps(SMALL)}\n\n{json.dumps(wrong)}\n")
    jobs = read_jobs(path)
    assert next(jobs)[0] == 1
    with pytest.raises(InputError) as caught:
        next(jobs)
    assert str(caught.value) == f"{path}:3: training.global_batch: -1 is not a number greater than zero"


def test_jobs_may_be_bare_or_inside_runs(tmp_path: Path) -> None:
    path = tmp_path / "jobs.jsonl"
    path.write_text(json.dumps(SMALL) + "\n" + json.dumps({"job": SMALL, "measured": {}}) + "\n")
    (_, bare), (_, inside) = read_jobs(path)
    assert bare == inside
    assert bare.workload.base == tmp_path


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not JSON"),
        ("[]", "run: a run is a table with job and measured"),
        (json.dumps({"job": SMALL}), "run: a run is a table with job and measured"),
        (
            json.dumps({"job": SMALL, "measured": {"step_time": 1}}),
            "measured.step_time: 'step_time' is not a known quantity",
        ),
        (
            json.dumps({"job": SMALL, "measured": {"step_time_s": "1 s"}}),
            "measured.step_time_s: '1 s' is not a number",
        ),
        (
            json.dumps({"job": SMALL, "measured": {}, "note": 1}),
            "note: 'note' is not a known key; allowed are job, measured, provenance",
        ),
    ],
)
def test_a_bad_run_is_named_by_file_and_line(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "runs.jsonl"
    path.write_text(json.dumps({"job": SMALL, "measured": {"step_time_s": 1}}) + "\n" + line + "\n")
    with pytest.raises(InputError) as caught:
        list(read_runs(path))
    assert str(caught.value).startswith(f"{path}:2: {message}")


@pytest.mark.parametrize("provenance", [[1], "me"])
def test_provenance_is_a_table(tmp_path: Path, provenance: object) -> None:
    path = tmp_path / "runs.jsonl"
    path.write_text(json.dumps({"job": SMALL, "measured": {}, "provenance": provenance}))
    with pytest.raises(InputError, match=r":1: provenance: .* is not a table of keys and values"):
        list(read_runs(path))


def test_only_a_newline_ends_a_line(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    run = {"job": SMALL, "measured": {"step_time_s": 1}, "provenance": {"note": "one\u2028two"}}
    path.write_text(json.dumps(run, ensure_ascii=False) + "\n", encoding="utf-8")
    ((line, read_back),) = read_runs(path)
    assert (line, read_back.provenance["note"]) == (1, "one\u2028two")


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    for path in (tmp_path / "missing.jsonl", tmp_path):
        with pytest.raises(InputError, match="cannot be read"):
            list(read_runs(path))
    (tmp_path / "bytes.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(InputError, match=r"bytes\.jsonl: cannot be read"):
        list(read_jobs(tmp_path / "bytes.jsonl"))
    (tmp_path / "job.toml").write_text("[model\n")
    with pytest.raises(InputError, match=r"job\.toml: "):
        Job.load(tmp_path / "job.toml")


# Spellings of other tools

SPELLINGS = {
    ("training", "optimizer"): {
        "adamw": "AdamW torch.optim.AdamW adamw_torch AdamW_HF",
        "adamw-fused": "adamw_torch_fused FusedAdam",
        "sgd": "SGD torch.optim.SGD",
        "adam": "Adam",
        "rmsprop": "RMSprop",
    },
    ("training", "precision"): {
        "bf16": "BF16 bfloat16 torch.bfloat16 bf16-true",
        "amp-bf16": "bf16-mixed bf16_mixed mixed_bf16 AMP_BF16",
        "amp-fp16": "16-mixed fp16-mixed amp 16",
        "fp32": "float32 32-true FP32 no",
    },
    ("training", "mode"): {"train": "training Train", "infer": "inference eval"},
    ("training", "framework"): {
        "pytorch": "PyTorch torch",
        "megatron": "Megatron-LM",
        "torchtitan": "TorchTitan",
    },
    ("plan", "shard"): {
        "none": "ddp DDP NO_SHARD DistributedDataParallel",
        "zero1": "ZeRO-1 deepspeed_stage_1",
        "zero2": "ZeRO-2 SHARD_GRAD_OP ShardingStrategy.SHARD_GRAD_OP",
        "zero3": "fsdp FSDP FULL_SHARD zero-3 deepspeed_stage_3 fsdp2 stage3",
    },
    ("plan", "schedule"): {"1f1b": "1F1B Schedule1F1B", "interleaved": "Interleaved1F1B", "gpipe": "GPipe"},
    ("plan", "recompute"): {
        "full": "gradient_checkpointing Full",
        "selective": "SELECTIVE",
        "operators": "op",
        "none": "off",
    },
    ("model", "source"): {"transformers": "HF huggingface"},
}


@pytest.mark.parametrize(
    ("section", "field", "name", "spelling"),
    [
        (*place, name, spelling)
        for place, meant in SPELLINGS.items()
        for name, spellings in meant.items()
        for spelling in spellings.split()
    ],
)
def test_spellings_of_other_tools_are_read_and_stored_by_our_name(
    section: str, field: str, name: str, spelling: str
) -> None:
    changes: dict[str, Any] = {field: spelling}
    if section == "model":
        tables = {
            **SMALL,
            "model": {"source": spelling, "config": {"model_type": "bert"}, "task": "masked-lm"},
        }
        stored = Job.read(tables, catalog=CATALOG).to_dict()
    else:
        stored = read(section, **changes).to_dict()
    default = {"fp32", "sgd", "pytorch", "none", "1f1b"}
    assert stored[section].get(field, name if name in default else None) == name
    assert Job.read(stored, catalog=CATALOG).to_dict() == stored


def test_booleans_and_numbers_that_stand_for_names() -> None:
    assert read("plan", recompute=True).plan.recompute == "full"
    assert read("plan", recompute=False).plan.recompute == "none"
    assert read("plan", shard=3).plan.shard == "zero3"
    assert read("training", precision=32).workload.training.precision == "fp32"


@pytest.mark.parametrize(
    ("section", "field", "value", "message"),
    [
        (
            "plan",
            "shard",
            "deepspeed",
            "plan.shard: 'deepspeed' does not say which stage; give zero1, zero2 or zero3",
        ),
        ("plan", "shard", "HYBRID_SHARD", "plan.shard: 'HYBRID_SHARD' is not modelled"),
        (
            "plan",
            "shard",
            "deepspeed_stage_2_offload",
            "plan.shard: 'deepspeed_stage_2_offload' is two fields",
        ),
        ("plan", "schedule", "ScheduleDualPipeV", "plan.schedule: 'ScheduleDualPipeV' is not modelled"),
        (
            "training",
            "precision",
            "mixed",
            "training.precision: 'mixed' may be either; give amp-bf16 or amp-fp16",
        ),
        ("training", "precision", "float64", "training.precision: 'float64' is not modelled"),
        ("training", "optimizer", "lion_8bit", "training.optimizer: 'lion_8bit' is not modelled"),
        ("training", "precision", "nf4", "training.precision: 'nf4' is what frozen weights are kept in"),
        ("training", "optimizer", 3, "training.optimizer: 3 is not one of"),
        ("training", "mode", ["train"], "training.mode: ['train'] is not one of"),
    ],
)
def test_what_could_mean_several_things_is_one_clear_line(
    section: str, field: str, value: Any, message: str
) -> None:
    with pytest.raises(InputError) as caught:
        read(section, **{field: value})
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_no_spelling_is_taken_for_two_names() -> None:
    from foretrain import spellings
    from foretrain.spellings import plain

    tables = [
        (spellings.OPTIMIZERS, OPTIMIZERS, spellings.UNCLEAR_OPTIMIZERS),
        (spellings.PRECISIONS, PRECISIONS, spellings.UNCLEAR_PRECISIONS),
        (spellings.SHARDS, (), spellings.UNCLEAR_SHARDS),
        (spellings.SCHEDULES, (), spellings.UNCLEAR_SCHEDULES),
        (spellings.RECOMPUTE, (), {}),
        (spellings.MODES, (), {}),
        (spellings.FRAMEWORKS, (), {}),
    ]
    for meant, names, unclear in tables:
        whole = [set(others.split()) | {name} for name, others in meant.items()]
        whole += [{name} for name in names if name not in meant]
        whole += [set(others.split()) for others in unclear]
        listed = [spelling for spellings_of_one in whole for spelling in spellings_of_one]
        assert len(listed) == len(set(listed)), sorted(one for one in listed if listed.count(one) > 1)
        assert all(plain(spelling) == spelling for spelling in listed)
        assert not names or set(meant) <= set(names)


@pytest.mark.parametrize(
    ("written", "meant", "graphs"),
    [
        ("default", True, False),
        (True, True, False),
        (False, False, False),
        ("reduce_overhead", "reduce-overhead", True),
        ("max-autotune", "max-autotune", True),
        ("max-autotune-no-cudagraphs", "max-autotune-no-cudagraphs", False),
    ],
)
def test_compile_is_a_mode_of_the_compiler(written: object, meant: object, graphs: bool) -> None:
    document = {
        "model": {"source": "timm", "name": "resnet18"},
        "training": {"global_batch": 4, "image": 224, "compile": written},
        "cluster": {"device": "l4"},
    }
    training = Job.read(document, catalog=CATALOG).workload.training
    assert training.compile == meant
    assert training.cuda_graphs == ("step" if graphs else "none")


def test_cuda_graphs_are_said_or_follow_from_the_compiler() -> None:
    assert Training(global_batch=1, graphs="layers").cuda_graphs == "layers"
    assert Training(global_batch=1, graphs="layers", compile="reduce-overhead").cuda_graphs == "layers"
    with pytest.raises(InputError, match=r"training.graphs: 'none', but compile = 'max-autotune' launches"):
        Training(global_batch=1, graphs="none", compile="max-autotune")


@pytest.mark.parametrize(
    ("text", "numbers"),
    [("0.20.0", (0, 20, 0)), ("v0.2.2", (0, 2, 2)), ("core_r0.12", (0, 12)), ("1.15.0.dev0", (1, 15, 0)),
     ("2.7.0+cu128", (2, 7, 0)), ("3", (3,))],
)  # fmt: skip
def test_versions_of_frameworks_are_numbers(text: str, numbers: tuple[int, ...]) -> None:
    assert Training(global_batch=1, framework_version=text).version == numbers


def test_what_is_no_version_is_refused() -> None:
    with pytest.raises(InputError, match=r"training.framework_version: 'newest' is not a version"):
        Training(global_batch=1, framework_version="newest")


# What only provenance tells

MEGATRON: dict[str, Any] = {
    "model": {"source": "transformers", "task": "causal-lm", "config": {"model_type": "gpt2"}},
    "training": {"global_batch": 8, "sequence": 64, "precision": "bf16", "framework": "megatron"},
    "cluster": {"device": "h100-sxm-80gb", "devices_per_node": 8, "nodes": 1},
}


@pytest.mark.parametrize(
    ("provenance", "attention", "gradients"),
    [
        ({"args": {"attention-backend": "unfused"}}, "eager", None),
        ({"args": {"attention-backend": "flash", "transformer-impl": "local"}}, "flash", None),
        ({"args": {"transformer-impl": "local"}}, "eager", None),
        ({"args": {"deterministic-mode": True}, "environment": "lts"}, "eager", None),
        ({"args": {"deterministic-mode": True}, "environment": "dev"}, None, None),
        ({"args": {"grad_reduce_in_fp32": False}}, None, "bf16"),
        ({"args": {"grad_sync_dtype": "bf16"}}, None, "bf16"),
        ({"source": "NVIDIA-NeMo/Megatron-Bridge"}, None, "bf16"),
        ({"args": "none"}, None, None),
    ],
)
def test_runs_tell_what_their_programs_were_set_to(
    provenance: dict[str, Any], attention: str | None, gradients: str | None
) -> None:
    run = Run.read(
        {"job": MEGATRON, "measured": {"step_time_s": 1.0}, "provenance": provenance}, catalog=CATALOG
    )
    training = run.job.workload.training
    assert (training.attention, training.gradient_precision) == (attention, gradients)


def test_runs_tell_where_weights_are_in_fp8_alone() -> None:
    def told(provenance: dict[str, Any], **plan: Any) -> bool | None:
        training, cluster = {**MEGATRON["training"], "precision": "fp8"}, {"device": "b200", "nodes": 1}
        job = {**MEGATRON, "training": training, "cluster": cluster, "plan": plan}
        run = {"job": job, "measured": {"step_time_s": 1.0}, "provenance": provenance}
        return Run.read(run, catalog=CATALOG).job.plan.fp8_gather

    assert told({"args": {"fp8_params": True}}) is True
    assert told({"args": {"fp8_params": True}}, fp8_gather=False) is False
    assert told({"source": "NVIDIA-NeMo/NeMo", "precision_recipe": "FP8-MX"}) is None


def test_recomputation_that_megatron_is_not_told_is_assumed() -> None:
    assert "recompute none" in Job.read(MEGATRON, catalog=CATALOG).assumed
    assert (
        "recompute none" not in Job.read({**MEGATRON, "plan": {"recompute": "none"}}, catalog=CATALOG).assumed
    )
    assert "recompute none" not in read().assumed


@pytest.mark.parametrize(
    ("training", "words"),
    [
        ({"attention": "eager"}, "training.attention: 'eager' is a choice of transformers models"),
        ({"loss": "fused"}, "training.loss: 'fused' is over a vocabulary"),
        ({"mode": "infer", "optimizer_state": "bf16"}, "training.optimizer_state: 'bf16' needs mode"),
        (
            {"optimizer": "adamw-8bit", "optimizer_state": "bf16"},
            "training.optimizer_state: 'bf16' cannot be",
        ),
    ],
)
def test_what_a_training_cannot_keep_is_refused(training: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        read("training", **training)
