"""DoRARule: selects layers of a torch model and describes their adapters."""

import dataclasses

import torch

from dora_common.rules import Rule
from torch_dora.ops import check, choose


@dataclasses.dataclass(frozen=True)
class DoRARule(Rule):
    """The adapter of every layer whose name matches ``path``.

    Attributes:
        path: a regular expression that must match the full name, as in ``re.fullmatch``. The names
            are those of ``named_modules``: r"model\\.layers\\.\\d+\\.self_attn\\.(q|v)_proj". Or
            "all-linear", for every ``torch.nn.Linear`` and transformers' Conv1D except the output
            head: ``model.get_output_embeddings()`` and modules named lm_head, embed_out, output,
            head, score or classifier.
        rank, alpha, use_rslora, dropout, dropout_mode, adapter_dtype, implementation, bwd_qtype: as
            in :class:`~torch_dora.DoRALinear`. For embeddings dropout must be 0.
        exclude: a regular expression for the full names of layers that the rule leaves out, as in
            DoRARule("all-linear", 16, 32, exclude=r".*\\.gate"). It must match a layer; a shared
            layer is left out if it matches one of the layer's names.

    Raises:
        TypeError, ValueError: an attribute is out of range, or ``path`` or ``exclude`` is not a
            regular expression.
    """

    adapter_dtype: torch.dtype = dataclasses.field(default=torch.float32, kw_only=True)
    implementation: str | None = dataclasses.field(default=None, kw_only=True)
    bwd_qtype: str | None = dataclasses.field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check.is_float_dtype("adapter_dtype", self.adapter_dtype)
        choose.check_name(self.implementation)
