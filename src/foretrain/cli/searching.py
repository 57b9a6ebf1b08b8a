"""Runs the search of ``advise --search``: says what to measure next, or measures it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from foretrain.cli.app import say, show
from foretrain.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from foretrain.job import Job
    from foretrain.run import Run
    from foretrain.search import Turn


def runs_of(files: Sequence[Path]) -> list[Run]:
    """The runs of those files that are there, with their models as seen from the first file."""
    from foretrain.run import read_runs

    runs = [run for path in files if path.is_file() for _, run in read_runs(path)]
    return [dataclasses.replace(run, job=run.job.seen_from(files[0].parent)) for run in runs]


@dataclass(frozen=True, slots=True, kw_only=True)
class Searching:
    """Says what a search is of: files of runs, the first of which new ones go to, and a deadline."""

    files: Sequence[Path]
    deadline_s: float
    improvement: float
    data: str

    def run(self, jobs: Sequence[Job], *, measured: bool, following: Path | None, as_json: bool) -> None:
        """Tell the turn, and with ``measured`` go on until there is nothing to measure."""
        turn = self._turn(jobs)
        while measured and turn.following is not None:
            say(self._words(turn))
            self._measure(turn.following)
            turn = self._turn(jobs)
        if following is not None and turn.following is not None:
            _write(turn.following, following)
        if as_json:
            from foretrain.report import dump

            typer.echo(dump(turn.to_dict()))
        else:
            self._show(turn, following)
        if turn.stopped and turn.best is None:
            raise typer.Exit(1)

    def _turn(self, jobs: Sequence[Job]) -> Turn:
        from foretrain.search import next_turn

        return next_turn(
            jobs, runs_of(self.files), self.deadline_s, improvement=self.improvement, failed=self._failed()
        )

    def _failed(self) -> set[str]:
        """Configurations that a campaign could not measure."""
        from foretrain.files import read_lines
        from foretrain.job import Job
        from foretrain.measure.resume import failures_file
        from foretrain.search import configured

        path = failures_file(self.files[0])
        lines = [line for _, line in read_lines(path)] if path.is_file() else []
        jobs = [Job.read(line["job"], base=path.parent) for line in lines]
        return {configured(job.seen_from(path.parent)) for job in jobs}

    def _measure(self, job: Job) -> None:
        from foretrain.measure.backends import backend
        from foretrain.measure.campaign import cell_of, run_campaign

        out = self.files[0]
        if out.suffix != ".jsonl":
            raise InputError(
                f"{out}: new runs go to a .jsonl file; name one first, or measure without --measure"
            )
        cell = cell_of(job, {})
        summary = run_campaign([cell], out, backend("local"), say=say)
        if not summary.measured and not summary.failed:
            raise InputError(f"{out}: holds the next configuration already, but without the time of a step")

    def _show(self, turn: Turn, following: Path | None) -> None:
        from foretrain.report.tables import search_table

        say(f"data: {self.data}; times are those of the measured steps, without start-up")
        if turn.tried:
            show(search_table(turn))
        if turn.stopped:
            say(f"ended: {turn.stopped}; {len(turn.tried)} of {turn.candidates} configurations were measured")
            if turn.best is None:
                say("none of them meets the deadline")
            return
        say(self._words(turn))
        how = f"foretrain measure campaign {following or 'next.jsonl'} -o {self.files[0]}"
        where = "" if following else " (--next next.jsonl writes it)"
        say(f"measure it with `{how}`{where}, or --measure, and ask again")

    def _words(self, turn: Turn) -> str:
        from foretrain.advice import describe
        from foretrain.search import LEAST, START

        assert turn.following is not None
        why = "to span the configurations"
        if turn.promise is not None:
            why = f"expected to cost {turn.promise:.0%} less than the best so far"
            if turn.promise < self.improvement:
                measured = f"{len(turn.tried)} of {turn.candidates} were measured"
                why += f"; a search ends after {LEAST} configurations at the earliest, and {measured}"
        elif turn.tried and turn.best is None:
            why = "the likeliest to be in time" if len(turn.tried) >= START else why
        return f"next: {describe(turn.following)}: {why}"


def _write(job: Job, path: Path) -> None:
    import json

    from foretrain.files import write_atomically

    write_atomically(path, json.dumps(job.seen_from(path.parent).to_dict()) + "\n")
    say(f"the next job in {path}")
