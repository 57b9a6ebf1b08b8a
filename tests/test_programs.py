"""Whole training steps as users write them: scripts, step functions, trainers, and what they stand on."""

from __future__ import annotations

import gc
import importlib.util
import os
import signal
import sys
import textwrap
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

import foretrain
from foretrain.capture import capture
from foretrain.capture.programs import launch, settings
from foretrain.capture.programs.targets import kind_of, pick
from foretrain.errors import CaptureError, ForetrainError, InputError
from foretrain.graph import OpGraph
from foretrain.workload import Model, Training, Workload

HEAD = """
import torch, torch.nn as nn, torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
device = "cuda" if torch.cuda.is_available() else "cpu"
"""
DATA = """
data = TensorDataset(torch.randn(96, 16), torch.randint(0, 4, (96,)))
loader = DataLoader(data, batch_size=8, shuffle=True, num_workers=2, pin_memory=True)
"""
NET = """
class Net(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, width), nn.BatchNorm1d(width), nn.ReLU())
        self.head = nn.Linear(width, 4)
    def forward(self, x):
        return self.head(self.body(x))
"""
WEIGHTS = 16 * 32 + 32 + 2 * 32 + 32 * 4 + 4


@pytest.fixture(autouse=True, scope="module")
def _nothing_left_by_others() -> None:
    """To trace a program is to look through all objects for tensors: not through those of other tests."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORETRAIN_CACHE", str(tmp_path / "cache"))
    settings._traced.clear()


def written(folder: Path, text: str, name: str = "train.py") -> Path:
    path = folder / name
    path.write_text(HEAD + textwrap.dedent(text))
    return path


def traced(path: Path, target: str = "", samples: int | None = None, **training: object) -> OpGraph:
    name = f"{path}:{target}" if target else str(path)
    asked = Training(**{"global_batch": 8, **training})  # type: ignore[arg-type]
    return settings.trace(Workload(model=Model(source="python", name=name), training=asked), samples)


def calls(graph: OpGraph, phase: str | None = None) -> Counter[str]:
    return Counter(op.operator.name for op in graph.ops if phase in (None, op.phase))


SCRIPT = f"""
{DATA}{NET}
def main():
    model = Net().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    for epoch in range(5):
        for x, y in loader:
            x, y = x.to(device), y.to(device)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            print(f"loss {{loss.item():.3f}}")
if __name__ == "__main__":
    main()
"""


def test_a_script_is_run_until_a_whole_step_was_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    graph = traced(written(tmp_path, SCRIPT))
    assert (graph.samples, graph.parameters) == (8, WEIGHTS)
    assert graph.info["training"] == {
        "global_batch": 8, "precision": "fp32", "optimizer": "adamw", "samples": 96,
    }  # fmt: skip
    assert calls(graph, "forward")["addmm"] == 2
    assert calls(graph, "backward")["mm"] == 3, "the data needs no gradient"
    update = calls(graph, "optimizer")
    assert update["_foreach_norm"] == update["_foreach_addcdiv_"] == 1, "clipping belongs to the update"
    assert capsys.readouterr().out == "", "what a script prints is not the forecast"


def test_a_step_leaves_its_results_to_the_next(tmp_path: Path) -> None:
    """Gradients and the last output live until the next step lets them go: one of each, not two."""
    graph = traced(written(tmp_path, SCRIPT))
    gradients = [buffer for buffer in graph.buffers if buffer.category == "gradients" and buffer.size_bytes]
    assert sum(buffer.size_bytes for buffer in gradients) == 4 * WEIGHTS
    assert all(buffer.born >= 0 and buffer.dies > len(graph.ops) for buffer in gradients)
    state = sum(buffer.size_bytes for buffer in graph.buffers if buffer.category == "optimizer_state")
    assert state == 2 * 4 * WEIGHTS


def test_the_loader_gives_the_batch_that_the_job_asks_for(tmp_path: Path) -> None:
    looks = "\nfor x, y in DataLoader(TensorDataset(data.tensors[0][:8], data.tensors[1][:8])):\n    break\n"
    path = written(tmp_path, SCRIPT.replace("def main", f"{looks}def main"))
    assert traced(path).info["training"]["samples"] == 96, "not of the data that is only looked at"
    assert traced(path, samples=24).samples == 24
    forecast = foretrain.predict(str(path), devices=4, device="h100")
    assert forecast.job.workload.training.global_batch == 32, "each device takes what the script does"
    assert forecast.job.micro_batch == 8
    assert foretrain.predict(str(path), batch=64).job.workload.training.global_batch == 64


@pytest.mark.parametrize("batch", ["8", "None"])
def test_data_without_a_length_is_drawn_from(tmp_path: Path, batch: str) -> None:
    text = f"""{NET}
