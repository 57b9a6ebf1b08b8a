"""Makes a job of what launch files said: options over it, the model that is named, devices and batches."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from foretrain.cluster import Catalog, Cluster
from foretrain.errors import InputError
from foretrain.job import Job
from foretrain.launchers import own_program
from foretrain.launchers.settings import Reading
from foretrain.model_names import model_section
from foretrain.options import DEFAULT_DEVICE, USUAL_IN_NODE, nodes_for, overridden

_SECTIONS = ("model", "training", "cluster", "plan")
_CLUSTER_OPTIONS = ("devices", "nodes", "devices_per_node", "node", "groups")
_DEGREES = ("tensor", "pipeline", "context")


def resolve(
    reading: Reading,
    options: Mapping[str, Any],
    catalog: Catalog,
    *,
    model: str | None = None,
    base: Path = Path(),
    named: str = "",
) -> Job:
    """The job; ``model`` and ``options`` complete what was read, and override it. ``named`` are the files."""
    run = reading.tables.setdefault("run", {})
    for section in _SECTIONS:
        reading.tables.setdefault(section, {})
    _model(reading, run, options, model, base, named)
    own_program.complete(reading, options, base if model is None else Path())
    _cluster(reading, run, options, catalog)
    tables = {name: reading.tables[name] for name in _SECTIONS}
    tables = overridden(
        tables, {k: v for k, v in options.items() if k not in ("batch", "micro_batch")}, catalog
    )
    reading.tables.update({name: tables.get(name, {}) for name in _SECTIONS})
    _stages(reading, run)
    _leave_out_what_has_no_effect(reading)
    _batch(reading, run, options, catalog)
    _sharded_degrees(reading, run, options, catalog)
    _duration(reading)
    base = base if model is None else Path()
    try:
        return Job.read({name: reading.tables[name] for name in _SECTIONS}, catalog=catalog, base=base)
    except InputError as error:
        field = str(error).partition(":")[0]
        where = reading.where(field) or (f"{named}: " if named else "")
        raise InputError(f"{where}{error}") from error


def _duration(reading: Reading) -> None:
    """Epochs where it is told how many samples one has; what comes every so many steps needs their number."""
    training, epochs = reading.tables["training"], reading.get("own.epochs")
    if epochs and not {"steps", "epochs"} & set(training):
        if "samples" in training:
            training["epochs"] = epochs
        else:
            reading.assumed.append(
                "no total time: the samples of an epoch are not in such files; give --samples"
            )
    if not {"steps", "epochs"} & set(training):
        training.pop("checkpoint_every", None)


def _model(
    reading: Reading,
    run: Mapping[str, Any],
    options: Mapping[str, Any],
    model: str | None,
    base: Path,
    named: str,
) -> None:
    """The [model] section: of a name, beside the file or known, or of arguments."""
    if model is not None and own_program.is_same(reading, model, base):
        reading.tables["model"]["name"] = model
        return
    name = model if model is not None else run.get("model")
    if name is None or (reading.tables["model"] and model is None):
        if not reading.tables["model"]:
            started = Path(reading.get("own.started", ""))
            program = f"{started} itself or " if started.suffix == ".py" and started.is_file() else ""
            raise InputError(f"{named}: no model is named in it; give MODEL, such as {program}llama-3-8b")
        return
    beside = base / str(name)
    local = model is None and (beside / "config.json").is_file()
    try:
        section, defaults = model_section(str(beside) if local else str(name), options.get("source"))
    except InputError as error:
        where = reading.where("run.model") if model is None else ""
        what = "; give MODEL beside --from to name another" if model is None else ""
        raise InputError(f"{where}{error}{what}") from error
    reading.tables["model"] = dict(section)
    for key, value in defaults.items():
        if reading.get(f"training.{key}") is None and key not in options:
            reading.set(f"training.{key}", value)
            reading.assumed.append(f"training.{key} = {value}: no file says")


def _cluster(reading: Reading, run: Mapping[str, Any], options: Mapping[str, Any], catalog: Catalog) -> None:
    """Nodes and devices of each; those that no file tells are assumed."""
    cluster = reading.tables["cluster"]
    asked = {"device", "node", "groups"} & set(options)
    if not asked:
        cluster |= {one: run[one] for one in ("node", "cores_per_device") if run.get(one) is not None}
    if not asked and not (cluster.get("node") and run.get("device") is None):
        name = run.get("device")
        try:
            cluster["device"] = catalog.device(str(name or DEFAULT_DEVICE), "cluster.device").name
        except InputError:
            reading.assumed.append(f"cluster.device = {DEFAULT_DEVICE}: {name!r} is not in the catalogue")
            name, cluster["device"] = "", DEFAULT_DEVICE
        if name is None:
            reading.assumed.append(
                f"cluster.device = {DEFAULT_DEVICE}: no such file says; give --device or --node"
            )
    node = options.get("node", cluster.get("node"))
    if node is None and "groups" not in options:
        device = catalog.device(str(options.get("device", cluster.get("device"))), "cluster.device")
        if racks := catalog.racks_with(device):
            cluster["node"] = node = racks[0].name
            reading.assumed.append(f"cluster.node = {node}: what such devices come in")
    in_node = catalog.node(node, "cluster.node").devices if isinstance(node, str) else USUAL_IN_NODE
    devices = run.get("devices")
    if any(name in options for name in ("devices", "groups")):
        if "groups" in options:
            cluster.clear()
        return
    nodes, per_node = cluster.get("nodes"), cluster.get("devices_per_node")
    if devices is not None:
        count = nodes or nodes_for(devices, node, options.get("device"), catalog)
        said = f"{reading.where('run.devices')}{reading.said('run.devices', f'{devices} devices')}"
        if devices % count:
            raise InputError(f"{said} does not divide over {count} nodes")
        if per_node not in (None, devices // count):
            raise InputError(f"{said} is not {count} nodes of {per_node}")
        nodes, per_node = count, devices // count
    if nodes is None and per_node is None and not {"nodes", "devices_per_node"} & set(options):
        nodes, per_node = _implied(reading, run, in_node)
    if per_node is None:
        per_node = in_node
        if node is None and "devices_per_node" not in options:
            reading.assumed.append(f"cluster.devices_per_node = {per_node}: no file says")
    if nodes is None:
        nodes = 1
        if "nodes" not in options:
            reading.assumed.append("cluster.nodes = 1: no file says")
    cluster["nodes"], cluster["devices_per_node"] = nodes, per_node


def _implied(reading: Reading, run: Mapping[str, Any], in_node: int) -> tuple[int, int]:
    """Devices that batches and degrees ask for, or else those of a node."""
    plan = reading.tables["plan"]
    rest = plan.get("replicate", 1) * math.prod(plan.get(name, 1) for name in _DEGREES)
    least = math.lcm(rest, plan.get("pipeline", 1) * plan.get("expert", 1))
    data = None
    micro, accumulation, batch = run.get("micro"), run.get("accumulation"), run.get("batch")
    if run.get("shard_degree"):
        data = run["shard_degree"]
    elif micro and accumulation and batch and batch % (micro * accumulation) == 0:
        data = batch // (micro * accumulation) // plan.get("replicate", 1)
    world = -(-max(in_node, least) // least) * least if data is None else data * rest
    why = "batches and degrees ask for them" if data or least > in_node else "a whole node"
    reading.assumed.append(f"{world} devices: {why}; no file says; give --devices")
    if world <= in_node:
        return 1, world
    count = -(-world // in_node)
    while world % count:
        count += 1
    return count, world // count


def _world(reading: Reading, catalog: Catalog) -> int:
    cluster = reading.tables["cluster"]
    if cluster.get("groups"):
        return Cluster.read(cluster, catalog).world_size
    node = cluster.get("node")
    per_node = cluster.get("devices_per_node") or (catalog.node(node, "cluster.node").devices if node else 1)
    return int(cluster.get("nodes", 1)) * int(per_node)


def _data(reading: Reading, catalog: Catalog) -> int:
    """Data-parallel ranks; degrees that the devices do not divide over are refused."""
    plan, world = reading.tables["plan"], _world(reading, catalog)
    rest = math.prod(plan.get(name, 1) for name in _DEGREES)
    if world % rest:
        paths = [f"plan.{name}" for name in _DEGREES if plan.get(name, 1) > 1]
        words = " x ".join(reading.said(path, f"{path} = {reading.get(path)}") for path in paths)
        raise InputError(f"{reading.where(*paths)}{words} = {rest} does not divide the {world} devices")
    return int(world // rest)


def _stages(reading: Reading, run: Mapping[str, Any]) -> None:
    """Virtual stages of schedules that have several chunks on a rank."""
    plan, each = reading.tables["plan"], run.get("layers_per_stage")
    config = reading.tables["model"].get("config") or {}
    layers = config.get("num_hidden_layers") or config.get("n_layer")
    if each and layers and plan.get("pipeline", 1) > 1:
        chunks = -(-(layers + run.get("layers_of_ends", 0)) // (each * plan["pipeline"]))
        if plan.get("schedule") in ("interleaved", "zero-bubble"):
            plan["virtual_stages"] = max(1, chunks)
    if plan.get("pipeline", 1) == 1:
        for name in ("schedule", "virtual_stages", "stages"):
            plan.pop(name, None)


def _leave_out_what_has_no_effect(reading: Reading) -> None:
    """Launch files switch on what their plan has no use for; a job says only what has an effect."""
    plan, training = reading.tables["plan"], reading.tables["training"]
    config = reading.tables["model"].get("config") or {}
    experts = any("expert" in str(name) for name in (*config, *config.get("ffn_config", {})))
    spread = {name: plan.get(name, 1) > 1 for name in (*_DEGREES, "expert")}
    useful = {
        "sequence_parallel": spread["tensor"],
        "context_exchange": spread["context"],
        "replicate": plan.get("shard", "none") != "none",
        "reshard": plan.get("shard") == "zero3",
        "fp8_gather": training.get("precision") == "fp8",
        "dispatcher": experts and (spread["expert"] or spread["tensor"]),
        "routing": experts and spread["expert"],
        "expert": experts,
        "expert_tensor": experts,
        "expert_capacity": experts,
        "expert_imbalance": experts and "expert_capacity" not in plan,
    }
    for name, has_effect in useful.items():
        if not has_effect:
            plan.pop(name, None)
    overlap = plan.get("overlap") or {}
    for name, degree in (("tensor", "tensor"), ("experts", "expert"), ("messages", "pipeline")):
        if not spread[degree]:
            overlap.pop(name, None)
    if not overlap:
        plan.pop("overlap", None)


def _batch(reading: Reading, run: dict[str, Any], options: Mapping[str, Any], catalog: Catalog) -> None:
    """Samples of a step and of a micro-batch; the rule batch = micro-batch x accumulation x ranks is checked
    where a file gives all three."""
    data, sequence = _data(reading, catalog), reading.get("training.sequence")
    for name in ("micro", "batch"):
        tokens = run.get(f"{name}_tokens")
        if tokens and name not in run:
            if not sequence or tokens % sequence:
                raise InputError(
                    f"{reading.where(f'run.{name}_tokens')}{reading.said(f'run.{name}_tokens', str(tokens))} "
                    f"is no multiple of the {sequence} tokens of a sample"
                )
            run[name] = tokens // sequence
            if (setting := reading.whose(f"run.{name}_tokens")) is not None:
                reading.sources[f"run.{name}"] = setting, ""
    micro = options.get("micro_batch", run.get("micro"))
    batch = options.get("batch", options.get("global_batch", run.get("batch")))
    accumulation = run.get("accumulation")
    if run.get("local") and micro and run["local"] % micro == 0:
        accumulation = (accumulation or 1) * (run["local"] // micro) if batch is None else None
    overridden_by = {"batch", "global_batch", "micro_batch", *_CLUSTER_OPTIONS, *_DEGREES} & set(options)
    if batch and micro and accumulation and batch != micro * accumulation * data:
        if not overridden_by:
            _refuse_batch(reading, micro, accumulation, data)
        reading.assumed.append(f"gradient accumulation follows from {sorted(overridden_by)[0]}")
    if batch and micro is None and accumulation and batch % (accumulation * data) == 0:
        micro = batch // (accumulation * data)
    if batch is None and micro is None and run.get("of_one_device"):
        batch = run["of_one_device"] * data
    if batch is None:
        if micro is None:
            micro = 1
            reading.assumed.append("plan.micro_batch = 1: no file says; give --batch")
        batch = micro * (accumulation or 1) * data
    if batch % data or (micro and batch % (micro * data)):
        words = reading.said("run.batch", f"batch = {batch}")
        small = "" if micro is None else f"{reading.said('run.micro', f'micro-batch {micro}')} x "
        raise InputError(
            f"{reading.where('run.batch', 'run.micro')}{words} does not divide over {small}{data} "
            "data-parallel ranks"
        )
    reading.set("training.global_batch", batch)
    if micro is not None:
        reading.set("plan.micro_batch", micro)


def _refuse_batch(reading: Reading, micro: int, accumulation: int, data: int) -> None:
    raise InputError(
        f"{reading.where('run.batch')}{reading.said('run.batch', 'the batch')} is not "
        f"{reading.said('run.micro', f'micro-batch {micro}')} x "
        f"{reading.said('run.accumulation', f'accumulation {accumulation}')} x {data} data-parallel ranks "
        f"= {micro * accumulation * data}"
    )


def _sharded_degrees(
    reading: Reading, run: Mapping[str, Any], options: Mapping[str, Any], catalog: Catalog
) -> None:
    """Copies of a sharded model: what is left of the data-parallel ranks is sharded over."""
    plan, data = reading.tables["plan"], _data(reading, catalog)
    if run.get("replicate_nodes"):
        nodes = reading.get("cluster.nodes", 1)
        if nodes > 1 and data % nodes == 0:
            plan["replicate"] = nodes
    shard, replicate = run.get("shard_degree"), plan.get("replicate", 1)
    if shard and shard > 1 and shard * replicate != data and plan.get("shard") != "none":
        if reading.whose("plan.replicate") is None and data % shard == 0:
            plan["replicate"] = data // shard
        elif changed := sorted({*_CLUSTER_OPTIONS, *_DEGREES, "replicate"} & set(options)):
            reading.assumed.append(f"sharded over what {changed[0]} leaves, not over {shard}")
        else:
            raise InputError(
                f"{reading.where('run.shard_degree')}{reading.said('run.shard_degree', str(shard))} x "
                f"{replicate} replicas is not the {data} data-parallel ranks"
            )
    if plan.get("replicate") == 1:
        plan.pop("replicate")
    if plan.get("replicate") and data % plan["replicate"]:
        words = reading.said("plan.replicate", f"replicate = {plan['replicate']}")
        raise InputError(
            f"{reading.where('plan.replicate')}{words} does not divide the {data} data-parallel ranks"
        )
