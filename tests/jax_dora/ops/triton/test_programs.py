"""Programs with Triton's kernels, built for GPUs that need not be there."""

import functools
import os
import re
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import pytest

from dora_common.triton import compilation
from jax_dora.ops import compose, dora_linear, factored_norm, swiglu
from jax_dora.ops.dispatch import choose, primitive
from jax_dora.ops.triton import kernel_call
from tests.jax_dora.programs import aval, for_cuda

ROWS, IN, OUT, RANK = 1024, 1024, 2048, 64
BF16, F32 = jnp.bfloat16, jnp.float32
OPERANDS = (
    aval(ROWS, IN),
    aval(IN, OUT),
    aval(IN, RANK, dtype=F32),
    aval(RANK, OUT, dtype=F32),
    aval(OUT, dtype=F32),
)


CODE = compilation.Compiled("kernel", "", b"", 128, 0)


def step(x, kernel, lora_a, lora_b, magnitude, implementation=None):
    """Returns a result and its gradients, of a layer and of SwiGLU."""

    def run(*operands):
        y = dora_linear(operands[0], kernel, *operands[1:], 0.7, implementation=implementation)
        return y.astype(F32).sum()

    return jax.value_and_grad(run, range(4))(x, lora_a, lora_b, magnitude)


# In a process of its own: here the kernels are decorated for Triton's interpreter.
ON_A_CARD = """
import dataclasses, re
import jax
from jax_dora.ops.dispatch import choose
from tests.jax_dora.ops.triton.test_programs import OPERANDS, step
from tests.jax_dora.programs import for_cuda

real = choose.target
def on(capability, **options):
    card = dataclasses.replace(real(), platform="gpu", compute_capability=capability, **options)
    choose.target = lambda: card
    jax.clear_caches()

def built(implementation=None):
    text = for_cuda(step, *OPERANDS, implementation=implementation)
    called = re.findall(r"@(triton_\\w+)\\(", text)
    return {name.partition(".")[0] for name in called}, set(re.findall(r"target (sm_\\w+)", text))

all_three = {"triton_norm", "triton_expand_compose", "triton_compose_backward"}
on("8.6")
assert built() == (all_three, {"sm_86"}), built()
on("9.0")
assert built() == (set(), set()), built()
found, cards = built("triton")
assert (found, cards) == (all_three - {"triton_norm"}, {"sm_90a"}), (found, cards)
choose.target = real
jax.clear_caches()
found, cards = built("triton")  # for every card
assert cards == {"sm_80"}, cards

def exported(*arguments, **options):
    return jax.export.export(jax.jit(step, static_argnames="implementation"), platforms=["cuda"],
                             **options)(*OPERANDS, *arguments)
on("8.6")
assert "xla.gpu.ptx" not in exported().mlir_module()
ptx = jax.export.DisabledSafetyCheck.custom_call("__gpu$xla.gpu.ptx")
whole = exported("triton", disabled_checks=[ptx])
assert "xla.gpu.ptx" in whole.mlir_module()
"""


def in_a_process(code: str) -> None:
    environment = {name: v for name, v in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-W", "error::DeprecationWarning:jax_dora", "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.ci
def test_a_program_calls_the_kernels_of_its_card():
    in_a_process(ON_A_CARD)


@pytest.fixture
def not_interpreted(monkeypatch):
    monkeypatch.setattr(primitive, "interprets", lambda implementation: False)
    monkeypatch.setattr(choose, "interprets", lambda implementation: False)
    monkeypatch.setattr(kernel_call, "interpreted", lambda: False)
    monkeypatch.setattr(compilation, "compiled", lambda *call: CODE)


def test_kernels_are_compiled_beside_each_other(not_interpreted, monkeypatch):
    """And beside the tracing of the program: neither kernel waits for the other."""
    both = threading.Barrier(2, timeout=60)
    monkeypatch.setattr(choose, "target", lambda: choose.Target("gpu", "8.6"))
    monkeypatch.setattr(compilation, "compiled", lambda *call: (both.wait(), CODE)[1])
    y, g = aval(1152, 2048), aval(2048, dtype=F32)

    def composed(*operands):
        return compose(*operands, 0.7, implementation="triton").astype(F32).sum()

    text = for_cuda(jax.grad(composed, range(3)), y, y, g)
    assert text.count("xla.gpu.ptx") == 2


def test_programs_contain_no_debug_information():
    lines = (".target sm_90a", "\t.loc\t1 2 3", "\t// begin", "\tret;", "\t.file\t1 2", "}")
    written = "\n".join((*lines, "\t.section\t.debug_abbrev", "\t{", ".b8 1"))
    assert compilation._without_debug_information(written) == ".target sm_90a\n\tret;\n}\n"


@pytest.mark.parametrize("whole_process", [False, True])
def test_with_x64_the_kernels_get_fp32(not_interpreted, whole_process, monkeypatch):
    card = choose.Target("gpu", "9.0", x64=True)
    monkeypatch.setattr(choose, "target", lambda: card)
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", whole_process)
    try:
        with jax.enable_x64(True):
            gate, vector = aval(ROWS, OUT), aval(OUT, dtype=jnp.float64)
            gated = jax.jit(lambda *o: jax.grad(lambda *o: swiglu(*o).astype(F32).sum())(*o))
            for traced in (
                jax.jit(step).trace(*OPERANDS[:4], vector),
                gated.trace(gate, gate, vector, vector),
            ):
                text = traced.lower(lowering_platforms=("cuda",)).as_text()
                assert "xla.gpu.ptx" in text
    finally:
        jax.config.update("jax_enable_x64", before)


def test_another_platform_refuses_a_named_kernel(not_interpreted):
    traced = jax.jit(functools.partial(step, implementation="triton")).trace(*OPERANDS)
    with pytest.raises(NotImplementedError, match=r"8\.0 or later, .* built for tpu"):
        traced.lower(lowering_platforms=("tpu",))


@pytest.mark.parametrize("platform", ["tpu", "rocm"])
def test_elsewhere_xla_computes_everything(platform):
    gate, vector = aval(ROWS, OUT), aval(OUT, dtype=F32)

    def gated(*operands):
        return jax.grad(lambda *a: swiglu(*a).astype(F32).sum(), range(4))(*operands)

    norm = jax.jit(lambda *a: factored_norm(*a, 0.7))
    for function, operands in (
        (step, OPERANDS),
        (norm, OPERANDS[1:4]),
        (gated, (gate, gate, vector, vector)),
    ):
        text = jax.export.export(jax.jit(function), platforms=[platform])(*operands).mlir_module()
        assert "stablehlo" in text
        assert "custom_call" not in re.sub(r"custom_call @Sharding", "", text)
