"""The adapters of a mixed batch in Hugging Face PEFT: their folders, and each one's rows."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, PeftModel, get_peft_model

from parity.bank_cases import Found, Problem
from parity.sides.torch.bank import model_of


@torch.no_grad()
def save(problem: Problem, root: Path) -> list[Path]:
    """Writes every adapter to a folder of its own, and returns the folders."""
    folders = []
    for slot, adapter in enumerate(problem.adapters):
        config = LoraConfig(
            r=adapter.options["rank"],
            lora_alpha=adapter.options["alpha"],  # pyright: ignore[reportArgumentType]
            use_rslora=adapter.options["use_rslora"],
            use_dora=adapter.magnitude is not None,
            target_modules=["proj"],
        )
        model: Any = get_peft_model(model_of(problem, "cpu"), config)  # pyright: ignore[reportArgumentType]
        layer = model.base_model.model.proj
        layer.lora_A["default"].weight.copy_(torch.tensor(adapter.lora_a))
        layer.lora_B["default"].weight.copy_(torch.tensor(adapter.lora_b))
        if adapter.magnitude is not None:
            magnitude = torch.tensor(adapter.magnitude)
            layer.lora_magnitude_vector["default"].weight.copy_(magnitude)
        model.save_pretrained(root / str(slot))
        folders.append(root / str(slot))
    return folders


@torch.no_grad()
def rows(problem: Problem, folders: Sequence[Path], device: str) -> Found:
    """Returns the batch's rows, computed for one adapter after the other; rows without one are
    NaN."""
    x = torch.tensor(problem.x).to(device, getattr(torch, problem.dtype))
    found = np.full((*problem.x.shape[:-1], len(problem.bias)), np.nan)
    for slot, folder in enumerate(folders):
        base: Any = model_of(problem, device)
        model: Any = PeftModel.from_pretrained(base, folder).eval()
        in_slot = problem.ids == slot
        found[in_slot] = model(x[torch.as_tensor(in_slot)]).double().cpu().numpy()
    return Found(found)
