"""Keeps what a search found, for the next time the same model is planned for the same clusters."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import foretrain
from foretrain.capture import cache_folder
from foretrain.errors import ForetrainError
from foretrain.files import parse_json, write_atomically
from foretrain.plan import Plan
from foretrain.planner.rating import Rating
from foretrain.planner.search import OnCluster, SearchState
from foretrain.planner.space import Cut, Space
from foretrain.predictors.base import Predictor
from foretrain.predictors.portable import Portable

_FORMAT = 2
_FOLDER = "plans"
_LENGTH = ("samples", "epochs", "steps", "evaluate_every", "evaluate_samples", "checkpoint_every")
"""Fields of a training that change nothing in a step."""
_COUNTS = ("considered", "costed", "too_large", "costed_too_large", "impossible", "left")


def remembered(
    predictor: Predictor,
    spaces: Sequence[Space],
    asked: Mapping[str, Any],
    make: Callable[[], SearchState],
    *,
    wanted: bool,
) -> SearchState:
    """Make a search with ``make``, or read what it found before."""
    if not wanted:
        return make()
    try:
        path = cache_folder() / _FOLDER / f"{_key(predictor, spaces, asked)}.json"
    except ForetrainError:  # a predictor that cannot travel is not known by its state
        return make()
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return _read(parse_json(path.read_text()), spaces)
    state = make()
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(_document(state)))
    return state


def _key(predictor: Predictor, spaces: Sequence[Space], asked: Mapping[str, Any]) -> str:
    parts = {
        "format": _FORMAT,
        "code": _code(),
        "predictor": _state(predictor),
        "asked": dict(asked),
        "spaces": [_space(space) for space in spaces],
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:32]


def _space(space: Space) -> dict[str, Any]:
    job = space.job.to_dict()
    training = {name: value for name, value in job["training"].items() if name not in _LENGTH}
    cluster = {name: value for name, value in job["cluster"].items() if name != "price"}
    model = {**job["model"], "libraries": None}
    files = space.job.workload.model.source in ("python", "onnx", "graph")
    return {
        "model": model,
        "read": _stamp(space) if files else None,
        "training": training,
        "cluster": cluster,
        "own": str(space.own),
        "target": space.ability.target,
        "allowed": {name: list(values) for name, values in space.allowed.items()},
        "pipelines_only": space.pipelines_only,
    }


def _stamp(space: Space) -> str:
    """The file that a model comes from, as it is now; what that imports is not looked at."""
    name = str(space.job.workload.model.name).partition(":")[0]
    path = space.job.workload.base / name
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else name


def _state(predictor: Predictor) -> Any:
    """Identify what a predictor has learned; what comes with foretrain is part of its code."""
    if predictor.records_ == "shipped":
        return predictor.name
    portable = Portable.of_learned(predictor)
    files = [(name, hashlib.sha256(data).hexdigest()) for name, data in portable.files]
    return [portable.name, portable.source and portable.source[0], files]


@functools.cache
def _code() -> list[Any]:
    """This version of foretrain, with the newest of its files, and the libraries that models come from."""
    root = Path(foretrain.__file__).parent
    newest = max(path.stat().st_mtime_ns for path in root.rglob("*") if path.is_file())
    versions = []
    for library in ("foretrain", "torch", "transformers", "timm", "torchvision"):
        with contextlib.suppress(PackageNotFoundError):
            versions.append([library, version(library)])
    return [newest, versions]


# On disk


def _document(searched: SearchState) -> dict[str, Any]:
    return {
        "considered": searched.considered,
        "costed": searched.costed,
        "too_large": searched.too_large,
        "costed_too_large": searched.costed_too_large,
        "impossible": searched.impossible,
        "left": searched.left,
        "refused": dict(searched.refused),
        "clusters": [
            {
                "best": [_rating(one) for one in cluster.best],
                "doubtful": [_rating(one) for one in cluster.doubtful],
                "least": None if cluster.least is None else [cluster.least[0], _plan(cluster.least[1])],
                "hopeless": cluster.hopeless,
                "untraced": cluster.untraced,
                "tried": [[dataclasses.asdict(cut), time_s] for cut, time_s in cluster.tried.items()],
                "refused": list(cluster.space.refused)[:1],
            }
            for cluster in searched.clusters
        ],
    }


def _rating(rating: Rating) -> dict[str, Any]:
    return {"plan": _plan(rating.plan), "time_s": rating.time_s, "chance": rating.chance}


def _plan(plan: Plan) -> dict[str, Any]:
    return {name: value for name, value in dataclasses.asdict(plan).items() if value is not None}


def _read(document: Any, spaces: Sequence[Space]) -> SearchState:
    clusters = []
    for space, one in zip(spaces, document["clusters"], strict=True):
        space.refused.update(one["refused"])
        clusters.append(
            OnCluster(
                space=space,
                best=[_made_rating(rating) for rating in one["best"]],
                doubtful=[_made_rating(rating) for rating in one["doubtful"]],
                least=None if one["least"] is None else (one["least"][0], _made_plan(one["least"][1])),
                hopeless=one["hopeless"],
                untraced=one["untraced"],
                tried={Cut(**cut): time_s for cut, time_s in one["tried"]},
            )
        )
    counts = {name: document[name] for name in _COUNTS}
    return SearchState(clusters=clusters, refused=Counter(document["refused"]), **counts)


def _made_rating(document: Any) -> Rating:
    return Rating(plan=_made_plan(document["plan"]), time_s=document["time_s"], chance=document["chance"])


def _made_plan(fields: dict[str, Any]) -> Plan:
    lists = {name: tuple(value) for name, value in fields.items() if isinstance(value, list)}
    return Plan(**{**fields, **lists})
