"""What each Mosaic kernel computes, in plain jnp: `tune` times it by XLA, and compares results."""

from typing import Any

import jax.numpy as jnp
from jax import lax

from jax_dora.ops.dropout import drop, kept_share
from jax_dora.ops.quantised import NF4

RATE = 0.1
F32: dict[str, Any] = {"preferred_element_type": jnp.float32}


def one_pass_norm(kernel, a, b):
    return jnp.square(kernel.astype(jnp.float32) + jnp.matmul(a, b, **F32)).sum(axis=0)


stationary_norm = one_pass_norm


def _dequantised(codes, scales):
    values = jnp.array(NF4, jnp.float32)[codes.astype(jnp.uint8)]
    return values * jnp.repeat(scales, codes.shape[0] // scales.shape[0], axis=0)


def quantised_norm(codes, scales, a, b):
    return one_pass_norm(_dequantised(codes, scales), a, b)


def transposing_norm(codes, scales, a, b):
    return one_pass_norm(codes.astype(jnp.float32) * scales, a, b), codes.T


def decode_project(x, codes, scales, a, b, g):
    return compose_forward(x @ _dequantised(codes, scales).astype(x.dtype), (x @ a) @ b, g)


def decode_quantised(x, codes, scales):
    return x @ _dequantised(codes, scales).astype(x.dtype)


def row_codes(x):
    wide = x.astype(jnp.float32)
    scale = jnp.abs(wide).max(axis=1) * (1 / 448)
    return (wide / scale[:, None]).astype("float8_e4m3fn"), scale


def swiglu_codes(gate, up, gate_g, up_g):
    y_1, y_2 = gate_g * gate.astype(jnp.float32), up_g * up.astype(jnp.float32)
    h = (y_1 * lax.logistic(y_1) * y_2).astype(gate.dtype)
    return h, *row_codes(h)


def compose_forward(base, lora, g):
    return (g * (base.astype(jnp.float32) + lora)).astype(base.dtype)


def expand_compose(base, z, b, g):
    return compose_forward(base, z @ b, g)


decode_finish = expand_compose


def shrink(x, a):
    return x @ a


def project(x, w, z, b, g):
    return compose_forward(x @ w, z @ b, g)


def project_back(d, w, dz, a):
    return d @ w.T + dz @ a.T


def coded_matmul(codes, scales, kernel, z, adapter, columns):
    sums = jnp.matmul(codes, kernel.T, **F32) * (scales[:, None] * columns)
    return (sums + jnp.matmul(z, adapter.T, **F32)).astype(z.dtype)


def bank_expand(base, z, b, slot, g, scale):
    lora = scale[:, None, None] * jnp.einsum("ntr,nro->nto", z, b[slot])
    return (g[:, None] * (base.astype(jnp.float32) + lora)).astype(base.dtype)


def bank_project(x, w, layer, z, b, slot, g):
    return compose_forward(x @ w[layer], jnp.einsum("ntr,nro->nto", z, b[slot]), g[:, None])


def bank_shrink(x, a, slot):
    return jnp.einsum("nti,nri->ntr", x, a[slot], **F32)


def bank_rows(x, a, b, ranks, ids):
    z = jnp.einsum("ti,tri->tr", x, a[ids]).astype(x.dtype)
    return jnp.einsum("tr,tro->to", z, b[ids])


bank_decode = bank_rows


def compose_backward(dy, inner, g):
    wide = dy.astype(jnp.float32)
    return (g * wide).astype(dy.dtype), jnp.sum(wide * inner, axis=0)


def dropout_shrink(x, right, seed):
    return kept_share(RATE) * jnp.matmul(drop(x, seed, RATE), right, **F32)


def dropout_shrink_back(x, right, seed):
    return kept_share(RATE) * jnp.matmul(drop(x, seed, RATE).T, right, **F32)


def swiglu_backward(dh, gate, up, gate_g, up_g):
    wide, inner_1, inner_2 = (t.astype(jnp.float32) for t in (dh, gate, up))
    y_1, y_2 = gate_g * inner_1, up_g * inner_2
    gated = lax.logistic(y_1)
    d_1 = wide * y_2 * gated * (1 + y_1 * (1 - gated))
    d_2 = wide * y_1 * gated
    sums = [jnp.sum(d * inner, axis=0) for d, inner in ((d_1, inner_1), (d_2, inner_2))]
    return ((gate_g * d_1).astype(dh.dtype), (up_g * d_2).astype(dh.dtype), *sums)
