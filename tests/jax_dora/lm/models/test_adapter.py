"""A decoder with an adapter that PEFT made computes, and learns, as PEFT does."""

import jax
import jax.numpy as jnp
import numpy as np
import peft
import pytest
import torch
from flax import nnx

import jax_dora
import jax_dora.lm.models as decoder
import jax_dora.peft
from parity import tolerances
from tests.jax_dora.lm.models.test_model import cosine
from tests.jax_dora.peft.peft_folders import peft_model

# PEFT stores an adapted embedding itself, too.
pytestmark = pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`:UserWarning")

LAST = 20
SETTINGS = {
    "all-linear": {"r": 5, "lora_alpha": 8, "target_modules": "all-linear"},
    # Rank above the key's and value's 32 features.
    "attention": {
        "r": 40,
        "lora_alpha": 20,
        "use_rslora": True,
        "target_modules": ["q_proj", "v_proj"],
    },
    "embedding": {"r": 4, "lora_alpha": 8, "target_modules": ["embed_tokens", "o_proj"]},
}
PAIRS = [
    ("llama", "all-linear"),
    ("qwen3", "all-linear"),
    ("qwen3", "attention"),
    # The head is not adapted with the embedding that it is tied to, nor without.
    ("qwen3-tied", "embedding"),
    ("qwen3", "embedding"),
]
# PEFT's names of an adapter's tensors, and ours.
KINDS = {
    "lora_A": "lora_a",
    "lora_B": "lora_b",
    "lora_embedding_A": "lora_a",
    "lora_embedding_B": "lora_b",
    "lora_magnitude_vector": "magnitude",
}


@pytest.fixture(params=PAIRS, ids="-".join)
def pair(request, make_folder, make_torch_model, tmp_path):
    family, setting = request.param
    theirs = peft_model(make_torch_model(family), use_dora=True, **SETTINGS[setting])
    theirs.save_pretrained(tmp_path / "adapter")
    base = decoder.load_model(make_folder(family))
    return theirs, base, jax_dora.peft.load_adapter(base, tmp_path / "adapter"), family


@nnx.jit
def compute(model, tokens):
    def loss_fn(model):
        loss = decoder.last_tokens_loss(model, tokens, LAST)
        return loss.total / loss.weight

    gradients = nnx.grad(loss_fn, argnums=nnx.DiffState(0, nnx.LoRAParam))(model)
    return model(tokens), gradients


@pytest.mark.slow
def test_logits_and_gradients(pair, tokens):
    theirs, base, ours, _ = pair
    expected = theirs(torch.tensor(tokens)).logits
    targets = torch.tensor(tokens[:, -LAST:], dtype=torch.long)
    torch.nn.functional.cross_entropy(
        expected[:, -LAST - 1 : -1].reshape(-1, expected.shape[-1]), targets.reshape(-1)
    ).backward()
    expected = expected.detach().numpy()

    logits, gradients = compute(ours, jnp.asarray(tokens))
    assert cosine(logits, expected) >= tolerances.caps.COSINE["float32"]
    assert np.abs(logits - expected).max() <= tolerances.caps.OPERATOR_FP32_MAX_ABS
    # The adapter is not a small change that would hide in the tolerance.
    assert np.abs(base(jnp.asarray(tokens)) - expected).max() > 0.1

    found = {"/".join(path): g.get_value() for path, g in nnx.to_flat_state(gradients)}
    count = 0
    for name, parameter in theirs.named_parameters():
        if parameter.grad is None:
            continue
        *path, kind = (
            name.removeprefix("base_model.model.")
            .removesuffix(".weight")
            .removesuffix(".default")
            .split(".")
        )
        kind = KINDS[kind]
        layer = int(path.pop(2)) if path[1] == "layers" else ...
        ours_gradient = np.asarray(found["/".join((*path, kind))][layer]).T
        gradient = parameter.grad.numpy()
        peak = np.abs(gradient).max()
        assert peak > 0
        bound = (
            tolerances.caps.D_MAGNITUDE_FP32_MAX_ABS
            if kind == "magnitude"
            else tolerances.caps.OPERATOR_FP32_MAX_ABS
        )
        # Of the peak, where it is below one: these gradients are small.
        assert np.abs(ours_gradient - gradient).max() <= bound * min(1, peak), name
        count += 1
    in_layers = sum("/layers/" in name for name in found)
    assert count == 3 * in_layers + (len(found) - in_layers)


@pytest.mark.slow
def test_peft_reads_what_we_write(pair, make_torch_model, tokens, tmp_path):
    theirs, _, ours, family = pair
    jax_dora.peft.save_adapter(ours, tmp_path / "ours", task_type="CAUSAL_LM")
    again = peft.PeftModel.from_pretrained(make_torch_model(family), tmp_path / "ours").eval()
    with torch.no_grad():
        expected = theirs(torch.tensor(tokens)).logits
        assert torch.equal(again(torch.tensor(tokens)).logits, expected)


@pytest.mark.slow
def test_bf16(make_folder, make_torch_model, tokens, tmp_path):
    """fp32 adapters on a bf16 base: as near to fp64 as PEFT, by flash-attention's rule."""
    theirs = peft_model(
        make_torch_model("qwen3", torch.bfloat16), use_dora=True, **SETTINGS["all-linear"]
    )
    theirs.save_pretrained(tmp_path / "adapter")
    with torch.no_grad():
        in_bf16 = theirs(torch.tensor(tokens)).logits.double().numpy()
        exact = theirs.double()(torch.tensor(tokens)).logits.numpy()
    base = decoder.load_model(make_folder("qwen3", dtype=torch.bfloat16))
    ours = jax_dora.peft.load_adapter(base, tmp_path / "adapter")
    assert ours.model.layers.mlp.up_proj.lora_a.dtype == jnp.float32
    with jax.numpy_dtype_promotion("standard"):  # jax.nn.dot_product_attention's own need
        logits = nnx.jit(type(ours).__call__)(ours, jnp.asarray(tokens))
    assert logits.dtype == jnp.bfloat16
    bound = tolerances.flash_rule(np.abs(in_bf16 - exact).max(), np.abs(exact).max(), "bfloat16")
    assert np.abs(np.float64(logits) - exact).max() <= bound
    assert cosine(logits, exact) >= tolerances.caps.LOGITS_COSINE


@pytest.mark.slow
def test_what_peft_cannot_say_of_a_tied_head_is_told(make_folder, tmp_path, caplog):
    base = decoder.load_model(make_folder("qwen3-tied"))
    rule = jax_dora.DoRARule("model/embed_tokens", rank=2, alpha=2)
    model = jax_dora.apply_dora(base, rule, rngs=nnx.Rngs(0))
    jax_dora.peft.save_adapter(model, tmp_path / "adapter")
    assert "model.embed_tokens: adapt_attend is True" in caplog.text
    caplog.clear()
    again = jax_dora.peft.load_adapter(base, tmp_path / "adapter")
    assert again.model.embed_tokens.adapt_attend is False
    jax_dora.peft.save_adapter(again, tmp_path / "again")
    assert not caplog.text
