"""Finds the command of a script that starts a training: its launcher, its program, its arguments."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from foretrain.allocator_settings import VARIABLES
from foretrain.errors import InputError
from foretrain.files import read_text
from foretrain.launchers.settings import Key, Keys, Reading, Setting, dashed, take, text, whole
from foretrain.launchers.shell import Command, Word, commands_of

_UNSET = re.compile(r"\$\{?\w+\}?|\$\(\.\.\.\)")
_PYTHON = re.compile(r"python[\d.]*")
_MODULES = {
    "torch.distributed.run": "torchrun", "torch.distributed.launch": "torchrun",
    "accelerate.commands.launch": "accelerate",
    "deepspeed.launcher.runner": "deepspeed",
}  # fmt: skip
_NAMES = {
    "torchrun": "torchrun", "accelerate": "accelerate", "deepspeed": "deepspeed", "automodel": "automodel",
    "axolotl": "axolotl", "llamafactory-cli": "llama-factory", "run_train.sh": "torchtitan",
    "train.sh": "bridge", "setup_experiment.py": "bridge", "torchpippy": "torchrun",
}  # fmt: skip
_STARTERS = ("srun", "mpirun", "mpiexec", "numactl", "nsys", "singularity", "apptainer", "env", "pdsh")
"""Commands in front of a program."""
_FLAGS = frozenset(
    "standalone module m no_python multi_gpu use_fsdp use_deepspeed tpu cpu no_local_rank debug quiet "
    "force_multi same_network use_megatron_lm use_parallelism_config save_pid enable_each_rank_log no_ssh "
    "main virtual_local_rank exclusive unbuffered u l label kill_on_bad_exit".split()
)
"""Options of launchers that have no value."""


@dataclass(slots=True)
class StartedProgram:
    """Holds what a command starts."""

    launcher: str
    """torchrun, accelerate, deepspeed, python, or a framework's own command."""
    options: list[Setting]
    """Of the launcher."""
    name: str = ""
    """The script or module."""
    arguments: list[Setting] = field(default_factory=list)
    """``--key value``."""
    words: list[Setting] = field(default_factory=list)
    """``key=value`` and what stands alone."""
    variables: dict[str, Word] = field(default_factory=dict)
    reads: Literal["", "job", "model"] = ""
    """What it takes from a job file, where it is one that foretrain wrote."""

    def value(self, *names: str) -> Any:
        """Find the last argument that has one of these names."""
        values = [one.value for one in self.arguments if dashed(one.key) in names]
        return values[-1] if values else None


def read_script(path: Path, reading: Reading) -> StartedProgram:
    """The command that trains, with what the headers and the variables of the script say of devices."""
    headers = slurm_headers(path)
    take(reading, headers, SLURM, "slurm", ignored="*", name=dashed)
    _gres(reading)
    return program_of(commands_of(path, _slurm_variables(reading)), path, reading)


def program_of(commands: Sequence[Command], path: Path, reading: Reading) -> StartedProgram:
    """Choose the command that trains."""
    programs = [one for command in commands if (one := _program(command, path.name)) is not None]
    if not programs:
        raise InputError(
            f"{path}: no command that starts a training (torchrun, accelerate, deepspeed, srun python)"
        )
    program = max(reversed(programs), key=lambda one: len(one.arguments) + len(one.words))
    if len(programs) > 1:
        reading.assumed.append(
            f"of {len(programs)} trainings in {path.name}, the one of {program.name or program.launcher}"
        )
    _devices(reading, program, path.parent)
    _environment(reading, program, path.name)
    return program


# Slurm

SLURM: Keys = {
    "nodes": Key("cluster.nodes", lambda value: whole(str(value).rpartition("-")[2])),
    "N": Key("cluster.nodes", lambda value: whole(str(value).rpartition("-")[2])),
    "gpus_per_node": Key("own.gpus_per_node", text, "cluster.devices_per_node"),
    "gres": Key("own.gres", text, "cluster.devices_per_node"),
    "gpus": Key("own.gpus", text, "cluster"),
    "G": Key("own.gpus", text, "cluster"),
    "gpus_per_task": Key("own.gpus_per_task", text, "cluster.devices_per_node"),
    "ntasks_per_node": Key("own.tasks_per_node", whole, "cluster.devices_per_node"),
    "ntasks": Key("own.tasks", whole, "cluster"),
    "n": Key("own.tasks", whole, "cluster"),
}


def slurm_headers(path: Path) -> list[Setting]:
    """The ``#SBATCH`` lines of a script."""
    settings = []
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        if matched := re.match(r"#SBATCH\s+(.*)", line):
            words = [Word(one, number) for one in matched[1].split("#")[0].split()]
            settings += arguments_of(words, path.name)[0]
    return settings


