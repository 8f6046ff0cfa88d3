"""DoRA for nnx.LinearGeneral and nnx.Einsum: projections over any axes, written as an einsum.

Each axis of the kernel has one of three roles:

- batch axis: the input and the result have it too.
- input axis: only the input has it too, and the product contracts it.
- output axis: only the result has it too.

The norm is taken over the input axes, for every output feature of every batch index.
"""

import functools
import math
import string
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jax_dora.layers.product import DoRAProduct, matrix_product
from jax_dora.layers.rule import DoRARule
from jax_dora.layers.seeds import split_dropout
from jax_dora.ops.dispatch import mesh as meshes
from jax_dora.ops.quantised import stored


class Equation(NamedTuple):
    """The einsum x, kernel -> y: one letter for each axis of the operands and the result."""

    x: str
    kernel: str
    y: str

    def sort(self, letter: str) -> str:
        """Returns the role of the kernel axis `letter`: "b" (batch), "i" (input) or "o"
        (output)."""
        if letter in self.y:
            return "b" if letter in self.x else "o"
        return "i"

    @property
    def order(self) -> str:
        """The roles of all kernel axes, as one string."""
        return "".join(map(self.sort, self.kernel))

    def kernel_letters(self, sort: str) -> str:
        """Returns the letters of the kernel axes with the role `sort`, in the kernel's order."""
        return "".join(letter for letter in self.kernel if self.sort(letter) == sort)


class DoRAProjection(DoRAProduct):
    """The base class of `DoRALinearGeneral` and `DoRAEinsum`.

    Attributes:
      kernel: as in the base layer.
      lora_a: [*batch, *in, rank]; the axes of each role are in the kernel's order.
      lora_b: [*batch, rank, *out].
      magnitude: [*batch, *out].
    """

    takes = frozenset({"keep_inner"})

    @classmethod
    def equation(cls, module: Any, ndim: int | None = None) -> Equation:
        """Returns the einsum for an input of `ndim` axes; None means the smallest possible
        number."""
        raise NotImplementedError

    @classmethod
    def kernel_axes(cls, module: Any) -> str:
        return cls.equation(module).order

    @property
    def _function(self) -> Callable[..., jax.Array]:
        return self._on_any_mesh

    def _on_any_mesh(self, **operands: Any) -> jax.Array:
        x, kernel = operands["x"], stored(operands["kernel"])

        def base_result(x: jax.Array, kernel: jax.Array) -> jax.Array:
            equation = self.equation(self, x.ndim)
            einsum = f"{equation.x},{equation.kernel}->{equation.y}"
            return jnp.einsum(einsum, x, kernel.astype(x.dtype))

        spec = functools.partial(meshes.result_spec, base_result, x, kernel)
        return meshes.on_explicit_axes(self._by_matrices, spec, x, kernel)(operands)

    def _by_matrices(self, operands: Mapping[str, Any]) -> jax.Array:
        """Computes the result as one matrix product for each batch index."""
        x, kernel, bias = operands["x"], operands["kernel"], operands["bias"]
        equation, layout = self.equation(self, x.ndim), self.layout
        batch, in_, out = map(equation.kernel_letters, "bio")
        rows = "".join(letter for letter in equation.x if letter not in batch + in_)
        size = dict(zip(equation.x, x.shape, strict=True))
        size |= dict(zip(equation.kernel, kernel.shape, strict=True))

        if bias is not None:
            letters = [letter for letter in equation.y if letter in equation.kernel]
            bias = bias.reshape([size[letter] for letter in letters])
            bias = bias.transpose([letters.index(letter) for letter in batch + out])
            bias = bias.reshape(layout.magnitude.matrices[0], -1)

        order = [equation.x.index(letter) for letter in batch + rows + in_]
        shape = (
            math.prod(size[letter] for letter in batch),
            *(size[letter] for letter in rows),
            math.prod(size[letter] for letter in in_),
        )
        arrays = dict(operands) | {"x": x.transpose(order).reshape(shape), "bias": bias}
        for name in ("kernel", "lora_a", "lora_b"):
            arrays[name] = getattr(layout, name).to_matrices(operands[name])
        arrays["g"] = layout.magnitude.to_matrices(operands["g"])[:, 0]
        arrays["dropout"] = split_dropout(operands["dropout"], arrays["kernel"].shape[0])
        product = matrix_product(self)
        if batch:
            y = jax.vmap(lambda arrays: product(**arrays))(arrays)
        else:
            y = product(**jax.tree.map(lambda array: array[0], arrays))[None]
        y = y.reshape([size[letter] for letter in batch + rows + out])
        return y.transpose([(batch + rows + out).index(letter) for letter in equation.y])


