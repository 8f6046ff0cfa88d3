"""The gradient of a layer norm of a residual sum, with dropout, in one pass.

    dn = dz∘scale        dx = (dn - mean(dn) - n∘mean(dn∘n)) / sqrt(var(t) + epsilon)
    dy = dx∘m / kept     dscale = Σ_row dz∘n     dbias = Σ_row dz

with n, t and the mask m as in the forward pass, which are computed again, but for the mean and
inverse = 1 / sqrt(var(t) + epsilon). A program has every ``programs``-th tile of rows, and fetches
the next ones meanwhile; its sums of dscale and dbias are stored, to be added up in a fixed order.

dz, y, x, dy, dx: [count, features]; scale: [features]; mean, inverse: f32[count].

Traffic: dz, y and x once, dx, and dy if elements are dropped.
"""

import triton.language as tl

from dora_common.triton.jit import bound, jit
from dora_common.triton.residual_norm_rows import summed


@jit
def kernel(
    dz_ptr,  # [count, features]
    y_ptr,  # [count, features]
    x_ptr,  # [count, features]
    scale_ptr,  # [features]
    seed_ptr,  # i32[2] or None
    mean_ptr,  # f32[count]
    inverse_ptr,  # f32[count]
    dx_ptr,  # [count, features]
    dy_ptr,  # [count, features], or None without dropout
    sums_ptr,  # f32[programs, 2, features], of dscale and dbias
    COUNT: tl.constexpr,
    FEATURES: tl.constexpr,
    THRESHOLD: tl.constexpr,
    KEPT: tl.constexpr,
    PROGRAMS: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
    COLUMNS: tl.constexpr,  # a power of two, from FEATURES on
):
    column = tl.arange(0, COLUMNS)
    is_feature = column < FEATURES
    scale = tl.load(scale_ptr + column, mask=is_feature, other=0.0).to(tl.float32)
    dscale = tl.zeros((ROWS, COLUMNS), tl.float32)
    dbias = tl.zeros((ROWS, COLUMNS), tl.float32)
    begin = bound(tl.program_id(0) * ROWS)
    for first in tl.range(begin, COUNT, PROGRAMS * ROWS, num_stages=STAGES):  # pyright: ignore[reportGeneralTypeIssues]
        row = first + tl.arange(0, ROWS)
        t, is_kept, at, inside = summed(
            y_ptr, x_ptr, seed_ptr, row, column, COUNT, FEATURES, THRESHOLD, KEPT
        )
        mean = tl.load(mean_ptr + row, mask=row < COUNT, other=0.0)
        inverse = tl.load(inverse_ptr + row, mask=row < COUNT, other=0.0)
        n = (t - mean[:, None]) * inverse[:, None]
        dz = tl.load(dz_ptr + at, mask=inside, other=0.0).to(tl.float32)
        dscale += dz * n
        dbias += dz
        dn = dz * scale[None, :]
        shift = tl.sum(dn, 1) / FEATURES
        slope = tl.sum(dn * n, 1) / FEATURES
        dx = (dn - shift[:, None] - n * slope[:, None]) * inverse[:, None]
        tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=inside)
        if dy_ptr is not None:
            dy = tl.where(is_kept, dx * (1 / KEPT), 0.0)
            tl.store(dy_ptr + at, dy.to(dy_ptr.dtype.element_ty), mask=inside)
    at_sum = tl.program_id(0) * 2 * FEATURES + column
    tl.store(sums_ptr + at_sum, tl.sum(dscale, 0), mask=is_feature)
    tl.store(sums_ptr + at_sum + FEATURES, tl.sum(dbias, 0), mask=is_feature)
