"""The operators that take the place of Punica, in the layers of vLLM."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

SLOTS, RANK, INPUTS, SIZES = 3, 8, 40, [24, 16]


@pytest.fixture(params=[False, True], ids=["alone", "with biases"])
def layer(request, monkeypatch):
    """A layer of two projections whose slots 0 and 2 have adapters, and a batch of both."""
    from torch_dora.vllm import punica
    from torch_dora.vllm.batch import Batch

    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(shape, generator=generator).bfloat16()

    base = SimpleNamespace(
        weight=torch.nn.Parameter(draw(sum(SIZES), INPUTS), requires_grad=False),
        quant_method=SimpleNamespace(
            apply=lambda base, x, bias: torch.nn.functional.linear(x, base.weight, bias)
        ),
        skip_bias_add=False,
    )
    made = SimpleNamespace(
        base_layer=base,
        _get_quant_method=lambda: base.quant_method,
        lora_a_stacked=tuple(draw(SLOTS, 1, RANK, INPUTS) for _ in SIZES),
        lora_b_stacked=tuple(draw(SLOTS, 1, size, RANK) for size in SIZES),
        bias=draw(sum(SIZES)) if request.param else None,
    )
    tables = Batch(64, SLOTS, "cpu")
    tables.update(np.array([2, -1, 0, 2, 2]), [RANK, 0, 5])
    made.tables, made.g = tables, torch.rand(SLOTS + 1, sum(SIZES), generator=generator) + 0.5
    monkeypatch.setattr(punica, "_is_plain", lambda layer: False)
    made.apart = punica.SlotProducts(made, made.g, tables)
    monkeypatch.setattr(punica, "_is_plain", lambda layer: True)
    made.together = punica.SlotProducts(made, made.g, tables)
    made.draw = draw
    return made


def test_the_kernels_read_buffers_alone(layer):
    """vLLM's sleep keeps buffers. The counts that a kernel leaves at zero are among them."""
    products = layer.together
    assert {"counts", "table", "all_tables"} <= dict(products.named_buffers()).keys()
    assert not any(isinstance(one, torch.Tensor) for one in vars(products).values())
    begin, tables = layer.tables.all.data_ptr(), vars(layer.tables).values()
    views = [one for one in tables if isinstance(one, torch.Tensor)]
    assert len(views) == 7
    assert all(0 <= one.data_ptr() - begin < 4 * layer.tables.all.numel() for one in views)
    # Inductor reads results number by number, if an operand does not begin at 16 bytes.
    assert all(one.storage_offset() * 4 % 16 == 0 for one in views)
    operands = products.buffers()
    assert all(one.storage_offset() * one.element_size() % 16 == 0 for one in operands)


@pytest.mark.parametrize("shape", [(5,), (1, 5)])  # Transformers' models have a batch of one.
def test_a_plain_layer_is_multiplied_in_the_same_operator_to_the_same_bits(layer, shape):
    x = layer.draw(*shape, INPUTS)
    found, expected = layer.together(layer, x, layer.bias), layer.apart(layer, x, layer.bias)
    assert torch.equal(found, expected)
    base = layer.base_layer.quant_method.apply(layer.base_layer, x, layer.bias)
    rows, plain = found.view(5, -1), base.view(5, -1)
    assert torch.equal(rows[1], plain[1])
    assert all(not torch.equal(rows[i], plain[i]) for i in (0, 2, 3, 4))


