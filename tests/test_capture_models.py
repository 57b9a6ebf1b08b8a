"""The [model] section of a job: the user's functions, the model libraries and ONNX files; what is wrong is
said in one line."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import math
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from onnx import TensorProto, helper

from foretrain import predict, predictors
from foretrain.capture import _trace, capture
from foretrain.capture.sources.models import load_model
from foretrain.errors import CaptureError, ForetrainError, InputError
from foretrain.graph import OpGraph
from foretrain.job import Job

USER = """
import torch
from torch import nn

def module(batch): return nn.Sequential(nn.Flatten(), nn.Linear(48, 3))
def words(batch): return nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 5), nn.Flatten(0, 1))
def pair(batch): return module(batch), (torch.zeros(batch, 3, 4, 4),)
def bare(batch): return module(batch), torch.zeros(batch, 3, 4, 4)
def triple(batch): return nn.Linear(8, 1), (torch.zeros(batch, 8),), lambda output: (output - 1).abs().mean()
def wide(batch, width=4): return nn.Linear(width, 3), (torch.zeros(batch, width),)

class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 3)
    def forward(self, *, x, scale=1): return self.linear(x) * scale

def named(batch): return Named(), {"x": torch.zeros(batch, 8), "scale": 2}

def cuda(batch): return module(batch).cuda(), (torch.zeros(batch, 3, 4, 4).cuda(),)
def to_cuda(batch): return module(batch).to("cuda:0"), (torch.zeros(batch, 3, 4, 4, device="cuda"),)
def to_device(batch):
    device = torch.device("cuda")
    return module(batch).to(device=device), (torch.randn(batch, 3, 4, 4).to(device, non_blocking=True),)
def on_device(batch): return nn.Linear(8, 3, device="cuda"), (torch.empty(batch, 8, device="cuda"),)
def if_available(batch):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return module(batch).to(device), (torch.zeros(batch, 3, 4, 4, device=device),)

class Moves(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 3)
    def forward(self, x): return self.linear(x.cuda() + torch.ones(8, device="cuda"))

def moves(batch): return Moves(), (torch.zeros(batch, 8),)

class Asks(nn.Linear):
    def forward(self, x):
        assert x.is_cuda and self.weight.device == x.device == torch.device("cuda", x.get_device())
        torch.cuda.nvtx.range_push("forward")
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            y = super().forward(x)
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        return y
def asks(batch):
    assert torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 0)
    torch.set_default_device("cuda")
    return Asks(8, 3), (torch.zeros(batch, 8),)
def in_doubles(batch):
    torch.set_default_dtype(torch.float64)
    return nn.Linear(8, 3), (torch.zeros(batch, 8),)

def drop_path(batch):
    rates = [rate.item() for rate in torch.linspace(0, 0.1, 3)]
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Dropout(rate)) for rate in rates)), (torch.zeros(batch, 8),)

class Sized(nn.Linear):
    def __init__(self, width, depth, bias=True): super().__init__(width, depth, bias)

class Square(nn.Linear):
    def __init__(self, width=48): super().__init__(width, width)
    def forward(self, x): return super().forward(x.flatten(1))

class Plain: pass

def last(width=8, *, batch_size): return nn.Linear(width, 3), (torch.zeros(batch_size, width),)
def normed(use_batch_norm=False, batch=32):
    return (nn.BatchNorm1d(8) if use_batch_norm else nn.Linear(8, 3)), (torch.zeros(batch, 8),)
def by_size(n=3, batch_size=2): return nn.Linear(8, n), (torch.zeros(batch_size, 8),)
def by_n(n, width=8): return nn.Linear(width, 3), (torch.zeros(n, width),)
def at_first(batch, /, width=8): return nn.Linear(width, 3), (torch.zeros(batch, width),)
def at_second(width=8, batch=2, /): return nn.Linear(width, 3), (torch.zeros(batch, width),)
def by_any_name(**kwargs): return wide(**kwargs)
def not_used(_): return nn.Linear(8, 3), (torch.zeros(4, 8),)
def not_used_either(_unused): return nn.Linear(8, 3), (torch.zeros(4, 8),)
def deaf(batch): return nn.Linear(8, 3), (torch.zeros(8, 8),)
def among_others(batch): return nn.Linear(8, 1), torch.zeros(batch, 8), lambda y: {"loss": y.mean(), "rows": y.detach()}
def of_two(batch): return nn.Linear(8, 3), torch.zeros(batch, 8), nn.CrossEntropyLoss()
def next_words(batch):
    return nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 10)), torch.zeros(batch, 6, dtype=torch.long)
def time_first(batch): return nn.Linear(8, 3), (torch.zeros(5, batch, 8),), lambda output: output.sum()
def tokens(batch): return words(batch), torch.zeros(batch, 6, dtype=torch.long)
def wrapped(batch): return torch.compile(nn.Linear(8, 3)), (torch.zeros(batch, 8),)
def part_wrapped(batch):
    return nn.Sequential(torch.compile(nn.Linear(8, 8)), nn.Linear(8, 3)), (torch.zeros(batch, 8),)
def compiled_in_place(batch):
    net = nn.Linear(8, 3)
    net.compile()
    return net, (torch.zeros(batch, 8),)
def not_wrapped(batch): return nn.Linear(8, 3), (torch.zeros(batch, 8),)

@torch.compile
def squared(x): return x * x * x
class Forward(nn.Linear):
    @torch.compile
    def forward(self, x): return nn.functional.linear(x, self.weight, self.bias)
class Method(nn.Linear):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.run = torch.compile(self.inner, dynamic=True)
    def inner(self, x): return super().forward(x)
    def forward(self, x): return self.run(x)
class Function(nn.Linear):
    def forward(self, x): return squared(super().forward(x))
def compiled_forward(batch): return Forward(8, 3), (torch.zeros(batch, 8),)
def compiled_method(batch): return Method(8, 3), (torch.zeros(batch, 8),)
def compiled_function(batch): return Function(8, 3), (torch.zeros(batch, 8),)

def lazy(batch): return nn.Sequential(nn.LazyLinear(6), nn.ReLU(), nn.LazyLinear(3)), (torch.zeros(batch, 8),)
def exported(batch):
    inputs = (torch.zeros(batch, 8, device="cpu"),)
    return torch.export.export(nn.Linear(8, 3).to_empty(device="cpu"), inputs), (torch.zeros(batch, 8),)
def scripted(batch): return torch.jit.script(nn.Linear(8, 3)), (torch.zeros(batch, 8),)
def symbolic(batch): return torch.fx.symbolic_trace(nn.Linear(8, 3)), (torch.zeros(batch, 8),)
def replicated(batch):
    torch.distributed.init_process_group("nccl")
    return torch.nn.parallel.DistributedDataParallel(nn.Linear(8, 3).cuda()), (torch.zeros(batch, 8),)
def threaded(batch): return nn.DataParallel(nn.Linear(8, 3)), (torch.zeros(batch, 8),)
def sharded(batch):
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, fully_shard
    return FSDP(fully_shard(nn.Linear(8, 3))), (torch.zeros(batch, 8),)
