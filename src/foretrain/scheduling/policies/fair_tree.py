"""Ranks users by what they and their accounts are owed, as Slurm's Fair Tree does."""

from __future__ import annotations

from collections.abc import Callable, Iterable

User = tuple[str, str]
"""A group and a user of it."""


class FairTree:
    """GPU time of every user and group, halved every ``half_life_s``.

    A group's level is its part of the shares over its part of the usage, a user's the same within the group
    (users have equal shares). The users of the group with the highest level come first, the highest of them
    first (Slurm's ``priority/multifactor`` since 14.11, after Cox and Johnson).
    """

    def __init__(self, half_life_s: float, shares: Callable[[str], float]) -> None:
        self._half_life_s, self._shares = half_life_s, shares
        self._usage: dict[User, float] = {}
        self._at_s = 0.0

    def advance(self, now_s: float, holding: Iterable[tuple[User, float]]) -> None:
        """Let time pass, during which users held so many GPUs."""
        passed_s = now_s - self._at_s
        if passed_s <= 0:
            return
        self._at_s = now_s
        left = 0.5 ** (passed_s / self._half_life_s)
        for user in self._usage:
            self._usage[user] *= left
        for user, gpus in holding:
            self._usage[user] = self._usage.get(user, 0.0) + gpus * passed_s

    def meet(self, user: User) -> None:
        """A user who is not known yet has used nothing."""
        self._usage.setdefault(user, 0.0)

    def factors(self) -> dict[User, float]:
        """Between 0 and 1 for every user, 1 for the one who is owed most; equals have equal factors."""
        groups: dict[str, float] = {}
        for (group, _), used in self._usage.items():
            groups[group] = groups.get(group, 0.0) + used
        levels = {group: _level(self._shares(group), used) for group, used in groups.items()}
        keys = {
            (group, user): (levels[group], _level(1.0, used)) for (group, user), used in self._usage.items()
        }
        order = sorted(set(keys.values()))
        place = {key: (number + 1) / len(order) for number, key in enumerate(order)}
        return {user: place[key] for user, key in keys.items()}


def _level(shares: float, used: float) -> float:
    return shares / used if used > 0 else float("inf")
