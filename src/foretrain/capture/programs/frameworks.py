"""Runs the steps that training frameworks make around a user's code: those of Lightning's and Hugging Face's
trainers."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import unittest.mock
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader

from foretrain.capture.programs.pretence import Quiet
from foretrain.capture.sources.loaded import own_loss
from foretrain.capture.sources.zoo import installed
from foretrain.capture.tracing.nested import map_tensors
from foretrain.errors import CaptureError

Settings = dict[str, Any]
"""Fields of a job's training that a trainer decides."""

_LIGHTNING = ("lightning.pytorch", "pytorch_lightning")
_LIGHTNING_CASTS = {
    "bf16-mixed": torch.bfloat16, "bf16": torch.bfloat16, "16-mixed": torch.float16, "16": torch.float16,
}  # fmt: skip


def on_device(batch: Any) -> Any:
    """A batch as a trainer sends it to the GPU."""
    return map_tensors(lambda tensor: tensor.to("cuda"), batch)


def endless(loader: Any) -> Iterator[Any]:
    """Epoch after epoch."""
    while True:
        drawn = False
        for batch in loader:
            drawn = True
            yield batch
        if not drawn:
            raise CaptureError("model: its data loader gives no batch")


@contextlib.contextmanager
def watched_trainers(text: str, settings: Settings) -> Iterator[None]:
    """Where the text of a program names a framework, its trainers run the step below in place of their own
    loops; ``settings`` learns what they were told."""
    with contextlib.ExitStack() as stack:
        for package in _LIGHTNING:
            if package.partition(".")[0] in text and installed(package):
                trainer = importlib.import_module(package).Trainer
                stack.enter_context(_patched(trainer, "__init__", _remember))
                stack.enter_context(_patched(trainer, "fit", _fit(settings)))
                loggers = vars(importlib.import_module(f"{package}.loggers")).values()
                for kind in (one for one in loggers if isinstance(one, type)):
                    stack.enter_context(_patched(kind, "__init__", _anyhow))
        if "transformers" in text and installed("transformers"):
            trainer = _hugging_face_trainer()
            if trainer is not None:
                run = _train(settings)
                stack.enter_context(_patched(trainer, "train", run))
        if ("accelerate" in text or "transformers" in text) and installed("accelerate"):
            state = importlib.import_module("accelerate.state")
            for kind in (state.PartialState, state.AcceleratorState, state.GradientState):
                stack.enter_context(unittest.mock.patch.dict(kind._shared_state, clear=True))
        yield


def _patched(kind: Any, name: str, replacement: Any) -> Any:
    return unittest.mock.patch.object(kind, name, replacement)


# Lightning


def _anyhow(_logger: Any, *_args: Any, **_kwargs: Any) -> None:
    """What is logged, and where, does not change a step."""


def _remember(trainer: Any, *_args: Any, **given: Any) -> None:
    trainer.given = given


def _fit(settings: Settings) -> Callable[..., None]:
    def fit(
        trainer: Any,
        model: Any,
        train_dataloaders: Any = None,
        *_args: Any,
        datamodule: Any = None,
        **_kw: Any,
    ) -> None:
        given = trainer.given
        if hasattr(train_dataloaders, "train_dataloader"):
            train_dataloaders, datamodule = None, train_dataloaders
        if (epochs := given.get("max_epochs")) and epochs > 0:
            settings["epochs"] = epochs
        if (steps := given.get("max_steps")) and steps > 0:
            settings["steps"] = steps
            settings.pop("epochs", None)
        loader = (
            train_dataloaders
            if train_dataloaders is not None
            else loader_of(model if datamodule is None else datamodule)
        )
        run_lightning(
            model,
            loader,
            trainer=_LightningTrainer(datamodule, given),
            cast=_LIGHTNING_CASTS.get(str(given.get("precision", "")).removesuffix("-true")),
            dtype={"bf16-true": torch.bfloat16, "16-true": torch.float16}.get(str(given.get("precision"))),
            accumulate=given.get("accumulate_grad_batches", 1),
            clip=given.get("gradient_clip_val"),
        )

    return fit


