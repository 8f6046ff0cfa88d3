"""Adapters for a bank, the models with one alone, and the compilations that a block makes."""

import contextlib
import logging
import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jax_dora
from jax_dora import DoRARule
from jax_dora.adapt.tree import by_path, find_modules
from jax_dora.ops.bank_linear import bank_linears
from jax_dora.ops.bank_slots import SlotProjection
from parity import oracle


def bank_linear(base, x, slots, ids, *, first=None, slot_count=None, bias=None, **options):
    """The result of one projection of x with an adapter for each row."""
    projection = SlotProjection(slots, base, first=first, slot_count=slot_count, bias=bias)
    (y,) = bank_linears(x, [projection], ids, **options)
    return y


def drawn(
    bank: jax_dora.AdapterBank, ranks: dict[str, int], seed: int = 0, *, use_rslora: bool = False
) -> jax_dora.Adapter:
    """An adapter of random numbers for the bank's model, of these ranks by path."""
    rng, arrays = np.random.default_rng(seed), {}
    for path, rank in ranks.items():
        projection = bank.projections[path]
        contraction, stack = projection.contraction(rank), projection.stack
        arrays[path] = {
            name: (
                mean + rng.normal(size=(*stack.shape, *getattr(contraction, name).stored)) / 4
            ).astype(np.float32)
            for name, mean in (("lora_a", 0), ("lora_b", 0), ("magnitude", 1))
        }
    rules = tuple(DoRARule(re.escape(path), rank, 3.0, use_rslora) for path, rank in ranks.items())
    return jax_dora.Adapter(rules, arrays)


def merged(model: Any, bank: jax_dora.AdapterBank, adapter: jax_dora.Adapter) -> Any:
    """The plain model with an adapter in its kernels, by the definition, in fp64."""
    model = nnx.clone(model)
    modules = by_path(find_modules(model))
    for rule in adapter.rules:
        path = re.sub(r"\\(.)", r"\1", rule.path)
        projection, arrays, kernel = (
            bank.projections[path],
            adapter.arrays[path],
            modules[path].kernel,
        )
        contraction, value = projection.contraction(rule.rank), np.array(kernel[...], np.float64)
        for index in projection.stack.indices():
            w, a, b, m = (
                getattr(contraction, name).to_matrices(array[index])[0].astype(np.float64)
                for name, array in (("kernel", value), *arrays.items())
            )
            w = oracle.merged_weight(*oracle.from_flax(w, a, b), m.reshape(-1), rule.scale).T
            value[index] = contraction.kernel.from_matrices(w[None])
        kernel.set_value(jnp.asarray(value, kernel.dtype))
    return model


@contextlib.contextmanager
def compilations() -> Iterator[list[str]]:
    """What is compiled meanwhile, by the messages of JAX."""
    told: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "Compiling" in record.getMessage():
                told.append(record.getMessage())

    logger, handler = logging.getLogger("jax"), Handler()
    logger.addHandler(handler)
    propagates, logger.propagate = logger.propagate, False
    try:
        with jax.log_compiles():
            yield told
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagates
