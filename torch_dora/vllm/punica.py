"""What takes the place of vLLM's Punica: the part of LoRA and DoRA adapters in a layer's result.

Two kernels compute it for all projections of a packed layer (:mod:`torch_dora.vllm.shrink`,
:mod:`torch_dora.vllm.expand`). Their work follows the adapters of the batch and their ranks, and g
costs nothing, since the second kernel reads and writes the result anyway. They launch nothing for a
batch without adapters.

Layers that they do not take, and all with TORCH_DORA_VLLM_PUNICA=1, stay with Punica; then
:mod:`torch_dora.vllm.scaling` multiplies by g.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from vllm.lora import layers as vllm_layers  # pyright: ignore[reportMissingImports]

from torch_dora.ops.choose import TRITON_MODE
from torch_dora.vllm import batch, expand, shrink
from torch_dora.vllm.batch import Batch

# One program multiplies all ranks of a packed layer.
MAX_RANKS = 256


def refuses(layer: Any) -> str | None:
    """Returns why the kernels cannot compute a layer with LoRA of vLLM, or None."""
    if isinstance(layer, vllm_layers.ReplicatedLinearWithLoRA):
        return "vLLM calls its base layer's own forward"
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
            "blocks": expand.column_blocks(sizes, g.device),
            "small_tiles": tables.small,
            "large_tiles": tables.large,
        }
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor, persistent=False)
        self.unit = expand.unit_of(sizes)
        self.has_adapters = tables.has_adapters
        layer.lora_a_stacked = self.lora_a[:, None].split(lora_a[0].shape[2], 2)
        layer.lora_b_stacked = self.lora_b[:, None].split(sizes, 2)

    def forward(self, y: Tensor, x: Tensor, bias: Tensor | None) -> None:
        """Computes y [..., out] in place, of y = x Wᵀ + bias."""
        torch.ops.torch_dora.add_adapters(
            y.view(-1, y.shape[-1]),
            x.reshape(-1, x.shape[-1]),
            self.lora_a,
            self.lora_b,
            self.g,
            bias,
            self.blocks,
            self.unit,
            self.small_tiles,
            self.large_tiles,
            self.has_adapters,
        )


def add_adapters(
    y: Tensor,
    x: Tensor,
    lora_a: Tensor,
    lora_b: Tensor,
    g: Tensor,
    bias: Tensor | None,
    blocks: Tensor,
    unit: int,
    small_tiles: Tensor,
    large_tiles: Tensor,
    has_adapters: Tensor,
) -> None:
    """The operator ``torch_dora::add_adapters``, whose tensors the schema below describes."""
    if not has_adapters.item() or not y.shape[0]:
        return
    is_small = batch.rows_of_tile(y.shape[0]) == batch.SMALL
    tiles = small_tiles if is_small else large_tiles
    parts = shrink.launch(x.contiguous(), lora_a, tiles, lora_b.shape[2])
    expand.launch(y, parts, lora_b, g, bias, blocks, unit, tiles)


# Not torch.library.custom_op, which takes longer on the host than the launches.
_LIBRARY = torch.library.Library("torch_dora", "FRAGMENT")
_LIBRARY.define(
    "add_adapters(Tensor(a!) y, Tensor x, Tensor lora_a, Tensor lora_b, Tensor g, Tensor? bias, "
    "Tensor blocks, int unit, Tensor small_tiles, Tensor large_tiles, Tensor has_adapters) "
    "-> ()"
)
_LIBRARY.impl("add_adapters", add_adapters, "CUDA")
_LIBRARY.impl("add_adapters", add_adapters, "CPU")
_LIBRARY._register_fake("add_adapters", lambda *arguments: None)


def makes_tables(
    wrapper: Any, tables: Batch, ranks: Sequence[int], is_alone: bool
) -> Callable[..., None]:
    """Returns what takes the place of a Punica wrapper's ``update_metadata``, which vLLM calls for
    each batch that differs from the one before.

    Args:
        wrapper: a PunicaWrapperBase.
        tables: the tables that it fills.
        ranks: the rank of the adapter in each slot, as it is then.
        is_alone: whether all layers are computed by the kernels here, so that vLLM's own tables,
            which make the host wait for the device, are not read.
    """
    original = wrapper.update_metadata

    def update_metadata(
        mapping: Any, lora_index_to_id: list[int | None], max_loras: int, vocab_size: int, **kw: Any
    ) -> None:
        numbers = np.asarray(mapping.index_mapping, np.int64)
        slot_of = {number: slot for slot, number in enumerate(lora_index_to_id)} | {0: -1}
        used, places = np.unique(numbers, return_inverse=True)
        tables.update(np.array([slot_of[number] for number in used.tolist()])[places], ranks)
        metas = [getattr(wrapper, f"{one}_mapping_meta", None) for one in ("token", "prompt")]
        has_base_only = not numbers.any() and not any(mapping.prompt_mapping) and all(metas)
        if not is_alone and not has_base_only:
            original(mapping, lora_index_to_id, max_loras, vocab_size, **kw)
            return
        tokens, prompts = len(numbers), len(mapping.prompt_mapping)
        wrapper.is_prefill = mapping.is_prefill
        wrapper.indices_len[:] = [tokens, prompts, prompts, tokens]
        for meta in metas:
            if meta is not None:
                meta.no_lora_flag_cpu.fill_(True)
        wrapper._token_lora_indices[:tokens].fill_(-1)
        wrapper._sampler_indices[:prompts].fill_(-1)

    return update_metadata
