"""The kernel of a whole layer for vLLM's slots, against fp64 and the base layer's bits."""

import numpy as np
import pytest
import torch
from torch.nn.functional import linear
from torch.utils._python_dispatch import TorchDispatchMode

from parity import tolerances
from parity.tolerances import rules
from tests.torch_dora.vllm import test_kernels as kernels
from torch_dora.vllm import batch, product, segments

SLOTS = kernels.SLOTS
BIASED = (21, 24, 192, [128, 64], torch.bfloat16, True, 1)
IN_SEGMENTS = (64, 64, 1024, [64], torch.bfloat16, False, 3)
CASES = (BIASED, IN_SEGMENTS, (1, 1, 256, [64, 64, 64], torch.float16, False, 2))


def layer(padded, inputs, sizes, dtype, has_bias, device):
    """Returns random operands of a layer: x, W, the bias, and those of its slots."""
    given = kernels.operands(padded, inputs, sizes, dtype, has_bias)
    generator = torch.Generator().manual_seed(1)
    weight = (torch.randn(sum(sizes), inputs, generator=generator) / inputs**0.5).to(dtype)
    given = {name: None if one is None else one.to(device) for name, one in given.items()}
    return given | {"weight": weight.to(device)}


def adapters_of(given, sizes, slots):
    device = given["x"].device
    tables = batch.Batch(kernels.TOKENS, SLOTS, device)
    tables.update(slots, kernels.RANKS)
    return product.Adapters(
        *(given[name] for name in ("lora_a", "lora_b", "g")),
        product.blocks_of(sizes, device),
        torch.zeros(2, dtype=torch.int32, device=device),
        *(tables.small, tables.slots, tables.used),
    )


def run(given, sizes, slots, count=1, launch=product.launch):
    adapters = adapters_of(given, sizes, slots)
    operands = given["x"], given["weight"], given["bias"], count, adapters
    y = launch(*operands)
    assert not adapters.counts.any()  # Else another call may wait forever.
    again = launch(*operands)
    assert torch.equal(again.nan_to_num(), y.nan_to_num())
    return y


def reference(given, sizes, slots):
    """Returns y in fp64, and the bound of each element."""
    given = {name: None if one is None else one.cpu() for name, one in given.items()}
    x, weight, dtype = given["x"].double(), given.pop("weight").double(), given["x"].dtype
    y, error = tolerances.product(x, weight.T)
    bias = torch.zeros(1) if given["bias"] is None else given["bias"].double()
    expected, bound = kernels.reference(slots, sizes, **(given | {"y": y + bias}))
    slots = np.append(slots, np.full(len(x) - len(slots), -1))
    g = torch.where(torch.from_numpy(slots < 0)[:, None], 1, given["g"].double()[slots])
    bound += g * error + rules.in_fp32(g * y, bias)
    base = slots < 0
    bound[base] += tolerances.rounding(expected[base], dtype)
    return expected, bound


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("kind", kernels.KINDS)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("max_rank", [24, 16])  # B of one slot at a time, or of four
@pytest.mark.parametrize("launch", [product.launch, segments.launch_two])
def test_the_kernels_compute_what_fp64_does(
    launch, kind, case, max_rank, device, assert_within, monkeypatch
):
    monkeypatch.setattr(kernels, "MAX_RANK", max_rank)
    monkeypatch.setattr(kernels, "RANKS", (max_rank, 3, 1, 16, 7))
    tokens, padded, inputs, sizes, dtype, has_bias, count = case
    given = layer(padded, inputs, sizes, dtype, has_bias, device)
    slots = kernels.slots_of(kind, tokens)
    found = run(given, sizes, slots, count, launch).cpu()
    assert_within(found, *reference(given, sizes, slots), "triton")
    # Rows of the base have the bits that they have without adapters.
    plain = run(given, sizes, np.full(tokens, -1), count, launch).cpu()
    is_base = np.concatenate([slots < 0, np.full(padded - tokens, True)])
    assert torch.equal(found[is_base], plain[is_base])


