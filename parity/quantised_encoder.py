"""What quantising the pretrained encoder's projections costs: format by format, beside fp32.

The logits are those of each sentence against all paraphrases, at the temperature that the encoder's
level of parity trains with. Nothing is judged: a format is what it is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from jax_dora.layers.quantised import compute_quantised
from jax_dora.ops import quantised
from jax_dora.ops.rounding import round_to
from parity import minilm
from parity.sides.jax.encoder import Encoder

if TYPE_CHECKING:
    from parity.report import Report

# Name, format and the rows of a tile, 0 for all of them; the columns are one but for "tensor".
FORMATS = (
    ("int8, a scale an output", "int8", 0),
    ("float8_e4m3fn, a scale an output", "float8_e4m3fn", 0),
    ("float8_e4m3fn, one scale", "float8_e4m3fn", -1),
    ("nf4, tiles of 64", "nf4", 64),
    ("int4, tiles of 64", "int4", 64),
    ("int4, a scale an output", "int4", 0),
)
QUANTITY = "encoder quantised"


def run(report: Report) -> None:
    """Adds a line for every format."""
    batch = minilm.batch(minilm.sentence_pairs())
    arrays = jnp.asarray(batch.ids, jnp.int32), jnp.asarray(batch.mask, jnp.int32)
    embed = nnx.jit(lambda encoder, *arrays: encoder(*arrays))
    exact = np.asarray(embed(Encoder(lambda name, linear: linear), *arrays), np.float64)
    for name, qtype, rows in FORMATS:
        errors: list[float] = []

        def project(_: str, linear: nnx.Linear, qtype=qtype, rows=rows, errors=errors) -> Any:
            kernel = linear.kernel[...]
            tile = kernel.shape if rows < 0 else (rows or kernel.shape[0], 1)
            rounded = round_to(kernel, qtype, tile, jnp.float32)
            off = quantised.dequantise(rounded, jnp.float32) - kernel
            errors.append(float(jnp.linalg.norm(off) / jnp.linalg.norm(kernel)))
            linear.kernel.set_value(rounded)
            compute_quantised(linear)
            return linear

        found = np.asarray(embed(Encoder(project), *arrays), np.float64)
        report.add(
            name, QUANTITY, side="jax", weights=float(np.mean(errors)), **_apart(exact, found)
        )


def _apart(exact: np.ndarray, found: np.ndarray) -> dict[str, float]:
    """Returns how far embeddings [2·pairs, hidden] of unit length and their logits are apart."""
    wanted, logits = (_log_softmax(one) for one in (exact, found))
    divergence = (np.exp(wanted) * (wanted - logits)).sum(1)
    return {
        "cosine": float(1 - (exact * found).sum(1).mean()),
        "kl": float(divergence.mean()),
        "agreement": float((wanted.argmax(1) == logits.argmax(1)).mean()),
    }


def _log_softmax(embeddings: np.ndarray) -> np.ndarray:
    firsts, seconds = np.split(embeddings, 2)
    logits = firsts @ seconds.T / minilm.TEMPERATURE
    largest = logits.max(1, keepdims=True)
    return logits - largest - np.log(np.exp(logits - largest).sum(1, keepdims=True))
