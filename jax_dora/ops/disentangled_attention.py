"""Disentangled attention, of content and of relative positions (arXiv 2006.03654, equation 4).

    s_ij = (q_i·k_j + q_i·K[c(i-j)] + k_j·Q[c(i-j)]) / sqrt(terms·size)
    o_i = Σ_j softmax(s)_ij v_j

K and Q are the projected embeddings of buckets of relative positions, and c maps a distance to its
bucket. DeBERTa calls the second term c2p and the third p2c; a model may lack one of them.

No pair of tokens is looked up in memory, and the mask of dropout is computed from a counter in both
passes.

- Triton: a product with K, or Q, at every distance stores its rows one element further each, at
  the pairs of tokens. The scores, softmax and dropout are in a kernel for each pass. The other
  gradients read that of the scores along its diagonals, which are strides like those of rows.
- XLA: K and Q are read for every distance once, a small gather. The scores are a shear of the
  product with all queries or keys, [time, 2·time]: row i begins i elements earlier than row 0, so
  they have the strides of a wider matrix. The gradient is the same shear backwards.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_dora.ops.dispatch import choose
from jax_dora.ops.dropout import Dropout, drop
from jax_dora.ops.dtypes import accumulation_dtype
from jax_dora.ops.triton import triton_disentangled_backward as kernel_backward
from jax_dora.ops.triton import triton_disentangled_forward as kernel_forward


class _Operands(NamedTuple):
    """The arrays of a call; those that are None are left out."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    pos_key: jax.Array | None
    pos_query: jax.Array | None
    buckets: jax.Array
    mask: jax.Array | None
    seed: jax.Array | None


def disentangled_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    pos_key: jax.Array | None,
    pos_query: jax.Array | None,
    buckets: jax.typing.ArrayLike,
    *,
    mask: jax.Array | None = None,
    dropout: Dropout | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Returns the attended values [batch, time, heads, size], in v's dtype.

    Args:
      q, k, v: [batch, time, heads, size], of one dtype. Softmax is computed in fp32 for 16 bits.
      pos_key: [buckets, heads, size], K of the equation above; None leaves out its term.
      pos_query: [buckets, heads, size], Q of the equation above; None leaves out its term.
      buckets: i32[2·time - 1], the bucket of each distance i - j from 1 - time to time - 1.
      mask: bool[batch, time], the tokens to attend to; all by default. A row without any attends to
        all alike.
      dropout: drops elements of the softmax; its `mode` does not matter.
      implementation: None, "triton" where it was measured to be faster, or "xla"; "eager" is "xla".

    Raises:
      ValueError: the shapes do not fit, or `implementation` has no valid value.
      NotImplementedError: the named implementation does not support the call.
    """
    batch, time, heads, size = q.shape
    if k.shape != q.shape or v.shape != q.shape:
        raise ValueError(f"q, k, v have shapes {q.shape}, {k.shape}, {v.shape}; expected one shape")
    for name, table in (("pos_key", pos_key), ("pos_query", pos_query)):
        if table is not None and table.shape[1:] != (heads, size):
            raise ValueError(
                f"{name} has shape {table.shape}; expected [buckets, {heads}, {size}], like q's"
            )
    buckets = jnp.asarray(buckets)
    if buckets.shape != (2 * time - 1,):
        raise ValueError(
            f"buckets has shape {buckets.shape}; expected ({2 * time - 1},), one for each distance "
            f"of {time} tokens"
        )
    if mask is not None and mask.shape != (batch, time):
        raise ValueError(f"mask has shape {mask.shape}; expected {(batch, time)}, one for each key")
    rate = 0.0 if dropout is None else dropout.rate
    seed = None if dropout is None or not rate else dropout.seed
    operands = _Operands(q, k, v, pos_key, pos_query, buckets, mask, seed)
    if _is_fused(operands, implementation):
        return _fused(rate, operands)
    return _define(rate, operands)


def _is_fused(operands: _Operands, implementation: str | None) -> bool:
    """Returns whether Triton's kernels are taken."""
    q, device = operands.q, choose.target()
    if implementation is None:
        # On Hopper, where choose prefers Mosaic, which has no kernel; other cards: not measured.
        is_measured = device.compute_capability == "9.0" and not device.partitioned
        has_terms = operands.pos_key is not None and operands.pos_query is not None
        call: Any = (*q.shape, q.dtype)
        is_better = is_measured and has_terms and kernel_forward.wins(*call)
        is_better = is_better and not device.interpreted and not device.refuses("triton")
        implementation = "triton" if is_better else "xla"
    return _choose(kernel_forward, q, implementation) is not None


