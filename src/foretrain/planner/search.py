"""Searches the plans of a job on one or more clusters: cut by cut from the most promising on, every plan of a
cut that bounds do not rule out, with the best so far at any time."""

from __future__ import annotations

import dataclasses
import functools
import heapq
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from foretrain.errors import CaptureError
from foretrain.fanout import Crew
from foretrain.plan import Plan
from foretrain.planner.rating import Rated, Rating, order, rate_cut
from foretrain.planner.space import Cut, Space
from foretrain.predictors.base import Predictor
from foretrain.predictors.portable import Portable
from foretrain.progress import tell

KEPT = 8
"""Plans of each cluster that are kept for a closer look."""
_SLACK = 0.08
"""How much slower than the best plan of its cluster a cut's best may be for its neighbours to be tried."""
_FEW_CUTS = 16
"""Cuts that are all tried, whatever they promise."""

Listener = Callable[["SearchState"], None]
"""Hears the best so far whenever a cut is done."""


@dataclass(slots=True, kw_only=True)
class OnCluster:
    """Holds what was found on one cluster."""

    space: Space
    best: list[Rating] = field(default_factory=list)
    """The fastest plans that fit, the fastest first."""
    doubtful: list[Rating] = field(default_factory=list)
    """Those as fast that a closer look may find to fit."""
    least: tuple[float, Plan] | None = None
    """Of those that do not fit the one that comes nearest, with what it needs over what there is."""
    tried: dict[Cut, float] = field(default_factory=dict)
    """Cuts with the time of their best plan."""
    too_large: dict[Cut, float] = field(default_factory=dict)
    """Cuts with what bounds say that the fastest of their plans that do not fit takes at least."""
    needs: dict[Cut, float] = field(default_factory=dict)
    """Cuts of which nothing fits, with the least that they need over what there is."""
    hopeless: bool = False
    """Whether no cut can fit."""
    untraced: str = ""
    """Why the model could not be traced in a cut."""
    unlaunchable: str = ""
    """What its framework has no word for in a plan that was found."""
    cuts: dict[Cut, list[Cut]] = field(default_factory=dict)
    """All that there are, each with those next to it."""
    first: Sequence[Cut] = ()
    """Those that are tried before the others."""

    @classmethod
    def of(cls, space: Space) -> OnCluster:
        cuts = space.neighbours()
        return cls(space=space, cuts=cuts, first=space.first(list(cuts)) if cuts else ())

    @property
    def limit_s(self) -> float:
        """Give the time that a plan must beat to be kept."""
        return self.best[-1].time_s if len(self.best) == KEPT else math.inf

    def add(self, cut: Cut, rated: Rated) -> None:
        self.tried[cut] = rated.best[0].time_s if rated.best else math.inf
        self.too_large[cut] = rated.too_large_s
        self.hopeless = self.hopeless or rated.hopeless
        self.untraced = self.untraced or rated.untraced
        if not rated.best:
            self.needs[cut] = rated.least[0] if rated.least else math.inf
        self.best = heapq.nsmallest(KEPT, [*self.best, *rated.best], key=order)
        self.doubtful = heapq.nsmallest(KEPT, [*self.doubtful, *rated.doubtful], key=order)
        if rated.least is not None and (self.least is None or rated.least[0] < self.least[0]):
            self.least = rated.least


