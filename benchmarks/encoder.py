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

A line of `layernorm` is norm(dropout(y) + x) alone, in both passes: device time with a cold L2
cache, the bytes of y, x and the result, with those of the gradients of all, and `of_copy`, their
rate divided by that at which XLA copies in the same run.
"""

import dataclasses
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

from benchmarks.clock import (
    Effort,
    Kernels,
    by_name,
    device_clock,
    kernel_time,
    synchronise,
    wall_time,
)
from benchmarks.results import Row
from jax_dora.lm.encoder import DebertaConfig, SequenceClassifier
from jax_dora.lm.encoder.deberta import Dropouts, Output

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
      copied: number of bf16 elements whose copying is timed.
    """

    encoders: tuple[Encoder, ...] = (
        Encoder("xlarge", 24, 1536, 24),
        Encoder("deep and narrow", 48, 512, 8),
    )
    batch: int = 20
    time: int = 512
    blocks: int = 5
    layers: int = 0
    copied: int = 2**29
    only: tuple[str, ...] = ()


TINY = Settings((Encoder("tiny", 2, 64, 4, 99, 8),), batch=2, time=24, blocks=1, copied=2**10)


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
    if not settings.only or any(fnmatch("layernorm", f"{one}*") for one in settings.only):
        x = jnp.zeros((settings.copied,), jnp.bfloat16)
        us = _device_us(jax.jit(lambda x: x + 1), (x,), device)
        rate = 2 * x.nbytes / us
        yield {"work": "copy", "us": us, "tb_per_s": rate / 1e6}
        for encoder in settings.encoders:
            yield _layernorm(encoder, settings, device, rate)


def _layernorm(encoder: Encoder, settings: Settings, device: str, rate: float) -> Row:
    """Returns the line of the norms of an encoder; `rate` is that of copying, in bytes per µs."""
    config = _deberta(encoder, Side("", "deberta", "xla"))
    graphdef, parameters = nnx.split(Output(1, config, nnx.Rngs(0)))
    shape = settings.batch, settings.time, encoder.hidden
    drawn = jax.random.normal(jax.random.key(0), (3, *shape), jnp.bfloat16)
    seed = jnp.zeros((2,), jnp.uint32)

    def forward(parameters: Any, y: jax.Array, x: jax.Array) -> jax.Array:
        output = nnx.merge(graphdef, parameters)
        return output.LayerNorm(Dropouts(seed)(y, output.rate) + x)

    def both(parameters: Any, y: jax.Array, x: jax.Array, cotangent: jax.Array) -> Any:
        return jax.vjp(forward, parameters, y, x)[1](cotangent)

    arrays = tuple(drawn)
    row: Row = {"work": "layernorm", "encoder": encoder.name, "hidden": encoder.hidden}
    row |= {"us": _device_us(jax.jit(forward), (parameters, *arrays[:2]), device)}
    row |= {"gradient_us": _device_us(jax.jit(both), (parameters, *arrays), device)}
    of_array = arrays[0].nbytes
    return row | {
        "of_copy": 3 * of_array / row["us"] / rate,
        "gradient_of_copy": 5 * of_array / row["gradient_us"] / rate,
    }


def _device_us(step: Any, operands: tuple[Any, ...], device: str) -> float:
    synchronise(step(*operands))
    return kernel_time("jax", step, [operands], device).median


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


def _deberta(encoder: Encoder, side: Side) -> DebertaConfig:
    config = DebertaConfig.from_hf({"model_type": "deberta-v2", **_config(encoder, side.model)})
    options: dict[str, Any] = {"attention": side.attention}
    options |= {"type_vocab_size": 2} if side.model == "bert" else {}
    return dataclasses.replace(config, dtype=jnp.bfloat16, param_dtype=jnp.float32, **options)


def _jax_step(
    encoder: Encoder, side: Side, settings: Settings, device: str
) -> Callable[[], jax.Array]:
    config = _deberta(encoder, side)
    # Not in one program, which would take as long to compile as the step.
    model = SequenceClassifier(config, rngs=nnx.Rngs(0))
    model.train()
    graphdef, parameters, streams = nnx.split(model, nnx.Param, ...)
    del model
    optimizer = optax.adamw(LEARNING_RATE, weight_decay=0.01)
    tokens, labels = map(jnp.asarray, _inputs(encoder, settings))
    mask = jnp.ones(tokens.shape, bool)

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
    compiled = jax.jit(train, donate_argnums=(0, 1, 2)).lower(*held).compile()

    def step() -> jax.Array:
        loss, *held[:] = compiled(*held)
        return loss

    synchronise(held)
    return step
