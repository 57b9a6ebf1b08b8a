"""Detection, segmentation, video and optical flow models of torchvision: the operators of a real step, from
targets and what is assumed of a network's outputs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from foretrain.capture.sources.models import load_model
from foretrain.capture.sources.zoo import import_zoo
from foretrain.capture.tracing.tracer import trace_step
from foretrain.errors import CaptureError, InputError
from foretrain.graph import OpGraph
from foretrain.workload import Model, Training, Workload

MODELS = import_zoo("torchvision").models


def workload(name: str, batch: int = 2, args: dict[str, Any] | None = None, **training: Any) -> Workload:
    return Workload(
        model=Model(source="torchvision", name=name, args=args or {}),
        training=Training(global_batch=batch, **training),
        base=Path(),
    )


def traced(name: str, batch: int = 2, args: dict[str, Any] | None = None, **training: Any) -> OpGraph:
    work = workload(name, batch, args, **training)
    loaded = load_model(work, batch)
    how = work.training
    return trace_step(
        loaded.module, loaded.inputs, loaded.loss, samples=batch, mode=how.mode, precision=how.precision,
        info={"notes": loaded.notes},
    )  # fmt: skip


def counts(graph: OpGraph) -> dict[str, int]:
    names = [op.operator.name for op in graph.ops]
    return {name: names.count(name) for name in names}


# The operators of a real step

SMALL = {"min_size": 96, "max_size": 128, "weights_backbone": None}
SAMPLED = {"box_batch_size_per_image": 32, "box_positive_fraction": 0.25, "rpn_post_nms_top_n_train": 64}


@pytest.fixture
def _real_operators() -> Any:
    """torchvision's compiled operators where they are missing, as far as FLOPs of the others depend on
    them."""
    if torch._C._dispatch_has_kernel_for_dispatch_key("torchvision::nms", "CPU"):
        yield
        return
    library = torch.library.Library("torchvision", "IMPL")

    def backward(
        gradient: torch.Tensor, _rois: Any, _scale: Any, _h: Any, _w: Any, *rest: Any
    ) -> torch.Tensor:
        return gradient.new_zeros(rest[:4])

    def forward(x: torch.Tensor, rois: torch.Tensor, _scale: Any, *rest: Any) -> torch.Tensor:
        return x.new_zeros((len(rois), x.shape[1], *rest[:2]))

    library.impl("nms", lambda _boxes, scores, _threshold: scores.argsort(descending=True), "CPU")
    library.impl("roi_align", forward, "CPU")
    library.impl("_roi_align_backward", backward, "CPU")
    yield
    library._destroy()


@pytest.mark.usefixtures("_real_operators")
@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("maskrcnn_resnet50_fpn", {**SMALL, **SAMPLED}),
        ("fcos_resnet50_fpn", SMALL),
    ],
)
def test_a_detectors_training_step_has_the_flops_of_a_real_one(name: str, args: dict[str, Any]) -> None:
    graph = traced(name, args=args, image=(3, 96, 128))
    torch.manual_seed(0)
    real = load_model(workload(name, args=args, image=(3, 96, 128)), 2, "cpu")
    with FlopCounterMode(display=False) as counted:
        assert real.loss is not None
        real.loss(real.module.train()(*real.inputs)).backward()
    assert graph.total("flops") == pytest.approx(counted.get_total_flops(), rel=0.02)


@pytest.mark.parametrize("name", ["fasterrcnn_resnet50_fpn", "retinanet_resnet50_fpn", "ssd300_vgg16"])
def test_a_detectors_inference_is_as_torchvision_states_it(name: str) -> None:
    stated = MODELS.get_model_weights(name).DEFAULT.meta
    graph = traced(name, batch=1, image=800, mode="infer")
    assert graph.parameters == stated["num_params"]
    assert graph.total("flops") / 2e9 == pytest.approx(stated["_ops"], rel=1e-3)


def test_what_data_decides_is_at_its_bound_and_said() -> None:
    graph = traced("maskrcnn_resnet50_fpn", args={**SMALL, **SAMPLED}, image=(3, 96, 128))
    rows = {
        op.layer: op.operator.inputs
        for op in reversed(graph.ops)
        if op.operator.name in ("convolution", "addmm")
    }
    assert (
        rows["roi_heads.mask_head.0.0"][0].shape[0] == 2 * 8
    )  # a quarter of 32 sampled proposals of two images lie on objects
    assert rows["roi_heads.box_head.fc6"][1].shape[0] == 2 * 32
    (note,) = [note for note in graph.info["notes"] if "objects per image" in note]
    assert "32 proposals per image are sampled, 8 of them on objects" in note
    assert graph.info["assumptions"] == ["non-maximum suppression is taken to keep every box"]


def test_operators_of_torchvision_have_costs() -> None:
    graph = traced(
        "fasterrcnn_resnet50_fpn", args={**SMALL, **SAMPLED}, image=(3, 96, 128), precision="amp-bf16"
    )
    ours = {
        op.operator.name: op.operator
        for op in graph.ops
        if op.operator.name.startswith("torchvision.") and op.operator.inputs[1].numel
    }
    assert set(ours) == {"torchvision.nms", "torchvision.roi_align", "torchvision._roi_align_backward"}
    assert all(operator.launches and operator.bytes for operator in ours.values())
    assert {spec.dtype for name in ours for spec in ours[name].inputs} == {"float32"}  # also under autocast


def test_a_pretrained_backbone_is_frozen_but_not_fetched() -> None:
    work = workload("fasterrcnn_resnet50_fpn", args={"weights": "DEFAULT"}, image=96)
    loaded = load_model(work, 2)
    assert "pretrained weights are not loaded: they change no shape" in loaded.notes
    assert any(
        note.startswith("222,400 parameters of the pretrained backbone are frozen") for note in loaded.notes
    )
    assert not next(loaded.module.parameters()).requires_grad


# Other tasks


@pytest.mark.parametrize(
    ("name", "args", "shape", "note"),
    [
        ("lraspp_mobilenet_v3_large", {}, (2, 3, 480, 480), "images of 480x480 pixels"),
        ("r3d_18", {"frames": 8}, (2, 3, 8, 112, 112), "clips of 8 frames of 112x112 pixels"),
        ("raft_small", {}, (2, 3, 368, 496), "pairs of images of 368x496 pixels"),
    ],
)
def test_a_task_has_inputs_of_its_own(
    name: str, args: dict[str, Any], shape: tuple[int, ...], note: str
) -> None:
    loaded = load_model(workload(name, args=args), 2)
    assert isinstance(loaded.inputs, tuple)
    assert loaded.inputs[0].shape == shape
    assert loaded.notes == (note,)
    assert traced(name, args=args).total("flops") > 0


def test_the_auxiliary_head_of_a_segmentation_model_is_trained() -> None:
    plain, with_head = (traced("fcn_resnet50", args={"aux_loss": head}, image=64) for head in (False, True))
    assert counts(with_head)["nll_loss2d_forward"] == 1 + counts(plain)["nll_loss2d_forward"]


@pytest.mark.parametrize(
    ("name", "args", "training", "message"),
    [
        (
            "mvit_v2_s",
            {"frames": 8},
            {},
            r"^model\.args\.frames: 8 is not 16, which is all that mvit_v2_s takes$",
        ),
        ("resnet18", {"frames": 8}, {}, r"^model\.args\.frames: 8, but resnet18 is no model of clips$"),
        ("r3d_18", {"frames": "8"}, {}, r"^model\.args\.frames: '8' is not a number of frames, 1 or more$"),
        ("vit_b_16", {}, {"image": 100}, r"^model vit_b_16: [^\n]*indivisible by patch size"),
        (
            "inception_v3",
            {},
            {"image": 32},
            r"^training\.image: \[3, 32, 32\] is not what inception_v3 takes",
        ),
    ],
)
def test_what_a_vision_model_cannot_take_is_one_line(
    name: str, args: dict[str, Any], training: dict[str, Any], message: str
) -> None:
    with pytest.raises((InputError, CaptureError), match=message):
        traced(name, args=args, **training)


DETECTOR = """
from torchvision.models.detection import fcos_resnet50_fpn


