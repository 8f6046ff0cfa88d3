"""DeepSpeed's ZeRO-2 and ZeRO-3 train adapters to the losses of one process."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parity.sides.torch import processes
from tests.torch_dora.in_processes import IN, OUT, RULE, base
from torch_dora import apply_dora, peft

STEPS, ROWS = 6, 8


def adapted() -> Any:
    torch.manual_seed(0)
    return apply_dora(base(), RULE)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)


def batches() -> list[tuple[Tensor, Tensor]]:
    """Two micro-batches a step, and what the model shall compute for them."""
    torch.manual_seed(1)
    return [(torch.randn(ROWS, IN), torch.randn(ROWS, OUT)) for _ in range(2 * STEPS)]


def train(stage: int, folder: str) -> list[float]:
    """The losses of all processes together, in every step; saves the adapter after the last."""
    # DeepSpeed reads these, and chooses a GPU's kernels where a GPU's libraries are installed.
    rank, count = torch.distributed.get_rank(), torch.distributed.get_world_size()
    os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": str(rank), "LOCAL_SIZE": str(count)}
    import deepspeed  # pyright: ignore[reportMissingImports]

    model = adapted()
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=optimizer_of(model),
        dist_init_required=False,
        config={
            "train_micro_batch_size_per_gpu": ROWS // count,
            "gradient_accumulation_steps": 2,
            # Without the threshold, parameters as small as these stay whole.
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        },
    )
    losses = []
    for x, target in batches():
        loss = (engine(x.chunk(count)[rank]) - target.chunk(count)[rank]).square().mean()
        engine.backward(loss)
        engine.step()
        total = loss.detach().clone()
        torch.distributed.all_reduce(total)
        losses.append(total.item() / count)
    with deepspeed.zero.GatheredParameters([*model.parameters()]):
        if rank == 0:
            peft.save_adapter(model, folder)
    torch.distributed.barrier()
    return losses


@pytest.mark.deepspeed
@pytest.mark.parametrize("stage", [2, 3])
def test_losses_are_those_of_one_process(stage: int, tmp_path: Path) -> None:
    model = adapted()
    optimizer = optimizer_of(model)
    losses = []
    for at, (x, target) in enumerate(batches()):
        loss = (model(x) - target).square().mean()
        (loss / 2).backward()
        losses.append(loss.item())
        if at % 2:
            optimizer.step()
            optimizer.zero_grad()

    found = processes.run(train, 2, "cpu", stage, str(tmp_path / "adapter"))

    assert found == pytest.approx(losses, rel=1e-5)
    assert losses[-1] < 0.9 * losses[1]
    saved = peft.load_adapter(base(), tmp_path / "adapter")
    x, _ = batches()[0]
    torch.testing.assert_close(saved(x), model(x))
