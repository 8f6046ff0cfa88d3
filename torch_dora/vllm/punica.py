"""What takes the place of vLLM's Punica: the part of LoRA and DoRA adapters in a layer's result.

Two kernels compute it for all projections of a packed layer (:mod:`torch_dora.vllm.shrink`,
:mod:`torch_dora.vllm.expand`), or, with the base's part, one or two for few tokens
(:mod:`torch_dora.vllm.product`, :mod:`torch_dora.vllm.segments`); for many, the second one may
compute the base's part too (:mod:`torch_dora.vllm.large_product`). Their work follows the adapters
of the batch and their ranks, and g costs nothing, since they have the base's result at hand. They
launch nothing for a batch without adapters.

Layers that they do not take, and all with TORCH_DORA_VLLM_PUNICA=1, stay with Punica; then
:mod:`torch_dora.vllm.scaling` multiplies by g.
"""

import functools
from array import array
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import numpy as np
import torch
import vllm.envs  # pyright: ignore[reportMissingImports]
from torch import Tensor, nn
from vllm.lora import layers as vllm_layers  # pyright: ignore[reportMissingImports]
from vllm.lora.layers import base_linear  # pyright: ignore[reportMissingImports]
from vllm.model_executor.layers import utils  # pyright: ignore[reportMissingImports]

from torch_dora.ops.choose import TRITON_MODE
from torch_dora.ops.triton.jit import compile_ahead
from torch_dora.vllm import (
    base_weight,
    batch,
    expand,
    large_product,
    product,
    segments,
    shrink,
    slices,
)
from torch_dora.vllm.batch import Batch

# One program multiplies all ranks of a packed layer.
MAX_RANKS = 256
# With more tokens, A's products are no faster beside the base product than after it.
MOST_BESIDE = 128
# Tokens for each way to compute a layer, and each configuration of its kernels.
WARM_UP = 16, product.MOST_TOKENS, MOST_BESIDE, batch.SMALL_BATCH, large_product.LEAST_TOKENS


def refuses(layer: Any) -> str | None:
    """Returns why the kernels cannot compute a layer with LoRA of vLLM, or None."""
    if isinstance(layer, vllm_layers.ReplicatedLinearWithLoRA):
        return "vLLM calls its base layer's own forward"
    if vllm.envs.VLLM_BATCH_INVARIANT:
        return "rows must have the same bits in any batch, as they have by vLLM's kernels"
    lora_a, lora_b = layer.lora_a_stacked, layer.lora_b_stacked
    dtypes = {one.dtype for one in (*lora_a, *lora_b)} | {layer.base_layer.params_dtype}
    ranks = sum(one.shape[2] for one in lora_a)
    if TRITON_MODE == "interpreted":
        dtypes -= {torch.float32}
    elif TRITON_MODE != "compiled" or lora_a[0].device.type != "cuda":
        return "there is no GPU with Triton"
    if not dtypes <= {torch.float16, torch.bfloat16} or len(dtypes) > 1:
        return "they multiply float16 or bfloat16, of one dtype"
    if layer.lora_config.fully_sharded_loras:
        return "the adapters are fully sharded"
    if len({one.shape[2] for one in lora_a}) > 1 or ranks > MAX_RANKS:
        return f"its projections have {ranks} ranks; they take {MAX_RANKS}, the same for each"
    return None


