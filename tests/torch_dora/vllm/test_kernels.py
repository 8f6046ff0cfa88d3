"""The kernels for vLLM's slots, against fp64, and the tables that they read."""

import numpy as np
import pytest
import torch

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
def test_each_token_with_an_adapter_is_in_one_tile_of_its_slot(kind, tokens):
    slots = slots_of(kind, tokens)
    tables = batch.Batch(TOKENS, SLOTS, "cpu")
    for other in KINDS:  # What an earlier batch has left does not count.
        tables.update(slots_of(other, TOKENS // 2), RANKS)
    tables.update(slots, RANKS)
    assert bool(tables.has_adapters) == bool((slots >= 0).any())
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


def run(slots, sizes, x, y, lora_a, lora_b, g, bias, is_beside=False):
    tables = batch.Batch(max(TOKENS, len(y)), SLOTS, "cpu")
    tables.update(slots, RANKS)
    is_small = batch.rows_of_tile(len(y)) == batch.SMALL
    tiles = tables.small if is_small else tables.large
    parts = shrink.launch(x, lora_a, tiles, MAX_RANK, is_beside=is_beside)
    blocks, unit = expand.column_blocks(sizes, "cpu"), expand.unit_of(sizes)
    expand.launch(y, parts, lora_b, g, bias, blocks, unit, tiles, is_beside=is_beside)
    return parts


def reference(slots, sizes, x, y, lora_a, lora_b, g, bias):
    """Returns y in fp64, with z rounded as the kernels round it."""
    y = y.double().clone()
    for token, slot in enumerate(slots):
        if slot < 0:
            continue
        rank = RANKS[slot]
        z = lora_a[slot].double() @ x[token].double()
        added = [
            b[:, :rank].double() @ z[i * MAX_RANK :][:rank].float().to(lora_b.dtype).double()
            for i, b in enumerate(lora_b[slot].split(sizes))
        ]
        shift = 0 if bias is None else bias.double()
        y[token] = g[slot].double() * (y[token] - shift) + shift + torch.cat(added)
    return y


SMALL_TILES = (21, 24, 200, [40, 24, 130], torch.bfloat16, True)
LARGE_TILES = (270, 272, 72, [16, 16], torch.bfloat16, False)


@pytest.mark.parametrize(
    ("kind", "tokens", "padded", "features", "sizes", "dtype", "has_bias"),
    [
        *((kind, *case) for kind in KINDS for case in (SMALL_TILES, LARGE_TILES)),
        ("mixed", 5, 5, 1100, [257], torch.float16, False),  # three parts
        ("mixed", 1, 8, 2300, [33], torch.float32, True),
        ("one adapter", 1, 8, 2300, [33], torch.float32, True),
    ],
)
def test_kernels_compute_what_fp64_does(kind, tokens, padded, features, sizes, dtype, has_bias):
    given = operands(padded, features, sizes, dtype, has_bias)
    slots = slots_of(kind, tokens)
    expected = reference(slots, sizes, **given)
    before = given["y"].clone()
    run(slots, sizes, **given)
    # z may be rounded up on one side and down on the other; then y is rounded.
    step = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[dtype]
    torch.testing.assert_close(given["y"].double(), expected, rtol=step, atol=step)
    untouched = np.concatenate([slots < 0, np.full(padded - tokens, True)])
    assert torch.equal(given["y"][untouched], before[untouched])


def test_beside_a_base_product_the_features_are_read_in_larger_parts():
    given = operands(9, 2300, [40], torch.float16, False)
    slots = slots_of("mixed", 9)
    expected = reference(slots, [40], **given)
    assert len(run(slots, [40], **(given | {"y": given["y"].clone()}))) == 5
    assert len(run(slots, [40], **given, is_beside=True)) == 3
    torch.testing.assert_close(given["y"].double(), expected, rtol=2e-3, atol=2e-3)


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
    assert not tables.has_adapters


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
            blocks = expand.column_blocks([64], "cpu")
            y, g = torch.zeros(tokens, 64), torch.zeros(4, 64)
            expand.launch(y, parts, lora_b, g, None, blocks, 16, tiles)
        assert len(constants) == 4
        assert all(one == constants[0] for one in constants)