class Speech(nn.Linear):
    def forward(self, x, y):
        steps = torch.full((x.shape[0],), x.shape[1])
        scores = super().forward(x).log_softmax(-1).transpose(0, 1)
        return nn.functional.ctc_loss(scores, y, steps, torch.full((x.shape[0],), 4))
def speech(batch):
    return Speech(8, 5), (torch.zeros(batch, 20, 8), torch.ones(batch, 6, dtype=torch.long)), lambda loss: loss

class Positions(nn.Module):
    def __init__(self, rows):
        super().__init__()
        self.table = nn.Embedding(rows, 4)
    def forward(self, x): return self.table(torch.arange(x.shape[1], device=x.device)) + x[..., None]

def positions(batch, rows): return Positions(rows), (torch.zeros(batch, 6),), lambda output: output.sum()

def number(batch): return 3
def four(batch): return module(batch), 1, 2, 3
def nothing(batch): pass
def fails(batch): raise RuntimeError("no weights\\nfound here")
"""
LAYERS = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
TINY = {**LAYERS, "vocab_size": 100}
T5 = {
    "model_type": "t5",
    "d_model": 32,
    "d_ff": 64,
    "d_kv": 16,
    "num_layers": 2,
    "num_heads": 2,
    "vocab_size": 100,
}
VIT = {"model_type": "vit", **LAYERS, "patch_size": 8}
TOWER = {**LAYERS, "image_size": 32, "patch_size": 8}
LLAVA = {
    "model_type": "llava",
    "text_config": {"model_type": "llama", **TINY, "num_key_value_heads": 2},
    "vision_config": {"model_type": "clip_vision_model", **TOWER},
}
QWEN_VL = {
    "model_type": "qwen2_vl",
    "text_config": {
        **TINY,
        "num_key_value_heads": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]},
    },
    "vision_config": {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 2, "patch_size": 8},
    "image_token_id": 9,
    "video_token_id": 10,
    "vision_start_token_id": 11,
    "vision_end_token_id": 12,
}
CLIP = {
    "model_type": "clip",
    "text_config": {**TINY, "max_position_embeddings": 16},
    "vision_config": TOWER,
}
SERIES = {
    "model_type": "informer", "prediction_length": 4, "context_length": 8, "lags_sequence": [1, 2], "d_model": 16,
    "encoder_layers": 1, "decoder_layers": 1, "num_time_features": 1, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16,
}  # fmt: skip

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture
def base(tmp_path: Path) -> Path:
    (tmp_path / "user.py").write_text(USER)
    return tmp_path


def a_job(base: Path, model: dict[str, Any], **training: Any) -> Job:
    return Job.read(
        {"model": model, "training": {"global_batch": 4, **training}, "cluster": {"device": "h100-sxm-80gb"}},
        base=base,
    )


def trace(base: Path, model: dict[str, Any], **training: Any) -> OpGraph:
    job = a_job(base, model, **training)
    return _trace(job, job.micro_batch)


def python(base: Path, name: str, **training: Any) -> OpGraph:
    return trace(base, {"source": "python", "name": name}, **training)


def launched(graph: OpGraph) -> list[str]:
    return [op.operator.name for op in graph.ops if op.operator.launches]


# The user's own functions


@pytest.mark.parametrize("function", ["pair", "bare", "cuda", "to_cuda", "to_device"])
def test_a_function_returns_a_module_and_its_inputs(base: Path, function: str) -> None:
    graph = python(base, f"user.py:{function}")
    assert (graph.parameters, graph.samples, graph.tokens) == (147, 4, 0)
    assert launched(graph) == launched(python(base, "user.py:pair"))
    assert graph.info["model"] == f"user.py:{function}"


def test_a_module_alone_gets_images_or_tokens_from_the_job(base: Path) -> None:
    assert launched(python(base, "user.py:module", image=4)) == launched(python(base, "user.py:pair"))
    graph = python(base, "user.py:words", sequence=6)
    assert (graph.samples, graph.tokens) == (4, 24)
    assert "embedding" in launched(graph)


def test_a_module_alone_and_no_shape_says_what_to_give(base: Path) -> None:
    with pytest.raises(
        InputError, match=r"^training\.image: missing; .*give training\.image or training\.sequence$"
    ):
        python(base, "user.py:module")


def test_the_functions_own_loss_is_used(base: Path) -> None:
    graph = python(base, "user.py:triple")
    assert {"sub", "abs", "mean"} <= set(launched(graph))
    assert "_log_softmax" not in launched(graph)


def test_a_loss_may_give_its_number_among_others(base: Path) -> None:
    assert "mean" in launched(python(base, "user.py:among_others"))


def test_a_loss_of_output_and_targets_is_told_how_to_hold_them(base: Path) -> None:
    with pytest.raises(
        CaptureError, match=r"^model user\.py:of_two: its loss is called with the module's out"
    ):
        python(base, "user.py:of_two")


def test_each_token_is_classified(base: Path) -> None:
    (softmax,) = [
        op.operator for op in python(base, "user.py:next_words").ops if op.operator.name == "_log_softmax"
    ]
    assert softmax.outputs[0].shape == (4 * 6, 10)


def test_inputs_may_be_named(base: Path) -> None:
    (scale,) = [
        op.operator
        for op in python(base, "user.py:named").ops
        if op.operator.name == "mul" and op.phase == "forward"
    ]
    assert scale.args["other"] == 2


def test_arguments_of_the_job_reach_the_function(base: Path) -> None:
    assert trace(base, {"source": "python", "name": "user.py:wide"}).parameters == 15
    assert trace(base, {"source": "python", "name": "user.py:wide", "args": {"width": 16}}).parameters == 51


def test_a_path_may_be_absolute_or_relative_to_the_job(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")
    assert python(base, "user.py:pair").parameters == python(Path(), f"{base}/user.py:pair").parameters


def test_a_model_may_import_its_neighbours(base: Path) -> None:
    (base / "a_neighbour_of_the_model.py").write_text("WIDTH = 16\n")
    (base / "importing.py").write_text(
        "import user, a_neighbour_of_the_model as n\ndef make(batch): return user.wide(batch, n.WIDTH)\n"
    )
    assert python(base, "importing.py:make").parameters == 51


@pytest.mark.parametrize("function", ["on_device", "moves"])
def test_a_model_that_asks_for_a_gpu_gets_meta(base: Path, function: str) -> None:
    assert python(base, f"user.py:{function}").parameters == 27


def test_a_model_that_uses_a_gpu_if_there_is_one_gets_meta(base: Path) -> None:
    assert python(base, "user.py:if_available").parameters == 147


def test_a_model_that_asks_about_the_gpu_hears_of_one(base: Path) -> None:
    assert launched(python(base, "user.py:asks")) == launched(python(base, "user.py:not_wrapped"))


def test_what_a_function_sets_for_the_process_holds_for_its_model_alone(base: Path) -> None:
    graph = python(base, "user.py:in_doubles")
    assert {spec.dtype for op in graph.ops for spec in op.operator.inputs} == {"float64", "int64"}
    assert torch.get_default_dtype() == torch.float32


def test_a_constructor_may_compute_with_real_numbers(base: Path) -> None:
    assert python(base, "user.py:drop_path").parameters == 3 * 72


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("nowhere.py:make", InputError, r"^model\.name: '.*nowhere\.py' is not a file$"),
        (
            "user.py:pairs",
            InputError,
            r"^model\.name: 'pairs' is not a name of .*user\.py; .*\(did you mean pair",
        ),
        ("user.py:nn", InputError, r"^model\.name: 'nn' is not a function of"),
        (
            "user.py:number",
            CaptureError,
            r"^model user\.py:number: returned int; a module, \(module, inputs\) or \(module, inputs, loss\)",
        ),
        ("user.py:four", CaptureError, r"^model user\.py:four: returned tuple; a module"),
        ("user.py:nothing", CaptureError, r"^model user\.py:nothing: returned NoneType; a module"),
        (
            "user.py:fails",
            CaptureError,
            r"^model user\.py:fails: RuntimeError: no weights \(at .*user\.py:\d+ in fails\)$",
        ),
        ("user.py:Sized", InputError, r"^model\.args\.width: missing; the class Sized needs width, depth$"),
        ("user.py:Plain", CaptureError, r"^model user\.py:Plain: the class is no torch\.nn\.Module"),
        (
            "user.py:deaf",
            InputError,
            r"^training\.global_batch: model user\.py:deaf returns inputs of shape \[8, 8\] whatever the batch",
        ),
        ("syntax.py:make", CaptureError, r"^model .*syntax\.py: SyntaxError: .*line 1"),
        ("raises.py:make", CaptureError, r"^model .*raises\.py: ZeroDivisionError: division by zero"),
        ("imports.py:make", CaptureError, r"^model .*imports\.py: No module named 'no_such_library'"),
    ],
)
def test_what_is_wrong_with_a_function_is_said_in_one_line(
    base: Path, name: str, kind: type[ForetrainError], message: str
) -> None:
    (base / "syntax.py").write_text("def make(:\n")
    make = "def make(batch): ...\n"
    (base / "raises.py").write_text(f"1 / 0\n{make}")
    (base / "imports.py").write_text(f"import no_such_library\n{make}")
    with pytest.raises(kind, match=message) as error:
        python(base, name)
    assert "\n" not in str(error.value)


def test_an_argument_that_the_function_lacks_is_named(base: Path) -> None:
    with pytest.raises(CaptureError, match=r"^model user\.py:wide: TypeError: .*'widht'"):
        trace(base, {"source": "python", "name": "user.py:wide", "args": {"widht": 16}})


def test_a_batch_below_one_is_refused(base: Path) -> None:
    with pytest.raises(InputError, match=r"^batch: 0 is not 1 or more$"):
        load_model(a_job(base, {"source": "python", "name": "user.py:pair"}).workload, 0)


@pytest.mark.parametrize(("args", "side"), [({}, 4), ({"width": 27}, 3)])
def test_a_class_is_built_with_its_defaults_and_the_arguments_of_the_job(
    base: Path, args: dict[str, Any], side: int
) -> None:
    model = {"source": "python", "name": "user.py:Square", "args": args}
    width = 3 * side * side
    for batch in (2, 4):
        graph = trace(base, model, global_batch=batch, image=side)
        assert (graph.parameters, graph.samples) == (width * width + width, batch)


def test_the_batch_goes_to_the_parameter_of_its_name(base: Path) -> None:
    assert python(base, "user.py:last").parameters == 8 * 3 + 3


@pytest.mark.parametrize(
    ("function", "args", "width", "outputs"),
    [
        ("normed", {}, 8, 3),
        ("by_size", {}, 8, 3),
        ("by_size", {"n": 5}, 8, 5),
        ("by_n", {"width": 6}, 6, 3),
        ("at_first", {"width": 6}, 6, 3),
        ("at_second", {"width": 6}, 6, 3),
        ("at_second", {}, 8, 3),
        ("by_any_name", {"width": 6}, 6, 3),
        ("not_used", {}, 8, 3),
        ("not_used_either", {}, 8, 3),
    ],
)
def test_the_batch_is_one_parameter_and_no_other(
    base: Path, function: str, args: dict[str, Any], width: int, outputs: int
) -> None:
    graph = trace(base, {"source": "python", "name": f"user.py:{function}", "args": args})
    assert graph.parameters == width * outputs + outputs


@pytest.mark.parametrize(
    ("function", "args", "message"),
    [
        (
            "wide",
            {"batch": 8},
            r"^model\.args\.batch: 8 stands where model user\.py:wide takes the job's batch",
        ),
    ],
)
def test_a_batch_that_has_no_place_is_refused(
    base: Path, function: str, args: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        trace(base, {"source": "python", "name": f"user.py:{function}", "args": args})


def test_inputs_may_be_laid_out_by_time_if_they_grow_with_the_batch(base: Path) -> None:
    assert python(base, "user.py:time_first").samples == 4


@pytest.mark.parametrize(
    ("function", "training", "message"),
    [
        (
            "tokens",
            {"sequence": 8},
            r"^training\.sequence: 8 is not what model .*tokens .*inputs of \[4, 6\]$",
        ),
        (
            "pair",
            {"image": 8},
            r"^training\.image: \[3, 8, 8\] is not what model .*: inputs of \[4, 3, 4, 4\]$",
        ),
        ("pair", {"classes": 8}, r"^training\.classes: 8 is not what model user\.py:pair has: no weight"),
        ("module", {"image": 4, "sequence": 8}, r"^training\.sequence: not used beside training\.image"),
    ],
)
def test_a_shape_that_the_function_does_not_use_is_refused(
    base: Path, function: str, training: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        python(base, f"user.py:{function}", **training)


def test_a_shape_that_the_functions_inputs_have_is_taken(base: Path) -> None:
    assert python(base, "user.py:tokens", sequence=6).tokens == 24
    assert python(base, "user.py:pair", image=4, classes=3).tokens == 0


COMPILED = (
    "wrapped", "part_wrapped", "compiled_in_place", "compiled_forward", "compiled_method", "compiled_function"
)  # fmt: skip


@pytest.mark.parametrize("function", COMPILED)
def test_a_module_that_its_own_code_compiles_is_traced_as_before_and_says_so(
    base: Path, function: str
) -> None:
    graph, plain = python(base, f"user.py:{function}"), python(base, "user.py:not_wrapped")
    assert graph.info["compile"]
    assert "compile" not in plain.info
    if function not in ("part_wrapped", "compiled_function"):
        assert launched(graph) == launched(plain)
    assert launched(graph)[0] == "addmm"


def test_a_module_that_its_own_code_compiles_is_forecast_as_compiled(base: Path) -> None:
    def notes(function: str) -> list[str]:
        job = a_job(base, {"source": "python", "name": f"user.py:{function}"})
        forecast = predictors.get("roofline").predict(job)
        return [note for note in forecast.assumptions if note.startswith("compile = true")]

    (note,) = notes("compiled_function")
    assert "own code compiles" in note
    assert notes("not_wrapped") == []


@pytest.mark.parametrize("function", ["replicated", "sharded", "threaded"])
def test_what_spreads_a_module_over_devices_is_left_to_the_plan(base: Path, function: str) -> None:
    graph = python(base, f"user.py:{function}")
    assert launched(graph) == launched(python(base, "user.py:not_wrapped"))
    assert all("left out: the plan says" in note for note in graph.info["assumptions"])


def test_lazy_layers_get_their_shapes(base: Path) -> None:
    assert python(base, "user.py:lazy").parameters == 9 * 6 + 7 * 3
    with pytest.raises(
        CaptureError, match=r"^module LazyLinear: its lazy layers have no shapes yet; call it"
    ):
        capture(torch.nn.LazyLinear(3), torch.zeros(2, 8))


@pytest.mark.parametrize("function", ["exported", "scripted", "symbolic"])
def test_an_exported_or_scripted_module_is_one_like_any_other(base: Path, function: str) -> None:
    assert launched(python(base, f"user.py:{function}")) == launched(python(base, "user.py:not_wrapped"))


def test_ctc_keeps_a_place_between_all_labels_for_every_step(base: Path) -> None:
    (loss,) = [op.operator for op in python(base, "user.py:speech").ops if op.operator.name == "_ctc_loss"]
    assert [spec.shape for spec in loss.outputs] == [(4,), (4, 20, 2 * 6 + 1)]


def test_a_position_beyond_its_table_stops_the_trace_as_it_stops_a_device(base: Path) -> None:
    model = {"source": "python", "name": "user.py:positions", "args": {"rows": 6}}
    assert trace(base, model).parameters == 24
    model["args"] = {"rows": 5}
    with pytest.raises(CaptureError, match=r"^module table: index 5 is beyond a table of 5 rows$"):
        trace(base, model)


# A module in hand


def test_a_compiled_module_is_forecast_as_compiled() -> None:
    inner = torch.nn.Linear(8, 8)
    compiled: tuple[Any, ...] = tuple(map(torch.compile, (inner, torch.nn.Linear(8, 3))))
    module = torch.nn.Sequential(compiled[0], torch.nn.Linear(8, 3))
    for whole in (module, compiled[1]):
        forecast = predict(whole, torch.zeros(4, 8), predictor="roofline")
        assert forecast.job.workload.training.compile
        with pytest.raises(InputError, match=r"^training\.compile: false, but the graph .* compiled module$"):
            predict(whole, torch.zeros(4, 8), predictor="roofline", compile=False)
    assert module[0]._orig_mod is inner


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sequence": 5}, r"^training\.sequence: 5 is not what the module is given: inputs of \[4, 8\]$"),
        ({"sequence": 8}, r"^training\.sequence: 8 is not what the module is given: inputs of \[4, 8\]$"),
        ({"image": 5}, r"^training\.image: \[3, 5, 5\] is not what the module is given: inputs of \[4, 8\]$"),
        ({"classes": 5}, r"^training\.classes: 5, but no tensor of the graph .* is as wide$"),
    ],
)
def test_a_shape_that_a_modules_inputs_do_not_have_is_refused(options: dict[str, Any], message: str) -> None:
    module, inputs = torch.nn.Linear(8, 3), torch.zeros(4, 8)
    with pytest.raises(InputError, match=message):
        predict(module, inputs, predictor="roofline", **options)
    steps = torch.zeros(4, 8, 8)
    tokens = predict(module, steps, predictor="roofline", sequence=8, classes=3).quantities["tokens_per_s"]
    samples = predict(module, steps, predictor="roofline").quantities["samples_per_s"]
    assert tokens.median == pytest.approx(8 * samples.median)


# The image libraries


@pytest.mark.parametrize(
    ("model", "training", "message"),
    [
        (
            {"source": "timm", "name": "resnet10t"},
            {"sequence": 8},
            r"^training\.sequence: 8 is not used by a timm",
        ),
        (
            {"source": "torchvision", "name": "resnet18"},
            {"sequence": 8},
            r"^training\.sequence: 8 is not used by a torchvision model$",
        ),
        (
            {"source": "torchvision", "name": "squeezenet1_1", "args": {"num_classes": 5}},
            {"classes": 7},
            r"^training\.classes: 7 contradicts model\.args\.num_classes = 5$",
        ),
    ],
)
def test_what_a_library_model_would_ignore_is_refused(
    base: Path, model: dict[str, Any], training: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        trace(base, model, **training)


@pytest.mark.parametrize(("source", "name"), [("timm", "resnet10t"), ("torchvision", "squeezenet1_1")])
def test_a_library_model_takes_the_jobs_image_and_classes(base: Path, source: str, name: str) -> None:
    graph = trace(base, {"source": source, "name": name}, image=32, classes=7)
    first = next(op.operator for op in graph.ops if op.operator.name == "convolution")
    (logits,) = [op.operator.inputs[0] for op in graph.ops if op.operator.name == "_log_softmax"]
    assert first.inputs[0].shape == (4, 3, 32, 32)
    assert logits.shape == (4, 7)
    assert source in graph.info["versions"]


@pytest.mark.parametrize("source", ["timm", "torchvision"])
def test_an_unknown_name_of_a_library_is_answered_with_near_ones(base: Path, source: str) -> None:
    with pytest.raises(
        InputError,
        match=rf"^model\.name: 'resnet5O' is not a {source} model; \d+ known names \(did you mean resnet50 ",
    ):
        trace(base, {"source": source, "name": "resnet5O"})


@pytest.mark.parametrize(
    ("source", "name", "args", "message"),
    [
        (
            "torchvision",
            "squeezenet1_1",
            {"drop": 0.1},
            r"SqueezeNet: dropout, num_classes, version \(did you mean",
        ),
        ("timm", "resnet10t", {"num_class": 3}, r"ResNet: .*\(did you mean num_classes"),
        (
            "timm",
            "vit_tiny_patch16_224",
            {"depht": 3},
            r"VisionTransformer: \d+ known names \(did you mean depth",
        ),
    ],
)
def test_an_argument_that_the_library_lacks_is_answered_with_those_it_has(
    base: Path, source: str, name: str, args: dict[str, Any], message: str
) -> None:
    (argument,) = args
    with pytest.raises(InputError, match=rf"^model\.args: '{argument}' is not an argument of {message}"):
        trace(base, {"source": source, "name": name, "args": args})


@pytest.mark.parametrize(
    ("source", "name"), [("timm", "vit_tiny_patch16_224"), ("torchvision", "vit_b_32"), ("timm", "resnet10t")]
)
def test_a_model_of_one_image_size_is_made_for_the_jobs(base: Path, source: str, name: str) -> None:
    graph = trace(base, {"source": source, "name": name}, image=96)
    first = next(op.operator for op in graph.ops if op.operator.name == "convolution")
    assert first.inputs[0].shape == (4, 3, 96, 96)


def test_timm_models_take_the_jobs_channels(base: Path) -> None:
    graph = trace(base, {"source": "timm", "name": "resnet10t"}, image=[1, 28, 28])
    first = next(op.operator for op in graph.ops if op.operator.name == "convolution")
    assert first.inputs[0].shape == (4, 1, 28, 28)


@pytest.mark.parametrize(("name", "own"), [("levit_128s", 224), ("swinv2_tiny_window8_256", 256)])
def test_an_image_that_a_model_cannot_take_is_one_line(base: Path, name: str, own: int) -> None:
    size = rf"its own size is \[3, {own}, {own}\]$"
    with pytest.raises(
        CaptureError, match=rf"^training\.image: \[3, 100, 100\] is not what {name} takes .*{size}"
    ):
        trace(base, {"source": "timm", "name": name}, image=100)


def test_pretrained_weights_are_not_fetched(base: Path) -> None:
    graph = trace(base, {"source": "timm", "name": "resnet10t", "args": {"pretrained": True}}, image=32)
    assert "pretrained weights are not loaded: they change no shape" in graph.info["assumptions"]


# Transformers


def transformer(base: Path, config: dict[str, Any], task: str | None = None, **training: Any) -> OpGraph:
    return trace(
        base, {"source": "transformers", "config": config, **({"task": task} if task else {})}, **training
    )


def of_layers(graph: OpGraph, name: str) -> int:
    return sum(name in op.operator.name for op in graph.ops if op.phase == "forward")


def test_llama_by_its_configuration(base: Path) -> None:
    graph = transformer(base, {"model_type": "llama", **TINY}, "causal-lm", sequence=8, precision="bf16")
    # embedding and head, then per layer four projections, three of the gated MLP and two norms; one last norm
    assert graph.parameters == 2 * 100 * 32 + 2 * (4 * 32 * 32 + 3 * 32 * 64 + 2 * 32) + 32
    assert (graph.samples, graph.tokens) == (4, 32)
    assert of_layers(graph, "flash_attention") == 2
    assert "model.layers.1.self_attn.q_proj" in {op.layer for op in graph.ops}
    assert {"torch", "transformers"} == set(graph.info["versions"])


def test_gemma2_runs_the_attention_of_the_version_that_the_job_names(base: Path) -> None:
    gemma = {"model_type": "gemma2", **TINY, "num_key_value_heads": 2}
    now = transformer(base, gemma, "causal-lm", sequence=8, precision="bf16")
    named = {"source": "transformers", "config": gemma, "task": "causal-lm"}
    before = trace(base, {**named, "libraries": {"transformers": "5.17.0"}}, sequence=8, precision="bf16")
    assert of_layers(before, "scaled_dot_product") == 2
    assert of_layers(now, "scaled_dot_product") == 0 or installed_transformers() < (5, 21)
    again = transformer(base, gemma, "causal-lm", sequence=8, precision="bf16")
    assert of_layers(again, "scaled_dot_product") == of_layers(now, "scaled_dot_product")


def test_before_torch_2_attention_is_written_out(base: Path) -> None:
    named = {"source": "transformers", "config": {"model_type": "llama", **TINY}, "task": "causal-lm"}
    now = trace(base, named, sequence=8, precision="bf16")
    before = trace(base, {**named, "libraries": {"torch": "1.13.1+cu117"}}, sequence=8, precision="bf16")
    assert (of_layers(now, "attention"), of_layers(before, "attention")) == (2, 0)
    assert of_layers(before, "_softmax") - of_layers(now, "_softmax") == 2
    assert of_layers(before, "bmm") - of_layers(now, "bmm") == 4


def installed_transformers() -> tuple[int, ...]:
    return tuple(map(int, importlib.metadata.version("transformers").split(".")[:2]))


def test_a_served_model_keeps_keys_and_values_where_its_configuration_says_so(base: Path) -> None:
    served = {"model_type": "llama", **TINY, "use_cache": True}
    graph = transformer(base, served, "causal-lm", sequence=8, mode="infer")
    without = transformer(base, {**served, "use_cache": False}, "causal-lm", sequence=8, mode="infer")
    trained = transformer(base, served, "causal-lm", sequence=8)
    assert joined(graph) - joined(without) == 2 * 2  # keys and values of two layers
    assert joined(trained) == joined(without)


def joined(graph: OpGraph) -> int:
    """Calls of cat inside of attention, in the forward pass."""
    calls = [op.operator.name for op in graph.ops if op.phase == "forward" and "self_attn" in op.layer]
    return calls.count("cat")


def test_bert_finds_that_its_mask_hides_nothing(base: Path) -> None:
    graph = transformer(base, {"model_type": "bert", **TINY}, "masked-lm", sequence=8)
    attention = [
        op.operator for op in graph.ops if op.operator.name == "_scaled_dot_product_efficient_attention"
    ]
    assert len(attention) == 2
    assert all(operator.tensor("attn_bias") is None for operator in attention)
    assert "native_dropout" in launched(graph)


MASKED = [
    ({"model_type": kind, **TINY}, task)
    for kind, task in (("bert", "masked-lm"), ("bert", "pretraining"), ("roberta", "masked-lm"),
                       ("electra", "masked-lm"))
]  # fmt: skip


@pytest.mark.parametrize(("config", "task"), MASKED, ids=lambda value: str(value)[:24])
def test_a_masked_language_model_may_answer_for_masked_tokens_alone(
    base: Path, config: dict[str, Any], task: str
) -> None:
    """Head and loss are of three tokens of each of four samples, all before them of eight."""
    masked = transformer(base, config, task, sequence=8, predicted_tokens=3)
    every = transformer(base, config, task, sequence=8)
    assert (rows_of_logits(masked), rows_of_logits(every)) == (12, 32)
    assert masked.parameters == every.parameters
    assert of_layers(masked, "addmm") == of_layers(every, "addmm")
    assert {op.operator.name for op in masked.ops} - {op.operator.name for op in every.ops} >= {
        "index_select"
    }


def rows_of_logits(graph: OpGraph) -> int:
    """Tokens for which there are logits over the vocabulary."""
    products = [op.operator.outputs[0].shape for op in graph.ops if op.operator.name == "addmm"]
    [rows] = {math.prod(shape[:-1]) for shape in products if shape[-1] == TINY["vocab_size"]}
    return rows


def test_a_model_that_answers_for_masked_tokens_runs(base: Path) -> None:
    job = a_job(
        base, {"source": "transformers", "config": MASKED[0][0], "task": "masked-lm"},
        sequence=8, predicted_tokens=3,
    )  # fmt: skip
    loaded = load_model(job.workload, 4, "cpu")
    assert isinstance(loaded.inputs, dict)
    output = loaded.module(**loaded.inputs)
    assert output.logits.shape == (4, 3, TINY["vocab_size"])
    assert output.loss > 0


@pytest.mark.parametrize(
    ("model", "training", "message"),
    [
        ({"task": "masked-lm"}, {"predicted_tokens": 9}, "predicted_tokens: 9 is not at most training.sequence"),
        ({"task": "masked-lm"}, {"predicted_tokens": 0}, "predicted_tokens: 0 is not a number greater than zero"),
        ({"task": "masked-lm"}, {"predicted_tokens": 3, "mode": "infer"}, 'predicted_tokens: 3 needs mode = "train"'),
        ({"task": "question-answering"}, {"predicted_tokens": 3}, "3 is for masked language models, not task quest"),
    ],
)  # fmt: skip
def test_masked_tokens_that_cannot_be_are_refused(
    base: Path, model: dict[str, Any], training: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        trace(base, {"source": "transformers", "config": MASKED[0][0], **model}, sequence=8, **training)


def test_t5_needs_no_task(base: Path) -> None:
    graph = transformer(base, T5, sequence=8)
    assert graph.tokens == 32
    assert {"encoder.block.1.layer.0.SelfAttention.q", "decoder.block.1.layer.1.EncDecAttention.q"} <= {
        op.layer for op in graph.ops
    }
    assert of_layers(graph, "nll_loss") == 1


@pytest.mark.parametrize(("config", "training"), [({**VIT, "image_size": 32}, {}), (VIT, {"image": 32})])
def test_vit_takes_its_image_from_the_configuration_or_the_job(
    base: Path, config: dict[str, Any], training: dict[str, Any]
) -> None:
    graph = transformer(base, config, classes=5, **training)
    (patches,) = [op.operator for op in graph.ops if op.operator.name == "convolution"]
    assert patches.inputs[0].shape == (4, 3, 32, 32)
    assert graph.tokens == 0


@pytest.mark.parametrize(("config", "image", "tokens"), [(LLAVA, {}, 16), (QWEN_VL, {"image": 64}, 16)])
def test_an_image_takes_as_many_tokens_of_a_text_as_its_tower_gives_rows(
    base: Path, config: dict[str, Any], image: dict[str, Any], tokens: int
) -> None:
    model = {"source": "transformers", "config": config}
    inputs = load_model(a_job(base, model, sequence=24, **image).workload, 2).inputs
    module: Any = load_model(a_job(base, model, sequence=24, **image).workload, 2).module
    special = module.config.image_token_id
    assert isinstance(inputs, dict)
    assert (inputs["input_ids"] == special).sum(dim=1).tolist() == [tokens, tokens]
    graph = transformer(base, config, sequence=24, **image)
    assert graph.tokens == 4 * 24
    assert of_layers(graph, "masked_scatter") == 1
    assert of_layers(graph, "nll_loss") == 1


def test_packed_patches_are_those_of_all_images(base: Path) -> None:
    inputs = load_model(
        a_job(base, {"source": "transformers", "config": QWEN_VL}, sequence=24, image=64).workload, 2
    ).inputs
    assert isinstance(inputs, dict)
    assert inputs["image_grid_thw"].tolist() == [[1, 8, 8]] * 2
    assert inputs["pixel_values"].shape == (2 * 64, 3 * 2 * 8 * 8)


def test_a_detector_matches_objects_to_its_first_queries(base: Path) -> None:
    config = {"model_type": "yolos", **TOWER, "image_size": [32, 32], "num_detection_tokens": 10}
    graph = transformer(base, config)
    assert "7 objects in each image, matched to the model's first queries" in graph.info["assumptions"]
    matched = [op.operator.outputs[0].shape for op in graph.ops if op.operator.name == "index"]
    assert (4 * 7, 4) in matched  # the boxes of all objects
    assert any("bbox_predictor" in op.layer and op.phase == "backward" for op in graph.ops)


def test_clip_learns_from_pairs(base: Path) -> None:
    graph = transformer(base, CLIP)
    assert "training.sequence: 16 tokens of text taken" in graph.info["assumptions"]
    logits = [op.operator.outputs[0].shape for op in graph.ops if op.operator.name == "_log_softmax"]
    assert logits == [(4, 4), (4, 4)]


def test_a_time_series_is_as_long_as_its_context_and_lags(base: Path) -> None:
    graph = transformer(base, SERIES)
    assert any(spec.shape == (4, 10) for op in graph.ops for spec in op.operator.inputs)
    assert not any("no loss" in note for note in graph.info.get("assumptions", ()))


def test_speech_is_learnt_by_ctc(base: Path) -> None:
    config = {
        "model_type": "wav2vec2", **TINY, "conv_dim": [8, 8], "conv_kernel": [10, 3], "conv_stride": [5, 2],
        "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2,
    }  # fmt: skip
    graph = transformer(base, config, "ctc", sequence=1600)
    (loss,) = [op.operator for op in graph.ops if op.operator.name == "_ctc_loss"]
    assert loss.outputs[0].shape == (4,)
    assert "_ctc_loss_backward" in launched(graph)


def test_what_a_constructor_computes_is_known_when_the_model_asks_its_buffers(base: Path) -> None:
    config = {
        "model_type": "encodec", "num_filters": 2, "hidden_size": 8, "num_lstm_layers": 1, "codebook_size": 16,
        "upsampling_ratios": [2], "target_bandwidths": [1.5], "sampling_rate": 240,
    }  # fmt: skip
    graph = transformer(base, config, sequence=64)
    padded = next(op.operator for op in graph.ops if op.operator.name == "reflection_pad1d")
    assert padded.outputs[0].shape == (4, 1, 64 + 6)  # a kernel of 7, whose size is a buffer


def test_a_video_has_frames(base: Path) -> None:
    config = {"model_type": "videomae", **TOWER, "num_frames": 4, "tubelet_size": 2}
    graph = transformer(base, config, classes=5)
    (tubes,) = [op.operator for op in graph.ops if op.operator.name == "convolution"]
    assert tubes.inputs[0].shape == (4, 3, 4, 32, 32)
    assert any(spec.shape == (4, 5) for op in graph.ops for spec in op.operator.outputs)


def test_a_tower_of_a_larger_model_is_a_model_and_its_loss_is_said(base: Path) -> None:
    graph = transformer(base, {"model_type": "blip_vision_model", **TOWER})
    assert "BlipVisionModel has no loss; the mean of its output is taken" in graph.info["assumptions"]


@pytest.mark.parametrize(
    ("config", "task"),
    [({"model_type": "llama", **TINY}, "causal-lm"), ({"model_type": "bert", **TINY}, "masked-lm")],
)
def test_the_usual_task_of_a_type_is_taken_where_the_job_names_none(
    base: Path, config: dict[str, Any], task: str
) -> None:
    taken, named = (transformer(base, config, one, sequence=8) for one in (None, task))
    assert f"model.task: {task} taken" in taken.info["assumptions"]
    assert dataclasses.replace(taken, info={}).digest() == dataclasses.replace(named, info={}).digest()


@pytest.mark.parametrize(
    ("config", "task", "training", "message"),
    [
        (
            {"model_type": "lama"},
            "causal-lm",
            {},
            r"^model\.config\.model_type: 'lama' is not a transformers model type; .*did you mean llama ",
        ),
        (
            {"model_type": "llama", **TINY},
            "causal-ml",
            {"sequence": 8},
            r"^model\.task: 'causal-ml' is not one of .*did you mean causal-lm\?",
        ),
        (
            {"model_type": "llama", **TINY},
            "ctc",
            {"sequence": 8},
            r"^model\.task: 'ctc' is not a task of llama; it has causal-lm, sequence-classification, ",
        ),
        (
            {"model_type": "sam_mask_decoder"},
            None,
            {},
            r"^model\.config\.model_type: sam_mask_decoder has no forward pass of its own; name the type of ",
        ),
        (
            LLAVA,
            None,
            {"sequence": 16},
            r"^training\.sequence: 16 is too short for the 16 tokens that images .*; give 17 or more$",
        ),
        ({"model_type": "llama", **TINY}, "causal-lm", {}, r"^training\.sequence: missing"),
        (
            {"model_type": "llama", **TINY, "hiden_size": 64},
            "causal-lm",
            {"sequence": 8},
            r"^model\.config\.hiden_size: 'hiden_size' is not a key of llama; .*did you mean hidden_size ",
        ),
        (
            {"model_type": "llama", **TINY, "foo_bar": 1},
            "causal-lm",
            {"sequence": 8},
            r"^model\.config\.foo_bar: 'foo_bar' is not a key of llama; ",
        ),
        (
            {"model_type": "llama", **TINY, "n_layer": 4},
            "causal-lm",
            {"sequence": 8},
            r"^model\.config\.n_layer: 'n_layer' is not a key of llama; ",
        ),
        (
            {"model_type": "llava", "text_config": {"model_type": "llama", "hiden_size": 64}},
            "base",
            {"sequence": 8},
            r"^model\.config\.text_config\.hiden_size: ",
        ),
        (
            {"model_type": "llama", **TINY, "num_hidden_layers": -2},
            "causal-lm",
            {"sequence": 8},
            r"^model\.config\.num_hidden_layers: -2 is not 1 or more$",
        ),
        (
            {"model_type": "gpt2", "n_layer": 0},
            "causal-lm",
            {"sequence": 8},
            r"^model\.config\.n_layer: 0 is not 1 or more$",
        ),
        (
            {"model_type": "gpt2", "n_layer": 1, "num_hidden_layers": 2},
            "causal-lm",
            {"sequence": 8},
            r"^model\.config\.(n_layer|num_hidden_layers): \d contradicts another key; the model would have \d$",
        ),
        (
            {"model_type": "gpt2", "n_layer": 1, "n_embd": 32, "n_head": 2, "n_positions": 16},
            "causal-lm",
            {"sequence": 17},
            r"^training\.sequence: 17 is beyond the 16 positions of gpt2; ",
        ),
        (
            {"model_type": "roberta", **TINY, "max_position_embeddings": 18},
            "masked-lm",
            {"sequence": 17},
            r"^training\.sequence: 17 is beyond the 16 positions of roberta; ",
        ),
        (
            {"model_type": "llama", **TINY},
            "causal-lm",
            {"sequence": 8, "classes": 5},
            r"^training\.classes: 5 is not used by task = 'causal-lm'$",
        ),
        (
            {"model_type": "bert", **TINY},
            "masked-lm",
            {"sequence": 8, "image": 32},
            r"^training\.image: 32 is not used by bert, task = 'masked-lm'$",
        ),
        (
            {**VIT, "image_size": 32},
            None,
            {"sequence": 8},
            r"^training\.sequence: 8 is not used by vit, task = 'image-classification'$",
        ),
        (
            {**VIT, "image_size": 32, "num_labels": 4},
            None,
            {"classes": 8},
            r"^training\.classes: 8 contradicts model\.config\.num_labels = 4$",
        ),
    ],
    ids=[
        "type", "task", "another's task", "a part", "no room", "no sequence", "typo", "unknown", "another's", "nested typo", "negative", "zero", "two names",
        "positions", "padded positions", "classes", "image", "sequence", "labels",
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_configuration_is_said(
    base: Path, config: dict[str, Any], task: str | None, training: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        transformer(base, config, task, **training)


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "llama", **TINY, "rope_theta": 5e5, "pad_token_id": -1, "max_position_embeddings": 4},
        {"model_type": "qwen3_moe", **TINY, "head_dim": 16, "num_key_value_heads": 2},
        {"model_type": "gpt2", "n_layer": 1, "num_hidden_layers": 1, "n_embd": 32, "n_head": 2},
    ],
    ids=lambda config: config["model_type"],
)
def test_keys_that_only_the_models_code_reads_are_taken(base: Path, config: dict[str, Any]) -> None:
    assert transformer(base, config, "causal-lm", sequence=8).tokens == 32


FILE = {
    "_name_or_path": "somewhere", "architectures": ["AModel"], "transformers_version": "4.31.0.dev0",
    "task_specific_params": {"text-generation": {"do_sample": True}}, "bos_token_id": 1, "tokenizer_class": "T",
}  # fmt: skip
"""What files of the model hub hold beside the model."""
GPT2 = {"model_type": "gpt2", "n_layer": 1, "n_embd": 32, "n_head": 2, "n_positions": 16}
WEIGHTS = "not used; training.precision says what weights are"


@pytest.mark.parametrize(
    ("config", "more", "task", "notes"),
    [
        (GPT2, {"n_ctx": 16, "summary_type": "cls_index"}, "causal-lm", ["n_ctx not used by gpt2"]),
        (
            {"model_type": "bert", **TINY},
            {"gradient_checkpointing": False, "pooler_type": "first_token_transform"},
            "masked-lm",
            ["gradient_checkpointing, pooler_type not used by bert"],
        ),
        (T5, {"n_positions": 512, "output_past": True}, None, ["n_positions, output_past not used by t5"]),
        (
            {"model_type": "llama", **TINY},
            {
                "torch_dtype": "bfloat16",
                "quantization_config": {"quant_method": "fp8"},
                "auto_map": {"AutoModelForCausalLM": "code.Model"},
                "temperature": 0.9,
                "pretraining_tp": 1,
            },
            "causal-lm",
            [f"torch_dtype, quantization_config {WEIGHTS}"],
        ),
        (
            {
                "model_type": "mamba",
                "hidden_size": 32,
                "num_hidden_layers": 1,
                "state_size": 4,
                "vocab_size": 100,
            },
            {"n_layer": 1, "d_model": 32, "torch_dtype": "float32"},
            "causal-lm",
            [f"torch_dtype {WEIGHTS}", "n_layer, d_model not used by mamba"],
        ),
    ],
    ids=["gpt2", "bert", "t5", "llama", "mamba"],
)
def test_a_published_configuration_is_taken_and_what_it_does_not_use_is_said(
    base: Path, config: dict[str, Any], more: dict[str, Any], task: str | None, notes: list[str]
) -> None:
    plain = transformer(base, config, task, sequence=8)
    graph = transformer(base, {**FILE, **config, **more}, task, sequence=8)
    said = [f"model.config: {note}" for note in notes]
    assert graph.info["assumptions"] == [*said, *plain.info.get("assumptions", [])]
    assert dataclasses.replace(graph, info={}).digest() == dataclasses.replace(plain, info={}).digest()


def test_what_a_configuration_does_not_use_is_among_the_assumptions(base: Path) -> None:
    model = {"source": "transformers", "task": "causal-lm", "config": {**GPT2, "n_ctx": 16}}
    forecast = predictors.get("deletepop").predict(a_job(base, model, sequence=8))
    assert "model.config: n_ctx not used by gpt2" in forecast.assumptions


@pytest.mark.parametrize(
    ("config", "task", "training"),
    [
        ({"model_type": "gpt2", "n_layer": 1, "n_embd": 32, "n_head": 2}, "causal-lm", {"sequence": 8}),
        ({"model_type": "bert", **TINY}, "masked-lm", {"sequence": 8}),
        ({"model_type": "bert", **TINY}, "question-answering", {"sequence": 8}),
        ({"model_type": "bert", **TINY}, "sequence-classification", {"sequence": 8}),
        (T5, None, {"sequence": 8}),
        ({**VIT, "image_size": 32}, None, {}),
        ({**VIT, "image_size": 32}, "masked-image-modeling", {}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_inference_computes_no_loss(
    base: Path, config: dict[str, Any], task: str | None, training: dict[str, Any]
) -> None:
    served = transformer(base, config, task, mode="infer", precision="bf16", **training)
    assert {op.phase for op in served.ops} == {"forward"}
    assert not {"_log_softmax", "nll_loss_forward"} & set(launched(served))
    sizes = [spec.dtype for op in served.ops for spec in op.operator.outputs if 100 in spec.shape[-1:]]
    assert "float32" not in sizes  # logits are not made wide for a loss
    model = {"source": "transformers", "config": config, **({"task": task} if task else {})}
    names = load_model(a_job(base, model, mode="infer", **training).workload, 2, "cpu").inputs
    assert not {"labels", "start_positions", "end_positions", "bool_masked_pos"} & set(names)


def test_a_seq2seq_model_is_served_with_tokens_for_its_decoder(base: Path) -> None:
    graph = transformer(base, T5, sequence=8, mode="infer")
    assert any("decoder.block.1" in op.layer for op in graph.ops)


# ONNX


def test_an_onnx_file_is_traced_by_the_jobs_batch(base: Path) -> None:
    weight = helper.make_tensor("w", TensorProto.FLOAT, [8, 5], [0.0] * 40)
    infos = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", size])
        for name, size in (("x", 8), ("y", 5))
    ]
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])], "net", infos[:1], infos[1:], [weight]
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)]), str(base / "net.onnx"))
    traced = trace(base, {"source": "onnx", "name": "net.onnx"})
    product = next(op.operator for op in traced.ops if op.operator.name == "mm")
    assert (traced.parameters, product.inputs[0].shape) == (40, (4, 8))
    assert {op.phase for op in traced.ops} == {"forward", "backward", "optimizer"}


def test_an_onnx_file_that_is_not_there_is_named(base: Path) -> None:
    with pytest.raises(InputError, match=r"^model\.name: '.*net\.onnx' is not a file$"):
        trace(base, {"source": "onnx", "name": "net.onnx"})


# Graphs

GRAPHS = """
import torch
from torch import nn
from torch_geometric import nn as layers
from torch_geometric.data import Batch, Data

