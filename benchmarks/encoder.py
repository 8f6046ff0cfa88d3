"""Level `encoder`: a training step of DeBERTa, by transformers and by `jax_dora.lm.encoder`.

The encoders have the dimensions of DeBERTa-v2 xlarge, and of a deep and narrow one, with random
weights, 20 texts of 512 tokens, labels, and all of the original's dropout. A step is the gradient
of all parameters, which are float32, and their update by AdamW; products are in bf16, in PyTorch by
autocast. A BERT is the same encoder without relative positions; transformers' has PyTorch's fused
attention.

One line is one side of a model: wall time of a step by the clock of `benchmarks.clock`, also per
layer (`layer_us`), and by CUPTI the launches and the time of a step's kernels, together
(`launches`, `device_us`) and by operator (`operators`, name: [launches, µs]). Kernels are assigned
by their names, of XLA's fusions by what they contain; "product" are the matrix products of any
library, and "fused attention" has the products, gathers, softmax and dropout of its kernels.
"""

import dataclasses
import functools
import gc
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from fnmatch import fnmatch
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
import transformers
from flax import nnx

from benchmarks.clock import Effort, Kernels, device_clock, synchronise, wall_time
from benchmarks.results import Row
from jax_dora.lm.encoder import DebertaConfig, SequenceClassifier

LEARNING_RATE = 1e-5
OPERATORS = {
    "fused attention": r"^kernel$|attention|attend|flash|fmha|cudnn_generated|mha",
    "product": r"gemm|nvjet|cutlass|cublas|xmma|matmul|dot",
    "gather": r"gather|scatter|index",
    "dropout": r"dropout|masked_scale|random|rng|philox",
    "softmax": r"softmax|masked_fill|exponential",
    "layernorm": r"layer_norm|layernorm|GammaBeta",
    "update": r"adam|multi_tensor",
}


class Encoder(NamedTuple):
    """The dimensions of an encoder."""

    name: str
    layers: int
    hidden: int
    heads: int
    vocabulary: int = 128_100
    buckets: int = 256


class Settings(NamedTuple):
    """The settings of the level.

    Attributes:
      only: patterns of the beginnings of names, of an encoder and a side; all by default.
      layers: of the encoders; 0 for all of theirs.
    """

    encoders: tuple[Encoder, ...] = (
        Encoder("xlarge", 24, 1536, 24),
        Encoder("deep and narrow", 48, 512, 8),
    )
    batch: int = 20
    time: int = 512
    blocks: int = 5
    layers: int = 0
    only: tuple[str, ...] = ()


TINY = Settings((Encoder("tiny", 2, 64, 4, 99, 8),), batch=2, time=24, blocks=1)


class Side(NamedTuple):
    """What computes a step.

    Attributes:
      model: "deberta" or "bert".
      attention: the implementation of the attention in jax_dora; None in transformers.
      compiled: by torch.compile.
    """

    name: str
    model: str
    attention: str | None = None
    compiled: bool = False


SIDES = (
    Side("jax_dora fused", "deberta", "triton"),
    Side("jax_dora XLA", "deberta", "xla"),
    Side("transformers eager", "deberta"),
    Side("transformers compiled", "deberta", compiled=True),
    Side("BERT of jax_dora", "bert", "triton"),
    Side("BERT of transformers eager", "bert"),
    Side("BERT of transformers compiled", "bert", compiled=True),
)


def measure(settings: Settings, device: str) -> Iterator[Row]:
    """Yields one row for each side of each encoder."""
    for encoder in settings.encoders:
        layers = settings.layers or encoder.layers
        for side in SIDES:
            name = f"{encoder.name} {side.name}"
            if not any(fnmatch(name, f"{pattern}*") for pattern in settings.only or ("",)):
                continue
            facts: Row = {"encoder": encoder.name, "layers": layers, "of_layers": encoder.layers}
            facts |= {"hidden": encoder.hidden, "heads": encoder.heads, "batch": settings.batch}
            facts |= {"time": settings.time, "side": side.name}
            try:
                make = _jax_step if side.attention else _torch_step
                step = make(encoder._replace(layers=layers), side, settings, device)
                yield facts | _timed(step, bool(side.attention), settings, device, layers)
            except Exception as error:  # of memory, at some sizes
                yield facts | {"failed": f"{type(error).__name__}: {error}"[:600]}
            step = None
            gc.collect()
            torch.compiler.reset()
            jax.clear_caches()
            if device == "cuda":
                torch.cuda.empty_cache()


