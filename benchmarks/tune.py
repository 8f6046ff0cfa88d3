"""Level `tune`: the Mosaic kernels with other configs than their own choice, beside XLA."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from rich.console import Console

from benchmarks import tuning
from benchmarks.ops import compose, dropout, expand, norm, projection, swiglu
from benchmarks.work import Work
from jax_dora.ops import tuning as tables
from jax_dora.ops.mosaic import dropped as mosaic_dropped
from jax_dora.ops.mosaic import expand_compose as mosaic_expand
from jax_dora.ops.mosaic import norm as mosaic_norm
from jax_dora.ops.mosaic import projection as mosaic_projection
from jax_dora.ops.mosaic import rowwise
from jax_dora.ops.mosaic import swiglu_backward as mosaic_swiglu
from jax_dora.ops.mosaic.dropped import DroppedConfig
from jax_dora.ops.mosaic.projection import ProjectionConfig
from jax_dora.ops.mosaic.rowwise import RowwiseConfig
from jax_dora.ops.mosaic.strips import StripConfig

ROOT = Path(__file__).parent.parent

RANKS = (64, 256, 384, 768)
# in, out: from a small model's or a narrow projection of grouped heads to a large model's.
NORM_SHAPES = ((1024, 1024), (4096, 1024), (2048, 2048), (8192, 8192))
# rows, out
EXPAND_SHAPES = ((1024, 1024), (1024, 2048), (4096, 4096), (4096, 8192))
# rows, in, out, rank
PROJECTION_SHAPES = (
    (1024, 2048, 2048, 384),
    (4096, 4096, 1024, 384),
    (4096, 4096, 4096, 768),
    (4096, 4096, 12288, 384),
    (4096, 8192, 8192, 384),
    (4096, 12288, 4096, 384),
)
# rows, out
ROWWISE_SHAPES = ((512, 4096), (4096, 4096), (4096, 12288))

QUICK_NORM = ((64, 48),)
QUICK_EXPAND = ((64, 128),)
QUICK_RANKS = (16,)
QUICK_ROWWISE = ((3, 64),)

STRIPS = (
    *mosaic_norm.CONFIGS,
    StripConfig(tile_cols=128, stages=6, slots=1),
    StripConfig(tile_cols=64, stages=6, slots=2),
    StripConfig(tile_cols=128, stages=3, slots=1, consumers=3),
    StripConfig(tile_cols=128, stages=2, slots=1, consumers=3),
    StripConfig(tile_cols=64, stages=4, slots=1, consumers=3),
    StripConfig(tile_cols=64, stages=6, slots=2, consumers=3),
)
# Other tiles, and other orders of them, which decide what the level-2 cache holds.
PROJECTIONS = (
    ProjectionConfig(band=4),
    ProjectionConfig(band=16),
    ProjectionConfig(band_in_cols=True),
    ProjectionConfig(tile_cols=192),
    ProjectionConfig(tile_cols=128, stages=6),
    ProjectionConfig(tile_rows=256, tile_cols=128),
)
DROPPED = (
    DroppedConfig(stages=3),
    DroppedConfig(stages=6),
    DroppedConfig(parts=1),
    DroppedConfig(parts=4),
)
ROWWISE = (
    RowwiseConfig(blocks_per_sm=1),
    RowwiseConfig(stages=2, blocks_per_sm=3),
    RowwiseConfig(tile_bytes=4096, blocks_per_sm=3),
    RowwiseConfig(tile_bytes=16384, stages=2, blocks_per_sm=1),
)
SWIGLU = (
    RowwiseConfig(tile_bytes=4096, stages=2, blocks_per_sm=3),
    RowwiseConfig(tile_bytes=4096, stages=3, blocks_per_sm=3),
    RowwiseConfig(tile_bytes=2048, stages=4, blocks_per_sm=3),
    RowwiseConfig(tile_bytes=2048, stages=4, blocks_per_sm=4),
    RowwiseConfig(tile_bytes=2048, stages=6, blocks_per_sm=2),
    RowwiseConfig(tile_bytes=8192, stages=2, blocks_per_sm=1),
)


def works(device: str, quick: bool) -> Iterator[Callable[[], Work]]:
    """Every kernel at a modest grid of shapes, with each candidate that fits and XLA."""
    keep = functools.partial(functools.partial, _contest)
    most = 1 if quick else None
    for n_in, n_out in QUICK_NORM if quick else NORM_SHAPES:
        for rank in QUICK_RANKS if quick else RANKS:
            own = mosaic_norm.heuristic(rank, jnp.bfloat16, jnp.bfloat16)
            fit = [
                c
                for c in STRIPS
                if c != own and mosaic_norm.fits(c, rank, jnp.bfloat16, jnp.bfloat16)
            ]
            yield keep(norm.work, n_in, n_out, rank, "bfloat16", device, fit[:most])
    for rows, out in QUICK_EXPAND if quick else EXPAND_SHAPES:
        for rank in QUICK_RANKS if quick else RANKS:
            own = mosaic_expand.heuristic(rank, want_inner=False)
            fit = [c for c in STRIPS if c != own and mosaic_expand.fits(c, rank, want_inner=False)]
            yield keep(expand.work, rows, rank, out, False, device, fit[:most])
    products = [c for c in PROJECTIONS if mosaic_projection.fits(c)]
    for shape in projection.QUICK if quick else PROJECTION_SHAPES:
        yield keep(projection.forward, *shape, device, products[:most])
        yield keep(projection.backward, *shape, device, products[:most])
    for shape in dropout.QUICK if quick else dropout.SHAPES:
        fit = [c for c in DROPPED if mosaic_dropped.fits(c, shape[-1])][:most]
        for transposed in (False, True):
            yield keep(dropout.work, *shape, transposed, device, fit)
    for rows, out in QUICK_ROWWISE if quick else ROWWISE_SHAPES:
        inputs = functools.cache(functools.partial(compose.inputs_of, rows, out, device))
        # Of the most tensors that a launch has.
        forward = [c for c in ROWWISE if rowwise.fits(c, inputs=2, outputs=2)][:most]
        for want in (False, True):
            yield keep(compose.forward, rows, out, device, inputs, want, forward)
        for want in (True, False):
            yield keep(compose.backward, rows, out, device, inputs, want, forward)
    for rows, out in QUICK_ROWWISE if quick else ROWWISE_SHAPES:
        fit = [c for c in SWIGLU if mosaic_swiglu.fits(c)][:most]
        yield keep(swiglu.work, rows, out, device, fit)


def write_table(
    reports: dict[str, dict[str, Any]], folder: Path, console: Console
) -> dict[str, Any]:
    """Writes the table that reports, by file, speak for, and says what it changes.

    Raises:
      ValueError: the reports are of different cards.
    """
    kinds = {tuning.device_kind(report) for report in reports.values()}
    if len(kinds) != 1:
        raise ValueError(f"the reports are of {len(kinds)} kinds of device: {', '.join(kinds)}")
    (kind,) = kinds
    table = tuning.table(reports)
    before = _in_use(kind)  # perhaps the very file that is written
    path = tuning.write(table, kind, folder)
    console.print(f"{path}, against the table that is in use:", soft_wrap=True, highlight=False)
    for line in tuning.changes(before, table):
        console.print(f"  {line}", soft_wrap=True, highlight=False, markup=False)
    return table


def read_reports(paths: Sequence[Path]) -> dict[str, dict[str, Any]]:
    """Reports by their paths, relative to the repository where they lie in it.

    Raises:
      ValueError: a report measures nothing worth keeping.
    """
    reports = {}
    for path in paths:
        report = json.loads(path.read_text())
        if report["quick"] or report["wall_only"] or not report["complete"]:
            raise ValueError(f"{path} is of a quick, CPU or unfinished run")
        whole = path.resolve()
        name = whole.relative_to(ROOT) if whole.is_relative_to(ROOT) else path
        reports[str(name)] = report
    return reports


def _contest(make: Callable[..., Work], *arguments: Any) -> Work:
    """The work with those variants alone that decide a tuning table."""
    work = make(*arguments)
    rivals = {name for contest in tuning.CONTESTS.values() for name in contest.others}
    wanted = [
        variant
        for variant in work.variants
        if variant.framework == "jax"
        and (variant.name in rivals or variant.name == "mosaic" or variant.config)
    ]
    return dataclasses.replace(work, variants=wanted)


def _in_use(kind: str) -> dict[str, Any]:
    folder = ROOT / "jax_dora" / "ops" / "tuning_data"
    own, fallback = (folder / tables.file_name(name) for name in (kind, tables.FALLBACK))
    return json.loads((own if own.is_file() else fallback).read_text())
