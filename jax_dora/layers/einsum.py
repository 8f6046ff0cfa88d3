"""DoRA for nnx.LinearGeneral and nnx.Einsum: projections over any axes, written as an einsum."""

import functools
import string
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jax_dora.layers.base_layer import class_attribute
from jax_dora.layers.contraction import Contraction, why_no_projection
from jax_dora.layers.dora_projection import DoRAProjection, projection_of
from jax_dora.layers.rule import DoRARule
from jax_dora.ops import Dropout
from jax_dora.ops.dispatch import mesh as meshes
from jax_dora.ops.quantised import stored


class DoRAContraction(DoRAProjection):
    """The base class of `DoRALinearGeneral` and `DoRAEinsum`: lora_a [*batch, *in, rank], lora_b
    [*batch, rank, *out] and magnitude [*batch, *out], with the axes of each role in the kernel's
    order."""

    takes = frozenset({"keep_inner"})

    @classmethod
    def kernel_axes(cls, module: Any) -> str:
        return cls.contraction_of(module).roles

    @property
    def _function(self) -> Callable[..., jax.Array]:
        return self._on_any_mesh

    def _on_any_mesh(self, **operands: Any) -> jax.Array:
        x, kernel = operands["x"], stored(operands["kernel"])
        contraction = self.contraction_of(self, self.rank, x.ndim)

        def base_result(x: jax.Array, kernel: jax.Array) -> jax.Array:
            einsum = f"{contraction.x},{contraction.weight}->{contraction.y}"
            return jnp.einsum(einsum, x, kernel.astype(x.dtype))

        def compute(operands: dict[str, Any]) -> jax.Array:
            names = ("kernel", "lora_a", "lora_b", "g")
            arrays = contraction.matrices(**{name: operands[name] for name in names})
            bias = operands["bias"]
            arrays["bias"] = None if bias is None else contraction.bias_matrices(bias)
            return contraction(multiply, operands["x"], arrays, operands["dropout"])

        product = projection_of(self)

        def multiply(x: jax.Array, arrays: Any, dropout: Dropout | None) -> jax.Array:
            return product(x=x, dropout=dropout, **arrays)

        spec = functools.partial(meshes.result_spec, base_result, x, kernel)
        return meshes.on_explicit_axes(compute, spec, x, kernel)(operands)


class DoRALinearGeneral(DoRAContraction, nnx.LinearGeneral):
    """`nnx.LinearGeneral` with an adapter; see `DoRAContraction`."""

    base_type = class_attribute(nnx.LinearGeneral)
    __call__ = DoRAProjection.__call__  # nnx.capture does not see inherited methods.

    @classmethod
    def is_linear(cls, module: Any) -> bool:
        return True

    @classmethod
    def unstacked_shape(cls, module: Any) -> tuple[int, ...]:
        return (*module.batch_axis.values(), *module.in_features, *module.out_features)

    @classmethod
    def contraction_of(cls, module: Any, rank: int = 1, ndim: int = 0) -> Contraction:
        batch, contracted = len(module.batch_axis), module.axis
        if not ndim:
            # Axes that count from the start and axes that count from the end stay apart.
            from_start = max(batch, *(axis + 1 for axis in contracted))
            ndim = max(batch + len(contracted), from_start - min(0, *contracted))
        letters = iter(string.ascii_letters)
        x = [next(letters) for _ in range(ndim)]
        inputs = [x[axis] for axis in sorted(axis % ndim for axis in contracted)]
        out = [next(letters) for _ in module.out_features]
        kernel = [*x[:batch], *inputs, *out]
        y = [*(letter for letter in x if letter not in inputs), *out]
        contraction = Contraction.of_letters("".join(x), "".join(kernel), "".join(y))
        return contraction.with_sizes(cls.unstacked_shape(module), rank)


class DoRAEinsum(DoRAContraction, nnx.Einsum):
    """`nnx.Einsum` with an adapter; see `DoRAContraction`.

    Raises:
      NotImplementedError: the layer has no equation of its own, or one that is not a projection:
        the kernel has an ellipsis, a letter occurs twice in one operand, or an axis of one operand
        alone is summed.
    """

    base_type = class_attribute(nnx.Einsum)

    @classmethod
    def check(cls, base: Any, options: DoRARule) -> None:
        super().check(base, options)
        if refusal := why_no_projection(base.einsum_str):
            raise NotImplementedError(refusal)

    @classmethod
    def is_linear(cls, module: Any) -> bool:
        return why_no_projection(module.einsum_str) is None

    @classmethod
    def contraction_of(cls, module: Any, rank: int = 1, ndim: int = 0) -> Contraction:
        contraction = Contraction.of_einsum(module.einsum_str, ndim)
        return contraction.with_sizes(cls.unstacked_shape(module), rank)

    def __call__(
        self,
        inputs: jax.Array,
        einsum_str: str | None = None,
        out_sharding: Any = None,
        *,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | nnx.RngStream | jax.Array | None = None,
    ) -> jax.Array:
        """Returns what `nnx.Einsum` does; for deterministic and rngs see `nnx.Dropout.__call__`."""
        if einsum_str is not None:
            raise ValueError(
                f"einsum_str is {einsum_str!r}; expected None: the adapter fits the layer's own "
                f"equation, {self.einsum_str!r}"
            )
        return super().__call__(inputs, out_sharding, deterministic=deterministic, rngs=rngs)