@dataclass(slots=True, kw_only=True)
class SearchState:
    """Says what a search has come to."""

    clusters: list[OnCluster]
    considered: int = 0
    """Plans: costed, too large by bounds, impossible, or ruled out by bounds as slower."""
    costed: int = 0
    too_large: int = 0
    """Of them, by bounds or when they were costed."""
    costed_too_large: int = 0
    impossible: int = 0
    """Not costed, as the model cannot be cut so."""
    refused: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    left: int = 0
    """Cuts that were not tried: they promise nothing, or time was up."""
    interrupted: bool = False
    """Whether time was up before all that promise something were tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _SharedByCuts:
    """Holds what all cuts are asked with; other processes make the predictor once."""

    portable: Portable
    spaces: tuple[Space, ...]
    risk: float


@functools.lru_cache(maxsize=2)
def _predictor(portable: Portable) -> Predictor:
    return portable.predictor


Item = tuple[Cut, tuple[tuple[int, float, bool], ...]]
"""A cut, and the clusters on which it is tried, each with the time that its plans must beat there and whether
the optimizer may be on the host."""


def _rate(asked: _SharedByCuts, item: Item) -> list[tuple[int, Rated]]:
    """A cut on each cluster that has it."""
    cut, where = item
    predictor = _predictor(asked.portable)
    rated_cuts = []
    for i, limit_s, offloads in where:
        space = dataclasses.replace(asked.spaces[i], offloads=offloads)
        rated_cuts.append((i, rate_cut(predictor, space, cut, most=KEPT, below_s=limit_s, risk=asked.risk)))
    return rated_cuts


def search(
    predictor: Predictor,
    spaces: Sequence[Space],
    *,
    risk: float,
    seconds: float | None = None,
    exhaustive: bool = False,
    processes: int = 1,
    ray: str | None = None,
    listener: Listener = lambda searched: None,
) -> SearchState:
    """The fastest plans of each cluster whose chance of running out of memory may be at most ``risk``."""
    searched = SearchState(clusters=[OnCluster.of(space) for space in spaces])
    began_s = time.monotonic()

    def time_is_up() -> bool:
        searched.seconds = time.monotonic() - began_s
        return seconds is not None and searched.seconds > seconds

    portable = _Held(predictor) if processes == 1 and ray is None else Portable.of_learned(predictor)
    asked = _SharedByCuts(portable=portable, spaces=tuple(spaces), risk=risk)  # type: ignore[arg-type]
    with Crew(_rate, shared=asked, processes=processes, ray=ray) as crew:
        for widen in (_as_they_are, _with_offload, _with_contexts):
            if not widen(searched):
                continue
            _rounds(searched, crew, time_is_up, listener, max(1, processes), exhaustive=exhaustive)
            if time_is_up() or all(one.best for one in searched.clusters):
                break
    time_is_up()
    if searched.clusters and all(
        one.untraced and not one.best and one.least is None for one in searched.clusters
    ):
        raise CaptureError(searched.clusters[0].untraced)
    searched.left = len({cut for one in searched.clusters for cut in one.cuts if cut not in one.tried})
    return searched


@dataclass(frozen=True, slots=True, eq=False)
class _Held:
    """A predictor at hand in the place of one that travels."""

    predictor: Predictor


def _as_they_are(searched: SearchState) -> bool:
    return True


def _with_contexts(searched: SearchState) -> bool:
    """Try ranks that share a sequence, also a short one, on clusters where nothing fits."""
    for cluster in searched.clusters:
        if not cluster.best and not cluster.hopeless:
            cluster.cuts = cluster.space.neighbours(contexts=True)
    return any(
        cut not in cluster.tried for cluster in searched.clusters for cut in cluster.cuts if not cluster.best
    )


def _with_offload(searched: SearchState) -> bool:
    """Try the optimizer on the host, on clusters where nothing fits."""
    for cluster in searched.clusters:
        if not cluster.best and cluster.space.ability.offloads and cluster.space.job.trains:
            cluster.space = dataclasses.replace(cluster.space, offloads=True)
            cluster.tried, cluster.needs, cluster.hopeless = {}, {}, False
    return any(not cluster.tried for cluster in searched.clusters)


def _rounds(
    searched: SearchState,
    crew: Crew[list[tuple[int, Rated]]],
    time_is_up: Callable[[], bool],
    listener: Listener,
    at_once: int,
    *,
    exhaustive: bool,
) -> None:
    """Try cuts until none that is left promises anything."""
    while items := _next(searched, at_once, exhaustive=exhaustive):
        if time_is_up():
            searched.interrupted = True
            return
        tell(f"{searched.considered:,} plans so far; {items[0][0].words}")
        for (cut, _), answers in zip(items, crew.run(items), strict=True):
            for i, rated in answers:
                searched.clusters[i].add(cut, rated)
                searched.considered += rated.considered
                searched.costed += rated.costed
                searched.too_large += rated.too_large
                searched.costed_too_large += rated.costed_too_large
                searched.impossible += rated.impossible
                searched.refused.update(rated.refused)
            listener(searched)


def _next(searched: SearchState, at_once: int, *, exhaustive: bool) -> list[Item]:
    """The cuts that promise most of those that are left, each with the clusters on which it does and what its
    plans must beat there."""
    promises: dict[Cut, float] = {}
    where: dict[Cut, dict[int, tuple[int, float, bool]]] = {}
    for i, cluster in enumerate(searched.clusters):
        for cut, promise in _promising(cluster, exhaustive=exhaustive):
            promises[cut] = min(promise, promises.get(cut, math.inf))
            where.setdefault(cut, {})[i] = i, cluster.limit_s, cluster.space.offloads
    chosen = heapq.nsmallest(at_once, promises, key=lambda cut: (promises[cut], cut))
    return [(cut, tuple(where[cut].values())) for cut in chosen]


def _promising(cluster: OnCluster, *, exhaustive: bool) -> Iterator[tuple[Cut, float]]:
    """Cuts to try on a cluster, with the time of the best known neighbour over that of the best plan: usual
    ones, then those next to what does well and leaner ones next to what would if it fitted, or all of them
    where they are few. Where nothing fits yet, those next to what comes nearest to it."""
    left = cluster.cuts.keys() - cluster.tried.keys()
    if not left or cluster.hopeless:
        return
    too_large = _too_large(cluster)
    first = [cut for cut in cluster.first if cut in left and not too_large(cut)]
    if first:
        yield from ((cut, 0.0) for cut in first)
    elif not cluster.best:
        for cut, need in cluster.needs.items():
            yield from (
                (other, need) for other in cluster.cuts[cut] if other in left and not too_large(other)
            )
    elif exhaustive or len(cluster.cuts) <= _FEW_CUTS:
        yield from ((cut, 1.0) for cut in left)
    else:
        best = cluster.best[0]
        for cut, time_s in cluster.tried.items():
            if time_s <= (1.0 + _SLACK) * best.time_s:
                yield from ((other, time_s / best.time_s) for other in cluster.cuts[cut] if other in left)
            elif cluster.too_large.get(cut, math.inf) < best.least_s:
                leaner = [other for other in cluster.cuts[cut] if other in left and other.is_leaner_than(cut)]
                yield from ((other, cluster.too_large[cut] / best.least_s) for other in leaner)


def _too_large(cluster: OnCluster) -> Callable[[Cut], bool]:
    """Whether nothing fits of the same layers with a smaller micro-batch."""
    smallest: dict[Cut, int] = {}
    for cut, need in cluster.needs.items():
        if need < math.inf:
            layers = dataclasses.replace(cut, micro_batch=1)
            smallest[layers] = min(cut.micro_batch, smallest.get(layers, cut.micro_batch))
    return lambda cut: smallest.get(dataclasses.replace(cut, micro_batch=1), math.inf) < cut.micro_batch
