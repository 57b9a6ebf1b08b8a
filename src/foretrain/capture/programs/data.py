"""Follows the data of a training program: how many samples its loaders give, in batches of the job's size."""

from __future__ import annotations

import contextlib
import unittest.mock
from collections.abc import Iterator
from typing import Any

from torch.utils.data import ConcatDataset, DataLoader

from foretrain.capture.tracing.nested import tensors_in

_DROP_LAST = 7
"""The place of that option among those of a loader, behind dataset and batch size."""

_IN_THIS_PROCESS = {
    "num_workers": 0,
    "persistent_workers": False,
    "prefetch_factor": None,
    "multiprocessing_context": None,
    "pin_memory": False,
    "timeout": 0,
}


class Data:
    """What the loaders of a program give; with ``loaders``, those that would give batches of the first size
    give batches of the second."""

    def __init__(self, loaders: tuple[int, int] | None = None) -> None:
        self._loaders = loaders
        self.samples = 0
        """Drawn so far."""
        self.size: int | None = None
        """Samples of the data that are drawn from."""
        self.batch: int | None = None
        """What the loader that is used gives at once."""
        self._loader: Any = None
        self.trains = False
        """Whether a step was made."""

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        data = self

        def init(loader: Any, dataset: Any, batch_size: Any = 1, *args: Any, **kwargs: Any) -> None:
            kwargs.update({name: value for name, value in _IN_THIS_PROCESS.items() if name in kwargs})
            if data._loaders is not None and batch_size == data._loaders[0]:
                batch_size = data._loaders[1]
            args = args if len(args) < 4 else (*args[:3], 0, *args[4:])
            if isinstance(batch_size, int) and len(args) < _DROP_LAST and kwargs.get("batch_sampler") is None:
                kwargs["drop_last"] = True  # the rest of an epoch is no usual step
                dataset = enough(dataset, batch_size)
            _INIT(loader, dataset, batch_size, *args, **kwargs)

        def draw(loader: Any) -> Iterator[Any]:
            try:
                for batch in _ITER(loader):
                    data._drawn(loader, batch)
                    yield batch
            finally:
                data._left(loader)

        with (
            unittest.mock.patch.object(DataLoader, "__init__", init),
            unittest.mock.patch.object(DataLoader, "__iter__", draw),
        ):
            yield

    def _left(self, loader: Any) -> None:
        """A loader that is looked into, or gone through, before anything is trained is not the one."""
        if not self.trains and loader is self._loader:
            self._loader, self.samples, self.size, self.batch = None, 0, None, None

    def _drawn(self, loader: Any, batch: Any) -> None:
        if self._loader is None:
            self._loader = loader
        if loader is not self._loader:
            return
        self.samples += rows(batch)
        with contextlib.suppress(TypeError, AttributeError, NotImplementedError):
            self.size = len(loader.dataset)
        self.batch = loader.batch_size


def enough(dataset: Any, batch: int) -> Any:
    """Data with a whole batch: as often again as it takes."""
    with contextlib.suppress(TypeError, NotImplementedError):
        if 0 < len(dataset) < batch:
            return ConcatDataset([dataset] * -(-batch // len(dataset)))
    return dataset


def rows(batch: Any) -> int:
    """Samples in a batch: those of a graph batch, the length of the first tensor, or of a list."""
    if isinstance(graphs := getattr(batch, "num_graphs", None), int):
        return graphs
    first = next((one for one in tensors_in(batch) if one.dim()), None)
    if first is not None:
        return int(first.shape[0])
    return len(batch) if isinstance(batch, list | tuple) else 1


_INIT, _ITER = DataLoader.__init__, DataLoader.__iter__
