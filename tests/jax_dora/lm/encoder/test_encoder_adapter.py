"""A DeBERTa with an adapter that PEFT made computes, and learns, as PEFT does."""

import jax.numpy as jnp
import numpy as np
import peft
import pytest
import torch
from flax import nnx

import jax_dora
from jax_dora.lm.encoder import load_classifier
from jax_dora.lm.models.decoder import step_options
from parity import tolerances
from tests.jax_dora.lm.encoder.conftest import torch_model
from tests.jax_dora.lm.encoder.test_encoder import loss_of, torch_loss

PROJECTIONS = ("query_proj", "key_proj", "value_proj", "dense")
KINDS = {"lora_A": "lora_a", "lora_B": "lora_b", "lora_magnitude_vector": "magnitude"}


def peft_classifier(family: str, **options):
    """An adapter of PEFT's: lora_B away from zero, magnitudes from their norms."""
    targets = [*PROJECTIONS, *(["pos_key_proj", "pos_query_proj"] if family[0] == "o" else [])]
    config = peft.LoraConfig(
        task_type="SEQ_CLS", use_dora=True, r=4, lora_alpha=6, target_modules=targets, **options
    )
    model = peft.get_peft_model(torch_model(family), config)
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name or "modules_to_save" in name:
                parameter.add_(0.05 * torch.randn_like(parameter))
            elif "lora_magnitude_vector" in name:
                parameter.mul_(1 + 0.2 * torch.randn_like(parameter))
    return model.eval()


@nnx.jit
def compute(model, texts):
    wanted = nnx.DiffState(0, nnx.LoRAParam)
    return nnx.value_and_grad(loss_of, argnums=wanted, has_aux=True)(model, texts)


@nnx.jit
def logits_of(model, texts):
    return loss_of(model, texts)[1]


@pytest.mark.parametrize("family", ["v3", pytest.param("own-projections", marks=pytest.mark.slow)])
@pytest.mark.ci
def test_logits_and_gradients(family, make_folder, texts, tmp_path):
    theirs = peft_classifier(family)
    theirs.save_pretrained(tmp_path / "theirs")
    base = load_classifier(make_folder(family))
    ours = jax_dora.peft.load_adapter(base, tmp_path / "theirs")
    result = torch_loss(theirs, texts)
    result.loss.backward()
    expected = result.logits.detach().numpy()
    (_, logits), gradients = compute(ours, texts)
    assert np.abs(logits - expected).max() <= tolerances.caps.OPERATOR_FP32_MAX_ABS
    # The adapter is not a small change that would hide in the tolerance.
    assert np.abs(logits_of(base, texts) - expected).max() > 0.1

    found = {".".join(map(str, path)): g.get_value() for path, g in nnx.to_flat_state(gradients)}
    for name, parameter in theirs.named_parameters():
        if parameter.grad is None or "lora_" not in name:
            continue
        *path, kind = (
            name.removeprefix("base_model.model.")
            .removesuffix(".weight")
            .removesuffix(".default")
            .split(".")
        )
        gradient, peak = parameter.grad.numpy(), np.abs(parameter.grad.numpy()).max()
        assert peak > 0
        error = np.abs(np.asarray(found.pop(".".join((*path, KINDS[kind])))).T - gradient).max()
        assert error <= tolerances.caps.OPERATOR_FP32_MAX_ABS * min(1, peak), name
    assert not found

    jax_dora.peft.save_adapter(
        ours, tmp_path / "ours", modules_to_save=["classifier", "score"], task_type="SEQ_CLS"
    )
    again = peft.PeftModel.from_pretrained(torch_model(family), tmp_path / "ours").eval()
    with torch.no_grad():
        assert torch.equal(torch_loss(again, texts).logits, result.logits)


@pytest.mark.ci
def test_all_linear_and_merged(make_folder, texts):
    """A rule finds the projections, and the merged model computes what the adapted one does."""
    base = load_classifier(make_folder("v2-xlarge"))
    rule = jax_dora.DoRARule("all-linear", 4, 6, exclude="(pooler|classifier).*")
    model = jax_dora.apply_dora(base, rule, rngs=nnx.Rngs(0))
    layers = [one for _, one in nnx.iter_modules(model) if isinstance(one, jax_dora.DoRALinear)]
    assert len(layers) == 2 * 6
    for number, layer in enumerate(layers):
        rng = np.random.default_rng(number)
        layer.lora_b[...] = jnp.asarray(0.1 * rng.standard_normal(layer.lora_b.shape), jnp.float32)
        factors = 1 + 0.2 * rng.standard_normal(layer.magnitude.shape)
        layer.magnitude[...] = layer.magnitude[...] * jnp.asarray(factors, jnp.float32)
    expected = logits_of(model, texts)
    merged = logits_of(jax_dora.merge_dora(model), texts)
    assert np.abs(logits_of(base, texts) - expected).max() > 0.1
    assert np.abs(merged - expected).max() <= tolerances.caps.OPERATOR_FP32_MAX_ABS


def test_a_step_lets_cublas_add_unless_kernels_are_quantised(make_folder):
    model = load_classifier(make_folder("v3"))
    assert dict(step_options(model))["xla_gpu_enable_triton_gemm"] is False
    assert step_options(jax_dora.quantize(model, "int8")) == ()