def _gres(reading: Reading) -> None:
    """Devices of a node, and their name where it is given: ``gpu:h100:8``, ``h100:8``, ``8``."""
    own = reading.tables.setdefault("own", {})
    tasks, nodes = own.get("tasks_per_node", 1), reading.get("cluster.nodes")
    of_node = {"gpus_per_node": 1, "gres": 1, "gpus_per_task": tasks}
    for name, times in of_node.items():
        if name in own and (matched := re.search(r"(?:gpu:)?(?:([A-Za-z][\w-]*):)?(\d+)", str(own[name]))):
            setting = reading.whose(f"own.{name}")
            assert setting is not None
            reading.put("cluster.devices_per_node", int(matched[2]) * times, setting, "slurm")
            if matched[1] not in (None, "gpu"):
                reading.put("run.device", matched[1], setting, "slurm")
    if "gpus" in own and (matched := re.search(r"(?:([A-Za-z][\w-]*):)?(\d+)", str(own["gpus"]))):
        setting = reading.whose("own.gpus")
        assert setting is not None
        reading.put("run.devices", int(matched[2]), setting, "slurm")
        if matched[1]:
            reading.put("run.device", matched[1], setting, "slurm")
    if own.get("tasks") and nodes and not own.get("tasks_per_node"):
        own["tasks_per_node"] = own["tasks"] // nodes


def _slurm_variables(reading: Reading) -> dict[str, Word]:
    """List the variables that Slurm sets for a script."""
    own = reading.tables.get("own", {})
    nodes, devices = reading.get("cluster.nodes"), reading.get("cluster.devices_per_node")
    tasks = own.get("tasks_per_node")
    values = {
        "SLURM_NNODES": nodes, "SLURM_JOB_NUM_NODES": nodes, "SLURM_GPUS_ON_NODE": devices,
        "SLURM_GPUS_PER_NODE": devices, "SLURM_NTASKS_PER_NODE": tasks,
        "SLURM_NTASKS": tasks * nodes if tasks and nodes else None,
    }  # fmt: skip
    known = {name: Word(str(value), 1) for name, value in values.items() if value is not None}
    return {
        **known,
        "SLURM_PROCID": Word("0", 1),
        "SLURM_NODEID": Word("0", 1),
        "SLURM_LOCALID": Word("0", 1),
    }


# Commands


def _program(command: Command, file: str) -> StartedProgram | None:
    """The training that a command starts; None where it starts none."""
    words = [word for word in command.words if word.text]
    for number, word in enumerate(words):
        name = Path(word.text).name
        rest = words[number + 1 :]
        if _PYTHON.fullmatch(name):
            return _of_python(rest, file, command)
        if name in _NAMES and (name not in ("accelerate", "axolotl", "llamafactory-cli") or rest):
            return _of_launcher(_NAMES[name], rest, file, command)
        if word.text.endswith(".py") and Path(words[0].text).name in (name, *_STARTERS):
            return _of_python(words[number:], file, command)
    return None


def _of_python(words: Sequence[Word], file: str, command: Command) -> StartedProgram | None:
    """``python script.py ...`` or ``python -m module ...``."""
    at = 0
    while at < len(words) and words[at].text.startswith("-") and words[at].text != "-m":
        if words[at].text == "-c":
            return None
        at += 1
    module = at < len(words) and words[at].text == "-m"
    at += module
    if at >= len(words) or not (module or words[at].text.endswith(".py")):
        return None
    name, rest = words[at].text, words[at + 1 :]
    if name in _MODULES:
        return _of_launcher(_MODULES[name], rest, file, command)
    if Path(name).name in _NAMES:
        return _of_launcher(_NAMES[Path(name).name], rest, file, command)
    arguments, alone = arguments_of(rest, file)
    return StartedProgram("python", [], name, arguments, alone, command.variables)


def _of_launcher(launcher: str, words: Sequence[Word], file: str, command: Command) -> StartedProgram | None:
    """The options of a launcher up to its program, and what follows."""
    if launcher in ("accelerate", "axolotl", "llama-factory"):
        if not words or words[0].text not in ("launch", "train"):
            return None
        words = words[1:]
    if launcher in ("automodel", "axolotl", "llama-factory", "torchtitan", "bridge"):
        arguments, alone = arguments_of(words, file)
        return StartedProgram(launcher, [], launcher, arguments, alone, command.variables)
    at = 0
    while at < len(words) and words[at].text.startswith("-"):
        option = dashed(words[at].text)
        alone_option = "=" in option or option in _FLAGS
        at += 1 if alone_option else 2
    options, _ = arguments_of(words[:at], file)
    if at >= len(words):
        return None
    module = any(dashed(one.key) in ("m", "module") for one in options)
    name, rest = words[at].text, words[at + 1 :]
    arguments, alone = arguments_of(rest, file)
    program = StartedProgram(launcher, options, name, arguments, alone, command.variables)
    if module and name.startswith("axolotl"):
        program.name = "axolotl"
    return program


