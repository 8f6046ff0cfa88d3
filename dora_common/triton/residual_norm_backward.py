"""The gradient of a layer norm of a residual sum, with dropout, in one pass.

    dn = dz∘scale        dx = (dn - mean(dn) - n∘mean(dn∘n)) / sqrt(var(t) + epsilon)
    dy = dx∘m / kept     dscale = Σ_row dz∘n     dbias = Σ_row dz

with n, t and the mask m as in the forward pass, which are computed again. A program has every
``programs``-th tile of rows; its sums of dscale and dbias are stored, to be added up in a fixed
order.

dz, y, x, dy, dx: [count, features]; scale: [features]; dscale, dbias: f32[programs, features].

Traffic: dz, y and x once, dx, and dy if elements are dropped.
"""

import triton.language as tl

from dora_common.triton.jit import bound, jit
from dora_common.triton.residual_norm_rows import normalised


@jit
def kernel(
    dz_ptr,  # [count, features]
    y_ptr,  # [count, features]
    x_ptr,  # [count, features]
    scale_ptr,  # [features]
    seed_ptr,  # i32[2] or None
    dx_ptr,  # [count, features]
    dy_ptr,  # [count, features], or None without dropout
    dscale_ptr,  # f32[programs, features]
    dbias_ptr,  # f32[programs, features]
    COUNT: tl.constexpr,
    FEATURES: tl.constexpr,
    EPSILON: tl.constexpr,
    THRESHOLD: tl.constexpr,
    KEPT: tl.constexpr,
    PROGRAMS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,  # a power of two, from FEATURES on
):
    column = tl.arange(0, COLUMNS)
    is_feature = column < FEATURES
    scale = tl.load(scale_ptr + column, mask=is_feature, other=0.0).to(tl.float32)
    dscale = tl.zeros((COLUMNS,), tl.float32)
    dbias = tl.zeros((COLUMNS,), tl.float32)
    for first in range(bound(tl.program_id(0) * ROWS), COUNT, PROGRAMS * ROWS):
        row = first + tl.arange(0, ROWS)
        n, inverse, is_kept, at, inside = normalised(
            y_ptr, x_ptr, seed_ptr, row, column, COUNT, FEATURES, EPSILON, THRESHOLD, KEPT
        )
        dz = tl.load(dz_ptr + at, mask=inside, other=0.0).to(tl.float32)
        dscale += tl.sum(dz * n, 0)
        dbias += tl.sum(dz, 0)
        dn = dz * scale[None, :]
        mean = tl.sum(dn, 1) / FEATURES
        slope = tl.sum(dn * n, 1) / FEATURES
        dx = (dn - mean[:, None] - n * slope[:, None]) * inverse[:, None]
        tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=inside)
        if dy_ptr is not None:
            dy = tl.where(is_kept, dx * (1 / KEPT), 0.0)
            tl.store(dy_ptr + at, dy.to(dy_ptr.dtype.element_ty), mask=inside)
    at_sum = tl.program_id(0) * FEATURES + column
    tl.store(dscale_ptr + at_sum, dscale, mask=is_feature)
    tl.store(dbias_ptr + at_sum, dbias, mask=is_feature)
