"""Goes on with a measurement where it stopped, each result on disk before the next begins."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar, final

from foretrain.errors import InputError
from foretrain.files import append_lines, read_lines, read_text, write_atomically
from foretrain.measure.summary import Progress, Summary

Item = TypeVar("Item")
Turn = TypeVar("Turn")


@final
class Resumed(Generic[Item]):
    """A measurement that goes on where an earlier one stopped; ``wanted`` is what is left to measure.

    A line with an ``error`` is a failure and goes to a file beside ``out``. What failed before is not wanted
    again, unless ``retry_failed``. ``key_of`` gives the key of the item that a line came from, or None for a
    line of someone else.
    """

    def __init__(
        self,
        items: Sequence[Item],
        out: Path,
        key: Callable[[Item], str],
        key_of: Callable[[Any], str | None],
        *,
        retry_failed: bool = False,
        progress: Progress = lambda done, total: None,
    ) -> None:
        measured, failed = _held(out, key_of)
        unmeasured = [item for item in items if key(item) not in measured]
        self.wanted = [item for item in unmeasured if retry_failed or key(item) not in failed]
        self._known, self._failed_before = len(items) - len(unmeasured), len(unmeasured) - len(self.wanted)
        self._measured = self._failed = 0
        self._out, self._progress, self._start = out, progress, time.monotonic()
        append_lines(out, ())  # what cannot be written is known before anything is measured

    def within(self, budget_s: float | None, turns: Iterable[Turn]) -> Iterator[Turn]:
        """The turns (items, or groups of them) while there is time for one more, by the mean so far."""
        self._progress(0, len(self.wanted))
        for done, turn in enumerate(turns):
            spent_s = time.monotonic() - self._start
            if budget_s is not None and spent_s + (spent_s / done if done else 0.0) > budget_s:
                return
            yield turn

    def write(self, *lines: Mapping[str, Any]) -> None:
        """Append results, each to its file."""
        failures = [line for line in lines if "error" in line]
        results = [line for line in lines if "error" not in line]
        for path, written in ((self._out, results), (failures_file(self._out), failures)):
            if written:
                append_lines(path, [json.dumps(line, separators=(",", ":")) for line in written])
        self._failed += len(failures)
        self._measured += len(lines) - len(failures)
        self._progress(self._measured + self._failed, len(self.wanted))

    @property
    def summary(self) -> Summary:
        left = len(self.wanted) - self._measured - self._failed
        return Summary(
            measured=self._measured,
            failed=self._failed,
            known=self._known,
            left=left,
            failed_before=self._failed_before,
        )


def failures_file(out: Path) -> Path:
    """Name the file that the failures of a measurement are written to."""
    return out.with_name(f"{out.name.removesuffix('.jsonl')}.failures.jsonl")


def last_failure(out: Path) -> str:
    """Say what was wrong the last time that something could not be measured."""
    path = failures_file(out)
    errors = [str(line.get("error")) for _, line in read_lines(path)] if path.is_file() else []
    return errors[-1].partition("\n")[0] if errors else "unknown"


def _held(out: Path, key_of: Callable[[Any], str | None]) -> tuple[set[str], set[str]]:
    """Keys of what was measured and of what failed, by the lines of the results and of the failures."""
    measured: set[str] = set()
    failed: set[str] = set()
    for path in (out, failures_file(out)):
        if path.is_file():
            _mend(path)
            for number, line in read_lines(path):
                try:
                    key = key_of(line)
                except InputError as error:
                    raise InputError(f"{path}:{number}: {error}") from error
                if key is not None:
                    (failed if "error" in line else measured).add(key)
    return measured, failed


def _mend(path: Path) -> None:
    """See that a file ends with a line break: a whole last line gets one, half a line is taken out."""
    text = read_text(path)
    last = text.rpartition("\n")[2]
    if not last:
        return
    try:
        json.loads(last)
    except ValueError:
        write_atomically(path, text.removesuffix(last))
    else:
        append_lines(path, [""])
