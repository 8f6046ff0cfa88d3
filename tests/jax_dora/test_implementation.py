"""A layer's `implementation` is its norm's too."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jax_dora
import jax_dora.linen
from jax_dora.layers import DORA_CLASSES
from jax_dora.ops.dispatch import choose
from jax_dora.ops.mosaic.norm import one_pass_norm
from tests.jax_dora.programs import for_cuda

LAYERS = {
    "linear": lambda rngs: nnx.Linear(64, 128, rngs=rngs),
    "general": lambda rngs: nnx.LinearGeneral(64, (2, 64), rngs=rngs),
    "conv": lambda rngs: nnx.Conv(64, 128, (1,), rngs=rngs),
    "embed": lambda rngs: nnx.Embed(64, 128, rngs=rngs),
}
IMPLEMENTATIONS = [(None, True), ("xla", False)]


@pytest.fixture
def on_hopper(monkeypatch):
    """Returns whether a norm's kernel is in a program for a GPU, where it always wins."""

    def takes_the_kernel(function, *operands):
        monkeypatch.setattr(choose, "target", lambda: choose.Target("gpu", "9.0"))
        monkeypatch.setattr(one_pass_norm, "wins", lambda *_: True)
        return "dora_one_pass_norm" in for_cuda(function, *operands)

    return takes_the_kernel


@pytest.mark.parametrize(("implementation", "fused"), IMPLEMENTATIONS)
@pytest.mark.parametrize("name", LAYERS)
def test_of_nnx(on_hopper, name, implementation, fused):
    options = {"rank": 8, "alpha": 8, "implementation": implementation}
    base = LAYERS[name](nnx.Rngs(0))
    layer = jax_dora.apply_dora(base, jax_dora.DoRARule("", **options), rngs=nnx.Rngs(0))
    assert on_hopper(layer.norm) == fused


@pytest.mark.parametrize("name", LAYERS)
def test_an_unknown_one_is_refused(name):
    base = LAYERS[name](nnx.Rngs(0))
    with pytest.raises(ValueError, match="implementation is 'cuda'; expected None"):
        DORA_CLASSES[type(base)].from_base(
            base, rank=8, alpha=8, implementation="cuda", rngs=nnx.Rngs(0)
        )


@pytest.mark.parametrize(("implementation", "fused"), IMPLEMENTATIONS)
def test_of_linen(on_hopper, implementation, fused):
    layer = jax_dora.linen.DoRADense(128, rank=8, alpha=8, implementation=implementation)
    x = jnp.ones((8, 64))
    variables = layer.init(jax.random.key(0), x)
    assert on_hopper(layer.apply, variables, x) == fused
