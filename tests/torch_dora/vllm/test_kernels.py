"""The kernels for vLLM's slots, against fp64, and the tables that they read."""

import contextlib
import dataclasses
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from parity import tolerances
from torch_dora.vllm import batch, expand, shrink

SLOTS, MAX_RANK = 5, 24
RANKS = (24, 3, 1, 16, 7)
TOKENS = 600


def slots_of(kind, tokens):
    rng = np.random.default_rng(len(kind) + tokens)
    return {
        "mixed": rng.integers(-1, SLOTS, tokens),
        "one adapter": np.full(tokens, 3),
        "no adapter": np.full(tokens, -1),
        "prompts": np.repeat(rng.integers(-1, SLOTS, tokens), 7)[:tokens],
    }[kind]


KINDS = ("mixed", "one adapter", "no adapter", "prompts")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [0, 1, 17, 256, 257, 600])
def test_each_token_with_an_adapter_is_in_one_tile_of_its_slot(kind, tokens, monkeypatch):
    monkeypatch.setattr(batch, "LARGE_BATCH", 257)
    slots = slots_of(kind, tokens)
    tables = batch.Batch(TOKENS, SLOTS, "cpu")
    for other in KINDS:  # What an earlier batch has left does not count.
        for count in (TOKENS, TOKENS // 2, 40, 3):
            tables.update(slots_of(other, count), RANKS)
    tables.update(slots, RANKS)
    assert tables.tokens == (tokens if (slots >= 0).any() else 0)
    assert tables.has_base == (slots < 0).any()
    members = tables.members.tolist()
    for tile in range(-(-TOKENS // batch.MANY) if tokens > 256 else 0):
        begin, end = tables.ranges[tile : tile + 2, 0].tolist()
        of_tile = slots[tile * batch.MANY : (tile + 1) * batch.MANY]
        expected = sorted({*of_tile[of_tile >= 0].tolist()})
        assert members[begin:end] == [[slot, RANKS[slot]] for slot in expected]
    for table in (tables.small, tables.large):
        if len(slots) > batch.SMALL_BATCH and table is tables.small:
            continue  # Not read for so many tokens.
        rows = table.shape[1] - batch.HEAD
        assert len(list(_tiles(table))) <= batch.most_tiles(tokens, SLOTS, rows)
        found = np.full(tokens, -1)
        for slot, rank, members in _tiles(table):
            assert rank == RANKS[slot]
            assert 0 < len(members) <= rows
            assert (found[members] == -1).all()
            found[members] = slot
        assert (found == slots).all()
    of_token = tables.slots.flatten().tolist()
    assert of_token[:tokens] == slots.tolist()
    assert {*of_token[tokens:]} <= {-1}
    if not tables.tokens:  # A graph of few tokens may be replayed with these tables.
        assert not tables.small.any()
        assert not tables.large.any()
        assert not tables.used[0].any()
    if tokens <= batch.SMALL_BATCH:
        used = sorted({*slots[slots >= 0].tolist()})
        assert tables.used[0, 0] == len(used)
        assert tables.used[1 : 1 + len(used)].tolist() == [[one, RANKS[one]] for one in used]


def _tiles(table):
    for slot, rank, _, _, *tokens in table.tolist():
        if not rank:
            return
        yield slot, rank, [token for token in tokens if token >= 0]


def operands(tokens, features, sizes, dtype, has_bias):
    """Returns random operands. B is zero beyond an adapter's rank, as vLLM leaves its slots."""
    generator = torch.Generator().manual_seed(tokens)

    def draw(*shape):
        return torch.randn(shape, generator=generator).to(dtype)

    ranks = len(sizes) * MAX_RANK
    has_rank = torch.arange(MAX_RANK) < torch.tensor(RANKS)[:, None, None]
    return {
        "x": draw(tokens, features),
        # Rows of a wider tensor: some quantised products pad their outputs.
        "y": draw(tokens, sum(sizes) + 8)[:, : sum(sizes)],
        "lora_a": draw(SLOTS, ranks, features) / features**0.5,
        "lora_b": draw(SLOTS, sum(sizes), MAX_RANK) / 4 * has_rank,
        "g": torch.rand(SLOTS + 1, sum(sizes), generator=generator) + 0.5,
        "bias": draw(sum(sizes)) if has_bias else None,
    }


def run(slots, sizes, x, y, lora_a, lora_b, g, bias, device="cpu", is_beside=False):
    """Computes y in place, and returns the parts of z."""
    tables = batch.Batch(max(TOKENS, len(y)), SLOTS, device)
    tables.update(slots, RANKS)
    is_small = batch.rows_of_tile(len(y)) == batch.SMALL
    tiles = tables.small if is_small else tables.large
    x, lora_a, lora_b, g = (one.to(device) for one in (x, lora_a, lora_b, g))
    bias = None if bias is None else bias.to(device)
    target = torch.empty(len(y), y.stride(0), dtype=y.dtype, device=device)[:, : y.shape[1]]
    target.copy_(y)
    beside = contextlib.nullcontext() if is_beside else None
    parts = shrink.launch(x, lora_a, tiles, MAX_RANK, beside=beside)
    config, unit = expand.SMALL if is_small else expand.LARGE, expand.unit_of(sizes)
    blocks = expand.column_blocks(config, sizes, device)
    expand.launch(target, parts, lora_b, g, bias, blocks, unit, tiles)
    y.copy_(target)
    return parts


def reference(slots, sizes, x, y, lora_a, lora_b, g, bias):
    """Returns y in fp64, and the bound of each element."""
    y, bound = y.double().clone(), torch.zeros(y.shape, dtype=torch.float64)
    shift = 0 if bias is None else bias.double()
    for token, slot in enumerate(slots):
        if slot < 0:
            continue
        rank, scaled = RANKS[slot], g[slot].double() * (y[token] - shift) + shift
        z, error = tolerances.product(x[token].double(), lora_a[slot].double().T)
        parts = zip(
            *(scaled.split(sizes), z.split(MAX_RANK), error.split(MAX_RANK)),
            *(lora_b[slot].double().split(sizes), bound[token].split(sizes)),
            strict=True,
        )
        for one, inner, inner_error, b, target in parts:
            inner, inner_error, b = inner[:rank], inner_error[:rank], b[:, :rank].T
            target[:] = tolerances.expanded(one, inner, inner_error, b, lora_b.dtype)
            one.add_(inner @ b)
        y[token] = scaled
    return y, bound


SMALL_TILES = (21, 24, 200, [40, 24, 130], torch.bfloat16, True)
LARGE_TILES = (270, 272, 72, [530, 16], torch.bfloat16, False)  # of several steps


@pytest.mark.parametrize(
    ("kind", "tokens", "padded", "features", "sizes", "dtype", "has_bias"),
    [
        *((kind, *case) for kind in KINDS for case in (SMALL_TILES, LARGE_TILES)),
        ("mixed", 5, 5, 1100, [257], torch.float16, False),  # three parts
        ("one adapter", 1, 1, 24, [8192, 8224], torch.bfloat16, False),  # the blocks of wide layers
        ("mixed", 1, 8, 2300, [33], torch.float32, True),
        ("one adapter", 1, 8, 2300, [33], torch.float32, True),
    ],
)
def test_kernels_compute_what_fp64_does(
    kind, tokens, padded, features, sizes, dtype, has_bias, device, assert_within
):
    if device == "cuda" and dtype == torch.float32:  # Its products would be in TF32.
        dtype = torch.float16
    given = operands(padded, features, sizes, dtype, has_bias)
    slots = slots_of(kind, tokens)
    expected = reference(slots, sizes, **given)
    before = given["y"].clone()
    run(slots, sizes, **given, device=device)
    assert_within(given["y"], *expected, "triton")
    untouched = np.concatenate([slots < 0, np.full(padded - tokens, True)])
    assert torch.equal(given["y"][untouched], before[untouched])


def test_beside_a_base_product_the_features_are_read_in_larger_parts(device, assert_within):
    given = operands(9, 2300, [40], torch.float16, False)
    slots = slots_of("mixed", 9)
    expected = reference(slots, [40], **given)
    first = given | {"y": given["y"].clone()}
    assert len(run(slots, [40], **first, device=device)) == 5
    assert len(run(slots, [40], **given, device=device, is_beside=True)) == 2
    assert_within(given["y"], *expected, "triton")


def test_blocks_of_several_steps_and_programs_of_several_tiles(monkeypatch, device, assert_within):
    """As wide layers have them, and batches with many adapters."""
    monkeypatch.setattr(expand, "SMALL", expand.Config(blocks={300: 512, 0: 128}, programs=3))
    monkeypatch.setattr(shrink, "SMALL", dataclasses.replace(shrink.SMALL, programs=3))
    given = operands(40, 600, [300, 40], torch.bfloat16, True)
    slots = slots_of("mixed", 40)
    expected = reference(slots, [300, 40], **given)
    run(slots, [300, 40], **given, device=device)
    assert_within(given["y"], *expected, "triton")


def test_a_batch_without_tokens_is_left_alone():
    given = operands(0, 16, [16], torch.bfloat16, False)
    run(np.zeros(0, np.int64), [16], **given)


def test_an_adapter_of_other_layers_is_in_no_tile():
    tables = batch.Batch(TOKENS, SLOTS, "cpu")
    tables.update(np.array([1, 0, 2, -1, 1]), [3, 0, 4, 5, 5])
    for table in (tables.small, tables.large):
        found = [(slot, rank, tokens) for slot, rank, tokens in _tiles(table)]
        assert found == [(0, 3, [1]), (2, 4, [2])]
    tables.update(np.array([1, 1]), [3, 0, 4, 5, 5])
    assert not tables.tokens


def test_ranks_beyond_the_adapters_are_not_read():
    given = operands(9, 40, [20, 12], torch.bfloat16, False)
    slots = np.array([1, 1, 4, -1, 0, 2, 2, 3, 1])
    expected = given["y"].clone()
    run(slots, [20, 12], **(given | {"y": expected}))
    for slot, rank in enumerate(RANKS):
        given["lora_a"].view(SLOTS, 2, MAX_RANK, -1)[slot, :, rank:] = torch.nan
        given["lora_b"][slot, :, -(-rank // 16) * 16 :] = torch.nan
    run(slots, [20, 12], **given)
    assert torch.equal(given["y"], expected)


def test_the_parts_are_memory_of_the_stream_that_reads_them(monkeypatch):
    """Several streams may have one beside them, which would use it again while one still reads."""
    streams, used = ["this"], {}

    @contextlib.contextmanager
    def other():
        streams.append("other")
        yield
        streams.pop()

    def empty(*shape, make=torch.empty, **options):
        used["memory"] = streams[-1]
        return make(*shape, **options)

    def launch_kernel(*arguments, **options):
        used["kernel"] = streams[-1]

    monkeypatch.setattr(shrink.torch, "empty", empty)
    monkeypatch.setattr(shrink, "launch_kernel", launch_kernel)
    lora_a, tiles = torch.zeros(3, 16, 64), torch.zeros(9, batch.HEAD + 16, dtype=torch.int32)
    shrink.launch(torch.zeros(5, 64), lora_a, tiles, 16, beside=other())
    assert used == {"memory": "this", "kernel": "other"}


def test_a_kernel_is_compiled_once_for_all_numbers_of_tokens(monkeypatch):
    """Otherwise requests would wait for the compiler while vLLM runs."""
    for module in (shrink, expand):
        constants = []
        monkeypatch.setattr(
            module, "launch_kernel", lambda *arguments, to=constants, **named: to.append(named)
        )
        for tokens in (257, 1000, 5000, 16384):
            x = torch.zeros(tokens, 1024)
            lora_a, lora_b = torch.zeros(3, 16, 1024), torch.zeros(3, 64, 16)
            tiles = torch.zeros(400, batch.HEAD + batch.LARGE, dtype=torch.int32)
            parts = shrink.launch(x, lora_a, tiles, 16)
            blocks = expand.column_blocks(expand.LARGE, [64], "cpu")
            y, g = torch.zeros(tokens, 64), torch.zeros(4, 64)
            expand.launch(y, parts, lora_b, g, None, blocks, 16, tiles)
        assert len(constants) == 4
        assert all(one == constants[0] for one in constants)


# In a process of its own: here the kernels are decorated for Triton's interpreter.
FOR_A_CARD = """
from dora_common.triton.compilation import compiled
from dora_common.triton.jit import next_power_of_2
from torch_dora.vllm import batch, expand, large_product, product, segments, shrink

TABLES = {"tiles_ptr": "*i32:16", "tokens": "i32", "features": "i32:16", "tiles": "i32"}

def build(kernel, half, config, stages, types, programs=1, **constants):
    constants |= {"HEAD": batch.HEAD} if "HEAD" in kernel.arg_names else {}
    types = {name: written.replace("half", half) for name, written in (TABLES | types).items()}
    ordered = [(name, types[name]) for name in kernel.arg_names if name in types]
    found = compiled(kernel, tuple(ordered), tuple(constants.items()), 90,
                     config.warps, stages)
    _, spilled = found.resources()
    assert spilled <= 24, (kernel, constants, spilled)
    # What a multiprocessor has for programs.
    assert programs * (found.shared_bytes + 1024) <= 228 * 1024, (constants, found.shared_bytes)
    # Each program waits before it reads what the kernels before it have written, once in a loop.
    waits = found.ptx.count("griddepcontrol.wait")
    assert waits == constants.get("OVERLAPS", False), (kernel, constants, waits)
    if kernel is expand._small_kernel:
        # It waits for numbers when it moves them to shared memory: once all reads are begun.
        first = found.ptx.partition("griddepcontrol.wait")[2].partition("st.shared::cta.v4")[0]
        assert first.count("ld.global.v4") >= 5

for half, rank in (("bf16", 16), ("bf16", 64), ("fp16", 8)):
    for config, rows in ((shrink.SMALL, 16), (shrink.BESIDE, 16), (shrink.LARGE, 64)):
        small = rows == batch.SMALL
        ranks = rank if config.divides else 3 * rank
        build(shrink._kernel, half, config, config.stages,
              {"x_ptr": "*half:16", "a_ptr": "*half:16", "parts_ptr": "*fp32:16",
               "splits": "i32", "chunk": "i32:16"},
              CHUNK=config.chunk * small, PROJECTIONS=3 if config.divides else 1, RANKS=ranks,
              MAX_RANK=rank, PADDED_RANKS=max(16, next_power_of_2(ranks)), ROWS=rows,
              LANES=config.lanes, DEPTH=config.depth, OVERLAPS=config.overlaps)
    for kernel, config, rows in ((expand._small_kernel, expand.SMALL, 16),
                                 (expand._large_kernel, expand.LARGE, 64)):
        for width in {*config.blocks.values()}:
            types = {"y_ptr": "*half:16", "parts_ptr": "*fp32:16", "b_ptr": "*half:16",
                     "g_ptr": "*fp32:16", "bias_ptr": "*half:16", "blocks_ptr": "*i32:16",
                     "y_stride": "i32:16", "blocks": "i32", "splits": "i32"}
            own = {"SPLITS": 7, "PADDED_SPLITS": 8, "OVERLAPS": True} if rows == 16 else {}
            build(kernel, half, config, 1, types, RANKS=3 * rank, MAX_RANK=rank,
                  PADDED_RANK=max(16, rank), HAS_BIAS=True, ROWS=rows, UNIT=16,
                  COLUMNS=config.columns, STEPS=width // config.columns, **own)
    columns, depth = large_product.COLUMNS, large_product.CONFIG.depth
    types = {"x": f"tensordesc<half[128, {depth}]>", "y": f"tensordesc<half[128, {columns}]>",
             "weight": f"tensordesc<half[{columns}, {depth}]>", "parts_ptr": "*fp32:16",
             "b_ptr": "*half:16", "g_ptr": "*fp32:16", "bias_ptr": "*half:16",
             "slots_ptr": "*i32:16", "ranges_ptr": "*i32:16", "members_ptr": "*i32:16",
             "blocks_ptr": "*i32:16", "inputs": "i32:16", "splits": "i32"}
    own = min(rank, large_product.MOST_RANKS)
    build(large_product._kernel, half, large_product.CONFIG, large_product.CONFIG.stages, types,
          RANKS=3 * own, MAX_RANK=own, PADDED_RANK=max(16, own), HAS_BIAS=True,
          ROWS=128, COLUMNS=columns, DEPTH=depth, STAGES=large_product.CONFIG.stages,
          GROUP=large_product.GROUP)
    if half == "fp16":
        continue
    for configs in (product.ALONE, product.SHARED):
        for rows, config in configs.items():
            types = {"weight": f"tensordesc<half[64, {config.depth}]>",
                     "x": f"tensordesc<half[{rows}, {config.depth}]>", "x_ptr": "*half:16",
                     "a_ptr": "*half:16", "b_ptr": "*half:16", "g_ptr": "*fp32:16",
                     "bias_ptr": "*half:16", "y_ptr": "*half:16", "z_ptr": "*fp32:16",
                     "slots_ptr": "*i32:16", "used_ptr": "*i32:16", "blocks_ptr": "*i32:16",
                     "counts_ptr": "*i32:16", "inputs": "i32:16", "segment": "i32",
                     "shrinking": "i32", "look": "i32"}
            build(product._kernel, half, config, product.shrink_stages(rank), types,
                  programs=2 if configs is product.SHARED else 1,
                  PROJECTIONS=3, RANKS=3 * rank, MAX_RANK=rank, PADDED_RANK=rank, HAS_BIAS=True,
                  TILE=16, LANES=4, LANE_DEPTH=128, ROWS=rows, COLUMNS=64, DEPTH=config.depth,
                  STAGES=config.stages, HAS_SEGMENTS=rows == 16,
                  SLOTS=4 if rank == 16 else 1)
    ranked = {"SPLITS": 7, "RANKS": 3 * rank, "MAX_RANK": rank, "PADDED_RANK": rank, "COLUMNS": 64}
    for config in (segments.ALONE, segments.SHARED):
        build(segments._sum_kernel, half, config, product.shrink_stages(rank),
              types | {"weight": f"tensordesc<half[64, {config.depth}]>",
                       "x": f"tensordesc<half[64, {config.depth}]>", "parts_ptr": "*fp32:16",
                       "sums_ptr": "*fp32:16", "segments": "i32"},
              programs=2 if config is segments.SHARED else 1, CHUNK=2048, PROJECTIONS=3, TILE=16,
              LANES=4, LANE_DEPTH=128, ROWS=64, DEPTH=config.depth, STAGES=config.stages,
              STARTS_NEXT=True, **ranked)
    build(segments._add_kernel, half, config, 1,
          types | {"sums_ptr": "*fp32:16", "parts_ptr": "*fp32:16", "blocks": "i32"},
          SEGMENTS=3, PADDED_SPLITS=8, HAS_BIAS=True, TILE=16, SLOTS=4 if rank == 16 else 1,
          OVERLAPS=True, **ranked)
"""


@pytest.mark.slow
def test_kernels_are_compiled_for_a_hopper():
    environment = {name: v for name, v in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", FOR_A_CARD],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