def loader_of(source: Any) -> Any:
    """What a module, or a data module, trains on."""
    source.prepare_data()
    source.setup("fit")
    return source.train_dataloader()


class _LightningTrainer:
    """What a LightningModule may ask of its trainer."""

    estimated_stepping_batches = 1000
    max_epochs = 10
    max_steps = -1
    global_step = 1
    current_epoch = 0
    is_global_zero = True
    world_size = num_devices = num_nodes = accumulate_grad_batches = 1
    num_training_batches = 100
    training = True
    sanity_checking = validating = testing = predicting = False
    callbacks = ()
    gradient_clip_val = None

    def __init__(self, datamodule: Any = None, given: Mapping[str, Any] | None = None) -> None:
        self.datamodule = datamodule
        self.logger = Quiet()
        self.loggers, self.optimizers = [self.logger], list[Any]()
        self.callback_metrics: dict[str, Any] = {}
        for name in ("max_epochs", "max_steps", "accumulate_grad_batches", "gradient_clip_val"):
            if (value := (given or {}).get(name)) is not None:
                setattr(self, name, value)


def run_lightning(
    model: Any,
    batches: Any,
    *,
    cast: torch.dtype | None = None,
    dtype: torch.dtype | None = None,
    accumulate: int = 1,
    clip: float | None = None,
    trainer: _LightningTrainer | None = None,
) -> None:
    """Train a LightningModule on batches, for ever, as Lightning's loop does."""
    model._trainer = trainer = trainer or _LightningTrainer()
    for quiet in ("log", "log_dict", "print", "toggle_optimizer", "untoggle_optimizer"):
        setattr(model, quiet, lambda *_, **__: None)
    model.to("cuda")
    if dtype is not None:
        model.to(dtype)
    with contextlib.suppress(AttributeError):
        model.configure_model()
    optimizers, schedulers = _configured(model.configure_optimizers())
    trainer.optimizers = optimizers
    model.optimizers = lambda *_, **__: optimizers[0] if len(optimizers) == 1 else optimizers
    model.lr_schedulers = lambda *_, **__: schedulers[0] if len(schedulers) == 1 else schedulers or None
    model.manual_backward = lambda loss, *args, **kwargs: loss.backward(*args, **kwargs)
    model.clip_gradients = _clip
    model.train()
    for hook in (model.on_fit_start, model.on_train_start, model.on_train_epoch_start):
        hook()
    for number, batch in enumerate(endless(batches)):
        data = model.on_after_batch_transfer(on_device(model.on_before_batch_transfer(batch, 0)), 0)
        model.on_train_batch_start(data, number)
        with _cast(cast):
            output = model.training_step(*_arguments(model.training_step, data, number))
        loss = output["loss"] if isinstance(output, Mapping) else output
        if model.automatic_optimization and loss is not None:
            loss = loss / accumulate if accumulate > 1 else loss
            model.on_before_backward(loss)
            loss.backward()
            model.on_after_backward()
            if (number + 1) % accumulate == 0:
                _update(model, optimizers[0], schedulers, clip)
        model.on_train_batch_end(output, data, number)


def _update(model: Any, optimizer: Any, schedulers: list[Any], clip: float | None) -> None:
    model.on_before_optimizer_step(optimizer)
    if clip:
        _clip(optimizer, clip)
    optimizer.step()
    model.on_before_zero_grad(optimizer)
    optimizer.zero_grad()
    for scheduler in schedulers:
        with contextlib.suppress(TypeError):  # one that waits for a metric
            scheduler.step()


def _arguments(step: Any, batch: Any, number: int) -> tuple[Any, ...]:
    """Lightning passes the number of the batch where the step takes it."""
    import inspect

    return (batch, number)[: len(inspect.signature(step).parameters)]


