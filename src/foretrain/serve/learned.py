"""Finds the predictors of a server: those that come with foretrain, and those that learned from its runs."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import time
from pathlib import Path
from typing import Any

from foretrain.errors import unknown
from foretrain.measure.store import SavedPredictor, Store
from foretrain.predictors import DEFAULT, known

_FRESH_S = 5.0
"""How long the list of learned predictors holds: other servers may share the store."""


class LearnedPredictors:
    """Lists what the store keeps, and puts the files of each into a folder, where workers find it."""

    def __init__(self, store: Store, folder: Path) -> None:
        self._store, self._folder = store, folder
        self._by_name: dict[str, SavedPredictor] = {}
        self._read_s = -_FRESH_S

    async def all(self) -> dict[str, SavedPredictor]:
        """List the predictors that learned here, by name."""
        if time.monotonic() - self._read_s > _FRESH_S:
            kept = await asyncio.to_thread(self._store.predictors)
            self._by_name, self._read_s = {one.name: one for one in kept}, time.monotonic()
        return self._by_name

    def forget(self) -> None:
        """Read the list anew when it is asked for, as there is another one."""
        self._read_s = -_FRESH_S

    async def listed(self) -> list[dict[str, Any]]:
        """List the predictors that come with foretrain, those that packages install, and those that learned
        here, as JSON values."""
        learned = await self.all()
        return [{"name": name, "learned": None, "default": name == DEFAULT} for name in known()] + [
            {
                "name": one.name,
                "default": False,
                "learned": {
                    "predictor": one.predictor,
                    "created": one.created.isoformat(),
                    "version": one.version,
                    **one.about,
                },
            }
            for one in learned.values()
        ]

    async def find(self, name: str) -> tuple[str, str]:
        """Name what workers find a predictor by, and its version."""
        if name in known():
            return name, name
        learned = await self.all()
        if name not in learned:
            raise unknown("predictor", name, (*known(), *learned))
        folder = self._folder / f"{name}-{learned[name].version[:16]}"
        if not folder.exists():
            await asyncio.to_thread(self._put_into, folder, name)
        return str(folder), learned[name].version

    def _put_into(self, folder: Path, name: str) -> None:
        with tempfile.TemporaryDirectory(dir=self._folder) as beside:
            for path, content in self._store.predictor_files(name).items():
                file = Path(beside) / "whole" / path
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(content)
            with contextlib.suppress(OSError):  # another request was faster
                (Path(beside) / "whole").rename(folder)