def _choose(kernel: Any, q: jax.Array, implementation: str | None) -> Any:
    candidate = (kernel, (*q.shape, q.dtype))
    return choose.choose("disentangled_attention", implementation, candidate)


def _define(rate: float, operands: _Operands) -> jax.Array:
    """Returns the result in XLA."""
    q, k, v, pos_key, pos_query, buckets, mask, seed = operands
    scale = jnp.asarray(_scale(operands), q.dtype)
    scores = jnp.einsum("bihd,bjhd->bhij", q, k * scale)
    if pos_key is not None:
        # Column m is of the distance time - 1 - m, so that row i's scores begin at its distance i.
        table = _padded((pos_key * scale)[buckets[::-1]])
        scores = scores + _sheared(jnp.einsum("bihd,mhd->bhim", q, table))
    if pos_query is not None:
        table = _padded((pos_query * scale)[buckets])
        sheared = _sheared(jnp.einsum("bjhd,mhd->bhjm", k, table))
        scores = scores + jnp.swapaxes(sheared, -1, -2)
    if mask is not None:
        lowest = jnp.asarray(jnp.finfo(scores.dtype).min, scores.dtype)
        scores = jnp.where(mask[:, None, None, :], scores, lowest)
    wide = scores.astype(accumulation_dtype(scores.dtype))
    probabilities = jax.nn.softmax(wide, axis=-1).astype(v.dtype)
    if seed is not None:
        probabilities = drop(probabilities, seed, rate)
    return jnp.einsum("bhij,bjhd->bihd", probabilities, v)


def _scale(operands: _Operands) -> float:
    terms = 1 + (operands.pos_key is not None) + (operands.pos_query is not None)
    return (terms * operands.q.shape[-1]) ** -0.5


def _padded(table: jax.Array) -> jax.Array:
    """Returns a table with one more row of zeros."""
    return jnp.pad(table, ((0, 1), (0, 0), (0, 0)))


def _sheared(x: jax.Array) -> jax.Array:
    """Returns y [..., time, time] with y[i, j] = x[i, j - i + time - 1], for x [..., time,
    2·time]."""
    *leading, time, width = x.shape
    # In the flat array, this is element i·(width - 1) + j + time - 1.
    flat = x.reshape(*leading, time * width)[..., time - 1 :][..., : time * (width - 1)]
    return flat.reshape(*leading, time, width - 1)[..., :time]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _fused(rate: float, operands: _Operands) -> jax.Array:
    """Returns the result by Triton's kernels."""
    return _fused_fwd(rate, operands)[0]


def _fused_fwd(rate: float, operands: _Operands) -> tuple[jax.Array, Any]:
    q, k, v, pos_key, pos_query, buckets, mask, seed = operands
    # What a query is multiplied by, at the key n tokens further: of the distance -n.
    key_table = None if pos_key is None else pos_key[buckets[::-1]]
    query_table = None if pos_query is None else pos_query[buckets]
    mask = None if mask is None else mask.astype(jnp.int8)
    seed = None if seed is None else jax.lax.bitcast_convert_type(seed, jnp.int32)
    arrays = q, k, v, key_table, query_table, mask, seed
    o, *others = _choose(kernel_forward, q, "triton").launch(*arrays, rate=rate)
    return o, (operands, arrays, o, others)


def _fused_bwd(rate: float, kept: Any, do: jax.Array) -> tuple[_Operands]:
    operands, arrays, o, others = kept
    q, _, _, pos_key, pos_query, buckets, *_ = operands
    choice = _choose(kernel_backward, q, "triton")
    dq, dk, dv, d_key, d_query = choice.launch(do, o, *others, *arrays, rate=rate)
    if pos_key is not None:
        zeros = jnp.zeros(pos_key.shape, d_key.dtype)
        d_key = zeros.at[buckets[::-1]].add(d_key).astype(pos_key.dtype)
    if pos_query is not None:
        zeros = jnp.zeros(pos_query.shape, d_query.dtype)
        d_query = zeros.at[buckets].add(d_query).astype(pos_query.dtype)
    return (_Operands(dq, dk, dv, d_key, d_query, None, None, None),)  # pyright: ignore[reportArgumentType]


_fused.defvjp(_fused_fwd, _fused_bwd)
