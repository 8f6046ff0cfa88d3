"""Tables of the Mosaic and Triton kernels, with shapes and candidate launch configs.

`tune` times them, `tools/sanitize.py` runs them under compute-sanitizer. No other code outside of
`jax_dora.ops` calls kernel modules.
"""

import importlib
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import kernel_definitions
from benchmarks.kernel_definitions import RATE
from jax_dora.ops import mosaic, triton
from jax_dora.ops.dispatch import choose
from jax_dora.ops.dropout import draw_seed
from jax_dora.ops.mosaic.bank import bank_decode, bank_rows, bank_shrink
from jax_dora.ops.mosaic.bank.bank_rows_sizes import Member
from jax_dora.ops.mosaic.decode import decode_quantised
from jax_dora.ops.mosaic.projection import dropout_shrink, matmul_tiling, strip_tiling
from jax_dora.ops.mosaic.rows import elementwise, row_codes, swiglu_codes
from jax_dora.ops.quantised import Format, bits

BF16 = jnp.dtype(jnp.bfloat16)
Shapes = list[dict[str, int]]


@dataclass(frozen=True)
class Kernel:
    """A kernel, its operands, and the shapes and configs to measure it with.

    Attributes:
      name: of its module in a folder of `jax_dora.ops.mosaic`, and of the function in
        `kernel_definitions` that computes the same by XLA.
      call: the sizes that the module's `config` and `wins` take, before the dtypes.
      operands: for each operand the names of its axes, separated by commas. Operands of two axes
        and more are bf16, of one axis fp32, after "nf4" or "fp8" codes. Five have no axes: "layer"
        (the number of a layer), "seed" (of dropout), "slot" (a slot for each group), "ids" (a slot
        for each row) and "ranks" (the rank in each slot).
      shapes: the sizes by name.
      candidates: configs to try in addition to the kernel's own choice.
      products: the axes of its matrix products, separated by commas.
      scaled: whether the launch takes a scale after its operands, here 1.
      options: static arguments of the launch.
      kinds: the dtypes and formats that `config` and `wins` take after the sizes.
      launcher: if the module's `launch` takes other operands, a function of the operands that calls
        it.
      triton: the name of a module of `jax_dora.ops.triton`, if it is measured instead of the Mosaic
        kernel of the same operator.
    """

    name: str
    call: str
    operands: str
    shapes: Shapes
    candidates: Sequence[Any]
    products: str = ""
    scaled: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    kinds: tuple[Any, ...] = (BF16,)
    launcher: Callable[..., Any] | None = None
    triton: str = ""

    @property
    def package(self) -> str:
        return "triton" if self.triton else "mosaic"

    @property
    def module(self) -> Any:
        if self.triton:
            return importlib.import_module(f"{triton.__name__}.{self.triton}")
        (path,) = Path(mosaic.__path__[0]).glob(f"*/{self.name}.py")
        return importlib.import_module(f"{mosaic.__name__}.{path.parent.name}.{self.name}")

    @property
    def define(self) -> Callable[..., Any]:
        return getattr(kernel_definitions, self.name)

    def launch(self, *operands: jax.Array, config: Any = None) -> Any:
        """Returns the kernel's results, launched with `config`, or with the kernel's own choice if
        that is None."""
        sizes: dict[str, int] = {}
        for axes, operand in zip(self.operands.split(", "), operands, strict=True):
            names = [] if axes == "layer" else _names(axes)
            sizes |= dict(zip(names, operand.shape, strict=True))
        target, call = choose.target(), self.arguments(sizes)
        if self.triton:
            chosen = self.module.config(target.capability, *call)
            knobs = {"config": config or chosen, "capability": target.capability}
        else:
            knobs = {"config": config or self.module.config(*call), "sm_count": target.sm_count}
        launch = self.launcher or self.module.launch
        scale = (jnp.float32(1),) if self.scaled else ()
        return launch(*operands, *scale, **self.options, **knobs)

    def arguments(self, sizes: Mapping[str, int]) -> tuple[Any, ...]:
        """Returns the arguments of the module's `config` and `wins`."""
        return (*(sizes[name] for name in self.call.split()), *self.kinds)

    def draw(self, sizes: Mapping[str, int], seed: int = 0) -> list[jax.Array]:
        """Returns random operands of these sizes."""
        operands = self.operands.split(", ")
        keys = jax.random.split(jax.random.key(seed), len(operands))
        return [_draw(key, axes, sizes) for key, axes in zip(keys, operands, strict=True)]

    def bytes(self, operands: Sequence[jax.Array]) -> int:
        """Returns the bytes of each operand read once and each result written once."""
        tensors = [*operands, *jax.tree.leaves(jax.eval_shape(self.define, *operands))]
        return sum(math.prod(t.shape) * bits(t.dtype) for t in tensors) // 8

    def flops(self, sizes: Mapping[str, int]) -> int:
        """Returns the FLOPs of the matrix products."""
        products = filter(None, self.products.split(", "))
        return sum(2 * math.prod(sizes[name] for name in axes.split()) for axes in products)


