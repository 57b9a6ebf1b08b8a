"""Lets a training script run where there is no GPU, no second process and no time to compile."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import types
import unittest.mock
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from foretrain.capture.tracing.devices import is_of
from foretrain.capture.tracing.guesses import draws_kept

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
    "temperature": 0,
    "power_draw": 0,
    "can_device_access_peer": True,
    "get_rng_state": torch.empty(0, dtype=torch.uint8),
    "get_rng_state_all": [],
    "nccl.version": (2, 29, 0),
    "nvtx.range_push": 0,
    "nvtx.range_pop": 0,
    "nvtx.mark": None,
    **dict.fromkeys(
        (
            "set_device", "synchronize", "empty_cache", "manual_seed", "manual_seed_all", "seed", "seed_all",
            "reset_peak_memory_stats", "reset_max_memory_allocated", "set_rng_state", "set_rng_state_all",
            "init", "_lazy_init", "ipc_collect", "set_per_process_memory_fraction", "set_stream",
            "reset_accumulated_memory_stats",
        )
    ),
}  # fmt: skip
"""What ``torch.cuda`` says of the GPU that meta stands for."""


_ACCELERATOR_ANSWERS: dict[str, Any] = {
    "is_available": True,
    "current_accelerator": torch.device("cuda"),
    "device_count": 1,
    "current_device_index": 0,
    "current_device_idx": 0,
    **dict.fromkeys(("set_device_index", "set_device_idx", "synchronize", "empty_cache")),
    **dict.fromkeys(
        ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"), 0
    ),
}
"""What ``torch.accelerator`` says of it."""


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


class Quiet:
    """Something that is told what a training does, and need not know: every part of it is another."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Quiet()

    def __call__(self, *args: Any, **_kwargs: Any) -> Any:
        return Quiet() if not args or not callable(args[0]) else args[0]  # a decorator's function

    def __enter__(self) -> Quiet:
        return self

    def __exit__(self, *_error: Any) -> None:
        pass

    def __setitem__(self, _name: Any, _value: Any) -> None:
        pass


class OneReplica(torch.nn.Module):
    """A module where a script wraps it for several processes; replicas are the plan's affair."""

    def __init__(self, module: torch.nn.Module, *_args: Any, **_kwargs: Any) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


class Sharded(OneReplica):
    """A module where a script wraps it in ``FullyShardedDataParallel``: whole, in its precision."""

    def __init__(self, module: torch.nn.Module, *_args: Any, mixed_precision: Any = None, **_kw: Any) -> None:
        super().__init__(module)
        _cast_forward(module, getattr(mixed_precision, "param_dtype", None))

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        return torch.nn.utils.clip_grad_norm_(self.parameters(), max_norm, norm_type)

    @staticmethod
    def state_dict_type(*_args: Any, **_kwargs: Any) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    summon_full_params = state_dict_type

    @staticmethod
    def optim_state_dict(*_args: Any, **_kwargs: Any) -> dict[str, Any]:
        return {}

    full_optim_state_dict = optim_state_dict


def _whole(module: Any, *_args: Any, mp_policy: Any = None, **_kwargs: Any) -> Any:
    """A module where a script shards it with ``fully_shard``."""
    for one in module if isinstance(module, list | tuple) else (module,):
        _cast_forward(one, getattr(mp_policy, "param_dtype", None))
        for name in _OF_SHARDED:
            setattr(one, name, lambda *_, **__: None)
    return module


