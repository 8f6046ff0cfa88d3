"""Compose forward: y = g∘(base + s·lora), or ΔY = (g-1)∘base + g∘(s·lora).

    base, lora  [rows, out]  bf16, fp16 or fp32      g  f32[out]      s  f32[]
    y           [rows, out]  base's dtype            inner = base + s·lora  [rows, out]  (optional)

Elements: 2 · rows · out read, rows · out written (2 · rows · out with inner), of the dtype's size.
With about ten fp32 operations per element, the floor is bytes / copy rate.
"""

import jax

from jax_dora.ops.mosaic.hopper.launch import launcher
from jax_dora.ops.mosaic.rows import elementwise
from jax_dora.ops.mosaic.rows.elementwise import Config
from jax_dora.ops.mosaic.rows.elementwise import refuses as refuses


def wins(rows: int, out: int, dtype: jax.typing.DTypeLike) -> bool:
    """Returns False, because XLA was as fast at every measured size."""
    return False


def config(rows: int, out: int, dtype: jax.typing.DTypeLike) -> Config:
    """Returns the config for [rows, out] of `dtype`."""
    return Config()


@launcher("delta", "want_inner")
def launch(
    base: jax.Array,
    lora: jax.Array,
    g: jax.Array,
    scale: jax.Array,
    bias: jax.Array | None = None,
    *,
    delta: bool,
    want_inner: bool,
    config: Config,
    sm_count: int,
) -> tuple[jax.Array, jax.Array | None]:
    """Returns (y or ΔY, inner or None) for base, lora [..., out]; adds bias [out] if given."""

    def row_function(operands, vectors, s):
        (base, lora), (g, *bias) = operands, vectors
        scaled = s * lora
        inner = base + scaled
        y = (g - 1.0) * base + g * scaled if delta else g * inner
        if bias:
            y = y + bias[0]
        return [y, inner][: 1 + want_inner], []

    vectors = [g] if bias is None else [g, bias]
    (y, *inner), _ = elementwise.row_kernel(
        row_function,
        [base, lora],
        vectors,
        scale,
        outputs=1 + want_inner,
        config=config,
        sm_count=sm_count,
        kernel_name="dora_compose_forward",
    )
    return y, inner[0] if want_inner else None