def mine(num_classes=4):
    return fcos_resnet50_fpn(
        weights=None, weights_backbone=None, num_classes=num_classes, min_size=96, max_size=128
    )
"""


def mine(folder: Path, **training: Any) -> Workload:
    (folder / "mine.py").write_text(DETECTOR)
    return Workload(
        model=Model(source="python", name="mine.py:mine"),
        training=Training(global_batch=2, **training),
        base=folder,
    )


@pytest.mark.parametrize("mode", ["train", "infer"])
def test_a_detector_that_ones_own_function_builds_is_given_what_a_named_one_is(
    tmp_path: Path, mode: Any
) -> None:
    def kernels(work: Workload) -> list[str]:
        loaded = load_model(work, 2)
        graph = trace_step(loaded.module, loaded.inputs, loaded.loss, samples=2, mode=mode)
        assert any("480x640" in note for note in loaded.notes)
        return [op.operator.name for op in graph.ops]

    args = {"weights_backbone": None, "num_classes": 4, "min_size": 96, "max_size": 128}
    assert kernels(mine(tmp_path, mode=mode)) == kernels(workload("fcos_resnet50_fpn", args=args, mode=mode))


def test_what_a_detector_of_ones_own_does_not_take_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"training\.sequence: not used by a detector"):
        load_model(mine(tmp_path, sequence=8), 2)
    with pytest.raises(InputError, match=r"training\.classes: 1003 is not"):
        load_model(mine(tmp_path, classes=1003), 2)