def arguments_of(words: Sequence[Word], file: str) -> tuple[list[Setting], list[Setting]]:
    """``--key value ...`` as settings, a list where there are several values; and the words that stand alone
    before all of them or have the form ``key=value``."""
    settings: list[Setting] = []
    alone: list[Setting] = []
    key, where, values = "", "", list[str]()

    def close() -> None:
        if key:
            settings.append(Setting(key, _value(values), where))

    for word in words:
        place = f"{file}:{word.line}"
        if re.match(r"--?[A-Za-z]", word.text):
            close()
            key, equals, value = word.text.partition("=")
            where, values = place, [value] if equals else []
        elif matched := re.match(r"(\+*[A-Za-z_][\w.]*)=(.*)", word.text):
            alone.append(Setting(matched[1], matched[2], place))
        elif key and not (values and _UNSET.fullmatch(word.text)):  # further options in a variable, mostly
            values.append(word.text)
        elif key:
            continue
        else:
            alone.append(Setting("", word.text, place))
    close()
    return settings, alone


def _value(values: list[str]) -> Any:
    if not values:
        return True
    return values[0] if len(values) == 1 else values


# Devices and variables


def _last(value: Any) -> int | None:
    """Read the most of an elastic range; ``gpu`` and ``auto`` are not told."""
    return None if str(value) in ("gpu", "auto", "cpu") else whole(str(value).rpartition(":")[2])


TORCHRUN: Keys = {
    "nnodes": Key("cluster.nodes", _last),
    "nproc_per_node": Key("cluster.devices_per_node", _last),
}
DEEPSPEED: Keys = {
    "num_nodes": Key("cluster.nodes", whole),
    "num_gpus": Key("cluster.devices_per_node", whole),
}


def _devices(reading: Reading, program: StartedProgram, folder: Path) -> None:
    launchers = {"torchrun": TORCHRUN, "deepspeed": DEEPSPEED}
    given = {dashed(one.key): one for one in program.options}
    if program.launcher in launchers:
        keys = launchers[program.launcher]
        take(reading, program.options, keys, program.launcher, ignored="*", name=dashed)
        if program.launcher == "torchrun" and "nnodes" not in given:
            reading.default("cluster.nodes", 1)
        if "hostfile" in given:
            _hosts(reading, given["hostfile"], folder)
    elif program.launcher == "python" and reading.get("cluster.devices_per_node") is None:
        tasks = reading.get("own.tasks_per_node")
        setting = reading.whose("own.tasks_per_node") or reading.whose("own.tasks")
        if tasks and setting is not None:
            reading.put("cluster.devices_per_node", tasks, setting, "slurm")


def _hosts(reading: Reading, setting: Setting, folder: Path) -> None:
    """Nodes and their devices in a host file: ``worker-1 slots=8``."""
    path = folder / str(setting.value)
    slots = (
        re.findall(r"^\s*[^#\s]\S*\s+slots=(\d+)", read_text(path), re.MULTILINE) if path.is_file() else []
    )
    if len(set(slots)) == 1:
        reading.default("cluster.nodes", len(slots))
        reading.default("cluster.devices_per_node", int(slots[0]))


def _environment(reading: Reading, program: StartedProgram, file: str) -> None:
    """Read what variables say of memory and of devices."""
    for name in VARIABLES:
        if name in program.variables and "$" not in program.variables[name].text:
            word = program.variables[name]
            keys = {name: Key("training.allocator", text)}
            take(reading, [Setting(name, word.text, f"{file}:{word.line}")], keys, "environment")
            break
    keys = {
        "NGPU": Key("cluster.devices_per_node", whole),
        "NPROC_PER_NODE": Key("cluster.devices_per_node", whole),
        "NNODES": Key("cluster.nodes", whole),
    }
    if program.launcher in ("torchtitan", "llama-factory"):
        given = [
            Setting(name, word.text, f"{file}:{word.line}")
            for name, word in program.variables.items()
            if name in keys and "$" not in word.text
        ]
        take(reading, given, keys, "environment")
    for name, word in program.variables.items():
        if re.match(r"(NCCL|CUDA|TORCH|NVTE|OMP|UB|HF|WANDB|TOKENIZERS|TRITON|NVSHMEM|GLOO)_", name):
            reading.ignored.append(Setting(name, word.text, f"{file}:{word.line}"))
