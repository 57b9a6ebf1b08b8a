"""Describes what is trained, where and how it is parallelised: Job, from TOML or JSON and back."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from foretrain import spellings
from foretrain.adapter import Adapter
from foretrain.cluster import Catalog, Cluster
from foretrain.errors import InputError, invalid, unknown
from foretrain.files import parse_json, read_tables, text_lines
from foretrain.placing import check_groups
from foretrain.plan import ContextExchange, Dispatcher, Plan, Recompute, Schedule, Shard
from foretrain.schema import read
from foretrain.spellings import Spellings
from foretrain.workload import (
    FILE_SOURCES,
    MOST_NUMBERS,
    OPTIMIZERS,
    Fp8,
    Framework,
    Mode,
    Model,
    Precision,
    Source,
    Training,
    Workload,
)

SPELLED: dict[str, Spellings] = {
    "source": Spellings(get_args(Source), spellings.SOURCES),
    "mode": Spellings(get_args(Mode), spellings.MODES),
    "precision": Spellings(get_args(Precision), spellings.PRECISIONS, spellings.UNCLEAR_PRECISIONS),
    "optimizer": Spellings(OPTIMIZERS, spellings.OPTIMIZERS, spellings.UNCLEAR_OPTIMIZERS),
    "framework": Spellings(get_args(Framework), spellings.FRAMEWORKS),
    "fp8": Spellings(get_args(Fp8), spellings.FP8),
    "shard": Spellings(get_args(Shard), spellings.SHARDS, spellings.UNCLEAR_SHARDS),
    "schedule": Spellings(get_args(Schedule), spellings.SCHEDULES, spellings.UNCLEAR_SCHEDULES),
    "recompute": Spellings(get_args(Recompute), spellings.RECOMPUTE),
    "dispatcher": Spellings(get_args(Dispatcher), {}),
    "context_exchange": Spellings(get_args(ContextExchange), {}),
}
"""What the fields that are one of a few names read."""

_FROM_BLACKWELL_ON: dict[str, int] = {"mxfp8": 32, "nvfp4": 16}
"""Ways of casting that older devices have no products for, and how many numbers share a scale."""

T = TypeVar("T")

Edit = Callable[[Any], Any]
"""What changes the tables of a job before they are read."""

UNSAID_RECOMPUTATION = "recompute none"
"""Among what is assumed, of a framework whose launchers choose it by the memory that there is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Workload x Cluster x Plan: everything a forecast needs to know."""

    workload: Workload
    cluster: Cluster
    plan: Plan = field(default_factory=Plan)
    assumed: tuple[str, ...] = field(default=(), compare=False)
    """What was not given and taken all the same: ``precision fp32``."""

    def __post_init__(self) -> None:
        plan, world = self.plan, self.cluster.world_size
        if plan.data is None:
            rest = plan.tensor * plan.pipeline * plan.context
            if world % rest:
                raise InputError(
                    f"plan: tensor {plan.tensor} x pipeline {plan.pipeline} "
                    f"x context {plan.context} = {rest} does not divide the {world} devices"
                )
            object.__setattr__(self, "plan", dataclasses.replace(plan, data=world // rest))
        self._check_product()
        check_groups(self.cluster, self.plan, self.expert_tensor)
        self._check_batch()
        self._check_precision()
        self._check_servers()

    def _check_servers(self) -> None:
        own, servers = self.cluster.servers, self.plan.servers
        if own is not None and not servers:
            raise InputError(f"cluster.servers: {own.nodes} nodes need parameter servers; give plan.servers")
        if own is not None and own.nodes > servers:
            raise invalid("cluster.servers.nodes", own.nodes, f"at most plan.servers = {servers}")
        if servers and self.workload.training.mode == "infer":
            raise InputError(f"plan.servers: {servers}, but inference has no gradients to send them")
        split = [name for name in ("tensor", "pipeline", "context", "expert") if getattr(self.plan, name) > 1]
        if servers and split:
            what = f"plan.servers: {servers} serve workers that hold the whole model"
            raise InputError(f"{what}; leave out plan.{split[0]} = {getattr(self.plan, split[0])}")
        if self.plan.offload and any(group.device.is_cpu for group in self.cluster.groups):
            raise InputError("plan.offload: true, but a CPU is the host already; leave it out")

    def _check_precision(self) -> None:
        """fp8 runs nowhere but on units of its own; other formats that a device lacks run as wider ones."""
        training = self.workload.training
        if self.plan.fp8_gather and training.precision != "fp8":
            raise InputError("plan.fp8_gather: true needs training.precision fp8")
        for device in (group.device for group in self.cluster.groups):
            if training.precision == "fp8" and device.fp8 is None:
                raise InputError(
                    f"training.precision: 'fp8' cannot run on {device.name}, which has no fp8 rate in the "
                    "catalogue; use bf16 or fp16, or a device that has one"
                )
            if training.fp8 in _FROM_BLACKWELL_ON and device.capability and float(device.capability) < 10:
                raise InputError(
                    f"training.fp8: {training.fp8!r} cannot run on {device.name}: scales of "
                    f"{_FROM_BLACKWELL_ON[training.fp8]} numbers came with Blackwell; "
                    "use delayed, current or blockwise"
                )

    def _check_product(self) -> None:
        plan = self.plan
        assert plan.data is not None
        product = plan.data * plan.tensor * plan.pipeline * plan.context
        if product != self.cluster.world_size:
            raise InputError(
                f"plan: data {plan.data} x tensor {plan.tensor} "
                f"x pipeline {plan.pipeline} x context {plan.context} = {product},"
                f" but the cluster has {self.cluster.world_size} devices"
            )
        if plan.data % plan.replicate:
            raise InputError(f"plan.replicate: {plan.replicate} does not divide plan.data = {plan.data}")
        sharing = plan.data * plan.context // plan.replicate
        if plan.reshard and sharing % plan.reshard:
            raise InputError(f"plan.reshard: {plan.reshard} does not divide the {sharing} ranks of a copy")
        self._check_experts(product)

    def _check_experts(self, world: int) -> None:
        """The ranks of a pipeline stage are dealt out twice: to the teams of dense layers, and to those of
        experts."""
        plan, width = self.plan, self.expert_tensor
        if plan.expert_imbalance is not None and plan.expert_capacity is not None:
            raise InputError(
                f"plan.expert_imbalance: {plan.expert_imbalance} has no effect with plan.expert_capacity = "
                f"{plan.expert_capacity}, which gives every expert as many rows; leave one out"
            )
        framework, of_stage = self.workload.training.framework, world // plan.pipeline
        if framework == "torchtitan" and width not in (1, plan.tensor):
            raise invalid("plan.expert_tensor", width, f"1 or plan.tensor = {plan.tensor} in torchtitan")
        if of_stage % (plan.expert * width):
            least = plan.pipeline * max(plan.tensor * plan.context, plan.expert * width)
            name, terms = (
                ("expert", f"{plan.expert}") if width == 1 else
                ("expert_tensor", f"{width} x expert {plan.expert} = {width * plan.expert}")
            )  # fmt: skip
            of = f" of a pipeline stage; the plan needs {least} or a multiple" if plan.pipeline > 1 else ""
            raise InputError(f"plan.{name}: {terms} does not divide the {of_stage} devices{of}")

    @property
    def expert_tensor(self) -> int:
        """Ranks that share each expert."""
        return self.plan.expert_width(self.workload.training.framework, self.cluster.world_size)

    @property
    def expert_replicas(self) -> int:
        """Ranks that hold the same experts."""
        return self.cluster.world_size // (self.plan.pipeline * self.plan.expert * self.expert_tensor)

    @property
    def balance(self) -> Literal["even", "speed"]:
        """Say how work is dealt out to groups that differ: as the plan says, else layers of a pipeline by
        speed and a batch alike, as launchers split it."""
        if self.plan.balance is not None:
            return self.plan.balance
        return "speed" if self.plan.pipeline > 1 and len(self.cluster.distinct_groups) > 1 else "even"

    def _check_batch(self) -> None:
        plan, batch = self.plan, self.workload.training.global_batch
        assert plan.data is not None
        if batch % plan.data:
            raise InputError(f"training.global_batch: {batch} does not divide over plan.data = {plan.data}")
        if plan.micro_batch is not None and batch % (plan.data * plan.micro_batch):
            raise InputError(
                f"plan.micro_batch: {plan.micro_batch} x data {plan.data} "
                f"= {plan.micro_batch * plan.data} does not divide the global batch {batch}"
            )
        self._check_inputs()

    def _check_inputs(self) -> None:
        """Refuse inputs so large that what a model's layers make of them can no longer be counted."""
        training = self.workload.training
        for name, numbers in (
            ("image", math.prod(training.image_shape or (0,))),
            ("sequence", training.sequence or 0),
        ):
            if (size := self.micro_batch * numbers) > MOST_NUMBERS:
                raise InputError(
                    f"training.{name}: {getattr(training, name)} in micro-batches of {self.micro_batch:,} "
                    f"are {size:.2g} numbers at once; {MOST_NUMBERS:.2g} is the most"
                )

    @property
    def price_per_hour(self) -> float | None:
        """Dollars for the whole cluster and its parameter servers; None when a price is not known.

        Servers on GPU nodes, or on nodes that are paid whole, come with them; on CPUs each takes the cores of
        a worker.
        """
        price, own = self.cluster.price_per_hour, self.cluster.servers
        if price is None or not self.plan.servers:
            return price
        if own is not None:
            return None if own.price is None else price + own.price * own.nodes
        if self.servers_take_cores:
            return price * (1 + self.plan.servers / self.cluster.world_size)
        return price

    @property
    def servers_take_cores(self) -> bool:
        """Whether parameter servers need cores beside those of the workers, which someone has to pay."""
        bare = all(group.device.is_cpu and group.node is None for group in self.cluster.groups)
        return bool(self.plan.servers) and self.cluster.servers is None and bare

    @property
    def over_network(self) -> bool:
        """Whether workers reach others, or parameter servers on nodes of their own, over the network."""
        return self.cluster.nodes > 1 or self.cluster.servers is not None

    @property
    def micro_batch(self) -> int:
        """Samples that one data-parallel rank handles at once."""
        assert self.plan.data is not None
        return self.plan.micro_batch or self.workload.training.global_batch // self.plan.data

    @property
    def accumulation(self) -> int:
        """Micro-batches per optimizer step and rank."""
        assert self.plan.data is not None
        return self.workload.training.global_batch // (self.plan.data * self.micro_batch)

    @classmethod
    def read(cls, data: object, *, catalog: Catalog | None = None, base: Path = Path()) -> Job:
        """A job from the tables of a TOML or JSON document."""
        if not isinstance(data, Mapping):
            raise invalid("job", data, "a table with model, training and cluster")
        sections = ("model", "training", "cluster", "plan")
        for key in data:
            if key not in sections:
                raise unknown(str(key), key, sections, "a known section; allowed are")
        for key in sections[:3]:
            if key not in data:
                raise InputError(
                    f"{key}: missing; a job has the sections model, training and cluster (and plan)"
                )
        workload = Workload(
            model=_read(Model, data["model"], "model"),
            training=_read(Training, data["training"], "training"),
            base=base,
        )
        cluster = Cluster.read(data["cluster"], catalog or Catalog.load(), base=base)
        training = workload.training
        defaults = ("precision",) if training.mode == "infer" else ("precision", "optimizer")
        assumed = [f"{name} {getattr(training, name)}" for name in defaults if name not in data["training"]]
        plan = _read(Plan, data.get("plan", {}), "plan")
        if (
            training.framework == "megatron"
            and training.mode == "train"
            and "recompute" not in data.get("plan", {})
        ):
            assumed.append(UNSAID_RECOMPUTATION)
        return cls(workload=workload, cluster=cluster, plan=plan, assumed=tuple(assumed))

    @classmethod
    def load(cls, path: Path | str, *, catalog: Catalog | None = None, edit: Edit = lambda data: data) -> Job:
        """A job from a ``.toml`` or ``.json`` file; errors start with the file's name."""
        path = Path(path)
        data = read_tables(path)
        try:
            return cls.read(edit(data), catalog=catalog, base=path.parent)
        except InputError as error:
            raise InputError(f"{path}: {error}") from error

    @property
    def trains(self) -> bool:
        return self.workload.training.mode == "train"

    @property
    def runs_alone(self) -> bool:
        """Whether a device runs as if there were no other: it is the only one, or serves a whole model."""
        plan = self.plan
        cut = plan.shard != "none" or max(plan.tensor, plan.pipeline, plan.context, plan.expert) > 1
        return self.cluster.world_size == 1 or not (self.trains or cut)

    @property
    def of_step(self) -> Job:
        """Leave out the length of the training: what is left is what a step depends on."""
        training = self.workload.training
        if (alone := training.of_step) is training:
            return self
        return dataclasses.replace(self, workload=dataclasses.replace(self.workload, training=alone))

    def to_dict(self) -> dict[str, Any]:
        """The canonical JSON form: what differs from the defaults, plus the resolved plan."""
        return {
            "model": _changed(self.workload.model),
            "training": {"mode": self.workload.training.mode, **_changed(self.workload.training)},
            "cluster": self.cluster.to_dict(),
            "plan": _changed(self.plan),
        }

    def seen_from(self, folder: Path) -> Job:
        """Name the model as a file in ``folder`` names it: its path starts there."""
        work, model = self.workload, self.workload.model
        if model.source in FILE_SOURCES:
            model = dataclasses.replace(model, name=path_seen_from(str(model.name), work.base, folder))
        return dataclasses.replace(self, workload=dataclasses.replace(work, model=model, base=folder))


