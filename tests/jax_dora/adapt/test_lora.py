"""`to_lora`: the best LoRA of a DoRA adapter, against NumPy's SVD in fp64 and PEFT."""

import jax
import jax.numpy as jnp
import numpy as np
import peft
import pytest
import torch
from flax import nnx

from jax_dora import (
    DoRALinear,
    DoRARule,
    apply_dora,
    quantize,
    register,
    set_adapter,
    to_lora,
)
from jax_dora.adapt.tree import find_dora_layers
from jax_dora.peft import save_adapter
from parity import oracle
from tests.jax_dora.meshes import automatic, explicit
from tests.jax_dora.peft import test_peft
from tests.jax_dora.small_models import ALL, WIDTH, Mixed, Stacked, call, ids, train
from tests.tables import ci


def changes(model) -> dict[str, np.ndarray]:
    """Returns W' - W of every layer as matrices [n, in, out], in fp64."""
    found = {}
    for paths, layer in find_dora_layers(model).items():
        contraction, parts = layer.contraction, {}
        for name, parameter in [("kernel", layer.kernel_param)] + [
            (name, getattr(layer, name)) for name in ("lora_a", "lora_b", "magnitude")
        ]:
            axes = getattr(contraction, name)
            array = layer.stack.move_to_front(parameter[...]).reshape(-1, *axes.stored)
            parts[name] = np.concatenate([oracle.fp64(axes.to_matrices(one)) for one in array])
        found[paths[0]] = np.stack(
            [
                oracle.merged_weight(w.T, a.T, b.T, m[0], layer.scale).T - w
                for w, a, b, m in zip(*parts.values(), strict=True)
            ]
        )
    return found


