"""Level `quantised`: the cost of a quantised base, compared with the same base in bf16.

One line is one measurement (`work`) with one format (`qtype`):

    copy          the card's copy rate, `tb_per_s` (bytes read plus written)
    norm          the norm ‖W + sBA‖ over a kernel of 8192 × 8192, rank 384
    few rows      a frozen DoRA projection of 1 to 64 rows, rank 16; in bf16 also by XLA
                  (`implementation`)
    product       a product of 128 to 896 rows without an adapter, as for prompts; by XLA
                  (`implementation`) with a dense copy of the kernel
    projection    4096 rows times the same kernel, alone (`kind` "base") and with a frozen adapter
                  ("DoRA"); with FP8 `activations` the kernel's columns are contiguous
                  (`in_one_piece`) or in JAX's own layout
    gradient      4096 rows of a gradient times the transposed kernel, with the rounding of both
                  (`gradients`), or by a dense copy of the kernel
    decode        a decoding step of the projections of Llama 3 8B's layers, with the base alone and
                  with a bank of adapters, as in level `bank`
    step          an optimizer step of Llama 3 8B or 70B as in level `step`, with DoRA or LoRA
                  (QLoRA); weights are random codes with scales that give weights of usual size;
                with 70B also on two cards, by their axis of the mesh (`fsdp` or `tp`); `memory`
                is that of `DecoderConfig` (58 GiB need XLA_PYTHON_CLIENT_MEM_FRACTION=0.97)
    memory        the same with DoRA, for models from 8B to 70B, as far as they fit on a card of
                  80 GB

The first six are timed by device time with a cold L2 cache: `us`, `p10`, `p90`, and `bytes` is the
size of the kernel. A step is timed by wall time: `ms`, `tokens_per_s` and XLA's account of memory;
so is decoding, by layer.
"""

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

import jax_dora
from benchmarks import bank, quantised_steps
from benchmarks.bank_adapters import bytes_read, draw_ids
from benchmarks.bank_programs import Stack
from benchmarks.clock import kernel_time
from benchmarks.quantised_steps import TILE, Case
from benchmarks.results import Row, attempt, with_ratio
from benchmarks.step import TINY_DECODER
from benchmarks.work import matches
from jax_dora import ops
from jax_dora.ops import linear, quantised, row_scaled, weight_only
from jax_dora.ops.operands import ProductSettings
from jax_dora.ops.rounding import round_to

FORMATS, FP8 = ("bf16", *quantised.FORMATS), row_scaled.QTYPE


class Settings(NamedTuple):
    """The settings of the level.

    Attributes:
      features: of the kernels, in and out.
      rows, prompt_rows, many_rows: of "few rows", "product" and "projection".
      only: `fnmatch` patterns; a "<work> <qtype>", or "step <qtype> <name>", that begins like none
        of them is skipped.
      decoding: the settings of "decode", for the formats `decoded`.
      cases, memory: the steps of "step", and of "memory".
    """

    features: int = 8192
    norm_rank: int = 384
    rank: int = 16
    rows: tuple[int, ...] = (1, 8, 32, 64)
    prompt_rows: tuple[int, ...] = (128, 256, 512, 896)
    many_rows: int = 4096
    rounds: int = 8
    only: tuple[str, ...] = ()
    decoding: bank.Settings = bank.Settings(
        decoding=(1, 8, 32, 64, 128, 256), only=("base", "DoRA"), rounds=15
    )
    decoded: tuple[str, ...] = ("bf16", "int8", "nf4")
    cases: tuple[Case, ...] = quantised_steps.CASES
    memory: tuple[Case, ...] = quantised_steps.MEMORY


TINY = Settings(
    features=128,
    norm_rank=8,
    rows=(2,),
    prompt_rows=(9,),
    many_rows=24,
    rounds=1,
    decoding=bank.TINY._replace(only=("base", "DoRA")),
    cases=(
        Case("tiny", TINY_DECODER, "DoRA", "nf4", (1, 16), keep_inner=True),
        Case("tiny", TINY_DECODER, "LoRA", FP8, (1, 16), False, FP8, "float8_e5m2", "auto"),
    ),
    memory=(Case("tiny", TINY_DECODER, "DoRA", "int8", (1, 16)),),
)


