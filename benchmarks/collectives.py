"""Compares the costs of collectives with measured ones, and fits their constants.

    python benchmarks/collectives.py --data DIR [--fit] [--each]

DIR holds network/ and tables/ with the public files (README.md there); data/ is the project's own. Each line
is one file, system, collective and class of size: errors with the shipped constants, and with the transport's
constants fitted to the other systems (left out). --fit prints the constants that fit all systems best. Curves
whose path through the network is not known are scored, not fitted: a note says why. docs/collectives.md
explains them.
"""

from __future__ import annotations

import argparse
import dataclasses
import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
import zstandard
from scipy.optimize import least_squares

import reading
from foretrain.cluster import Cluster
from foretrain.costs.collectives import Collectives, Kind, Team
from foretrain.costs.transports import SERVER, TRANSPORTS, Transport
from foretrain.evaluate import Scores

OWN = Path("data")
SMALL_BYTES = 1 << 20
LEAST_SHARE = 0.05
"""Of a CPU step: what synchronising takes below this is lost in the noise of two step times."""
SKEW = 0.05
"""Of a CPU step: workers wait for the slowest one. Not a cost of the network, but part of what synchronising
adds."""
BERT_BASE_PARAMETERS = 108.9e6
FIRST_BUCKET, BUCKET = 1 << 20, 25 << 20
"""DistributedDataParallel's defaults."""
FREE: dict[str, tuple[str, ...]] = {
    "nvlink3": ("ring", "own", "pair", "chunk_s", "start_s"),
    "nvlink4": ("ring", "own", "pair", "chunk_s", "start_s", "switch"),
    "nvlink5": ("ring", "own", "exchange", "chunk_s", "start_s", "switch"),
    "pcie": ("ring", "chunk_s", "start_s"),
    "rdma": ("ring", "pair", "start_s"),
    "sockets": ("most_bytes_per_s",),
    "gloo": ("most_bytes_per_s", "hop_s"),
    "server": ("process_bytes_per_s", "update_s_per_byte"),
}
"""What the data can tell of each set of constants."""

BEGIN = {
    "ring": 0.8,
    "own": 0.4,
    "exchange": 0.8,
    "pair": 0.8,
    "switch": 0.8,
    "chunk_s": 3e-6,
    "start_s": 8e-6,
    "most_bytes_per_s": 2e9,
    "hop_s": 1e-4,
    "process_bytes_per_s": 2e9,
    "update_s_per_byte": 1e-9,
}
"""Where a fit begins, and stays where the curves tell nothing."""

