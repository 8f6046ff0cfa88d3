"""Adapts a small flax.nnx transformer with DoRA: the base learns code, then the adapter English.

    python examples/train.py --steps 200 --output loss.png

Trains only the adapter, in a jitted optax step, and saves a figure of both loss curves.
"""

import argparse
from pathlib import Path

import corpus
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from matplotlib.figure import Figure
from rich.progress import track

import jax_dora

VOCABULARY = 256
LENGTH = 64
ROWS = 16


class Block(nnx.Module):
    """A transformer block with pre-norm attention and MLP."""

    def __init__(self, width: int, heads: int, *, rngs: nnx.Rngs) -> None:
        self.heads = heads
        self.norm_attention = nnx.RMSNorm(width, rngs=rngs)
        self.qkv = nnx.Linear(width, 3 * width, use_bias=False, rngs=rngs)
        self.out = nnx.Linear(width, width, use_bias=False, rngs=rngs)
        self.norm_mlp = nnx.RMSNorm(width, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        qkv = self.qkv(self.norm_attention(x))
        q, k, v = jnp.split(qkv.reshape(*x.shape[:-1], 3 * self.heads, -1), 3, axis=-2)
        attended = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.reshape(x.shape))
        return x + self.down(nnx.gelu(self.up(self.norm_mlp(x))))


class Transformer(nnx.Module):
    """Predicts the logits of the next byte at every position."""

    def __init__(self, width: int, heads: int, depth: int, *, rngs: nnx.Rngs) -> None:
        self.token = nnx.Embed(VOCABULARY, width, rngs=rngs)
        self.position = nnx.Embed(LENGTH, width, rngs=rngs)
        self.blocks = nnx.List([Block(width, heads, rngs=rngs) for _ in range(depth)])
        self.norm = nnx.RMSNorm(width, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.token(tokens) + self.position(jnp.arange(tokens.shape[-1]))
        for block in self.blocks:
            x = block(x)
        return self.token.attend(self.norm(x))


def loss_fn(model: Transformer, tokens: jax.Array) -> jax.Array:
    """Returns the mean cross-entropy per byte, in nats."""
    logits = model(tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def fit(model, trained, learning_rate: float, text: np.ndarray, steps: int, what: str):
    """Trains the variables of type `trained`. Returns the loss of every step."""
    optimizer = nnx.Optimizer(model, optax.adamw(learning_rate), wrt=trained)
    rng = np.random.default_rng(0)

    @nnx.jit
    def step(model, optimizer, tokens):
        wrt = nnx.DiffState(0, trained)
        loss, grads = nnx.value_and_grad(loss_fn, argnums=wrt)(model, tokens)
        optimizer.update(model, grads)
        return loss

    batches = (corpus.batch(text, LENGTH, ROWS, rng) for _ in range(steps))
    losses = [step(model, optimizer, b) for b in track(batches, what, total=steps)]
    return [float(loss) for loss in losses]


def plot(curves: dict[str, list[float]], path: Path) -> None:
    """Saves a figure of loss curves, one after another."""
    figure = Figure(figsize=(6, 3.5), layout="constrained")
    axes = figure.subplots()
    first = 0
    for name, losses in curves.items():
        axes.plot(range(first, first + len(losses)), losses, label=name)
        first += len(losses)
    axes.set(xlabel="step", ylabel="loss (nats per byte)")
    axes.legend()
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--steps", type=int, default=200, help="steps of each of the two phases")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--alpha", type=float, default=16)
    parser.add_argument("--output", type=Path, default=Path("loss.png"))
    options = parser.parse_args()

    model = Transformer(width=64, heads=4, depth=2, rngs=nnx.Rngs(0))
    code = fit(
        model, nnx.Param, 3e-3, corpus.source_code(1_000_000), options.steps, "base, on code"
    )
    # The rule adapts all projections, but not the embedding, which is tied to the head.
    rule = jax_dora.DoRARule("all-linear", options.rank, options.alpha)
    model = jax_dora.apply_dora(model, rule, rngs=nnx.Rngs(1))
    english = fit(
        model, nnx.LoRAParam, 1e-2, corpus.english(400_000), options.steps, "adapter, on English"
    )
    plot({"base, on code": code, "adapter, on English": english}, options.output)

    tenth = max(1, options.steps // 10)
    print(f"mean loss of the adapter's first {tenth} steps: {np.mean(english[:tenth]):.3f}")
    print(f"mean loss of the adapter's last {tenth} steps: {np.mean(english[-tenth:]):.3f}")
    print(f"loss curve: {options.output}")


if __name__ == "__main__":
    main()
