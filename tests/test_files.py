"""What is written is there whole or not at all, and devices, pipes and links stay what they are."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest

from foretrain.errors import InputError
from foretrain.files import check_target, write_atomically


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "out.json"
    write_atomically(path, "first")
    write_atomically(path, b"second")
    assert path.read_text() == "second"
    assert list(path.parent.iterdir()) == [path]


def test_what_a_link_leads_to_is_written_and_the_link_stays(tmp_path: Path) -> None:
    (tmp_path / "real").write_text("before")
    (tmp_path / "link").symlink_to("real")
    write_atomically(tmp_path / "link", "after")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_text() == "after"


def test_a_pipe_stays_a_pipe(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    heard: list[str] = []
    reader = threading.Thread(target=lambda: heard.append(pipe.read_text()))
    reader.start()
    write_atomically(pipe, "through")
    reader.join()
    assert heard == ["through"]
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_a_folder_is_no_target(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be written"):
        write_atomically(tmp_path, "text")


def test_a_folder_that_nothing_may_be_written_to_is_refused_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_target(tmp_path / "new" / "out.json")
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(InputError, match=r"out\.json: cannot be written \(nothing may be written to "):
        check_target(tmp_path / "new" / "out.json")
