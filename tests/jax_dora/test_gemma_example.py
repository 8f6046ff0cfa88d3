"""The gemma example of Flax's repository, in miniature: adapted whole, trained and merged.

The structure is the example's: projections of all heads in one `nnx.Einsum`, keys and values of
fewer heads in another, a gated MLP, and a scaled embedding that is the output head too.
"""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jax_dora
from jax_dora import DoRARule, apply_dora, get_adapter, merge_dora
from tests.whole_models import check_nnx

VOCABULARY, WIDTH, HEADS, HEAD, HIDDEN = 13, 8, 4, 3, 12
TOKENS = jax.random.randint(jax.random.key(2), (2, 5), 0, VOCABULARY)


class ScaledEmbed(nnx.Embed):
    def __call__(self, inputs: jax.Array, out_sharding=None) -> jax.Array:
        return super().__call__(inputs, out_sharding) * jnp.sqrt(jnp.float32(self.features))


class Attention(nnx.Module):
    """Causal; of `groups` heads of keys and values, or of all in one array where it is None."""

    def __init__(self, groups: int | None, rngs: nnx.Rngs) -> None:
        self.groups = groups
        self.out = nnx.Einsum("BTNH,NHD->BTD", (HEADS, HEAD, WIDTH), rngs=rngs)
        if groups is None:
            self.qkv = nnx.Einsum("BTD,SNDH->SBTNH", (3, HEADS, WIDTH, HEAD), rngs=rngs)
        else:
            self.q = nnx.Einsum("BTD,NDH->BTNH", (HEADS, WIDTH, HEAD), rngs=rngs)
            self.kv = nnx.Einsum("BTD,CKDH->CBTKH", (2, groups, WIDTH, HEAD), rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        q, k, v = self.qkv(x) if self.groups is None else (self.q(x), *self.kv(x))
        return self.out(jax.nn.dot_product_attention(q, k, v, is_causal=True))


class Block(nnx.Module):
    def __init__(self, groups: int | None, rngs: nnx.Rngs) -> None:
        self.norms = nnx.List([nnx.RMSNorm(WIDTH, rngs=rngs) for _ in range(2)])
        self.attention = Attention(groups, rngs)
        options = {"use_bias": False, "rngs": rngs}
        self.gate, self.up = (nnx.Linear(WIDTH, HIDDEN, **options) for _ in range(2))
        self.down = nnx.Linear(HIDDEN, WIDTH, **options)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.norms[0](x))
        h = self.norms[1](x)
        return x + self.down(nnx.gelu(self.gate(h)) * self.up(h))


class Model(nnx.Module):
    """A block as the first Gemma's and one as Gemma 3's."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embedder = ScaledEmbed(VOCABULARY, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(None, rngs), Block(2, rngs)])

    def __call__(self, ids: jax.Array) -> jax.Array:
        x = self.embedder(ids)
        for block in self.blocks:
            x = block(x)
        return self.embedder.attend(x)


@pytest.mark.slow
def test_it_is_adapted_whole_trains_and_merges():
    base = Model(nnx.Rngs(0))
    table = jax_dora.coverage(base, TOKENS)
    assert table.count("adaptable") == len(table.weights) == 1 + 5 + 6
    assert [one.path for one in table.weights if not one.is_linear] == ["embedder"]
    rules = [DoRARule("all-linear", 2, 3), DoRARule("embedder", 2, 3)]
    model = apply_dora(base, rules, rngs=nnx.Rngs(1), example=(TOKENS,))
    check_nnx(model, base, lambda model: model(TOKENS), TOKENS, 2e-5)
    assert len(get_adapter(model).arrays) == 12
    assert type(merge_dora(model).embedder) is ScaledEmbed