def _cast_forward(module: torch.nn.Module, dtype: torch.dtype | None) -> None:
    if dtype is None:
        return
    forward = module.forward

    def in_precision(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cuda", dtype=dtype):
            return forward(*args, **kwargs)

    module.forward = in_precision


_OF_SHARDED = (
    "set_requires_gradient_sync set_is_last_backward set_modules_to_forward_prefetch unshard reshard "
    "set_modules_to_backward_prefetch set_reshard_after_backward set_requires_all_reduce"
).split()


class _Mesh:
    """A mesh of one device."""

    def __init__(self, *_args: Any, mesh_dim_names: Any = None, **_kwargs: Any) -> None:
        self.mesh_dim_names = mesh_dim_names
        self.ndim = 1

    def __getitem__(self, _name: Any) -> _Mesh:
        return self

    def size(self, *_args: Any) -> int:
        return 1

    def get_local_rank(self, *_args: Any, **_kwargs: Any) -> int:
        return 0

    get_rank = get_local_rank

    def get_group(self, *_args: Any, **_kwargs: Any) -> None:
        return None


def _spawn(function: Any, args: tuple[Any, ...] = (), *_others: Any, **_kwargs: Any) -> None:
    """The first process of those that a script starts, in this one."""
    function(0, *args)


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

DISTRIBUTED_ANSWERS: dict[str, Any] = {
    "is_initialized": False,
    "get_rank": 0,
    "get_world_size": 1,
    "get_backend": "nccl",
    **dict.fromkeys(
        ("init_process_group", "destroy_process_group", "barrier", "all_reduce", "broadcast", "new_group",
         "all_gather", "reduce", "broadcast_object_list", "all_gather_into_tensor", "all_gather_object",
         "gather", "scatter", "reduce_scatter_tensor", "all_to_all_single", "monitored_barrier")
    ),
}  # fmt: skip


@contextlib.contextmanager
def pretending(text: str, compiled: Callable[[str | None], None]) -> Iterator[None]:
    """Inside of this block a GPU seems to be there, other processes are not, ``torch.compile`` gives back
    what it is given (and tells ``compiled`` its mode), and nothing is loaded from or saved to checkpoints."""
    patches: list[Any] = [
        *_of_a_gpu(),
        unittest.mock.patch("torch.compile", _not_compiling(compiled)),
        unittest.mock.patch.object(torch.nn.Module, "compile", _telling(compiled)),
        unittest.mock.patch.object(torch.nn.Module, "load_state_dict", _no_state),
        unittest.mock.patch.object(torch.nn.Parameter, "__new__", _weight),
        unittest.mock.patch("torch.set_default_device", _on_meta(torch.set_default_device)),
        unittest.mock.patch("torch.multiprocessing.spawn", _spawn),
        unittest.mock.patch("torch.save", _Anything()),
        unittest.mock.patch("torch.distributions.Distribution._validate_args", False),
        unittest.mock.patch("torch.optim.optimizer._get_fused_kernels_supported_devices", _like_cuda),
        unittest.mock.patch("torch.optim.optimizer._get_foreach_kernels_supported_devices", _like_cuda),
        *(unittest.mock.patch.object(one, _CAPTURABLE, _like_cuda) for one in _optimizer_modules()),
        unittest.mock.patch.object(torch.nn.Module, "to", _module_to),
        unittest.mock.patch("torch.utils._foreach_utils._get_foreach_kernels_supported_devices", _like_cuda),
        unittest.mock.patch.dict(os.environ, {**_launcher_variables(text), **_QUIET, **os.environ}),
    ]
    if torch.distributed.is_available() and not torch.distributed.is_initialized():
        patches += answering("torch.distributed", DISTRIBUTED_ANSWERS)
        patches.append(unittest.mock.patch("torch.nn.parallel.DistributedDataParallel", OneReplica))
        patches += _unsharded(text)
    patches.append(unittest.mock.patch("torch.nn.DataParallel", OneReplica))
    with contextlib.ExitStack() as all_patches:
        all_patches.enter_context(_settings_kept())
        for patch in patches:
            all_patches.enter_context(patch)
        yield


@contextlib.contextmanager
def beside_a_gpu() -> Iterator[None]:
    """Inside of this block the code of a model finds a GPU where there is none, and what it sets for the
    whole process ends with it."""
    patches = [] if torch.cuda.is_available() else _of_a_gpu()
    patches.append(unittest.mock.patch("torch.set_default_device", _to_no_gpu(torch.set_default_device)))
    with contextlib.ExitStack() as all_patches:
        all_patches.enter_context(_settings_kept())
        for patch in patches:
            all_patches.enter_context(patch)
        yield


def _of_a_gpu() -> list[Any]:
    """What lets ``torch.cuda`` answer as beside a GPU."""
    return [
        *answering("torch.cuda", _CUDA_ANSWERS),
        *(unittest.mock.patch(f"torch.cuda.{name}", _Anything) for name in ("Stream", "Event", "CUDAGraph")),
        *(
            unittest.mock.patch(f"torch.accelerator.{name}", _to_users(name, answer), create=True)
            for name, answer in _ACCELERATOR_ANSWERS.items()
        ),
        *(unittest.mock.patch(f"torch.cuda.{name}", _Anything()) for name in ("stream", "device", "graph")),
        unittest.mock.patch("torch.cuda.current_stream", _Anything()),
        unittest.mock.patch.object(torch.Tensor, "record_stream", _no_stream),
    ]


@contextlib.contextmanager
def _settings_kept() -> Iterator[None]:
    """What a program sets for the whole process ends with it."""
    precision, dtype = torch.get_float32_matmul_precision(), torch.get_default_dtype()
    learns, cudnn = torch.is_grad_enabled(), torch.backends.cudnn.flags
    deterministic, anomalies = torch.are_deterministic_algorithms_enabled(), torch.is_anomaly_enabled()
    folders, place, set_default_device = list(sys.path), Path.cwd(), torch.set_default_device
    held = torch.backends.cudnn.enabled, torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic
    try:
        with draws_kept(), cudnn(*held):
            yield
    finally:
        torch.set_float32_matmul_precision(precision)
        torch.set_default_dtype(dtype)
        torch.set_grad_enabled(learns)
        torch.use_deterministic_algorithms(deterministic)
        torch.autograd.set_detect_anomaly(anomalies)
        if getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None) is not None:
            set_default_device(None)
        sys.path[:] = folders
        os.chdir(place)


