# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # From a Flax model to a PEFT adapter and back
#
# This notebook is for people who want to see the whole way of an adapter once. It adapts a Flax NNX
# model with DoRA, trains it for a few steps, exports the adapter as a Hugging Face PEFT folder, and
# loads that folder in PEFT, with the same model in PyTorch. It takes seconds on a CPU, and is run
# every time this site is built.

# %% [markdown]
# ## A pretrained model
#
# This small Flax network takes the role of a pretrained model. Its attributes have the same names
# as in the PyTorch version below, so the path `layers/0/up` is `layers.0.up` there.

# %%
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import peft
import torch
from flax import nnx
from torch import nn

import jax_dora

WIDTH, HIDDEN, CLASSES = 16, 48, 4


class Block(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(WIDTH, HIDDEN, rngs=rngs)
        self.down = nnx.Linear(HIDDEN, WIDTH, rngs=rngs)

    def __call__(self, x):
        return x + self.down(jnp.tanh(self.up(x)))


class Model(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([Block(rngs) for _ in range(2)])
        self.score = nnx.Linear(WIDTH, CLASSES, rngs=rngs)

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.score(x)


pretrained = Model(nnx.Rngs(0))

# %% [markdown]
# ## Adapt it
#
# A rule contains a regular expression for the paths of layers. The adapted model shares its arrays
# with `pretrained`, which is not changed. A fresh adapter does not change a single bit of the
# result.

# %%
model = jax_dora.apply_dora(
    pretrained, jax_dora.DoRARule(r"layers/\d/(up|down)", rank=4, alpha=8), rngs=nnx.Rngs(1)
)
x = jax.random.normal(jax.random.key(2), (256, WIDTH))
labels = jnp.argmax(x[:, :CLASSES] * x[:, CLASSES : 2 * CLASSES], axis=-1)
assert (model(x) == pretrained(x)).all()

# %% [markdown]
# ## Train the adapter
#
# Split the model into the adapter, which the optimizer updates, and the frozen rest. `jax.jit` only
# reads the frozen weights, so no step copies them.

# %%
graphdef, adapter, frozen = nnx.split(model, nnx.LoRAParam, ...)
optimizer = optax.adam(2e-2)


@jax.jit
def step(adapter, state, frozen):
    def loss_fn(adapter):
        logits = nnx.merge(graphdef, adapter, frozen, copy=True)(x)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    loss, gradients = jax.value_and_grad(loss_fn)(adapter)
    updates, state = optimizer.update(gradients, state, adapter)
    return optax.apply_updates(adapter, updates), state, loss


state = optimizer.init(adapter)
losses = []
for _ in range(60):
    adapter, state, loss = step(adapter, state, frozen)
    losses.append(float(loss))
model = nnx.merge(graphdef, adapter, frozen)
print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
assert losses[-1] < 0.7 * losses[0]

# %%
trained, rest = (sum(x.size for x in jax.tree.leaves(part)) for part in (adapter, frozen))
print(f"{trained} of {trained + rest} numbers trained")

# %% [markdown]
# ## Export it
#
# A PEFT folder contains the configuration and the adapter's tensors, but not the base model.

# %%
folder = Path(tempfile.mkdtemp()) / "adapter"
jax_dora.peft.save_adapter(model, folder)
print((folder / "adapter_config.json").read_text())

# %% [markdown]
# ## Load it in PEFT
#
# This is the same model in PyTorch, with the same pretrained weights. A Flax `kernel [in, out]` is
# a `weight [out, in]` in PyTorch.

# %%


class TorchBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class TorchModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([TorchBlock() for _ in range(2)])
        self.score = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.score(x)


twin = TorchModel()
weights = {}
for path, variable in nnx.to_flat_state(nnx.state(pretrained)):
    *names, name = map(str, path)
    array = torch.from_numpy(np.array(variable[...]))
    weights[".".join([*names, {"kernel": "weight"}.get(name, name)])] = (
        array.T if name == "kernel" else array
    )
twin.load_state_dict(weights)

in_peft = peft.PeftModel.from_pretrained(twin, folder).eval()
with torch.no_grad():
    theirs = in_peft(torch.from_numpy(np.array(x))).numpy()
ours = np.asarray(model(x))
print(f"largest difference of the logits: {np.abs(ours - theirs).max():.1e}")
assert np.abs(ours - theirs).max() < 1e-4
assert np.abs(np.asarray(pretrained(x)) - theirs).max() > 0.1

# %% [markdown]
# ## And back into Flax
#
# Folders that PEFT wrote are read in the same way. Here the result is the same bit for bit.

# %%
again = jax_dora.peft.load_adapter(pretrained, folder)
assert (again(x) == model(x)).all()

# %% [markdown]
# ## Or merge it
#
# Servers that do not support adapters can use a merged model. The report says how much the rounding
# of the merged weights lost.

# %%
merged, report = jax_dora.merge_dora(model, return_report=True)
print(report)
assert np.abs(np.asarray(merged(x)) - ours).max() < 1e-4
