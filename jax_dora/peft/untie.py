"""Unties weights that are tied in a model, if a PEFT folder stores only one of them."""

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


def untie(model: Any, view: TorchView, fit: Fit, config: AdapterConfig) -> Any:
    """Gives the parameters in `fit.untied` arrays of their own.

    A head that is None becomes an `nnx.Linear`. If the embedding's `attend` may be the head, the
    embedding becomes an `UntiedEmbed`.

    Args:
      model: the model, which is changed in place.
      view: the view of `model`.
      fit: the destinations of the folder's tensors.
      config: the folder's configuration.

    Raises:
      NotImplementedError: a parameter to untie belongs to one module with several names.
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
                "expected a model that does not share the module, since PEFT unties it"
            )
        if not heads:
            variable = view.variable(parameter)
            setattr(view.modules[parameter.path], parameter.attribute, variable.copy())
    untied = {id(one): UntiedEmbed(one) for one in _possible_heads(view, config).values()}
    return replace_modules(model, untied)


def check_no_possible_heads(view: TorchView, config: AdapterConfig) -> None:
    """Raises ValueError if modules_to_save has an embedding that may also be the output head."""
    if names := list(_possible_heads(view, config)):
        raise ValueError(
            f"modules_to_save has {', '.join(names)}, and the model has no head, so that the "
            "embedding's attend may be the head, but PEFT would untie them; expected an embedding "
            "that is not the head: replace it with jax_dora.peft.UntiedEmbed(embedding)"
        )


def _possible_heads(view: TorchView, config: AdapterConfig) -> dict[str, Any]:
    """Returns the embeddings in modules_to_save that may also be the output head.

    Returns none of them if the model has a head of its own or the configuration keeps ties.
    """
    last_parts = {path.rpartition("/")[2] for path in view.modules}
    if view.tied_heads or not last_parts.isdisjoint(OUTPUT_HEADS) or config.keeps_ties:
        return {}
    return {
        name: one.site.found.module
        for name, one in view.layers.items()
        if config.saves(f"{name}.weight") and type(one.site.found.module) is nnx.Embed
    }


def _linear(embed: Any) -> nnx.Linear:
    """Returns an output head that computes the same as `embed.attend`."""
    kernel = embed.embedding.get_value().T
    return nnx.Linear(
        *kernel.shape,
        use_bias=False,
        dtype=embed.dtype,
        param_dtype=kernel.dtype,
        kernel_init=lambda *_: kernel,
        rngs=nnx.Rngs(0),
    )