def _launcher_variables(text: str) -> dict[str, str]:
    """What a launcher says where the text of a program asks for it by name."""
    return _ONE_PROCESS if "LOCAL_RANK" in text or "WORLD_SIZE" in text else {}


def answering(module: str, answers: dict[str, Any]) -> list[Any]:
    return [
        unittest.mock.patch(f"{module}.{name}", lambda *_, answer=answer, **__: answer, create=True)
        for name, answer in answers.items()
    ]


def _to_users(name: str, answer: Any) -> Callable[..., Any]:
    """An answer to all but torch itself, which would go on to ask the device that is not there."""
    original = getattr(torch.accelerator, name, None)

    def told(*args: Any, **kwargs: Any) -> Any:
        asks = sys._getframe(1).f_globals.get("__name__", "")
        return original(*args, **kwargs) if original and asks.startswith("torch.") else answer

    return told


def _like_cuda(*_args: Any, **_kwargs: Any) -> list[str]:
    return ["cuda", "meta"]


def _optimizer_modules() -> list[Any]:
    """The modules that ask which devices can capture an update."""
    found = [one for name, one in sys.modules.items() if name.startswith("torch.optim.")]
    return [one for one in found if _CAPTURABLE in vars(one)]


def _module_to(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    """``Module.to``, which may be given the number of a GPU."""
    given = {
        name: f"cuda:{one}" if name == "device" and type(one) is int else one for name, one in kwargs.items()
    }
    return _MODULE_TO(module, *(f"cuda:{one}" if type(one) is int else one for one in args), **given)


def _on_meta(set_default_device: Callable[[Any], None]) -> Callable[[Any], None]:
    return lambda device: set_default_device("meta" if is_of(device, "cuda") else device)


def _to_no_gpu(set_default_device: Callable[[Any], None]) -> Callable[[Any], None]:
    """Where a model is built on meta already, that is the device that a GPU is asked for by."""
    return lambda device: None if is_of(device, "cuda") else set_default_device(device)


def _unsharded(text: str) -> list[Any]:
    """Modules stay whole where a script shards them: that is the plan's affair."""
    if "fsdp" not in text and "device_mesh" not in text:
        return []
    fsdp = importlib.import_module("torch.distributed.fsdp")
    mesh = importlib.import_module("torch.distributed.device_mesh")
    return [
        unittest.mock.patch.object(fsdp, "FullyShardedDataParallel", Sharded),
        unittest.mock.patch.object(fsdp, "fully_shard", _whole, create=True),
        unittest.mock.patch.object(mesh, "init_device_mesh", _Mesh),
        unittest.mock.patch("torch.distributed.init_device_mesh", _Mesh, create=True),
    ]


def _no_stream(*_args: Any) -> None:
    """There is one."""


def _no_state(*_args: Any, **_kwargs: Any) -> Any:
    """What a checkpoint holds does not change a step."""
    return torch.nn.modules.module._IncompatibleKeys([], [])


def _not_compiling(tell: Callable[[str | None], None]) -> Callable[..., Any]:
    def compile(model: Any = None, **options: Any) -> Any:
        tell(options.get("mode"))
        return (lambda function: function) if model is None else model

    return compile


def _telling(compiled: Callable[[str | None], None]) -> Callable[..., None]:
    return lambda *_args, **options: compiled(options.get("mode"))


def _weight(cls: Any, data: torch.Tensor | None = None, requires_grad: bool = True) -> Any:
    if data is None:
        data = torch.empty(0)
    if not data.is_meta and data.is_floating_point():
        data = torch.empty_strided(data.shape, data.stride(), dtype=data.dtype, device="meta")
    return _PARAMETER_NEW(cls, data, requires_grad)


_CAPTURABLE = "_get_capturable_supported_devices"
_MODULE_TO: Callable[..., Any] = torch.nn.Module.to
_PARAMETER_NEW = torch.nn.Parameter.__new__