def test_z_is_read_later_if_it_is_not_ready(monkeypatch, device):
    tokens, padded, inputs, sizes, dtype, has_bias, count = IN_SEGMENTS
    given = layer(padded, inputs, sizes, dtype, has_bias, device)
    slots = kernels.slots_of("mixed", tokens)
    expected = run(given, sizes, slots, count)
    monkeypatch.setattr(product, "LOOK", 2.0)
    assert torch.equal(run(given, sizes, slots, count), expected)


def test_an_adapter_that_is_not_finite_harms_its_own_rows_only(device):
    tokens, padded, inputs, sizes, dtype, has_bias, count = BIASED
    given = layer(padded, inputs, sizes, dtype, has_bias, device)
    slots = np.arange(tokens) % (SLOTS + 1) - 1
    expected = run(given, sizes, slots, count)
    for name in ("lora_a", "lora_b", "g"):
        given[name][2] = torch.nan
    found = run(given, sizes, slots, count)
    others = np.append(slots, np.full(padded - tokens, -1)) != 2
    assert torch.equal(found[others], expected[others])
    assert found[~others].isnan().all()


@pytest.mark.parametrize("found_in", [1, 3])
@pytest.mark.parametrize("tokens", [1, 16, 24])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("has_bias", [False, True])
def test_the_segments_are_those_with_the_bits_of_the_base_layer(
    monkeypatch, has_bias, dtype, tokens, found_in
):
    """Found by few numbers, of half precision, whatever the first layer of this shape has."""
    given = layer(tokens, 1024, [64], dtype, has_bias, "cpu")
    adapters = adapters_of(given, [64], kernels.slots_of("mixed", tokens))
    nothing = adapters_of(given, [64], np.full(tokens, -1))
    given["weight"].zero_()
    given["weight"][:, 0] = torch.nan
    if has_bias:
        given["bias"][3] = torch.inf
    operands = given["weight"], given["bias"]
    calls = []

    def base(x, *operands):
        calls.append(len(x))
        # Not `launch`: Triton's interpreter rounds to bf16 in another way than PyTorch.
        return segments._base(x, *operands, found_in, nothing)

    monkeypatch.setattr(segments.nn.functional, "linear", base)
    kind = segments._kind(*operands)
    monkeypatch.setattr(segments, "_FOUND", {(i, *kind): 0 for i in range(1, tokens)})
    for _ in range(2):
        segments.find_segments(*operands, adapters, tokens)
        assert segments.segments_of(given["x"], *operands) == found_in
    assert calls == [tokens]
    assert segments.segments_of(given["x"][1:], *operands) == 0
    monkeypatch.setattr(segments.nn.functional, "linear", lambda *given: base(*given) + 1)
    segments._FOUND.clear()
    segments.find_segments(*operands, adapters, 1)
    assert segments._FOUND == {(1, *kind): 0}


@pytest.mark.parametrize(("tokens", "most"), [(16, 2), (17, 3)])
def test_kernels_are_not_compiled_for_each_number_of_segments(monkeypatch, tokens, most):
    """Else vLLM's start would wait for it."""
    given = layer(tokens, 1024, [64], torch.bfloat16, True, "cpu")
    adapters = adapters_of(given, [64], np.full(tokens, -1))
    compiled, ways = set(), []

    def launches(launch):
        def launch_kernel(kernel, grid, *arguments, **options):
            compiled.add((kernel, *sorted(options.items())))
            launch(kernel, grid, *arguments, **options)

        return launch_kernel

    def nothing(x, weight, bias, segments, adapters, *, base=segments._base):
        ways.append(segments)
        return base(x, weight, bias, segments, adapters).fill_(torch.nan)

    monkeypatch.setattr(segments, "_base", nothing)
    for module in (segments, product):
        monkeypatch.setattr(module, "launch_kernel", launches(module.launch_kernel))
    assert segments._segments_of(given["x"], given["weight"], given["bias"], adapters) == 0
    assert len(ways) > most
    assert len(compiled) <= most


class Allocations(TorchDispatchMode):
    """Keeps the sizes of new tensors, in bytes, and refuses those of ``too_large`` or more."""

    def __init__(self, too_large):
        super().__init__()
        self.too_large, self.sizes = too_large, []

    def __torch_dispatch__(self, function, types, given=(), options=None):
        result = function(*given, **(options or {}))
        old = {one.untyped_storage().data_ptr() for one in given if isinstance(one, torch.Tensor)}
        if isinstance(result, torch.Tensor) and result.untyped_storage().data_ptr() not in old:
            self.sizes.append(result.untyped_storage().nbytes())
            if self.sizes[-1] >= self.too_large:
                raise torch.OutOfMemoryError("the card is full")
        return result


