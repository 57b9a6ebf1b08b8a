"""Reads what ``kubectl get ... -o json`` says of Kueue's Workloads, of Jobs and of pods."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from foretrain.errors import InputError, first_line
from foretrain.files import parse_json
from foretrain.scheduling.jobs import MalformedLines, TraceJob
from foretrain.scheduling.traces.rows import NoJob, Unfinished

KINDS = ("Workload", "Job", "Pod")
_GPU = "nvidia.com/gpu"
_MIG = "nvidia.com/mig-"
_SLICES = 7
"""Of a GPU that is cut by MIG: ``nvidia.com/mig-2g.20gb`` is two of them."""
_PRODUCT = "nvidia.com/gpu.product"
_QUEUE = "kueue.x-k8s.io/queue-name"
_MOMENT = r'"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:Z|\+00:00))"'
_LENGTH_UNKNOWN_S = 1.0


def is_kubernetes(text: str) -> bool:
    """Whether a JSON text is a list of what Kubernetes runs, or one of them."""
    return text.lstrip().startswith("{") and ('"items"' in text or any(f'"{kind}"' in text for kind in KINDS))


def read_kubernetes(lines: Sequence[str], malformed: MalformedLines) -> list[TraceJob]:
    """A Workload stands for its Job, a Job for its pods; items are counted as lines are."""
    items = _items(lines)
    chosen = [item for item in items if item.get("kind") in KINDS]
    if not chosen:
        raise InputError(f"holds none of {', '.join(KINDS)}; kubectl get workloads,jobs,pods -o json")
    stood_for = {_uid(owner) for item in chosen for owner in _owners(item) if item["kind"] == "Workload"} - {
        ""
    }
    present = {_uid(_part(item, "metadata")) for item in chosen} - {""}
    jobs = []
    for number, item in enumerate(items, start=1):
        try:
            if item not in chosen:
                raise NoJob(f"a {item.get('kind', 'thing')}, which is no job")
            owned = any(_uid(owner) in present for owner in _owners(item))
            if item["kind"] != "Workload" and (_uid(_part(item, "metadata")) in stood_for or owned):
                continue
            jobs.append(_job(item))
        except NoJob as error:
            malformed.add(number, str(error))
        except InputError as error:
            malformed.add(number, first_line(error).partition(":")[0] + " is not valid")
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            malformed.add(number, f"lacks or misspells {error}")
    return jobs


def unfinished_kubernetes(lines: Sequence[str]) -> list[Unfinished]:
    """What runs or waits; the present is the latest moment that the list names."""
    items = [each for each in _items(lines) if each.get("kind") in KINDS]
    workloads = any(each["kind"] == "Workload" for each in items)
    now_s = max(_moments_s(lines), default=0.0)
    jobs: list[Unfinished] = []
    for item in items:
        if (workloads and item["kind"] != "Workload") or (not workloads and _owners(item)):
            continue
        try:
            start_s, end_s = _times_s(item)
            if end_s is None:
                ran_s = None if start_s is None else now_s - start_s
                jobs.append(Unfinished(_with(item, _LENGTH_UNKNOWN_S), ran_s))
        except (NoJob, InputError, KeyError, TypeError, ValueError, AttributeError, OverflowError):
            continue
    return jobs


def _items(lines: Sequence[str]) -> list[Mapping[str, Any]]:
    """What a list holds, or the one thing that is none."""
    try:
        document = parse_json("\n".join(lines))
        items = list(document.get("items", [document]))
    except (ValueError, TypeError, AttributeError) as error:
        raise InputError(f"not the JSON of kubectl get -o json ({error})") from error
    return [item if isinstance(item, Mapping) else {} for item in items]


def _moments_s(lines: Sequence[str]) -> Iterator[float]:
    """All moments that a list names; what only looks like one is none."""
    for text in re.findall(_MOMENT, "\n".join(lines)):
        with contextlib.suppress(ValueError):
            yield datetime.fromisoformat(text).timestamp()


def _part(item: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A table within a table; an empty one where it is missing, null or something else."""
    part = item.get(name)
    return part if isinstance(part, Mapping) else {}


