"""Launches what a name of a user's file means as a training program, and traces its step."""

from __future__ import annotations

import ast
import contextlib
import ctypes
import dataclasses
import functools
import inspect
import io
import itertools
import runpy
import sys
import threading
import time
import unittest.mock
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch.utils.data import DataLoader

from foretrain.capture.programs.frameworks import (
    Settings,
    endless,
    loader_of,
    on_device,
    run_hugging_face,
    run_lightning,
    watched_trainers,
)
from foretrain.capture.programs.runner import RunningProgram
from foretrain.capture.programs.scratch import nothing_written
from foretrain.capture.programs.stand_ins import standing_in
from foretrain.capture.programs.targets import Kind, imported, is_batch_name, is_data, kind_of, read_source
from foretrain.capture.recording import recording
from foretrain.capture.sources.inputs import default_inputs
from foretrain.capture.sources.loaded import AUTOCAST_DTYPES, building, own_loss
from foretrain.capture.sources.user_files import beside, loaded_file
from foretrain.capture.sources.zoo import mended_imports
from foretrain.capture.tracing.failures import FOLLOWED
from foretrain.capture.tracing.optimizers import optimizer_of
from foretrain.capture.tracing.values import with_values_if_needed
from foretrain.errors import CaptureError, InputError, first_line
from foretrain.graph import OpGraph
from foretrain.tracebacks import raised_at
from foretrain.workload import Training

LONGEST_S = 300.0
"""After which a program that has made no whole step is given up."""
_MOST_FILES = 100
_MOST_CALLS = 64
"""Calls of a step function without a step of an optimizer, after which it is given up."""


