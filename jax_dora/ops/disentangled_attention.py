"""Disentangled attention, of content and of relative positions (arXiv 2006.03654, equation 4).

    s_ij = (q_i·k_j + q_i·K[c(i-j)] + k_j·Q[c(i-j)]) / sqrt(terms·size)
    o_i = Σ_j softmax(s)_ij v_j

K and Q are the projected embeddings of buckets of relative positions, and c maps a distance to its
bucket. DeBERTa calls the second term c2p and the third p2c; a model may lack one of them.

Here no distance is looked up for a pair of tokens. K and Q are read for every distance once, which
is a small gather; of the product with all queries or keys, [time, 2·time], the scores are a shear:
row i begins i elements earlier than row 0, so they have the strides of a wider matrix. XLA reads
them in place, and the gradient is the same shear backwards. The mask of dropout is computed from a
counter, and never stored.

    2·B·H·T²·D·(2 + 2·terms) FLOPs with terms - 1 products of twice as many columns as tokens
"""

import jax
import jax.numpy as jnp

from jax_dora.ops.dropout import Dropout, drop


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

    Raises:
      ValueError: the shapes do not fit.
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
    terms = 1 + (pos_key is not None) + (pos_query is not None)
    scale = jnp.asarray((terms * size) ** -0.5, q.dtype)
    scores = jnp.einsum("bihd,bjhd->bhij", q, k * scale)
    if pos_key is not None:
        # Column m is of the distance time - 1 - m, so that row i's scores begin at its distance i.
        table = (pos_key * scale)[buckets[::-1]]
        scores = scores + _sheared(jnp.einsum("bihd,mhd->bhim", q, _padded(table)))
    if pos_query is not None:
        table = (pos_query * scale)[buckets]
        sheared = _sheared(jnp.einsum("bjhd,mhd->bhjm", k, _padded(table)))
        scores = scores + jnp.swapaxes(sheared, -1, -2)
    if mask is not None:
        lowest = jnp.asarray(jnp.finfo(scores.dtype).min, scores.dtype)
        scores = jnp.where(mask[:, None, None, :], scores, lowest)
    wide = jnp.promote_types(scores.dtype, jnp.float32)
    probabilities = jax.nn.softmax(scores.astype(wide), axis=-1).astype(v.dtype)
    if dropout is not None:
        probabilities = drop(probabilities, dropout.seed, dropout.rate)
    return jnp.einsum("bhij,bjhd->bihd", probabilities, v)


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