class SlotProducts(nn.Module):
    """The kernels of one layer, and the tensors that they read.

    vLLM goes on to fill the adapters' slots through its own ``lora_a_stacked`` and
    ``lora_b_stacked``, which become views of one tensor each.

    Args:
        layer: a layer with LoRA of vLLM that :func:`refuses` accepts.
        g: f32[slots + 1, out].
        tables: the tables of the batch.
    """

    lora_a: Tensor
    lora_b: Tensor

    def __init__(self, layer: Any, g: Tensor, tables: Batch) -> None:
        super().__init__()
        lora_a, lora_b = layer.lora_a_stacked, layer.lora_b_stacked
        sizes = [one.shape[2] for one in lora_b]
        tensors = {
            "lora_a": torch.cat([one[:, 0] for one in lora_a], 1),
            "lora_b": torch.cat([one[:, 0] for one in lora_b], 1),
            "g": g,
            "small_blocks": expand.column_blocks(expand.SMALL, sizes, g.device),
            "large_blocks": expand.column_blocks(expand.LARGE, sizes, g.device),
            "blocks": product.blocks_of(sizes, g.device),
            "many_blocks": product.blocks_of(sizes, g.device, large_product.COLUMNS),
            "counts": torch.zeros(2, dtype=torch.int32, device=g.device),
            "table": tables.used,
            "all_tables": tables.all,
        }
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor, persistent=False)
        self.unit = expand.unit_of(sizes)
        self.multiplies_base = _is_plain(layer)
        layer.lora_a_stacked = self.lora_a[:, None].split(lora_a[0].shape[2], 2)
        layer.lora_b_stacked = self.lora_b[:, None].split(sizes, 2)

    def forward(self, layer: Any, x: Tensor, bias: Tensor | None) -> Tensor:
        """Returns the result of the layer, [..., out], for x [..., in]."""
        if self.multiplies_base:
            return self._multiply(layer, x, bias)
        y = layer._get_quant_method().apply(layer.base_layer, x, bias)
        self._add(y.view(-1, y.shape[-1]), x.reshape(-1, x.shape[-1]), bias)
        return y

    def ask_segments(self, layer: Any, ask: Callable[..., None]) -> None:
        """Calls a function of `segments` for the layer, if its kernels may multiply the weight."""
        if self.multiplies_base:
            weight, bias = layer.base_layer.weight, _added_bias(layer)
            _Adapters(*self._operands()).ask_segments(weight, bias, ask)

    def warm_up(self, layer: Any, tokens: int) -> None:
        """Launches the kernels for so many tokens, without vLLM's product of a quantised layer."""
        x, bias = self.lora_a.new_zeros(tokens, self.lora_a.shape[2]), _added_bias(layer)
        if self.multiplies_base:
            self._multiply(layer, x, bias)
        else:
            self._add(x.new_zeros(tokens, self.lora_b.shape[1]), x, bias)

    def _multiply(self, layer: Any, x: Tensor, bias: Tensor | None) -> Tensor:
        weight = layer.base_layer.weight
        return torch.ops.torch_dora.linear_with_adapters(x, weight, bias, *self._operands())

    def _add(self, y: Tensor, x: Tensor, bias: Tensor | None) -> None:
        torch.ops.torch_dora.add_adapters(y, x, bias, *self._operands())

    def _operands(self) -> tuple[Any, ...]:
        return (
            *(self.lora_a, self.lora_b, self.g, self.unit, self.small_blocks, self.large_blocks),
            *(self.blocks, self.many_blocks, self.counts, self.table),
        )


def _added_bias(layer: Any) -> Tensor | None:
    """Returns the bias that vLLM adds in a layer's product: of row-parallel layers, one process
    does."""
    is_row_parallel = isinstance(layer, vllm_layers.RowParallelLinearWithLoRA)
    if layer.base_layer.skip_bias_add or (is_row_parallel and layer.tp_rank > 0):
        return None
    return getattr(layer.base_layer, "bias", None)


def _is_plain(layer: Any) -> bool:
    """Returns whether vLLM computes the base layer by ``torch.nn.functional.linear``."""
    base = layer.base_layer
    weight = base_weight.readable_weight(base, slices.features_out(layer), layer.input_size)
    if weight is None:
        return False
    # vLLM 0.25 chooses the product at each call.
    product = getattr(base.quant_method, "_gemm_impl", None) or utils.dispatch_unquantized_gemm()
    return product is utils.default_unquantized_gemm


