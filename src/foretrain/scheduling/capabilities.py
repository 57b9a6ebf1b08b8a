"""Tells which options each policy can honour, and refuses the others by name."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from foretrain.errors import InputError
from foretrain.scheduling.rounds.policies import ROUND_POLICIES

ROUND_NAMES = tuple(ROUND_POLICIES)
_ALONE = tuple(name for name, policy in ROUND_POLICIES.items() if not policy.packs)
_WHOLE_GPUS = "it counts whole GPUs only"
_IN_ROUNDS = "it leases devices in rounds, as Gavel's simulator does, "

_EVENT_DRIVEN_WHOLE = (
    *("srtf", "oracle", "tiresias", "backfill", "conservative", "themis", "pollux", "optimus"),
    *("afs", "gandiva", "gittins", "kueue", "multifactor", "shockwave", "sia"),
)
_NAMED = ("fifo", "sjf", "qssf", "edf", "lucid", *_EVENT_DRIVEN_WHOLE, *ROUND_NAMES)
_NO_QUOTAS = "it knows no groups; multifactor and kueue do"


def _all_but(*names: str) -> list[str]:
    return [name for name in _NAMED if name not in names]


CANNOT: Mapping[str, Mapping[str, str]] = {
    "sharing": {
        **dict.fromkeys(_EVENT_DRIVEN_WHOLE, _WHOLE_GPUS),
        **dict.fromkeys(ROUND_NAMES, _IN_ROUNDS + "each of which a job has to itself"),
    },
    "pairs": {
        **dict.fromkeys(_EVENT_DRIVEN_WHOLE, _WHOLE_GPUS),
        **dict.fromkeys(_ALONE, _IN_ROUNDS + "each of which a job has to itself"),
    },
    "quotas": dict.fromkeys(_all_but("multifactor", "kueue"), _NO_QUOTAS),
    "cohorts": dict.fromkeys(_all_but("kueue"), "its groups do not lend each other GPUs; those of kueue do"),
    "shares": dict.fromkeys(_all_but("multifactor"), "it knows no fair share; multifactor does"),
    "reservations": dict.fromkeys(_all_but("multifactor"), "it keeps no GPUs free; multifactor does"),
    "preempt": dict.fromkeys(
        _all_but("multifactor", "kueue"), "it knows no classes of jobs; multifactor and kueue do"
    ),
    "migrate": dict.fromkeys(
        _all_but("fifo", "sjf", "srtf", "oracle", "backfill", "tiresias", "conservative", "themis"),
        "it decides itself where jobs run",
    ),
    "mixed_gangs": dict.fromkeys(
        _all_but("fifo", "sjf", "qssf", "edf", "lucid"), "it counts the GPUs of each kind by themselves"
    ),
    "limits": dict.fromkeys(ROUND_NAMES, _IN_ROUNDS + "and ends none before it is done"),
    "partitions": dict.fromkeys(ROUND_NAMES, _IN_ROUNDS + "wherever they are"),
    "placement": dict.fromkeys(ROUND_NAMES, _IN_ROUNDS + "and takes the next ones of a kind"),
    "slowdown_per_node": dict.fromkeys(ROUND_NAMES, _IN_ROUNDS + "and does not look at nodes"),
    "checkpoint": dict.fromkeys(ROUND_NAMES, _IN_ROUNDS + "and a change of leases costs nothing"),
    "restart": dict.fromkeys(ROUND_NAMES, _IN_ROUNDS + "and a change of leases costs nothing"),
    "job_mtbf": dict.fromkeys(ROUND_NAMES, _IN_ROUNDS + "without failures"),
    "node_mtbf": dict.fromkeys(ROUND_NAMES, _IN_ROUNDS + "without failures"),
    "outages": dict.fromkeys(ROUND_NAMES, _IN_ROUNDS + "without failures"),
    "spot": dict.fromkeys(ROUND_NAMES, _IN_ROUNDS + "without failures"),
    "checkpoint_write": dict.fromkeys(ROUND_NAMES, _IN_ROUNDS + "and knows speeds from the table alone"),
    "errors": dict.fromkeys(ROUND_NAMES, _IN_ROUNDS + "and knows how many steps jobs have"),
    "estimates": dict.fromkeys(ROUND_NAMES, _IN_ROUNDS + "and knows how many steps jobs have"),
    "truth": dict.fromkeys(ROUND_NAMES, _IN_ROUNDS + "and knows how many steps jobs have"),
    "residuals": dict.fromkeys(ROUND_NAMES, _IN_ROUNDS + "and knows how many steps jobs have"),
    "rounds": dict.fromkeys(
        ("sjf", "qssf", "edf", "lucid", *_EVENT_DRIVEN_WHOLE),
        "it decides whenever something happens, not in rounds",
    ),
}
"""By option, the policies that cannot honour it, and why. What is not here is honoured."""


_OF_RULES = ("quotas", "cohorts", "shares", "reservations", "preempt")
"""Options that mean nothing unless the policy itself heeds them."""


def refuse_what_is_not_honoured(policy: str, options: Iterable[str], honours: Collection[str] = ()) -> None:
    """An error for the first of the options in use that a policy cannot honour; one of the user's own says
    which of the rules it ``honours``."""
    for option in options:
        why = CANNOT.get(option, {}).get(policy)
        if policy not in _NAMED and option in _OF_RULES and option not in honours:
            why = f"a class of one's own says so by honours = ({option!r},)"
        if why is not None:
            raise InputError(f"{option}: policy {policy} cannot honour it; {why}")
