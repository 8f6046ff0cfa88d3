"""Fine-tunes a DeBERTa to classify texts with DoRA, by the steps of `jax-dora finetune`.

    python examples/classify.py --model deberta-v3-base --data reviews.jsonl
    python examples/classify.py

Every line of the data is {"text": "…", "label": 0}. Without a model and data, a tiny encoder of
random weights learns to tell English from Python, byte by byte. The adapter and the head are saved
as a PEFT folder.
"""

import argparse
import json
from pathlib import Path
from typing import Any, NamedTuple

import corpus
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from rich.progress import track
from tokenizers import Tokenizer

import jax_dora
from jax_dora.lm.encoder import DebertaConfig, SequenceClassifier, load_classifier
from jax_dora.lm.finetune import adapter, training
from jax_dora.lm.models.decoder import step_options
from jax_dora.lm.models.loss import Loss

HEAD = ["pooler", "classifier"]
TINY = {
    **{"model_type": "deberta-v2", "vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "intermediate_size": 128, "relative_attention": True},
    **{"position_buckets": 32, "pos_att_type": "p2c|c2p", "share_att_key": True},
    **{"norm_rel_ebd": "layer_norm", "position_biased_input": False},
}


class Rows(NamedTuple):
    """Texts with their labels: arrays [..., batch] and [..., batch, time]."""

    tokens: Any  # i32
    mask: Any  # bool: which tokens are no padding
    labels: Any  # i32
    weights: Any  # f32: of a text in the loss


def loss_of(model: SequenceClassifier, tokens: Any, mask: Any, labels: Any, weights: Any) -> Loss:
    """Returns the cross-entropy of a batch of texts."""
    logits = model(tokens, mask).astype(jnp.float32)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return Loss(jnp.sum(losses * weights), jnp.sum(weights))


def read(file: Path, tokenizer: Tokenizer, length: int) -> Rows:
    """Returns the texts of a file, cut and padded to `length` tokens."""
    records = [json.loads(line) for line in file.read_text("utf-8").splitlines()]
    tokenizer.enable_truncation(length)
    tokenizer.enable_padding(length=length)
    found = tokenizer.encode_batch([record["text"] for record in records])
    return rows([one.ids for one in found], [record["label"] for record in records])._replace(
        mask=np.array([one.attention_mask for one in found], bool)
    )


def rows(tokens: Any, labels: Any) -> Rows:
    tokens, labels = np.asarray(tokens, np.int32), np.asarray(labels, np.int32)
    return Rows(tokens, np.ones(tokens.shape, bool), labels, np.ones(labels.shape, np.float32))


def code_and_english(length: int) -> Rows:
    """Returns excerpts of Python code, label 0, and of English, label 1."""
    rng = np.random.default_rng(0)
    texts = corpus.source_code(400_000), corpus.english(400_000)
    excerpts = [corpus.batch(text, length - 1, 512, rng) for text in texts]
    return rows(np.concatenate(excerpts), np.repeat([0, 1], 512))


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--model", type=Path, help="a Hugging Face folder with a tokenizer.json")
    parser.add_argument("--data", type=Path, help="with a model: a file of JSON lines")
    parser.add_argument("--output", type=Path, default=Path("classifier"))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    options = parser.parse_args()

    if options.model is None:
        data = code_and_english(options.length)
        model = SequenceClassifier(DebertaConfig.from_hf(TINY), rngs=nnx.Rngs(0))
    else:
        tokenizer = Tokenizer.from_file(str(options.model / "tokenizer.json"))
        data = read(options.data, tokenizer, options.length)
        model = load_classifier(options.model, num_labels=int(data.labels.max()) + 1)
    # All projections of the encoder; the new head is trained whole.
    rule = jax_dora.DoRARule(
        "all-linear", options.rank, 2 * options.rank, exclude="(pooler|classifier).*"
    )
    model: Any = jax_dora.apply_dora(model, rule, rngs=nnx.Rngs(1))
    for module in (model.pooler.dense, model.classifier):
        for name in ("kernel", "bias"):
            value = getattr(module, name)[...].astype(jnp.float32)
            setattr(module, name, adapter.SavedParam(value))
    model.train()

    schedule = optax.cosine_decay_schedule(options.learning_rate, options.steps)
    optimizer = training.make_optimizer("adamw", schedule, clip=1.0, weight_decay=0.0)
    accumulate = training.accumulate_with(step_options(model))
    parts = training.Parts.of(model)
    state = optimizer.init(parts.adapters)
    losses, rng = [], np.random.default_rng(0)
    for _ in track(range(options.steps), "adapter and head"):
        index = rng.integers(0, len(data.labels), (1, options.batch))  # one micro-batch
        batch: Any = Rows(*(array[index] for array in data))
        loss, gradients, streams = accumulate(*parts, batch, loss_of=loss_of)
        adapters, state, _ = training.update(optimizer, parts.adapters, state, gradients, loss)
        parts = parts._replace(adapters=adapters, streams=streams)
        losses.append(float(loss))

    jax_dora.peft.save_adapter(
        adapter.finished(parts.model(), None),
        options.output,
        modules_to_save=HEAD,
        task_type="SEQ_CLS",
        base_model_name_or_path=None if options.model is None else str(options.model),
        overwrite=True,
    )
    tenth = max(1, options.steps // 10)
    print(f"mean loss of the adapter's first {tenth} steps: {np.mean(losses[:tenth]):.3f}")
    print(f"mean loss of the adapter's last {tenth} steps: {np.mean(losses[-tenth:]):.3f}")
    print(f"adapter and head: {options.output}")


if __name__ == "__main__":
    main()
