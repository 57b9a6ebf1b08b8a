"""Tells which GPUs of a pool will be free for whom, beside those that are held, promised and kept."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from foretrain.errors import invalid, unknown
from foretrain.scheduling.machines import Pool, device_named
from foretrain.scheduling.policies.profile import FreeProfile
from foretrain.scheduling.rules import Reservation


class Hold(NamedTuple):
    """GPUs of a pool that a job holds, is promised, or that a reservation keeps for a group."""

    start_s: float
    end_s: float
    gpus: int
    group: str


class Outlook:
    """GPUs of a pool that will be free, as everybody sees it (""), and as each group with a reservation does.

    Of what is kept for a group, its jobs use up what they hold; the rest is not there for others. What is
    kept for nobody is not there for anyone.
    """

    def __init__(self, now_s: float, size: int, holds: Collection[Hold], kept: Sequence[Hold]) -> None:
        free, changes = size, []
        for hold in holds:
            if hold.start_s <= now_s:
                free -= hold.gpus
            else:
                changes.append((hold.start_s, -hold.gpus))
            changes.append((hold.end_s, hold.gpus))
        groups = dict.fromkeys(each.group for each in kept if each.group)
        self._seen = {group: FreeProfile(now_s, free, changes) for group in ("", *groups)}
        self._unused = {group: FreeProfile(now_s, 0, ()) for group in groups}
        for each in kept:
            self._keep(each._replace(start_s=max(each.start_s, now_s)))
        if groups:
            for hold in holds:
                self._use(hold)

    def earliest(self, group: str, gpus: int, time_s: float) -> float:
        """When so many GPUs are free for a job of a group for so long; infinite where they never are."""
        return self._seen.get(group, self._seen[""]).earliest(gpus, time_s)

    def hold(self, hold: Hold) -> None:
        """Count on one more hold."""
        for profile in self._seen.values():
            profile.reserve(hold.start_s, hold.end_s, hold.gpus)
        self._use(hold)

    def _keep(self, kept: Hold) -> None:
        for group, profile in self._seen.items():
            if not kept.group or group != kept.group:
                profile.reserve(kept.start_s, kept.end_s, kept.gpus)
        if kept.group:
            self._unused[kept.group].reserve(kept.start_s, kept.end_s, -kept.gpus)

    def _use(self, hold: Hold) -> None:
        """What a job holds of its group's reservation others have not to leave free any more."""
        if hold.group not in self._unused:
            return
        for start_s, end_s, gpus in self._unused[hold.group].use_up(hold.start_s, hold.end_s, hold.gpus):
            for group, profile in self._seen.items():
                if group != hold.group:
                    profile.reserve(start_s, end_s, -gpus)


def kept_in_pools(reservations: Sequence[Reservation], pools: Sequence[Pool]) -> list[list[Hold]]:
    """What each pool, by its number, keeps; an error for a reservation that the cluster cannot keep.

    Of pools that may serve, those that take jobs of every partition come first, then the largest; GPUs that
    another reservation keeps are taken last.
    """
    kept: list[list[Hold]] = [[] for _ in pools]
    unkept = [FreeProfile(0.0, pool.size, ()) for pool in pools]
    for each in reservations:
        chosen = sorted(_pools_of(each, pools), key=lambda pool: (pool.partition != "", -pool.size))
        left = each.gpus
        spare = {pool: max(unkept[pool.number].fewest(each.start_s, each.end_s), 0) for pool in chosen}
        kept_in = dict.fromkeys(chosen, 0)
        for most in (spare, {pool: pool.size for pool in chosen}):
            for pool in chosen:
                more = min(left, most[pool] - kept_in[pool])
                kept_in[pool] += more
                left -= more
        for pool, gpus in kept_in.items():
            if gpus:
                kept[pool.number].append(Hold(each.start_s, each.end_s, gpus, each.group))
                unkept[pool.number].reserve(each.start_s, each.end_s, gpus)
    return kept


def _pools_of(reservation: Reservation, pools: Sequence[Pool]) -> list[Pool]:
    """The pools that may serve a reservation."""
    device, partition = reservation.device, reservation.partition
    if device is not None:
        devices = list(dict.fromkeys(pool.device for pool in pools))
        device = device_named(device, devices)
        if device is None:
            raise unknown("reservation.device", reservation.device, devices, "one of the cluster's devices:")
    partitions = {pool.partition for pool in pools if pool.partition}
    if partition and partition not in partitions:
        raise unknown("reservation.partition", partition, partitions, "one of the cluster's partitions:")
    chosen = [pool for pool in pools if device in (None, pool.device) and partition in ("", pool.partition)]
    size = sum(pool.size for pool in chosen)
    if reservation.gpus > size:
        what = " ".join(filter(None, (device, partition and f"in partition {partition}"))) or "all kinds"
        raise invalid("reservation.gpus", reservation.gpus, f"at most the cluster's {size:,} GPUs of {what}")
    return chosen
