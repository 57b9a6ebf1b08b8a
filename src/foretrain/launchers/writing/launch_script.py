"""Writes launch.sh: the variables and the command that start a training on one node or on each of several."""

from __future__ import annotations

from foretrain.job import Job
from foretrain.launchers.writing.target_files import TargetFiles
from foretrain.launchers.writing.versions import stamp

EXPANDABLE = "expandable_segments:True"
"""What torch's allocator is told where the job says nothing: segments that grow leave no gaps behind."""
PORT = 29500


def allocator_of(job: Job) -> str | None:
    """Settings of torch's CUDA allocator; None on CPUs, which have none."""
    if job.cluster.device.is_cpu:
        return None
    return job.workload.training.allocator or EXPANDABLE


def launch_script(job: Job, target: TargetFiles) -> str:
    """The text of launch.sh."""
    nodes = job.cluster.nodes
    usage = "bash launch.sh" if nodes == 1 else "MASTER_ADDR=first-node NODE_RANK=0 bash launch.sh"
    lines = [
        "#!/usr/bin/env bash",
        f"# {stamp(*target.stamps)}",
        f"# {'Start it' if nodes == 1 else f'Start it on each of the {nodes} nodes'}: {usage}",
        "# Arguments go on to the program.",
        "set -euo pipefail",
        'cd "$(dirname "${BASH_SOURCE[0]}")"',
        "",
        *_variables(job, target),
        *target.setup,
        *_LAUNCHERS[target.launcher](job, target.command),
    ]
    return "\n".join(lines) + "\n"


def _variables(job: Job, target: TargetFiles) -> list[str]:
    allocator = allocator_of(job)
    lines = []
    if allocator is not None:
        lines.append(f'export PYTORCH_ALLOC_CONF="${{PYTORCH_ALLOC_CONF:-{allocator}}}"')
        lines.append('export PYTORCH_CUDA_ALLOC_CONF="$PYTORCH_ALLOC_CONF"  # the name before torch 2.9')
    else:
        lines.append(f'export OMP_NUM_THREADS="${{OMP_NUM_THREADS:-{job.cluster.device.cores or 1}}}"')
    lines += [f"export {name}={value}" for name, value in target.environment.items()]
    if job.cluster.nodes > 1:
        lines += [
            'MASTER_ADDR="${MASTER_ADDR:-${PET_MASTER_ADDR:-}}"',
            'NODE_RANK="${NODE_RANK:-${PET_NODE_RANK:-${SLURM_NODEID:-0}}}"',
            ': "${MASTER_ADDR:?is the first node, by a name that the others know}"',
        ]
    return [*lines, f'MASTER_PORT="${{MASTER_PORT:-{PORT}}}"', ""]


def _torchrun(job: Job, command: str) -> list[str]:
    nodes, each = job.cluster.nodes, job.cluster.devices_per_node
    meeting = "--standalone"
    if nodes > 1:
        meeting = '--rdzv-backend=c10d --rdzv-id="${RUN_ID:-foretrain}"'
        meeting += ' --rdzv-endpoint="$MASTER_ADDR:$MASTER_PORT"'
    return [
        f"PROCESSES=(--nnodes={nodes} --nproc-per-node={each} {meeting})",
        'if [ -n "${PET_NNODES:-}" ]; then',
        "  PROCESSES=()  # Kubeflow tells torchrun by variables",
        "fi",
        f'exec torchrun "${{PROCESSES[@]}}" {command} "$@"',
    ]


def _accelerate(job: Job, command: str) -> list[str]:
    among = "" if job.cluster.nodes == 1 else '--machine_rank "$NODE_RANK" --main_process_ip "$MASTER_ADDR" '
    return [
        "exec accelerate launch --config_file accelerate.yaml "
        f'{among}--main_process_port "$MASTER_PORT" {command} "$@"'
    ]


def _deepspeed(job: Job, command: str) -> list[str]:
    nodes, each = job.cluster.nodes, job.cluster.devices_per_node
    among = f"--num_gpus={each}"
    if nodes > 1:
        among = (
            f"--hostfile hostfile --num_nodes={nodes} {among} "
            '--no_ssh --node_rank "$NODE_RANK" --master_addr "$MASTER_ADDR"'
        )
    return [f'exec deepspeed {among} --master_port "$MASTER_PORT" {command} "$@"']


_LAUNCHERS = {"torchrun": _torchrun, "accelerate": _accelerate, "deepspeed": _deepspeed}