def _names(axes: str) -> list[str]:
    return [name for name in axes.split() if name not in ("nf4", "fp8")]


def _draw(key: jax.Array, axes: str, sizes: Mapping[str, int]) -> jax.Array:
    match axes:
        case "seed":
            return draw_seed(key)
        case "layer":
            return jnp.int32(0)
        case "slot" | "ids":
            count = sizes["groups" if axes == "slot" else "rows"]
            return jnp.arange(count, dtype=jnp.int32) % sizes["slots"]
        case "ranks":
            return jnp.full(sizes["slots"], sizes["rank"], jnp.int32)
    shape = tuple(sizes[name] for name in _names(axes))
    if axes.startswith("nf4 "):
        return jax.random.randint(key, shape, 0, 16, jnp.uint8).astype(jnp.uint4)
    values = jax.random.normal(key, shape)
    if axes.startswith("fp8 "):
        return values.astype(jnp.float8_e4m3fn)
    if len(shape) == 1:
        return 1 + 0.1 * values
    # Scaled so that sums of products stay near 1.
    return (values * shape[0] ** -0.5 if axes.startswith(("in", "rank")) else values).astype(BF16)


def _grid(**sizes: Sequence[int]) -> Shapes:
    return [dict(zip(sizes, values, strict=True)) for values in itertools.product(*sizes.values())]


def _shapes(names: str, *shapes: tuple[int, ...]) -> Shapes:
    return [dict(zip(names.split(), shape, strict=True)) for shape in shapes]