class DoRALinearGeneral(DoRAProjection, nnx.LinearGeneral):
    """`nnx.LinearGeneral` with an adapter; see `DoRAProjection`."""

    base_type = nnx.LinearGeneral

    @classmethod
    def is_linear(cls, module: Any) -> bool:
        return True

    @classmethod
    def unstacked_shape(cls, module: Any) -> tuple[int, ...]:
        return (*module.batch_axis.values(), *module.in_features, *module.out_features)

    @classmethod
    def equation(cls, module: Any, ndim: int | None = None) -> Equation:
        batch, contracted = len(module.batch_axis), module.axis
        if ndim is None:
            ndim = max(
                batch + len(contracted), *(axis + 1 if axis >= 0 else -axis for axis in module.axis)
            )
        letters = iter(string.ascii_letters)
        x = [next(letters) for _ in range(ndim)]
        inputs = [x[axis] for axis in sorted(axis % ndim for axis in contracted)]
        out = [next(letters) for _ in module.out_features]
        kernel = [*x[:batch], *inputs, *out]
        y = [*(letter for letter in x if letter not in inputs), *out]
        return Equation("".join(x), "".join(kernel), "".join(y))


class DoRAEinsum(DoRAProjection, nnx.Einsum):
    """`nnx.Einsum` with an adapter; see `DoRAProjection`.

    Raises:
      NotImplementedError: the layer has no equation of its own, or one that is not a projection:
        the kernel has an ellipsis, a letter occurs twice in one operand, or an axis of one operand
        alone is summed.
    """

    base_type = nnx.Einsum

    @classmethod
    def check(cls, base: Any, options: DoRARule) -> None:
        super().check(base, options)
        if refusal := _refusal(base.einsum_str):
            raise NotImplementedError(refusal)

    @classmethod
    def is_linear(cls, module: Any) -> bool:
        return _refusal(module.einsum_str) is None

    @classmethod
    def unstacked_shape(cls, module: Any) -> tuple[int, ...]:
        return tuple(module.kernel_shape)

    @classmethod
    def equation(cls, module: Any, ndim: int | None = None) -> Equation:
        x, kernel, y = _operands(module.einsum_str)
        named = len(x.replace("...", ""))
        free = (letter for letter in string.ascii_letters if letter not in x + kernel + y)
        ellipsis = "".join(next(free) for _ in range((ndim or named) - named))
        return Equation(x.replace("...", ellipsis), kernel, y.replace("...", ellipsis))

    def __call__(
        self,
        inputs: jax.Array,
        einsum_str: str | None = None,
        out_sharding: Any = None,
        *,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | nnx.RngStream | jax.Array | None = None,
    ) -> jax.Array:
        """Returns an array with the shape and dtype of `nnx.Einsum`'s result. For deterministic and
        rngs see `nnx.Dropout.__call__`."""
        if einsum_str is not None:
            raise ValueError(
                f"einsum_str is {einsum_str!r}; expected None: the adapter fits the layer's own "
                f"equation, {self.einsum_str!r}"
            )
        return super().__call__(inputs, out_sharding, deterministic=deterministic, rngs=rngs)


def _operands(einsum_str: str) -> tuple[str, str, str]:
    operands, y = einsum_str.replace(" ", "").split("->")
    x, kernel = operands.split(",")
    return x, kernel, y


def _refusal(einsum_str: str | None) -> str | None:
    """Returns why an equation is not a projection, or None if it is one."""
    if not einsum_str:
        return (
            "einsum_str is None; expected an equation: a layer that gets its equation with each "
            "call has no fixed output features. Pass it to the constructor of nnx.Einsum"
        )
    x, kernel, y = _operands(einsum_str)
    ellipses = tuple("..." in letters for letters in (x, kernel, y))
    x, y = x.replace("...", ""), y.replace("...", "")
    reason = None
    if ellipses[1]:
        reason = "the kernel has an ellipsis"
    elif ellipses[0] != ellipses[2]:
        reason = "the ellipsis is not in both the input and the result"
    elif any(len(set(letters)) < len(letters) for letters in (x, kernel, y)):
        reason = "a letter occurs twice in one operand"
    elif lone := (set(x) ^ set(kernel)) - set(y):
        reason = f"{sorted(lone)} occurs in one operand alone and is summed away"
    elif not set(kernel) - set(x):
        reason = "the kernel has no output axis"
    elif not (set(x) & set(kernel)) - set(y):
        reason = "no axis is contracted"
    return reason and (
        f"einsum_str is {einsum_str!r}, in which {reason}; expected a projection such as "
        "'...d,dnh->...nh'"
    )