class Net(nn.Module):
    def __init__(self, first):
        super().__init__()
        self.first, self.last = first, layers.SAGEConv(16, 7)

    def forward(self, x, edges, *kinds):
        return self.last(self.first(x, edges, *kinds).relu(), edges)

class Pooled(Net):
    def forward(self, data):
        return layers.global_mean_pool(super().forward(data.x, data.edge_index), data.batch)

def graph(batch):
    return torch.rand(10 * batch, 8), torch.randint(10 * batch, (2, 40 * batch))

def gcn(batch): return Net(layers.GCNConv(8, 16)), graph(batch)
def gat(batch): return Net(layers.GATConv(8, 4, heads=4)), graph(batch)
def rgcn(batch): return Net(layers.RGCNConv(8, 16, 3)), (*graph(batch), torch.randint(3, (40 * batch,)))
def pooled(batch):
    parts = [Data(*graph(1)) for _ in range(batch)]
    return Pooled(layers.GCNConv(8, 16)), (Batch.from_data_list(parts),)
def unknown(batch):
    rows = torch.empty(10 * batch, 8, device="meta")
    return Net(layers.GCNConv(8, 16)), (rows, torch.empty(2, 40 * batch, dtype=torch.long, device="meta"))
def whole(batch):
    x, edges = graph(30)
    seen = torch.arange(300) < 50
    return Net(layers.GCNConv(8, 16, cached=True)), (x, edges), lambda output: output[seen].sum()
