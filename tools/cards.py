"""Compiles the Triton kernels of both packages for every card, by Triton's own compiler.

    python -m tools.cards [--out FILE] [CAPABILITY...] [KERNEL...]

No GPU is needed. Prints a line of JSON for each kernel and config, and fails if one does not fit
its card or spills registers to memory. FILE gets a line for each compute capability, for the page
"Which GPU".
"""

import argparse
import contextlib
import functools
import importlib
import json
import pkgutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, cast
from unittest import mock

import jax
import jax.numpy as jnp
import torch
from triton.runtime.jit import KernelInterface

import torch_dora.ops.triton as torch_launches
from benchmarks.results import Writer
from dora_common.triton import compilation
from dora_common.triton.cards import CARDS, REGISTERS
from dora_common.triton.compilation import Compiled, compiled
from jax_dora.ops.dispatch.choose import KERNELS, Target
from jax_dora.ops.mosaic.bank.bank_rows_sizes import Member
from jax_dora.ops.quantised import FORMATS, Format
from jax_dora.ops.triton import (
    triton_bank_expand,
    triton_bank_rows,
    triton_bank_shrink,
    triton_compose_backward,
    triton_compose_forward,
    triton_decode_attention,
    triton_disentangled_backward,
    triton_disentangled_forward,
    triton_expand_compose,
    triton_few_rows,
    triton_norm,
    triton_quantised_norm,
    triton_residual_norm_backward,
    triton_residual_norm_forward,
    triton_swiglu,
)
from parity.environment import environment
from torch_dora.ops.quantised import Codes

ROWS, IN, OUT = 4096, 4096, 14336
RANKS = (16, 64, 384)
_TYPES = {
    torch.bfloat16: "*bf16:16",
    torch.float16: "*fp16:16",
    torch.float32: "*fp32:16",
    torch.int32: "*i32:16",
    torch.int64: "*i64:16",
    torch.uint8: "*u8:16",
}


_PRODUCTS = ("tcgen05.mma", "wgmma", "mma.sync")


class Case(NamedTuple):
    """A kernel and all that its compiled code depends on, except the card."""

    package: str
    kernel: Any
    types: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Any], ...]
    warps: int = 4
    stages: int = 3

    @property
    def name(self) -> str:
        module = self.kernel.fn.__module__.rpartition(".")[2]
        name = self.kernel.fn.__name__
        return module if name == "kernel" else f"{module}.{name}"


def cases(capability: int) -> list[Case]:
    """Returns every kernel that the packages launch, with the configs for a compute capability."""
    found = dict.fromkeys([*_of_jax(capability), *_of_torch(capability)])
    return list(found)


