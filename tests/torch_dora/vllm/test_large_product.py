"""The kernel of a whole layer for many tokens, against fp64."""

import numpy as np
import pytest
import torch

from tests.torch_dora.vllm import test_kernels as kernels
from tests.torch_dora.vllm import test_product
from torch_dora.vllm import batch, large_product, product, shrink

SLOTS = kernels.SLOTS
CASES = (
    (300, 300, 128, [64, 128], torch.bfloat16, True),
    (130, 140, 192, [64], torch.float16, False),
)
CONFIG = large_product.Config(columns=64, depth=64, stages=2, warps=4)


@pytest.fixture(autouse=True)
def _few_are_many(monkeypatch):
    monkeypatch.setattr(batch, "LARGE_BATCH", 1)


def run(given, sizes, slots, config=CONFIG):
    device, padded = given["x"].device, len(given["x"])
    tables = batch.Batch(kernels.TOKENS, SLOTS, device)
    tables.update(np.full(kernels.TOKENS, 2), kernels.RANKS)  # What it has left does not count.
    tables.update(slots, kernels.RANKS)
    tiles = tables.small if batch.rows_of_tile(padded) == batch.SMALL else tables.large
    parts = shrink.launch(given["x"], given["lora_a"], tiles, kernels.MAX_RANK)
    return large_product.launch(
        *(given[name] for name in ("x", "weight", "bias")),
        parts,
        *(given[name] for name in ("lora_b", "g")),
        product.blocks_of(sizes, device, config.columns),
        tables,
        config,
    )


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("kind", kernels.KINDS)
@pytest.mark.parametrize("case", CASES)
def test_the_kernel_computes_what_fp64_does(kind, case, device, assert_within):
    tokens, padded, inputs, sizes, dtype, has_bias = case
    given = test_product.layer(padded, inputs, sizes, dtype, has_bias, device)
    slots = kernels.slots_of(kind, tokens)
    found = run(given, sizes, slots).cpu()
    assert_within(found, *test_product.reference(given, sizes, slots), "triton")
    # Rows of the base have the bits that they have without adapters.
    plain = run(given, sizes, np.full(tokens, -1)).cpu()
    is_base = np.concatenate([slots < 0, np.full(padded - tokens, True)])
    assert torch.equal(found[is_base], plain[is_base])


@pytest.mark.filterwarnings("ignore:invalid value")  # of the interpreter, for an infinite sum
@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_an_adapter_that_is_not_finite_harms_its_own_rows_only(number, device):
    tokens, padded, inputs, sizes, dtype, has_bias = CASES[0]
    given = test_product.layer(padded, inputs, sizes, dtype, has_bias, device)
    slots = kernels.slots_of("mixed", tokens)
    expected = run(given, sizes, slots)
    for name in ("lora_a", "lora_b", "g"):
        given[name][2] = number
        found = run(given, sizes, slots)
        assert torch.equal(found[slots != 2], expected[slots != 2])
        assert not found[slots == 2].isfinite().any()


def test_few_tokens_wide_layers_large_ranks_and_blocks_that_would_be_cut_are_refused(monkeypatch):
    weight, blocks = torch.zeros(512, 128), product.blocks_of([256, 256], "cpu", 256)
    assert blocks.tolist() == [0, 1]
    on_card, most = test_product.OnCard, large_product.LEAST_TOKENS
    monkeypatch.setattr(product, "capability", lambda device: 90)
    assert large_product.refuses(on_card(most, 128), weight, blocks, 32) is None
    assert large_product.refuses(on_card(most - 1, 128), weight, blocks, 32) is not None
    assert large_product.refuses(on_card(most, 128), weight, blocks, 64) is not None
    wide = torch.zeros(32768, 128)
    assert large_product.refuses(on_card(most, 128), wide, blocks, 32) is not None
    cut = product.blocks_of([384, 128], "cpu", 256)
    assert large_product.refuses(on_card(most, 128), weight, cut, 32) is not None
    assert large_product.refuses(on_card(most, 128, address=8), weight, blocks, 32) is not None
    monkeypatch.setattr(product, "capability", lambda device: 80)
    assert large_product.refuses(on_card(most, 128), weight, blocks, 32) is not None


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["mixed", "one adapter", "prompts"])
@pytest.mark.parametrize(("inputs", "sizes"), [(4096, [4096, 1024, 1024]), (14336, [4096])])
def test_the_chosen_configuration_computes_what_fp64_does(kind, inputs, sizes, assert_within):
    tokens = kernels.TOKENS
    given = test_product.layer(tokens, inputs, sizes, torch.bfloat16, False, "cuda")
    slots = kernels.slots_of(kind, tokens)
    found = run(given, sizes, slots, large_product.CONFIG).cpu()
    assert_within(found, *test_product.reference(given, sizes, slots), "triton")
