"""Describes matrix products and attention."""

from __future__ import annotations

from foretrain.costs.base import Call
from foretrain.costs.features.scene import LEAST_S, PRODUCT, Scene, alignment, log, log_us
from foretrain.graph import ITEM_BYTES, TensorSpec
from foretrain.graph.ir import PACKED
from foretrain.graph.opset import traits


def _transposed(spec: TensorSpec) -> bool:
    return spec.strides is not None and len(spec.shape) >= 2 and spec.strides[-2] == 1 and spec.shape[-2] > 1


def products(scene: Scene) -> list[float]:
    """mm, addmm, bmm, baddbmm: the last two inputs are the matrices."""
    inputs = scene.call.inputs
    if is_grouped(scene.call):
        return _grouped(scene)
    a, b = inputs[-2], inputs[-1]
    batched = len(a.shape) == 3
    m, k, n = a.shape[-2], a.shape[-1], b.shape[-1]
    marks = (_transposed(a), _transposed(b), len(inputs) > 2, batched)
    return [
        *scene.product(m, n, k, a.shape[0] if batched else 1),
        *map(float, marks),
        *map(alignment, (m, n, k)),
    ]


def is_grouped(call: Call) -> bool:
    return traits(call.name).kind == "grouped product"


def grouped_sizes(call: Call) -> tuple[int, int, int, int]:
    """Rows, columns and inner size of the product of one expert where all have as many rows, and experts.

    One kernel runs the tiles of all experts one after another: it fills a device as a batched product does.
    """
    (a, b), experts = call.inputs[:2], max(1, call.inputs[-1].shape[0])
    m, k, n = a.shape[-2], a.shape[-1], b.shape[-1]
    if len(a.shape) == 2:
        return (m, n, -(-k // experts), experts) if len(b.shape) == 2 else (-(-m // experts), n, k, experts)
    return (m, -(-n // experts), k, experts) if len(b.shape) == 2 else (m, n, k, experts)


def _grouped(scene: Scene) -> list[float]:
    m, n, k, experts = grouped_sizes(scene.call)
    a, b = scene.call.inputs[:2]
    marks = (_transposed(a), _transposed(b), False, experts > 1)
    return [*scene.product(m, n, k, experts), *map(float, marks), *map(alignment, (m, n, k))]


PRODUCT_COLUMNS = (*PRODUCT, *"transposed_a transposed_b bias batched align_m align_n align_k".split())


def scaled_products(scene: Scene) -> list[float]:
    """_scaled_mm: two matrices in fp8 or fp4, then their scales; products of experts in fp8 likewise."""
    call = scene.call
    a, b = call.inputs[:2]
    if is_grouped(call):
        m, n, k, experts = grouped_sizes(call)
    else:
        m, k, n, experts = a.shape[0], b.shape[0] * (2 if b.dtype == PACKED else 1), b.shape[1], 1
    cached_s = max(scene.cached_s(), LEAST_S)
    return [
        *scene.product(m, n, k, experts),
        log_us(cached_s),
        log(max(scene.compute_s, LEAST_S) / cached_s),
        *map(alignment, (m, n, k)),
        _BY_ROW if is_grouped(call) else _scaling(call),
        float(ITEM_BYTES[a.dtype] > 1 and not is_grouped(call)),
        float(bool(call.args.get("use_fast_accum"))),
        float(_LIBRARIES.index(call.args.get("library", "cublas"))),
    ]


def _scaling(call: Call) -> float:
    """Tell how finely a product is scaled: by tensor, by row, by 128 numbers, by 16 of four bits. Of 32
    numbers in fp8 the units that multiply take the scales, so that it costs what one scale for all does."""
    a, scale = call.inputs[0], call.inputs[2] if len(call.inputs) > 2 else None
    if scale is None or scale.numel <= 1:
        return 1.0
    if scale.numel <= a.shape[0]:
        return _BY_ROW
    if scale.numel * 32 < a.numel:
        return 3.0
    return 4.0 if a.dtype == PACKED else 1.0


_BY_ROW = 2.0
_LIBRARIES = ("cublas", "cutlass", "deepgemm", "cutedsl")
"""Whose kernel a scaled product is: in ``args`` where it is not torch's own."""
SCALED_COLUMNS = (
    *PRODUCT,
    *"cached cached_balance align_m align_n align_k scaling casts fast library".split(),
)


def attention(scene: Scene) -> list[float]:
    """Fused attention: its sizes, what it masks and drops, and how it fills the device."""
    call, of = scene.call, traits(scene.call.name)
    first = int(of.backward)
    query, key = call.inputs[first], call.inputs[first + 1]
    batch, heads, rows, width = query.shape[0], query.shape[1], query.shape[-2], query.shape[-1]
    waves, fill = scene.waves(rows, 128, batch * heads, (128, 128))
    return [
        *map(log, (batch * heads, rows, key.shape[-2], width, heads / key.shape[1])),
        alignment(width),
        float(bool(call.args.get("is_causal"))),
        float(call.args.get("attn_bias") is not None),
        float(of.library == "efficient"),
        float(of.library == "cudnn"),
        log(waves),
        fill,
        float(query.strides is not None),
        float(bool(call.args.get("dropout_p"))),
    ]


ATTENTION_COLUMNS = tuple(
    "heads rows keys width shared_heads align_width causal biased efficient cudnn waves fill strided "
    "dropout".split()
)