def _clip(optimizer: Any, gradient_clip_val: float | None = None, *_args: Any, **_kwargs: Any) -> None:
    parameters = [one for group in optimizer.param_groups for one in group["params"]]
    torch.nn.utils.clip_grad_norm_(parameters, gradient_clip_val or 1.0)


def _configured(given: Any) -> tuple[list[Any], list[Any]]:
    """Optimizers and schedulers out of the forms that ``configure_optimizers`` may return."""
    if given is None:
        raise CaptureError("model: its configure_optimizers returns none, so there is no step to forecast")
    optimizers: list[Any] = []
    schedulers: list[Any] = []
    pairs = isinstance(given, tuple) and len(given) == 2 and all(isinstance(one, list) for one in given)
    if pairs:
        optimizers, schedulers = list(given[0]), list(given[1])
    else:
        for one in given if isinstance(given, list | tuple) else [given]:
            if isinstance(one, Mapping):
                optimizers.append(one["optimizer"])
                schedulers += [one["lr_scheduler"]] if "lr_scheduler" in one else []
            else:
                optimizers.append(one)
    return optimizers, [one["scheduler"] if isinstance(one, Mapping) else one for one in schedulers]


def _cast(dtype: torch.dtype | None) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext() if dtype is None else torch.autocast("cuda", dtype=dtype)


# Hugging Face


def _hugging_face_trainer() -> Any:
    with contextlib.suppress(ImportError):
        import transformers

        return transformers.Trainer
    return None


def _train(settings: Settings) -> Callable[..., None]:
    def train(trainer: Any, *_args: Any, **_kwargs: Any) -> None:
        run_hugging_face(trainer, settings)

    return train


def run_hugging_face(trainer: Any, settings: Settings) -> None:
    """Train with a Hugging Face ``Trainer``'s model, data, loss and optimizer, for ever, as its loop does."""
    given, model = trainer.args, trainer.model
    if model is None:
        model = trainer.model = trainer.call_model_init()
    settings["epochs"] = given.num_train_epochs
    if given.max_steps > 0:
        settings["steps"] = given.max_steps
        del settings["epochs"]
    model.to("cuda")
    if given.gradient_checkpointing:
        model.gradient_checkpointing_enable(
            **({"gradient_checkpointing_kwargs": k} if (k := given.gradient_checkpointing_kwargs) else {})
        )
    model.train()
    if trainer.optimizer is None:
        trainer.create_optimizer()
    if trainer.lr_scheduler is None:
        with contextlib.suppress(Exception):
            trainer.create_scheduler(num_training_steps=1000)
    optimizer, accumulate = trainer.optimizer, given.gradient_accumulation_steps
    loader = DataLoader(
        trainer.train_dataset,
        batch_size=given.per_device_train_batch_size,
        shuffle=not isinstance(trainer.train_dataset, torch.utils.data.IterableDataset),
        collate_fn=trainer.data_collator,
        drop_last=given.dataloader_drop_last,
    )
    cast = torch.bfloat16 if given.bf16 else torch.float16 if given.fp16 else None
    scaler = torch.amp.GradScaler("cuda") if given.fp16 else None
    batches = endless(loader)
    while True:
        for batch in itertools.islice(batches, accumulate):
            with _cast(cast):
                loss = trainer.compute_loss(model, on_device(batch))
            loss = own_loss(loss) if not isinstance(loss, torch.Tensor) else loss
            assert loss is not None
            loss = loss.mean() / accumulate if accumulate > 1 else loss.mean()
            (loss if scaler is None else scaler.scale(loss)).backward()
        if scaler is not None:
            scaler.unscale_(optimizer)
        if given.max_grad_norm and given.max_grad_norm > 0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), given.max_grad_norm)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        if trainer.lr_scheduler is not None:
            trainer.lr_scheduler.step()
        model.zero_grad()
