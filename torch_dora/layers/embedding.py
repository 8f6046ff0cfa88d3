"""DoRA for torch.nn.Embedding."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from torch_dora.layers.base import DoRALayer
from torch_dora.ops import compose
from torch_dora.ops.dtypes import no_autocast


class DoRAEmbedding(DoRALayer):
    """y = g∘E[ids] + g∘(s·A[ids]B) with g = magnitude / ‖E + s·AB‖, the norm over the vocabulary.

    Parameters: ``weight`` [vocabulary, features], ``lora_a`` [rank, vocabulary], ``lora_b``
    [features, rank], ``magnitude`` [features], the shapes of PEFT's files.

    As in PEFT:

    - lora_a starts at zero and lora_b is drawn from a normal distribution.
    - An id equal to ``padding_idx`` gets no gradient in lora_a, and ``scale_grad_by_freq`` divides
      lora_a's gradient by the number of times an id occurs.
    - An output head that is tied to the weight is a separate module and is not changed.
    - transformers' embeddings that multiply their rows by ``embed_scale``, such as Gemma 3's and
      Bart's, multiply the adapted rows by it, outside the norm.

    The arguments are those of :class:`DoRALayer`; dropout must be 0, since an embedding has no
    input activations.
    """

    BASES = (nn.Embedding,)
    BASES_NAMED = "torch.nn.Embedding"

    @classmethod
    def adapts(cls, module: nn.Module) -> bool:
        return super().adapts(module) or is_scaled_embedding(module)

    @classmethod
    def check_base(cls, base: Any, rank: int, dropout: float) -> None:
        super().check_base(base, rank, dropout)
        if dropout:
            raise ValueError(
                f"dropout is {dropout} for an embedding, which reads token ids and has no "
                "activation to drop; expected 0: give embeddings a separate rule"
            )
        if base.max_norm is not None:
            raise NotImplementedError(
                f"base.max_norm is {base.max_norm}, with which every call changes the weight; "
                "expected None: a frozen weight cannot be changed"
            )

    def weight_matrix(self) -> Tensor:
        return self.weight.T

    def as_weight(self, matrix: Tensor) -> Tensor:
        return matrix.T.contiguous()

    def reset_adapter(self) -> None:
        """Initialises the adapter as PEFT does: lora_a zero, lora_b normal."""
        nn.init.zeros_(self.lora_a)
        nn.init.normal_(self.lora_b)
        self.reset_magnitude()

    def forward(self, input: Tensor) -> Tensor:
        """Returns [..., features] for integer ids [...]."""
        if self.is_disabled:
            return self.call_base(input)
        settings = self.settings
        padding, by_freq = settings.padding_idx, settings.scale_grad_by_freq
        base = F.embedding(
            input, self.weight, padding, scale_grad_by_freq=by_freq, sparse=settings.sparse
        )
        rows = F.embedding(input, self.lora_a.T, padding, scale_grad_by_freq=by_freq)
        with no_autocast(base):
            lora = F.linear(rows.to(base.dtype), self.lora_b.to(base.dtype))
        g = self.g(base.dtype)
        y = compose(base, lora, g, self.scale, implementation=self.implementation)
        if not is_scaled_embedding(settings):
            return y
        scale: Any = self.embed_scale
        return y * (scale.to(self.weight.dtype) if isinstance(scale, Tensor) else scale)


def is_scaled_embedding(module: Any) -> bool:
    """Returns whether ``module`` is one of transformers' embeddings that multiply the result of
    torch.nn.Embedding by ``embed_scale`` and do nothing else. T5Gemma 2's embedding does more."""
    kind = type(module)
    is_named = kind.__name__.endswith("ScaledWordEmbedding")
    is_named = is_named and kind.__module__.startswith("transformers.")
    return is_named and hasattr(module, "embed_scale") and not hasattr(module, "eoi_embedding")
