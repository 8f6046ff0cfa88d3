"""The same operands give the same bits, run after run: outputs and gradients, in both packages.

No reduction of a kernel of ours uses atomics; the order of its sums is that of its grid.
"""

import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jax_dora.ops
import torch_dora.ops

GPU_RUNS, CPU_RUNS = 100, 4
SCALE = 0.7
# rows, in, out, rank: one that every kernel takes, the whole projection included, and one that no
# tile divides.
SHAPES = {"even": (512, 2048, 2048, 384), "ragged": (37, 208, 328, 24)}
SMALL = (37, 48, 72, 8)
JAX_NAMES, TORCH_NAMES = ("mosaic", "xla"), ("triton", "eager")


def operands(shape, seed=0):
    """Of dora_linear in torch's layout, bf16 beside an fp32 adapter, and a cotangent."""
    rows, n_in, n_out, rank = shape
    generator = torch.Generator().manual_seed(seed)

    def normal(*size, dtype=torch.float32):
        return torch.randn(*size, generator=generator).to(dtype)

    return {
        "x": normal(rows, n_in, dtype=torch.bfloat16),
        "weight": normal(n_out, n_in, dtype=torch.bfloat16) * n_in**-0.5,
        "lora_a": normal(rank, n_in) * n_in**-0.5,
        "lora_b": normal(n_out, rank) * 0.1,
        "magnitude": 1 + 0.1 * normal(n_out),
        "base": normal(rows, n_out, dtype=torch.bfloat16),
        "lora": normal(rows, n_out, dtype=torch.bfloat16),
        "dy": normal(rows, n_out, dtype=torch.bfloat16),
    }


def results(ops, given, implementation, norm_implementation, dtype, gradients):
    """Results of compose, factored_norm and dora_linear, forward and backward, by a package's ops
    on its own arrays; `gradients` gives the results of a function, and its inputs' gradients."""
    weight, lora_a, lora_b, magnitude = (
        given[name] for name in ("weight", "lora_a", "lora_b", "magnitude")
    )
    norm = ops.factored_norm(weight, lora_a, lora_b, SCALE, implementation=norm_implementation)
    g = ops.magnitude_scale(magnitude, norm, dtype)
    found = {"norm": norm}
    options = {"implementation": implementation}

    def linear(x, lora_a, lora_b, magnitude):
        return ops.dora_linear(x, weight, lora_a, lora_b, magnitude, SCALE, **options)

    operands = (given["base"], given["lora"], g)
    calls = {
        op.__name__: (functools.partial(op, scale=SCALE, **options), *operands)
        for op in (ops.compose, ops.compose_delta)
    }
    calls["dora_linear"] = (linear, given["x"], lora_a, lora_b, magnitude)
    for name, (function, *inputs) in calls.items():
        found[name], computed = gradients(function, inputs, given["dy"])
        found |= {f"{name}, gradient {i}": one for i, one in enumerate(computed)}
    return found


def torch_results(given, implementation):
    def gradients(function, inputs, dy):
        leaves = [value.detach().clone().requires_grad_() for value in inputs]
        y = function(*leaves)
        return y.detach(), torch.autograd.grad(y, leaves, dy)

    named = (implementation, implementation, torch.bfloat16)
    found = results(torch_dora.ops, given, *named, gradients)
    return {name: _bits(value.float().cpu().numpy()) for name, value in found.items()}


def jax_program(implementation):
    """As `torch_results`, of arrays in Flax's layout; one compiled program."""

    def gradients(function, inputs, dy):
        y, pull = jax.vjp(function, *inputs)
        return y, pull(dy)

    # The norm's kernel takes sizes of its own.
    norm = None if implementation == "mosaic" else "xla"
    named = (implementation, norm, jnp.bfloat16)
    return jax.jit(lambda given: results(jax_dora.ops, given, *named, gradients))


def jax_results(run, given):
    return {name: _bits(np.asarray(v, np.float32)) for name, v in run(given).items()}


def flax_layout(given):
    def array(name, value):
        turned = value.T if name in ("weight", "lora_a", "lora_b") else value
        return jnp.asarray(turned.float().numpy(), jnp.dtype(str(value.dtype).split(".")[1]))

    return {name: array(name, value) for name, value in given.items()}


def _bits(array):
    # bf16 in fp32 keeps its bits; NaN equals NaN and 0 differs from -0.
    return array.view(np.uint32)


def assert_always_the_same(results, runs):
    first = results()
    assert len(first) == 1 + 2 * 4 + 5
    for run in range(1, runs):
        for name, bits in results().items():
            assert (bits == first[name]).all(), f"{name} differs in run {run + 1}"


def check_torch(shape, implementation, runs, device):
    given = {name: value.to(device) for name, value in operands(shape).items()}
    assert_always_the_same(lambda: torch_results(given, implementation), runs)


def check_jax(shape, implementation, runs):
    given = flax_layout(operands(shape))
    run = jax_program(implementation)
    assert_always_the_same(lambda: jax_results(run, given), runs)


def test_torch_repeats_itself():
    check_torch(SMALL, "eager", CPU_RUNS, "cpu")


def test_jax_repeats_itself():
    check_jax(SMALL, "xla", CPU_RUNS)


def test_a_sum_in_another_order_is_noticed(monkeypatch):
    linear = importlib.import_module("torch_dora.ops.linear")
    right, calls = linear._scaled_mm, iter(range(1000))

    def wanders(a, b, scale, dtype):
        order = torch.randperm(a.shape[1], generator=torch.Generator().manual_seed(next(calls)))
        return right(a[:, order].float(), b[order].float(), scale, dtype)

    monkeypatch.setattr(linear, "_scaled_mm", wanders)
    with pytest.raises(AssertionError, match="differs in run"):
        check_torch(SMALL, "eager", CPU_RUNS, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", TORCH_NAMES)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_torch_repeats_itself_on_a_gpu(shape, implementation):
    check_torch(shape, implementation, GPU_RUNS, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", JAX_NAMES)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_jax_repeats_itself_on_a_gpu(shape, implementation):
    check_jax(shape, implementation, GPU_RUNS)