def assert_best(model, rank):
    """Holds every layer's LoRA, and the report, to the singular values of W' - W in fp64."""
    adapter, report = to_lora(model, rank, limit=1.0)
    lora = set_adapter(model, adapter, rngs=nnx.Rngs(0))
    found, expected = changes(lora), changes(model)
    assert [row.path for row in report.layers] == [*expected]
    for row in report.layers:
        change = expected[row.path]
        norms = np.linalg.norm(change, axis=(1, 2))
        groups = 2 if row.path == "conv" else 1
        values = np.linalg.svd(change, compute_uv=False)
        errors = np.linalg.norm(values[:, rank // groups :], axis=1) / norms
        off = np.linalg.norm(found[row.path] - change, axis=(1, 2)) / norms
        np.testing.assert_allclose(off, errors, atol=2e-5)
        np.testing.assert_allclose(row.error, errors.max(), atol=2e-5)
    return lora, report


def rows() -> jax.Array:
    return jax.random.normal(jax.random.key(2), (4, WIDTH))


@pytest.mark.ci
@pytest.mark.parametrize("make", [ci(Mixed), Stacked])
def test_every_kind_of_layer(make):
    rules = ALL if make is Mixed else DoRARule("blocks/.*", 2, 4, dropout=0.1)
    model = train(apply_dora(make(nnx.Rngs(0)), rules, rngs=nnx.Rngs(1)))
    model.eval()
    _, report = assert_best(model, 2)
    assert all(0.1 < row.error < 1 for row in report.layers)
    # Of full rank, and above that of some layers, a LoRA is all that the adapter is.
    lora, _ = assert_best(model, 26)
    lora.eval()
    x = ids() if make is Mixed else rows()
    with jax.default_matmul_precision("highest"):
        np.testing.assert_allclose(call(lora, x), call(model, x), atol=3e-5)


class Experts(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up = nnx.Param(jax.random.normal(rngs.params(), (3, WIDTH, 5)))

    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.einsum("ebi,eio->ebo", x, self.up[...])


@pytest.mark.ci
def test_every_expert_has_its_own():
    register(Experts, param="up", axes="bio")
    model = train(apply_dora(Experts(nnx.Rngs(0)), DoRARule("up", 2, 4), rngs=nnx.Rngs(1)))
    assert_best(model, 3)
    lora, _ = assert_best(model, 5)
    x = jax.random.normal(jax.random.key(0), (3, 2, WIDTH))
    with jax.default_matmul_precision("highest"):
        np.testing.assert_allclose(call(lora, x), call(model, x), atol=1e-5)


@pytest.mark.ci
@pytest.mark.parametrize("qtype", ["nf4", "int8"])
def test_a_quantised_base_stays_as_it_is(qtype):
    base = quantize(nnx.Linear(64, 32, rngs=nnx.Rngs(0)), qtype, path="")
    model = train(apply_dora(base, DoRARule("", 4, 3.0), rngs=nnx.Rngs(0)))
    lora = set_adapter(model, to_lora(model, 32, limit=0)[0])
    assert type(lora.kernel.get_value()) is type(model.kernel.get_value())
    x = jax.random.normal(jax.random.key(1), (4, 64))
    with jax.default_matmul_precision("highest"):
        np.testing.assert_allclose(lora(x), model(x), atol=1e-5)
        assert not np.allclose(set_adapter(model, None)(x), model(x), atol=1e-2)


@pytest.mark.ci
@pytest.mark.parametrize("mesh", [automatic, explicit])
def test_a_sharded_model(mesh):
    layer = train(DoRALinear(WIDTH, 16, rank=3, alpha=4, rngs=nnx.Rngs(0)))
    expected, _ = to_lora(layer, 2, limit=1)
    with jax.set_mesh(mesh(model=2)):
        sharded = jax.device_put(layer.kernel[...], jax.P(None, "model"))
        layer.kernel.set_value(sharded)
        found, _ = to_lora(layer, 2, limit=1)
    for name in ("lora_a", "lora_b"):
        np.testing.assert_allclose(found.arrays[""][name], expected.arrays[""][name], atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("stacked", [False, True])
def test_peft_loads_what_is_saved_and_computes_the_same(stacked, tmp_path):
    rules = DoRARule(r"embed|conv|image|layers/.*_proj|score", 3, 4)
    model = train(apply_dora(test_peft.flax_model(stacked=stacked), rules, rngs=nnx.Rngs(1)))
    adapter, report = to_lora(model, 2, limit=1)
    assert max(row.error for row in report.layers) > 0.1
    with pytest.raises(ValueError, match=r"use_dora is False .* or to_lora for a DoRA adapter"):
        save_adapter(model, tmp_path / "no", use_dora=False)
    lora = set_adapter(model, adapter)
    for layer in find_dora_layers(lora).values():
        if hasattr(layer, "adapt_attend"):
            layer.adapt_attend = False
    save_adapter(lora, tmp_path / "lora", use_dora=False)
    theirs = peft.PeftModel.from_pretrained(test_peft.base(), tmp_path / "lora").eval()
    assert not theirs.peft_config["default"].use_dora
    with torch.no_grad():
        found = theirs(torch.tensor(test_peft.IDS)).numpy()
    np.testing.assert_allclose(found, test_peft.outputs(lora), atol=1e-5)
    assert not np.allclose(found, test_peft.outputs(model), atol=1e-4)


@pytest.mark.ci
def test_the_lora_of_an_adapter_that_changes_nothing_is_saved(tmp_path):
    rules = DoRARule("layers/.*_proj", 3, 4)
    model = apply_dora(test_peft.flax_model(stacked=True), rules, rngs=nnx.Rngs(1))
    adapter, report = to_lora(model, 2, limit=0)
    assert {row.needed for row in report.layers} == {1}
    save_adapter(set_adapter(model, adapter), tmp_path / "lora", use_dora=False)
    theirs = peft.PeftModel.from_pretrained(test_peft.base(), tmp_path / "lora").eval()
    assert theirs.peft_config["default"].r == 2


@pytest.mark.ci
def test_a_layer_above_the_limit_is_refused_and_the_named_rank_does():
    model = train(apply_dora(Mixed(nnx.Rngs(0)), ALL, rngs=nnx.Rngs(1)))
    with pytest.raises(ValueError, match=r"at least 7|at least 8") as error:
        to_lora(model, 2, limit=0.1)
    assert "\n  attention/key: error 0." in str(error.value)
    needed = int(str(error.value).partition("at least ")[2].partition(",")[0])
    _, report = to_lora(model, needed + needed % 2, limit=0.1)
    assert all(row.error <= 0.1 for row in report.layers)


def test_what_is_not_finite_or_has_no_adapter_is_refused():
    with pytest.raises(ValueError, match="model holds no adapter"):
        to_lora(Mixed(nnx.Rngs(0)), 2, limit=1)
    layer = DoRALinear(WIDTH, 16, rank=3, alpha=4, rngs=nnx.Rngs(0))
    layer.magnitude[...] = layer.magnitude[...].at[3].set(jnp.nan)
    with pytest.raises(ValueError, match="the change of '' by its adapter holds NaN"):
        to_lora(layer, 2, limit=1)
    with pytest.raises(TypeError, match="limit is None"):
        to_lora(layer, 2, limit=None)  # pyright: ignore[reportArgumentType]
