"""Tests the embeddings of architectures: sketches, objectives, trainings that go on, and the command."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from foretrain.cli import app
from foretrain.errors import InputError
from foretrain.predictors.predictddl.predictor import (
    PredictDDLPredictor,
    embedding_module,
    training_module,
)
from foretrain.predictors.predictddl.primitives import (
    KINDS,
    TARGETS,
    cost_targets,
    histogram,
    roofline_s,
)
from foretrain.predictors.predictddl.random import Sketch, sketch, text_sketch
from foretrain.predictors.predictddl.zoo import sketched

SMALL = [sketch(seed, side=32, deepest=2).primitives() for seed in range(12)] + [
    text_sketch(seed, deepest=2).primitives() for seed in range(8)
]
SKETCHES: list[Callable[[int], Sketch]] = [sketch, text_sketch]


@given(st.integers(0, 10_000), st.sampled_from(SKETCHES))
def test_a_sketch_is_a_graph_in_topological_order(seed: int, draw: Callable[[int], Sketch]) -> None:
    drawn = draw(seed)
    graph = drawn.primitives()
    assert (graph.edges[0] < graph.edges[1]).all()
    assert len(cost_targets(graph)) == len(TARGETS)
    for figures in (cost_targets(graph), histogram(graph), roofline_s(graph, 20.0, 9.0, np.ones(len(KINDS)))):
        assert np.isfinite(figures).all()
    assert all(layer.channels_in % layer.groups == 0 for layer in drawn.layers)


def test_attention_norms_embeddings_and_recurrences_are_nodes_of_their_own() -> None:
    kinds: set[int] = set()
    for graph in sketched("any", 30):
        kinds |= set(graph.kinds.argmax(axis=1).tolist())
    names = {KINDS[place] for place in kinds}
    assert {"attention", "embedding", "recurrence", "layer normalisation", "batch normalisation"} <= names


def test_random_hardware_with_slower_kinds_takes_longer() -> None:
    ones = np.ones(len(KINDS))
    for graph in SMALL:
        times = [roofline_s(graph, 20.0, 9.0, ones), roofline_s(graph, 20.0, 9.0, 2 * ones)]
        assert times[0] < times[1] < 2 * times[0] + 1
        assert roofline_s(graph, 20.0, 90.0, ones) > times[0]


def test_the_embedding_does_not_depend_on_what_else_is_embedded() -> None:
    embedding = embedding_module().untrained()
    together = embedding(SMALL)
    assert together.shape == (len(SMALL), 32)
    for graph, row in zip(SMALL[::4], together[::4], strict=True):
        assert embedding([graph])[0] == pytest.approx(row, abs=1e-4)


@pytest.mark.parametrize("name", ["costs", "histogram", "white-box", "contrastive"])
def test_every_objective_is_learned_the_same_way_twice(name: str) -> None:
    training = training_module("training")
    (first, facts), (second, _) = (
        training.train(training.OVER_GRAPHS[name](SMALL), steps=2) for _ in range(2)
    )
    assert facts["objective"] == name
    made = embedding_module().Embedding
    assert (made({"any": first}, {})(SMALL) == made({"any": second}, {})(SMALL)).all()


@pytest.mark.parametrize("kind", ["cifar10", "text"])
def test_predicted_weights_run_every_kind_of_layer(kind: str) -> None:
    objective = training_module("hypernetwork").Weights([kind])
    network, _ = training_module("training").train(objective, steps=1)
    task = objective.tasks[kind]
    for one in task.unseen[:6]:
        logits = objective.run(network, one, task.inputs[:4])
        assert logits.shape == (4, 16 if kind == "text" else 10)
        assert bool(logits.isfinite().all())


@pytest.mark.parametrize("kind", ["cifar10", "text"])
def test_deeper_networks_are_run_too(kind: str) -> None:
    module, training = training_module("hypernetwork"), training_module("training")
    usual, deep = module.Weights([kind]), module.Weights([kind], deepest=16)
    layers = [max(len(one.layers) for one in weights.tasks[kind].known) for weights in (usual, deep)]
    assert layers[1] > 2 * layers[0]
    assert usual.data != deep.data
    network, _ = training.train(deep, steps=1)
    task = deep.tasks[kind]
    deepest = max(task.unseen, key=lambda one: len(one.layers))
    assert bool(deep.run(network, deepest, task.inputs[:4]).isfinite().all())


@pytest.mark.parametrize("kind", ["imagenet", "text"])
def test_sketches_are_as_deep_as_asked(kind: str) -> None:
    sizes = [max(len(graph.kinds) for graph in sketched(kind, 12, deepest)) for deepest in (2, None, 64)]
    assert sizes[0] < sizes[1] < sizes[2]


def test_a_training_that_was_stopped_goes_on_as_if_it_had_not(tmp_path: Path) -> None:
    training: Any = training_module("training")
    training._SAVED_EVERY, before = 1, training._SAVED_EVERY
    try:
        whole, _ = training.train(training.Costs(SMALL), steps=3)

        def stop(done: int, total: int) -> None:
            if done == 3:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            training.train(training.Costs(SMALL), steps=3, checkpoint=tmp_path / "part", progress=stop)
        again, _ = training.train(training.Costs(SMALL), steps=3, checkpoint=tmp_path / "part")
        held = rf"holds a training of 'costs, 3 steps, seed 0, {len(SMALL)} graphs \(\w+\)', not of"
        with pytest.raises(InputError, match=held):
            training.train(training.Costs(SMALL), steps=4, checkpoint=tmp_path / "part")
        with pytest.raises(InputError, match=held):  # other data
            training.train(training.Costs(SMALL[::-1]), steps=3, checkpoint=tmp_path / "part")
    finally:
        training._SAVED_EVERY = before
    made = embedding_module().Embedding
    assert made({"any": again}, {})(SMALL) == pytest.approx(made({"any": whole}, {})(SMALL), abs=1e-6)


def test_an_embedding_comes_back_from_its_file(tmp_path: Path) -> None:
    embedding, graph = embedding_module().untrained(3), sketch(1).primitives()
    embedding.save(tmp_path / "e.safetensors")
    assert (embedding_module().load(tmp_path / "e.safetensors")([graph]) == embedding([graph])).all()
    (tmp_path / "bad.safetensors").write_text("no")
    with pytest.raises(InputError, match="cannot be read as an embedding"):
        embedding_module().load(tmp_path / "bad.safetensors")


def test_the_command_trains_a_network_for_each_type(tmp_path: Path) -> None:
    out = tmp_path / "e.safetensors"
    asked = [
        "--type",
        "text",
        "--type",
        "imagenet",
        "--objective",
        "costs",
        "--steps",
        "2",
        "--sketches",
        "20",
    ]
    result = CliRunner().invoke(app, ["embed", "train", *asked, "--out", str(out)])
    assert result.exit_code == 0, result.output
    made = embedding_module().load(out)
    assert not made.shared
    assert not list(tmp_path.glob("*.part"))
    graph = SMALL[:1]
    assert (made(graph, "text") != made(graph, "imagenet")).any()
    assert not made(graph, "cifar10").any()


def test_the_command_names_what_it_does_not_know(tmp_path: Path) -> None:
    for asked in (["--type", "speech"], ["--objective", "luck"]):
        result = CliRunner().invoke(app, ["embed", "train", *asked, "--out", str(tmp_path / "e")])
        assert result.exit_code != 0
        assert asked[0] in result.output
        assert asked[1] in result.output


def test_a_zoo_without_models_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").touch()
    asked = ["--objective", "costs", "--sketches", "20", "--zoo", str(tmp_path / "empty.jsonl")]
    result = CliRunner().invoke(app, ["embed", "train", *asked, "--out", str(tmp_path / "e")])
    assert result.exit_code == 2
    assert "empty; a runs file has one run per line" in result.output


def test_what_is_no_embedding_is_named_before_any_run_is_read(tmp_path: Path) -> None:
    (tmp_path / "e").write_text("none")
    with pytest.raises(InputError, match="e: cannot be read as an embedding"):
        PredictDDLPredictor(embedding=tmp_path / "e").fit([])
