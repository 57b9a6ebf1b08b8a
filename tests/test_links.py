"""Tests links of limited rate between namespaces: real traffic at real rates, and nothing left behind."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from foretrain.api import make_job
from foretrain.errors import InputError
from foretrain.measure.backends import Local
from foretrain.measure.campaign import cells, read_grid, run_campaign
from foretrain.measure.links import Fabric, link_rate
from foretrain.measure.tasks import Protocol
from foretrain.run import read_runs


def _why_not() -> str | None:
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None or shutil.which("tc") is None:
        return "iproute2 (ip, tc) is not installed"
    try:
        with Fabric(1, 1e6):
            return None
    except InputError as error:
        return f"this kernel makes no limited links: {error}"


REASON = _why_not()
needs_namespaces = pytest.mark.skipif(REASON is not None, reason=str(REASON))

MODEL = """
import torch

def wide(batch):
    return torch.nn.Linear(500, 1000), torch.randn(batch, 500)
"""


def left_behind() -> list[str]:
    return [
        path.name
        for folder in ("/run/netns", "/sys/class/net")
        for path in Path(folder).glob(f"ftn{os.getpid()}*")
    ]


def test_rates_are_read_as_tc_writes_them() -> None:
    assert link_rate("1Gbit") == link_rate("1 Gbit/s") == link_rate("125 MB/s") == 125e6
    with pytest.raises(InputError, match="links: "):
        link_rate("quick")


@needs_namespaces
def test_a_limited_link_limits_a_training_step(tmp_path: Path) -> None:
    """Two workers all-reduce 2 MB over 100 Mbit/s: each sends at least its 2 MB, which takes 0.16 s."""
    (tmp_path / "wide.py").write_text(MODEL)
    grid = read_grid({"models": "wide.py:wide", "workers": 2, "batch": 4, "links": "100Mbit"})
    run_campaign(
        cells([grid], make_job, base=tmp_path, home=tmp_path),
        tmp_path / "runs.jsonl",
        Local(),
        protocol=Protocol(seconds=1),
    )
    [(_, run)] = read_runs(tmp_path / "runs.jsonl")
    assert run.job.cluster.nodes == 2
    assert run.measured["step_time_s"] > 0.1
    assert run.measured["step_time_without_sync_s"] < 0.5 * run.measured["step_time_s"]
    assert 3e6 < run.measured["network_tx_bytes_per_s"] < 14e6
    assert run.measured["network_rx_bytes_per_s"] == pytest.approx(
        run.measured["network_tx_bytes_per_s"], rel=0.2
    )
    assert run.provenance["resources"]["interface"] == "eth0"
    assert left_behind() == []


@needs_namespaces
def test_links_get_another_rate_while_they_are_there() -> None:
    with Fabric(1, 1e6) as fabric:
        (name,) = fabric.namespaces
        fabric.limit(2e6)
        for where in (["tc"], ["tc", "-n", name]):
            shown = subprocess.run([*where, "qdisc", "show"], capture_output=True, text=True, check=True)
            assert "rate 16Mbit" in shown.stdout
        assert (
            fabric.host()
            in subprocess.run(["ip", "address"], capture_output=True, text=True, check=True).stdout
        )


@needs_namespaces
def test_nothing_is_left_behind_by_an_error_or_a_crash() -> None:
    def fail() -> None:
        with Fabric(2, 1e6):
            assert len(left_behind()) == 5
            raise RuntimeError("oops")

    with pytest.raises(RuntimeError, match="oops"):
        fail()
    assert left_behind() == []
    crash = (
        "import os; from foretrain.measure.links import Fabric; Fabric(1, 1e6).__enter__(); "
        "print(os.getpid(), flush=True); os._exit(1)"
    )
    pid = subprocess.run(
        [sys.executable, "-c", crash], capture_output=True, text=True, check=False
    ).stdout.strip()
    assert list(Path("/run/netns").glob(f"ftn{pid}*"))
    with Fabric(1, 1e6):
        assert not list(Path("/run/netns").glob(f"ftn{pid}*"))