def test_many_tokens_that_all_have_adapters_are_multiplied_by_one_kernel(layer, monkeypatch):
    from torch_dora.vllm import batch, large_product

    monkeypatch.setattr(batch, "LARGE_BATCH", 1)
    config = large_product.Config(columns=8, depth=8, stages=1)
    monkeypatch.setattr(large_product, "CONFIG", config)
    monkeypatch.setattr(large_product, "refuses", lambda *operands: None)
    layer.together.many_blocks = torch.tensor([0, 0, 0, 1, 1], dtype=torch.int32)
    launched = []

    def launch(*operands, original=large_product.launch):
        launched.append(operands)
        return original(*operands)

    monkeypatch.setattr(large_product, "launch", launch)
    x = layer.draw(5, INPUTS)
    # A row is of the base, whose bits are cuBLAS's.
    found, expected = layer.together(layer, x, layer.bias), layer.apart(layer, x, layer.bias)
    assert torch.equal(found, expected)
    assert not launched
    layer.tables.update(np.array([2, 2, 0, 2, 2]), [RANK, 0, 5])
    found, expected = layer.together(layer, x, layer.bias), layer.apart(layer, x, layer.bias)
    assert len(launched) == 1
    # They round to bf16 once, and twice.
    torch.testing.assert_close(found, expected, rtol=2**-7, atol=0.05)


@pytest.mark.parametrize("is_plain", [True, False])
def test_all_kernels_of_a_layer_are_launched_before_requests(layer, monkeypatch, is_plain):
    """Triton compiles a kernel for its first launch."""
    from torch_dora.vllm import batch, expand, large_product, product, punica, segments, shrink

    launched, ahead = [], []

    def compile_ahead(launches):
        launches()
        ahead.extend(launched)
        launched.clear()

    monkeypatch.setattr(punica, "compile_ahead", compile_ahead)
    monkeypatch.setattr(product, "refuses", lambda x, *_: "few" if len(x) > 64 else None)
    monkeypatch.setattr(large_product, "refuses", lambda x, *_: "many" if len(x) < 1024 else None)
    monkeypatch.setattr(segments, "segments_of", lambda x, *_: 1 if len(x) <= 16 else 3)
    monkeypatch.setattr(segments, "find_segments", lambda *given: launched.append(given[3]))
    monkeypatch.setattr(shrink, "can_overlap", lambda device: False)
    for module in (shrink, expand, product, segments, large_product):

        def launch(kernel, grid, *arguments, name=module.__name__, **constants):
            rows = constants.get("ROWS"), constants.get("LANES")
            launched.append((name.rpartition(".")[2], *rows))

        monkeypatch.setattr(module, "launch_kernel", launch)
    monkeypatch.setattr(product, "TensorDescriptor", SimpleNamespace(from_tensor=lambda *_: None))
    for module in (segments, large_product):
        monkeypatch.setattr(module, "TensorDescriptor", product.TensorDescriptor)
    layer.base_layer.bias = layer.bias
    tables = batch.Batch(2048, SLOTS, "cpu")
    products = punica.SlotProducts(layer, layer.g, tables)
    products.multiplies_base, layer.slot_products = is_plain, products
    punica.warm_up([layer, layer], tables, [RANK] * SLOTS)
    few = {("shrink", 16, shrink.SMALL.lanes), ("expand", 16, None)}
    many = {("shrink", 64, shrink.LARGE.lanes), ("expand", 64, None)}
    whole = {("product", 16, 4), ("segments", 64, 4), ("segments", None, None)}
    whole |= {("large_product", 128, None)}
    if is_plain:  # before all others, for all batches that are multiplied by product and segments
        assert launched.pop(0) == product.MOST_TOKENS
    assert {*launched} == few | many | (whole if is_plain else set())
    assert {*launched} <= {*ahead}
    assert len(launched) == (18 if is_plain else 20)  # for one of the two
    assert not tables.tokens
    assert not tables.used[0, 0]


@pytest.mark.parametrize(
    ("rank", "skips", "is_added"), [(0, False, True), (1, False, False), (0, True, False)]
)
def test_kernels_are_launched_before_requests_with_the_bias_of_vllm(
    layer, monkeypatch, rank, skips, is_added
):
    """It adds a row-parallel layer's in one process, and none to what returns it."""
    from torch_dora.vllm import batch, expand, punica

    monkeypatch.setattr(punica.vllm_layers, "RowParallelLinearWithLoRA", SimpleNamespace)
    biases = set()
    monkeypatch.setattr(expand, "launch_kernel", lambda *_, HAS_BIAS, **__: biases.add(HAS_BIAS))
    layer.base_layer.bias, layer.base_layer.skip_bias_add = layer.bias, skips
    layer.tp_rank, layer.slot_products = rank, layer.apart
    punica.warm_up([layer], batch.Batch(64, SLOTS, "cpu"), [RANK] * SLOTS)
    assert biases == {layer.bias is not None and is_added}


def test_a_batch_without_adapters_is_the_base_product(layer):
    layer.tables.update(np.full(5, -1), [RANK, 0, 5])
    x = layer.draw(5, INPUTS)
    expected = layer.base_layer.quant_method.apply(layer.base_layer, x, layer.bias)
    assert torch.equal(layer.together(layer, x, layer.bias), expected)
    assert torch.equal(layer.apart(layer, x, layer.bias), expected)


def test_some_of_a_batch_is_refused(layer):
    """The tables are of the whole batch: others' adapters would be used, beyond the end of y."""
    for products in (layer.together, layer.apart):
        with pytest.raises(RuntimeError, match="for 4 of a batch's 5 tokens"):
            products(layer, layer.draw(4, INPUTS), layer.bias)
        assert products(layer, layer.draw(0, INPUTS), layer.bias).shape == (0, sum(SIZES))
    layer.tables.update(np.full(5, -1), [RANK, 0, 5])
    for products in (layer.together, layer.apart):
        products(layer, layer.draw(4, INPUTS), layer.bias)


class Punica:
    """Punica's wrapper on a GPU, as far as tables are made in it."""

    def __init__(self):
        for name in ("_token_lora_indices", "_sampler_indices", "_embeddings_indices"):
            setattr(self, name, torch.full((9,), 77))
        self.indices_len, self.made = [0] * 4, []
        self.token_mapping_meta, self.prompt_mapping_meta = (
            SimpleNamespace(
                no_lora_flag_cpu=torch.tensor([False]), _reset=lambda: self.made.append("reset")
            )
            for _ in range(2)
        )

    def update_metadata(self, mapping, lora_index_to_id, max_loras, vocab_size):
        self.made.append(mapping.index_mapping)
        for one in (self._token_lora_indices, self._sampler_indices, self._embeddings_indices):
            one.fill_(77)
        for one in (self.token_mapping_meta, self.prompt_mapping_meta):
            one.no_lora_flag_cpu.fill_(False)

    def is_clear(self):
        """Returns whether its kernels, in graphs too, compute nothing."""
        flags = self.token_mapping_meta.no_lora_flag_cpu, self.prompt_mapping_meta.no_lora_flag_cpu
        indices = self._token_lora_indices, self._sampler_indices
        return all(flags) and all(bool((one == -1).all()) for one in indices)


def mapping_of(*numbers):
    return SimpleNamespace(index_mapping=numbers, prompt_mapping=numbers, is_prefill=True)


def test_batches_of_the_base_alone_make_no_tables_again(layer, monkeypatch):
    from torch_dora.vllm import punica

    wrapper, tables, made = Punica(), layer.tables, []
    update = punica.makes_tables(wrapper, tables, np.array([RANK, 0, 5]), np.full(SLOTS, False))

    def counted(slots, ranks, original=tables.update):
        made.append(slots.tolist())
        original(slots, ranks)

    monkeypatch.setattr(tables, "update", counted)
    for numbers in ((9, 0, 7), (0, 0, 0), (0, 0), (7, 0), (0,)):
        update(mapping_of(*numbers), [7, None, 9], 4, 100)
        assert tables.tokens == (len(numbers) if any(numbers) else 0)
        assert tables.used[0, 0] == len({*numbers} - {0})
        assert wrapper.indices_len == [len(numbers)] * 4
        assert wrapper.is_clear()
    assert made == [[2, -1, 0], [-1, -1, -1], [0, -1], [-1]]
    assert wrapper.made == ["reset"] * 2  # once for all of them
    with pytest.raises(KeyError):
        update(mapping_of(9, 8), [7, None, 9], 4, 100)
    update(mapping_of(9, 8), [None, 8, 9], 4, 100)
    assert made[-1] == [2, 1]


