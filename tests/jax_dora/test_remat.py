"""Rematerialisation computes no norm twice, and nothing for a magnitude's gradient alone."""

import functools
import gc
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.ad_checkpoint import print_saved_residuals
from jax.sharding import NamedSharding

import jax_dora
from jax_dora import DoRARule
from tests.jax_dora.meshes import automatic
from tests.jax_dora.programs import equations
from tests.tables import ci

WIDTH = 16


def count(op: str, function, *args) -> int:
    """How often the program of `function` calls an operator."""
    return sum(str(one.params.get("op")) == op for one in equations(function, *args))


def assert_close(one: Any, other: Any) -> None:
    for found, wanted in zip(*map(jax.tree.leaves, (one, other)), strict=True):
        np.testing.assert_allclose(found, wanted, atol=1e-5 * float(np.abs(wanted).max()))


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)
        self.mix = nnx.Param(jax.random.normal(rngs.params(), (WIDTH, WIDTH)) / 4)
        self.read_again = False

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.down(jnp.tanh(self.up(x))) @ self.mix[...]
        return x + (jnp.tanh(y) if self.read_again else y)


class Blocks(nnx.Module):
    """A list of rematerialised blocks, without anything of this library."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.blocks = nnx.List([Block(rngs) for _ in range(2)])

    def __call__(self, x: jax.Array, remat=nnx.remat) -> jax.Array:
        for block in self.blocks:
            x = remat(Block.__call__)(block, x)
        return x


def adapted_blocks(**options: Any) -> tuple[Blocks, jax.Array]:
    model, x = _adapted_blocks(**options)
    return nnx.clone(model), x


@functools.cache
def _adapted_blocks(**options: Any) -> tuple[Blocks, jax.Array]:
    init = nnx.initializers.normal(0.1)
    rule = DoRARule(".*", 4, 8, lora_a_init=init, lora_b_init=init, **options)
    x = jax.random.normal(jax.random.key(2), (3, WIDTH))
    model = jax_dora.apply_dora(Blocks(nnx.Rngs(0)), rule, rngs=nnx.Rngs(1), example=(x,))
    return model, x


REMATS = {
    "none": lambda block: block,
    "no policy": nnx.remat,
    "nothing": functools.partial(nnx.remat, policy=jax.checkpoint_policies.nothing_saveable),
    "dots": functools.partial(nnx.remat, policy=jax.checkpoint_policies.dots_saveable),
    "ours": lambda block: nnx.remat(block, policy=jax_dora.remat_policy()),
    "nested": lambda block: nnx.remat(lambda self, x: nnx.remat(block)(self, x)),
    "jitted": lambda block: nnx.remat(nnx.jit(block)),
    "no barrier": functools.partial(nnx.remat, prevent_cse=False),
}


def gradient(model, x, remat, transform=lambda function: function):
    graphdef, state = nnx.split(model)

    def run(state, x):
        wrt = nnx.DiffState(0, nnx.LoRAParam)
        loss = nnx.grad(lambda model, x: jnp.sum(jnp.sin(model(x, remat))), argnums=wrt)
        return nnx.to_pure_dict(loss(nnx.merge(graphdef, state), x))

    return transform(run), state, x


@functools.cache
def plain_gradient(read_again=False):
    """The compiled gradient of blocks that are not rematerialised."""
    model, x = adapted_blocks()
    for block in model.blocks:
        block.read_again = read_again
    return jax.jit(gradient(model, x, REMATS["none"])[0])


class TestRematerialisedNorms:
    """A norm is computed once, whatever is rematerialised."""

    @pytest.mark.ci
    @pytest.mark.parametrize("remat", REMATS)
    def test_blocks_of_a_list(self, remat):
        model, x = adapted_blocks()
        function, *args = gradient(model, x, REMATS[remat])
        assert count("norm", function, *args) == 2 * 3
        found = jax.jit(function)
        plain = plain_gradient()
        assert_close(found(*args), plain(*args))
        # Nothing is kept for the next call.
        for _, one in nnx.to_flat_state(args[0]):
            if jnp.issubdtype(one.dtype, jnp.floating):
                one[...] *= 1.5
        assert_close(found(*args), plain(*args))

    @pytest.mark.ci
    def test_batches_of_models(self):
        model, x = adapted_blocks()
        function, state, x = gradient(model, x, nnx.remat)
        batch = jax.tree.map(lambda one: jnp.stack([one, 1.25 * one]), state)
        found = jax.jit(jax.vmap(function, (0, None)))(batch, x)
        second = jax.tree.map(lambda one: one[1], batch)
        assert_close(jax.tree.map(lambda one: one[1], found), jax.jit(function)(second, x))

    @pytest.mark.ci
    @pytest.mark.parametrize("policy", [ci(None), jax_dora.remat_policy()], ids=["none", "ours"])
    def test_a_scan_over_layers(self, policy):
        stack = nnx.split_rngs(splits=3)(nnx.vmap(Block))(nnx.Rngs(0))
        rule = DoRARule("up|down", 4, 8, lora_b_init=nnx.initializers.normal(0.1))
        stack = jax_dora.apply_dora(stack, rule, rngs=nnx.Rngs(1))
        scan = nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)

        def run(remat):
            def forward(stack, x):
                return scan(lambda x, block: remat(Block.__call__)(block, x))(x, stack)

            def loss(state, x):
                wrt = nnx.DiffState(0, nnx.LoRAParam)
                grads = nnx.grad(lambda one, x: jnp.sum(jnp.sin(forward(one, x))), argnums=wrt)
                return nnx.to_pure_dict(grads(nnx.merge(graphdef, state), x))

            return loss

        graphdef, state = nnx.split(stack)
        x = jax.random.normal(jax.random.key(2), (3, WIDTH))
        found = run(functools.partial(nnx.remat, policy=policy))
        assert count("norm", found, state, x) == 2
        # The forward pass computes both layers of a block, the backward pass only the first one.
        assert count("project", found, state, x) == 3
        assert_close(jax.jit(found)(state, x), jax.jit(run(lambda block: block))(state, x))

    @pytest.mark.parametrize(
        ("read_again", "keep_inner", "inner"),
        [(True, None, []), (False, None, ["f32[3,16]"]), (False, False, [])],
    )
    def test_what_is_kept(self, read_again, keep_inner, inner, capsys):
        """Beside the inputs of a rematerialised function."""
        model, x = adapted_blocks(keep_inner=keep_inner)
        model.blocks[0].read_again = read_again
        graphdef, adapter, rest = nnx.split(model.blocks[0], nnx.LoRAParam, ...)

        @jax.checkpoint
        def run(adapter, rest, x):
            return nnx.merge(graphdef, adapter, rest)(x)

        print_saved_residuals(run, adapter, rest, x)
        lines = [one for one in capsys.readouterr().out.splitlines() if "argument" not in one]
        norms_and_gs = 2 * ["f32[16]", "f32[16]", "f32[32]"]
        assert sorted(one.split()[0] for one in lines) == sorted(norms_and_gs + inner)

    @pytest.mark.parametrize(
        ("remat", "options", "twice"),
        [
            ("no policy", {}, 2),
            ("ours", {}, 2),
            ("nested", {}, 2),
            ("jitted", {}, 2),
            ("ours", {"keep_inner": False}, 3),
            ("ours", {"keep_inner": True}, 2),  # the others' biases are added again
            ("dots", {}, 3),  # a policy of the user's own
        ],
    )
    @pytest.mark.parametrize("read_again", [False, True])
    @pytest.mark.ci
    def test_the_last_projection_is_computed_once(self, remat, options, twice, read_again):
        """Unless the block itself reads its result in the backward pass."""
        model, x = adapted_blocks(**options)
        for block in model.blocks:
            block.read_again = read_again
        function, *args = gradient(model, x, REMATS[remat])
        if read_again and not options.get("keep_inner"):
            twice = 3
        assert count("project", function, *args) == 2 * (3 + twice)
        assert_close(jax.jit(function)(*args), plain_gradient(read_again)(*args))

    def test_a_policy_outlives_an_equal_one(self):
        first, second = jax_dora.remat_policy("other"), jax_dora.remat_policy("other")
        del first
        gc.collect()
        model, x = adapted_blocks()
        remat = functools.partial(nnx.remat, policy=second)
        assert count("project", *gradient(model, x, remat)) == 2 * (3 + 2)

    @pytest.mark.ci
    def test_a_mesh(self):
        mesh = automatic(model=2)
        model, x = adapted_blocks()
        function, state, x = gradient(model, x, nnx.remat)
        wanted = jax.jit(function)(state, x)
        for path, one in nnx.to_flat_state(state):
            if path[-1] == "kernel":
                sharding = NamedSharding(mesh, jax.P(None, "model"))
                one.set_value(jax.device_put(one.get_value(), sharding))
        assert_close(jax.jit(function)(state, x), wanted)
