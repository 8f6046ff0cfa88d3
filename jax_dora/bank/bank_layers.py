"""Layers in which each row of a batch uses an adapter of a bank."""

import functools
import math
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from dora_common.slots import check_rows
from jax_dora.adapt.weight import AdaptableWeight
from jax_dora.layers import DoRALinear
from jax_dora.layers.base_layer import class_attribute, copy_attributes, new_instance
from jax_dora.layers.contraction import Contraction
from jax_dora.layers.einsum import DoRAEinsum, DoRALinearGeneral
from jax_dora.layers.quantised_kernel import compute_as_stored
from jax_dora.ops.bank_linear import bank_linears
from jax_dora.ops.bank_projection import bank_projections
from jax_dora.ops.bank_slots import SlotProjection, Slots
from jax_dora.ops.dispatch import mesh as meshes
from jax_dora.ops.row_scaled import plain

_BANK_ATTRIBUTES = frozenset(
    f"bank_{name}" for name in (*Slots._fields, "ids", "step", "layer", "implementation", "kernel")
)


class BankArray(nnx.Variable):
    """An array of a bank, in a layer.

    In a loop over the layers of a stack, XLA would copy each layer's part of it. A model can leave
    these arrays out of the loop's slices, since every layer knows its number in the stack.
    """


class BankRows(nnx.Variable):
    """A layer's variables that select the adapter of each row."""


