"""Weights that are tied in a model, and not where PEFT has saved one of them."""

from typing import Any

import jax
from flax import nnx

from dora_common.peft.config import AdapterConfig
from dora_common.peft.fit import Fit
from dora_common.rules import OUTPUT_HEADS
from jax_dora.adapt.tree import replace_modules
from jax_dora.layers.base_layer import copy_attributes
from jax_dora.peft.torch_view import TorchView


class UntiedEmbed(nnx.Embed):
    """An `nnx.Embed` whose `attend` multiplies by an array of its own.

    Args:
      base: the embedding; its array is `attend`'s from now on, whatever becomes of `embedding`.
    """

    def __init__(self, base: nnx.Embed) -> None:
        copy_attributes(base, self)
        self.head = nnx.Variable(base.embedding.get_value())

    def __call__(self, inputs: jax.Array, *args: Any, **options: Any) -> jax.Array:
        """Looks tokens up as `nnx.Embed` does; a method of its own, so that `apply_dora`
        refuses the layer, whose `attend` a `DoRAEmbed` would not have."""
        return super().__call__(inputs, *args, **options)

    def attend(self, query: jax.Array, out_sharding: Any = None) -> jax.Array:
        """Returns logits [..., vocabulary] of `query` [..., features], by a head of its own."""
        query, head = self.promote_dtype((query, self.head[...]), dtype=self.dtype)
        return jax.numpy.dot(query, head.T, out_sharding=out_sharding)


def untie(model: Any, view: TorchView, fit: Fit, config: AdapterConfig) -> Any:
    """Gives the parameters of `fit.untied` arrays of their own. A head that is None becomes an
    `nnx.Linear`; where the embedding's `attend` may be the head, the embedding becomes an
    `UntiedEmbed`.

    Args:
      view: of `model`, which is changed in place.
      config: the folder's.
    """
    for name in fit.untied:
        parameter = view.parameters[name]
        heads = [one for one in view.tied_heads if view.parameters[one] == parameter]
        for head in heads:
            path, _, attribute = view.tied_heads[head].rpartition("/")
            setattr(view.modules[path], attribute, _linear(view.modules[parameter.path]))
        same = [one for one, other in view.parameters.items() if other == parameter]
        if len(same) > 1 and not heads:
            raise NotImplementedError(
                f"modules_to_save has {name}, and the module is {' and '.join(same)} at once; "
                "expected a model that does not share it, as PEFT unties it"
            )
        if not heads:
            variable = view.variable(parameter)
            setattr(view.modules[parameter.path], parameter.attribute, variable.copy())
    untied = {id(one): UntiedEmbed(one) for one in _possible_heads(view, config).values()}
    return replace_modules(model, untied)


def check_no_possible_heads(view: TorchView, config: AdapterConfig) -> None:
    """Refuses to store an embedding that may be the output head too."""
    if names := list(_possible_heads(view, config)):
        raise ValueError(
            f"modules_to_save has {', '.join(names)}, and the model has no head, so that the "
            "embedding may be it by attend, where PEFT would not tie them; expected an embedding "
            "that is no head: put jax_dora.peft.UntiedEmbed(embedding) in its place"
        )


def _possible_heads(view: TorchView, config: AdapterConfig) -> dict[str, Any]:
    """Returns the embeddings that modules_to_save names, where nothing tells whether one is the
    head."""
    lasts = {path.rpartition("/")[2] for path in view.modules}
    if view.tied_heads or not lasts.isdisjoint(OUTPUT_HEADS) or config.keeps_ties:
        return {}
    return {
        name: one.site.found.module
        for name, one in view.layers.items()
        if config.saves(f"{name}.weight") and type(one.site.found.module) is nnx.Embed
    }


def _linear(embed: Any) -> nnx.Linear:
    """Returns the head that `embed.attend` is."""
    kernel = embed.embedding.get_value().T
    return nnx.Linear(
        *kernel.shape,
        use_bias=False,
        dtype=embed.dtype,
        param_dtype=kernel.dtype,
        kernel_init=lambda *_: kernel,
        rngs=nnx.Rngs(0),
    )
