"""DoRA for nnx.LinearGeneral and nnx.Einsum: projections over any axes, written as an einsum.

An axis of the kernel is a batch axis where both the input and the result have it, an input axis
where only the input has it, an output axis where only the result has it. The norm is over the
input axes, of every output feature of every batch index.
"""

import functools
import math
import string
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jax_dora.layers.call import dropout_of_each, product
from jax_dora.layers.product import DoRAProduct
from jax_dora.layers.rule import DoRARule
from jax_dora.ops import mesh as meshes
from jax_dora.ops.quantised import stored


class Equation(NamedTuple):
    """x, kernel -> y of an einsum: a letter for each axis."""

    x: str
    kernel: str
    y: str

    def sort(self, letter: str) -> str:
        """Returns the letter for an axis of the kernel: "b" for batch, "i" for input, "o" for
        output."""
        if letter in self.y:
            return "b" if letter in self.x else "o"
        return "i"

    @property
    def order(self) -> str:
        """Returns the letters for all axes of the kernel."""
        return "".join(map(self.sort, self.kernel))

    def kernel_letters(self, sort: str) -> str:
        """Returns the kernel's axes of one sort, in the kernel's order."""
        return "".join(letter for letter in self.kernel if self.sort(letter) == sort)


class DoRAProjection(DoRAProduct):
    """The base class of `DoRALinearGeneral` and `DoRAEinsum`.

    Attributes:
      kernel: as the base layer's.
      lora_a: [*batch, *in, rank], the kernel's axes of each sort in the kernel's order.
      lora_b: [*batch, rank, *out].
      magnitude: [*batch, *out].
    """

    takes = frozenset({"keep_inner"})

    @classmethod
    def equation(cls, module: Any, ndim: int | None = None) -> Equation:
        """Returns the einsum for an input of `ndim` axes; None stands for the fewest."""
        raise NotImplementedError

    @classmethod
    def kernel_axes(cls, module: Any) -> str:
        return cls.equation(module).order

    def _result(self, operands: Mapping[str, Any]) -> jax.Array:
        x, kernel = operands["x"], stored(operands["kernel"])
        mesh = meshes.explicit(x, kernel)
        if mesh is None:
            return self._by_matrices(operands)

        def plain(x: jax.Array, kernel: jax.Array) -> jax.Array:
            its = self.equation(self, x.ndim)
            return jnp.einsum(f"{its.x},{its.kernel}->{its.y}", x, kernel.astype(x.dtype))

        spec = meshes.result_spec(plain, x, kernel)
        return meshes.with_auto_axes(self._by_matrices, mesh, spec)(operands)

    def _by_matrices(self, operands: Mapping[str, Any]) -> jax.Array:
        """Computes one plain product for each batch index."""
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
        arrays["dropout"] = dropout_of_each(operands["dropout"], arrays["kernel"].shape[0])
        if batch:
            y = jax.vmap(functools.partial(product, self))(arrays)
        else:
            y = product(self, jax.tree.map(lambda array: array[0], arrays))[None]
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
      NotImplementedError: the layer gets its equation with each call, or one that is no
        projection: an ellipsis in the kernel, a letter twice in one operand, an axis that is
        summed away on its own.
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
        """Returns the same shape and dtype as `nnx.Einsum`; deterministic and rngs are as
        `nnx.Dropout.__call__`'s."""
        if einsum_str is not None:
            raise ValueError(
                f"einsum_str is {einsum_str!r}; expected None: the layer has the equation "
                f"{self.einsum_str!r}, which its adapter is made for"
            )
        return super().__call__(inputs, out_sharding, deterministic=deterministic, rngs=rngs)


def _operands(einsum_str: str) -> tuple[str, str, str]:
    operands, y = einsum_str.replace(" ", "").split("->")
    x, kernel = operands.split(",")
    return x, kernel, y


def _refusal(einsum_str: str | None) -> str | None:
    """Says why an equation is no projection."""
    if not einsum_str:
        return (
            "einsum_str is None; expected an equation: a layer that gets it with each call has no "
            "fixed output features. Give it to the constructor of nnx.Einsum"
        )
    x, kernel, y = _operands(einsum_str)
    ellipses = tuple("..." in one for one in (x, kernel, y))
    x, y = x.replace("...", ""), y.replace("...", "")
    reason = None
    if ellipses[1]:
        reason = "the kernel has an ellipsis"
    elif ellipses[0] != ellipses[2]:
        reason = "the ellipsis is not in both the input and the result"
    elif any(len(set(one)) < len(one) for one in (x, kernel, y)):
        reason = "a letter stands twice in one operand"
    elif lone := (set(x) ^ set(kernel)) - set(y):
        reason = f"{sorted(lone)} is summed away on its own"
    elif not set(kernel) - set(x):
        reason = "the kernel has no output axis"
    elif not (set(x) & set(kernel)) - set(y):
        reason = "no axis is contracted"
    return reason and (
        f"einsum_str is {einsum_str!r}, in which {reason}; expected a projection such as "
        "'...d,dnh->...nh'"
    )