class BankLayer(nnx.Module):
    """A projection that shares the base layer's parameters and adds the adapters of a bank.

    Attributes:
      bank_lora_a, bank_lora_b, bank_g, bank_scale, bank_rank: the arrays of `ops.bank.Slots`, with
        the stack's axes in front. If a loop takes one layer of a stack after the other, these
        arrays may remain unsliced, which avoids copies; `bank_layer` then selects the layer.
      bank_ids: i32[*stack, batch], the slot of each row.
      bank_step: [*stack, …], the result of `ops.bank.step_of`, shared by all layers; or None.
      bank_layer: i32[*stack], the layer's number in its stack.
      bank_implementation: the same as for `with_bank`.
    """

    adapted_type: ClassVar[Any]  # the DoRA layer's class
    instead_of_adapting: ClassVar[str] = "take the model that with_bank was given"

    kernel: nnx.Param
    bias: nnx.Param | None
    dtype: Any
    precision: Any
    promote_dtype: Any

    def __init__(
        self,
        base: Any,
        projection: AdaptableWeight,
        slots: Slots,
        ids: jax.Array,
        step: jax.Array | None,
        implementation: str | None,
    ) -> None:
        copy_attributes(base, self)
        compute_as_stored(self)
        for name, array in slots._asdict().items():
            setattr(self, f"bank_{name}", BankArray(array))
        self.bank_implementation = implementation
        stack = projection.stack.shape
        self.bank_ids = BankRows(jnp.broadcast_to(ids, (*stack, *ids.shape)))
        # Like the adapters, this array may remain unsliced in a loop over layers.
        steps = None if step is None else jnp.broadcast_to(step, (*stack, *step.shape))
        self.bank_step = BankArray(steps)
        # Made with NumPy, so that the array and its slices are constants in a compiled program.
        numbers = np.arange(int(np.prod(stack)), dtype=np.int32)
        self.bank_layer = BankRows(jnp.asarray(numbers.reshape(stack)))

    def _slots(self) -> tuple[jax.Array, SlotProjection]:
        """Returns the ids, and a projection with the adapters and its first slot: those of a whole
        stack are concatenated."""
        slots = Slots(*(getattr(self, f"bank_{name}").get_value() for name in Slots._fields))
        ids, layer = self.bank_ids[...], self.bank_layer[...]
        lead = slots.lora_a.ndim - 3
        if ids.ndim > 1 or layer.ndim:
            raise ValueError(
                f"the layers of a stack of shape {layer.shape} are called at once; expected a call "
                "of one layer after the other, as in nnx.scan"
            )
        if not lead:
            return ids, SlotProjection(slots)
        count = slots.lora_a.shape[lead]
        whole = jax.tree.map(lambda array: array.reshape(-1, *array.shape[lead + 1 :]), slots)
        return ids, SlotProjection(whole, first=layer * count, slot_count=count)

    def _step(self) -> jax.Array | None:
        step = self.bank_step.get_value()
        return None if step is None else step.reshape(-1, *step.shape[-2:])[0]

    def _promoted(self, inputs: Any) -> tuple[jax.Array, Any, Any]:
        """Returns inputs, without codes, kernel and bias (or None) in the dtype of the products."""
        bias = None if self.bias is None else self.bias[...]
        return self.promote_dtype((plain(inputs), self.kernel[...], bias), dtype=self.dtype)

    def _projection(self, inputs: Any) -> SlotProjection:
        _, projection = self._slots()
        return projection._replace(base=self._unbiased()(inputs), bias=self._promoted(inputs)[2])

    def _unbiased(self) -> Any:
        """Returns the base layer without its bias, since the magnitude does not scale the bias."""
        base = new_instance(self.adapted_type.base_type)
        copy_attributes(self, base, leave_out={"bias", "use_bias", *_BANK_ATTRIBUTES})
        base.bias, base.use_bias = nnx.data(None), False
        return base

    def _call(self, inputs: Any, **settings: Any) -> jax.Array:
        """Returns the layer's result; `settings` are passed to the base layer."""
        x, _, bias = self._promoted(inputs)
        base = self._unbiased()(inputs, **settings)
        ids, held = self._slots()
        contraction = self.adapted_type.contraction_of(self, ndim=inputs.ndim)
        _check_rows(contraction, x.shape, ids)
        if bias is not None:
            bias = contraction.bias_matrices(bias)[0]
        batch, in_features, out_features = (
            array.shape[-1] for array in (ids, held.slots.lora_a, held.slots.lora_b)
        )

        def apply_adapters(operands: Any) -> jax.Array:
            base, x, bias, slots, ids, step, first = operands
            matrix = contraction.arrange_result(base)
            tokens = math.prod(matrix.shape[1 : len(contraction.rows)])
            base = matrix.reshape(batch, tokens, out_features)
            projection = SlotProjection(
                slots, base, first=first, slot_count=held.slot_count, bias=bias
            )
            (y,) = bank_linears(
                contraction.arrange_input(x).reshape(batch, tokens, in_features),
                [projection],
                ids,
                step=step,
                precision=self.precision,
                implementation=self.bank_implementation,
            )
            return contraction.result(y.reshape(matrix.shape))

        operands = (base, x, bias, held.slots, ids, self._step(), held.first)
        spec = functools.partial(meshes.spec, base)
        compute = meshes.on_explicit_axes(apply_adapters, spec, *jax.tree.leaves(operands))
        return compute(operands)


def _apply_together(layers: Sequence[Any], x: Any) -> list[jax.Array] | None:
    """Returns the results of several layers for the same x, an array or `RowScaled`; None if they
    cannot be computed together."""
    if not _can_apply_together(layers, x):
        return None
    if all(layer._takes_whole_projection(x) for layer in layers):
        return _apply_to_prompts(layers, x)
    first = layers[0]
    _check_rows(first.adapted_type.contraction_of(first, ndim=3), x.shape, first.bank_ids[...])
    return list(
        bank_linears(
            first._promoted(x)[0],
            [layer._projection(x) for layer in layers],
            first.bank_ids[...],
            step=first._step(),
            precision=first.precision,
            implementation=first.bank_implementation,
        )
    )


def _can_apply_together(layers: Sequence[Any], x: Any) -> bool:
    """Returns whether layers are of a bank and can be computed together."""
    if not all(isinstance(layer, BankLinear) for layer in layers) or x.ndim != 3:
        return False
    if meshes.explicit(*jax.tree.leaves([x, *map(nnx.state, layers)])) is not None:
        return False

    def kind(layer: Any) -> tuple[Any, ...]:
        return layer.dtype, layer.kernel.dtype, str(layer.precision)

    return len({kind(layer) for layer in layers}) == 1


