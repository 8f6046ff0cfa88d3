"""What several layers that read the same input do together."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from jax_dora.layers.dora_layer import DoRALayer
from jax_dora.layers.quantised_kernel import takes_codes
from jax_dora.ops.projection import RESULT_NAME
from jax_dora.ops.row_scaled import coded, coded_by


def apply_layers(layers: Sequence[Any], inputs: Any) -> list[jax.Array]:
    """Returns the results of several layers for the same inputs:

        q, k, v = jax_dora.apply_layers([self.q_proj, self.k_proj, self.v_proj], x)

    A model can call this whatever its layers are. Similar layers of a bank are computed together:
    with few tokens, that takes as many launches of the bank's kernels as a single layer. All others
    are called one after the other. Every result has the checkpoint name
    `jax_dora.ops.RESULT_NAME`, which DoRA layers give to theirs.

    Args:
      layers: the layers; any callables of [..., in].
      inputs: [..., in], or the result of `layer_inputs` for these layers.
    """
    # A class of layers can have `apply_together`, which returns None if it cannot.
    together = getattr(type(layers[0]), "apply_together", None)
    results = together(layers, inputs) if together and len(layers) > 1 else None
    if results is None:
        results = [layer(inputs) for layer in layers]
    return [named_result(layer, y) for layer, y in zip(layers, results, strict=True)]


def layer_inputs(
    layers: Sequence[Any],
    x: jax.Array,
    largest: Callable[[], jax.Array | tuple[jax.Array, jax.Array]] | None = None,
) -> Any:
    """Returns x [..., in] as all of these layers take it: with FP8 codes that are made once, if all
    of them quantise their inputs (`jax_dora.quantize` with `act_qtype`), and otherwise unchanged.

    With codes, the result is a pytree whose first leaf is x.

    Args:
      layers: the layers that read x.
      x: [..., in].
      largest: returns max |x| of each row f32[...], if that is known from the computation of x; or
        (x, max |x|), if x is computed in another way with it. It is called for codes only.
    """
    if not all(map(takes_codes, layers)):
        return x
    if largest is None:
        return coded(x)
    found = largest()
    x, found = found if isinstance(found, tuple) else (x, found)
    return coded_by(found, x)


def named_result(layer: Any, y: jax.Array) -> jax.Array:
    """Returns the result `y` of a layer with its checkpoint name."""
    return y if isinstance(layer, DoRALayer) else checkpoint_name(y, RESULT_NAME)
