"""The board: who is scored how, what is kept between runs of it, groups, noise, calibration, and its page."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from commands import fails, ok, run
from foretrain.leaderboard import Point, board, calibration, groups, tasks, worst
from foretrain.report.board import markdown, size_of


def run_line(batch: int, time_s: float, name: str = "resnet18", devices: int = 1) -> dict[str, Any]:
    return {
        "job": {
            "model": {"source": "torchvision", "name": name},
            "training": {"global_batch": batch, "image": 32, "classes": 10},
            "cluster": {"device": "cpu", "devices_per_node": devices, "cores_per_device": 1},
        },
        "measured": {"step_time_s": time_s},
    }


def written(path: Path, *lines: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    lines = [run_line(8 * workers, 1.0 / workers + 0.1, devices=workers) for workers in (1, 2, 4, 8)]
    return [written(tmp_path / "mine.jsonl", *lines, run_line(8, 1.3))]


def point(error: float, **fields: Any) -> Point:
    given = {"family": "resnet", "device": "h100", "devices": 1, "split": None, "bound": None, **fields}
    return Point(
        predictor="p", source="s", quantity="step_time_s", line=1, model="m",
        measured=1.0, predicted=1.0 + error, low=0.8 * (1 + error), high=1.2 * (1 + error), **given,
    )  # fmt: skip


def test_what_learned_from_a_file_is_scored_there_with_families_left_out_and_elsewhere_as_it_is() -> None:
    found = list(tasks(["deletepop"], [Path("h200_steps.jsonl"), Path("other.jsonl")]))
    assert [(task.paths[0].name, task.split) for task in found] == [
        ("h200_steps.jsonl", "leave-model-out"),
        ("other.jsonl", None),
    ]


def test_what_comes_with_nothing_learned_learns_from_the_rest_of_each_file() -> None:
    assert [task.split for task in tasks(["ernest"], [Path("a.jsonl")])] == [
        "random",
        "extrapolate:workers",
        "extrapolate:samples",
    ]


def test_a_board_has_scores_points_noise_and_what_could_not_be_scored(files: list[Path]) -> None:
    made = board(files, names=["ernest"])
    assert {one.split for one in made.results} == {"random", "extrapolate:workers"}
    assert {one.source for one in made.points} == {"mine"}
    assert [one.jobs for one in made.noise] == [1]  # one job was measured twice: 1.1 and 1.3 s
    assert made.noise[0].mean == pytest.approx(0.2 / 2.4)
    assert any("more data" in line for line in made.missing)
    text = markdown(made)
    assert "## Calibration" in text
    assert "| ernest | mine | a fifth left out | `step_time_s` |" in text


def test_what_was_scored_is_taken_from_the_work_folder(files: list[Path], tmp_path: Path) -> None:
    first = board(files, names=["ernest"], work=tmp_path / "work")
    for path in (tmp_path / "work").iterdir():
        path.write_text(path.read_text().replace('"mine', '"kept').replace(str(first.results[0].mape), "0.5"))
    again = board(files, names=["ernest"], work=tmp_path / "work")
    assert again.results[0].mape == 0.5
    assert len(again.results) == len(first.results)


def test_a_kept_score_is_of_the_same_file_by_any_path(
    files: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = board(files, names=["ernest"], work=tmp_path / "work")
    kept = sorted((tmp_path / "work").iterdir())
    monkeypatch.chdir(tmp_path)
    again = board([Path("mine.jsonl")], names=["ernest"], work=Path("work"))
    assert {one.runs_file for one in again.results} == {"mine.jsonl"}
    assert again.points == first.points
    assert sorted((tmp_path / "work").iterdir()) == kept


def test_a_kept_score_that_cannot_be_read_is_made_anew(files: list[Path], tmp_path: Path) -> None:
    first = board(files, names=["ernest"], work=tmp_path / "work")
    for path in (tmp_path / "work").iterdir():
        path.write_text("{")
    assert board(files, names=["ernest"], work=tmp_path / "work").results == first.results


def test_groups_are_the_largest_first_with_their_signed_median() -> None:
    points = [point(0.1), point(0.3), point(-0.2, family="vit")]
    first, second = groups(points, lambda one: one.family)
    assert (first.label, first.n, second.label) == ("resnet", 2, "vit")
    assert first.bias == pytest.approx(0.2)
    assert second.mape == pytest.approx(0.2)


def test_calibration_counts_how_far_measured_values_lie_towards_the_ends() -> None:
    held = dict(calibration([point(0.0), point(0.1), point(1.0)]))
    assert held[0.1] == pytest.approx(1 / 3)  # only the exact one
    assert held[1.0] == pytest.approx(2 / 3)  # the last one is outside of its interval


def test_the_worst_are_the_farthest_by_their_ratio_whichever_way() -> None:
    assert [one.error for one in worst([point(0.5), point(-0.6), point(0.0)], 2)] == [
        pytest.approx(-0.6),
        pytest.approx(0.5),
    ]


@pytest.mark.parametrize(
    ("devices", "label"), [(1, "one device"), (8, "2 to 8 devices"), (513, "more than 512 devices")]
)
def test_sizes_are_named(devices: int, label: str) -> None:
    assert size_of(point(0.0, devices=devices)) == label


def test_the_command_writes_the_board(files: list[Path], tmp_path: Path) -> None:
    out = tmp_path / "board"
    ok("leaderboard", str(files[0]), "--predictor", "ernest", "--out", str(out))
    assert json.loads((out / "board.json").read_text())["results"]
    assert (out / "board.md").read_text().startswith("# Leaderboard\n\n- ernest: ")
    assert "<circle" in (out / "ernest.svg").read_text()
    page = (out / "board.html").read_text()
    assert "<circle" in page
    assert page.index("<li>ernest: ") < page.index("<circle")
    assert re.search(r"<text [^>]*>[\d,]+ m?s</text>", page)
    assert "<script" not in page
    assert "http" not in page.replace("http-equiv", "").replace("http://www.w3.org/2000/svg", "")


def test_a_file_without_runs_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").touch()
    assert "empty.jsonl: empty" in fails("leaderboard", str(tmp_path / "empty.jsonl"))


def test_files_that_are_no_text_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "odd.jsonl").write_bytes(b"\xea\x00\xff")
    assert "cannot be read (it is no text in UTF-8)" in fails("leaderboard", str(tmp_path / "odd.jsonl"))


def test_files_that_are_not_there_are_one_line(tmp_path: Path) -> None:
    assert "gone.jsonl" in fails("leaderboard", str(tmp_path / "gone.jsonl"), "--predictor", "ernest")


def test_a_work_folder_that_is_a_file_is_one_line(files: list[Path], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    said = fails("leaderboard", str(files[0]), "--work", str(tmp_path / "file"))
    assert "file: cannot be written" in said


def test_a_board_on_which_nothing_could_be_scored_says_why(files: list[Path], tmp_path: Path) -> None:
    line = json.loads(files[0].read_text().splitlines()[0])
    line["job"]["model"] = {"source": "graph", "name": "gone.json.zst"}
    (tmp_path / "gone.jsonl").write_text(json.dumps(line) + "\n")
    result = run("leaderboard", str(tmp_path / "gone.jsonl"), "--predictor", "roofline")
    assert result.exit_code == 1
    assert result.stdout == ""
    assert "not scored: roofline on gone, as shipped: " in result.stderr
    assert "gone.json.zst" in result.stderr
    assert result.stderr.endswith("foretrain: nothing could be scored\n")
