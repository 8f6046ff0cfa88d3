"""The encoder computes what transformers' DeBERTa computes."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
import transformers
from flax import nnx
from transformers.models.deberta_v2 import modeling_deberta_v2

from jax_dora.lm.encoder import DebertaConfig, SequenceClassifier, load_classifier, save_classifier
from jax_dora.lm.encoder.relative_positions import buckets_of
from jax_dora.lm.models.stored_arrays import LEAVES
from parity import tolerances
from tests.jax_dora.lm.encoder.conftest import FAMILIES, SIZES, torch_model
from tests.tables import thinned

# Issue 60's bound, of logits near one.
LOGITS = 1e-5
QUICK = ("v2-xlarge", "p2c")


def loss_of(model, texts):
    logits = model(*(jnp.asarray(texts[name]) for name in ("tokens", "mask", "types")))
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.asarray(texts["labels"]))
    return losses.mean(), logits


@nnx.jit
def compute(model, texts):
    return nnx.value_and_grad(loss_of, has_aux=True)(model, texts)


def torch_loss(model, texts):
    tensors = {name: torch.tensor(array).long() for name, array in texts.items()}
    types = tensors["types"] if model.config.type_vocab_size else None
    return model(
        input_ids=tensors["tokens"],
        attention_mask=tensors["mask"],
        token_type_ids=types,
        labels=tensors["labels"],
    )


@pytest.mark.parametrize(
    "family",
    thinned(FAMILIES, QUICK, ["own-projections"]),
)
@pytest.mark.ci
def test_logits_and_all_gradients(family, make_folder, texts):
    theirs = torch_model(family)
    result = torch_loss(theirs, texts)
    result.loss.backward()
    model = load_classifier(make_folder(family))
    (_, logits), gradients = compute(model, texts)
    expected = result.logits.detach().numpy()
    assert logits.dtype == jnp.float32
    assert np.abs(logits - expected).max() <= LOGITS * max(1, np.abs(expected).max())

    found = {}
    for (*path, name), gradient in nnx.to_flat_state(gradients):
        leaf, transposed = LEAVES[name]
        value = np.asarray(gradient.get_value())
        found[".".join((*map(str, path), leaf))] = value.T if transposed else value
    count = 0
    for name, parameter in theirs.named_parameters():
        if parameter.grad is None:
            continue
        gradient = parameter.grad.numpy()
        peak = np.abs(gradient).max()
        assert np.abs(found.pop(name) - gradient).max() <= 10 * LOGITS * max(peak, 1e-3), name
        count += 1
    assert count > 2 * 16
    assert not found


@pytest.mark.parametrize(("buckets", "furthest"), [(8, 20), (32, 64), (256, 512), (-1, 24)])
def test_buckets_are_transformers(buckets, furthest):
    sizes = SIZES | {"position_buckets": buckets, "max_relative_positions": furthest}
    config = DebertaConfig.from_hf({"model_type": "deberta-v2", "relative_attention": True} | sizes)
    time = 2 * furthest + 3
    states = torch.zeros(1, time, 1)
    expected = modeling_deberta_v2.build_relative_position(states, states, buckets, furthest)
    expected = np.clip(expected[0].numpy() + config.span, 0, 2 * config.span - 1)
    index = np.arange(time)
    distance = index[:, None] - index[None, :]
    np.testing.assert_array_equal(buckets_of(config, time)[distance + time - 1], expected)


@pytest.mark.ci
def test_a_folder_of_the_encoder_alone_gets_a_new_head(tmp_path, texts):
    theirs = torch_model("v3")
    theirs.deberta.save_pretrained(tmp_path)
    model = load_classifier(tmp_path, num_labels=5)
    assert model.classifier.bias.shape == (5,)
    np.testing.assert_array_equal(
        model.deberta.encoder.layer[1].attention.self.key_proj.kernel[...],
        theirs.deberta.encoder.layer[1].attention.self.key_proj.weight.detach().numpy().T,
    )
    assert np.isfinite(compute(model, texts)[0][1]).all()


def test_transformers_reads_what_we_write(make_folder, tmp_path, texts):
    folder = make_folder("v2-xlarge")
    model = load_classifier(folder)
    config = transformers.AutoConfig.from_pretrained(folder).to_dict()
    save_classifier(model, tmp_path / "new", config, tokenizer_from=folder)
    again = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "new").eval()
    with torch.no_grad():
        expected = torch_loss(torch_model("v2-xlarge"), texts).logits
        assert torch.equal(torch_loss(again, texts).logits, expected)
    with pytest.raises(FileExistsError, match="expected a new folder"):
        save_classifier(model, tmp_path / "new", config)


@pytest.mark.ci
def test_dropout_is_that_of_the_original(make_folder, texts):
    """Every rate acts on its own, an element is kept or dropped whole, and a step has new masks."""
    run = nnx.jit(lambda model, texts: loss_of(model, texts)[1])
    rates = ("hidden_dropout_prob", "attention_probs_dropout_prob", "pooler_dropout", "cls_dropout")
    none, short = dict.fromkeys(rates, 0.0), {"num_hidden_layers": 1}
    folder = make_folder("v3")
    model = load_classifier(folder, **short, **dict.fromkeys(rates, 0.5))
    expected = run(model, texts)
    off = run(load_classifier(folder, **none | short), texts)
    np.testing.assert_array_equal(expected, off)
    model.train()
    model.eval()
    np.testing.assert_array_equal(run(model, texts), expected)
    for name in rates:
        model = load_classifier(folder, **none | short | {name: 0.5})
        model.train()
        first, second = (run(model, texts) for _ in range(2))
        assert np.abs(first - expected).max() > 1e-3, name
        assert np.abs(first - second).max() > 1e-3, name


def test_bad_folders(make_folder, tmp_path):
    with pytest.raises(NotImplementedError, match="model_type 'bert'; expected 'deberta-v2'"):
        DebertaConfig.from_hf({"model_type": "bert"})
    with pytest.raises(ValueError, match="hidden_size 50; expected a multiple of"):
        DebertaConfig.from_hf({"model_type": "deberta-v2", **SIZES, "hidden_size": 50})
    with pytest.raises(NotImplementedError, match="hidden_act 'mish'"):
        DebertaConfig.from_hf({"model_type": "deberta-v2", **SIZES, "hidden_act": "mish"})
    with pytest.raises(FileNotFoundError, match="expected a Hugging Face model folder"):
        load_classifier(tmp_path)
    with pytest.raises(ValueError, match="lacks 16 tensors"):
        load_classifier(make_folder("bert"), num_hidden_layers=3)
    with pytest.raises(ValueError, match=r"config\.json says"):
        load_classifier(make_folder("bert"), intermediate_size=72)
    model = SequenceClassifier(load_classifier(make_folder("bert")).config, rngs=nnx.Rngs(0))
    model.classifier.lora_a = nnx.Param(jnp.zeros(3))
    with pytest.raises(ValueError, match="merge the adapters"):
        save_classifier(model, tmp_path / "new", {})


@pytest.mark.slow
def test_the_kernels_compute_the_model(make_folder, texts):
    """Logits and gradients of the whole model, with dropout, are those of XLA."""
    found = []
    for attention in ("xla", "triton"):
        model = load_classifier(make_folder("wide-heads"), attention=attention)
        model.train()
        found.append(compute(model, texts))
    for one, other in zip(*map(jax.tree.leaves, found), strict=True):
        peak = max(1e-3, np.abs(other).max())
        assert np.abs(one - other).max() <= tolerances.caps.OPERATOR_FP32_MAX_ABS * peak


@pytest.mark.slow
def test_logits_of_bf16(make_folder, texts):
    """As near to fp64 as transformers in bf16, by flash-attention's rule."""
    exact = torch_loss(torch_model("v3").double(), texts).logits.detach().numpy()
    theirs = torch_loss(torch_model("v3").bfloat16(), texts).logits.detach().double().numpy()
    with jax.numpy_dtype_promotion("standard"):  # nnx.LayerNorm's own need
        logits = loss_of(load_classifier(make_folder("v3"), dtype="bfloat16"), texts)[1]
    assert logits.dtype == jnp.bfloat16
    bound = tolerances.flash_rule(np.abs(theirs - exact).max(), np.abs(exact).max(), "bfloat16")
    assert np.abs(np.float64(logits) - exact).max() <= bound
