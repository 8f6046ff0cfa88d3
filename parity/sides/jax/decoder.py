"""`jax_dora.lm.models` with jax_dora's layers, or without an adapter, on given weights."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import torch
from flax import nnx

import jax_dora
from jax_dora.lm.models import CausalLM, DecoderConfig, rope
from jax_dora.lm.models.stored_arrays import stored_arrays
from parity.model.sizes import Run
from parity.model.weights import Result, Weights, rope_frequencies
from parity.sides.jax.operators import interpreted, to_jax, to_torch


def compute(run: Run, weights: Weights, implementation: str | None) -> Result:
    """Returns the results of the decoder, in which every projection is a `jax_dora.DoRALinear`. The
    implementation "base" is the decoder without adapters."""
    cuda = weights.tokens.is_cuda
    linear: Any = functools.partial(
        jax_dora.DoRALinear,
        rank=run.sizes.rank,
        alpha=run.sizes.alpha,
        use_rslora=True,
        adapter_dtype=jnp.dtype(run.dtype),
        implementation=implementation,
    )
    if implementation == "base":
        linear = nnx.Linear
    config = DecoderConfig.from_hf(
        run.sizes.hf_config(run.layers, run.tokens),
        dtype=jnp.dtype(run.dtype),
        attention="cudnn" if cuda and run.dtype == "bfloat16" else "xla",
        # Rematerialisation does not support the interpreter's callbacks.
        remat=cuda,
    )
    abstract = nnx.eval_shape(lambda: CausalLM(config, linear=linear, rngs=nnx.Rngs(0)))
    graphdef, adapter, frozen = nnx.split(abstract, nnx.LoRAParam, ...)
    adapter = with_adapter(adapter, weights.adapter, lambda layers: to_jax(torch.stack(layers)))
    frozen, tokens = _with_weights(frozen, config, weights), to_jax(weights.tokens.int())

    def loss(adapter: Any, frozen: Any, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        model = nnx.merge(graphdef, adapter, frozen)
        logits = model.logits(model.model(tokens[:, :-1])[0, -run.last :])
        scores = jax.nn.log_softmax(logits.astype(jnp.float32))
        targets = tokens[0, -run.last :, None]
        return -jnp.take_along_axis(scores, targets, axis=-1).mean(), logits

    program = jax.value_and_grad(loss, has_aux=True) if jax.tree.leaves(adapter) else loss
    with _decoder_context(run, weights, interpret=implementation == "mosaic" and not cuda):
        # XLA takes long to tune Triton's matrix products, and none of ours are among them.
        options = {"xla_gpu_enable_triton_gemm": False} if cuda else {}
        arguments = (adapter, frozen, tokens)
        compiled = jax.jit(program).lower(*arguments).compile(compiler_options=options)
        results = jax.block_until_ready(compiled(*arguments))
    (value, logits), gradients = results if jax.tree.leaves(adapter) else (results, {})
    by_name = {
        f"{projection}.{kind}": list(gradient)
        for projection, kinds in adapter_of(gradients, to_torch).items()
        for kind, gradient in kinds.items()
    }
    return Result(to_torch(logits), float(value), by_name)


def with_adapter(
    state: Any, adapter: Mapping[str, Mapping[str, Any]], to_array: Callable[[Any], jax.Array]
) -> Any:
    """Returns the state of a decoder's adapters with the values of `adapter`.

    Args:
      adapter: values in torch's layout, by projection, then by name.
      to_array: converts a value to an array [layers, …].
    """

    def fill(path: tuple[Any, ...], variable: Any) -> Any:
        *_, block, name, kind = path
        array = _transposed(to_array(adapter[f"{block}.{name}"][kind]))
        if (array.shape, array.dtype) != (variable.shape, variable.dtype):
            raise ValueError(f"{path} is {variable.dtype}{variable.shape}; got {array.aval}")
        return variable.replace(array)

    return nnx.from_flat_state([(p, fill(p, v)) for p, v in nnx.to_flat_state(state)])


def adapter_of(state: Any, convert: Callable[[jax.Array], Any]) -> dict[str, dict[str, Any]]:
    """Returns the adapter values in a state, as `with_adapter` accepts them; `convert` converts
    each array."""
    adapter: dict[str, dict[str, Any]] = {}
    for (*_, block, name, kind), variable in nnx.to_flat_state(state) if state else ():
        value = _transposed(convert(variable.get_value()))
        adapter.setdefault(f"{block}.{name}", {})[str(kind)] = value
    return adapter


def _transposed(array: Any) -> Any:
    return array.swapaxes(1, 2) if array.ndim == 3 else array


def _with_weights(state: Any, config: DecoderConfig, weights: Weights) -> Any:
    flat: dict[Any, Any] = dict(nnx.to_flat_state(state))
    for stored in stored_arrays(state, config):
        tensors = [weights.base[name] for name in stored.names]
        tensors = [tensor.T for tensor in tensors] if stored.transposed else tensors
        array = to_jax(torch.stack(tensors) if stored.stacked else tensors[0])
        flat[stored.path] = flat[stored.path].replace(array)
    return nnx.from_flat_state(flat)


@contextlib.contextmanager
def _decoder_context(run: Run, weights: Weights, *, interpret: bool) -> Iterator[None]:
    # A unit in the last place of a frequency is 10⁻⁴ of a radian at position 4096.
    frequencies = rope_frequencies(run.sizes, weights.tokens.device).cpu().numpy()
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(rope, "rotate", _rotate))
        stack.enter_context(mock.patch.object(rope, "frequencies", return_value=frequencies))
        if run.dtype == "float32":
            stack.enter_context(jax.default_matmul_precision("highest"))
        if interpret:
            stack.enter_context(interpreted())
        yield


def _rotate(x: jax.Array, cosine: jax.Array, sine: jax.Array) -> jax.Array:
    """Rotates as transformers does, with cosine and sine rounded to the activations' dtype. In bf16
    this error is larger than all other rounding of the rotation, and it must not count as a
    difference between the frameworks."""
    if x.dtype == jnp.bfloat16:
        # XLA may remove a cast to bf16 and back.
        cosine, sine = (jax.lax.reduce_precision(v, 8, 7) for v in (cosine, sine))
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    halves = (first * cosine - second * sine, second * cosine + first * sine)
    return jnp.concatenate(halves, axis=-1).astype(x.dtype)
