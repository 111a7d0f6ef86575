"""What Qualcomm's NPU compiler takes, kind by kind: measured by compiling each operation in a graph of its own.

About 320 graphs of one to four operations, exported at opset 20 and compiled in float for SM8850 (HTP v81), some for
chips without float16, with onnxruntime-qnn 2.7.0 (QAIRT 2.51). Batch 1 unless said.
"""

from __future__ import annotations

MEASURED = "measured: QAIRT 2.51, onnxruntime-qnn 2.7.0, SM8850, float16"
MEASURED_WITHOUT_FLOAT16 = "measured: QAIRT 2.51, onnxruntime-qnn 2.7.0, SM7750 and SM8350"

TAKEN = frozenset(
    """abs adaptive_avg_pool2d adaptive_max_pool2d add addcmul addmm amax amin and argmax argmin atan2 avg_pool2d
    avg_pool3d batch_norm bitwise_not bmm cast cat ceil channel_shuffle chunk clamp clamp_min contiguous conv1d conv2d
    conv3d conv_transpose1d conv_transpose2d conv_transpose3d copy cos cosine_similarity cumsum detach diagonal div
    dropout einsum elu embedding eq exp expand expand_as expm1 flatten flip floor floor_divide gather ge gelu glu
    grid_sample group_norm gru gt hardsigmoid hardswish hardtanh index index_put index_select instance_norm isnan
    layer_norm leaky_relu lerp linalg_vector_norm linear log log1p log_sigmoid log_softmax logsumexp lstm lt masked_fill
    matmul max max_pool2d maximum mean minimum mish mul neg one_hot pad permute pixel_shuffle pixel_unshuffle pow prelu
    reciprocal relu relu6 remainder repeat repeat_interleave reshape resize_bicubic resize_bilinear resize_linear
    resize_nearest resize_trilinear rms_norm roi_align roll round rsqrt rsub scaled_dot_product_attention scatter select
    selu sigmoid sign silu sin slice softmax softplus sort split split_with_sizes sqrt square squeeze stack std sub sum
    tan tanh threshold topk transpose unbind unfold unsqueeze var view where""".split()
)

REFUSED = {
    "celu": "the compiler has no translation of Celu; write it with Exp, Min and Max",
    "deform_conv2d": "the compiler has no translation of DeformConv; decompose it into a grid sample and a 1×1 conv",
    "erf": "the compiler has no translation of Erf by itself; GELU as one operation is taken",
    "fmod": "Mod with the sign of the dividend is refused; remainder is taken",
    "im2col": "its Gather reaches rank 6, which HTP refuses (error 3110); write it as a conv",
    "max_pool3d": "three-dimensional max pooling is refused",
    "prod": "HTP has no ReduceProd",
    "resize_bicubic_antialiased": "a resize with anti-aliasing is refused",
    "resize_bilinear_antialiased": "a resize with anti-aliasing is refused",
    "tril": "the compiler has no translation of Trilu; multiply by a fixed mask",
    "triu": "the compiler has no translation of Trilu; multiply by a fixed mask",
}

REFUSED_AT_RANK_5 = frozenset(
    """argmax argmin batch_norm cumsum elu grid_sample hardswish index instance_norm layer_norm log_softmax maximum
    minimum neg rms_norm softplus sqrt tanh topk""".split()
)
TAKEN_AT_RANK_5 = frozenset(
    """abs add amax avg_pool3d cat clamp contiguous conv3d conv_transpose3d copy div dropout einsum exp expand flatten
    flip gelu ge group_norm gt leaky_relu linear lt masked_fill matmul mean mul pad permute pow relu repeat reshape
    resize_nearest resize_trilinear roll rsub select sigmoid silu slice softmax squeeze stack sub sum transpose
    unbind unfold unsqueeze var view where""".split()
)

REFUSED_TYPES = {
    "float64": "HTP computes float16 at most; export the network in float32",
    "bfloat16": "the compiler knows no bfloat16; export the network in float32",
    "int8": "8-bit integers are taken as quantised tensors only, not as plain numbers",
    "uint8": "8-bit integers are taken as quantised tensors only, not as plain numbers",
    "int16": "16-bit integers are taken as quantised tensors only, not as plain numbers",
}

RESHAPES = frozenset("view reshape flatten unflatten".split())  # become Reshape; unsqueeze and squeeze do not
PERMUTES = frozenset("permute transpose".split())
MOVED_WITHOUT_FLOAT16 = RESHAPES | PERMUTES | {"squeeze", "unsqueeze"}
REFUSED_PAD_MODES = {"circular"}
TAKEN_EQUATIONS = frozenset(
    "ij,jk->ik bij,bjk->bik bhid,bhjd->bhij bhij,bhjd->bhid bhwc,hkc->bhwk bchq,bkhc->bkhq".split()
)
"""Equations of einsum that were taken; others are refused ("unsupported equation")."""