"""


@pytest.mark.parametrize("function", ["gcn", "gat", "rgcn", "pooled", "unknown"])
def test_graph_networks_are_traced_the_same_each_time(tmp_path: Path, function: str) -> None:
    pytest.importorskip("torch_geometric")
    (tmp_path / "graphs.py").write_text(GRAPHS)
    first, second = (python(tmp_path, f"graphs.py:{function}") for _ in range(2))
    assert first.digest() == second.digest()
    added = [op.operator.inputs[2].shape for op in first.ops if op.operator.name == "scatter_add_"]
    messages = (
        sum(shape[0] for shape in added if shape[1:] in ((16,), (4, 4), (8,))) - 160
    )  # of the last layer
    if function == "rgcn":
        assert messages == 160
    else:  # every node gets a loop, and keeps none of those it had
        assert messages == 200 if function == "unknown" else 170 <= messages < 200
    assert len(first.info.get("assumptions", ())) == (function == "unknown")


def test_a_whole_graph_is_a_batch_of_one(tmp_path: Path) -> None:
    pytest.importorskip("torch_geometric")
    (tmp_path / "graphs.py").write_text(GRAPHS)
    assert python(tmp_path, "graphs.py:whole", global_batch=1).samples == 1
    with pytest.raises(
        InputError, match=r"whatever the batch is; .* \(a whole dataset at once is a batch of 1\)$"
    ):
        python(tmp_path, "graphs.py:whole", global_batch=2)


# Recomputation


@pytest.mark.parametrize(
    ("name", "args", "again", "note"),
    [
        ("vit_tiny_patch16_224", {"depth": 2, "img_size": 32}, 2, None),
        ("resnet18", {}, 8, None),
        ("vgg11", {}, 0, "plan.recompute: no checkpoint of the model could be traced"),
    ],
)
def test_timm_checkpoints_what_its_switch_covers(
    name: str, args: dict[str, Any], again: int, note: str | None
) -> None:
    """A transformer and a residual network checkpoint each block."""
    model = {"source": "timm", "name": name, "args": args}
    training = {"global_batch": 2, "image": 32}
    asked = {"model": model, "training": training, "cluster": {"device": "h100"}}
    graph = _trace(Job.read({**asked, "plan": {"recompute": "full"}}), 2)
    at = [i for i, op in enumerate(graph.ops) if op.recomputed]
    regions = sum(1 for i in at if i - 1 not in at)
    assert regions == again
    notes = [one for one in graph.info.get("assumptions", ()) if "recompute" in one]
    assert [one.startswith(note or "") for one in notes] == ([True] if note else [])
