"""Reads configurations that are Python: functions of torchtitan, recipes of Megatron-Bridge.

Nothing is run: literals, arithmetic with them and names that stand for them are understood.
"""

from __future__ import annotations

import ast
import operator
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from foretrain.errors import InputError, unknown
from foretrain.files import read_text
from foretrain.launchers.settings import Setting


@dataclass(slots=True)
class Config:
    """An object that a call makes: what is called, and the attributes that it is given, by their paths."""

    made_by: str
    """The function or class, as it is imported."""
    settings: dict[str, Setting] = field(default_factory=dict)
    arguments: list[Any] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class PythonFile:
    """Holds what a file imports, and the object that it configures."""

    imports: frozenset[str]
    config: Config


def read_python(path: Path, function: str | None = None) -> PythonFile:
    """The configuration that a function of the file returns (the last one that does), or that its statements
    fill."""
    try:
        with warnings.catch_warnings(action="ignore", category=SyntaxWarning):
            tree = ast.parse(read_text(path), filename=str(path))
    except SyntaxError as error:
        raise InputError(f"{path}:{error.lineno}: not Python ({error.msg})") from error
    reader = _Reader(path.name, tree)
    names = [one.name for one in tree.body if isinstance(one, ast.FunctionDef)]
    if function is not None and function not in names:
        raise unknown(f"{path}", function, names, "a function of the file; these are")
    wanted = [function] if function is not None else [*reversed(names), None]
    for name in wanted:
        config = reader.called(name) if name is not None else reader.top_level()
        if config is not None and (config.settings or config.made_by not in ("", name)):
            return PythonFile(frozenset(reader.imported.values()), config)
    raise InputError(f"{path}: no function that returns a configuration")


_TRAINER_CONFIGS = ("TrainingArguments", "SFTConfig", "DPOConfig", "ORPOConfig", "KTOConfig", "RewardConfig")
_LOADED_WITH = ("torch_dtype", "dtype", "attn_implementation", "load_in_4bit")
_LORA = {"r": "lora_r", "target_modules": "lora_target_modules", "lora_dropout": "lora_dropout"}


def trainer_settings(path: Path) -> list[Setting]:
    """Read what the code of a training program gives transformers' Trainer: its arguments, the model that it
    loads and adapters; nothing where the file is not Python."""
    try:
        with warnings.catch_warnings(action="ignore", category=SyntaxWarning):
            tree = ast.parse(read_text(path), filename=str(path))
    except SyntaxError:
        return []
    reader, settings = _Reader(path.name, tree), list[Setting]()
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        owner, _, name = _dotted(call.func).rpartition(".")
        given = {one.arg: one.value for one in call.keywords if one.arg is not None}
        if name == "from_pretrained" and "Model" in owner:
            named = call.args[0] if call.args else given.get("pretrained_model_name_or_path")
            kept = {key: given[key] for key in _LOADED_WITH if key in given}
            kept |= {"model_name_or_path": named} if named is not None else {}
        elif name == "LoraConfig":
            kept = {_LORA[key]: value for key, value in given.items() if key in _LORA}
            settings.append(Setting("use_peft", True, f"{path.name}:{call.lineno}"))
        elif name == "BitsAndBytesConfig":
            kept = {key: value for key, value in given.items() if key == "load_in_4bit"}
        else:
            kept = given if name.endswith(_TRAINER_CONFIGS) else {}
        for key, node in kept.items():
            value = reader.value(node, reader.constants)
            is_literal = not isinstance(value, Config) and not str(value).startswith("$")
            if is_literal:
                value = value.removeprefix("torch.") if isinstance(value, str) else value
                settings.append(Setting(key, value, f"{path.name}:{node.lineno}"))
    return settings


_ARITHMETIC: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv,
    ast.Div: operator.truediv, ast.Mod: operator.mod, ast.Pow: operator.pow,
}  # fmt: skip


