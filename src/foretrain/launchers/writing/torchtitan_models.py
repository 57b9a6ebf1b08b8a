"""Finds the model of torchtitan that a job trains: its family, its flavor, and what configures it."""

from __future__ import annotations

from dataclasses import dataclass

from foretrain.errors import InputError
from foretrain.launchers.torchtitan import DEBUG_CONFIG, PRESETS
from foretrain.launchers.writing.model_config import given
from foretrain.model_names import find_preset
from foretrain.workload import Model

_SHAPE = (
    "hidden_size", "intermediate_size", "moe_intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "vocab_size", "num_experts", "num_experts_per_tok", "n_shared_experts",
    "first_k_dense_replace", "kv_lora_rank", "q_lora_rank", "head_dim",
)  # fmt: skip
"""What makes a flavor; lengths and how positions are scaled do not."""
_SPELLED = {
    "0.6b": "0.6B", "1.7b": "1.7B", "1b": "1B", "3b": "3B", "4b": "4B", "8b": "8B", "14b": "14B",
    "16b": "16B", "32b": "32B", "70b": "70B", "236b": "236B", "405b": "405B", "671b": "671B",
    "30b-a3b": "30B-A3B", "235b-a22b": "235B-A22B",
}  # fmt: skip
_REGISTERED = {
    "llama3": ("8b", "70b", "debugmodel"),
    "qwen3": ("0.6b", "1.7b", "14b", "32b", "30b-a3b"),
    "deepseek_v3": ("16b", "671b"),
    "gpt_oss": ("20b", "120b"),
}
"""Flavors that have a configuration of their own in ``config_registry.py`` (that of llama3 405B multiplies in
fp8); others take the first one of their family with another model."""
_NOT_IN_TOML = {("llama3", "1b"), ("llama3", "3b")}
"""Came after v0.2.2."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flavor:
    """A model of ``torchtitan/models``."""

    family: str
    key: str
    """In lower case."""

    @property
    def name(self) -> str:
        """Spell the name as torchtitan does."""
        return _SPELLED.get(self.key, self.key)

    @property
    def config_function(self) -> str | None:
        """Name the function that makes a configuration; None where the version with Python has no such
        family."""
        known = _REGISTERED.get(self.family)
        if known is None:
            return None
        own = self.key if self.key in known else known[0]
        return f"{self.family}_{own.replace('-', '_').replace('.', '_')}"

    @property
    def registered(self) -> bool:
        """Whether the configuration function is of this very flavor."""
        return self.key in _REGISTERED.get(self.family, ())

    @property
    def in_toml(self) -> bool:
        return (self.family, self.key) not in _NOT_IN_TOML


def flavor_of(model: Model) -> Flavor:
    """The flavor with the shape of the job's model; others are refused."""
    wanted = {name: given(model, name) for name in _SHAPE}
    if model.source == "transformers":
        for family, flavors in PRESETS.items():
            for key, preset in flavors.items():
                if _shape_of(find_preset(preset)) == (model.model_type, wanted):
                    return Flavor(family=family, key=key)
        if _shape_of({"config": DEBUG_CONFIG}) == (model.model_type, wanted):
            return Flavor(family="llama3", key="debugmodel")
    known = ", ".join(f"{family} {', '.join(flavors)}" for family, flavors in PRESETS.items())
    raise InputError(f"model: {model.label} is not one that torchtitan has by these sizes: {known}")


def _shape_of(preset: dict[str, object] | None) -> tuple[object, dict[str, object]] | None:
    if preset is None:
        return None
    config = preset["config"]
    assert isinstance(config, dict)
    model = Model(source="transformers", config=config)
    return model.model_type, {name: given(model, name) for name in _SHAPE}