def test_segments_are_found_with_the_memory_of_one_more_weight_or_not_at_all(monkeypatch, caplog):
    given = layer(2, 64, [1024], torch.bfloat16, False, "cpu")
    adapters = adapters_of(given, [1024], np.full(2, -1))
    operands, size = (given["weight"], None), 2 * given["weight"].numel()
    monkeypatch.setattr(segments, "_FOUND", {})
    rows = []

    def launch(x, *operands):
        rows.append(len(x))
        return torch.zeros(len(x), 1024)

    monkeypatch.setattr(segments, "launch", launch)
    with Allocations(size + 1) as made:
        segments.find_segments(*operands, adapters, 2)
    assert max(made.sizes) == size
    assert sum(one >= size / 8 for one in made.sizes) == 1
    assert {*rows} == {1, 2}
    assert len(segments._FOUND) == 2
    segments._FOUND.clear()
    assert not caplog.records
    with Allocations(size):
        segments.find_segments(*operands, adapters, 2)
    assert segments.segments_of(given["x"], *operands) == 0
    assert "not enough memory" in caplog.text


class OnCard:
    device = torch.device("cuda")

    def __init__(self, *shape, address=0, apart=0):
        self.shape, self.address, self.apart = shape, address, apart

    def data_ptr(self):
        return self.address

    def stride(self, _):
        return self.apart or self.shape[1]

    def __len__(self):
        return self.shape[0]


def test_layers_that_would_be_cut_and_other_cards_are_refused(monkeypatch):
    weight, blocks = torch.zeros(128, 128), product.blocks_of([64, 64], "cpu")
    assert blocks.tolist() == [0, 1]
    assert product.refuses(torch.zeros(64, 128), weight, blocks, 16) is not None  # on no card
    monkeypatch.setattr(product, "capability", lambda device: 90)
    assert product.refuses(OnCard(64, 128), weight, blocks, 16) is None
    assert product.refuses(OnCard(64, 128), weight, blocks, 128) is not None
    assert product.refuses(OnCard(65, 128), weight, blocks, 16) is not None
    assert product.refuses(OnCard(64, 96), weight, blocks, 16) is not None
    assert product.refuses(OnCard(64, 128), weight.T[:, ::2], blocks, 16) is not None
    assert (
        product.refuses(OnCard(64, 128), weight, product.blocks_of([96, 32], "cpu"), 16) is not None
    )
    assert product.refuses(OnCard(64, 128, address=8), weight, blocks, 16) is not None
    # One row of a wider tensor counts as contiguous.
    assert product.refuses(OnCard(1, 128, apart=129), weight, blocks, 16) is not None
    aside = torch.zeros(128 * 128 + 1)[1:].view(128, 128)
    assert product.refuses(OnCard(64, 128), aside, blocks, 16) is not None
    monkeypatch.setattr(product, "capability", lambda device: 80)
    assert product.refuses(OnCard(64, 128), weight, blocks, 16) is not None


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 7, 16, 32, 48, 64])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("inputs", "outputs"), [(4096, 6144), (4096, 4096), (14336, 4096)])
def test_rows_of_the_base_have_the_bits_of_cublas(tokens, has_bias, inputs, outputs):
    given = layer(tokens, inputs, [outputs], torch.bfloat16, has_bias, "cuda")
    slots = np.arange(tokens) % (SLOTS + 1) - 1
    adapters = adapters_of(given, [outputs], slots)
    operands = given["x"], given["weight"], given["bias"]
    segments.find_segments(*operands[1:], adapters, tokens)
    count = segments.segments_of(*operands)
    # With a bias, cuBLAS may sum 14,336 inputs in segments that the kernels do not take.
    if outputs == 6144 or not (has_bias and inputs > 4096):
        assert count > 0
    if count:
        found, expected = segments.launch(*operands, count, adapters), linear(*operands)
        assert torch.equal(found[slots < 0], expected[slots < 0])
