"""Finds the model that a name means: presets, libraries, checkpoints, files."""

from __future__ import annotations

import difflib
import functools
import itertools
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from foretrain.catalog.sections import Sections
from foretrain.checkpoints import checkpoint_section, explain_path, is_checkpoint, is_file
from foretrain.errors import InputError, unknown
from foretrain.job import SPELLED
from foretrain.library_names import LIBRARIES, all_names, installed_names, library_of

_PREFIXES = ("timm", "torchvision", "transformers", "diffusion", "onnx", "graph")
_ON_HUB = re.compile(r"^(?:(?:hf[-_]hub:)?timm/|hf[-_]hub:)", re.IGNORECASE)
"""In front of names by which the model hub knows timm's models."""

_TRAINING = ("sequence", "image", "classes")
"""Fields of [training] that presets have defaults for."""

_TUNED = frozenset("instruct chat it hf base pt sft dpo unsloth preview thinking reasoning meta".split())
"""Words in names of checkpoints that share their architecture with others."""
_FINE_TUNED = "finetuned"
"""Between the name of an architecture and what it was trained for."""
_QUANTISED = frozenset(
    "gptq awq fp8 int4 int8 4bit 8bit bnb gguf exl2 mlx nf4 w4a16 w8a8 w8a16 nvfp4 mxfp4 hqq aqlm "
    "autoround quantized dynamic".split()
)
"""Words in names of checkpoints whose weights are stored in fewer bits."""
_VERSION = re.compile(r"v\d+(\.\d+)*|\d{4}")
_SUGGESTED = 3


