"""The optimizer steps of level `quantised`, over random codes of a whole model."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import qwix
from flax import nnx

from benchmarks import step
from benchmarks.model.adapters import linear_of
from benchmarks.results import Row
from benchmarks.step import LLAMA_3_8B
from jax_dora.layers.quantised_kernel import compute_quantised
from jax_dora.lm.models import DecoderConfig, make_model
from jax_dora.lm.models.sharding import DecoderSharding
from jax_dora.ops.row_scaled import QTYPE as FP8

LLAMA_3_70B = dataclasses.replace(
    LLAMA_3_8B,
    hidden_size=8192,
    intermediate_size=28_672,
    num_hidden_layers=80,
    num_attention_heads=64,
)
QWEN_3_14B = dataclasses.replace(
    LLAMA_3_8B,
    vocab_size=151_936,
    hidden_size=5120,
    intermediate_size=17_408,
    num_hidden_layers=40,
    num_attention_heads=40,
)
QWEN_3_32B = dataclasses.replace(
    QWEN_3_14B, intermediate_size=25_600, num_hidden_layers=64, num_attention_heads=64
)
TILE = 64


class Case(NamedTuple):
    """A whole step.

    Attributes:
      kind: "LoRA" or "DoRA".
      qtype: format of the base's projections.
      shape: batch and time.
      keep_inner: whether each layer's last projection keeps its inner result for the gradient.
      activations, gradients: the formats of products in FP8.
      memory: that of `DecoderConfig`.
      mesh: the axes and sizes of the mesh; none for one device.
    """

    name: str
    config: DecoderConfig
    kind: str
    qtype: str
    shape: tuple[int, int]
    keep_inner: bool = False
    activations: str | None = None
    gradients: str | None = None
    memory: Any = None
    mesh: tuple[tuple[str, int], ...] = ()

    @property
    def devices(self) -> int:
        return math.prod(size for _, size in self.mesh)


_IN_FP8 = Case("8B", LLAMA_3_8B, "DoRA", FP8, (2, 4096), False, FP8, "float8_e5m2", memory="auto")
_LARGE = _IN_FP8._replace(name="70B", config=LLAMA_3_70B, shape=(1, 4096))
CASES = (
    Case("8B", LLAMA_3_8B, "DoRA", "bf16", (1, 4096)),
    Case("8B", LLAMA_3_8B, "DoRA", "nf4", (1, 4096)),
    Case("8B", LLAMA_3_8B, "DoRA", "nf4", (1, 4096), keep_inner=True),
    Case("8B", LLAMA_3_8B, "LoRA", "nf4", (1, 4096)),
    Case("70B", LLAMA_3_70B, "DoRA", "nf4", (1, 2048)),
    _IN_FP8._replace(kind="LoRA"),
    _IN_FP8,
    _LARGE._replace(memory=43.75),
    _LARGE._replace(memory=58.0),
    _LARGE._replace(memory=60.0, shape=(2, 4096), mesh=(("fsdp", 2),)),
    _LARGE._replace(memory=60.0, mesh=(("tp", 2),)),
)
MEMORY = tuple(
    Case(name, config, "DoRA", qtype, (1, 4096))
    for name, config, qtypes in (
        ("8B", LLAMA_3_8B, ("int8", FP8)),
        ("14B", QWEN_3_14B, ("nf4", "int8", FP8, "bf16")),
        ("32B", QWEN_3_32B, ("nf4", "int8", FP8, "bf16")),
        ("70B", LLAMA_3_70B, ("nf4",)),
    )
    for qtype in qtypes
)


def measured(case: Case, rank: int, rounds: int, device: str) -> Row:
    """Returns the wall time and memory of a case's optimizer step, as `step.timed`."""
    attention = "cudnn" if device == "cuda" else "xla"
    sharding = None
    if case.mesh:
        devices = jax.devices()[: case.devices]
        sharding = DecoderSharding.over(**dict(case.mesh), devices=devices)
    options = {"attention": attention, "memory": case.memory, "sharding": sharding}
    config = dataclasses.replace(case.config, **options)
    make = functools.partial(make_model, config)
    model = nnx.eval_shape(functools.partial(make, linear=linear_of(case.kind, rank)))
    if case.keep_inner:
        model.model.layers.mlp.down_proj.keep_inner = True
    if case.qtype != "bf16":
        for _, module in nnx.iter_modules(model):
            if isinstance(module, nnx.Linear) and hasattr(module, "lora_a"):
                kernel: Any = _abstract(module.kernel.get_value(), case.qtype)
                module.kernel.set_value(kernel)
                compute_quantised(module, case.activations, case.gradients)
    graphdef, state = nnx.split(model)
    leaves, tree = jax.tree_util.tree_flatten_with_path(state)
    keys = jax.random.split(jax.random.key(0), len(leaves))
    drawn = [
        _drawn(key, leaf.shape, leaf.dtype, sharding and sharding(_name(path), leaf.shape))
        for key, (path, leaf) in zip(keys, leaves, strict=True)
    ]
    model = nnx.merge(graphdef, jax.tree.unflatten(tree, drawn))
    return step.timed(model, config.vocab_size, case.shape, rounds)


def _abstract(kernel: Any, qtype: str) -> qwix.QArray:
    """Returns the shapes and dtypes of a quantised kernel [..., in, out]: of nf4 with tiles, of
    other formats with a scale for each output feature."""
    *stack, n_in, n_out = kernel.shape
    dtype = jnp.uint4 if qtype == "nf4" else qtype
    tiles = n_in // TILE if qtype == "nf4" else 1
    scale = jax.ShapeDtypeStruct((*stack, tiles, n_out), jnp.bfloat16)
    qvalue = jax.ShapeDtypeStruct(kernel.shape, dtype)
    return qwix.QArray(qvalue, scale, None, qtype if qtype == "nf4" else jnp.dtype(dtype))  # pyright: ignore[reportArgumentType]


def _name(path: Sequence[Any]) -> str:
    """Returns the path of a parameter, without those of its own arrays."""
    names = (getattr(key, "key", None) for key in path)
    return "/".join(name for name in names if isinstance(name, str))


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _drawn(key: jax.Array, shape: tuple[int, ...], dtype: Any, sharding: Any) -> jax.Array:
    """Returns random codes or random weights; all matrices of a stack are the same."""
    matrix = shape[-2:]
    if jnp.dtype(dtype).itemsize == 1:
        values = jax.random.randint(key, matrix, 0, 16, jnp.uint8)
    elif len(shape) < 2:
        values = jnp.full(matrix, 0.02)
    else:
        values = 0.02 * jax.random.normal(key, matrix, jnp.float32)
    values = jnp.broadcast_to(values.astype(dtype), shape)
    return values if sharding is None else jax.lax.with_sharding_constraint(values, sharding)
