"""Gives neural predictors what they share: a state that the package ships, weights in a file, and sums in one
order.

torch is imported where it is used, so that a predictor can be asked for its name, or read from a folder that
is none, without it.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import json
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Self, TypeVar

from foretrain.errors import InputError, missing
from foretrain.files import write_atomically
from foretrain.predictors.base import Predictor, unfitted
from foretrain.progress import tell

if TYPE_CHECKING:
    import torch

    Tensors = dict[str, torch.Tensor]

State = TypeVar("State")


class NeuralPredictor(Predictor, Generic[State]):
    """A predictor whose state is learned from runs and shipped with the package.

    A state is replaced, never changed in place.
    """

    learns: ClassVar[bool] = True
    shipped: ClassVar[Path]
    """The folder of the state that comes with the package."""

    learned_: State | None = None
    fresh: bool = False
    """Whether nothing was given or forgotten: then the shipped state answers until ``fit``, which starts
    anew."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A copy shares what was learned, as nobody changes it."""
        return copy.copy(self)

    def state(self) -> State:
        """Give what was learned, else what is shipped; ``UnsupportedJob`` where there is neither."""
        if self.learned_ is None and self.fresh:
            self.learned_ = _shipped_state(type(self))
        if self.learned_ is None:
            raise unfitted(self.name)
        return self.learned_

    def forget(self) -> None:
        """Know nothing until ``fit``."""
        self.learned_, self.fresh = None, False


@functools.cache
def _shipped_state(kind: type[NeuralPredictor[State]]) -> State:
    return kind.load(kind.shipped).state()


def neural_module(name: str, predictor: str) -> ModuleType:
    """The module with a predictor's networks, or one line that says what to install for it."""
    if name not in sys.modules:
        tell("importing torch")
    try:
        with warnings.catch_warnings():
            # torch_geometric scripts its own functions as it is imported
            warnings.simplefilter("ignore", DeprecationWarning)
            return importlib.import_module(name)
    except ModuleNotFoundError as error:
        library = str(error.name).partition(".")[0]
        raise missing(library, predictor, "learn") from error


# Weights


def write_weights(path: Path, tensors: Mapping[str, torch.Tensor], header: Mapping[str, Any]) -> None:
    """Write one safetensors file; what is no tensor is JSON in its header."""
    from safetensors.torch import save

    held = {name: tensor.contiguous() for name, tensor in tensors.items()}
    write_atomically(path, save(held, metadata={"foretrain": json.dumps(header, sort_keys=True)}))


def read_weights(path: Path, content: str) -> tuple[dict[str, Any], Tensors]:
    """The header and the tensors that ``write_weights`` wrote; ``content`` is what the file should be, for
    the error where it is not."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            header = json.loads((file.metadata() or {}).get("foretrain", "{}"))
            return header, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError, ValueError) as error:
        raise InputError(f"{path}: cannot be read as {content} ({error})") from error


def write_members(path: Path, members: Sequence[torch.nn.Module], header: Mapping[str, Any]) -> None:
    """Networks of one shape, whose answers are averaged."""
    tensors = {
        f"{i}/{name}": tensor
        for i, member in enumerate(members)
        for name, tensor in member.state_dict().items()
    }
    write_weights(path, tensors, {**header, "members": len(members)})


def read_members(path: Path, form: str) -> tuple[dict[str, Any], list[Tensors]]:
    """The header and the weights of each member that ``write_members`` wrote in the format ``form``."""
    header, tensors = read_weights(path, "a fitted network")
    if header.get("format") != form:
        raise InputError(f"{path}: format {header.get('format')!r} is not {form!r}; fit it again")
    each = [
        {name.removeprefix(f"{i}/"): tensor for name, tensor in tensors.items() if name.startswith(f"{i}/")}
        for i in range(header["members"])
    ]
    return header, each


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Sums in one order, so that the same data give the same network; more threads gain nothing on graphs
    this small."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
