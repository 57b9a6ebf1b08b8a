"""Tests that measurements go on: what is held, what failed, what a killed program left, the budget."""

from __future__ import annotations

import json
import resource
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretrain.errors import InputError
from foretrain.measure.resume import Resumed, failures_file
from foretrain.measure.summary import Summary


def resumed(items: list[int], out: Path, **options: Any) -> Resumed[int]:
    return Resumed(items, out, key=str, key_of=lambda line: line["key"], **options)


def measure(
    items: list[int], out: Path, fails: Callable[[int], bool] = lambda item: False, **options: Any
) -> Summary:
    todo = resumed(items, out, **options)
    for item in todo.within(None, todo.wanted):
        todo.write({"key": str(item), **({"error": "it failed"} if fails(item) else {})})
    return todo.summary


def test_what_failed_is_beside_what_was_measured(tmp_path: Path) -> None:
    out = tmp_path / "new" / "results.jsonl"
    assert measure([1, 2, 3], out, lambda item: item == 2) == Summary(measured=2, failed=1, known=0, left=0)
    assert [json.loads(line)["key"] for line in out.read_text().splitlines()] == ["1", "3"]
    assert failures_file(out) == tmp_path / "new" / "results.failures.jsonl"
    assert json.loads(failures_file(out).read_text()) == {"key": "2", "error": "it failed"}


def test_failures_are_left_alone_until_asked(tmp_path: Path) -> None:
    out = tmp_path / "results.jsonl"
    measure([1, 2], out, lambda item: item == 2)
    assert measure([1, 2, 3], out) == Summary(measured=1, failed=0, known=1, left=0, failed_before=1)
    assert measure([1, 2, 3], out, lambda item: True, retry_failed=True) == Summary(
        measured=0, failed=1, known=2, left=0
    )
    assert measure([1, 2, 3], out, retry_failed=True) == Summary(measured=1, failed=0, known=2, left=0)
    assert (
        measure([1, 2, 3], out)
        == measure([1, 2, 3], out, retry_failed=True)
        == Summary(measured=0, failed=0, known=3, left=0)
    )


@given(st.lists(st.integers(0, 20), unique=True), st.sets(st.integers(0, 20)), st.integers(0, 20))
def test_every_item_is_counted_once(
    tmp_path_factory: pytest.TempPathFactory, items: list[int], bad: set[int], first: int
) -> None:
    out = tmp_path_factory.mktemp("resume") / "results.jsonl"
    measure(items[:first], out, lambda item: item in bad)
    done = measure(items, out, lambda item: item in bad)
    assert done.measured + done.failed + done.known + done.left + done.failed_before == len(items)
    assert (done.known, done.failed_before) == (len(set(items[:first]) - bad), len(set(items[:first]) & bad))


def test_half_a_line_at_the_end_is_taken_out(tmp_path: Path) -> None:
    out = tmp_path / "results.jsonl"
    measure([1, 2], out)
    whole = out.read_text()
    out.write_text(whole[:-4])
    assert resumed([1, 2], out).wanted == [2]
    assert out.read_text() == whole.splitlines(keepends=True)[0]
    out.write_text(whole[:4])
    assert resumed([1, 2], out).wanted == [1, 2]
    assert out.read_text() == ""


def test_a_whole_line_without_a_break_is_kept_and_ended(tmp_path: Path) -> None:
    out = tmp_path / "results.jsonl"
    out.write_text('{"key": "1"}')
    assert measure([1, 2], out) == Summary(measured=1, failed=0, known=1, left=0)
    assert [json.loads(line)["key"] for line in out.read_text().splitlines()] == ["1", "2"]


def test_a_bad_line_is_named(tmp_path: Path) -> None:
    out = tmp_path / "results.jsonl"
    out.write_text('{"key": "1"}\n{\n{"key": "2"}\n')
    with pytest.raises(InputError, match=r"results\.jsonl:2: not JSON"):
        resumed([1], out)


def test_a_folder_that_cannot_be_written_is_known_before_anything_is_measured(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=r"results\.jsonl: cannot be written"):
        resumed([1], tmp_path / "file" / "results.jsonl")


def test_nothing_is_begun_that_would_end_too_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 10.0
    monkeypatch.setattr("foretrain.measure.resume.time", SimpleNamespace(monotonic=lambda: now_s))
    todo = resumed([1, 2, 3, 4], tmp_path / "results.jsonl")
    begun = []
    for item in todo.within(0.5, todo.wanted):
        begun.append(item)
        now_s += 0.2
    assert begun == [1, 2]
    assert list(todo.within(-1.0, todo.wanted)) == []


def test_progress_is_told_from_the_start(tmp_path: Path) -> None:
    moved: list[tuple[int, int]] = []
    todo = resumed([1, 2, 3], tmp_path / "results.jsonl", progress=lambda *at: moved.append(at))
    for group in todo.within(None, [[1, 2], [3]]):
        todo.write(*({"key": str(item)} for item in group))
    assert moved == [(0, 3), (2, 3), (3, 3)]


def test_a_disk_that_fills_up_leaves_no_half_line(tmp_path: Path) -> None:
    out = tmp_path / "results.jsonl"
    measure([1], out)
    before = out.read_bytes()
    most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 5, most[1]))
    try:
        with pytest.raises(InputError, match=r"results\.jsonl: cannot be written"):
            measure([1, 2], out)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, most)
    assert out.read_bytes() == before