def _check_rows(contraction: Contraction, shape: tuple[int, ...], ids: jax.Array) -> None:
    check_rows(shape, ids.shape[0], has_rows=contraction.x[0] in contraction.y)


class BankLinear(BankLayer, nnx.Linear):
    """`nnx.Linear` with adapters of a bank. `bank_kernel` [*stack, in, out] is the kernel again,
    which may remain unsliced like the adapters; None if it is quantised or not stacked along
    leading axes."""

    adapted_type = class_attribute(DoRALinear)
    can_take_codes = True
    apply_together = class_attribute(_apply_together)  # see `jax_dora.apply_layers`

    def __init__(self, base: Any, projection: AdaptableWeight, *others: Any) -> None:
        super().__init__(base, projection, *others)
        kernel = base.kernel.get_value()
        is_kept = isinstance(kernel, jax.Array) and projection.stack.is_leading
        self.bank_kernel = BankArray(kernel if is_kept else None)

    def __call__(self, inputs: Any, out_sharding: Any = None) -> jax.Array:
        if out_sharding is None and self._takes_whole_projection(inputs):
            return _apply_to_prompts([self], inputs)[0]
        return self._call(inputs, out_sharding=out_sharding)

    def _takes_whole_projection(self, inputs: Any) -> bool:
        """Returns whether one kernel may compute the base's product and the adapters' together:
        inputs with several tokens per row, and a base layer that multiplies by a plain kernel
        without settings."""
        kernel = self.kernel.get_value()
        return (
            inputs.ndim == 3
            and inputs.shape[1] > 1
            and isinstance(kernel, jax.Array)
            and self.dot_general is lax.dot_general
            and self.preferred_element_type is None
            and meshes.explicit(inputs, kernel, self.bank_ids[...]) is None
        )

    def _whole_projection(self, inputs: jax.Array) -> SlotProjection:
        x, kernel, bias = self._promoted(inputs)
        ids, projection = self._slots()
        _check_rows(self.adapted_type.contraction_of(self, ndim=3), x.shape, ids)
        stack, layer = self.bank_kernel.get_value(), None
        if stack is not None and stack.ndim > 2 and stack.dtype == kernel.dtype:
            kernel, layer = stack.reshape(-1, *stack.shape[-2:]), self.bank_layer[...]
        return projection._replace(kernel=kernel, layer=layer, bias=bias)


def _apply_to_prompts(layers: Sequence[BankLinear], inputs: jax.Array) -> list[jax.Array]:
    """Returns the layers' results for the same prompts, where kernels may compute base as well."""
    first = layers[0]
    return list(
        bank_projections(
            first._promoted(inputs)[0],
            [layer._whole_projection(inputs) for layer in layers],
            first.bank_ids[...],
            precision=first.precision,
            implementation=first.bank_implementation,
        )
    )


class BankLinearGeneral(BankLayer, nnx.LinearGeneral):
    """`nnx.LinearGeneral` with adapters of a bank."""

    adapted_type = class_attribute(DoRALinearGeneral)

    def __call__(self, inputs: jax.Array, out_sharding: Any = None) -> jax.Array:
        return self._call(inputs, out_sharding=out_sharding)


class BankEinsum(BankLayer, nnx.Einsum):
    """`nnx.Einsum` with adapters of a bank."""

    adapted_type = class_attribute(DoRAEinsum)

    def __call__(
        self, inputs: jax.Array, einsum_str: str | None = None, out_sharding: Any = None
    ) -> jax.Array:
        if einsum_str is not None:
            raise ValueError(
                f"einsum_str is {einsum_str!r}; expected None: the bank's adapters are made for "
                f"the layer's own einsum_str, {self.einsum_str!r}"
            )
        return self._call(inputs, out_sharding=out_sharding)


LAYER_CLASSES: dict[type[Any], type[BankLayer]] = {
    kind.adapted_type: kind for kind in (BankLinear, BankLinearGeneral, BankEinsum)
}
