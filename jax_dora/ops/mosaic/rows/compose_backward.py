"""The gradient of compose, with d_g's sum over rows in the same pass.

    dy, inner  [rows, out]  bf16, fp16 or fp32      g  f32[out]      s  f32[]
    d_base = g∘dy  ((g-1)∘dy for ΔY)      d_lora = s·(g∘dy)      [rows, out]  dy's dtype
    d_g    = Σ_rows dy∘inner              f32[out]

Elements: 2 · rows · out read (rows · out without inner, if the magnitude is frozen), rows · out
written for each of d_base and d_lora. The floor is bytes / copy rate.
"""

import jax
import jax.numpy as jnp

from jax_dora.ops.mosaic.hopper.launch import launcher
from jax_dora.ops.mosaic.rows import elementwise
from jax_dora.ops.mosaic.rows.elementwise import Config, lane
from jax_dora.ops.mosaic.rows.elementwise import refuses as refuses

MOST_SUMS = 31


def wins(rows: int, out: int, dtype: jax.typing.DTypeLike) -> bool:
    """Returns whether the kernel was no slower than XLA (H200, 1713ac4, `benchmarks ops`; for many
    rows with 768 features `benchmarks sizes`)."""
    return (
        rows >= (725 if out >= 1024 else 4096)
        and 768 <= out <= 18770
        and rows * out >= 2**20
        and lane(out) == 256
        and jnp.dtype(dtype).itemsize == 2
    )


def config(rows: int, out: int, dtype: jax.typing.DTypeLike) -> Config:
    """Returns the config for [rows, out] of `dtype` (H200, `benchmarks tune`).

    XLA adds fewer than 32 partial sums where it reads the result, as in the optimizer, and more in
    a kernel of its own. So there are as few features to a thread block as leave work for all.
    """
    is_half = jnp.dtype(dtype).itemsize == 2
    features = next((size for size in (1024, 512, 256) if out >= 8 * size), 128)
    if 512 <= rows <= 1448 and out >= 4096 and lane(out) == 256 and is_half:
        return Config(16384, stages=2, blocks_per_sm=1, features=features, most_sums=MOST_SUMS)
    return Config(features=features, most_sums=MOST_SUMS)


@launcher("delta", "want_base", "want_lora")
def launch(
    dy: jax.Array,
    inner: jax.Array | None,
    g: jax.Array,
    scale: jax.Array,
    *,
    delta: bool,
    want_base: bool,
    want_lora: bool,
    config: Config,
    sm_count: int,
) -> tuple[jax.Array | None, jax.Array | None, jax.Array | None]:
    """Returns (d_base, d_lora, d_g), each None if not wanted, for dy, inner [..., out].

    d_g is None if inner is None.
    """

    def row_function(operands, vectors, s):
        (dy, *inner), (g,) = operands, vectors
        outputs = []
        if want_base:
            outputs.append((g - 1.0 if delta else g) * dy)
        if want_lora:
            outputs.append(s * (g * dy))
        return outputs, [dy * inner[0]] if inner else []

    tensors, sums = elementwise.row_kernel(
        row_function,
        [dy] if inner is None else [dy, inner],
        [g],
        scale,
        outputs=want_base + want_lora,
        sums=int(inner is not None),
        config=config,
        sm_count=sm_count,
        kernel_name="dora_compose_backward",
    )
    d_base = tensors[0] if want_base else None
    return d_base, tensors[-1] if want_lora else None, sums[0] if sums else None