ROWS = [8] if "{batch}" == "None" else []
class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        while True:
            yield torch.randn(*ROWS, 16)
net = Net().to(device)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for x in DataLoader(Stream(), batch_size={batch}):
    assert x.to(device).is_cuda and net.head.weight.device.type == "cuda"
    net(x.to(device)).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
    assert traced(written(tmp_path, text)).samples == 8


def test_a_program_decides_its_training(tmp_path: Path) -> None:
    path = written(tmp_path, SCRIPT)
    with pytest.raises(InputError, match=r"training.optimizer: 'sgd', but train.py trains with 'adamw'"):
        foretrain.predict(str(path), optimizer="sgd")
    with pytest.raises(ForetrainError, match=r"plan.tensor: 2, but train.py is a whole program"):
        foretrain.predict(str(path), devices=2, tensor=2)
    with pytest.raises(InputError, match=r"training.mode: 'infer', but train.py trains"):
        foretrain.predict(str(path), mode="infer")
    cast = foretrain.predict(str(path), precision="amp-bf16")
    assert cast.job.workload.training.precision == "amp-bf16"


def test_settings_are_kept_beside_the_graphs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path, SCRIPT)
    first = foretrain.predict(str(path))
    settings._traced.clear()
    monkeypatch.setattr(launch, "trace_program", None)
    assert foretrain.predict(str(path)).quantities == first.quantities
    path.write_text(path.read_text().replace("batch_size=8", "batch_size=12"))
    with pytest.raises(TypeError):
        foretrain.predict(str(path))


def test_mixed_precision_accumulation_and_averages(tmp_path: Path) -> None:
    path = written(tmp_path, f"""
{DATA}{NET}
model = torch.compile(Net().to(device), mode="reduce-overhead")
averaged = torch.optim.swa_utils.AveragedModel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scaler = torch.amp.GradScaler("cuda")
for epoch in range(9):
    for i, (x, y) in enumerate(loader):
        with torch.autocast("cuda", dtype=torch.float16):
            loss = F.cross_entropy(model(x.to(device)), y.to(device)) / 4
        scaler.scale(loss).backward()
        if (i + 1) % 4 == 0:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
            averaged.update_parameters(model)
""")  # fmt: skip
    graph = traced(path)
    assert graph.samples == 32, "four batches of eight"
    assert graph.info["training"]["precision"] == "amp-fp16"
    assert graph.info["training"]["compile"] == "reduce-overhead"
    assert calls(graph)["_amp_foreach_non_finite_check_and_unscale_"] == 1
    assert calls(graph, "forward")["addmm"] == 8
    assert graph.parameters == WEIGHTS, "averages are no parameters of the model"
    halves = {op.operator.inputs[1].dtype for op in graph.ops if op.operator.name == "addmm"}
    assert halves == {"float16"}