class _Adapters(NamedTuple):
    """The last arguments of both operators."""

    lora_a: Tensor
    lora_b: Tensor
    g: Tensor
    unit: int
    small_blocks: Tensor
    large_blocks: Tensor
    blocks: Tensor
    many_blocks: Tensor
    counts: Tensor
    table: Tensor  # the slots of a batch, by which `batch.of` finds the others

    def are_in(self, x: Tensor) -> bool:
        """Returns whether a token of the batch has an adapter.

        Args:
            x: [rows, in], a row for each token of the batch, and others.

        Raises:
            RuntimeError: there are fewer rows. Tokens are looked up by their places in the batch.
        """
        tokens, rows = batch.of(self.table).tokens, len(x)
        if 0 < rows < tokens:
            raise RuntimeError(
                f"vLLM calls a layer for {rows} of a batch's {tokens} tokens; expected all, since "
                "adapters are looked up by the place in the batch. Leave out the option that "
                "divides batches, or LoRA for this layer"
            )
        return tokens > 0 and rows > 0

    def multiply_all(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
        """Returns the layer's result by kernels that multiply the weight too, for few tokens, or
        None where they are not chosen."""
        if self._refuse_few(x, weight) is not None:
            return None
        count = segments.segments_of(x, weight, bias)
        return segments.launch(x, weight, bias, count, self._for_few()) if count else None

    def ask_segments(self, weight: Tensor, bias: Tensor | None, ask: Callable[..., None]) -> None:
        """Calls a function of `segments` for what :meth:`multiply_all` needs, before requests and
        graphs."""
        if self._refuse_few(weight[:1], weight) is None:
            most = min(product.MOST_TOKENS, len(batch.of(self.table).slots))
            ask(weight, bias, self._for_few(), most)

    def _refuse_few(self, x: Tensor, weight: Tensor) -> str | None:
        return product.refuses(x, weight, self.blocks, self.lora_b.shape[2])

    def _for_few(self) -> product.Adapters:
        tables = batch.of(self.table)
        return product.Adapters(
            *(self.lora_a, self.lora_b, self.g, self.blocks, self.counts),
            *(tables.small, tables.slots, tables.used),
        )

    def multiply_many(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
        """Returns the layer's result for many tokens by a kernel that multiplies the weight too, or
        None where that is not chosen.

        It may sum in another order than cuBLAS, so it is not chosen if a row of the base is among
        them, or may be when a graph is replayed."""
        tables, max_rank = batch.of(self.table), self.lora_b.shape[2]
        if large_product.refuses(x, weight, self.many_blocks, max_rank) is not None:
            return None
        if x.is_cuda and torch.cuda.is_current_stream_capturing():
            return None
        if tables.has_base or len(x) > tables.tokens:
            return None
        operands = weight, bias, self.shrink(x), self.lora_b, self.g, self.many_blocks, tables
        return large_product.launch(x, *operands)

    def shrink(self, x: Tensor, beside: AbstractContextManager[Any] | None = None) -> Tensor:
        tables = batch.of(self.table)
        tiles = tables.small if _is_small(x) else tables.large
        return shrink.launch(x, self.lora_a, tiles, self.lora_b.shape[2], beside=beside)

    def expand(self, y: Tensor, parts: Tensor, bias: Tensor | None) -> None:
        tables = batch.of(self.table)
        small, large = (self.small_blocks, tables.small), (self.large_blocks, tables.large)
        blocks, tiles = small if _is_small(y) else large
        expand.launch(y, parts, self.lora_b, self.g, bias, blocks, self.unit, tiles)


def _is_small(x: Tensor) -> bool:
    return batch.rows_of_tile(x.shape[0]) == batch.SMALL


def linear_with_adapters(x: Tensor, weight: Tensor, bias: Tensor | None, *tensors: Any) -> Tensor:
    """The operator ``torch_dora::linear_with_adapters``: x Wᵀ + bias with the adapters' part.

    For few tokens one kernel computes it, or two. For many, all of adapters, a second one does
    after the shrinking kernel. Else, for few, the shrinking kernel, which needs x only, runs on a
    second stream beside the base product, which waits for memory then.
    """
    adapters, rows = _Adapters(*tensors), x.reshape(-1, x.shape[-1]).contiguous()
    has_adapters = adapters.are_in(rows)
    if has_adapters:
        y = adapters.multiply_all(rows, weight, bias)
        y = adapters.multiply_many(rows, weight, bias) if y is None else y
        if y is not None:
            return y.view(*x.shape[:-1], len(weight))
    if not has_adapters or len(rows) > MOST_BESIDE or x.device.type != "cuda":
        y = nn.functional.linear(x, weight, bias)
        add_adapters(y.view(-1, y.shape[-1]), rows, bias, *tensors)
        return y
    first, second = torch.cuda.current_stream(x.device), _second_stream(x.device)
    second.wait_stream(first)
    parts = adapters.shrink(rows, beside=torch.cuda.stream(second))
    y = nn.functional.linear(x, weight, bias)
    first.wait_stream(second)
    adapters.expand(y.view(-1, y.shape[-1]), parts, bias)
    return y


def add_adapters(y: Tensor, x: Tensor, bias: Tensor | None, *tensors: Any) -> None:
    """The operator ``torch_dora::add_adapters``: adds the adapters' part to y = x Wᵀ + bias."""
    adapters = _Adapters(*tensors)
    if adapters.are_in(x):
        adapters.expand(y, adapters.shrink(x.contiguous()), bias)


@torch.no_grad()
def warm_up(layers: Sequence[Any], tables: Batch, ranks: Sequence[int] | np.ndarray) -> None:
    """Has Triton compile the kernels of layers with LoRA, before a request waits for it, and finds
    out how cuBLAS sums, while there is memory.

    vLLM runs the model before, without adapters, or for the tokens of its graphs only.
    """
    distinct: dict[Any, Any] = {}
    for layer in layers:
        products: SlotProducts = layer.slot_products
        has_bias = _added_bias(layer) is not None
        key = products.multiplies_base, has_bias, *(one.shape for one in products.buffers())
        distinct.setdefault(key, layer)

    def launches(ask: Callable[..., None]) -> None:
        for layer in distinct.values():
            layer.slot_products.ask_segments(layer, ask)
            for tokens in sorted({min(count, len(tables.slots)) for count in WARM_UP}):
                for last in (-1, 0):  # Some kernels compute batches without rows of the base only.
                    tables.update(np.append(np.zeros(tokens - 1, np.int64), last), ranks)
                    layer.slot_products.warm_up(layer, tokens)

    compile_ahead(lambda: launches(segments.launch_some))
    launches(segments.find_segments)
    tables.update(np.full(1, -1), ranks)


@functools.cache
def _second_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


# Not torch.library.custom_op, which takes longer on the host than the launches.
_LIBRARY = torch.library.Library("torch_dora", "FRAGMENT")
_ADAPTERS = (
    "Tensor lora_a, Tensor lora_b, Tensor g, int unit, Tensor small_blocks, Tensor large_blocks, "
    "Tensor blocks, Tensor many_blocks, Tensor counts, Tensor table"
)
_LIBRARY.define(f"add_adapters(Tensor(a!) y, Tensor x, Tensor? bias, {_ADAPTERS}) -> ()")
_LIBRARY.define(
    f"linear_with_adapters(Tensor x, Tensor weight, Tensor? bias, {_ADAPTERS}) -> Tensor"
)
for _function in (add_adapters, linear_with_adapters):
    for _device in ("CUDA", "CPU"):
        _LIBRARY.impl(_function.__name__, _function, _device)
_LIBRARY._register_fake("add_adapters", lambda *arguments: None)
_LIBRARY._register_fake(
    "linear_with_adapters", lambda x, weight, *others: x.new_empty(*x.shape[:-1], len(weight))
)


def can_rest(wrapper: Any, layers: Sequence[Any]) -> bool:
    """Returns whether Punica's tables can be those of a batch without adapters while no adapter of
    the batch is for these layers, which are left to it. Then they have the base's results."""
    kinds = (
        base_linear.BaseLinearLayerWithLoRA,
        vllm_layers.VocabParallelEmbeddingWithLoRA,
        vllm_layers.LogitsProcessorWithLoRA,
    )
    return not layers or (all(_metas(wrapper)) and all(isinstance(one, kinds) for one in layers))


def _metas(wrapper: Any) -> list[Any]:
    return [getattr(wrapper, f"{one}_mapping_meta", None) for one in ("token", "prompt")]


def makes_tables(
    wrapper: Any, tables: Batch, ranks: np.ndarray, keeps: np.ndarray | None
) -> Callable[..., None]:
    """Returns what takes the place of a Punica wrapper's ``update_metadata``, which vLLM calls for
    each batch that differs from the one before.

    vLLM's own tables, which make the host wait for the device, are made for batches that need them.

    Args:
        wrapper: a PunicaWrapperBase.
        tables: the tables that it fills.
        ranks: i32[slots], the rank of the adapter in each slot, as it is then.
        keeps: bool[slots], whether the adapter in each slot is for layers that are left to Punica,
            as it is then; None if Punica's part of such layers is needed for any adapter.
    """
    original, slots_of = wrapper.update_metadata, _Slots()
    metas = _metas(wrapper)
    wrapper.rests = False  # whether vLLM's tables are those of a batch without adapters

    def update_metadata(
        mapping: Any, lora_index_to_id: list[int | None], max_loras: int, vocab_size: int, **kw: Any
    ) -> None:
        slots = slots_of(mapping.index_mapping, lora_index_to_id)
        has_adapters = bool(slots.max(initial=-1) >= 0)
        if has_adapters or tables.tokens:  # Empty tables are those of any batch of the base.
            tables.update(slots, ranks)
        needs_all = keeps is None and (has_adapters or any(mapping.prompt_mapping))
        needs_some = keeps is not None and keeps.any() and keeps[slots[slots >= 0]].any()
        if needs_all or needs_some or (keeps is None and not all(metas)):
            original(mapping, lora_index_to_id, max_loras, vocab_size, **kw)
            wrapper.rests = False
            return
        tokens, prompts = len(slots), len(mapping.prompt_mapping)
        wrapper.is_prefill = mapping.is_prefill
        wrapper.indices_len[:] = [tokens, prompts, prompts, tokens]
        if wrapper.rests:
            return
        for meta in metas:
            if meta is not None:
                meta._reset()  # A graph with Punica's kernels reads them from the device.
                meta.no_lora_flag_cpu.fill_(True)
        wrapper._token_lora_indices.fill_(-1)
        wrapper._sampler_indices.fill_(-1)
        wrapper._embeddings_indices.fill_(0)
        wrapper.rests = True

    return update_metadata


class _Slots:
    """Finds the slot of each token's adapter; its numbers are kept while the slots are the same."""

    def __init__(self) -> None:
        self._in_slots: list[int | None] = []
        self._numbers = self._slots = np.zeros(0, np.int64)

    def __call__(self, numbers: Sequence[int], in_slots: list[int | None]) -> np.ndarray:
        """Returns int[tokens], -1 for the number 0.

        Raises:
            KeyError: the adapter of a token is in no slot.
        """
        if self._in_slots != in_slots or not len(self._numbers):
            self._in_slots = list(in_slots)
            slot_of = {number: slot for slot, number in enumerate(in_slots) if number is not None}
            found = sorted((slot_of | {0: -1}).items())
            self._numbers, self._slots = np.array(found, np.int64).T.copy()
        # NumPy takes twice as long to read numbers of its own from a tuple.
        given = np.frombuffer(array("q", numbers), np.int64)
        place = self._numbers.searchsorted(given)
        place[place == len(self._numbers)] = 0
        if not np.array_equal(self._numbers[place], given):
            raise KeyError(f"no slot has one of the adapters {sorted({*numbers})}")
        return self._slots[place]
