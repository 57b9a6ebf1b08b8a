"""Runs what takes long beside the requests: each errand has an id, says how far it is, and can be
cancelled."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import json
import logging
import secrets
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from foretrain.errors import ForetrainError
from foretrain.serve.pool import Busy, Hears, TaskRefused

log = logging.getLogger("foretrain.serve")

State = Literal["waiting", "running", "done", "failed", "cancelled"]
Run = Callable[[Hears], Awaitable[bytes]]
"""Does the work, tells its progress, and gives the result as JSON."""


@dataclass(slots=True, kw_only=True)
class Errand:
    """A plan, a simulation or a calibration, under way or ended."""

    id: str
    kind: str
    state: State = "waiting"
    created: datetime.datetime = field(default_factory=lambda: datetime.datetime.now(datetime.UTC))
    ended: datetime.datetime | None = None
    progress: Mapping[str, Any] = field(default_factory=dict)
    result: bytes | None = None
    error: str | None = None
    running: asyncio.Task[None] | None = None

    @property
    def is_over(self) -> bool:
        return self.state in ("done", "failed", "cancelled")

    def to_dict(self, *, with_result: bool = True) -> dict[str, Any]:
        document: dict[str, Any] = {
            "id": self.id,
            "kind": self.kind,
            "state": self.state,
            "created": self.created.isoformat(timespec="milliseconds"),
            "ended": None if self.ended is None else self.ended.isoformat(timespec="milliseconds"),
            "progress": dict(self.progress),
            "error": self.error,
        }
        if with_result:
            document["result"] = None if self.result is None else json.loads(self.result)
        return document


class Errands:
    """Keeps all errands; the oldest of those that are over are forgotten."""

    def __init__(self, *, most: int, kept: int) -> None:
        self._most, self._kept = most, kept
        self._errands: dict[str, Errand] = {}

    def __iter__(self) -> Iterator[Errand]:
        return iter(self._errands.values())

    def get(self, id: str) -> Errand | None:
        return self._errands.get(id)

    def begin(self, kind: str, run: Run) -> Errand:
        """Start an errand, unless too many are under way."""
        open_ = sum(not errand.is_over for errand in self)
        if open_ >= self._most:
            raise Busy(f"{open_} jobs run or wait already; try again later")
        errand = Errand(id=secrets.token_hex(8), kind=kind)
        self._errands[errand.id] = errand
        over = [one.id for one in self if one.is_over]
        for id in over[: max(0, len(over) - self._kept)]:
            del self._errands[id]
        errand.running = asyncio.create_task(self._run(errand, run))
        return errand

    async def _run(self, errand: Errand, run: Run) -> None:
        def hears(progress: Mapping[str, Any]) -> None:
            errand.state, errand.progress = "running", progress or errand.progress

        try:
            errand.result = await run(hears)
            errand.state = "done"
        except asyncio.CancelledError:
            errand.state = "cancelled"
        except (TaskRefused, ForetrainError) as error:
            errand.state, errand.error = "failed", str(error)
        except Exception:
            log.exception("job %s", errand.id)
            errand.state, errand.error = "failed", "internal error; the log of the server has it"
        finally:
            errand.ended = datetime.datetime.now(datetime.UTC)

    async def cancel(self, errand: Errand) -> None:
        """End it, with its worker; one that is over stays as it is."""
        if errand.running is not None and not errand.is_over:
            errand.running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await errand.running
            errand.state = "cancelled"
            errand.ended = errand.ended or datetime.datetime.now(datetime.UTC)

    async def close(self) -> None:
        for errand in list(self):
            await self.cancel(errand)
