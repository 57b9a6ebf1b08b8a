"""Says what an operator is, by its name: one table, from which the other parts derive classes of their own.

A name that is not in the table derives from one that is: ``x_`` (in place) and ``_foreach_x`` (over lists of
tensors) are as ``x``, ``_fused_x`` is a kernel of ``x``, ``x_backward`` is its gradient. Whatever is left is
of kind "unknown", and each user of the table says what that means to it.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Literal, get_args

Kind = Literal[
    "product", "batched product", "grouped product", "vector product",
    "convolution", "recurrence", "attention", "state space",
    "row norm", "channel norm", "vector norm", "softmax", "row loss", "pixel loss", "loss",
    "sum", "reduction", "scan", "sort", "histogram",
    "embedding", "gather", "scatter", "routing", "selection", "copy", "window", "pooling", "resampling",
    "interpolation",
    "activation", "pointwise", "fill", "fused", "optimizer", "transform", "solver",
    "collective", "wait", "view", "allocation", "unknown",
]  # fmt: skip
"""What the words leave open: a row norm works along the last dimensions, a channel norm along all but one.
A row loss picks a class for each row, a pixel loss for each place of an image. A selection is as long as
the data says. A window moves elements to where formulas say, or brings them back from fewer bits; an
interpolation weighs the neighbours of such a place. Routing is what frameworks have kernels of their own
for: on the rows that tokens send to experts, on keys and queries of latent attention. A state space is a
kernel of a layer that carries a state along the sequence. A fused operator is one that ``fusion.py`` or
``attention.py`` made."""
KINDS: tuple[Kind, ...] = get_args(Kind)

PRODUCTS: frozenset[Kind] = frozenset({"product", "batched product", "grouped product"})
"""Matrix products: of two matrices, of a batch of pairs, and of rows with the experts they are sent to."""
NORMS: frozenset[Kind] = frozenset({"row norm", "channel norm", "vector norm"})
PERMUTING: frozenset[Kind] = frozenset({"gather", "scatter", "sort", "scan", "histogram"})
"""What tokens are sorted by, and moved with, on their way to experts and back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """Says what one operator is."""

    kind: Kind
    backward: bool = False
    """It computes a gradient of what ``kind`` says."""
    multi_tensor: bool = False
    """One call works on lists of tensors, in chunks: foreach operators and fused optimizers."""
    random: bool = False
    """A second call gives another result."""
    library: Literal["", "cudnn", "flash", "efficient"] = ""
    """Whose kernel it is, where the name says so."""


@functools.cache
def traits(name: str) -> Traits:
    """The traits of an operator by its name, without namespace ``aten`` and overload.

    >>> traits("native_layer_norm_backward")
    Traits(kind='row norm', backward=True, multi_tensor=False, random=False, library='')
    >>> traits("_foreach_add_").kind, traits("_foreach_add_").multi_tensor
    ('pointwise', True)
    >>> traits("my_library.my_operator").kind
    'unknown'
    """
    if name in _KIND_OF:
        return Traits(
            kind=_KIND_OF[name],
            backward=name.endswith(("_backward", "_backward_data")),
            multi_tensor=_KIND_OF[name] == "optimizer",
            random=name in _RANDOM,
            library=_LIBRARY_OF.get(name, ""),
        )
    if name.endswith("_backward"):
        return dataclasses.replace(traits(name.removesuffix("_backward")), backward=True, random=False)
    if name.startswith("_foreach_"):
        return dataclasses.replace(traits(name.removeprefix("_foreach_")), multi_tensor=True)
    if name.startswith("_fused_"):
        return traits(name.removeprefix("_fused_"))
    return traits(name.removesuffix("_")) if name.endswith("_") else Traits(kind="unknown")


def is_product(name: str) -> bool:
    """Whether it multiplies matrices."""
    return traits(name).kind in PRODUCTS


def is_attention(name: str) -> bool:
    """Whether it is attention as one kernel, or its gradient."""
    return traits(name).kind == "attention"


def permutes(name: str) -> bool:
    """Whether it sorts, counts or moves elements by index, as the routing of tokens to experts does."""
    return traits(name).kind in PERMUTING


def moves_rows(name: str) -> bool:
    """Whether it is a framework's own kernel that copies rows of tokens."""
    return traits(name).kind == "routing"


def communicates(name: str) -> bool:
    """Whether devices exchange data in it."""
    return traits(name).kind == "collective"


