"""Where layers differ in what PEFT's format has once, the error names a way that loses nothing."""

import copy
import dataclasses
import re
from typing import Any

import jax
import numpy as np
import pytest
import torch
from flax import nnx

import jax_dora
import torch_dora

WAYS = {
    "use_rslora": "set use_rslora to False and alpha to scale * rank",
    "dropout": "set dropout to one value",
}
VALUES = {"use_rslora": True, "dropout": 0.1}


def refused(save, model, folder, setting: str) -> None:
    way = re.escape(WAYS[setting])
    with pytest.raises(ValueError, match=f"^{setting}: .*: {way}.*merge_dora.*Orbax"):
        save(model, folder)


@pytest.mark.parametrize("setting", WAYS)
def test_of_torch(setting, tmp_path):
    base = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Linear(6, 6))
    rules = [torch_dora.DoRARule("0", 4, 3, **{setting: VALUES[setting]})]
    rules.append(torch_dora.DoRARule("1", 2, 5))
    model = torch_dora.apply_dora(copy.deepcopy(base), rules).eval()
    for layer in model:
        torch.nn.init.normal_(layer.lora_b)
    x = torch.randn(3, 6)
    expected = model(x)
    refused(torch_dora.peft.save_adapter, model, tmp_path, setting)
    for layer in model:
        layer.use_rslora, layer.alpha, layer.dropout = False, layer.scale * layer.rank, 0.1
    torch_dora.peft.save_adapter(model, tmp_path)
    loaded = torch_dora.peft.load_adapter(base, tmp_path).eval()
    torch.testing.assert_close(model(x), expected)
    torch.testing.assert_close(loaded(x), expected)


@pytest.mark.parametrize("setting", WAYS)
def test_of_flax(setting, tmp_path):
    rngs = nnx.Rngs(0)
    base = nnx.Sequential(nnx.Linear(6, 6, rngs=rngs), nnx.Linear(6, 6, rngs=rngs))
    rules = [jax_dora.DoRARule("layers/0", 4, 3, **{setting: VALUES[setting]})]
    rules.append(jax_dora.DoRARule("layers/1", 2, 5))
    model = jax_dora.apply_dora(base, rules, rngs=rngs)
    model.eval()
    layers: Any = model.layers
    for layer in layers:
        layer.lora_b.set_value(jax.random.normal(rngs(), layer.lora_b.shape))
    x = jax.random.normal(rngs(), (3, 6))
    refused(jax_dora.peft.save_adapter, model, tmp_path, setting)
    adapter = jax_dora.get_adapter(model)
    rules = tuple(
        dataclasses.replace(rule, use_rslora=False, alpha=rule.scale * rule.rank, dropout=0.1)
        for rule in adapter.rules
    )
    alike = jax_dora.set_adapter(base, dataclasses.replace(adapter, rules=rules), rngs=rngs)
    jax_dora.peft.save_adapter(alike, tmp_path)
    loaded = jax_dora.peft.load_adapter(base, tmp_path, rngs=rngs)
    loaded.eval()
    np.testing.assert_allclose(loaded(x), model(x), rtol=1e-6, atol=1e-6)
