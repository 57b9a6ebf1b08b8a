"""``foretrain schedule``: policies side by side, files, and errors in one line."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from foretrain.cli import app
from foretrain.scheduling import spreading
from foretrain.scheduling.answers.search import space
from foretrain.scheduling.policies.tiresias import THRESHOLDS_GPU_S

MADE = [
    "schedule",
    "--generate",
    "jobs=40,gap=30s,median=5min,spread=1",
    "--cluster",
    "2x4xv100",
    "--processes",
    "1",
]


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, [*MADE, *arguments])


def test_policies_stand_side_by_side() -> None:
    done = run("--policy", "fifo,srtf,max_min_fairness")
    assert done.exit_code == 0, done.output
    assert all(
        word in done.output
        for word in ("fifo", "srtf", "max_min_fairness", "average JCT", "fairness", "40 jobs on 8 GPUs")
    )


def test_json_has_every_figure_of_every_seed() -> None:
    done = run("--policy", "srtf", "--errors", "0,0.5", "--seeds", "2", "--json")
    results = json.loads(done.stdout)["results"]
    assert [(each["error"], each["seed"]) for each in results] == [(0.0, 0), (0.0, 1), (0.5, 0), (0.5, 1)]
    assert results[0]["average_jct_s"] != results[1]["average_jct_s"] > 0, "each seed redraws the workload"
    assert set(results[0]["groups"]) == {f"group-{number}" for number in range(1, 5)}


@pytest.mark.parametrize(("option", "library"), [("--html=s.html", "plotly"), ("--log=s.parquet", "pyarrow")])
def test_a_library_that_a_file_needs_is_missed_before_the_work(
    option: str, library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("foretrain.cli.schedule.find_spec", lambda name: None)
    done = run("--policy", "fifo", option)
    assert (done.exit_code, done.stdout) == (2, "")
    assert f"{library} is not installed; install foretrain[" in done.stderr


def test_the_residuals_of_predictors_stand_beside_exact_estimates(tmp_path: Path) -> None:
    path = tmp_path / "evaluation.json"
    rows = [
        {"predictor": "poor", "quantity": "step_time_s", "measured": 1.0, "predicted": ratio}
        for ratio in (0.1, 1.0, 8.0)
    ]
    path.write_text(json.dumps({"runs": rows}))
    done = run("--policy", "fifo,sjf", "--residuals", str(path))
    assert done.exit_code == 0, done.output
    assert "poor (263% off)" in done.output
    lines = [line for line in done.output.splitlines() if "MAPE" in line]
    assert len(lines) == 1, "fifo does not look at estimates"
    document = json.loads(run("--policy", "fifo,sjf", "--residuals", str(path), "--json").stdout)
    cost = {(each["policy"], each["estimates"]): each["cost_of_errors"] for each in document["means"]}
    assert cost["fifo", "poor (263% off)"] == cost["sjf", "exact"] == 0
    verb = "costs you" if cost["sjf", "poor (263% off)"] > 0 else "gains you"
    assert (
        lines[0].strip()
        == f"sjf: 263% MAPE (poor) {verb} {abs(cost['sjf', 'poor (263% off)']):.1%} of average JCT"
    )


def test_parallel_processes_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spreading, "_WORTH_S", 0.0)
    apart = run("--policy", "fifo,srtf", "--processes", "2", "--json")
    assert apart.exit_code == 0, apart.output
    assert json.loads(apart.stdout) == json.loads(run("--policy", "fifo,srtf", "--json").stdout)


@pytest.mark.xdist_group("ray")
def test_a_ray_cluster_gives_the_same(ray_cluster: Any) -> None:
    words = ("--policy", "fifo,srtf,max_min_fairness", "--seeds", "2", "--json")
    there = run(*words, "--ray", ray_cluster.address)
    assert there.exit_code == 0, there.output
    assert json.loads(there.stdout) == json.loads(run(*words).stdout)


def test_logs_traces_and_the_page(tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    from pyarrow import parquet

    files = {"--log": "log.parquet", "--trace": "trace.json", "--html": "page.html"}
    done = run(
        "--policy",
        "srtf",
        "--by-group",
        *(word for option, name in files.items() for word in (option, str(tmp_path / name))),
    )
    assert done.exit_code == 0, done.output
    table = parquet.read_table(tmp_path / "log.parquet").to_pylist()
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert len({row["job"] for row in table}) == 40
    assert sum(row["gpus"] for row in table) == sum(event["ph"] == "X" for event in events)
    page = (tmp_path / "page.html").read_text()
    assert "Utilisation" in page
    assert "GPUs under srtf" in page
    assert run("--policy", "srtf", "--log", str(tmp_path / "log.csv")).exit_code == 0
    assert (tmp_path / "log.csv").read_text().count("\n") == len(table) + 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policy", "fiffo"], "policy: 'fiffo' is not a class as file.py:Class or one of"),
        (["--policy", "max_min_fairnes"], "did you mean max_min_fairness"),
        (["--policy", "nowhere.py:Mine"], "policy nowhere.py:Mine: there is no file nowhere.py"),
        (["--errors", "x"], "--errors: 'x' is not a list of fractions"),
        (
            ["--placement", "everywhere"],
            "placement: 'everywhere' is not one of packed, random, spread, topology",
        ),
        (["--predictor", "roofline"], "predictor: needs templates"),
        (["--seeds", "0"], "seeds: 0 is not a whole number of at least 1"),
        (["--cluster", "lots"], "cluster: 'lots' is not a TOML file"),
        (["--cluster", "8x8xa1000"], "cluster: 'a1000' is not one of"),
        (["--cluster", "8x8xv100,a1000=2"], "(did you mean a100 or"),
        (["--processes", "0"], "processes: 0 is not a whole number of at least 1"),
        (["--log", "x"], "--log: 'x' is not a file that ends in one of .csv, .parquet"),
        (["--residuals", "nowhere.json"], "nowhere.json: cannot be read"),
        (["--restart", "soon"], "--restart: 'soon' is not a time"),
        (["--cluster", "99999999999x8xv100"], "is not at most 10,000,000 GPUs"),
        (["--rounds", "0"], "--rounds: '0' is not a time of at least 1 s"),
        (["--format", "swf"], "--format: cannot be honoured together with --generate"),
        (["--policy", "fifo, srtf,fifo"], "--policy: 'fifo' is named twice; name each policy once"),
        (["--draws", "9"], "--draws: changes nothing without --when"),
        (["--repair", "2h"], "--repair: changes nothing without --node-mtbf"),
        (["--migrate"], "--migrate: changes nothing without --cluster of several kinds of devices or --buy"),
        (["--rack", "4"], "--rack: changes nothing without --placement topology"),
        (["--memory-risk", "0.1"], "--memory-risk: changes nothing without --predictor"),
        (["--checkpoint-every", "1h"], "--checkpoint-every: changes nothing without --job-mtbf or"),
        (["--correlation", "user=0.1"], "--correlation: changes nothing without --errors or --residuals"),
        (["--uses", "driple"], "--uses: driple needs --predictor and --templates"),
        (["--when", "gpus=1,time=1h", "--buy", "8xv100"], "--buy: cannot be honoured together with --when"),
        (["--when", "gpus=1,time=1h", "--seeds", "2"], "--seeds: cannot be honoured together with --when"),
        (["--search", "2", "--html", "x.html"], "--html: cannot be honoured together with --search"),
        (
            ["--when", "gpus=99,time=1h"],
            "when: the cluster can never run job 'yours': needs more than the 8 GPUs of one kind",
        ),
        (
            ["--policy", "max_min_fairness_perf", "--when", "gpus=1,time=1h"],
            "when: policy max_min_fairness_p",
        ),
    ],
)
def test_errors_are_one_line(arguments: list[str], message: str) -> None:
    done = run(*arguments)
    assert done.exit_code == 2
    assert message in done.output
    assert len(done.output.strip().splitlines()) == 1


def test_a_policy_that_misbehaves_is_named(tmp_path: Path) -> None:
    path = tmp_path / "my.py"
    path.write_text(
        "from foretrain.scheduling import Policy\n"
        "class Mine(Policy):\n"
        "    name = 'mine'\n"
        "    def decide(self, cluster):\n"
        "        job = next(iter(cluster.waiting.values()))\n"
        "        cluster.start(job)\n"
        "        cluster.start(job)\n"
    )
    done = run("--policy", f"{path}:Mine")
    assert done.exit_code == 2
    assert f"policy {path}:Mine: starts job 'job-1', which is running already" in done.output


@pytest.mark.parametrize("act", ["raise SystemExit('bye')", "raise ValueError('bye')"])
def test_a_policy_that_raises_is_named(act: str, tmp_path: Path) -> None:
    path = tmp_path / "my.py"
    path.write_text(
        "from foretrain.scheduling import Policy\nclass Mine(Policy):\n    def decide(self, cluster):\n"
        f"        {act}\n"
    )
    done = run("--policy", f"{path}:Mine")
    assert done.exit_code == 2
    assert f"policy {path}:Mine: decide raised {act.split()[1].partition('(')[0]}: bye" in done.output


def test_an_empty_trace_says_so(tmp_path: Path) -> None:
    path = tmp_path / "empty.csv"
    path.write_text("\n")
    done = CliRunner().invoke(app, ["schedule", str(path), "--cluster", "1x1xv100"])
    assert (done.exit_code, done.output.strip()) == (2, f"foretrain: {path}: empty")


def test_a_predictor_and_failures(tmp_path: Path) -> None:
    trace, cluster = tmp_path / "trace.csv", tmp_path / "cluster.toml"
    trace.write_text("name,arrival_s,duration_s,gpus\na,0,500,2\nb,0,nonsense,1\nc,5,500,4\n")
    cluster.write_text('[cluster]\nnode = "dgx-1-v100"\nnodes = 1\n')
    options = [
        "--job-mtbf",
        "10min",
        "--checkpoint-every",
        "1min",
        "--restart",
        "5s",
        "--json",
        "--processes",
        "1",
    ]
    done = CliRunner().invoke(
        app, ["schedule", str(trace), "--cluster", str(cluster), "--policy", "fifo", *options]
    )
    assert done.exit_code == 0, done.output
    assert "trace.csv: 1 line left out: duration_s is not a number (first in line 3)" in done.stderr
    (result,) = json.loads(done.stdout)["results"]
    assert result["failures"] > 0
    assert 0 < result["lost_gpu_s"] < result["failures"] * 240


def test_placements_over_several_nodes_are_slower_by_the_predicted_communication(tmp_path: Path) -> None:
    (tmp_path / "templates").mkdir()
    (tmp_path / "templates" / "small.toml").write_text(
        '[model]\nsource = "torchvision"\nname = "resnet18"\n[training]\nglobal_batch = 8\nimage = 64\n'
        "classes = 10\n"
        '[cluster]\ndevice = "v100-sxm-16gb"\n'
    )
    trace, cluster = tmp_path / "trace.csv", tmp_path / "cluster.toml"
    trace.write_text("name,arrival_s,steps,gpus,kind\na,0,1000,4,small\n")
    cluster.write_text('[cluster]\nnode = "p3.8xlarge"\nnodes = 4\n')
    took_s = {}
    for placement in ("packed", "spread"):
        options = [
            "--predictor",
            "deletepop",
            "--templates",
            str(tmp_path / "templates"),
            "--placement",
            placement,
            "--processes",
            "1",
            "--json",
        ]
        done = CliRunner().invoke(
            app, ["schedule", str(trace), "--cluster", str(cluster), "--policy", "fifo", *options]
        )
        assert done.exit_code == 0, done.output
        took_s[placement] = json.loads(done.stdout)["results"][0]["average_jct_s"]
    gradients, network = 11.2e6 * 4, 10e9 / 8
    all_reduce_s = 2 * 3 / 4 * gradients / network
    assert took_s["spread"] - took_s["packed"] > 0.5 * 1000 * all_reduce_s, (
        "the network of the cluster's nodes counts, 10 Gb/s"
    )


def test_when_a_job_would_start_and_what_more_gpus_change() -> None:
    done = run("--policy", "fifo,multifactor", "--when", "gpus=4,time=1h", "--draws", "4", "--json")
    assert done.exit_code == 0, done.output
    for answer in json.loads(done.stdout)["when"]:
        starts, ends = answer["starts_after"], answer["ends_after"]
        assert 0 <= starts["low_s"] <= starts["median_s"] <= starts["high_s"]
        assert starts["median_s"] < ends["median_s"]
    assert "starts after" in run("--policy", "fifo", "--when", "gpus=4,time=1h", "--draws", "2").output
    bought = json.loads(run("--policy", "fifo", "--buy", "4xv100", "--json").stdout)
    assert bought["gpus"] == 4
    assert bought["changes"][0]["average_jct_s"]["after"] < bought["changes"][0]["average_jct_s"]["before"]
    assert "4 GPUs more" in run("--policy", "fifo", "--buy", "4xv100").output
    for arguments, message in (
        (("--when", "nobody"), "'nobody' is not one of"),
        (("--when", "gpus=4"), "needs a time"),
        (("--when", "gpus=x,time=1h"), "gpus"),
        (("--when", "gpus=1,time=1h", "--draws", "1"), "at least 2"),
        (("--buy", "0xv100"), "at least one GPU"),
        (("--search", "2"), "has no parameters"),
    ):
        refused = run("--policy", "fifo", *arguments)
        assert refused.exit_code != 0
        assert message in refused.output, refused.output


def test_when_has_a_row_for_each_kind_of_errors(tmp_path: Path) -> None:
    path = tmp_path / "evaluation.json"
    rows = [
        {"predictor": name, "quantity": "step_time_s", "measured": 1.0, "predicted": ratio}
        for name in ("good", "poor")
        for ratio in ((0.9, 1.0, 1.2) if name == "good" else (0.2, 1.0, 3.0))
    ]
    path.write_text(json.dumps({"runs": rows}))
    done = run("--when", "gpus=4,time=1h", "--draws", "3", "--residuals", str(path), "--json")
    assert done.exit_code == 0, done.output
    answers = json.loads(done.stdout)["when"]
    assert [each["estimates"].split()[0] for each in answers] == ["good", "poor"] * 4
    spread = [each["ends_after"]["high_s"] - each["ends_after"]["low_s"] for each in answers]
    assert spread[0] < spread[1]


def test_a_search_is_for_one_kind_of_estimates() -> None:
    refused = run("--policy", "gandiva", "--search", "2", "--errors", "0,0.3")
    assert refused.exit_code == 2
    assert "search: tunes for one kind of estimates, and here are exact, 30% off" in refused.output


def test_a_search_tunes_on_one_half_and_scores_on_the_other() -> None:
    pytest.importorskip("optuna")
    done = run("--policy", "gandiva", "--search", "3", "--json")
    assert done.exit_code == 0, done.output
    (found,) = json.loads(done.stdout)["search"]
    assert set(found["parameters"]) == {"interval_s"}
    assert found["tuned_s"] <= found["default_s"]
    assert found["unseen_s"] > 0


def test_a_search_tunes_the_queue_limits_of_tiresias() -> None:
    pytest.importorskip("optuna")
    assert space("tiresias") == {"thresholds_gpu_s": THRESHOLDS_GPU_S}
    done = run("--policy", "tiresias", "--search", "6", "--json")
    assert done.exit_code == 0, done.output
    (found,) = json.loads(done.stdout)["search"]
    first, second = found["parameters"]["thresholds_gpu_s"]
    assert THRESHOLDS_GPU_S[0] / 8 <= first <= second <= THRESHOLDS_GPU_S[1] * 8
    assert found["tuned_s"] <= found["default_s"]
    shown = run("--policy", "tiresias", "--search", "1")
    assert "tiresias: thresholds_gpu_s = 3250, 7200" in shown.output


def test_the_operators_options_are_read_and_mistakes_told(tmp_path: Path) -> None:
    uses = tmp_path / "uses.csv"
    uses.write_text("kind,busy,kernel_s\n,0.4,1e-5\n")
    rules = tmp_path / "rules.toml"
    rules.write_text("kill = true\n[queue.group-1]\ngpus = 4\n")
    for arguments in (
        ("--policy", "lucid,fifo", "--pairs", "mps", "--uses", str(uses)),
        ("--policy", "multifactor,kueue", "--rules", str(rules)),
        ("--policy", "backfill", "--spot", "nodes=1,mean=1h,away=5min", "--checkpoint-write", "30s"),
    ):
        done = run(*arguments)
        assert done.exit_code == 0, done.output
    for wrong, message in (
        (("--pairs", "mps"), "--uses"),
        (("--pairs", "nothing"), "turns"),
        (("--spot", "nodes=1"), "has no mean"),
        (("--spot", "nodes=9,mean=1h"), "at most the cluster's 2"),
        (("--policy", "srtf", "--rules", str(rules)), "quotas: policy srtf cannot honour it"),
        (("--uses", str(rules), "--pairs", "mps"), "has no column"),
        (("--cluster", "1x8xh100@9g.90gb"), "9g.90gb"),
        (("--cluster", "1x8xh100@4g.40gb+4g.40gb"), "8 of 7"),
        (("--cluster", "1x8xv100@1g.5gb"), "MIG"),
    ):
        refused = run(*wrong)
        assert refused.exit_code != 0
        assert message in refused.output, refused.output
    sliced = run("--policy", "fifo", "--cluster", "1x8xh100@3g.40gb+4g.40gb,1x8xh100", "--json")
    assert sliced.exit_code == 0, sliced.output


def test_errors_that_are_nearly_the_same_are_cases_of_their_own(tmp_path: Path) -> None:
    words = ("--policy", "sjf", "--errors", "0,0.101,0.104,0.004")
    document = json.loads(run(*words, "--json").stdout)
    told = [(each["estimates"], each["error"]) for each in document["means"]]
    assert told == [("exact", 0.0), ("10.1% off", 0.101), ("10.4% off", 0.104), ("0.4% off", 0.004)]
    assert [each["estimates"] for each in document["worth"]] == ["10.1% off", "10.4% off", "0.4% off"]
    alone = {each["error"]: each["average_jct_s"] for each in document["results"]}
    assert {each["error"]: each["average_jct_s"] for each in document["means"]} == alone
    assert "10.1% off" in run(*words).output
    changes = json.loads(run(*words, "--buy", "8xv100", "--json").stdout)["changes"]
    assert [each["policy"] for each in changes] == [
        "sjf",
        "sjf, 10.1% off",
        "sjf, 10.4% off",
        "sjf, 0.4% off",
    ]


def test_when_honours_that_estimates_have_no_errors() -> None:
    words = ("--policy", "fifo", "--when", "gpus=4,time=1h", "--draws", "3")
    done = run(*words, "--errors", "0", "--json")
    assert done.exit_code == 0, done.output
    (answer,) = json.loads(done.stdout)["when"]
    assert answer["estimates"] == "exact"
    ends = answer["ends_after"]
    assert ends["low_s"] == ends["high_s"] == answer["starts_after"]["low_s"] + 3600
    several = json.loads(run(*words, "--errors", "0,0.3", "--json").stdout)["when"]
    assert [each["estimates"] for each in several] == ["exact", "30% off"]
    assert "assumed" not in run(*words, "--errors", "0").output
    assert "30% off (assumed" in run(*words).output


def test_when_on_a_queue_as_it_stands_takes_the_jobs_that_come_first(tmp_path: Path) -> None:
    path = tmp_path / "queue.txt"
    rows = "".join(
        f"{number}|2026-01-05T09:0{number}:00|PENDING|01:00:00|gres/gpu=4\n" for number in (1, 2, 3)
    )
    path.write_text(f"JobID|Submit|State|Timelimit|ReqTRES\n{rows}")
    words = ["schedule", str(path), "--cluster", "1x4xv100", "--policy", "fifo", "--processes", "1"]
    asked = ["--when", "gpus=4,time=1h", "--errors", "0", "--draws", "2", "--json"]

    def starts_after_s(*more: str) -> float:
        done = CliRunner().invoke(app, [*words, *asked, *more])
        assert done.exit_code == 0, done.output
        return float(json.loads(done.stdout)["when"][0]["starts_after"]["median_s"])

    assert starts_after_s() == pytest.approx(3 * 1800, abs=1)
    assert starts_after_s("--first", "1") == pytest.approx(1800, abs=1)
    both = CliRunner().invoke(app, [*words, *asked, "--generate", "jobs=5"])
    assert both.exit_code == 2
    assert "give a TRACE or --generate (and only one of them)" in both.output


def test_what_makes_it_another_answer_is_told_below_one_row() -> None:
    words = ("--policy", "srtf", "--processes", "1")
    plain = run(*words).output
    assert not {"estimates:", "failures of a node:"} & {*plain.splitlines()}
    told = run(*words, "--errors", "0.1", "--node-mtbf", "10d").output.splitlines()
    assert {"estimates: 10% off", "failures of a node: 10 d"} <= {line.strip() for line in told}


def test_slices_are_no_gpus_and_halves_of_a_node_no_nodes() -> None:
    words = ["schedule", "--generate", "jobs=20,gap=30s,median=10min", "--policy", "fifo"]
    done = CliRunner().invoke(app, [*words, "--cluster", "2x8xh100@3g.40gb+4g.40gb,1x4xh100"])
    text = " ".join(done.output.split())
    assert "on 32 slices of 16 GPUs and 4 whole GPUs of 3 nodes" in text
    assert "energy: not told of slices" in text
    done = CliRunner().invoke(app, [*words, "--cluster", "1x1xh100@3g.40gb+4g.40gb"])
    text = " ".join(done.output.split())
    assert "on 2 slices of 1 GPU of 1 node" in text
    assert "needs more than the 1 GPU of one kind" in text
    done = CliRunner().invoke(app, [*words, "--cluster", "1x8xh100@3g.40gb+4g.40gb"])
    assert "; a slice takes one job of one GPU" in " ".join(done.output.split())


def test_nodes_fail_as_the_cluster_file_and_the_option_say(tmp_path: Path) -> None:
    file, nodes = tmp_path / "cluster.toml", tmp_path / "nodes.csv"
    file.write_text(
        '[cluster]\ndevice = "v100-sxm-16gb"\ndevices_per_node = 4\nnodes = 2\nnode_mtbf = "1h"\n'
    )
    nodes.write_text("gpu,model,mtbf\n4,v100,1h\n4,v100,\n")
    words = ["--generate", "jobs=30,gap=30s,median=10min,seed=3", "--policy", "fifo"]

    def told(*more: str) -> str:
        lines = run(*words, *more).output.splitlines()
        return next((line for line in lines if line.startswith("failures of a node")), "")

    assert told("--cluster", str(file)) == "failures of a node: 1 h"
    assert told("--cluster", str(file), "--node-mtbf", "30d") == "failures of a node: 30 d"
    assert told("--cluster", str(nodes)) == "failures of a node: 1 h to never"
    both = ["--cluster", "1x8xv100,1x4xk80"]
    assert told(*both, "--node-mtbf", "30d,k80=1h") == "failures of a node: v100 30 d, k80 1 h"
    assert told(*both) == ""
    refused = run(*words[:2], "--cluster", str(file), "--policy", "isolated")
    assert refused.exit_code == 2
    assert "node_mtbf: policy isolated cannot honour it" in refused.output