RANKS = (64, 256, 384, 768)
LOW_RANK = (
    *strip_tiling.CONFIGS,
    strip_tiling.Config(tile_cols=128, stages=6, slots=1),
    strip_tiling.Config(tile_cols=128, stages=3, slots=1, consumers=3),
    strip_tiling.Config(tile_cols=64, stages=6, slots=2, consumers=3),
)
# Other tiles, and other orders of tiles, which determine what the L2 cache holds.
PRODUCTS = (
    matmul_tiling.Config(band=4),
    matmul_tiling.Config(band=16),
    matmul_tiling.Config(band_in_cols=True),
    matmul_tiling.Config(tile_cols=192),
    matmul_tiling.Config(tile_cols=128, stages=6),
)
ELEMENTWISE = (
    elementwise.Config(blocks_per_sm=1),
    elementwise.Config(stages=2, blocks_per_sm=3),
    elementwise.Config(tile_bytes=4096, blocks_per_sm=3),
    elementwise.Config(tile_bytes=2048, stages=4, blocks_per_sm=3),
)
DROPPED = tuple(dropout_shrink.Config(**c) for c in ({"stages": 3}, {"parts": 1}, {"parts": 4}))
DROPPED_SHAPES = _grid(rows=(4096,), **{"in": (4096, 8192)}, rank=(16, 64, 256, 384, 768))
ROWS_OUT = _shapes("rows out", (512, 4096), (4096, 4096), (4096, 12288))
PRODUCT_SHAPES = _shapes(
    "rows in out rank",
    *((1024, 2048, 2048, 384), (4096, 4096, 1024, 384), (4096, 4096, 12288, 384)),
    *((4096, 8192, 8192, 384), (4096, 12288, 4096, 384)),
)
PROMPTS = {"groups": (8,), "slots": (64,), "time": (512,), "rank": (64,)}
NO_INNER = {"want_inner": False}
NO_DELTA = {"delta": False}
TILED = Format("nf4", (64, 1), BF16, False)
PER_COLUMN = Format("float8_e4m3fn", (8192, 1), BF16, False)
QUANTISED_SHAPES = [{"in": n, "tiles": n // 64, "out": n} for n in (2048, 8192)]


def _rows_of_a_bank(module: Any, rows: Sequence[int], configs: Sequence[Any]) -> Kernel:
    """Returns a kernel that computes the adapters of rows which each choose a slot of a bank."""

    def launch(x: jax.Array, lora_a: Any, lora_b: Any, ranks: Any, ids: Any, **knobs: Any) -> Any:
        member = Member(lora_a, lora_b, ranks, first=jnp.int32(0))
        return module.launch(x, [member], ids, **knobs)[0]

    return Kernel(
        module.__name__.rpartition(".")[2],
        "rows in out slots rank",
        "rows in, slots rank in, slots rank out, ranks, ids",
        _grid(rows=rows, **{"in": (4096,)}, out=(4096, 14336), slots=(64,), rank=(64,)),
        configs,
        "rows in rank, rows rank out",
        kinds=(BF16, BF16),
        launcher=launch,
    )


def _dropped(name: str, right: str, transposed: bool) -> Kernel:
    """Returns a product of x under a dropout mask with a matrix of the axes `right`."""
    options = {"rate": RATE, "transposed": transposed}
    return Kernel(
        name,
        "rows in rank",
        f"rows in, {right}, seed",
        DROPPED_SHAPES,
        DROPPED,
        "rows in rank",
        options=options,
    )


TABLE = (
    Kernel(
        "one_pass_norm",
        "in rank out",
        "in out, in rank, rank out",
        [s | {"in": s["out"]} for s in _grid(out=(1024, 2048, 8192), rank=RANKS)],
        LOW_RANK,
        "in out rank",
        scaled=True,
        kinds=(BF16, BF16),
    ),
    Kernel(
        "quantised_norm",
        "in rank out",
        "nf4 in out, tiles out, in rank, rank out",
        [shape | {"rank": rank} for shape in QUANTISED_SHAPES for rank in RANKS],
        LOW_RANK,
        "in out rank",
        scaled=True,
        kinds=(TILED, BF16),
    ),
    Kernel(
        "stationary_norm",
        "in rank out",
        "in out, in rank, rank out",
        [s | {"in": s["out"]} for s in _grid(out=(1024, 2048, 8192), rank=(64, 256, 384))],
        [strip_tiling.Config(stages=stages, slots=2) for stages in (3, 4)],
        "in out rank",
        scaled=True,
        kinds=(BF16, BF16),
    ),
    Kernel(
        "transposing_norm",
        "in rank out",
        "fp8 in out, tiles out, in rank, rank out",
        _shapes(
            "in rank out tiles",
            *((4096, 16, 14336, 1), (8192, 16, 1024, 1), (8192, 16, 8192, 1)),
            *((8192, 16, 28672, 1), (28672, 16, 8192, 1)),
        ),
        [
            strip_tiling.Config(tile_cols=64 * count, stages=6, slots=slots, consumers=count)
            for count, slots in ((2, 4), (4, 4), (4, 8))
        ],
        "in out rank",
        scaled=True,
        kinds=(PER_COLUMN, BF16),
    ),
    Kernel(
        "decode_project",
        "rows in out rank",
        "rows in, nf4 in out, tiles out, in rank, rank out, out",
        [shape | {"rows": rows, "rank": 16} for shape in QUANTISED_SHAPES for rows in (1, 32)],
        [strip_tiling.Config(tile_cols=256, stages=2, slots=slots) for slots in (3, 4)],
        "rows in out",
        scaled=True,
        kinds=(TILED, BF16),
    ),
    Kernel(
        "decode_quantised",
        "rows in out",
        "rows in, nf4 in out, tiles out",
        [shape | {"rows": rows} for shape in QUANTISED_SHAPES for rows in (128, 512)],
        [decode_quantised.Config(slots) for slots in (3, 4)],
        "rows in out",
        kinds=(TILED, BF16),
    ),
    Kernel(
        "decode_finish",
        "rows rank out",
        "rows out, rows rank, rank out, out",
        _grid(rows=(8, 256), out=(2048, 8192), rank=(16, 64)),
        (),
        scaled=True,
    ),
    Kernel(
        "row_codes",
        "rows out",
        "rows out",
        _grid(rows=(1024, 4096), out=(1024, 4096, 8192)),
        [row_codes.Config(stages=s, blocks_per_sm=b) for s, b in ((3, 3), (4, 2), (2, 3))],
    ),
    Kernel(
        "swiglu_codes",
        "rows out",
        "rows out, rows out, out, out",
        _grid(rows=(1024, 4096), out=(4096, 8192, 14336)),
        [swiglu_codes.Config(stages=s, blocks_per_sm=b) for s, b in ((2, 2), (3, 3), (4, 2))],
        kinds=(BF16, 2),
    ),
    Kernel(
        "compose_forward",
        "rows out",
        "rows out, rows out, out",
        ROWS_OUT,
        ELEMENTWISE,
        scaled=True,
        options=NO_INNER | NO_DELTA,
    ),
    Kernel(
        "compose_backward",
        "rows out",
        "rows out, rows out, out",
        ROWS_OUT,
        ELEMENTWISE,
        scaled=True,
        options=NO_DELTA | {"want_base": True, "want_lora": False},
    ),
    Kernel(
        "expand_compose",
        "rows rank out",
        "rows out, rows rank, rank out, out",
        _grid(rows=(1024, 4096), out=(2048, 8192), rank=RANKS),
        LOW_RANK,
        "rows rank out",
        scaled=True,
        options=NO_INNER,
    ),
    Kernel(
        "shrink",
        "rows in out",
        "rows in, in out",
        _shapes("rows in out", (4096, 4096, 384), (4096, 14_336, 384)),
        [matmul_tiling.Config(tile_cols=128, stages=stages) for stages in (4, 6)],
        "rows in out",
    ),
    Kernel(
        "project",
        "rows in out",
        "rows in, in out, rows rank, rank out, out",
        PRODUCT_SHAPES,
        PRODUCTS,
        "rows in out, rows rank out",
        options=NO_INNER,
    ),
    Kernel(
        "project_back",
        "rows in out",
        "rows out, in out, rows rank, in rank",
        PRODUCT_SHAPES,
        PRODUCTS,
        "rows in out, rows in rank",
    ),
    Kernel(
        "coded_matmul",
        "rows in out rank",
        "fp8 rows in, rows, fp8 out in, rows rank, out rank, out",
        _shapes(
            "rows in out rank",
            *((4096, 4096, 1024, 16), (4096, 4096, 4096, 16), (4096, 4096, 14336, 16)),
            *((4096, 14336, 4096, 16), (4096, 8192, 1024, 16), (4096, 8192, 8192, 16)),
            *((4096, 8192, 28672, 16), (4096, 28672, 8192, 16)),
        ),
        (*PRODUCTS[:3], matmul_tiling.Config(split_rows=False)),
        "rows in out, rows rank out",
    ),
    _dropped("dropout_shrink", "in rank", transposed=False),
    _dropped("dropout_shrink_back", "rows rank", transposed=True),
    Kernel(
        "swiglu_backward",
        "rows out",
        "rows out, rows out, rows out, out, out",
        ROWS_OUT,
        ELEMENTWISE,
    ),
    Kernel(
        "bank_expand",
        "groups time rank out",
        "groups time out, groups time rank, slots rank out, slot, groups out, groups",
        _grid(**PROMPTS | {"rank": (8, 64)}, out=(1024, 4096, 14336)),
        LOW_RANK,
        "groups time rank out",
    ),
    Kernel(
        "bank_project",
        "groups time in out rank",
        "groups time in, layers in out, layer, groups time rank, slots rank out, slot, groups out",
        _grid(**PROMPTS, layers=(1,), **{"in": (4096,)}, out=(1024, 4096, 14336)),
        PRODUCTS,
        "groups time in out, groups time rank out",
    ),
    Kernel(
        "bank_shrink",
        "groups time in rank",
        "groups time in, slots rank in, slot",
        _grid(**PROMPTS, **{"in": (4096, 14336)}),
        [bank_shrink.Config(4), bank_shrink.Config(4, 8), bank_shrink.Config(parts=2)],
        "groups time in rank",
    ),
    _rows_of_a_bank(
        bank_decode,
        (2, 8),
        [bank_decode.Config(splits, stages) for splits in (8, 16) for stages in (4, 8)],
    ),
    _rows_of_a_bank(
        bank_rows,
        (8, 64, 128, 256),
        [bank_rows.Config(1, stages, stages) for stages in (4, 8, 12)],
    ),
)
KERNELS = {kernel.name: kernel for kernel in TABLE}


def triton_kernels() -> list[Kernel]:
    """Returns the Triton kernels of JAX, with the shapes of the Mosaic kernels."""
    from dora_common.triton import compose_backward, compose_forward, few_rows, strips
    from dora_common.triton.expand_compose import Config
    from jax_dora.ops.triton import triton_bank_rows

    tiles = [
        Config(*tile)
        for tile in (
            *((64, 128, 64, 4, 3), (64, 128, 64, 8, 2), (128, 128, 32, 8, 3)),
            *((128, 128, 64, 4, 3), (128, 128, 64, 8, 3), (128, 256, 64, 8, 3)),
        )
    ]
    walks = [
        strips.Config(*walk)
        for walk in (
            *((64, 64, 64, 4, 3), (64, 64, 64, 4, 4), (64, 128, 64, 4, 3), (128, 64, 64, 4, 3)),
            *((128, 64, 128, 4, 3, 1), (128, 64, 64, 8, 3)),
        )
    ]
    parts = [compose_backward.Config(**c) for c in ({"columns": 1024}, {"rows": 2}, {"stages": 2})]
    rows = [compose_forward.Config(rows=2), compose_forward.Config(rows=8, warps=8)]
    few = [few_rows.Config(**c) for c in ({"columns": 128}, {"resident": 2}, {"stages": 3})]
    candidates = {
        "one_pass_norm": ("triton_norm", [*walks, *tiles]),
        "quantised_norm": ("triton_quantised_norm", walks),
        "expand_compose": ("triton_expand_compose", [*walks, *tiles]),
        "decode_project": ("triton_few_rows", few),
        "compose_forward": ("triton_compose_forward", rows),
        "compose_backward": ("triton_compose_backward", parts),
        "swiglu_backward": ("triton_swiglu", parts),
        "bank_shrink": ("triton_bank_shrink", ()),
        "bank_expand": ("triton_bank_expand", ()),
    }
    of_rows = _rows_of_a_bank(triton_bank_rows, (8, 64, 256), ())
    return [
        *(
            replace(KERNELS[name], triton=module, candidates=configs)
            for name, (module, configs) in candidates.items()
        ),
        replace(of_rows, name="bank_rows", triton="triton_bank_rows"),
    ]
