"""Lets a training script run where there is no GPU, no second process and no time to compile."""

from __future__ import annotations

import contextlib
import os
import random
import types
import unittest.mock
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

_MEMORY_BYTES = 80 * 2**30
_PROPERTIES = types.SimpleNamespace(
    name="GPU", major=9, minor=0, total_memory=_MEMORY_BYTES, multi_processor_count=132, warp_size=32,
    max_threads_per_multi_processor=2048, L2_cache_size=50 * 2**20, gcnArchName="", uuid="",
)  # fmt: skip

_CUDA_ANSWERS: dict[str, Any] = {
    "is_available": True,
    "is_initialized": True,
    "device_count": 1,
    "current_device": 0,
    "get_device_name": "GPU",
    "get_device_capability": (9, 0),
    "get_device_properties": _PROPERTIES,
    "is_bf16_supported": True,
    "is_current_stream_capturing": False,
    "memory_allocated": 0,
    "max_memory_allocated": 0,
    "memory_reserved": 0,
    "max_memory_reserved": 0,
    "mem_get_info": (_MEMORY_BYTES, _MEMORY_BYTES),
    "memory_stats": {},
    "memory_summary": "",
    "utilization": 0,
    "get_rng_state": torch.empty(0, dtype=torch.uint8),
    "get_rng_state_all": [],
    "nccl.version": (2, 29, 0),
    **dict.fromkeys(
        (
            "set_device", "synchronize", "empty_cache", "manual_seed", "manual_seed_all", "seed", "seed_all",
            "reset_peak_memory_stats", "reset_max_memory_allocated", "set_rng_state", "set_rng_state_all",
            "init", "_lazy_init", "ipc_collect", "set_per_process_memory_fraction", "set_stream",
        )
    ),
}  # fmt: skip
"""What ``torch.cuda`` says of the GPU that meta stands for."""


class _Anything:
    """A stream, an event or a graph: may be entered, asked and called, and does nothing."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        pass

    def __enter__(self) -> _Anything:
        return self

    def __exit__(self, *_error: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: 0.0

    def __call__(self, *_args: Any, **_kwargs: Any) -> _Anything:
        return self


class OneReplica(torch.nn.Module):
    """A module where a script wraps it for several processes; replicas are the plan's affair."""

    def __init__(self, module: torch.nn.Module, *_args: Any, **_kwargs: Any) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


_ONE_PROCESS = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_WORLD_SIZE": "1",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "29500",
}
"""What a launcher tells its processes, for programs that ask."""

_QUIET = {
    "TQDM_DISABLE": "1",
    "WANDB_MODE": "disabled",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}

_DISTRIBUTED_ANSWERS: dict[str, Any] = {
    "is_initialized": False,
    "get_rank": 0,
    "get_world_size": 1,
    "get_backend": "nccl",
    **dict.fromkeys(
        ("init_process_group", "destroy_process_group", "barrier", "all_reduce", "broadcast", "new_group",
         "all_gather", "reduce", "broadcast_object_list")
    ),
}  # fmt: skip


@contextlib.contextmanager
def pretending(text: str, compiled: Callable[[], None]) -> Iterator[None]:
    """Inside of this block a GPU seems to be there, other processes are not, ``torch.compile`` gives back
    what it is given (and tells ``compiled``), and nothing is loaded from or saved to checkpoints."""
    patches: list[Any] = [
        *_answering("torch.cuda", _CUDA_ANSWERS),
        *(unittest.mock.patch(f"torch.cuda.{name}", _Anything) for name in ("Stream", "Event", "CUDAGraph")),
        *(unittest.mock.patch(f"torch.cuda.{name}", _Anything()) for name in ("stream", "device")),
        unittest.mock.patch("torch.cuda.current_stream", _Anything()),
        unittest.mock.patch("torch.compile", _not_compiling(compiled)),
        unittest.mock.patch.object(torch.nn.Module, "compile", _telling(compiled)),
        unittest.mock.patch.object(torch.nn.Module, "load_state_dict", _no_state),
        unittest.mock.patch.object(torch.nn.Parameter, "__new__", _weight),
        unittest.mock.patch("torch.save", _Anything()),
        unittest.mock.patch("torch.distributions.Distribution._validate_args", False),
        unittest.mock.patch("torch.optim.optimizer._get_fused_kernels_supported_devices", _like_cuda),
        unittest.mock.patch("torch.optim.optimizer._get_foreach_kernels_supported_devices", _like_cuda),
        unittest.mock.patch("torch.utils._foreach_utils._get_foreach_kernels_supported_devices", _like_cuda),
        unittest.mock.patch.dict(os.environ, {**_told(text), **_QUIET, **os.environ}),
    ]
    if torch.distributed.is_available() and not torch.distributed.is_initialized():
        patches += _answering("torch.distributed", _DISTRIBUTED_ANSWERS)
        patches.append(unittest.mock.patch("torch.nn.parallel.DistributedDataParallel", OneReplica))
    patches.append(unittest.mock.patch("torch.nn.DataParallel", OneReplica))
    with contextlib.ExitStack() as all_patches:
        all_patches.enter_context(_settings_kept())
        for patch in patches:
            all_patches.enter_context(patch)
        yield


@contextlib.contextmanager
def _settings_kept() -> Iterator[None]:
    """What a program sets for the whole process ends with it."""
    precision, dtype = torch.get_float32_matmul_precision(), torch.get_default_dtype()
    learns, cudnn = torch.is_grad_enabled(), torch.backends.cudnn.flags
    deterministic = torch.are_deterministic_algorithms_enabled()
    held = torch.backends.cudnn.enabled, torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic
    numbers, own = np.random.get_state(), random.getstate()
    try:
        with torch.random.fork_rng(devices=[]), cudnn(*held):
            yield
    finally:
        torch.set_float32_matmul_precision(precision)
        torch.set_default_dtype(dtype)
        torch.set_grad_enabled(learns)
        torch.use_deterministic_algorithms(deterministic)
        np.random.set_state(numbers)
        random.setstate(own)


def _told(text: str) -> dict[str, str]:
    """What a launcher says where the text of a program asks for it by name."""
    return _ONE_PROCESS if "LOCAL_RANK" in text or "WORLD_SIZE" in text else {}


def _answering(module: str, answers: dict[str, Any]) -> list[Any]:
    return [
        unittest.mock.patch(f"{module}.{name}", lambda *_, answer=answer, **__: answer, create=True)
        for name, answer in answers.items()
    ]


def _like_cuda() -> list[str]:
    return ["cuda", "meta"]


def _no_state(*_args: Any, **_kwargs: Any) -> Any:
    """What a checkpoint holds does not change a step."""
    return torch.nn.modules.module._IncompatibleKeys([], [])


def _not_compiling(tell: Callable[[], None]) -> Callable[..., Any]:
    def compile(model: Any = None, **_options: Any) -> Any:
        tell()
        return (lambda function: function) if model is None else model

    return compile


def _telling(compiled: Callable[[], None]) -> Callable[..., None]:
    return lambda *_args, **_kwargs: compiled()


def _weight(cls: Any, data: torch.Tensor | None = None, requires_grad: bool = True) -> Any:
    if data is None:
        data = torch.empty(0)
    if not data.is_meta and data.is_floating_point():
        data = torch.empty_strided(data.shape, data.stride(), dtype=data.dtype, device="meta")
    return _PARAMETER_NEW(cls, data, requires_grad)


_PARAMETER_NEW = torch.nn.Parameter.__new__