Array = np.ndarray[Any, np.dtype[np.float64]]
Constants = Mapping[str, Any]
"""Transports by name, and the parameter server's under "server"."""
SHIPPED: Constants = {**TRANSPORTS, "server": SERVER}


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Measured times of one operation on one system, by size."""

    file: str
    system: str
    kind: Kind | Literal["parameter_server"]
    cluster: Mapping[str, Any]
    team: Team
    sizes: Array
    times_s: Array
    fits: str | None
    """The constants that it calibrates; None when it is scored only."""
    fits_from_bytes: float = 0.0
    note: str = ""
    alone_s: float = 0.0
    """The step without synchronising, where a step was measured."""
    servers: int = 0
    in_buckets: bool = False

    def predicted_s(self, constants: Constants = SHIPPED) -> Array:
        transports = {name: value for name, value in constants.items() if isinstance(value, Transport)}
        network = Collectives(Cluster.read(self.cluster), transports=transports, server=constants["server"])
        if self.kind == "parameter_server":
            return self._skew_s + network.parameter_server_s(
                self.sizes, workers=self.team.size, servers=self.servers, nodes=self._server_nodes
            )
        if not self.in_buckets:
            return network.time_s(self.kind, self.sizes, self.team)
        return self._skew_s + np.array(
            [network.time_s(self.kind, buckets(size), self.team).sum() for size in self.sizes]
        )

    @property
    def _skew_s(self) -> float:
        return SKEW * self.alone_s if self.team.size > 1 else 0.0

    @property
    def _server_nodes(self) -> int:
        """Processes have a namespace each where there is more than one node."""
        return 1 if self.team.nodes == 1 else self.team.nodes + self.servers

    @property
    def place(self) -> str:
        return "between nodes" if self.team.nodes > 1 else "in a node"

    def chosen(self, rows: np.ndarray[Any, np.dtype[np.bool_]]) -> Curve:
        return dataclasses.replace(self, sizes=self.sizes[rows], times_s=self.times_s[rows])

    def thinned(self, per_octave: int = 4) -> Curve:
        """Medians of classes of size, so that long messages, which are measured most, do not decide alone."""
        used = self.chosen(self.sizes >= self.fits_from_bytes)
        classes = np.round(np.log2(used.sizes) * per_octave)
        groups = [classes == value for value in np.unique(classes)]
        sizes, times = (
            [float(np.median(column[group])) for group in groups] for column in (used.sizes, used.times_s)
        )
        return dataclasses.replace(self, sizes=np.array(sizes), times_s=np.array(times))


def buckets(size: float) -> Array:
    """The calls that a model's gradients take."""
    rest = max(0.0, size - FIRST_BUCKET)
    whole = [float(BUCKET)] * int(rest // BUCKET)
    return np.array([part for part in (min(size, FIRST_BUCKET), *whole, rest % BUCKET) if part])


# The files


def vidur(path: Path) -> Iterator[Curve]:
    """The least of three calls: the others contain the wait for members that came late.

    Calls below 1 MiB contain it all the same, and short messages over sockets end when they are
    buffered: not fitted.
    """
    table = pd.read_csv(path)
    pairs = {
        "device": "a100-pcie-80gb",
        "devices_per_node": 4,
        "intra_node": {"kind": "nvlink-pair"},
        "inter_node": {"kind": "ethernet", "bandwidth": "80 Gb/s"},
    }
    clusters: dict[str, dict[str, Any]] = {
        "a100_dgx": {"node": "dgx-a100"},
        "h100_dgx": {"node": "dgx-h100"},
        "a100_pairwise_nvlink": pairs,
        "h100_pairwise_nvlink": {**pairs, "device": "h100-nvl-80gb"},
        "a40_pairwise_nvlink": {**pairs, "device": "a40", "devices_per_node": 8},
    }
    for (system, collective, per_node, nodes), rows in table.groupby(
        ["system", "collective", "devices_per_node", "nodes"]
    ):
        kind: Kind = "send" if collective == "send_recv" else collective
        fits, note = vidur_path(system, kind, per_node, nodes)
        curve = Curve(
            file="vidur",
            system=system,
            kind=kind,
            cluster={**clusters[system], "nodes": nodes},
            team=Team(per_node=per_node, nodes=nodes),
            sizes=rows["bytes"].to_numpy(float),
            times_s=rows["min_s"].to_numpy(float),
            fits=fits,
            fits_from_bytes=8 << 20 if fits == "sockets" else 1 << 20 if nodes == 1 else 0.0,
            note=note,
        )
        yield possible(curve)


def vidur_path(system: str, kind: Kind, per_node: int, nodes: int) -> tuple[str | None, str]:
    """The constants that a curve tells about, or why it tells about none."""
    if nodes > 1 and system == "a100_dgx":
        return (
            None,
            "a third of a 200 Gb/s adapter, 2 per node no "
            "faster than 1: path not known, perhaps no GPUDirect",
        )
    if nodes == 1 and system == "a40_pairwise_nvlink":
        return None, "4 GB/s, an eighth of PCIe: path not known, perhaps not a bridged pair"
    if nodes == 1 and system == "a100_pairwise_nvlink" and kind == "send":
        return None, "many rows faster than the link"
    if nodes > 1:
        return ("rdma" if system == "h100_dgx" else "sockets"), ""
    if system.endswith("pairwise_nvlink") and per_node > 2:
        return "pcie", ""
    return ("nvlink4" if system.startswith("h100") else "nvlink3"), ""


def perlmutter_vista(path: Path) -> Iterator[Curve]:
    """All-gathers are read as giving the input of a member, as their rates then agree with all-reduce.

    Perlmutter between nodes is read as sockets: 1.2 GB/s for each device of a node, of an adapter's 25.
    """
    table = pd.read_csv(path)
    sockets = {
        "device": "a100-sxm-80gb",
        "devices_per_node": 4,
        "intra_node": {"kind": "nvlink-mesh"},
        "inter_node": {"kind": "ethernet", "bandwidth": "800 Gb/s", "nics": 4},
    }
    for (system, collective, per_node, nodes), rows in table.groupby(
        ["system", "collective", "devices_per_node", "nodes"]
    ):
        size = rows["bytes"].to_numpy(float) * (per_node * nodes if collective == "all_gather" else 1)
        home = {"node": "vista"} if system == "vista" else sockets
        fits = "rdma" if system == "vista" else "sockets" if nodes > 1 else "nvlink3"
        gathers = collective == "all_gather"
        curve = Curve(
            file="perlmutter_vista",
            system=system,
            kind="send" if collective == "send_recv" else collective,
            cluster={**home, "nodes": nodes},
            team=Team(per_node=per_node, nodes=nodes),
            sizes=size,
            times_s=rows["time_s"].to_numpy(float),
            fits=None if gathers else fits,
            note="0.6 of all-reduce's rate and less with size: not explained"
            if gathers and nodes == 1
            else "",
        )
        yield possible(curve)


def possible(curve: Curve) -> Curve:
    """Without rows that are faster than the data-sheet rate of the link allows."""
    free: dict[str, Any] = {"ring": 1.0, "pair": 1.0, "own": 0.0, "chunk_s": 0.0, "start_s": 0.0}
    free["most_bytes_per_s"] = np.inf
    perfect = {
        **{name: dataclasses.replace(transport, **free) for name, transport in TRANSPORTS.items()},
        "server": SERVER,
    }
    latency = dataclasses.replace(curve, sizes=np.zeros_like(curve.sizes)).predicted_s(perfect)
    good = curve.times_s >= 0.95 * (curve.predicted_s(perfect) - latency)
    note = curve.note if good.all() else f"{int((~good).sum())} rows faster than the link left out"
    return dataclasses.replace(curve.chosen(good), note=note)


AIC_NODES = {
    "a100-sxm-80gb": "dgx-a100",
    "h100-sxm-80gb": "dgx-h100",
    "h200-sxm-141gb": "dgx-h200",
    "b200": "dgx-b200",
    "gb200": "gb200-nvl72",
}


def aiconfigurator(path: Path) -> Iterator[Curve]:
    """The median of what was measured for a cell, a curve for each version of NCCL.

    A size is that of the whole buffer, and calls are repeated back to back: no member comes late.
    """
    table = pd.read_csv(path)
    for (device, _version, collective, devices), rows in table.groupby(
        ["device", "nccl", "collective", "devices"]
    ):
        medians = rows.groupby("elements")["latency_s"].median()
        yield Curve(
            file="aiconfigurator",
            system=AIC_NODES[device],
            kind="all_to_all" if collective == "alltoall" else collective,
            cluster={"node": AIC_NODES[device]},
            team=Team(per_node=int(devices), nodes=1),
            sizes=2.0 * medians.index.to_numpy(float),
            times_s=medians.to_numpy(float),
            fits={"a100": "nvlink3", "h100": "nvlink4", "h200": "nvlink4"}.get(device[:4], "nvlink5"),
        )


def galvatron(path: Path) -> Iterator[Curve]:
    """Those with a size; bandwidths are printed without one.

    The device is not stated: the rates are an A100's.
    """
    table = pd.read_csv(path).dropna(subset=["bytes"])
    for (collective, group), rows in table.groupby(["collective", "group"]):
        yield Curve(
            file="galvatron",
            system="galvatron",
            kind=collective,
            cluster={"node": "dgx-a100"},
            team=Team(per_node=int(group), nodes=1),
            sizes=rows["bytes"].to_numpy(float),
            times_s=rows["time_s"].to_numpy(float),
            fits="nvlink3" if collective == "all_reduce" else None,
            fits_from_bytes=16 << 20,
            note="below 16 MiB bound by the host",
        )


def pollux(path: Path) -> Iterator[Curve]:
    """The logged synchronisation of BERT-base (fp32) on T4s, even placements: sockets on a cloud's Ethernet.

    Scored only.
    """
    table = pd.read_csv(path)
    table = table[
        (table["model"] == "BERT-base SQuAD") & (table["gpus"] > 1) & (table["gpus"] % table["nodes"] == 0)
    ]
    for (devices, nodes), rows in table.groupby(["gpus", "nodes"]):
        yield Curve(
            file="pollux",
            system="g4dn.12xlarge",
            kind="all_reduce",
            cluster={"node": "g4dn.12xlarge", "nodes": nodes},
            team=Team(per_node=devices // nodes, nodes=nodes),
            sizes=np.full(len(rows), 4.0 * BERT_BASE_PARAMETERS),
            times_s=rows["sync_time_s"].to_numpy(float),
            fits=None,
            note="part of it is hidden behind, or waits for, the backward pass",
        )


def own(path: Path) -> Iterator[Curve]:
    """What synchronising adds to a step: DistributedDataParallel or a parameter server, of CPU workers."""
    name = path.name.split(".")[0]
    for row in read_lines(path):
        made, cluster, workers = row["provenance"], row["job"]["cluster"], row["job"]["plan"]["data"]
        time_s, nodes, servers = sync_s(row), cluster.get("nodes", 1), row["job"]["plan"].get("servers", 0)
        if time_s is None:
            continue
        crowded = bool(made.get("oversubscribed")) and nodes > 1
        yield Curve(
            file=name,
            system=f"{name} {made['link']}" if made.get("link") else name,
            kind="parameter_server" if servers else "all_reduce",
            cluster=cluster,
            team=Team(per_node=workers // nodes, nodes=nodes),
            sizes=np.array([4.0 * parameters(row)]),
            times_s=np.array([time_s]),
            fits=None if crowded else "server" if servers else "gloo",
            note="more processes than cores" if crowded else "",
            alone_s=row["measured"]["step_time_without_sync_s"],
            servers=servers,
            in_buckets=not servers,
        )


def sync_s(row: Mapping[str, Any]) -> float | None:
    """Step time less that without synchronising, or None where it is too small a part to tell."""
    step, alone = (row["measured"].get(name) for name in ("step_time_s", "step_time_without_sync_s"))
    return step - alone if step and alone and step - alone > LEAST_SHARE * step else None


def parameters(row: Mapping[str, Any]) -> int:
    made = row["provenance"]
    return int(made.get("parameters") or made["params"])


def read_lines(path: Path) -> list[dict[str, Any]]:
    data = path.read_bytes()
    if path.suffix == ".zst":
        data = zstandard.ZstdDecompressor().stream_reader(io.BytesIO(data)).read()
    return [json.loads(line) for line in data.splitlines()]


# Fitting and scoring


def fit(name: str, curves: Sequence[Curve], constants: Constants = SHIPPED) -> Constants:
    """The constants, the free ones of one set fitted to curves of equal weight, or else as in BEGIN."""
    thinned = [curve.thinned() for curve in curves]
    begin = np.log([BEGIN[field] for field in FREE[name]])
    most = [0.0 if field in ("ring", "exchange", "pair", "switch") else np.inf for field in FREE[name]]

    def changed(logs: Array) -> Constants:
        values = dict(zip(FREE[name], map(float, np.exp(logs)), strict=True))
        return {**constants, name: dataclasses.replace(constants[name], **values)}

    def residuals(logs: Array) -> Array:
        tried = changed(logs)
        wrong = [np.log(c.predicted_s(tried) / c.times_s) / np.sqrt(len(c.sizes)) for c in thinned]
        return np.concatenate([*wrong, 0.02 * (np.asarray(logs) - begin)])

    return changed(least_squares(residuals, begin, bounds=(-np.inf, most), loss="soft_l1", f_scale=0.1).x)


def left_out(curves: Sequence[Curve]) -> dict[tuple[str, str], Constants]:
    """By set of constants and system: those fitted to the other systems, where there are any."""
    found = {}
    for name in FREE:
        mine = [curve for curve in curves if curve.fits == name]
        for system in {curve.system for curve in mine}:
            others = [curve for curve in mine if curve.system != system]
            if others:
                found[name, system] = fit(name, others)
    return found


def errors(curves: Iterable[Curve], constants: Constants) -> Array:
    return np.concatenate([curve.predicted_s(constants) / curve.times_s - 1 for curve in curves])


def step_error(curve: Curve) -> float:
    """Of compute, as measured, and synchronisation, as predicted."""
    return float(np.abs(curve.predicted_s() - curve.times_s)[0] / (curve.alone_s + curve.times_s[0]))


def show(curves: Sequence[Curve]) -> None:
    held = left_out(curves)
    head = "".join(f"{word:>8s}" for word in ("n", "MAPE", "median", "p90"))
    print(f"{'file':17s} {'system':22s} {'operation':31s} {'size':6s}{head}   left out: MAPE  median  note")
    for (file, system, kind, place, fits), group in grouped(curves).items():
        for label, small in (("<1MiB", True), ("larger", False)):
            parts = [curve.chosen((curve.sizes < SMALL_BYTES) == small) for curve in group]
            parts = [part for part in parts if len(part.sizes)]
            if parts:
                scores, other = Scores.of_errors(errors(parts, SHIPPED)), held.get((fits or "", system))
                line = f"{file:17s} {system:22s} {kind + ' ' + place:31s} {label:6s}{scores.n:8d}"
                line += shares(scores.mape, scores.median_ape, scores.p90_ape)
                if other:
                    scores = Scores.of_errors(errors(parts, other))
                    line += " " * 11 + shares(scores.mape, scores.median_ape)
                else:
                    line += " " * 27
                if parts[0].alone_s:
                    line += (
                        f"  (of the whole step: {100 * np.mean([step_error(part) for part in parts]):.1f}%)"
                    )
                print(f"{line}  {'; '.join(sorted({curve.note for curve in group if curve.note}))}".rstrip())


def grouped(curves: Sequence[Curve]) -> dict[tuple[str, str, str, str, str | None], list[Curve]]:
    found: dict[tuple[str, str, str, str, str | None], list[Curve]] = {}
    for curve in curves:
        found.setdefault((curve.file, curve.system, curve.kind, curve.place, curve.fits), []).append(curve)
    return found


def shares(*values: float) -> str:
    return "".join(f"{100 * value:7.1f}%" for value in values)


def show_fits(curves: Sequence[Curve]) -> None:
    for name, fields in FREE.items():
        fitted_to = [curve for curve in curves if curve.fits == name]
        fitted = fit(name, fitted_to)[name]
        print(
            name,
            {field: float(f"{getattr(fitted, field):.3g}") for field in fields},
            "from",
            ", ".join(sorted({c.system for c in fitted_to})),
        )


def show_each(curves: Sequence[Curve]) -> None:
    """Predicted over measured by size, for every curve."""
    for curve in curves:
        thin = dataclasses.replace(curve, fits_from_bytes=0.0).thinned(1)
        ratios = " ".join(
            f"{size / 1e6:.3g}M:{ratio:.2f}"
            for size, ratio in zip(thin.sizes, thin.predicted_s() / thin.times_s, strict=True)
        )
        print(f"{curve.system} {curve.kind} {curve.team.per_node}x{curve.team.nodes} {ratios}")


def read_all(data: Path) -> Iterator[Curve]:
    network = data / "network"
    yield from vidur(network / "vidur_collectives.csv.gz")
    yield from perlmutter_vista(network / "nccl_perlmutter_vista.csv.gz")
    yield from aiconfigurator(network / "aic_nccl.csv.gz")
    yield from galvatron(network / "galvatron_collectives.csv.gz")
    yield from pollux(data / "tables" / "pollux_t4_steps.csv")
    for name in ("cpu16_ddp.jsonl", "cpu16_campaign.jsonl.zst", "links_campaign.jsonl.zst"):
        yield from own(OWN / name)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=reading.existing, required=True)
    parser.add_argument("--fit", action="store_true", help="print the constants that fit all systems best")
    parser.add_argument("--each", action="store_true", help="print predicted over measured for every curve")
    options = parser.parse_args()
    curves = list(read_all(options.data))
    show(curves)
    if options.fit:
        show_fits(curves)
    if options.each:
        show_each(curves)


if __name__ == "__main__":
    reading.run(main)
