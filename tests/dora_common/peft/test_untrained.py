"""An adapter that an optimizer never had is stored with a warning."""

from typing import Any

import jax
import numpy as np
import pytest
import torch
from flax import nnx

import jax_dora
import torch_dora


@pytest.mark.parametrize("is_embedding", [False, True])
def test_of_torch(is_embedding, tmp_path, caplog):
    layer = torch.nn.Embedding(3, 4) if is_embedding else torch.nn.Linear(3, 4)
    model = torch.nn.Sequential(layer)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch_dora.apply_dora(model, torch_dora.DoRARule(".*", 2, 4))
    x = torch.arange(3) if is_embedding else torch.randn(5, 3)
    model(x).square().sum().backward()
    optimizer.step()
    torch_dora.peft.save_adapter(model, tmp_path / "untrained")
    [message] = caplog.messages
    assert message.startswith(f"{tmp_path / 'untrained'}: lora_a or lora_b is zero in every layer")
    caplog.clear()
    torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1).step()
    torch_dora.peft.save_adapter(model, tmp_path / "trained")
    assert not caplog.messages


def test_of_flax(tmp_path, caplog):
    base = nnx.Sequential(*(nnx.Linear(3, 3, rngs=nnx.Rngs(i)) for i in range(2)))
    model = jax_dora.apply_dora(base, jax_dora.DoRARule(".*", 2, 4), rngs=nnx.Rngs(2))
    jax_dora.peft.save_adapter(model, tmp_path / "untrained", dtype=jax.numpy.bfloat16)
    assert "lora_a or lora_b is zero in every layer" in caplog.text
    caplog.clear()
    layer: Any = model.layers[1]
    layer.lora_b.set_value(layer.lora_b[...].at[0, 2].set(np.float32(1e-8)))
    jax_dora.peft.save_adapter(model, tmp_path / "trained")
    assert not caplog.messages
