"""What qwix's LoRA reaches of a model, and what is reached here: all of that, and more."""

import jax
import jax.numpy as jnp
import pytest
import qwix
from flax import nnx
from jax import lax

from jax_dora import DoRARule, apply_dora, coverage, get_adapter
from tests.jax_dora.weights.own_layers import EXPERTS, HIDDEN, WIDTH, Einsum, Embedder, drawn

HEADS, HEAD = 2, 3
TOKENS = jnp.array([[1, 2, 3, 0]])


class Attention(nnx.Module):
    """As in Tunix: four einsums of a class of its own."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        for name in ("q_proj", "k_proj", "v_proj"):
            setattr(self, name, Einsum("btd,dnh->btnh", (WIDTH, HEADS, HEAD), rngs))
        self.o_proj = Einsum("btnh,nhd->btd", (HEADS, HEAD, WIDTH), rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        weights = jax.nn.softmax(jnp.einsum("btnh,bsnh->bnts", q, k))
        return self.o_proj(jnp.einsum("bnts,bsnh->btnh", weights, v))


class MLP(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up = nnx.Linear(WIDTH, HIDDEN, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(HIDDEN, WIDTH, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(nnx.silu(self.up(x)))


class Experts(nnx.Module):
    """A router, and packed experts in a ragged product."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.router = nnx.Linear(WIDTH, EXPERTS, use_bias=False, rngs=rngs)
        self.gate = drawn(rngs, EXPERTS, WIDTH, HIDDEN)
        self.out = drawn(rngs, EXPERTS, HIDDEN, WIDTH)

    def __call__(self, x: jax.Array) -> jax.Array:
        rows = x.reshape(-1, WIDTH)
        chosen = jnp.argmax(self.router(rows), axis=-1)
        order = jnp.argsort(chosen)
        sizes = jnp.bincount(chosen, length=EXPERTS)
        hidden = nnx.silu(lax.ragged_dot(rows[order], self.gate[...], sizes))
        y = lax.ragged_dot(hidden, self.out[...], sizes)
        return y[jnp.argsort(order)].reshape(x.shape)


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embedder = Embedder(rngs)
        self.attention = Attention(rngs)
        self.mlp = MLP(rngs)
        self.experts = Experts(rngs)

    def __call__(self, ids: jax.Array) -> jax.Array:
        x = self.embedder.encode(ids)
        x = x + self.attention(x)
        x = x + self.mlp(x)
        x = x + self.experts(x)
        return jnp.einsum("btd,vd->btv", x, self.embedder.table[...])


# A row for each weight: whether qwix's LoRA reaches it, and "all-linear" here.
TABLE = {
    "embedder": (False, False),  # an embedding that is the output head too
    "attention/q_proj": (True, True),
    "attention/k_proj": (True, True),
    "attention/v_proj": (True, True),
    "attention/o_proj": (True, True),
    "mlp/up": (True, True),
    "mlp/down": (True, True),
    "experts/router": (True, True),
    "experts/gate": (False, True),
    "experts/out": (False, True),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # what qwix warns of is qwix's
def test_all_that_qwix_reaches_is_reached_here():
    base = Model(nnx.Rngs(0))
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        # Of a ragged product in its way qwix raises, on CPU.
        reachable = "embedder|attention/.*|mlp/.*|experts/router"
        provider = qwix.LoraProvider(rank=2, alpha=4, module_path=reachable)
        theirs = qwix.apply_lora_to_model(base, provider, TOKENS, rngs=nnx.Rngs(1))
    state = nnx.to_flat_state(nnx.state(theirs, nnx.LoRAParam))
    reached = {"/".join(map(str, path[:-1])) for path, _ in state}
    rule = DoRARule("all-linear", 2, 4)
    ours = get_adapter(apply_dora(base, rule, rngs=nnx.Rngs(1), example=(TOKENS,))).arrays
    weights = [row.path for row in coverage(base, TOKENS).weights]
    assert {path: (path in reached, path in ours) for path in weights} == TABLE
    assert reached < ours.keys()