def measure(settings: Settings, device: str) -> Iterator[Row]:
    """Yields one row a measurement."""
    if device == "cuda":
        yield _copy(device)
    for works in (_norms, _few_rows, _products, _projections, _gradients):
        for row, function, operands in works(settings):
            yield _timed(device, row, function, operands)
    yield from _decoding(settings)
    for work, cases in (("step", settings.cases), ("memory", settings.memory)):
        lora, of_lora = None, None
        for case in cases:
            if not matches(f"{work} {case.qtype} {case.name}", settings.only):
                continue
            if case.devices > jax.device_count():
                continue
            row: Row = {"work": work, "name": case.name, "kind": case.kind, "qtype": case.qtype}
            row |= {"batch": case.shape[0], "time": case.shape[1], "rank": settings.rank}
            if case.keep_inner:
                row["keep_inner"] = "down_proj"
            formats = {"activations": case.activations, "gradients": case.gradients}
            row |= {name: qtype for name, qtype in formats.items() if qtype}
            row |= {"memory": case.memory} if isinstance(case.memory, float) else {}
            row |= dict(case.mesh)
            row = attempt(
                row,
                functools.partial(
                    quantised_steps.measured, case, settings.rank, settings.rounds, device
                ),
            )
            is_same = lora is not None and lora._replace(kind=case.kind) == case
            yield with_ratio(row, of_lora if is_same else None, "over_lora")
            if case.kind == "LoRA":
                lora, of_lora = case, row


def _copy(device: str) -> Row:
    """Returns the row of a copy, with its rate of bytes read plus written in TB/s."""
    x = jnp.ones(1 << 29, jnp.bfloat16)
    row = _timed(device, {"work": "copy"}, jax.jit(lambda x: x + 1), (x,))
    return row | {"tb_per_s": 4 * x.size / row["us"] / 1e6}


# A row, the function to time, and its operands.
Measurement = tuple[Row, Callable[..., Any], tuple]


def _norms(settings: Settings) -> Iterator[Measurement]:
    n, rank = settings.features, settings.norm_rank
    for number, qtype in _formats("norm", settings):
        _, kernel, lora_a, lora_b = _operands(jax.random.key(number), 1, n, rank, qtype)
        row = {"work": "norm", "qtype": qtype, "features": n, "rank": rank, "bytes": _bytes(kernel)}
        norm = jax.jit(functools.partial(ops.factored_norm, scale=0.7))
        yield row, norm, (kernel, lora_a, lora_b)


def _few_rows(settings: Settings) -> Iterator[Measurement]:
    n, rank = settings.features, settings.rank
    for rows in settings.rows:
        for number, qtype in _formats("few rows", settings):
            operands = _operands(jax.random.key(number), rows, n, rank, qtype)
            row: Row = {"work": "few rows", "qtype": qtype, "features": n, "rows": rows}
            row |= {"rank": rank, "bytes": _bytes(operands[1])}
            yield row, _frozen(n), operands
            if qtype == "bf16":
                yield row | {"implementation": "xla"}, _frozen(n, implementation="xla"), operands


def _products(settings: Settings) -> Iterator[Measurement]:
    """Yields products without an adapter, as for prompts; "xla" multiplies by a dense copy."""
    n = settings.features
    by_xla = jax.jit(lambda x, kernel: x @ quantised.dense(kernel, x.dtype))
    ours = jax.jit(lambda *operands: weight_only.linear(row_scaled.Factors(*operands)))
    for rows in settings.prompt_rows:
        for number, qtype in _formats("product", settings):
            operands = _operands(jax.random.key(number), rows, n, settings.rank, qtype)[:2]
            row: Row = {"work": "product", "qtype": qtype, "features": n, "rows": rows}
            yield row | {"implementation": "xla"}, by_xla, operands
            if qtype != "bf16":
                yield row, ours, operands


def _projections(settings: Settings) -> Iterator[Measurement]:
    n, rank, rows = settings.features, settings.rank, settings.many_rows
    fp8 = row_scaled.QTYPE
    cases = (("bf16", None, False), (fp8, None, False), (fp8, fp8, False), (fp8, fp8, True))
    for qtype, activations, in_one_piece in cases:
        if not matches(f"projection {qtype}", settings.only):
            continue
        x, kernel, lora_a, lora_b = _operands(jax.random.key(0), rows, n, rank, qtype)
        row: Row = {"work": "projection", "qtype": qtype, "features": n, "rows": rows}
        row |= {"rank": rank, "bytes": _bytes(kernel)}
        base = jax.jit(lambda x, kernel: x @ quantised.dense(kernel, x.dtype))
        if activations is not None:
            row |= {"activations": activations, "in_one_piece": in_one_piece}
            static = functools.partial(row_scaled.linear, ProductSettings(None))
            base = jax.jit(lambda x, kernel, base=static: base(row_scaled.Factors(x, kernel)))
        if in_one_piece:
            kernel = row_scaled.with_contiguous_columns(kernel)
        yield row | {"kind": "base"}, base, (x, kernel)
        dora = _frozen(n, act_qtype=activations)
        yield row | {"kind": "DoRA"}, dora, (x, kernel, lora_a, lora_b)


