"""A layer norm of a residual sum, with dropout, in one pass.

    z = n∘scale + bias        n = (t - mean(t)) / sqrt(var(t) + epsilon),  t = drop(y) + x

Statistics are in fp32, and the variance is that of the centred row, which is in registers.

y, x, z: [count, features]; scale, bias: [features]; mean, inverse: f32[count], those of t, and
1 / sqrt(var(t) + epsilon).

Traffic: y and x once, and z.
"""

import triton.language as tl

from dora_common.triton.jit import jit
from dora_common.triton.residual_norm_rows import summed


@jit
def kernel(
    y_ptr,  # [count, features]
    x_ptr,  # [count, features]
    scale_ptr,  # [features]
    bias_ptr,  # [features]
    seed_ptr,  # i32[2] or None
    z_ptr,  # [count, features]
    mean_ptr,  # f32[count]
    inverse_ptr,  # f32[count]
    COUNT: tl.constexpr,
    FEATURES: tl.constexpr,
    EPSILON: tl.constexpr,
    THRESHOLD: tl.constexpr,
    KEPT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,  # a power of two, from FEATURES on
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    is_feature = column < FEATURES
    scale = tl.load(scale_ptr + column, mask=is_feature, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + column, mask=is_feature, other=0.0).to(tl.float32)
    t, _, at, inside = summed(y_ptr, x_ptr, seed_ptr, row, column, COUNT, FEATURES, THRESHOLD, KEPT)
    mean = tl.sum(t, 1) / FEATURES
    centred = t - mean[:, None]
    if FEATURES != COLUMNS:
        centred = tl.where(is_feature[None, :], centred, 0.0)
    inverse = tl.rsqrt(tl.sum(centred * centred, 1) / FEATURES + EPSILON)
    z = centred * inverse[:, None] * scale[None, :] + bias[None, :]
    tl.store(z_ptr + at, z.to(z_ptr.dtype.element_ty), mask=inside)
    tl.store(mean_ptr + row, mean, mask=row < COUNT)
    tl.store(inverse_ptr + row, inverse, mask=row < COUNT)