@functools.cache
def _kinds() -> dict[str, Sections]:
    """The presets of each kind, by the name of its file."""
    folder = Path(__file__).parent / "catalog" / "models"
    return {path.stem: Sections(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.toml"))}


def model_presets() -> dict[str, dict[str, Any]]:
    """The models known by name, each with its kind, as a section of a job plus defaults."""
    return {name: _preset(kind, name) for kind, sections in _kinds().items() for name in sections}


def preset_spellings() -> list[str]:
    """List all that presets are called, in lower case."""
    return sorted(_index()[0])


def _preset(kind: str, name: str) -> dict[str, Any]:
    entry = _kinds()[kind][name]
    entry["config"] |= dict.fromkeys(entry.pop("none", ()))
    return {"kind": kind, "source": "transformers", **entry}


@functools.cache
def _index() -> tuple[dict[str, tuple[str, str]], dict[str, tuple[str, str]]]:
    """Kind and name of every preset: by all that it is called, and by what is left of that without words of
    no consequence."""
    exact: dict[str, tuple[str, str]] = {}
    loose: dict[str, tuple[str, str]] = {}
    versions: dict[str, set[tuple[str, str]]] = {}
    for kind, sections in _kinds().items():
        for spelling, name in [*sections.aliases().items(), *((name, name) for name in sections)]:
            meant = kind, name
            exact[spelling.lower()] = exact[_short(spelling)] = meant
            words = _words(spelling)
            loose["".join(words)] = loose["".join(_distinguishing(words, keep="base"))] = meant
            for form in _unversioned(_distinguishing(words, keep="base")):
                versions.setdefault(form, set()).add(meant)
    only = {form: next(iter(names)) for form, names in versions.items() if len(names) == 1}
    return exact, only | loose


def _short(name: str) -> str:
    """Leave the organisation out: Qwen/Qwen3-8B is qwen3-8b."""
    last = name.rpartition("/")[2]
    return (name if last.isdigit() else last).lower()


def _squeezed(name: str) -> str:
    return re.sub(r"[\s_-]+", "", name)


def _words(name: str) -> list[str]:
    """
    >>> _words("meta-llama/Llama-3.1-8B-Instruct")
    ['llama', '3.1', '8b', 'instruct']
    """
    return [word for word in re.split(r"[\s_:-]+", _short(name)) if word]


def _distinguishing(words: list[str], dropped: frozenset[str] = _TUNED, keep: str = "") -> list[str]:
    """Keep the words that tell architectures apart."""
    return [word for word in words if word not in dropped or word == keep]


def _unversioned(words: list[str]) -> Iterator[str]:
    """The words in one, without ever more of the versions and dates behind them."""
    while words and _VERSION.fullmatch(words[-1]):
        words = words[:-1]
        yield "".join(words)


def _forms(name: str) -> Iterator[str]:
    """A name with ever less of what does not tell architectures apart, without separators."""
    words = _words(name)
    yield "".join(words)
    yield "".join(_distinguishing(words))
    words = _distinguishing(words, _TUNED | _QUANTISED)
    yield "".join(words)
    yield from _unversioned(words)
    if _FINE_TUNED in words:
        yield "".join(itertools.takewhile(lambda word: word != _FINE_TUNED, _words(name)))


def find_preset(name: str) -> dict[str, Any] | None:
    """Everything about the preset that a name means: in any case, without its organisation, as tuned.

    >>> for name in ("llama-3.1-70b", "unsloth/Llama-3.1-70B-Instruct"):
    ...     print((find_preset(name) or {})["name"])
    meta-llama/Llama-3.1-70B
    meta-llama/Llama-3.1-70B
    """
    preset = _exact(name) or _loose(name)
    return None if preset is None else _whole(preset)


def exact_preset(name: str) -> dict[str, Any] | None:
    """The preset that goes by this very name, in any case and without its organisation."""
    preset = _exact(name)
    return None if preset is None else _whole(preset)


def _whole(preset: tuple[str, str]) -> dict[str, Any]:
    return {"name": preset[1], **_preset(*preset)}


def _exact(name: str) -> tuple[str, str] | None:
    exact, _ = _index()
    return exact.get(name.strip().lower()) or exact.get(_short(name.strip()))


def _loose(name: str) -> tuple[str, str] | None:
    _, loose = _index()
    return next((loose[form] for form in _forms(name) if form in loose), None)


def model_section(model: str, source: str | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """The [model] section for a name, and fields of [training] that come with it.

    A name that nothing goes by is refused here, before any library is imported.
    """
    prefix, _, rest = model.partition(":")
    if source is None and prefix.lower() in _PREFIXES and rest:
        source, model = prefix.lower(), rest
    source = None if source is None else SPELLED["source"](source, "model.source")
    if source == "transformers":
        return _of_transformers(model)
    if source == "diffusion" and (preset := _exact(model)) is not None and preset[0] == source:
        return _section_of(preset, model)
    if source is not None:
        _check_library(source, model)
        return {"source": source, "name": model}, {}
    if is_checkpoint(Path(model)):
        return checkpoint_section(Path(model))
    if (file_source := _source_of_file(model)) is not None:
        return {"source": file_source, "name": model}, {}
    if (preset := _exact(model)) is not None:
        return _section_of(preset, model)
    if (sections := _of_library(model) or _of_preset(model)) is not None:
        return sections
    raise _refusal(model)


def _of_transformers(model: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """A type of models with its defaults, or a preset."""
    types = all_names("transformers")
    if model not in types and (preset := _exact(model)) is not None:
        return _section_of(preset, model)
    if model not in types and "transformers" not in sys.modules:
        raise unknown("model.config.model_type", model, types, "a transformers model type;")
    return {"source": "transformers", "config": {"model_type": model}}, {"optimizer": "adamw"}


def _source_of_file(model: str) -> str | None:
    """Name the source of a path by its ending."""
    if model.endswith(".zst"):
        return "graph"
    if model.endswith(".onnx"):
        return "onnx"
    return "python" if re.search(r"\.py(:|$)", model) else None


def _check_library(library: str, model: str) -> None:
    """Refuse what an installed library does not have, unless it is loaded and may know more by now."""
    names = installed_names(library) if library in ("torchvision", "timm") else ()
    if names and library not in sys.modules and model.partition(".")[0] not in names:
        raise unknown("model.name", model, names, f"a {library} model;")


def check_file(model: str) -> None:
    """Refuse the path of a model where there is no file, with the names of those that are near."""
    path = Path(re.sub(r"(?<=\.py):.*", "", model))
    if _source_of_file(model) is not None and not is_file(path):
        if path.is_dir():
            raise InputError(f"model.name: {str(path)!r} cannot be read: it is a folder")
        names = [str(other) for other in _files(path.parent) if other.suffix == path.suffix]
        near = difflib.get_close_matches(str(path), names, n=_SUGGESTED, cutoff=0.6)
        raise InputError(
            f"model.name: {str(path)!r} cannot be read: there is no such file{_did_you_mean(near)}"
        )


def _section_of(preset: tuple[str, str], asked: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The section of a preset; weights in fewer bits are told to what builds the model, which notes it."""
    entry = _preset(*preset)
    defaults = {"optimizer": "adamw", **{name: entry[name] for name in _TRAINING if name in entry}}
    if entry["source"] == "diffusion":
        return {"source": "diffusion", "name": preset[1]}, defaults
    section = {name: entry[name] for name in ("source", "task", "config")}
    section["title"] = preset[1].rpartition("/")[2]
    if methods := [word for word in _words(asked) if word in _QUANTISED and word not in preset[1].lower()]:
        section["config"] = {**section["config"], "quantization_config": {"quant_method": methods[0]}}
    return section, defaults


def _of_preset(model: str) -> tuple[dict[str, Any], dict[str, Any]] | None:
    preset = _loose(model)
    return None if preset is None else _section_of(preset, model)


def _of_library(model: str) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """A model of torchvision or timm, by the library's own name in any case, or as the model hub has it."""
    name, on_hub = _ON_HUB.sub("", model), bool(_ON_HUB.match(model))
    for spelling in dict.fromkeys((name, name.lower(), name.lower().replace("-", "_"))):
        if on_hub:
            if spelling.partition(".")[0] in all_names("timm"):
                return {"source": "timm", "name": spelling}, {}
        elif (library := library_of(spelling.partition(".")[0])) in ("torchvision", "timm"):
            return {"source": "timm" if "." in spelling else library, "name": spelling}, {}
    timm = sys.modules.get("timm")
    if timm is not None and hasattr(timm, "is_model") and timm.is_model(name):
        return {"source": "timm", "name": name}, {}
    return None


def _refusal(model: str) -> InputError:
    """Say what is near a name that is no model's."""
    path = Path(model)
    if not model.strip():
        return InputError(f"model: {model!r} is no name; give a model's, or that of a file")
    if (reason := explain_path(path)) is not None:
        return InputError(f"model: {model!r} is {reason}")
    as_file = path.suffix in (".toml", ".json", ".yaml", ".yml") or model.startswith((".", "/", "~"))
    if as_file and not is_file(path):
        near = difflib.get_close_matches(str(path), map(str, _files(path.parent)), n=_SUGGESTED)
        return InputError(f"model: {model!r} is not a file or a folder{_did_you_mean(near)}")
    if is_file(path):
        return InputError(
            f"model: {model!r} is a file of no kind that is known by its name: a job (.toml, .json), a graph "
            "(.zst), Python (.py), ONNX (.onnx), or what launches a training (--from)"
        )
    kinds = {name.lower(): name for name in all_names("transformers")}
    if (kind := kinds.get(model.lower()) or kinds.get(model.lower().replace("-", "_"))) is not None:
        return InputError(f"model: {model!r} is a type of models of transformers; {_of_type(kind)}")
    more = "; another checkpoint is given by its folder or config.json" if "/" in model else ""
    return InputError(
        f"model: {model!r} is no preset (foretrain catalog models), no model of torchvision or timm and no "
        f"file{_did_you_mean(_near(model))}{more}"
    )


def _did_you_mean(names: Sequence[str]) -> str:
    """
    >>> _did_you_mean(["resnet50", "resnet51q", "resnet18"])
    ' (did you mean resnet50, resnet51q or resnet18?)'
    """
    listed = " or ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))
    return f" (did you mean {listed}?)" if names else ""


def _of_type(kind: str) -> str:
    """Say what there is to name of a type of models."""
    presets = [
        name
        for sections in _kinds().values()
        for name in sections
        if f'model_type = "{kind}"' in sections.text(name)
    ]
    checkpoint = "give a checkpoint's folder or its config.json"
    if not presets:
        return f"{checkpoint}, or a job file with model.config"
    more = f" or {len(presets) - _SUGGESTED} more" if len(presets) > _SUGGESTED else ""
    return f"name one of them ({', '.join(presets[:_SUGGESTED])}{more}), or {checkpoint}"


def _near(model: str) -> list[str]:
    """The names of all sources, and the files of this folder, that are closest to a name."""
    candidates: dict[str, str] = {}
    files = map(str, _files(Path()))
    for name in (*files, *(name for library in LIBRARIES for name in sorted(all_names(library)))):
        candidates.setdefault(_squeezed(name.lower()), name)
    for spelling, (_, name) in _index()[0].items():
        candidates.setdefault(_squeezed(_short(spelling)), name)
    near = difflib.get_close_matches(_squeezed(_short(model)), candidates, n=2 * _SUGGESTED, cutoff=0.6)
    return list(dict.fromkeys(candidates[name] for name in near))[:_SUGGESTED]


def _files(folder: Path) -> Iterator[Path]:
    """List what a model can be read from in a folder."""
    try:
        entries = sorted(folder.iterdir())
    except OSError:
        return
    for path in entries:
        if path.suffix in (".py", ".onnx", ".toml", ".json") or (path / "config.json").is_file():
            yield path