def waits(name: str) -> bool:
    """Whether the host reads a result in it, and so waits for the device."""
    return traits(name).kind == "wait"


SCALED = "_scaled_mm"
"""The product of matrices in fp8 or fp4 with their scales. Its second operand tells the format: the first is
in bf16 where the kernel that casts it is timed with it."""


# The table

_NAMES: dict[Kind, str] = {
    "product": "mm addmm _scaled_mm",
    "batched product": "bmm baddbmm",
    "grouped product": "_grouped_mm _scaled_grouped_mm",
    "vector product": "mv addmv dot vdot addr ger",
    "convolution": "convolution",
    "recurrence": "_cudnn_rnn",
    "attention": """
        _scaled_dot_product_flash_attention _scaled_dot_product_efficient_attention
        _scaled_dot_product_cudnn_attention _flash_attention_forward _flash_attention_backward
        _efficient_attention_forward _efficient_attention_backward
        """,
    "state space": """
        mamba.causal_conv1d mamba.causal_conv1d_backward mamba.selective_scan mamba.selective_scan_backward
        mamba.chunk_cumsum mamba.chunk_state mamba.state_passing mamba.bmm_chunk mamba.chunk_scan
        mamba.chunk_state_backward mamba.chunk_scores_backward mamba.chunk_decay_backward
        mamba.bmm_chunk_backward mamba.gated_norm mamba.gated_norm_backward
        fla.l2norm fla.l2norm_backward fla.keys_by_keys fla.solve fla.representation fla.chunk_states
        fla.chunk_outputs fla.chunk_values_backward fla.chunk_states_backward fla.chunk_outputs_backward
        fla.representation_backward
        """,
    "row norm": "native_layer_norm rms_norm _fused_rms_norm",
    "channel norm": "native_batch_norm cudnn_batch_norm miopen_batch_norm native_group_norm",
    "vector norm": "norm linalg_vector_norm renorm _weight_norm_interface",
    "softmax": "_softmax _log_softmax _safe_softmax _softmax_backward_data _log_softmax_backward_data",
    "row loss": "nll_loss nll_loss_forward",
    "pixel loss": "nll_loss2d nll_loss2d_forward",
    "loss": """
        mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits
        kl_div soft_margin_loss multi_margin_loss multilabel_margin_loss_forward
        multilabel_margin_loss_backward
        """,
    "sum": "sum mean var var_mean std std_mean nansum",
    "reduction": """
        amax amin max min aminmax all any prod argmax argmin logsumexp median nanmedian mode count_nonzero
        trace te.amax
        """,
    "scan": "cumsum cumprod logcumsumexp cummax cummin",
    "sort": "sort argsort topk kthvalue msort torchvision.nms",
    "histogram": "histc bincount searchsorted bucketize",
    "embedding": "embedding embedding_dense_backward _embedding_bag _embedding_bag_dense_backward",
    "gather": "index _unsafe_index index_select gather take",
    "scatter": """
        index_put _unsafe_index_put index_add index_copy index_fill index_reduce scatter scatter_add
        scatter_reduce put masked_scatter
        """,
    "routing": """
        moe.permute moe.unpermute moe.sort_chunks moe.gate moe.add_bias moe.row_map moe.sum_rows
        mla.rotate mla.keys
        """,
    "selection": """
        masked_select nonzero nonzero_static unique _unique2 unique_dim unique_consecutive
        repeat_interleave multinomial randperm
        """,
    "copy": """
        clone copy _to_copy cat stack constant_pad_nd repeat roll flip tril triu diag_embed slice_backward
        select_backward diagonal_backward split_backward slice_scatter select_scatter diagonal_scatter
        as_strided_scatter pixel_shuffle pixel_unshuffle channel_shuffle native_channel_shuffle
        te.cast_transpose
        """,
    "window": """
        im2col col2im unfold_backward reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d
        replication_pad2d replication_pad3d dequantize_4bit dequantize_blockwise
        """,
    "pooling": """
        avg_pool2d avg_pool3d max_pool2d_with_indices max_pool3d_with_indices _adaptive_avg_pool2d
        _adaptive_avg_pool3d adaptive_max_pool2d adaptive_max_pool3d max_unpool2d max_unpool3d
        fractional_max_pool2d fractional_max_pool3d
        """,
    "resampling": """
        upsample_nearest1d upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d
        _upsample_nearest_exact2d _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d
        upsample_trilinear3d upsample_bicubic2d
        """,
    "interpolation": """
        _upsample_bilinear2d_aa _upsample_bicubic2d_aa grid_sampler_2d grid_sampler_3d
        affine_grid_generator torchvision.roi_align torchvision._roi_align_backward torchvision.roi_pool
        torchvision._roi_pool_backward torchvision.ps_roi_align torchvision._ps_roi_align_backward
        torchvision.ps_roi_pool torchvision._ps_roi_pool_backward torchvision.deform_conv2d
        torchvision._deform_conv2d_backward
        """,
    "activation": """
        relu relu6 gelu silu hardswish hardsigmoid hardtanh sigmoid tanh softplus elu selu celu mish
        leaky_relu log_sigmoid log_sigmoid_forward threshold hardshrink softshrink _prelu_kernel
        rrelu_with_noise glu
        """,
    "pointwise": """
        add sub rsub mul div addcmul addcdiv lerp pow square sqrt rsqrt reciprocal neg abs sign sgn exp
        exp2 expm1 log log2 log10 log1p xlogy logaddexp logaddexp2 logit erf erfc erfinv lgamma digamma
        sin cos tan asin acos atan atan2 sinh cosh asinh acosh atanh sinc hypot floor ceil round trunc
        frac fmod remainder floor_divide eq ne lt le gt ge isnan isinf isfinite isin logical_and
        logical_or logical_xor logical_not bitwise_and bitwise_or bitwise_xor bitwise_not
        bitwise_left_shift bitwise_right_shift __lshift__ __rshift__ __and__ __or__ __xor__ maximum
        minimum fmax fmin clamp clamp_min clamp_max nan_to_num where masked_fill heaviside copysign
        signbit native_dropout bernoulli _thnn_fused_lstm_cell _thnn_fused_gru_cell complex polar angle
        conj_physical _conj_physical real imag cross linalg_cross
        _amp_foreach_non_finite_check_and_unscale _amp_update_scale
        """,
    "fill": """
        zeros ones full zeros_like ones_like full_like new_zeros new_ones new_full scalar_tensor arange
        linspace logspace eye tril_indices triu_indices zero fill rand randn randint rand_like randn_like
        randint_like uniform normal log_normal exponential random cauchy geometric normal_functional
        """,
    "fused": "fused",
    "optimizer": "adam adamw sgd adagrad adamw_8bit adamw_32bit",
    "transform": "_fft_c2c _fft_r2c _fft_c2r",
    "solver": """
        linalg_inv_ex linalg_solve _linalg_solve_ex linalg_solve_triangular linalg_lu_factor_ex linalg_qr
        linalg_cholesky_ex cholesky_solve _linalg_svd _linalg_eigh _linalg_det _linalg_slogdet
        _cdist_forward _cdist _pdist_forward
        """,
    "collective": "all_reduce all_gather reduce_scatter all_to_all send_recv broadcast",
    "wait": "_local_scalar_dense moe.read_counts",
    "view": """
        view _unsafe_view reshape t transpose permute expand squeeze unsqueeze slice select split
        split_with_sizes unsafe_split unsafe_split_with_sizes unbind chunk narrow unfold diagonal
        as_strided alias detach view_as_real view_as_complex view_as expand_as movedim flatten unflatten
        _reshape_alias _conj _neg_view resolve_conj
        """,
    "allocation": """
        empty empty_like empty_strided empty_permuted new_empty new_empty_strided lift lift_fresh resize
        set detach_
        """,
}

_RANDOM = frozenset(
    """
    native_dropout bernoulli rand randn randint rand_like randn_like randint_like uniform normal
    log_normal exponential random cauchy geometric normal_functional multinomial randperm rrelu_with_noise
    """.split()
)
_LIBRARIES: dict[Literal["cudnn", "flash", "efficient"], str] = {
    "cudnn": "cudnn_batch_norm _cudnn_rnn _scaled_dot_product_cudnn_attention",
    "flash": "_scaled_dot_product_flash_attention _flash_attention_forward _flash_attention_backward",
    "efficient": """
        _scaled_dot_product_efficient_attention _efficient_attention_forward _efficient_attention_backward
        """,
}

_KIND_OF: dict[str, Kind] = {name: kind for kind, names in _NAMES.items() for name in names.split()}
_LIBRARY_OF = {name: library for library, names in _LIBRARIES.items() for name in names.split()}
