"""PEFT's target_parameters, of which torch_dora adapts none."""

import peft
import pytest
import torch

from torch_dora.peft import load_adapter


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 4)
        self.experts = torch.nn.Module()
        self.experts.down_proj = torch.nn.Parameter(torch.randn(2, 4, 5))


def test_a_folder_with_packed_experts_is_refused_by_name(tmp_path):
    config = peft.LoraConfig(
        r=2, target_modules=["linear"], target_parameters=["experts.down_proj"]
    )
    peft.get_peft_model(Model(), config).save_pretrained(tmp_path)
    match = r"experts\.down_proj, which target_parameters names, is no parameter with packed"
    with pytest.raises(ValueError, match=match):
        load_adapter(Model(), tmp_path)