GAN = f"""
{NET}
generator, critic = nn.Linear(4, 16).to(device), Net().to(device)
g_optimizer = torch.optim.Adam(generator.parameters())
d_optimizer = torch.optim.Adam(critic.parameters())
for step in range(100):
    for _ in range(3):
        real, noise = torch.randn(8, 16, device=device), torch.randn(8, 4, device=device)
        with torch.no_grad():
            fake = generator(noise)
        mixed = torch.lerp(real, fake, torch.rand(8, 1, device=device)).requires_grad_(True)
        slope, = torch.autograd.grad(critic(mixed).sum(), mixed, create_graph=True)
        loss = critic(fake).mean() - critic(real).mean() + 10 * (slope.norm(dim=1) - 1).pow(2).mean()
        d_optimizer.zero_grad()
        loss.backward()
        d_optimizer.step()
    loss = -critic(generator(torch.randn(8, 4, device=device))).mean()
    g_optimizer.zero_grad()
    loss.backward()
    g_optimizer.step()
"""


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_script_checkpoints_its_activations(tmp_path: Path, reentrant: bool) -> None:
    text = f"""
        import torch
        from torch.utils.checkpoint import checkpoint
        first, body, head = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8), torch.nn.Linear(8, 4)
        net = torch.nn.ModuleList([first, body, head]).cuda()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(3):
            with torch.autocast("cuda", torch.bfloat16):
                x = first(torch.ones(16, 8, device="cuda"))
                x = checkpoint(lambda x: torch.tanh(torch.nn.functional.linear(x, body.weight)), x, use_reentrant={reentrant})
                loss = head(x).sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    """
    graph = traced(written(tmp_path, text))
    again = [op for op in graph.ops if op.recomputed and op.operator.launches]
    assert [op.operator.name for op in again] == ["_to_copy", "mm", "tanh"]
    assert {spec.dtype for spec in again[1].operator.inputs} == {"bfloat16"}
    assert graph.samples == 16


def test_optimizers_that_take_turns_make_one_step_together(tmp_path: Path) -> None:
    graph = traced(written(tmp_path, GAN))
    updates = [op for op in graph.ops if op.operator.name == "_foreach_addcdiv_"]
    assert len(updates) == 4, "three of the critic, one of the generator"
    assert graph.samples == 8
    assert graph.parameters == WEIGHTS + 4 * 16 + 16


@pytest.mark.parametrize(
    ("target", "text"),
    [
        ("train_step", "def train_step():\n    x, y = torch.randn(8, 16), torch.randint(0, 4, (8,))\n    BODY"),
        ("train_step", "def train_step(x, y):\n    BODY"),
        ("step", "def step(model, batch, optimizer):\n    x, y = batch\n    BODY"),
        ("make", "def make(batch):\n  x, y = torch.randn(batch, 16), torch.randint(0, 4, (batch,))\n  def step():\n    BODY\n  return step"),
    ],
)  # fmt: skip
def test_step_functions(tmp_path: Path, target: str, text: str) -> None:
    body = "\n    ".join(
        ("loss = F.cross_entropy(model(x), y)", "optimizer.zero_grad()", "loss.backward()", "optimizer.step()",
         "return loss.item()")
    )  # fmt: skip
    made = "model = Net().to(device)\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
    path = written(tmp_path, f"{DATA}{NET}{made}{text.replace('BODY', body)}")
    assert kind_of(path, target) == "step"
    graph = traced(path, target)
    assert graph.samples == 8
    assert graph.info["training"]["optimizer"] == "sgd-plain"
    assert calls(graph, "forward")["addmm"] == 2


def test_a_function_that_returns_its_loss_is_trained_by_the_job(tmp_path: Path) -> None:
    text = "model = Net()\ndef training_step(x, y):\n    loss = F.cross_entropy(model(x), y)\n    loss.backward\n    return loss\n"
    path = written(tmp_path, f"{DATA}{NET}{text}")
    assert kind_of(path, "training_step") == "builder", "its text makes no backward pass"
    text = text.replace("    loss.backward\n", "    if False:\n        loss.backward()\n")
    graph = traced(written(tmp_path, f"{DATA}{NET}{text}"), "training_step", optimizer="adamw")
    assert graph.info["training"]["optimizer"] == "adamw"
    assert calls(graph, "optimizer")["_foreach_addcdiv_"] == 1


def test_one_name_of_a_file_is_picked(tmp_path: Path) -> None:
    assert pick(written(tmp_path, SCRIPT)) == ""
    assert (
        pick(written(tmp_path, f"{NET}def make(batch):\n    return Net(), torch.randn(batch, 16)\n"))
        == "make"
    )
    assert (
        pick(
            written(
                tmp_path,
                f"{NET}class Whole(Net):\n    pass\n",
            )
        )
        == "Whole"
    )
    assert pick(written(tmp_path, "def run(data):\n    Trainer(data).train()\nrun(1)\n")) == ""
    with pytest.raises(InputError, match=r"several that may be meant: train.py:make, train.py:build"):
        pick(written(tmp_path, "def make(batch):\n    return 1\ndef build(batch):\n    return 2\n"))
    with pytest.raises(InputError, match=r"defines no model, training step or trainer"):
        pick(written(tmp_path, "x = 1\n"))