def _gradients(settings: Settings) -> Iterator[Measurement]:
    n, rows, fp8 = settings.features, settings.many_rows, row_scaled.QTYPE
    for qtype, bwd_qtype in (("bf16", None), (fp8, None), (fp8, fp8), (fp8, "float8_e5m2")):
        if matches(f"gradient {qtype}", settings.only):
            operands = _operands(jax.random.key(0), rows, n, settings.rank, qtype)[:2]
            row: Row = {"work": "gradient", "qtype": qtype, "features": n, "rows": rows}
            row |= {"gradients": bwd_qtype} if bwd_qtype else {}
            static = ProductSettings(None, None, bwd_qtype)
            yield row, jax.jit(functools.partial(row_scaled.times_transposed, static)), operands


def _decoding(settings: Settings) -> Iterator[Row]:
    """Yields the time of a layer's decoding, by format, number of rows and kind."""
    chosen = [one for one in settings.decoded if matches(f"decode {one}", settings.only)]
    if not chosen:
        return
    sizes = settings.decoding
    plain = nnx.jit(lambda: Stack(sizes.sizes, sizes.layers))()
    tile = math.gcd(TILE, *(n_in for n_in, _ in sizes.sizes.projections().values()))
    for qtype in chosen:
        model = plain
        if qtype != "bf16":
            tiles = tile if qtype == "nf4" else None
            model = jax_dora.quantize(plain, qtype, path=".*", tile_size=tiles)
        filled = bank.filled(
            jax_dora.AdapterBank(model, sizes.slots, max(sizes.ranks)), sizes.ranks
        )
        for rows in sizes.decoding:
            programs = bank.compiled_kinds(sizes, model, filled, (rows, 1))
            ids = draw_ids("zipf", rows, sizes.slots)
            inputs = bank.Inputs(model, filled, ids, (rows, 1))
            distinct = bytes_read(filled, ids)["distinct"]
            facts: Row = {"work": "decode", "qtype": qtype, "distinct": distinct}
            yield from bank.timed(sizes, programs, inputs, facts)


def _formats(work: str, settings: Settings) -> Iterator[tuple[int, str]]:
    """Yields the index and the name of each chosen format."""
    for number, qtype in enumerate(FORMATS):
        if matches(f"{work} {qtype}", settings.only):
            yield number, qtype


def _operands(key: jax.Array, rows: int, n: int, rank: int, qtype: str) -> tuple[Any, ...]:
    """Returns x [rows, n], a kernel [n, n], lora_a and lora_b."""
    keys = jax.random.split(key, 4)
    kernel = _kernel(keys[0], n, qtype)
    x = jax.random.normal(keys[1], (rows, n)).astype(jnp.bfloat16)
    lora_a = (jax.random.normal(keys[2], (n, rank)) * n**-0.5).astype(jnp.bfloat16)
    lora_b = (jax.random.normal(keys[3], (rank, n)) * rank**-0.5).astype(jnp.bfloat16)
    return x, kernel, lora_a, lora_b


def _frozen(n: int, **options: Any) -> Callable[..., Any]:
    """Returns a projection with a constant g, as in a layer from `jax_dora.freeze`."""

    @jax.jit
    def layer(x: jax.Array, kernel: Any, lora_a: jax.Array, lora_b: jax.Array, g: jax.Array):
        return linear.scaled_linear(x, kernel, lora_a, lora_b, g, 0.7, **options)

    return functools.partial(layer, g=jnp.ones(n))


def _timed(device: str, row: Row, function: Callable[..., Any], operands: tuple) -> Row:
    result = jax.block_until_ready(function(*operands))
    if not all(bool(jnp.all(jnp.isfinite(leaf))) for leaf in jax.tree.leaves(result)):
        return row | {"failed": "the result is not finite"}
    spread = kernel_time("jax", function, [operands], device)
    return row | {"us": spread.median, "p10": spread.p10, "p90": spread.p90}


def _kernel(key: jax.Array, n: int, qtype: str) -> Any:
    kernel = (jax.random.normal(key, (n, n)) * n**-0.5).astype(jnp.bfloat16)
    if qtype == "bf16":
        return kernel
    return round_to(kernel, qtype, (TILE if qtype in ("nf4", "int4") else n, 1), jnp.float32)


def _bytes(kernel: Any) -> int:
    """Returns the size of a kernel on the device."""
    return sum(leaf.size * quantised.bits(leaf.dtype) for leaf in jax.tree.leaves(kernel)) // 8
