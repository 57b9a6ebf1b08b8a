"""Takes a training program of one's own, which a script starts, as what is trained: its options are its own,
its batch is that of one device."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from foretrain.errors import ForetrainError
from foretrain.launchers.commands import StartedProgram
from foretrain.launchers.settings import Reading, Setting, Understood
from foretrain.schema import read
from foretrain.workload import Model, Training

_LAUNCHERS = ("torchrun", "python")
"""Those that say nothing of how a program trains."""
_SIZES = ("image", "sequence", "classes")
_TRAINERS_OWN = ": the Trainer's own"
"""The end of lines that say what transformers' Trainer does by itself."""


def takes(program: StartedProgram, folder: Path) -> bool:
    """Whether a script starts a file that lies with it and trains when it is run."""
    path = folder / program.name
    if program.launcher not in _LAUNCHERS or path.suffix != ".py" or not path.is_file():
        return False
    if folder.resolve() not in path.resolve().parents:
        return False
    from foretrain.capture.programs.targets import read_source

    try:
        return read_source(path).is_script()
    except ForetrainError:
        return False


def take(reading: Reading, program: StartedProgram) -> None:
    """Put the program and its options into the job."""
    section: dict[str, Any] = {"source": "python", "name": program.name}
    arguments: dict[str, Any] = {}
    for setting in program.arguments:
        if setting.unresolved:
            reading.unknown.append(setting)
            continue
        arguments[setting.key.lstrip("-")] = setting.value
        reading.understood.append(Understood(setting, "model.args"))
    reading.unknown += [word for word in program.words if _is_given(word)]
    reading.tables["model"] = section | ({"args": arguments} if arguments else {})
    reading.default("training.framework", "pytorch")


def _is_given(word: Setting) -> bool:
    return word.value not in (None, "")


def is_same(reading: Reading, model: str, base: Path) -> bool:
    """Whether the program that a script starts is named once more."""
    section = reading.tables.get("model") or {}
    if section.get("source") != "python":
        return False
    return Path(model).resolve() == (base / str(section["name"])).resolve()


def complete(reading: Reading, options: Mapping[str, Any], base: Path) -> None:
    """Take over what the program decides of its training, where it is what is trained: the job says the
    same."""
    section = reading.tables["model"]
    if section.get("source") != "python" or options.get("mode", "train") != "train":
        return
    _forget_the_trainer(reading)
    from foretrain.capture.programs.settings import own_training

    sizes = {name: options[name] for name in _SIZES if name in options}
    asked = read(Training, {"global_batch": 1, **sizes}, "training")
    own = own_training(read(Model, section, "model"), base, {name: getattr(asked, name) for name in sizes})
    reading.tables["run"]["of_one_device"] = own.pop("global_batch", None)
    for name, value in own.items():
        if name not in options:
            reading.default(f"training.{name}", value, f"{Path(str(section['name'])).name} says so")


def _forget_the_trainer(reading: Reading) -> None:
    """Take back what transformers' Trainer would do where nothing is said."""
    if reading.whose("training.optimizer") is None:
        reading.tables["training"].pop("optimizer", None)
    if reading.whose("run.micro") is None:
        reading.tables["run"].pop("micro", None)
    reading.assumed[:] = [line for line in reading.assumed if not line.endswith(_TRAINERS_OWN)]