class _Reader:
    def __init__(self, file: str, tree: ast.Module) -> None:
        self.file, self.tree = file, tree
        self.imported = dict(_imports(tree))
        self.functions = {one.name: one for one in tree.body if isinstance(one, ast.FunctionDef)}
        self.constants: dict[str, Any] = {}
        self.depth = 0
        for one in tree.body:
            if isinstance(one, ast.Assign) and isinstance(one.targets[0], ast.Name):
                self.constants[one.targets[0].id] = self.value(one.value, self.constants)

    def called(self, name: str) -> Config | None:
        """Evaluate a function of the file."""
        function, arguments = self.functions[name], {}
        if self.depth > 10:
            return None
        defaults = function.args.defaults
        for argument, default in zip(function.args.args[-len(defaults) :], defaults, strict=False):
            arguments[argument.arg] = self.value(default, self.constants)
        self.depth += 1
        returned = self.body(function.body, {**self.constants, **arguments})
        self.depth -= 1
        return returned

    def top_level(self) -> Config | None:
        """The object that the statements of the file set most of."""
        known: dict[str, Any] = {}
        self.body(self.tree.body, known)
        configs = [one for one in known.values() if isinstance(one, Config)]
        return max(configs, key=lambda one: len(one.settings), default=None)

    def body(self, statements: Sequence[ast.stmt], known: dict[str, Any]) -> Config | None:
        """Follow statements; what they return, or else the object that they filled."""
        for statement in statements:
            if isinstance(statement, ast.Assign | ast.AnnAssign) and statement.value is not None:
                for target in statement.targets if isinstance(statement, ast.Assign) else [statement.target]:
                    self.assign(target, statement.value, known)
            elif isinstance(statement, ast.Return) and statement.value is not None:
                value = self.value(statement.value, known)
                return value if isinstance(value, Config) else None
            elif isinstance(statement, ast.If) and _is_main(statement.test):
                self.body(statement.body, known)
        configs = [value for value in known.values() if isinstance(value, Config) and value.settings]
        return configs[-1] if configs else None

    def assign(self, target: ast.expr, node: ast.expr, known: dict[str, Any]) -> None:
        value = self.value(node, known)
        if isinstance(target, ast.Name):
            known[target.id] = value
            return
        path = _dotted(target).split(".")
        owner = known.get(path[0])
        if len(path) > 1 and isinstance(owner, Config):
            key = ".".join(path[1:])
            for other in [name for name in owner.settings if name.startswith(f"{key}.")]:
                if isinstance(value, Config):
                    del owner.settings[other]
            self.put(owner, key, value, node)

    def put(self, owner: Config, key: str, value: Any, node: ast.expr) -> None:
        """Set an attribute; of an object, its own ones too."""
        where = f"{self.file}:{node.lineno}"
        if not isinstance(value, Config):
            owner.settings[key] = Setting(key, value, where)
            return
        if value.made_by.endswith(".model_registry") and value.arguments:
            owner.settings[f"{key}.flavor"] = Setting(f"{key}.flavor", value.arguments[0], where)
        name = value.made_by.rpartition(".")[0] if value.made_by.endswith(".Config") else value.made_by
        if (not value.settings and not value.arguments) or value.made_by.endswith(".Config"):
            owner.settings[key] = Setting(key, name.rpartition(".")[2], where)
        for inner, setting in value.settings.items():
            owner.settings[f"{key}.{inner}"] = Setting(f"{key}.{inner}", setting.value, setting.where)

    def value(self, node: ast.expr, known: dict[str, Any]) -> Any:
        """Evaluate an expression; its text behind a ``$`` where that is not known."""
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.Name) and node.id in known:
            return known[node.id]
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            number = self.value(node.operand, known)
            return -number if isinstance(number, int | float) else f"${ast.unparse(node)}"
        if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
            left, right = self.value(node.left, known), self.value(node.right, known)
            if isinstance(left, int | float) and isinstance(right, int | float):
                return _ARITHMETIC[type(node.op)](left, right)
        if isinstance(node, ast.List | ast.Tuple):
            values = [self.value(one, known) for one in node.elts]
            return [one.made_by if isinstance(one, Config) else one for one in values]
        if isinstance(node, ast.Call):
            return self.call(node, known)
        if isinstance(node, ast.IfExp):
            return self.value(node.body, known)
        if isinstance(node, ast.Attribute | ast.Name):
            name = _dotted(node)
            return name if name.startswith("torch.") else f"${ast.unparse(node)}"
        return f"${ast.unparse(node)}"

    def call(self, node: ast.Call, known: dict[str, Any]) -> Config:
        name = _dotted(node.func)
        root, _, rest = name.partition(".")
        if name in self.functions and (made := self.called(name)) is not None:
            return Config(made.made_by, dict(made.settings))
        full = self.imported.get(root, root) + (f".{rest}" if rest else "")
        config = Config(full, arguments=[self.value(one, known) for one in node.args])
        if isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Call):
            config.arguments += self.call(node.func.value, known).arguments
        for keyword in node.keywords:
            if keyword.arg is None:
                continue
            self.put(config, keyword.arg, self.value(keyword.value, known), keyword.value)
            for one in keyword.value.elts if isinstance(keyword.value, ast.List | ast.Tuple) else ():
                if isinstance(one, ast.Call):
                    for inner, setting in self.call(one, known).settings.items():
                        path = f"{keyword.arg}.{inner}"
                        config.settings[path] = Setting(path, setting.value, setting.where)
        return config


def _imports(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """List the imported names, each with the path that it is from."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield alias.asname or alias.name, f"{node.module or ''}.{alias.name}"
        elif isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.asname or alias.name.partition(".")[0], alias.name


def _dotted(node: ast.expr) -> str:
    """``a.b.c`` as it is written; of calls in it, their names."""
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    if isinstance(node, ast.Call):
        return _dotted(node.func)
    return node.id if isinstance(node, ast.Name) else ""


def _is_main(test: ast.expr) -> bool:
    return isinstance(test, ast.Compare) and isinstance(test.left, ast.Name) and test.left.id == "__name__"
