"""The pretrained encoder: its tokenizer, its two forms, and the run on real input."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from parity import minilm
from parity.__main__ import main
from parity.report import read
from parity.sides.jax import encoder as jax_encoder
from parity.sides.torch import encoder as torch_encoder

SENTENCES = [
    "The café's 3 naïve waiters — unbelievably — said: “Hello, World!”",
    "supercalifragilisticexpialidocious $100 C++ e-mail@example.com",
    "東京 is larger than São Paulo?\tNo;\nnot by much…",
]


def test_padding_is_masked():
    ids, mask = minilm.tokens(["one", "one two three"])
    assert ids.shape == mask.shape == (2, 5)
    assert mask[0].tolist() == [1, 1, 1, 0, 0]
    assert ids[0, 3:].tolist() == [0, 0]


@pytest.mark.slow
def test_jax_encoder_is_the_same_model():
    ids, mask = minilm.tokens(SENTENCES)
    with torch.no_grad():
        encoder = torch_encoder.Encoder(lambda _, linear: linear)
        want = encoder(torch.from_numpy(ids), torch.from_numpy(mask)).numpy()
    encoder = jax_encoder.Encoder(lambda _, linear: linear)
    got = np.asarray(encoder(jnp.asarray(ids, jnp.int32), jnp.asarray(mask, jnp.int32)))
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-6)


@pytest.mark.slow
def test_a_fresh_adapter_changes_nothing():
    batch = minilm.batch(minilm.sentence_pairs()[:1])
    plain = torch_encoder.Encoder(lambda _, linear: linear)
    ids, mask = torch.from_numpy(batch.ids), torch.from_numpy(batch.mask)
    want = plain(ids, mask).detach().double()
    adapter = minilm.initial_adapter()
    adapted = torch_encoder.adapted(adapter, "float32", None)
    got = torch_encoder.evaluate(adapted, batch, False).embeddings
    torch.testing.assert_close(got, want, rtol=0, atol=1e-6)


@pytest.mark.slow
def test_training_and_embeddings_agree(tmp_path):
    arguments = ["--device", "cpu", "--quick", "--level", "encoder", "--out", str(tmp_path)]
    assert main(arguments) == 0
    rows = read(tmp_path / "encoder.jsonl")[1]
    quantities = {row["quantity"] for row in rows}
    assert {"mean |Δloss|", "embeddings", "embeddings, 1 - cosine"} < quantities
    assert {f"d_{name}, relative" for name in minilm.ADAPTER} < quantities
    assert {"jax xla", "jax mosaic", "torch eager", "torch triton"} <= {r["side"] for r in rows}
    facts = {row["quantity"]: row["value"] for row in rows if "value" in row}
    assert facts["loss after training, fp64"] < facts["loss before training, fp64"]
