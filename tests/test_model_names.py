"""Names of models: what people paste is found, what is not is answered at once, and presets are as
published."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from foretrain import library_names, model_names
from foretrain.api import make_job
from foretrain.architectures import family
from foretrain.checkpoints import is_checkpoint
from foretrain.cli.job_options import job_from
from foretrain.errors import InputError
from foretrain.job import Job
from foretrain.model_names import find_preset, model_presets, model_section
from foretrain.workload import Model

PRESETS = model_presets()


def preset_of(name: str) -> str:
    found = find_preset(name)
    assert found is not None, name
    return str(found["name"])


# Presets


def test_there_are_presets_of_every_kind() -> None:
    assert len(PRESETS) >= 200
    assert {preset["kind"] for preset in PRESETS.values()} == {
        "language", "encoders", "encoder_decoders", "vision", "speech", "diffusion",
    }  # fmt: skip


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_the_model_of_a_job(name: str) -> None:
    preset = PRESETS[name]
    assert preset["parameters"] > 1e6
    assert preset["about"].endswith(")")
    section, defaults = model_section(name, None)
    assert set(defaults) <= {"optimizer", "sequence", "image", "classes"}
    if section["source"] == "transformers":
        assert family(Model(**section)) == preset["config"]["model_type"]
    assert preset_of(name) == preset_of(name.upper()) == preset_of(name.rpartition("/")[2]) == name
    for alias in preset.get("aliases", ()):
        assert preset_of(alias) == preset_of(alias.lower()) == name


def test_no_name_is_claimed_by_two_presets() -> None:
    claimed: dict[str, str] = {}
    for name, preset in PRESETS.items():
        for spelling in (name, *preset.get("aliases", ())):
            short = model_names._short(spelling)
            assert claimed.setdefault(short, name) == name, spelling


def test_types_of_presets_are_types_of_transformers() -> None:
    types = library_names.shipped_names()["transformers"]
    of_library = [preset for preset in PRESETS.values() if preset["source"] == "transformers"]
    assert {preset["config"]["model_type"] for preset in of_library} <= types


@pytest.mark.parametrize(
    "name",
    [
        "openai-community/gpt2", "google-bert/bert-base-uncased", "TinyLlama-1.1B", "google/flan-t5-small",
        "EleutherAI/pythia-160m", "facebook/opt-350m", "albert/albert-base-v2", "state-spaces/mamba-130m-hf",
        "facebook/dinov2-small", "microsoft/swin-tiny-patch4-window7-224", "openai/whisper-tiny",
        "facebook/wav2vec2-base-960h", "deepseek-ai/DeepSeek-V2-Lite", "Qwen/Qwen3-30B-A3B",
        "nvidia/segformer-b0-finetuned-ade-512-512", "google/gemma-3-1b-pt",
    ],
)  # fmt: skip
def test_parameters_are_as_published(name: str) -> None:
    """A sample; ``benchmarks/model_names.py`` counts all."""
    from foretrain.capture.sources.models import load_model

    module = load_model(make_job(name, batch=1).workload, 1).module
    preset = PRESETS[preset_of(name)]
    count = sum(parameter.numel() for parameter in module.parameters()) + preset.get("shared", 0)
    assert count == pytest.approx(preset["parameters"], rel=0.015)


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        ("Llama-3.1-70B", "meta-llama/Llama-3.1-70B"),
        ("meta-llama/Meta-Llama-3.1-70B-Instruct", "meta-llama/Llama-3.1-70B"),
        ("unsloth/Llama-3.1-8B", "meta-llama/Llama-3.1-8B"),
        ("Llama 3.1 8B", "meta-llama/Llama-3.1-8B"),
        ("llama3.1:8b", "meta-llama/Llama-3.1-8B"),
        ("llama_3_8b", "meta-llama/Meta-Llama-3-8B"),
        ("llama-2-7b", "meta-llama/Llama-2-7b-hf"),
        ("meta-llama/Llama-2-7b-chat-hf", "meta-llama/Llama-2-7b-hf"),
        ("QWEN/qwen3-8b-base", "Qwen/Qwen3-8B"),
        ("google/gemma-2-9b-it", "google/gemma-2-9b"),
        ("mistralai/Mixtral-8x7B-Instruct-v0.1", "mistralai/Mixtral-8x7B-v0.1"),
        ("Mixtral-8x7B", "mistralai/Mixtral-8x7B-v0.1"),
        ("mistral-7b-instruct", "mistralai/Mistral-7B-v0.1"),
        ("mistralai/Mistral-7B-Instruct-v0.2", "mistralai/Mistral-7B-v0.2"),
        ("mistralai/Mistral-7B-Instruct-v0.3", "mistralai/Mistral-7B-v0.3"),
        ("deepseek-ai/DeepSeek-V3-Base", "deepseek-ai/DeepSeek-V3"),
        ("deepseek-ai/DeepSeek-R1", "deepseek-ai/DeepSeek-V3"),
        ("moonshotai/Kimi-K2", "moonshotai/Kimi-K2-Base"),
        ("state-spaces/mamba-2.8b", "state-spaces/mamba-2.8b-hf"),
        ("bert-base-uncased", "google-bert/bert-base-uncased"),
        ("bert-base", "google-bert/bert-base-uncased"),
        ("t5-small", "google-t5/t5-small"),
        ("distilbert-base-uncased-finetuned-sst-2-english", "distilbert/distilbert-base-uncased"),
        ("vit-b-16", "google/vit-base-patch16-224"),
        ("google/flan-t5-xl", "google/flan-t5-xl"),
    ],
)
def test_names_as_people_paste_them(name: str, preset: str) -> None:
    assert preset_of(name) == preset
    assert model_section(name, None)[0]["config"] == PRESETS[preset]["config"]


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("TheBloke/Llama-2-7B-GPTQ", "gptq"),
        ("Qwen/Qwen3-8B-FP8", "fp8"),
        ("unsloth/Llama-3.2-1B-Instruct-bnb-4bit", "bnb"),
    ],
)
def test_weights_in_fewer_bits_are_the_same_architecture_with_a_note(name: str, method: str) -> None:
    config = model_section(name, None)[0]["config"]
    assert config == {**PRESETS[preset_of(name)]["config"], "quantization_config": {"quant_method": method}}


def test_what_a_preset_says_is_a_default() -> None:
    assert make_job("gpt2").workload.training.sequence == 1024
    assert make_job("gpt2", sequence=128).workload.training.sequence == 128
    assert make_job("facebook/deit-tiny-patch16-224").workload.training.classes == 1000
    assert make_job("facebook/deit-tiny-patch16-224", classes=10).workload.training.classes == 10


def test_options_are_spelled_as_elsewhere() -> None:
    job = make_job(
        "gpt2", precision="bf16-mixed", optimizer="torch.optim.AdamW", shard="FSDP", device="Tesla T4"
    )
    stored = job.to_dict()
    assert stored["training"]["precision"] == "amp-bf16"
    assert stored["training"]["optimizer"] == "adamw"
    assert stored["plan"]["shard"] == "zero3"
    assert stored["cluster"]["device"] == "t4"


# Libraries


@pytest.mark.parametrize(
    ("name", "source", "found"),
    [
        ("resnet50", "torchvision", "resnet50"),
        ("ResNet50", "torchvision", "resnet50"),
        ("efficientnet-b0", "torchvision", "efficientnet_b0"),
        ("fasterrcnn_resnet50_fpn", "torchvision", "fasterrcnn_resnet50_fpn"),
        ("vit_base_patch16_224", "timm", "vit_base_patch16_224"),
        ("resnet50.a1_in1k", "timm", "resnet50.a1_in1k"),
        ("timm/vit_base_patch16_224.augreg_in21k", "timm", "vit_base_patch16_224.augreg_in21k"),
        ("hf-hub:timm/resnet50.a1_in1k", "timm", "resnet50.a1_in1k"),
        ("tv_resnet50", "timm", "tv_resnet50"),
        ("timm:resnet50", "timm", "resnet50"),
        ("TIMM:resnet50", "timm", "resnet50"),
    ],
)
def test_names_of_libraries(name: str, source: str, found: str) -> None:
    assert model_section(name, None) == ({"source": source, "name": found}, {})


def test_names_read_from_the_source_are_those_that_libraries_list() -> None:
    transformers = pytest.importorskip("transformers")
    from foretrain.capture.sources.zoo import import_zoo

    timm, torchvision = import_zoo("timm"), import_zoo("torchvision")
    assert library_names.installed_names("torchvision") == set(torchvision.models.list_models())
    assert library_names.installed_names("timm") >= set(timm.list_models())
    types = set(transformers.models.auto.configuration_auto.CONFIG_MAPPING_NAMES)
    assert library_names.installed_names("transformers") == types


def test_shipped_names_are_those_of_the_versions_they_name() -> None:
    import tomllib

    path = Path(library_names.__file__).parent / "catalog" / "library_names.toml"
    for library, entry in tomllib.loads(path.read_text()).items():
        if version(library).partition("+")[0] == entry["version"]:
            assert library_names.shipped_names()[library] == library_names.installed_names(library)


def test_shipped_names_stand_in_for_a_library_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library_names, "_folder", lambda library: None)
    assert model_section("resnet50", None)[0]["source"] == "torchvision"
    with pytest.raises(InputError, match="did you mean resnet50"):
        model_section("resnet5O", None)


def test_a_model_that_the_user_registered_with_timm_is_found() -> None:
    from foretrain.capture.sources.zoo import import_zoo

    timm = import_zoo("timm")

    def a_net_of_my_own(pretrained: bool = False, **kwargs: Any) -> Any:
        return timm.create_model("resnet18", **kwargs)

    a_net_of_my_own.__module__ = "timm.models.resnet"
    timm.models.register_model(a_net_of_my_own)
    assert model_section("a_net_of_my_own", None) == ({"source": "timm", "name": "a_net_of_my_own"}, {})
    assert model_section("a_net_of_my_own", "timm") == ({"source": "timm", "name": "a_net_of_my_own"}, {})


def test_transformers_as_a_source() -> None:
    assert model_section("llama", "HF") == (
        {"source": "transformers", "config": {"model_type": "llama"}},
        {"optimizer": "adamw"},
    )
    assert model_section("transformers:Qwen/Qwen3-8B", None) == model_section("Qwen/Qwen3-8B", None)


# Names that nothing goes by


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("resnet5O", ["'resnet5O' is no preset", "did you mean resnet50"]),
        ("llamma-3-8b", ["did you mean meta-llama/Meta-Llama-3-8B"]),
        ("bert-base-uncassed", ["google-bert/bert-base-uncased"]),
        ("vit_base_patch16_242", ["vit_base_patch16_224"]),
        ("nobody/none-such-9000b-x", ["another checkpoint is given by its folder or config.json"]),
        ("llama", ["is a type of models of transformers", "meta-llama/", "config.json"]),
        ("afmoe", ["is a type of models of transformers", "config.json", "model.config"]),
        ("./checkpoint-50", ["'./checkpoint-50' is not a file or a folder", "did you mean checkpoint-500"]),
        ("checkpoint-50", ["did you mean checkpoint-500"]),
        ("empty", ["'empty' is a folder without a config.json"]),
        ("adapter", ["an adapter of meta-llama/Llama-3.1-8B"]),
        ("", ["'' is no name"]),
        ("graph.out", ["'graph.out' is a file of no kind", ".toml", ".zst"]),
        ("weights.safetensors", ["a file of weights alone", "config.json"]),
        ("x" * 5000, ["is no preset"]),
        ("transformers:lama", ["model.config.model_type", "did you mean", "llama"]),
    ],
)
def test_a_wrong_name_is_one_line_with_the_closest(
    name: str, parts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("checkpoint-500", "empty", "adapter"):
        Path(folder).mkdir()
    Path("checkpoint-500/config.json").write_text('{"model_type": "bert"}')
    Path("adapter/adapter_config.json").write_text('{"base_model_name_or_path": "meta-llama/Llama-3.1-8B"}')
    Path("weights.safetensors").touch()
    Path("graph.out").touch()
    monkeypatch.setattr(
        sys, "modules", {name: module for name, module in sys.modules.items() if name != "transformers"}
    )
    with pytest.raises(InputError) as caught:
        model_section(name, None)
    assert "\n" not in str(caught.value)
    for part in parts:
        assert part in str(caught.value)


def test_a_wrong_file_is_answered_with_the_closest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my_model.py").touch()
    with pytest.raises(InputError, match=r"'my_modle.py' cannot be read.*did you mean my_model.py"):
        job_from("my_modle.py:net", {})


def test_a_wrong_name_is_refused_before_libraries_are_imported() -> None:
    code = (
        "import sys\n"
        "from typer.testing import CliRunner\n"
        "from foretrain.cli import app\n"
        "for name in ('resnet5O', 'timm:resnet5O', 'llama', 'nowhere.onnx', './nowhere'):\n"
        "    assert CliRunner().invoke(app, ['predict', name]).exit_code == 2, name\n"
        "slow = {'torch', 'timm', 'transformers', 'torchvision', 'pandas', 'sklearn', 'lightgbm'} & set(sys.modules)\n"
        "assert not slow, slow\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


# Checkpoints

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100,
    "max_position_embeddings": 131072, "bos_token_id": 1, "eos_token_id": [2, 3], "torch_dtype": "bfloat16",
    "rope_scaling": None, "pretraining_tp": 1, "transformers_version": "4.43.0", "_name_or_path": "somewhere",
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "task", "sequence"),
    [
        (LLAMA, "causal-lm", 4096),
        ({"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_positions": 1024}, "causal-lm", 1024),
        ({"architectures": ["BertForMaskedLM"], "model_type": "bert", "max_position_embeddings": 512}, "masked-lm", 512),
        ({"architectures": ["RobertaForSequenceClassification"], "model_type": "roberta",
          "max_position_embeddings": 514, "vocab_size": 50265}, "sequence-classification", 512),
        ({"architectures": ["BertForPreTraining"], "model_type": "bert", "vocab_size": 9}, "pretraining", 512),
        ({"architectures": ["T5ForConditionalGeneration"], "model_type": "t5", "n_positions": 512}, "seq2seq-lm", 512),
        ({"architectures": ["WhisperForConditionalGeneration"], "model_type": "whisper", "num_mel_bins": 80,
          "vocab_size": 51865}, "speech-seq2seq", None),
        ({"architectures": ["LlavaForConditionalGeneration"], "model_type": "llava", "vision_config": {},
          "text_config": {"max_position_embeddings": 2048}}, "image-text-to-text", 2048),
        ({"architectures": ["ViTForImageClassification"], "model_type": "vit", "image_size": 224},
         "image-classification", None),
        ({"architectures": ["Wav2Vec2ForCTC"], "model_type": "wav2vec2", "conv_dim": [512]}, "ctc", 160000),
        ({"architectures": ["Wav2Vec2ForSequenceClassification"], "model_type": "wav2vec2", "conv_dim": [512]},
         "audio-classification", 160000),
        ({"architectures": ["MambaForCausalLM"], "model_type": "mamba", "vocab_size": 50280}, "causal-lm", 2048),
        ({"architectures": ["BertModel"], "model_type": "bert", "vocab_size": 9}, "base", 512),
        ({"model_type": "t5", "vocab_size": 9}, None, 512),
        ({"architectures": ["MarianMTModel"], "model_type": "marian"}, "seq2seq-lm", 512),
        ({"architectures": ["ResNetForImageClassification"], "model_type": "resnet"}, "image-classification", None),
        ({"architectures": ["BeitModel"], "model_type": "beit", "vocab_size": 9, "image_size": 224}, "base", None),
    ],
)  # fmt: skip
def test_a_checkpoint_folder_is_a_model(
    config: dict[str, Any], task: str | None, sequence: int | None, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    for target in (tmp_path, tmp_path / "config.json"):
        section, defaults = model_section(str(target), None)
        assert section["source"] == "transformers"
        assert section["config"]["model_type"] == config["model_type"]
        assert section.get("task") == task
        assert defaults.get("sequence") == sequence
        assert not {"architectures", "transformers_version", "_name_or_path"} & set(section["config"])


def test_labels_of_a_checkpoint_are_its_classes(tmp_path: Path) -> None:
    config = {
        "architectures": ["BertForSequenceClassification"],
        "model_type": "bert",
        "id2label": {"0": "no", "1": "so", "2": "yes"},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert model_section(str(tmp_path), None)[0]["config"] == {"model_type": "bert", "num_labels": 3}


def test_what_published_files_say_twice_or_call_their_own(tmp_path: Path) -> None:
    config = {"model_type": "gemma2", "hidden_act": "gelu", "hidden_activation": "gelu_pytorch_tanh"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "hidden_act" not in model_section(str(tmp_path), None)[0]["config"]
    (tmp_path / "config.json").write_text('{"model_type": "kimi_k2", "hidden_act": "silu"}')
    assert model_section(str(tmp_path), None)[0]["config"] == {
        "model_type": "deepseek_v3",
        "hidden_act": "silu",
    }


def test_a_job_file_and_a_configuration_are_told_apart_by_what_they_hold(tmp_path: Path) -> None:
    config, job = tmp_path / "config.json", tmp_path / "job.json"
    config.write_text(json.dumps(LLAMA))
    job.write_text(json.dumps(make_job("gpt2", batch=4).to_dict()))
    assert is_checkpoint(config)
    assert not is_checkpoint(job)
    assert job_from(str(config), {"batch": 2}).workload.model.config["hidden_size"] == 64  # type: ignore[index]
    assert job_from(str(job), {}).workload.model.config == {"model_type": "gpt2"}
    assert Job.read(job_from(str(tmp_path), {"sequence": 64}).to_dict()).workload.training.sequence == 64


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ('{"hidden_size": 4}', "model_type is missing"),
        ('{"_class_name": "UNet2DConditionModel"}', "diffusers"),
        ("[1]", "a table of keys and values"),
        ("{", "not JSON"),
    ],
)
def test_a_folder_whose_configuration_names_no_model(text: str, part: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(InputError, match=part):
        model_section(str(tmp_path), None)


def test_a_checkpoint_that_timm_wrote(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        '{"architecture": "resnet18", "num_classes": 10, "pretrained_cfg": {}}'
    )
    section, _ = model_section(str(tmp_path), None)
    assert section == {"source": "timm", "name": "resnet18", "args": {"num_classes": 10}}


def test_a_checkpoint_is_built_and_traced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from foretrain.capture import capture_job

    monkeypatch.setenv("FORETRAIN_CACHE", str(tmp_path / "cache"))
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    graph = capture_job(job_from(str(tmp_path), {"batch": 2, "sequence": 32}))
    assert graph.tokens == 64
    assert any("torch_dtype not used" in note for note in graph.info["assumptions"])


def test_a_file_of_no_known_kind_is_not_said_to_be_missing(tmp_path: Path) -> None:
    path = tmp_path / "notes"
    path.write_text("nothing")
    with pytest.raises(InputError, match="is a file of no kind that is known by its name"):
        model_section(str(path), None)
