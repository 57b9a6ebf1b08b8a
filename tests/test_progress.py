"""What long work says of itself: heard by whoever listens, shown on a terminal alone."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from foretrain.capture import capture
from foretrain.progress import is_heard, listening, tell
from foretrain.report import screen

Heard = list[tuple[str, int | None, int | None]]


def test_only_the_innermost_listener_hears() -> None:
    heard: Heard = []
    tell("nobody listens")
    with listening(lambda *words: heard.append(words)):
        tell("one")
        with listening(None):
            assert not is_heard()
            tell("muted")
        tell("trials", 3, 10)
    assert not is_heard()
    assert heard == [("one", None, None), ("trials", 3, 10)]


def test_blocks_may_end_in_another_order_than_they_began() -> None:
    heard: Heard = []
    outer, inner = listening(None), listening(lambda *words: heard.append(words))
    outer.__enter__()
    inner.__enter__()
    outer.__exit__(None, None, None)
    tell("still heard")
    inner.__exit__(None, None, None)
    assert heard == [("still heard", None, None)]
    assert not is_heard()


def test_a_trace_says_how_far_it_is() -> None:
    heard: Heard = []
    layers = [nn.Linear(4, 4) for _ in range(40)]
    with listening(lambda *words: heard.append(words)):
        capture(nn.Sequential(*layers), torch.zeros(2, 4))
    said = [words for words, _, _ in heard]
    assert said[0] == "tracing: 0 operators, layer 0"
    assert any(words.endswith("backward") for words in said)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("piped", ["stdout", "stderr"])
def test_nothing_is_shown_where_output_is_piped(piped: str, monkeypatch: pytest.MonkeyPatch) -> None:
    streams = {name: Terminal() for name in ("stdout", "stderr")}
    streams[piped] = io.StringIO()  # type: ignore[assignment]
    for name, stream in streams.items():
        monkeypatch.setattr(sys, name, stream)
    with screen.doing():
        tell("tracing")
    assert all(not stream.getvalue() for stream in streams.values())


def test_who_sends_the_output_to_a_file_sees_what_is_done(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    with (tmp_path / "forecast.json").open("w") as file:
        monkeypatch.setattr(sys, "stdout", file)
        with screen.doing():
            tell("tracing")
    assert "tracing (0 s)" in terminal.getvalue()
    assert (tmp_path / "forecast.json").read_text() == ""


def test_a_terminal_shows_what_is_done_and_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    streams = {name: Terminal() for name in ("stdout", "stderr")}
    for name, stream in streams.items():
        monkeypatch.setattr(sys, name, stream)
    with screen.doing():
        tell("trials of xgboost", 2, 8)
        with screen.progress("runs"):
            tell("beside a bar")
    shown = streams["stderr"].getvalue()
    assert "trials of xgboost: 2 of 8 (0 s, about 0 s left)" in shown
    assert "beside a bar" in shown
    assert not is_heard()


def test_a_narrow_terminal_costs_no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stdout", terminal := Terminal())
    screen.show("x" * 50)
    assert "x" * 50 in terminal.getvalue()
    assert screen.width() == 60