def path_seen_from(name: str, base: Path, folder: Path) -> str:
    """The path of a model's file that starts in ``base``, as it starts in ``folder``.

    >>> path_seen_from("nets/small.py:net", Path("jobs"), Path("runs/today"))
    '../../jobs/nets/small.py:net'
    """
    path = base / name
    return os.path.relpath(path.parent.resolve() / path.name, folder.resolve())


def parse_job(
    line: str, *, catalog: Catalog | None = None, base: Path = Path(), edit: Edit = lambda data: data
) -> Job:
    """The job on a line of a file that lies in ``base``: a bare one, or that of a run whose measured part is
    ignored."""
    try:
        data = parse_json(line)
    except ValueError as error:
        raise InputError(f"not JSON ({error})") from error
    bare = data["job"] if isinstance(data, Mapping) and "job" in data else data
    return Job.read(edit(bare), catalog=catalog, base=base)


def read_jobs(path: Path, *, catalog: Catalog | None = None) -> Iterator[tuple[int, Job]]:
    """Jobs of a ``.jsonl`` file (bare jobs, or runs whose measured part is ignored), with line numbers."""
    catalog = catalog or Catalog.load()
    for number, line in text_lines(path):
        try:
            yield number, parse_job(line, catalog=catalog, base=path.parent)
        except InputError as error:
            raise InputError(f"{path}:{number}: {error}") from error


def _read(cls: type[T], section: object, path: str) -> T:
    """A section whose names may be spelled as elsewhere."""
    if isinstance(section, Mapping):
        section = {
            key: SPELLED[key](value, f"{path}.{key}") if key in SPELLED and value is not None else value
            for key, value in section.items()
        }
    return read(cls, section, path)


def _changed(noun: Any) -> dict[str, Any]:
    """The fields of a dataclass that differ from their defaults, as JSON values."""
    result = {}
    for item in dataclasses.fields(noun):
        value = getattr(noun, item.name)
        default = item.default_factory() if item.default_factory is not dataclasses.MISSING else item.default
        if value != default:
            value = _changed(value) if isinstance(value, Adapter) else value
            result[item.name] = list(value) if isinstance(value, tuple) else value
    return result
