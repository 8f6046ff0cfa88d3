"""Adapts a small flax.linen network with DoRA: the base learns code, then the adapter English.

    python examples/linen_train.py --steps 200

Shows how to adapt a pretrained network, and how to differentiate by the adapter only.
"""

import argparse
from typing import Any

import corpus
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from rich.progress import track

from jax_dora import DoRARule
from jax_dora.linen import apply_dora, join_adapters, split_adapters

CONTEXT = 8
ROWS = 64


class NextByte(nn.Module):
    """Predicts the logits of the next byte from the previous `CONTEXT` bytes."""

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = nn.Embed(256, 32, name="token")(tokens).reshape(*tokens.shape[:-1], -1)
        x = nn.gelu(nn.Dense(256, name="hidden")(x))
        return nn.Dense(256, name="out")(x)


def fit(loss_fn, params, learning_rate: float, text: np.ndarray, steps: int, what: str):
    """Minimises `loss_fn(params, tokens)` with Adam. Returns params and the loss of every step."""
    tx = optax.adam(learning_rate)

    @jax.jit
    def step(params, state, tokens):
        loss, grads = jax.value_and_grad(loss_fn)(params, tokens)
        updates, state = tx.update(grads, state)
        return optax.apply_updates(params, updates), state, loss

    state, losses, rng = tx.init(params), [], np.random.default_rng(0)
    for _ in track(range(steps), what):
        params, state, loss = step(params, state, corpus.batch(text, CONTEXT, ROWS, rng))
        losses.append(loss)
    return params, [float(loss) for loss in losses]


def cross_entropy(model: nn.Module, params, tokens: jax.Array) -> jax.Array:
    logits: Any = model.apply({"params": params}, tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, -1]).mean()


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--steps", type=int, default=200, help="steps of each of the two phases")
    parser.add_argument("--rank", type=int, default=8)
    options = parser.parse_args()

    tokens = jnp.zeros((1, CONTEXT), jnp.int32)
    base = NextByte()
    pretrained = base.init(jax.random.key(0), tokens)["params"]
    pretrained, _ = fit(
        lambda params, tokens: cross_entropy(base, params, tokens),
        pretrained,
        3e-3,
        corpus.source_code(1_000_000),
        options.steps,
        "base, on code",
    )

    # Applying the model adds the params that the pretrained tree lacks: lora_a, lora_b, magnitude.
    adapted = apply_dora(base, DoRARule("all-linear", options.rank, alpha=2 * options.rank))
    _, variables = adapted.apply(
        {"params": pretrained}, tokens, rngs={"params": jax.random.key(1)}, mutable=["params"]
    )
    adapters, frozen = split_adapters(variables["params"])
    adapters, losses = fit(
        lambda adapters, tokens: cross_entropy(adapted, join_adapters(adapters, frozen), tokens),
        adapters,
        1e-2,
        corpus.english(400_000),
        options.steps,
        "adapter, on English",
    )
    tenth = max(1, options.steps // 10)
    print(f"mean loss of the adapter's first {tenth} steps: {np.mean(losses[:tenth]):.3f}")
    print(f"mean loss of the adapter's last {tenth} steps: {np.mean(losses[-tenth:]):.3f}")


if __name__ == "__main__":
    main()
