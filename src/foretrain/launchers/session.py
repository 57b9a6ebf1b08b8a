"""Takes in launch files and those that they name, and gives each of their settings to its reader."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from foretrain.errors import InputError
from foretrain.launchers import (
    accelerate,
    automodel,
    axolotl,
    bridge,
    deepspeed,
    huggingface,
    job_file,
    megatron,
    own_program,
    torchtitan,
)
from foretrain.launchers.commands import StartedProgram, program_of, read_script
from foretrain.launchers.documents import read_document, settings_of
from foretrain.launchers.kinds import (
    MARKS,
    bare,
    bridge_model,
    last_of_each,
    reader_of,
    registered,
    renamed,
    torchtitan_model,
)
from foretrain.launchers.lexer import statements
from foretrain.launchers.python_config import read_python, trainer_settings
from foretrain.launchers.settings import Key, Reading, Setting, dashed, take, text, whole
from foretrain.launchers.shell import Shell, Word

_READERS: dict[str, Callable[[Reading, Iterable[Setting]], None]] = {
    "deepspeed": deepspeed.read,
    "accelerate": accelerate.read,
    "torchtitan": torchtitan.read,
    "automodel": automodel.read,
    "axolotl": axolotl.read,
    "megatron": megatron.read,
    "megatron-bridge": bridge.read,
    "transformers": huggingface.read,
    "foretrain": job_file.read,
}
"""In the order in which they read: files that others complete come first."""


class Session:
    """The files of one launch, and the settings that each reader has of them."""

    def __init__(self, reading: Reading) -> None:
        self.reading = reading
        self.files: list[str] = []
        self.settings: dict[str, list[Setting]] = {}
        self.launcher_options: list[Setting] = []

    @property
    def framework(self) -> str:
        """Whose files they are: the last reader's, whose files those of the others complete."""
        return next((name for name in reversed(_READERS) if name in self.settings), "")

    def read(self) -> None:
        """Have every reader read its settings, in turn."""
        for name, read in _READERS.items():
            if name not in self.settings:
                continue
            settings = last_of_each(self.settings[name])
            if name == "megatron-bridge":
                bridge.read(self.reading, settings, launcher=self.launcher_options)
            else:
                read(self.reading, settings)

    def give(self, reader: str, settings: Iterable[Setting]) -> None:
        self.settings.setdefault(reader, []).extend(settings)

    def add(self, name: str, folder: Path | None = None) -> None:
        """Take in one file, by its ending."""
        file, colon, function = name.partition(".py:")
        path = Path(f"{file}.py" if colon else name)
        path = path if folder is None else folder / path
        if str(path) in self.files:
            return
        if not path.is_file():
            raise InputError(
                f"{path}: {'is a folder, not a file' if path.is_dir() else 'there is no such file'}"
            )
        self.files.append(str(path))
        if path.suffix == ".py":
            self.add_python(path, function or None)
        elif path.suffix in (".yaml", ".yml", ".json", ".toml"):
            self.add_document(path)
        else:
            self.add_program(read_script(path, self.reading), path)

    def add_document(self, path: Path) -> None:
        table, settings = read_document(path)
        if {"model", "training", "cluster"} <= set(table):
            raise InputError(f"{path}: a job file already; give it without --from")
        kind = next((kind for kind, marks in MARKS if marks <= set(table)), None)
        if kind is None:
            readers = ", ".join(dict.fromkeys(kind for kind, _ in MARKS))
            raise InputError(f"{path}: none of its keys tells whose file it is: {readers}")
        if kind == "skypilot":
            self.add_skypilot(path, table)
            return
        if kind == "trainjob":
            self.add_trainjob(path, table)
            return
        self.give(kind, settings)
        for setting in settings:
            if setting.key in ("deepspeed", "deepspeed_config.deepspeed_config_file") and setting.value:
                self.follow(setting, path)

    def follow(self, setting: Setting, path: Path) -> None:
        """Take in a file that another names: beside it, from where commands are run, or by its last name."""
        name = str(setting.value)
        tried = [path.parent / name, Path(name), path.parent / Path(name).name]
        tried += [parent / name for parent in path.resolve().parents]
        followed = next((one for one in tried if "$" not in str(one) and one.is_file()), None)
        if followed is None:
            self.reading.unknown.append(setting)
            self.reading.assumed.append(f"{setting.where}: {setting.words} is not there: read without it")
            return
        if not any(Path(one).resolve() == followed.resolve() for one in self.files):
            self.add(str(followed))

    def add_python(self, path: Path, function: str | None) -> None:
        file = read_python(path, function)
        config, imports = file.config, " ".join(file.imports)
        settings = list(config.settings.values())
        if "megatron.bridge" in imports:
            self.give("megatron-bridge", [*settings, *bridge_model(config, path)])
        elif "torchtitan" in imports:
            settings = [*torchtitan_model(config, path), *settings]
            self.give("torchtitan", [renamed(one) for one in settings])
        else:
            raise InputError(
                f"{path}: imports neither torchtitan nor megatron.bridge; a training program of your own is "
                f"forecast with: foretrain predict {path.name}"
            )

    # Programs of scripts

    def add_program(self, program: StartedProgram, path: Path) -> None:
        """Take in what a command starts, and the files that it names."""
        if program.launcher == "accelerate":
            for option in program.options:
                if dashed(option.key) in ("config_file", "deepspeed_config_file"):
                    self.follow(option, path)
            self.give(
                "accelerate",
                [bare(one) for one in program.options if dashed(one.key) not in ("m", "module")],
            )
        follows = {"deepspeed", "deepspeed_config", "job.config_file", "config_file", "config", "c"}
        for argument in program.arguments:
            named = isinstance(argument.value, str) and argument.value.endswith(
                (".json", ".toml", ".yaml", ".yml")
            )
            if named and dashed(argument.key) in follows:
                self.follow(argument, path)
            if named and dashed(argument.key) == "fsdp_config":
                self.add_fsdp_config(argument, path)
        for word in program.words:
            if not word.key and str(word.value).endswith((".json", ".yaml", ".yml")):
                self.follow(word, path)
        self.add_job(program, path)
        self.give_arguments(program, path)

    def add_job(self, program: StartedProgram, path: Path) -> None:
        """The job file of a program that foretrain wrote."""
        for name, take_tables in (("job", job_file.take_job), ("model", job_file.take_model)):
            file = path.parent / str(program.value(name))
            if file.suffix not in (".toml", ".json") or not file.is_file():
                continue
            tables, settings = read_document(file)
            if {"model", "training"} <= set(tables):
                self.files.append(str(file))
                take_tables(self.reading, tables, settings)
                program.arguments = [one for one in program.arguments if dashed(one.key) != name]
                program.reads = "job" if name == "job" else "model"

    def add_fsdp_config(self, setting: Setting, path: Path) -> None:
        """The file of the Trainer's ``--fsdp_config``."""
        file = path.parent / str(setting.value)
        if not file.is_file():
            self.reading.unknown.append(setting)
            return
        self.files.append(str(file))
        held = [Setting(f"fsdp_config.{one.key}", one.value, one.where) for one in read_document(file)[1]]
        self.give("transformers", held)

    def give_arguments(self, program: StartedProgram, path: Path) -> None:
        """The arguments of a program to whom they belong."""
        arguments, reader = program.arguments, reader_of(program)
        if reader == "torchtitan":
            module = path.parent / f"{program.value('module')}.py"
            if module.is_file():
                self.add(f"{module}:{program.value('config')}")
                arguments = [one for one in arguments if dashed(one.key) != "config"]
            named = [one for one in arguments if dashed(one.key) == "config"]
            named += [
                Setting(name, word.text, f"{path.name}:{word.line}")
                for name in ("CONFIG_FILE", "CONFIG")
                if (word := program.variables.get(name)) is not None
            ]
            for one in named:
                if str(one.value).endswith(".toml"):
                    self.follow(one, path)
                else:
                    arguments = [*arguments, *registered(str(one.value), one.where)]
            beside = ("job.config_file", "module", "config")
            self.give(reader, [renamed(bare(one)) for one in arguments if dashed(one.key) not in beside])
        elif reader == "megatron-bridge":
            self.launcher_options += arguments
            self.give(reader, [one for one in program.words if one.key])
        elif reader in ("automodel", "axolotl"):
            self.give(reader, [bare(one) for one in arguments if "." in one.key or reader == "axolotl"])
            devices = [one for one in arguments if dashed(one.key) in ("nproc_per_node", "nnodes")]
            keys = {
                "nproc_per_node": Key("cluster.devices_per_node", whole),
                "nnodes": Key("cluster.nodes", whole),
            }
            take(self.reading, devices, keys, reader, name=dashed)
        else:
            self.reading.set("own.program", Path(program.name).name)
            self.reading.set("own.started", str(path.parent / program.name))
            if reader == "transformers" and not program.reads and self.add_own(program, path):
                return
            apart = ("deepspeed_config", "local_rank")
            self.give(reader, [one for one in arguments if dashed(one.key) not in apart])

    def add_own(self, program: StartedProgram, path: Path) -> bool:
        """Take in the code of a program: what it gives transformers' Trainer, which arguments override; or
        all of it, where it trains by itself, which is told."""
        started = path.parent / program.name
        settings = trainer_settings(started) if started.suffix == ".py" and started.is_file() else []
        if not settings and own_program.takes(program, path.parent):
            self.files.append(str(started))
            own_program.take(self.reading, program)
            return True
        if settings:
            self.files.append(str(started))
            self.give("transformers", settings)
        for setting in settings:
            if setting.key == "deepspeed" and str(setting.value).endswith(".json"):
                self.follow(setting, started)
        return False

    # Other launchers' YAML

    def add_skypilot(self, path: Path, table: Mapping[str, Any]) -> None:
        """The devices of a SkyPilot task, and the commands of its ``run``."""
        resources = _table(table, "resources")
        for several in ("ordered", "any_of"):
            if resources.get(several):
                resources = {**resources, **resources[several][0]}
        accelerators = str(resources.get("accelerators", ""))
        name, _, count = accelerators.partition(":")
        settings = [Setting("num_nodes", table.get("num_nodes", 1), path.name)]
        if name:
            settings += [
                Setting("resources.accelerators", name, path.name),
                Setting("resources.accelerators", count or 1, path.name),
            ]
        fields = ("cluster.nodes", "run.device", "cluster.devices_per_node")
        readers = (whole, text, whole)
        for setting, field, reader in zip(settings, fields, readers, strict=False):
            take(self.reading, [setting], {setting.key: Key(field, reader)}, "skypilot")
        given = {
            "SKYPILOT_NUM_NODES": table.get("num_nodes", 1), "SKYPILOT_NUM_GPUS_PER_NODE": count or 1,
            "SKYPILOT_NODE_RANK": 0, **_table(table, "envs"),
        }  # fmt: skip
        self.add_commands(path, str(table.get("run", "")), given)

    def add_trainjob(self, path: Path, table: Mapping[str, Any]) -> None:
        """The nodes and the command of a Kubeflow TrainJob."""
        trainer = _table(_table(table, "spec"), "trainer")
        if table.get("kind") != "TrainJob":
            raise InputError(f"{path}: kind: {table.get('kind')!r} is not TrainJob")
        keys = {
            "numNodes": Key("cluster.nodes", whole),
            "numProcPerNode": Key(
                "cluster.devices_per_node", lambda value: None if value == "auto" else whole(value)
            ),
        }
        named = {name: trainer[name] for name in keys if name in trainer}
        take(self.reading, settings_of(named, path.name), keys, "trainjob")
        words = [*(trainer.get("command") or []), *(trainer.get("args") or [])]
        self.add_commands(path, " ".join(f"'{word}'" for word in words), {})

    def add_commands(self, path: Path, script: str, variables: Mapping[str, Any]) -> None:
        shell = Shell(path.parent, {name: Word(str(value), 1) for name, value in variables.items()})
        shell.run(statements(script))
        self.add_program(program_of(shell.commands, path, self.reading), path)


def _table(table: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A table in another; an empty one where there is none."""
    inner = table.get(name)
    return inner if isinstance(inner, Mapping) else {}