def _timed(
    step: Callable[[], Any], is_jax: bool, settings: Settings, device: str, layers: int
) -> Row:
    step()
    loss = float(step())
    wall = wall_time(step, [()], Effort(0.5, least=3, blocks=settings.blocks))
    row: Row = {"loss": loss, "wall": wall._asdict(), "layer_us": wall.median / layers}
    if device == "cuda":
        kernels = device_clock().kernels(step)
        row |= {"launches": len(kernels), "device_us": sum(us for _, us in kernels)}
        row |= {"operators": by_operator(kernels), "kernels": by_name(kernels)}
    return row


def by_operator(kernels: Kernels) -> dict[str, tuple[int, float]]:
    """Returns the launches and the time of each operator."""
    found: dict[str, list[float]] = defaultdict(list)
    for name, us in kernels:
        matches = (one for one, words in OPERATORS.items() if re.search(words, name, re.I))
        found[next(matches, "others")].append(us)
    return {name: (len(times), sum(times)) for name, times in found.items()}


def by_name(kernels: Kernels) -> dict[str, tuple[int, float]]:
    """Returns the launches and the time of the kernels that take longest, by the parts of their
    names without numbers."""
    found: dict[str, list[float]] = defaultdict(list)
    for name, us in kernels:
        found[re.sub(r"_\d+|<.*", "", name)[:80]].append(us)
    longest = sorted(found.items(), key=lambda item: -sum(item[1]))[:40]
    return {name: (len(times), sum(times)) for name, times in longest}


def _config(encoder: Encoder, model: str) -> dict[str, Any]:
    positions = {
        "relative_attention": True,
        "position_biased_input": False,
        "pos_att_type": ["p2c", "c2p"],
        "position_buckets": encoder.buckets,
        "share_att_key": True,
        "norm_rel_ebd": "layer_norm",
    }
    return {
        "vocab_size": encoder.vocabulary,
        "hidden_size": encoder.hidden,
        "num_hidden_layers": encoder.layers,
        "num_attention_heads": encoder.heads,
        "intermediate_size": 4 * encoder.hidden,
        "max_position_embeddings": 512,
        **(positions if model == "deberta" else {}),
    }


def _inputs(encoder: Encoder, settings: Settings) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    tokens = rng.integers(1, encoder.vocabulary, (settings.batch, settings.time))
    return tokens.astype(np.int32), rng.integers(0, 2, settings.batch).astype(np.int32)


def _torch_step(
    encoder: Encoder, side: Side, settings: Settings, device: str
) -> Callable[[], torch.Tensor]:
    torch.manual_seed(0)
    kind = "DebertaV2" if side.model == "deberta" else "Bert"
    config = getattr(transformers, f"{kind}Config")(**_config(encoder, side.model))
    with torch.device(device):
        model = getattr(transformers, f"{kind}ForSequenceClassification")(config).train()
        tokens, labels = (torch.tensor(one).long() for one in _inputs(encoder, settings))
        mask = torch.ones_like(tokens)
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, fused=device == "cuda")
    forward: Any = torch.compile(model) if side.compiled else model

    def step() -> torch.Tensor:
        with torch.autocast(device, torch.bfloat16):
            loss = forward(input_ids=tokens, attention_mask=mask, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def _jax_step(
    encoder: Encoder, side: Side, settings: Settings, device: str
) -> Callable[[], jax.Array]:
    config = DebertaConfig.from_hf({"model_type": "deberta-v2", **_config(encoder, side.model)})
    config = dataclasses.replace(
        config, dtype=jnp.bfloat16, param_dtype=jnp.float32, attention=side.attention
    )
    if side.model == "bert":
        config = dataclasses.replace(config, type_vocab_size=2)

    @jax.jit
    def initialise() -> Any:
        model = SequenceClassifier(config, rngs=nnx.Rngs(0))
        model.train()
        return nnx.split(model, nnx.Param, ...)

    graphdef, parameters, streams = initialise()
    optimizer = optax.adamw(LEARNING_RATE, weight_decay=0.01)
    tokens, labels = map(jnp.asarray, _inputs(encoder, settings))
    mask = jnp.ones(tokens.shape, bool)

    @functools.partial(jax.jit, donate_argnums=(0, 1, 2))
    def train(parameters: Any, state: Any, streams: Any) -> Any:
        def loss_of(parameters: Any) -> Any:
            model = nnx.merge(graphdef, parameters, streams, copy=True)
            logits = model(tokens, mask).astype(jnp.float32)
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
            return losses.mean(), nnx.state(model, nnx.RngState)

        (loss, new), gradients = jax.value_and_grad(loss_of, has_aux=True)(parameters)
        updates, state = optimizer.update(gradients, state, parameters)
        return loss, optax.apply_updates(parameters, updates), state, new

    held = [parameters, jax.jit(optimizer.init)(parameters), streams]
    del parameters, streams

    def step() -> jax.Array:
        loss, *held[:] = train(*held)
        return loss

    synchronise(held)
    return step