def _of_jax(capability: int) -> Iterator[Case]:
    recorded: list[Case] = []

    def record(kernel: Any, types: Any, constants: Any, _: int, *options: int) -> Compiled:
        recorded.append(Case("jax_dora", kernel, types, constants, *options))
        return Compiled("", "", b"", 32, 0)

    def array(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    def launch(kernel: Any, call: tuple[Any, ...], *operands: Any, **options: Any) -> None:
        config = kernel.config(capability, *call)
        options |= {"config": config, "capability": capability}
        jax.eval_shape(lambda *a: kernel.launch.__wrapped__(*a, **options), *operands)

    def codes(qtype: str) -> tuple[Format, jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
        form = Format(qtype, (64, 1), jnp.bfloat16, False)
        return form, array(IN, OUT, dtype=form.stored), array(IN // 64, OUT)

    full, whole, scale = jnp.float32, jnp.int32, array(dtype=jnp.float32)
    rows, g, bias = array(ROWS, OUT), array(OUT, dtype=full), array(OUT)
    size = (ROWS, OUT, jnp.bfloat16)
    with_inner = {"want_inner": True}
    with mock.patch.object(compilation, "compiled", record):
        for rank in RANKS:
            for dtype in (jnp.bfloat16, full):
                adapter = array(IN, rank, dtype=dtype), array(rank, OUT, dtype=dtype)
                call = (IN, rank, OUT, jnp.bfloat16, dtype)
                launch(triton_norm, call, array(IN, OUT), *adapter, scale)
            operands = rows, array(ROWS, rank), array(rank, OUT), g, scale, bias
            call = (ROWS, rank, OUT, jnp.bfloat16)
            launch(triton_expand_compose, call, *operands, **with_inner)
        for qtype in FORMATS:
            form, *stored = codes(qtype)
            adapter = array(IN, 64), array(64, OUT)
            launch(
                triton_quantised_norm, (IN, 64, OUT, form, jnp.bfloat16), *stored, *adapter, scale
            )
            operands = array(16, IN), *stored, *adapter, g, scale, bias
            launch(triton_few_rows, (16, IN, OUT, 64, form, jnp.bfloat16), *operands)
        operands = (
            array(16, IN),
            array(IN, OUT),
            None,
            array(IN, 64),
            array(64, OUT),
            g,
            scale,
            bias,
        )
        launch(triton_few_rows, (16, IN, OUT, 64, None, jnp.bfloat16), *operands)
        held, ids, of_slots = array(4, 64, IN), array(8, dtype=whole), array(4, dtype=whole)
        member: Any = Member(*cast(Any, (held, array(4, 64, OUT), of_slots, array(dtype=whole))))
        launch(triton_bank_shrink, (8, 512, IN, 64), array(8, 512, IN), held, ids)
        z, gs = array(8, 512, 64), array(8, OUT, dtype=full)
        operands = array(8, 512, OUT), z, member.lora_b, ids, gs, array(8, dtype=full), bias
        launch(triton_bank_expand, (8, 512, 64, OUT), *operands)
        launch(triton_bank_rows, (8, IN, OUT, 4, 64), array(8, IN), (member,), ids)
        vectors = g, g, bias, bias
        launch(triton_swiglu, size, rows, rows, rows, *vectors, want_bias=True)
        wanted = {"delta": False, "want_base": True, "want_lora": True}
        launch(triton_compose_backward, size, rows, rows, g, scale, **wanted)
        launch(triton_compose_forward, size, rows, rows, g, scale, bias, delta=False, **with_inner)
        for group, head_dim in ((4, 64), (4, 96), (4, 128), (2, 256), (32, 256)):
            _launch_attention(functools.partial(launch, triton_decode_attention), group, head_dim)
        for head in (64, 128):
            batch, time, heads = 20, 512, 24
            q, table = array(batch, time, heads, head), array(2 * time - 1, heads, head)
            mask, seed = array(batch, time, dtype=jnp.int8), array(2, dtype=whole)
            taken = q, q, q, table, table, mask, seed
            call, dropout = (batch, time, heads, head, jnp.bfloat16), {"rate": 0.1}
            launch(triton_disentangled_forward, call, *taken, **dropout)
            pairs, lse = array(batch, heads, time, time), array(batch, heads, time, dtype=full)
            returned = q, lse, pairs, pairs
            launch(triton_disentangled_backward, call, q, *returned, *taken, **dropout)
        for features in (512, 1536):
            taken = *2 * [array(10_240, features)], *2 * [array(features, dtype=full)]
            seed, statistics = array(2, dtype=whole), 2 * [array(10_240, dtype=full)]
            call, rows = (10_240, features, jnp.bfloat16), (taken[0], *taken[:3], seed)
            launch(triton_residual_norm_forward, call, *taken, seed, epsilon=1e-7, rate=0.1)
            launch(triton_residual_norm_backward, call, *rows, *statistics, rate=0.1)
    return iter(recorded)


def _launch_attention(launch: Any, group: int, head_dim: int) -> None:
    batch, kv_heads, capacity = 2, 8, 1024
    full, whole = jnp.float32, jnp.int32

    def array(*shape: int, dtype: Any = full) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    slots = 1, batch, kv_heads, capacity
    entries = array(*slots, head_dim, dtype=jnp.float8_e4m3fn), array(*slots)
    new = [array(batch, heads, head_dim) for heads in (group * kv_heads, kv_heads)]
    value = array(batch, kv_heads, head_dim, dtype=jnp.bfloat16)
    numbers = array(batch, dtype=whole), array(1, dtype=whole)
    call = (group, head_dim, capacity, jnp.bfloat16)
    launch(call, *new, value, *entries, *entries, *numbers, window=512)


def _of_torch(capability: int) -> Iterator[Case]:
    recorded: list[Case] = []

    def record(kernel: Any, *arguments: Any, num_warps=4, num_stages=3, **named: Any):
        named.pop("enable_fp_fusion", None)
        given = dict(zip(kernel.arg_names, arguments, strict=False))
        # Triton takes a None and an integer 1 as constants.
        fixed = {
            n: one for n, one in given.items() if one is None or (type(one) is int and one == 1)
        }
        types = {n: _type(one) for n, one in given.items() if n not in fixed}
        named |= fixed
        recorded.append(
            Case("torch_dora", kernel, (*types.items(),), (*named.items(),), num_warps, num_stages)
        )

    modules = {
        found.name: importlib.import_module(f"{torch_launches.__name__}.{found.name}")
        for found in pkgutil.iter_modules(torch_launches.__path__)
    }
    # As for the interpreter, every launch then is `kernel[grid](…)`.
    jit = modules["jit"]
    replaced: list[tuple[Any, str, Any]] = [
        (KernelInterface, "__getitem__", lambda kernel, grid: functools.partial(record, kernel)),
        (jit, "TRITON_MODE", "recorded"),
    ]
    replaced += [
        (module, "capability", lambda device: capability)
        for module in modules.values()
        if hasattr(module, "capability")
    ]
    with contextlib.ExitStack() as stack:
        for one in replaced:
            stack.enter_context(mock.patch.object(*one))
        _launch_torch(modules)
    return iter(recorded)


def _type(argument: Any) -> str:
    if isinstance(argument, torch.Tensor):
        return _TYPES[argument.dtype]
    return "fp32" if isinstance(argument, float) else "i32" if argument % 16 else "i32:16"


def _launch_torch(modules: dict[str, Any]) -> None:
    """Launches every kernel of torch_dora on tensors without memory."""

    def array(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    full, whole = torch.float32, torch.int32
    rows, g, bias = array(ROWS, OUT), array(OUT, dtype=full), array(OUT)
    norm = modules["one_pass_norm"].launch
    for rank in RANKS:
        a, b = array(rank, IN), array(OUT, rank)
        norm(array(OUT, IN), a, b, 0.5)
        norm(array(OUT, IN), a.float(), b.float(), 0.5, magnitude=g)
        codes = array(OUT, IN // 2, dtype=torch.uint8), array(16, dtype=full)
        scales = array(OUT * IN // 64, dtype=full)
        fields = {"packed": codes[0], "levels": codes[1], "scales": scales, "run": 64}
        norm(Codes(**{name: fields[name] for name in Codes._fields}), a, b, 0.5)
        expand = modules["expand_compose"].expand_compose.function
        expand(rows, array(ROWS, rank), b, g, bias, 0.5, True)
    modules["compose_forward"].compose.function(rows, rows, g, bias, 0.5, False, True)
    modules["compose_backward"].compose_backward.function(rows, rows, g, 0.5, False, True, True)
    modules["norm_assembly"].launch(g, g, g, 0.5)
    bank = array(4, 64, IN), array(4, 64, OUT), array(4, OUT, dtype=full), array(4, dtype=full)
    ranks, ids = array(4, dtype=whole), array(8, dtype=torch.int64)
    for time, groups in ((512, None), (1, array(8, 16, dtype=whole))):
        modules["bank_expand"].bank_linear.function(
            array(8, time, OUT), array(8, time, IN), *bank, ranks, ids, groups, bias
        )


def fit(case: Case, capability: int) -> dict[str, Any]:
    """Compiles a case for a card, and returns what it uses and whether that fits."""
    code = compiled(case.kernel, case.types, case.constants, capability, case.warps, case.stages)
    registers, spilled = code.resources()
    fits = (
        code.shared_bytes <= CARDS[capability].shared_bytes
        and registers * code.threads <= REGISTERS
        and not spilled
    )
    sizes = ("RANK", "RANKS", "ROWS", "COLUMNS", "FEATURES", "WIDTH", "DEPTH", "PIECES", "CODES")
    sizes += ("SIZE", "THEN", "GROUPED")
    return {
        "capability": capability,
        "package": case.package,
        "kernel": case.name,
        "constants": {name: value for name, value in case.constants if name in sizes},
        "warps": case.warps,
        "stages": case.stages,
        "shared_bytes": code.shared_bytes,
        "registers": registers,
        "spilled_bytes": spilled,
        "fits": fits,
        "product": next((name for name in _PRODUCTS if name in code.ptx), None),
        "atomics": "atom." in code.ptx,
        "vectors": "st.global.v4" in code.ptx,
    }


def summary(capability: int, found: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns what the page "Which GPU" says of a compute capability."""
    target = Target("gpu", f"{capability // 10}.{capability % 10}")
    preferred = [name for name in KERNELS if target.prefers(name) and not target.refuses(name)]
    return {
        "capability": target.compute_capability,
        "cards": CARDS[capability].names,
        "jax": preferred[0],
        "kernels": len(found),
        "fitting": sum(one["fits"] for one in found),
        "shared_kib": max(one["shared_bytes"] for one in found) / 1024,
        "limit_kib": CARDS[capability].shared_bytes / 1024,
        "registers": max(one["registers"] for one in found),
    }


def main() -> int:
    """Prints a line for each kernel and returns 1 if one does not fit."""
    parser = argparse.ArgumentParser(description="Compile the Triton kernels for every card.")
    parser.add_argument("--out", type=Path)
    parser.add_argument("names", nargs="*", metavar="CAPABILITY or KERNEL")
    options = parser.parse_args()
    failed, writer = False, None
    if options.out:
        facts = {"level": "cards", "environment": environment("cpu")}
        writer = Writer(options.out, {"kind": "compiled", **facts})
    capabilities = [int(one) for one in options.names if one.isdigit()]
    kernels = [one for one in options.names if not one.isdigit()]
    for capability in capabilities or CARDS:
        found = []
        for case in cases(capability):
            if not kernels or case.name in kernels:
                found.append(fit(case, capability))
                print(json.dumps(found[-1]), flush=True)
        failed |= not all(one["fits"] for one in found)
        if writer:
            writer.add(summary(capability, found))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
