"""Output heads that are tied to an embedding, and separate ones that compute the same."""

from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx

from dora_common.rules import OUTPUT_HEADS
from jax_dora.adapt.tree import find_modules, replace_modules
from jax_dora.layers.base_layer import copy_attributes

# Names of output heads. Such an attribute is None if the model ties the head to its embedding.
_TIED_HEADS = ("lm_head", "embed_out")


class UntiedEmbed(nnx.Embed):
    """An `nnx.Embed` with a separate array for `attend`.

    Args:
      base: the embedding. `attend` uses its current array, even if `embedding` changes later.
    """

    def __init__(self, base: nnx.Embed) -> None:
        copy_attributes(base, self)
        self.head = nnx.Variable(base.embedding.get_value())

    def __call__(self, inputs: jax.Array, *args: Any, **options: Any) -> jax.Array:
        """Looks up tokens as in `nnx.Embed`."""
        # This override makes `apply_dora` reject the class: `DoRAEmbed` would lose its `attend`.
        return super().__call__(inputs, *args, **options)

    def attend(self, query: jax.Array, out_sharding: Any = None) -> jax.Array:
        """Returns logits [..., vocabulary] for `query` [..., features], computed with `head`."""
        query, head = self.promote_dtype((query, self.head[...]), dtype=self.dtype)
        return jax.numpy.dot(query, head.T, out_sharding=out_sharding)


def tied_heads(modules: Mapping[str, Any]) -> list[str]:
    """Returns the paths of the output heads that are None, since the model ties them to its
    embedding, among the modules by path; none if there are several embeddings."""
    if sum(isinstance(module, nnx.Embed) for module in modules.values()) != 1:
        return []
    return [
        "/".join(filter(None, (path, attribute)))
        for path, module in modules.items()
        for attribute in _TIED_HEADS
        if getattr(module, attribute, module) is None
    ]


def has_own_head(modules: Mapping[str, Any]) -> bool:
    """Returns whether a module of the model has the name of an output head."""
    return any(path.rpartition("/")[2] in OUTPUT_HEADS for path in modules)


def untie_head(modules: Mapping[str, Any], head: str, embed: Any) -> None:
    """Sets the head at a path from `tied_heads` to an `nnx.Linear` that computes the same as
    `attend` of `embed`. `modules` are the model's, by path."""
    path, _, attribute = head.rpartition("/")
    kernel = embed.embedding.get_value().T
    linear = nnx.Linear(
        *kernel.shape,
        use_bias=False,
        dtype=embed.dtype,
        param_dtype=kernel.dtype,
        kernel_init=lambda *_: kernel,
        rngs=nnx.Rngs(0),
    )
    setattr(modules[path], attribute, linear)


def untie_heads(model: Any, embed: Any) -> Any:
    """Returns `model`, changed in place, with a head that keeps the array of `embed` even if that
    changes: an `nnx.Linear` where the head is None; or, if `attend` may be the head since there is
    no other, an `UntiedEmbed` instead of the embedding."""
    modules = {paths[0]: module for paths, module in find_modules(model).items()}
    heads = tied_heads(modules)
    for head in heads:
        untie_head(modules, head, embed)
    if heads or has_own_head(modules):
        return model
    return replace_modules(model, {id(embed): UntiedEmbed(embed)})
