"""An adapted projection of 65 to 896 rows over a quantised kernel, whose codes a kernel reads."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_dora.ops import dora_linear
from jax_dora.ops.dispatch import choose
from jax_dora.ops.mosaic.decode import decode_quantised
from parity import oracle, tolerances
from tests import quantised
from tests.quantised import NAMES, SCALE, both, operands
from tests.tables import thinned


def check(qtype, rows, shape, tiles, dtype, *, is_trained, watched):
    """Checks a projection, with its gradients if `is_trained`, and that the kernel ran.

    Scales are powers of two, so that W, whose NF4 values are rounded to `dtype`, is exact in it.
    """
    seen = watched(decode_quantised)
    kernel = quantised.draw(qtype, shape, tiles, exact=True)
    (x, a, b, magnitude, bias), dy = operands(kernel, dtype=dtype, rows=(rows,))
    weight = jnp.asarray(quantised.meant(kernel), dtype)
    weights = oracle.from_flax(weight, a, b)
    norm = jnp.asarray(oracle.norm(*weights, SCALE), jnp.float32)
    arrays, arguments = (x, a, b, magnitude, bias), (x, *weights, magnitude, SCALE)
    bound = tolerances.dora_linear(dy, *arguments, dtype, bias=bias)
    if is_trained:
        y, gradients = both(kernel, arrays, dy, norm=norm)
        exact = oracle.dora_linear_grads(dy, *arguments, dtype=dtype)
        for name, found in zip(NAMES, gradients, strict=True):
            wanted, allowed = (getattr(one, f"d_{name}") for one in (exact, bound))
            if name.startswith("lora"):
                wanted, allowed = wanted.T, allowed.T
            assert np.all(np.abs(oracle.fp64(found) - wanted) <= allowed), name
    else:
        call = jax.jit(
            lambda kernel, *a: dora_linear(a[0], kernel, *a[1:4], SCALE, bias=a[4], norm=norm)
        )
        y = call(kernel, *arrays)
    assert seen
    assert y.dtype == dtype
    wanted = oracle.dora_linear(*arguments, bias=bias, dtype=dtype)
    assert np.all(np.abs(oracle.fp64(y) - wanted) <= bound.y)


SMALL = [
    ("nf4", 65, (128, 128), (2, 128), jnp.bfloat16),
    ("int4", 130, (192, 128), (3, 128), jnp.bfloat16),
    ("int8", 72, (128, 256), (1, 256), jnp.bfloat16),
    ("float8_e4m3fn", 257, (64, 128), (1, 1), jnp.bfloat16),
    ("int8", 100, (128, 128), (1, 128), jnp.float16),
    ("nf4", 896, (64, 128), (1, 128), jnp.bfloat16),
]


@pytest.mark.parametrize("is_trained", [False, True])
@pytest.mark.parametrize(("qtype", "rows", "shape", "tiles", "dtype"), thinned(SMALL, SMALL[:4]))
@pytest.mark.ci
def test_agrees_with_fp64(monkeypatch, watched, qtype, rows, shape, tiles, dtype, is_trained):
    monkeypatch.setattr(choose, "target", lambda: choose.Target("gpu", "9.0", sm_count=2))
    monkeypatch.setattr(decode_quantised, "wins", lambda *_: True)
    arguments = qtype, rows, shape, tiles, dtype
    with plgpu.force_gpu_interpret_mode():
        check(*arguments, is_trained=is_trained, watched=watched)


@pytest.mark.gpu
@pytest.mark.parametrize("is_trained", [False, True])
@pytest.mark.parametrize("rows", [65, 300, 896])
@pytest.mark.parametrize("qtype", ["nf4", "int4", "int8", "float8_e4m3fn"])
def test_agrees_with_fp64_at_full_size(watched, qtype, rows, is_trained):
    shape = (2048, 1024)
    tiles = (32, 1024) if qtype in ("nf4", "int4") else (1, 1024)
    arguments = qtype, rows, shape, tiles, jnp.bfloat16
    check(*arguments, is_trained=is_trained, watched=watched)
