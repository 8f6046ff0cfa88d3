"""jax_dora, and the same computations in plain jnp, called with torch tensors in torch's layout.

Tensors are passed through DLPack, without a copy on a GPU. Matrix products of fp32 operands are
computed in fp32: XLA's default on an NVIDIA GPU is TF32.
"""

import contextlib
import dataclasses
import functools
import io
import pkgutil
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_dora import ops
from jax_dora.ops import mosaic
from parity import oracle
from parity.cases import ComposeInputs, LayerInputs
from parity.environment import start_jax
from parity.sides import Computation, Implementation, choose_operator
from parity.torchao_weights import is_quantised, parts


def norm(inputs: LayerInputs, scale: float, implementation: Implementation) -> Computation:
    op = choose_operator(ops.factored_norm, _plain_norm, implementation)
    operands = linear_operands(inputs)
    adapter = [operands[name] for name in ("kernel", "lora_a", "lora_b")]
    return _computation(op, implementation, *adapter, scale)


def magnitude_scale(
    magnitude: torch.Tensor, row_norm: torch.Tensor, dtype: str, implementation: Implementation
) -> torch.Tensor:
    op = _plain_magnitude_scale if implementation == "plain" else ops.magnitude_scale
    return to_torch(op(to_jax(magnitude), to_jax(row_norm), jnp.dtype(dtype)))


def compose(
    inputs: ComposeInputs, scale: float, implementation: Implementation, *, frozen: bool
) -> Computation:
    plain_delta = functools.partial(_plain_compose, delta=True)
    # Both operators are in one program, since compiling takes most of the time.
    operators = {
        "compose ": choose_operator(ops.compose, _plain_compose, implementation, scale=scale),
        "compose_delta ": choose_operator(
            ops.compose_delta, plain_delta, implementation, scale=scale
        ),
    }
    operands = {name: to_jax(getattr(inputs, name)) for name in ("base", "lora", "g")}
    wanted = [name for name in operands if not (frozen and name == "g")]
    run = functools.partial(with_gradients, operators, wanted)
    return _computation(run, implementation, operands, to_jax(inputs.dy))


def layer(
    inputs: LayerInputs,
    scale: float,
    implementation: Implementation,
    *,
    frozen: bool,
    **options: Any,
) -> Computation:
    op = choose_operator(ops.dora_linear, plain_linear, implementation, scale=scale, **options)
    operands = linear_operands(inputs)
    constant = {"kernel", "magnitude"} if frozen else {"kernel"}
    wanted = [name for name in operands if name not in constant]
    run = functools.partial(with_gradients, {"": op}, wanted)
    compute = _computation(run, implementation, operands, to_jax(inputs.dy))
    return lambda: in_torch_layout(compute())


def apply(inputs: LayerInputs, scale: float, implementation: Implementation) -> Computation:
    operands = linear_operands(inputs)
    return _computation(projection(scale, implementation), implementation, operands)


def kernels(inputs: LayerInputs, scale: float, implementation: Implementation) -> list[str]:
    """Returns the names of the Mosaic kernels in `apply`'s program."""
    run = jax.jit(projection(scale, implementation))
    with jax.default_matmul_precision("highest"):
        return kernel_names(run.lower(linear_operands(inputs)))


def kernel_names(program: Any) -> list[str]:
    """Returns the modules of the Mosaic kernels in a lowered program, which has a function of the
    same name for each."""
    functions = re.findall(r"func private @(\w+?)(?:_\d+)?\(", program.as_text())
    modules = pkgutil.walk_packages(mosaic.__path__, f"{mosaic.__name__}.")
    names = {module.name.rpartition(".")[2] for module in modules}
    return sorted(names.intersection(functions))


def projection(scale: float, implementation: Implementation) -> Callable[[dict], Any]:
    op = choose_operator(ops.dora_linear, plain_linear, implementation, scale=scale)
    return lambda operands: op(**operands)


def linear_operands(inputs: LayerInputs) -> dict[str, Any]:
    """Returns the operands of `dora_linear` by name, in Flax's layout."""
    weight = inputs.weight
    operands = {
        "x": to_jax(inputs.x),
        "kernel": _quantised_kernel(weight) if is_quantised(weight) else to_jax(weight.T),
        "lora_a": to_jax(inputs.lora_a.T),
        "lora_b": to_jax(inputs.lora_b.T),
        "magnitude": to_jax(inputs.magnitude),
    }
    return operands if inputs.bias is None else operands | {"bias": to_jax(inputs.bias)}


def in_torch_layout(results: dict[str, Any]) -> dict[str, Any]:
    """Transposes the adapters' gradients in a layer's results from Flax's layout to torch's."""
    return results | {name: results[name].T for name in ("d_lora_a", "d_lora_b")}


def _computation(function: Callable, implementation: Implementation, *operands: Any) -> Computation:
    """Returns a function that applies `function` to these arrays and returns tensors. It compiles
    once."""
    run = jax.jit(function)
    [device] = jax.tree.leaves(operands)[0].devices()
    interpret = implementation == "mosaic" and device.platform == "cpu"

    def compute() -> Any:
        kernels = interpreted() if interpret else contextlib.nullcontext()
        with jax.default_matmul_precision("highest"), kernels:
            return jax.tree.map(to_torch, run(*operands))

    return compute


def with_gradients(
    operators: dict[str, Callable], wanted: Sequence[str], operands: dict[str, Any], dy: jax.Array
) -> dict[str, jax.Array]:
    """Returns the result of each operator, and its cotangents for the operands in `wanted`."""
    results = {}
    for operator, op in operators.items():
        leaves = {name: operands[name] for name in wanted}
        y, pull = jax.vjp(lambda leaves, op=op: op(**(operands | leaves)), leaves)
        results[f"{operator}y"] = y
        results |= {f"{operator}d_{name}": grad for name, grad in pull(dy)[0].items()}
    return results


def plain_linear(x, kernel, lora_a, lora_b, magnitude, scale, bias=None):
    """Returns y in plain jnp: the norm of `W + sBA` and the composition in fp32, products with
    activations in the activations' dtype."""
    dtype = x.dtype
    row_norm = jax.lax.stop_gradient(_plain_norm(kernel, lora_a, lora_b, scale))
    g = _plain_magnitude_scale(magnitude, row_norm, dtype)
    lora = (x @ lora_a.astype(dtype)) @ lora_b.astype(dtype)
    return _plain_compose(x @ kernel, lora, g, scale, bias=bias)


def to_jax(tensor: torch.Tensor) -> jax.Array:
    """Returns the memory of a contiguous tensor, or else a copy, as a JAX array."""
    start_jax()
    return jax.dlpack.from_dlpack(tensor.detach().contiguous())


def to_torch(array: jax.Array) -> torch.Tensor:
    """Returns the same memory as a torch tensor."""
    return torch.from_dlpack(jax.block_until_ready(array))


def _quantised_kernel(weight: Any) -> Any:
    """Returns the `qwix.QArray` [in, out] with the codes and scales of torchao's quantised
    weight."""
    import qwix  # needed only here

    name, codes, scale = parts(weight)
    dtype = jnp.dtype({"nf4": "uint4"}.get(name, name))
    codes = codes if name != "float8_e4m3fn" else codes.view(dtype)
    qtype = "nf4" if name == "nf4" else dtype
    return qwix.QArray(jnp.asarray(codes.T).astype(dtype), jnp.asarray(scale.T), None, qtype)


def _plain_norm(kernel, lora_a, lora_b, scale):
    kernel, lora_a, lora_b = (a.astype(jnp.float32) for a in (kernel, lora_a, lora_b))
    return jnp.linalg.norm(kernel + scale * (lora_a @ lora_b), axis=0)


def _plain_magnitude_scale(magnitude, row_norm, dtype):
    return magnitude.astype(jnp.float32) / jnp.maximum(row_norm, oracle.EPS[dtype.name])


def _plain_compose(base, lora, g, scale, delta=False, bias=None):
    wide = base.astype(jnp.float32)
    g = g.reshape((1,) * (wide.ndim - 1) + (-1,))
    y = (g - 1) * wide + g * (scale * lora.astype(jnp.float32))
    if not delta:
        y = wide + y
    if bias is not None:
        y = y + bias.astype(jnp.float32).reshape(g.shape)
    return y.astype(base.dtype)


@contextlib.contextmanager
def interpreted() -> Iterator[None]:
    """Runs Mosaic kernels on a CPU, in Pallas' GPU interpreter. A data race raises RuntimeError."""
    options: dict = {"detect_races": True}
    if "on_race" in (f.name for f in dataclasses.fields(plgpu.InterpretGPUParams)):
        options["on_race"] = "raise"
    # Before jax 0.12 the interpreter can only print the races that it finds.
    printed = io.StringIO()
    with (
        contextlib.redirect_stdout(printed),
        plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(**options)),
    ):
        yield
    if "RACE DETECTED" in printed.getvalue():
        raise RuntimeError(printed.getvalue())
