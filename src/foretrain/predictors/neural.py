"""What the neural predictors share: weights in one safetensors file with JSON facts in its header, and sums in one order."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from foretrain.errors import InputError
from foretrain.files import write_atomically

Tensors = dict[str, torch.Tensor]


def write_weights(path: Path, tensors: Mapping[str, torch.Tensor], header: Mapping[str, Any]) -> None:
    """One safetensors file; what is no tensor is JSON in its header."""
    from safetensors.torch import save

    held = {name: tensor.contiguous() for name, tensor in tensors.items()}
    write_atomically(path, save(held, metadata={"foretrain": json.dumps(header, sort_keys=True)}))


def read_weights(path: Path, what: str) -> tuple[dict[str, Any], Tensors]:
    """The header and the tensors that ``write_weights`` wrote; ``what`` the file should be, for the error where it is not."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            header = json.loads((file.metadata() or {}).get("foretrain", "{}"))
            return header, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError, ValueError) as error:
        raise InputError(f"{path}: cannot be read as {what} ({error})") from error


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
    """Sums in one order, so that the same data give the same network; more threads gain nothing on graphs this small."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