def test_a_function_without_a_batch_brings_its_own(tmp_path: Path) -> None:
    path = written(tmp_path, f"{NET}def make():\n    return Net(), (torch.randn(12, 16),)\n")
    assert foretrain.predict(f"{path}:make").job.workload.training.global_batch == 12


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x = 1\nfor _ in range(3):\n    loss.backward()\n", "NameError: name 'loss' is not defined"),
        (SCRIPT.replace("range(5)", "range(0)"), "ended after no optimizer steps"),
        (SCRIPT.replace("main()\n\"\"\"", "").replace("    model = Net()", "    raise SystemExit(3)\n    model = Net()"),
         "it ended itself with exit code 3"),
        (SCRIPT.replace("model(x)", "model(x[:, 3])"), "(at "),
    ],
)  # fmt: skip
def test_what_goes_wrong_in_a_script_is_one_line(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(CaptureError) as error:
        traced(written(tmp_path, text))
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_what_a_program_sets_ends_with_it(tmp_path: Path) -> None:
    path = written(tmp_path, "torch.set_float32_matmul_precision('high')\ntorch.manual_seed(3)\n" + SCRIPT)
    torch.manual_seed(11)
    expected = torch.random.get_rng_state()
    assert traced(path).info["training"]["precision"] == "tf32"
    assert torch.get_float32_matmul_precision() == "highest"
    assert torch.equal(torch.random.get_rng_state(), expected)
    assert not torch.cuda.is_available() or torch.version.cuda
    assert torch.compile is not None
    assert not isinstance(torch.nn.Parameter(torch.ones(2)).device, str)
    assert torch.nn.Parameter(torch.ones(2)).device.type == "cpu"


def test_control_flow_that_depends_on_data_is_followed() -> None:
    class Deep(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
                if x.abs().mean() < 100.0:
                    break
            return x[x[:, 0] > x[:, 0].mean()]

    forecast = foretrain.predict(Deep(), (torch.randn(16, 8),), lambda rows: rows.sum())
    assert any("control flow depends on data" in note for note in forecast.assumptions)
    assert forecast.step is not None
    assert sum(op.operator.name == "addmm" for op in forecast.step.layout.graph.ops) == 1


def test_losses_as_people_write_them() -> None:
    """Targets that are closed over, made inside, of numpy; masks; a module that returns its loss."""
    import dataclasses

    import numpy as np

    net = torch.nn.Sequential(torch.nn.Linear(16, 4))
    x, y = torch.randn(8, 16), torch.randint(0, 4, (8,))
    cross_entropy = torch.nn.functional.cross_entropy

    class Own(torch.nn.Module):
        mask: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Linear(16, 4)
            self.register_buffer("mask", torch.tril(torch.ones(4, 4)).bool())

        def forward(self, batch: Any) -> object:
            rows, labels = (batch.x, batch.y) if isinstance(batch, Batch) else batch
            out = self.net(rows)
            if self.mask.all():
                raise AssertionError("the mask has lost its values")
            return {"logits": out, "loss": cross_entropy(out, labels)}

    @dataclasses.dataclass
    class Batch:
        x: torch.Tensor
        y: torch.Tensor

    losses = [
        lambda out: cross_entropy(out, y),
        lambda out: cross_entropy(out, torch.randint(0, 4, (8,))),
        lambda out: ((out - torch.nn.functional.one_hot(y, 4)) ** 2).mean(),
        lambda out: torch.nn.functional.mse_loss(out, torch.from_numpy(np.ones((8, 4), "float32"))),
        lambda out: out[y > 1].sum(),
        lambda out: (out * torch.tril(torch.ones(8, 4))).sum(),
        lambda out: torch.nn.CrossEntropyLoss(weight=torch.ones(4))(out, y),
    ]  # fmt: skip
    for loss in losses:
        assert foretrain.predict(net, (x,), loss)["step_time_s"].median > 0
    for batch in (Batch(x, y), (x, y)):
        graph = capture(Own(), (batch,))
        assert graph.samples == 8
        assert any(op.operator.name == "nll_loss_backward" for op in graph.ops)


@pytest.mark.skipif(importlib.util.find_spec("torchvision") is None, reason="torchvision is not installed")
def test_downloads_are_stood_in_for(tmp_path: Path) -> None:
    path = written(tmp_path, """
import torchvision
from torchvision import transforms
data = torchvision.datasets.CIFAR10("data", train=True, download=True, transform=transforms.ToTensor())
assert torchvision.datasets.FashionMNIST("data", download=True).class_to_idx
folder = torchvision.datasets.ImageFolder("not/here", transforms.ToTensor())
assert len(folder.classes) == 1000 and folder[0][0].shape[0] == 3
model = torchvision.models.resnet18(weights="DEFAULT")
model.fc = nn.Linear(512, 10)
model.to(device)
optimizer = torch.optim.SGD(model.fc.parameters(), lr=0.1)
for x, y in DataLoader(data, batch_size=4):
    optimizer.zero_grad()
    F.cross_entropy(model(x.to(device)), y.to(device)).backward()
    optimizer.step()
""")  # fmt: skip
    graph = traced(path)
    assert graph.info["training"]["samples"] == 50_000
    assert any("CIFAR10 is not here" in note for note in graph.info["assumptions"])
    assert sum(weight.elements for weight in graph.weights if weight.trainable) == 5130
    assert graph.parameters == 11_181_642


def test_lightning_modules(tmp_path: Path) -> None:
    pytest.importorskip("lightning_utilities")
    path = written(tmp_path, f"""
import lightning as L
{DATA}{NET}
class Lit(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = Net()
    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.log("loss", loss)
        return loss
    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters())
        total = self.trainer.estimated_stepping_batches
        return {{"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=total)}}
    def train_dataloader(self):
        return loader
if __name__ == "__main__":
    L.Trainer(max_epochs=7, precision="bf16-mixed", accumulate_grad_batches=2, accelerator="gpu", devices=4).fit(Lit())
""")  # fmt: skip
    assert kind_of(path, "Lit") == "lightning"
    graph = traced(path, "Lit")
    assert (graph.samples, graph.info["training"]["optimizer"]) == (8, "adamw")
    whole = traced(path)
    assert whole.samples == 16
    assert whole.info["training"]["epochs"] == 7
    assert whole.info["training"]["precision"] == "amp-bf16"


def test_a_hugging_face_trainer(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    path = written(tmp_path, f"""
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
class Texts(torch.utils.data.Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        ids = torch.randint(0, 100, (16,))
        return {{"input_ids": ids, "labels": ids}}
model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=100, n_positions=16))
arguments = TrainingArguments(output_dir={str(tmp_path)!r}, per_device_train_batch_size=4, bf16=True, max_steps=50,
                              gradient_accumulation_steps=2, gradient_checkpointing=True, report_to=[])
trainer = Trainer(model=model, args=arguments, train_dataset=Texts())
if __name__ == "__main__":
    trainer.train()
""")  # fmt: skip
    assert kind_of(path, "trainer") == "trainer"
    graph = traced(path, "trainer")
    assert (graph.samples, graph.tokens) == (8, 128)
    assert graph.info["training"]["steps"] == 50
    assert graph.info["training"]["precision"] == "amp-bf16"
    again = sum(op.phase == "backward" and op.operator.name == "addmm" for op in graph.ops)
    assert again >= 2 * 2 * 4, "the layers are computed again in the backward pass"


STEPS = """
def steps(model, optimizer, place):
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x.to(place)), y.to(place)).backward()
        optimizer.step()
"""


def test_an_optimizer_without_a_name_is_said(tmp_path: Path) -> None:
    path = written(tmp_path, f"""
import signal
{DATA}{NET}{STEPS}
class Lion(torch.optim.SGD):
    pass
signal.signal(signal.SIGTERM, lambda *_: None)
model = Net().cuda()
steps(model, Lion(model.parameters(), 0.1), "cuda")
""")  # fmt: skip
    before = signal.getsignal(signal.SIGTERM)
    assert any("its optimizer is Lion" in note for note in traced(path).info["assumptions"])
    assert signal.getsignal(signal.SIGTERM) is before


def test_nothing_of_the_users_is_written_or_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = f"""
import os, pickle, shutil, sys
from pathlib import Path
{DATA}{NET}{STEPS}
shutil.rmtree("runs")
out = Path("runs") / "one"
out.mkdir(parents=True, exist_ok=True)
(out / "args.txt").write_text("x")
with open("metrics.csv", "wb") as metrics:
    pickle.dump([1], metrics)
with open("log.txt", "a") as log:
    log.write("b")
assert Path("log.txt").read_text() == "ab" and (out / "args.txt").exists() and os.listdir(out) == ["args.txt"]
os.rename(out / "args.txt", out / "moved.txt")
os.remove("log.txt")
os.environ["OF_THE_SCRIPT"] = "1"
sys.path.append("of_the_script")
torch.set_default_device("cuda")
os.chdir("/")
assert os.path.isabs(__file__)
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-3), capturable=True)
torch.set_default_device(None)
steps(model, optimizer, torch.accelerator.current_accelerator())
"""
    written(tmp_path, text)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "old.pt").write_text("kept")
    (tmp_path / "metrics.csv").write_text("kept")
    (tmp_path / "log.txt").write_text("a")
    monkeypatch.chdir(tmp_path)
    before = {path: path.is_file() and path.read_text() for path in tmp_path.rglob("*")}
    folders, place, variables = list(sys.path), Path.cwd(), dict(os.environ)
    assert traced(Path("train.py")).parameters == WEIGHTS
    assert {path: path.is_file() and path.read_text() for path in tmp_path.rglob("*")} == before
    assert (sys.path, Path.cwd(), dict(os.environ)) == (folders, place, variables)
    assert torch.empty(0).device.type == "cpu"


def test_a_script_of_a_package_is_run_as_its_module(tmp_path: Path) -> None:
    package = tmp_path / "package"
    (package / "parts").mkdir(parents=True)
    (package / "__init__.py").touch()
    written(package / "parts", NET, "nets.py")
    text = f"from .parts.nets import Net\nfrom package.parts import nets\n{DATA}{STEPS}"
    path = written(
        package, f"{text}model = Net().cuda()\nsteps(model, torch.optim.Adam(model.parameters()), 'cuda')\n"
    )
    assert traced(path).parameters == WEIGHTS


def test_scripts_for_several_processes_run_as_one(tmp_path: Path) -> None:
    path = written(tmp_path, f"""
import os
import torch.distributed as dist, torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
{DATA}{NET}{STEPS}
def worker(rank, ways):
    dist.init_process_group("nccl", rank=rank, world_size=ways)
    model = WRAPPED
    x = torch.randn(4, 4).cuda()
    x.record_stream(torch.cuda.current_stream())
    steps(model, torch.optim.Adam(model.parameters()), rank)
if __name__ == "__main__":
    mp.spawn(worker, args=(torch.cuda.device_count(),), nprocs=torch.cuda.device_count())
""")  # fmt: skip
    text = path.read_text()
    wrapped = {
        "DistributedDataParallel(Net().to(rank), device_ids=[rank])": "fp32",
        "FullyShardedDataParallel(Net().to(rank), mixed_precision=MixedPrecision(torch.bfloat16))": "amp-bf16",
        'fully_shard(Net().to(rank), mesh=init_device_mesh("cuda", (ways,)), '
        "mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))": "amp-bf16",
    }
    for code, precision in wrapped.items():
        path.write_text(text.replace("WRAPPED", code))
        assert pick(path) == "", "the function that is handed to spawn trains"
        graph = traced(path)
        assert (graph.samples, graph.parameters) == (8, WEIGHTS)
        assert graph.info["training"]["precision"] == precision
    assert not torch.distributed.is_initialized()


def test_copies_that_a_step_makes_and_drops_are_counted_once(tmp_path: Path) -> None:
    """The inner loop of Reptile: a new copy, with a new optimizer, in every step."""
    path = written(tmp_path, f"""
import copy
{NET}
model = Net().cuda()
meta = torch.optim.SGD(model.parameters(), 1.0)
for _ in range(20):
    fast = copy.deepcopy(model)
    inner = torch.optim.SGD(fast.parameters(), 0.02)
    for _ in range(5):
        inner.zero_grad()
        fast(torch.randn(10, 16, device="cuda")).sum().backward()
        inner.step()
    for slow, quick in zip(model.parameters(), fast.parameters()):
        slow.grad = slow.data - quick.data
    meta.step()
""")  # fmt: skip
    graph = traced(path)
    assert graph.samples == 50
    assert graph.parameters == 2 * WEIGHTS


def test_a_missing_package_is_one_line(tmp_path: Path) -> None:
    path = written(tmp_path, "import not_here_at_all\nloss.backward()\n")
    with pytest.raises(
        CaptureError, match=r"model train.py: No module named 'not_here_at_all' \(at .*train.py:5\)"
    ):
        traced(path)


def test_a_program_that_waits_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "LONGEST_S", 0.5)
    text = "import os, time\nwhile not os.path.exists('ready'):\n    time.sleep(60)\nloss.backward()\n"
    with pytest.raises(CaptureError, match=r"^model train.py: no whole step within 0 s"):
        traced(written(tmp_path, text))


def test_trackers_and_checkpoints_that_are_not_here(tmp_path: Path) -> None:
    path = written(tmp_path, f"""
import wandb
from torch.utils.tensorboard import SummaryWriter
from torch.profiler import ProfilerActivity, profile
{DATA}{NET}{STEPS}
run = wandb.init(project="p", config={{"lr": 0.1}})
writer = SummaryWriter("logs")
kept = torch.load("missing.pt", map_location="cuda")
model = Net().cuda()
model.load_state_dict({{name.replace("module.", ""): value for name, value in kept["model"].items()}})
optimizer = torch.optim.Adam(model.parameters(), lr=wandb.config.lr)
optimizer.load_state_dict(kept["optimizer"])
wandb.watch(model)
first = kept["epoch"] + 1
with profile(activities=[ProfilerActivity.CUDA]) as profiler:
    for epoch in range(first, 3):
        wandb.log({{"epoch": epoch}})
        writer.add_scalar("epoch", epoch)
        profiler.step()
        steps(model, optimizer, "cuda")
""")  # fmt: skip
    modules = set(sys.modules)
    graph = traced(path)
    assert graph.info["training"]["optimizer"] == "adam"
    assert graph.info["assumptions"] == ["missing.pt is not here: the weights in it do not change a step"]
    assert not any(name.startswith("wandb") for name in set(sys.modules) - modules)


def test_hooks_of_a_lightning_module_are_called(tmp_path: Path) -> None:
    pytest.importorskip("lightning_utilities")
    path = written(tmp_path, f"""
import lightning as L
from lightning.pytorch.loggers import WandbLogger
{DATA}{NET}
class Lit(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = Net()
    def setup(self, stage):
        self.loader = loader
    def train_dataloader(self):
        return self.loader
    def on_train_start(self):
        self.scale = 2.0
    def on_after_batch_transfer(self, batch, index):
        return batch[0] * self.scale, batch[1]
    def on_train_batch_start(self, batch, number):
        self.rate = self.trainer.optimizers[0].param_groups[0]["lr"]
    def training_step(self, batch):
        self.logger.experiment.add_scalar("rate", self.rate)
        return F.cross_entropy(self.net(batch[0]), batch[1])
    def on_before_zero_grad(self, optimizer):
        self.seen = True
    def on_train_batch_end(self, output, batch, number):
        assert self.seen
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), 0.1)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.trainer.max_epochs)]
L.Trainer(max_epochs=3, logger=WandbLogger(project="p")).fit(Lit())
""")  # fmt: skip
    graph = traced(path)
    assert graph.samples == 8
    assert calls(graph, "forward")["mul"] == 1


def test_a_program_may_trace_its_model_itself(tmp_path: Path) -> None:
    """torch.fx looks at all functions of torch, those that stand in for others too."""
    path = written(
        tmp_path,
        f"{DATA}{NET}"
        + """
model = torch.fx.symbolic_trace(Net()).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in loader:
    F.cross_entropy(model(x.to(device)), y.to(device)).backward()
    torch.overrides.get_testing_overrides()
    optimizer.step()
    optimizer.zero_grad()
""",
    )
    assert traced(path).parameters == WEIGHTS