def test_vllms_tables_are_made_for_batches_with_adapters_that_need_its_kernels(layer):
    """By default it has kernels of its own for embeddings and the head."""
    from torch_dora.vllm import punica

    keeps, wrapper = np.array([False, True, False]), Punica()
    update = punica.makes_tables(wrapper, layer.tables, np.array([RANK, 3, 5]), keeps)
    for numbers in ((9, 0), (8, 9), (7, 9), (0, 0), (0, 8), (0, 0)):
        update(mapping_of(*numbers), [7, 8, 9], 4, 100)
        assert wrapper.is_clear() == (8 not in numbers)
        assert bool((wrapper._embeddings_indices == 0).all()) == (8 not in numbers)
    assert wrapper.made == [*["reset"] * 2, (8, 9), *["reset"] * 2, (0, 8), *["reset"] * 2]
    wrapper._embeddings_indices.fill_(77)  # by vLLM's sleep
    wrapper.rests = False
    update(mapping_of(0), [7, 8, 9], 4, 100)
    assert bool((wrapper._embeddings_indices == 0).all())
    # Experts' kernels read other tables too.
    update = punica.makes_tables(wrapper, layer.tables, np.array([RANK, 3, 5]), None)
    for numbers in ((9, 0), (0, 0)):
        update(mapping_of(*numbers), [7, 8, 9], 4, 100)
        assert wrapper.is_clear() == (9 not in numbers)


def test_both_operators_are_traced_whole(layer):
    """vLLM compiles the model in one graph, for any number of tokens."""
    for products in (layer.together, layer.apart):
        compiled = torch.compile(
            lambda x, products=products: products(layer, 2 * x, layer.bias) + 1,
            fullgraph=True,
            dynamic=True,
            backend="aot_eager",
        )
        for tokens in (5, 7):
            x = layer.draw(tokens, INPUTS)
            assert torch.equal(compiled(x), products(layer, 2 * x, layer.bias) + 1)


def test_a_layer_is_plain_where_vllm_multiplies_by_torch(monkeypatch):
    from vllm.model_executor.layers import (  # pyright: ignore[reportMissingImports]
        linear,
        utils,
    )

    from torch_dora.vllm import punica

    base = linear.ReplicatedLinear.__new__(linear.ReplicatedLinear)
    torch.nn.Module.__init__(base)
    base.quant_method, base.output_size = linear.UnquantizedLinearMethod(), 6
    base.weight = torch.nn.Parameter(torch.ones(6, 4))
    layer = SimpleNamespace(base_layer=base, input_size=4)
    assert not punica._is_plain(layer)  # vLLM's CPU build has products of its own.
    if hasattr(base.quant_method, "_gemm_impl"):
        base.quant_method._gemm_impl = utils.default_unquantized_gemm
    monkeypatch.setattr(utils, "dispatch_unquantized_gemm", lambda: utils.default_unquantized_gemm)
    assert punica._is_plain(layer)
    base.weight = torch.nn.Parameter(torch.ones(6, 2))  # packed
    assert not punica._is_plain(layer)


def test_vllms_kernels_stay_where_rows_must_have_the_same_bits_in_any_batch(monkeypatch):
    """These add A's products in parts, whose number follows the tokens of the batch."""
    from torch_dora.vllm import punica

    tensors = (torch.zeros(3, 1, 16, 64).bfloat16(),)
    layer = SimpleNamespace(
        lora_a_stacked=tensors,
        lora_b_stacked=tensors,
        base_layer=SimpleNamespace(params_dtype=torch.bfloat16),
        lora_config=SimpleNamespace(fully_sharded_loras=False),
    )
    assert punica.refuses(layer) is None
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    assert "the same bits in any batch" in str(punica.refuses(layer))
