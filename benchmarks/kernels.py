"""The Mosaic kernels one by one, with configs to be tried: for `tune` and `tools/sanitize.py`.

The one place outside of `jax_dora.ops` that calls kernel modules.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import kernel_definitions as definitions
from benchmarks.kernel import BF16, Kernel
from benchmarks.kernel_definitions import RATE
from jax_dora.ops.mosaic import (
    bank_expand,
    bank_few_rows,
    bank_project,
    bank_rows,
    bank_shrink,
    compose,
    compose_backward,
    dropped_product,
    dropped_product_back,
    elementwise,
    expand_compose,
    few_rows,
    few_rows_finish,
    low_rank_tiling,
    norm,
    product_tiling,
    project,
    project_back,
    quantised_norm,
    row_codes,
    stationary_norm,
    swiglu_backward,
)
from jax_dora.ops.mosaic.bank_rows_sizes import Member
from jax_dora.ops.quantised import Format


def _grid(**sizes: Sequence[int]) -> list[dict[str, int]]:
    return [dict(zip(sizes, values, strict=True)) for values in itertools.product(*sizes.values())]


def _named(names: str, *shapes: tuple[int, ...]) -> list[dict[str, int]]:
    return [dict(zip(names.split(), shape, strict=True)) for shape in shapes]


RANKS = (64, 256, 384, 768)
LOW_RANK = (
    *low_rank_tiling.CONFIGS,
    low_rank_tiling.Config(tile_cols=128, stages=6, slots=1),
    low_rank_tiling.Config(tile_cols=128, stages=3, slots=1, consumers=3),
    low_rank_tiling.Config(tile_cols=64, stages=6, slots=2, consumers=3),
)
# Other tiles, and other orders of them, which decide what the level-2 cache holds.
PRODUCTS = (
    product_tiling.Config(band=4),
    product_tiling.Config(band=16),
    product_tiling.Config(band_in_cols=True),
    product_tiling.Config(tile_cols=192),
    product_tiling.Config(tile_cols=128, stages=6),
)
BANK_PROMPTS = {"groups": (8,), "slots": (64,), "time": (512,), "rank": (64,)}
DROPPED = tuple(dropped_product.Config(**c) for c in ({"stages": 3}, {"parts": 1}, {"parts": 4}))
ELEMENTWISE = (
    elementwise.Config(blocks_per_sm=1),
    elementwise.Config(stages=2, blocks_per_sm=3),
    elementwise.Config(tile_bytes=4096, blocks_per_sm=3),
    elementwise.Config(tile_bytes=2048, stages=4, blocks_per_sm=3),
)
ROWS_OUT = _named("rows out", (512, 4096), (4096, 4096), (4096, 12288))
PRODUCT_SHAPES = _named(
    "rows in out rank",
    (1024, 2048, 2048, 384),
    (4096, 4096, 1024, 384),
    (4096, 4096, 12288, 384),
    (4096, 8192, 8192, 384),
    (4096, 12288, 4096, 384),
)
DROPPED_SHAPES = _grid(rows=(4096,), **{"in": (4096, 8192)}, rank=(16, 64, 256, 384, 768))
NO_INNER = {"want_inner": False}
TILED = Format("nf4", (64, 1), BF16, False)
QUANTISED_SHAPES = [{"in": n, "tiles": n // 64, "out": n} for n in (2048, 8192)]


def _of_the_bank(kernel: Any, rows: Sequence[int], configs: Sequence[Any]) -> Kernel:
    """Returns a kernel of rows that choose their adapters from a bank, as one projection has it."""

    def launched(x: jax.Array, lora_a: Any, lora_b: Any, ranks: Any, ids: Any, **knobs: Any) -> Any:
        member = Member(lora_a, lora_b, ranks, first=jnp.int32(0))
        return kernel.launch(x, [member], ids, **knobs)[0]

    return Kernel(
        kernel,
        definitions.bank_rows,
        "rows in out slots rank",
        ("rows in", "slots rank in", "slots rank out", "ranks", "ids"),
        _grid(rows=rows, **{"in": (4096,)}, out=(4096, 14336), slots=(64,), rank=(64,)),
        configs,
        ("rows in rank", "rows rank out"),
        kinds=(BF16, BF16),
        launched=launched,
    )


def _dropped(kernel: Any, define: Any, right: str, transposed: bool = False) -> Kernel:
    """Returns a product of x under a dropout mask with a matrix of these axes."""
    return Kernel(
        kernel,
        define,
        "rows in rank",
        ("rows in", right, "seed"),
        DROPPED_SHAPES,
        DROPPED,
        ("rows in rank",),
        options={"rate": RATE, "transposed": transposed},
    )


KERNELS = {
    "norm": Kernel(
        norm,
        definitions.norm,
        "in rank out",
        ("in out", "in rank", "rank out"),
        [s | {"in": s["out"]} for s in _grid(out=(1024, 2048, 8192), rank=RANKS)],
        LOW_RANK,
        ("in out rank",),
        kinds=(BF16, BF16),
        scaled=True,
    ),
    "quantised_norm": Kernel(
        quantised_norm,
        definitions.quantised_norm,
        "in rank out",
        ("nf4 in out", "tiles out", "in rank", "rank out"),
        [shape | {"rank": rank} for shape in QUANTISED_SHAPES for rank in RANKS],
        LOW_RANK,
        ("in out rank",),
        kinds=(TILED, BF16),
        scaled=True,
    ),
    "stationary_norm": Kernel(
        stationary_norm,
        definitions.norm,
        "in rank out",
        ("in out", "in rank", "rank out"),
        [s | {"in": s["out"]} for s in _grid(out=(1024, 2048, 8192), rank=(64, 256, 384))],
        [low_rank_tiling.Config(stages=stages, slots=2) for stages in (3, 4)],
        ("in out rank",),
        kinds=(BF16, BF16),
        scaled=True,
    ),
    "few_rows": Kernel(
        few_rows,
        definitions.few_rows,
        "rows in out rank",
        ("rows in", "nf4 in out", "tiles out", "in rank", "rank out", "out"),
        [shape | {"rows": rows, "rank": 16} for shape in QUANTISED_SHAPES for rows in (1, 32)],
        [low_rank_tiling.Config(tile_cols=256, stages=2, slots=slots) for slots in (3, 4)],
        ("rows in out",),
        kinds=(TILED, BF16),
        scaled=True,
    ),
    "few_rows_finish": Kernel(
        few_rows_finish,
        definitions.expand_compose,
        "rows rank out",
        ("rows out", "rows rank", "rank out", "out"),
        _grid(rows=(8, 256), out=(2048, 8192), rank=(16, 64)),
        (),
        scaled=True,
    ),
    "row_codes": Kernel(
        row_codes,
        definitions.row_codes,
        "rows out",
        ("rows out",),
        _grid(rows=(1024, 4096), out=(1024, 4096, 8192)),
        [row_codes.Config(stages=s, blocks_per_sm=b) for s, b in ((3, 3), (4, 2), (2, 3))],
    ),
    "compose": Kernel(
        compose,
        definitions.compose,
        "rows out",
        ("rows out", "rows out", "out"),
        ROWS_OUT,
        ELEMENTWISE,
        options=NO_INNER | {"delta": False},
        scaled=True,
    ),
    "compose_backward": Kernel(
        compose_backward,
        definitions.compose_backward,
        "rows out",
        ("rows out", "rows out", "out"),
        ROWS_OUT,
        ELEMENTWISE,
        options={"delta": False, "want_base": True, "want_lora": False},
        scaled=True,
    ),
    "expand_compose": Kernel(
        expand_compose,
        definitions.expand_compose,
        "rows rank out",
        ("rows out", "rows rank", "rank out", "out"),
        _grid(rows=(1024, 4096), out=(2048, 8192), rank=RANKS),
        LOW_RANK,
        ("rows rank out",),
        options=NO_INNER,
        scaled=True,
    ),
    "project": Kernel(
        project,
        definitions.project,
        "rows in out",
        ("rows in", "in out", "rows rank", "rank out", "out"),
        PRODUCT_SHAPES,
        PRODUCTS,
        ("rows in out", "rows rank out"),
        options=NO_INNER,
    ),
    "project_back": Kernel(
        project_back,
        definitions.project_back,
        "rows in out",
        ("rows out", "in out", "rows rank", "in rank"),
        PRODUCT_SHAPES,
        PRODUCTS,
        ("rows in out", "rows in rank"),
    ),
    "dropped_product": _dropped(dropped_product, definitions.dropped_product, "in rank"),
    "dropped_product_back": _dropped(
        dropped_product_back, definitions.dropped_product_back, "rows rank", transposed=True
    ),
    "swiglu_backward": Kernel(
        swiglu_backward,
        definitions.swiglu_backward,
        "rows out",
        ("rows out",) * 3 + ("out", "out"),
        ROWS_OUT,
        ELEMENTWISE,
    ),
    "bank_expand": Kernel(
        bank_expand,
        definitions.bank_expand,
        "groups time rank out",
        ("groups time out", "groups time rank", "slots rank out", "slot", "groups out", "groups"),
        _grid(**BANK_PROMPTS | {"rank": (8, 64)}, out=(1024, 4096, 14336)),
        LOW_RANK,
        ("groups time rank out",),
    ),
    "bank_project": Kernel(
        bank_project,
        definitions.bank_project,
        "groups time in out rank",
        (
            *("groups time in", "layers in out", "", "groups time rank", "slots rank out", "slot"),
            "groups out",
        ),
        _grid(**BANK_PROMPTS, layers=(1,), **{"in": (4096,)}, out=(1024, 4096, 14336)),
        PRODUCTS,
        ("groups time in out", "groups time rank out"),
    ),
    "bank_shrink": Kernel(
        bank_shrink,
        definitions.bank_shrink,
        "groups time in rank",
        ("groups time in", "slots rank in", "slot"),
        _grid(**BANK_PROMPTS, **{"in": (4096, 14336)}),
        [bank_shrink.Config(4), bank_shrink.Config(4, 8), bank_shrink.Config(parts=2)],
        ("groups time in rank",),
    ),
    "bank_few_rows": _of_the_bank(
        bank_few_rows,
        (2, 8, 16),
        [bank_few_rows.Config(splits, 4, stages) for splits in (8, 16) for stages in (4, 8)],
    ),
    "bank_rows": _of_the_bank(
        bank_rows,
        (8, 64, 128, 256),
        [bank_rows.Config(1, stages, stages) for stages in (4, 8, 12)],
    ),
}