def _owners(item: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    owners = _part(item, "metadata").get("ownerReferences")
    return [each for each in owners if isinstance(each, Mapping)] if isinstance(owners, list) else []


def _uid(about: Mapping[str, Any]) -> str:
    """Empty where there is none."""
    return str(about.get("uid") or "")


def _times_s(item: Mapping[str, Any]) -> tuple[float | None, float | None]:
    """When it started and ended, where it did."""
    status = _part(item, "status")
    if item["kind"] == "Workload":
        return _condition_s(status, "Admitted"), _condition_s(status, "Finished")
    if item["kind"] == "Job":
        failed_s = _condition_s(status, "Failed")
        return _time_s(status.get("startTime")), _time_s(status.get("completionTime")) or failed_s
    return _time_s(status.get("startTime")), _pod_end_s(status)


def _job(item: Mapping[str, Any]) -> TraceJob:
    start_s, end_s = _times_s(item)
    _with(item, _LENGTH_UNKNOWN_S)
    if start_s is None or end_s is None:
        raise NoJob(f"a {item['kind']} that has not started or not ended")
    if end_s <= start_s:
        raise NoJob(f"a {item['kind']} that never ran")
    return _with(item, end_s - start_s)


def _with(item: Mapping[str, Any], duration_s: float) -> TraceJob:
    about, spec, status = item["metadata"], item["spec"], _part(item, "status")
    kind = item["kind"]
    if kind == "Workload":
        sets = [(int(each.get("count", 1)), each["template"]["spec"]) for each in spec["podSets"]]
        limit_s, queue = spec.get("maximumExecutionTimeSeconds"), spec.get("queueName", "")
    elif kind == "Job":
        sets = [(int(spec.get("parallelism", 1)), spec["template"]["spec"])]
        limit_s, queue = spec.get("activeDeadlineSeconds"), _part(about, "labels").get(_QUEUE, "")
    else:
        sets = [(1, spec)]
        limit_s, queue = spec.get("activeDeadlineSeconds"), _part(about, "labels").get(_QUEUE, "")
    gpus, share = _gpus(sets)
    created_s = _time_s(about["creationTimestamp"])
    products = {str(_part(pod, "nodeSelector").get(_PRODUCT) or "") for _, pod in sets} - {""}
    pod = sets[0][1]
    return TraceJob(
        name=f"{about.get('namespace', '')}/{about['name']}".lstrip("/"),
        arrival_s=0.0 if created_s is None else created_s,
        duration_s=duration_s,
        gpus=gpus,
        share=share,
        device=products.pop().lower() if len(products) == 1 else None,
        group=str(_part(status, "admission").get("clusterQueue") or queue or about.get("namespace", "")),
        user=about.get("namespace", ""),
        priority=float(spec.get("priority", pod.get("priority", 0)) or 0),
        limit_s=float(limit_s) if limit_s else None,
    )


def _gpus(sets: Sequence[tuple[int, Mapping[str, Any]]]) -> tuple[int, float]:
    """Whole GPUs of all pods together, or the share of one that a single pod's MIG slice is."""
    whole, slices = 0, 0
    for count, pod in sets:
        for container in pod.get("containers", []):
            resources = _part(container, "resources")
            wanted = {**_part(resources, "requests"), **_part(resources, "limits")}
            whole += count * int(wanted.get(_GPU, 0))
            for name, number in wanted.items():
                if name.startswith(_MIG):
                    slices += count * int(number) * int(name[len(_MIG) :].partition("g.")[0])
    if whole:
        return whole + -(-slices // _SLICES), 1.0
    if not slices:
        raise NoJob("without GPUs")
    return (1, slices / _SLICES) if slices < _SLICES else (-(-slices // _SLICES), 1.0)


def _condition_s(status: Mapping[str, Any], kind: str) -> float | None:
    for condition in status.get("conditions") or []:
        if condition.get("type") == kind and condition.get("status") == "True":
            return _time_s(condition.get("lastTransitionTime"))
    return None


def _pod_end_s(status: Mapping[str, Any]) -> float | None:
    ends = [
        _time_s(_part(_part(each, "state"), "terminated").get("finishedAt"))
        for each in status.get("containerStatuses") or []
    ]
    known = [end for end in ends if end is not None]
    return max(known) if known and len(known) == len(ends) else None


def _time_s(text: str | None) -> float | None:
    return None if text is None else datetime.fromisoformat(text).timestamp()