def trace_program(
    path: Path,
    target: str,
    args: Mapping[str, Any],
    training: Training,
    *,
    samples: int | None = None,
    info: Mapping[str, Any],
    cast: bool = False,
) -> OpGraph:
    """One whole step of the program that a name of a file (or the file itself, without one) is.

    ``samples`` is how many the step is to have; without it, as many as the program takes. With ``cast`` it
    runs in an autocast region of the job's precision.
    """
    kind = kind_of(path, target)
    if training.mode == "infer":
        raise InputError(
            f"training.mode: 'infer', but {info['model']} trains; name a function that returns the model"
        )

    def trace(loaders: tuple[int, int] | None) -> tuple[OpGraph, int | None]:
        return with_values_if_needed(functools.partial(run, loaders))

    def run(loaders: tuple[int, int] | None, with_values: bool) -> tuple[OpGraph, int | None]:
        dtype = AUTOCAST_DTYPES.get(training.precision) if cast else None
        program = RunningProgram(loaders, dtype, text="".join(_texts(path)), with_values=with_values)
        if with_values:
            program.note(FOLLOWED)
        decided = Settings()
        launch = _Launch(path, target, kind, dict(args), training, samples, program, decided)
        where = building(f"model {info['model']}")

        def run_launched() -> None:
            with _within(LONGEST_S, str(info["model"])):
                launch.run()

        with recording(path), beside(path), _quiet(), mended_imports(), nothing_written(), where:
            graph = program.trace(run_launched, info)
        known = {**graph.info["training"], **decided}
        return dataclasses.replace(graph, info={**graph.info, "training": known}), program.data.batch

    graph, batch = trace(None)
    if samples is None or graph.samples == samples:
        return graph
    if batch is not None and samples * batch % graph.samples == 0:
        graph, _ = trace((batch, samples * batch // graph.samples))
    if graph.samples != samples:
        raise InputError(
            f"training.global_batch: {info['model']} makes steps of {graph.samples} samples on each device, "
            f"the job asks for {samples}; it decides that itself"
        )
    return graph


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """What a program prints is not the forecast; its arguments are not the command's."""
    argv, sys.argv = sys.argv, sys.argv[:1]
    typed, sys.stdin = sys.stdin, io.StringIO()
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        sys.argv, sys.stdin = argv, typed


class _TooLong(BaseException):
    """Ends a program that makes no step."""


@contextlib.contextmanager
def _within(limit_s: float, name: str) -> Iterator[None]:
    """End what this block runs after a time, wherever it is; what it would sleep through is skipped, and
    the process keeps its signals and its end."""
    thread, sleep = threading.get_ident(), time.sleep
    running, ended = ctypes.c_ulong(thread), threading.Event()

    def sleeping(seconds: float) -> None:
        if threading.get_ident() != thread:
            sleep(seconds)

    def watch() -> None:
        pause = limit_s
        while not ended.wait(pause):
            ctypes.pythonapi.PyThreadState_SetAsyncExc(running, ctypes.py_object(_TooLong))
            pause = 10.0  # where the program has swallowed it

    threading.Thread(target=watch, daemon=True).start()
    try:
        with (
            unittest.mock.patch("time.sleep", sleeping),
            unittest.mock.patch("signal.signal"),
            unittest.mock.patch("atexit.register", lambda function, *_args, **_kwargs: function),
        ):
            yield
    except _TooLong as late:
        where = raised_at(late)
        raise CaptureError(
            f"model {name}: no whole step within {limit_s:.0f} s{f' (at {where})' if where else ''}"
        ) from late
    finally:
        ended.set()


class _Launch:
    """A name of a user's file on its way to run."""

    def __init__(
        self,
        path: Path,
        target: str,
        kind: Kind,
        args: dict[str, Any],
        training: Training,
        samples: int | None,
        program: RunningProgram,
        settings: Settings,
    ) -> None:
        self.path, self.target, self.kind, self.args = path, target, kind, args
        self.training, self.program, self.settings = training, program, settings
        self.samples = training.global_batch if samples is None else samples

    def run(self) -> None:
        text = "".join(_texts(self.path))
        with watched_trainers(text, self.settings), standing_in(text, self.program.note):
            try:
                getattr(self, f"_{self.kind}")()
            except ModuleNotFoundError as error:
                raise CaptureError(
                    f"model {self.path.name}: {first_line(error)} (at {raised_at(error)}); install it here, "
                    "or name a function of the file that returns the model and needs no more than is here"
                ) from error
            except SystemExit as stop:
                code = 0 if stop.code is None else stop.code
                last = sys.stderr.getvalue().strip().splitlines()[-1:] if _is_kept(sys.stderr) else []
                raise CaptureError(
                    f"model {self.path.name}: it ended itself with exit code {code} before two steps were "
                    f"made{''.join(f' ({line})' for line in last)}; model.args gives a script its options"
                ) from stop

    # Kinds

    def _script(self) -> None:
        path = self.path.resolve()
        sys.argv = [str(self.path), *_command_line(self.args)]
        source = read_source(self.path)
        sys.path.append(str(source.root))
        if source.relative:
            runpy.run_module(
                ".".join(path.relative_to(source.root).with_suffix("").parts), run_name="__main__"
            )
        else:
            runpy.run_path(str(path), run_name="__main__")

    def _step(self) -> None:
        module = loaded_file(self.path)
        function = getattr(module, self.target)
        try:
            positional = self._arguments(function, vars(module))
        except InputError:
            if not read_source(self.path).is_script():
                raise
            self.program.begin_anew()
            self._script()  # which calls it with what it needs
            return
        self._repeat(function, positional)

    def _lightning(self) -> None:
        module = loaded_file(self.path)
        model = getattr(module, self.target)(**self.args)
        run_lightning(model, self._lightning_batches(model, module))

    def _trainer(self) -> None:
        trainer = getattr(loaded_file(self.path), self.target)
        if hasattr(trainer, "compute_loss"):
            run_hugging_face(trainer, self.settings)
        raise CaptureError(
            f"model {self.path.name}:{self.target}: is a {type(trainer).__name__}; "
            "name the LightningModule, or the file without a name where it calls fit"
        )

    # What they are called with

    def _repeat(self, function: Callable[..., Any], positional: Callable[[], list[Any]]) -> None:
        """Call a step again and again; one that returns another function is a builder of steps."""
        for _ in range(_MOST_CALLS):
            before = self.program.backward_passes
            made = function(*positional())
            parts = made if isinstance(made, tuple) and made else (made,)
            if callable(parts[0]) and not isinstance(parts[0], torch.nn.Module | torch.Tensor):
                inputs = parts[1] if len(parts) > 1 else ()
                step, inputs = parts[0], inputs if isinstance(inputs, tuple | list) else (inputs,)
                self._repeat(step, lambda inputs=inputs: list(map(on_device, inputs)))  # type: ignore[misc]
                return
            if self.program.backward_passes == before:
                self._learn(made)

    def _learn(self, made: Any) -> None:
        """The backward pass and the update, which a function that returns a loss leaves to its caller."""
        loss = own_loss(made)
        if loss is None:
            raise CaptureError(
                f"model {self.path.name}:{self.target}: made no backward pass and returned "
                f"{type(made).__name__}; a training step makes one, or returns its loss"
            )
        loss.backward()
        optimizer = self.program.own_optimizer(
            lambda parameters: optimizer_of(self.training.optimizer, parameters)
        )
        optimizer.step()
        optimizer.zero_grad()

    def _arguments(self, function: Callable[..., Any], known: Mapping[str, Any]) -> Callable[[], list[Any]]:
        """What a step function is called with each time: the job's args, objects of its file that go by the
        same name, and data for the rest."""
        node = read_source(self.path).functions[self.target]
        parameters = [
            one
            for one in inspect.signature(function).parameters.values()
            if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
        ]
        given: dict[str, Any] = {}
        wanted: list[str] = []
        for one in parameters:
            if one.name in self.args:
                given[one.name] = self.args[one.name]
            elif is_batch_name(one.name) and not is_data(node, one.name):
                given[one.name] = self.samples
            elif one.name in known and not inspect.isroutine(known[one.name]):
                given[one.name] = known[one.name]
            elif one.default is not one.empty:
                given[one.name] = one.default
            else:
                wanted.append(one.name)
        if not wanted:
            return lambda: [given[one.name] for one in parameters]
        loaders = [one for one in known.values() if isinstance(one, DataLoader)]
        drawn = self._drawn(loaders[0], wanted) if loaders else itertools.repeat(self._made_data(wanted))

        def arguments() -> list[Any]:
            values = {**given, **dict(zip(wanted, next(drawn), strict=True))}
            return [values[one.name] for one in parameters]

        return arguments

    def _drawn(self, loader: Any, wanted: list[str]) -> Iterator[list[Any]]:
        """Batches of the file's loader for the parameters that are data."""
        for batch in endless(loader):
            several = isinstance(batch, list | tuple)
            if len(wanted) > 1 and len(wanted) != (len(batch) if several else 1):
                raise InputError(
                    f"model.name: {self.path.name}:{self.target} takes {', '.join(wanted)}, "
                    f"its data loader gives {len(batch) if several else 1}"
                )
            yield on_device(list(batch) if len(wanted) > 1 else [batch])

    def _made_data(self, wanted: list[str]) -> list[Any]:
        training = self.training
        if training.image_shape is None and training.sequence is None:
            raise InputError(
                f"training.image: missing; {self.path.name}:{self.target} takes {', '.join(wanted)} and the "
                "file has no data loader, so give training.image or training.sequence"
            )
        rows = self.samples
        inputs = default_inputs(training, rows, "cpu")[0]
        labels = inputs if training.sequence else torch.zeros(rows, dtype=torch.long)
        values = [inputs, labels, *([labels] * len(wanted))][: len(wanted)]
        if len(wanted) == 1 and is_batch_name(wanted[0]):
            return [on_device((inputs, labels))]
        return list(map(on_device, values))

    def _lightning_batches(self, model: Any, module: Any) -> Any:
        with contextlib.suppress(Exception):
            loader = model.train_dataloader()
            if loader is not None:
                return loader
        own = (one for one in list(vars(module).values()) if inspect.isclass(one))
        for kind in own:
            if kind.__module__ == module.__name__ and not issubclass(kind, torch.nn.Module):
                if not hasattr(kind, "train_dataloader"):
                    continue
                return loader_of(kind())
        for one in vars(module).values():
            if isinstance(one, DataLoader):
                return one
        return itertools.repeat(tuple(self._made_data(["x", "y"])))


def _is_kept(stream: Any) -> TypeGuard[io.StringIO]:
    return isinstance(stream, io.StringIO)


def _texts(path: Path) -> Iterator[str]:
    """The file, and those of its folder that it imports, directly or by others."""
    files = [path.resolve()]
    folders = {files[0].parent, read_source(path).root}
    for file in files:  # which grows
        text = file.read_text(encoding="utf-8", errors="replace")
        yield text
        with contextlib.suppress(SyntaxError, ValueError):
            names = imported(ast.parse(text))
            found = {
                one for name in names for folder in {*folders, file.parent} for one in _named(folder, name)
            }
            files += sorted(found.difference(files))[: _MOST_FILES - len(files)]


def _named(folder: Path, name: str) -> Iterator[Path]:
    """The files that a dotted name may stand for."""
    parts = name.split(".")
    for size in range(1, len(parts) + 1):
        place = folder.joinpath(*parts[:size])
        yield from (one for one in (place.with_suffix(".py"), place / "__init__.py") if one.is_file())


def _command_line(args: Mapping[str, Any]) -> Iterator[str]:
    """The options of a script from the args of a job: ``{lr = 0.1, amp = true}`` is ``--lr 0.1 --amp``."""
    for name, value in args.items():
        if value is False:
            continue
        yield name if name.startswith("-") else f"--{name}"
        if value is not True:
            yield str(value)
