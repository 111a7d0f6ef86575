"""Operations by their plain names, and what sort of work each is.

Names follow ATen, the operator library behind ``torch.export``, with its historical spellings smoothed out.
"""

from __future__ import annotations

PLAIN_NAMES = {
    "clone": "copy",
    "convolution": "conv",
    "cudnn_batch_norm": "batch_norm",
    "grid_sampler": "grid_sample",
    "grid_sampler_2d": "grid_sample",
    "grid_sampler_3d": "grid_sample",
    "native_batch_norm": "batch_norm",
    "native_batch_norm_legit_no_training": "batch_norm",
    "native_group_norm": "group_norm",
    "native_layer_norm": "layer_norm",
    "to": "cast",
    "to_copy": "cast",
    "unsafe_view": "view",
    "upsample_bicubic2d": "resize_bicubic",
    "upsample_bicubic2d_aa": "resize_bicubic_antialiased",
    "upsample_bilinear2d": "resize_bilinear",
    "upsample_bilinear2d_aa": "resize_bilinear_antialiased",
    "upsample_linear1d": "resize_linear",
    "upsample_nearest1d": "resize_nearest",
    "upsample_nearest2d": "resize_nearest",
    "upsample_nearest3d": "resize_nearest",
    "upsample_trilinear3d": "resize_trilinear",
}

CATEGORIES = {
    "compute": """conv conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d linear matmul mm bmm
        addmm baddbmm einsum scaled_dot_product_attention deform_conv2d gru lstm rnn_tanh""",
    "sampling": """grid_sample resize_bicubic resize_bilinear resize_linear resize_nearest resize_trilinear
        affine_grid_generator im2col col2im""",
    "movement": """view reshape flatten unflatten squeeze unsqueeze permute transpose t numpy_T movedim contiguous copy
        cast slice select narrow split split_with_sizes chunk unbind cat concat stack hstack vstack expand expand_as
        repeat tile roll flip pad constant_pad_nd reflection_pad2d replication_pad2d pixel_shuffle pixel_unshuffle
        channel_shuffle gather index index_select embedding scatter scatter_add index_put diagonal as_strided unfold
        tril triu lift_fresh_copy detach alias one_hot""",
    "normalisation": """batch_norm layer_norm group_norm instance_norm rms_norm local_response_norm softmax
        log_softmax normalize""",
    "reduction": """mean sum amax amin max min argmax argmin prod var std norm linalg_vector_norm logsumexp all any
        max_pool2d max_pool1d max_pool3d max_pool2d_with_indices avg_pool2d avg_pool1d avg_pool3d
        adaptive_avg_pool2d adaptive_max_pool2d adaptive_avg_pool1d cumsum cumprod topk sort argsort""",
    "constant": "arange zeros ones full empty eye linspace scalar_tensor zeros_like ones_like full_like empty_like "
    "new_zeros new_ones new_full",
    "elementwise": """abs add addcdiv addcmul atan2 bitwise_and bitwise_not bitwise_or ceil celu clamp clamp_max
        clamp_min cos div dropout elu eq erf exp expm1 feature_dropout floor floor_divide fmod ge gelu glu gt
        hardsigmoid hardswish hardtanh isnan le leaky_relu lerp log log1p log2 logical_and logical_not logical_or
        log_sigmoid lt masked_fill maximum minimum mish mul ne neg pow prelu reciprocal relu relu6 remainder round
        rsqrt rsub selu sigmoid sign silu sin softplus sqrt square sub tan tanh threshold true_divide where""",
}
CATEGORY = {kind: category for category, kinds in CATEGORIES.items() for kind in kinds.split()}

NO_EFFECT_WHEN_SAME = frozenset(
    "view reshape flatten slice expand expand_as contiguous copy cast dropout feature_dropout detach alias "
    "lift_fresh_copy squeeze constant_pad_nd pad".split()
)
"""Kinds that compute nothing when what goes out has the shape and type of what comes in (outside training)."""

LAYOUT_ONLY = frozenset({"contiguous", "copy"})
"""Kinds that settle the order of a tensor in memory: a deployed graph has no operation for that."""


def plain_name(target: object) -> str:
    """``conv2d`` for ``aten.conv2d.default``, ``relu`` for ``aten.relu_.default``, ``resize_bilinear`` and so on.

    ``target`` is an operator of torch, or its name as text.
    """
    parts = str(target).split(".")
    name = parts[1] if len(parts) > 2 else parts[0]
    if name in PLAIN_NAMES:
        return PLAIN_NAMES[name]
    bare = name.strip("_") or name
    return PLAIN_NAMES.get(bare, bare)


def category_of(kind: str) -> str:
    """compute, sampling, movement, elementwise, normalisation, reduction, constant or other."""
    return CATEGORY.get(kind, "other")
