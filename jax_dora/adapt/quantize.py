"""Quantised bases: a model's kernels as `qwix.QArray`s, in layers that keep their class."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from dora_common.rules import Rule, listing
from jax_dora.adapt.site import Site, refuse
from jax_dora.adapt.sites import sites
from jax_dora.adapt.tree import check_model, named_in_errors
from jax_dora.layers import DoRALayer
from jax_dora.layers.base_layer import padded, set_as_read
from jax_dora.layers.call import fresh_magnitude
from jax_dora.layers.quantised import LAYERS, compute_quantised
from jax_dora.layers.registry import kind_of
from jax_dora.layers.rule import DoRARule
from jax_dora.ops import quantised
from jax_dora.ops.rounding import make, round_to
from jax_dora.ops.row_wise import QTYPE, check_format, with_contiguous_columns

TILE_SIZES = {"nf4": 64, "int4": 64, "int8": None, "float8_e4m3fn": None}


def quantize[Model: nnx.Module](
    model: Model,
    qtype: str,
    *,
    path: str = "all-linear",
    tile_size: int | None = None,
    act_qtype: str | None = None,
) -> Model:
    """Returns `model` with the kernels of its linear layers quantised, adapted or not.

        model = quantize(model, "nf4")
        model = apply_dora(model, DoRARule("all-linear", rank=16, alpha=32), rngs=nnx.Rngs(0))

    A kernel becomes a `qwix.QArray`, which `jax_dora.ops` take as they take a kernel; its layer
    keeps its class, and dequantises the kernel for every product. What is trained stays as it is:
    the adapters, the biases. In an adapter that is fresh, whose magnitude is its norm, it is the
    quantised kernel's norm from then on, so that both orders of quantising and adapting make the
    same model.

    The scales have the kernel's dtype; an fp16 kernel's are fp32, whose range is not so short.

    Args:
      model: an nnx module, which is left as it is.
      qtype: "nf4", "int4", "int8" or "float8_e4m3fn".
      path: a regular expression that the whole of a layer's path has to match; or "all-linear",
        every linear projection but embeddings and the output head.
      tile_size: the number of input features, along the last input axis, that share a scale; 0
        for all of them. By default 64 for nf4 and int4, as bitsandbytes has it, whose folders then
        fit as they are: 16 levels leave no room for the range of a whole column. int8 and
        float8_e4m3fn have a scale for each output feature.
      act_qtype: "float8_e4m3fn", for kernels of that format, has the layers quantise their
        activations too, each row by its largest magnitude, so that the products with the kernels
        are FP8's (qwix's name). Gradients are computed as without it. The columns of such kernels
        lie in one piece of memory, as these products read them.

    Raises:
      TypeError: `model` is no nnx module; `path` matches what is no `nnx.Linear`,
        `nnx.LinearGeneral`, `nnx.Einsum` or `nnx.Conv`.
      TypeError: with `act_qtype`, `path` matches what is no `nnx.Linear`, nor an
        `nnx.LinearGeneral` without batch axes.
      ValueError: `qtype` is unknown; `act_qtype` does not go with it; no layer's path matches; a
        matched layer is quantised already, has given norms or weights that are not finite, or tiles
        that do not divide its kernel.
      NotImplementedError: a kernel's variable returns another value than was set.
      ModuleNotFoundError: qwix is not installed.
    """
    check_model(model)
    tile_size = _tile_size(qtype, tile_size)
    _check_act_qtype(act_qtype, qtype, tile_size)
    make(jnp.zeros((1, 1), jnp.int8), jnp.ones((1, 1)), "int8")  # Before anything is computed.
    copy = nnx.clone(model)
    found = sites(copy, stack_axis=0)
    matched = _matched(found, path)
    of_rows = nnx.Linear | nnx.LinearGeneral
    others = [
        site
        for site in matched
        if not isinstance(one := site.found.module, of_rows) or getattr(one, "batch_axis", None)
    ]
    refuse(
        others if act_qtype else [],
        TypeError,
        "act_qtype is given and path matches layers whose products are not of rows; expected "
        "nnx.Linear, and nnx.LinearGeneral without batch axes: narrow path so that it leaves "
        "out, or leave act_qtype out for",
    )
    done: dict[int, str] = {}
    for site in matched:
        parameter = site.parameter
        if id(parameter) not in done:
            done[id(parameter)] = site.names[0]
            with named_in_errors(site.names[0], "quantised"):
                _quantize_layer(site, qtype, tile_size)
                if act_qtype is not None:
                    parameter.set_value(with_contiguous_columns(parameter.get_value()))
        compute_quantised(site.found.module, act_qtype)
    for site in found:
        name = done.get(id(site.parameter)) if site.param else None
        if name is not None and not any(site is one for one in matched):
            raise ValueError(
                f"{name!r} cannot be quantised: {site.names[0]!r}, which path does not match, "
                "shares its kernel; expected both or neither"
            )
    return copy


def _tile_size(qtype: Any, tile_size: Any) -> int | None:
    if qtype not in quantised.FORMATS:
        raise ValueError(
            f"qtype is {qtype!r}; expected one of {', '.join(map(repr, quantised.FORMATS))}"
        )
    if tile_size is None:
        return TILE_SIZES[qtype]
    if isinstance(tile_size, bool) or not isinstance(tile_size, int) or tile_size < 0:
        raise ValueError(
            f"tile_size is {tile_size!r}; expected a number of input features, 0 for all of them"
        )
    return tile_size or None


def _check_act_qtype(act_qtype: Any, qtype: str, tile_size: int | None) -> None:
    check_format(act_qtype)
    if act_qtype is None:
        return
    if qtype != QTYPE or tile_size is not None:
        tiles = "" if tile_size is None else f" and tile_size {tile_size}"
        raise ValueError(
            f"act_qtype is {act_qtype!r} with qtype {qtype!r}{tiles}; expected {QTYPE!r} with a "
            "scale for each output feature: give that and no tile_size, or leave act_qtype out"
        )


def _matched(found: list[Site], path: str) -> list[Site]:
    """Returns the layers that `path` matches, all of which can be quantised."""
    rule = Rule(path, 1, 1.0)
    matched = [
        site
        for site in found
        if site.is_matched and any(rule.matches(one, linear=site.is_linear) for one in site.names)
    ]
    if not matched:
        names = {name for site in found for name in site.names}
        raise ValueError(
            f"path {path!r} matches no layer; a path is matched as a whole. The layers with "
            f"parameters are:{listing(names)}"
        )
    refuse(
        [site for site in matched if not (site.is_layer and isinstance(site.found.module, LAYERS))],
        TypeError,
        "path matches what cannot be quantised; expected nnx.Linear, nnx.LinearGeneral, "
        "nnx.Einsum and nnx.Conv themselves, whose products can read a quantised kernel: "
        "narrow path so that it leaves out",
    )
    refuse(
        [site for site in matched if quantised.is_quantised(site.parameter.get_value())],
        ValueError,
        "these layers are quantised already; expected float kernels: narrow path so that it "
        "leaves them out",
    )
    return matched


def _quantize_layer(site: Site, qtype: str, tile_size: int | None) -> None:
    module, kernel = site.found.module, site.parameter.get_value()
    adapted, cls = isinstance(module, DoRALayer), kind_of(module)
    if not adapted:
        cls.check(module, DoRARule("", getattr(module, "feature_group_count", 1), 1.0))
    if adapted and (module.given_norm is not None or module.given_g is not None):
        raise ValueError(
            "it has a given norm, which would be another kernel's; expected none: quantise first, "
            "then take norms or freeze"
        )
    if kernel.dtype not in (jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64):
        raise ValueError(f"its kernel has dtype {kernel.dtype}; expected a float dtype")
    stack = site.stack
    tile = _tile(stack.without(kernel.shape), cls.kernel_axes(module), tile_size)
    tile = stack.joined((1,) * stack.count, tile)
    half = kernel.dtype == jnp.float16
    rounded = round_to(kernel, qtype, tile, jnp.float32 if half else kernel.dtype)
    quantised.check("its kernel", rounded)
    if half and getattr(module, "dtype", None) is None:
        module.dtype = jnp.float16
    sharding = None if isinstance(kernel, Tracer) else kernel.sharding
    on_mesh = isinstance(sharding, NamedSharding)
    before = fresh_magnitude(module) if adapted else None
    set_as_read(site.parameter, placed(rounded, sharding if on_mesh else None))
    compute_quantised(module)
    if before is not None:
        magnitude = module.magnitude.get_value()
        is_fresh = magnitude.astype(before.dtype) == before
        after = fresh_magnitude(module).astype(magnitude.dtype)
        module.magnitude.set_value(jnp.where(is_fresh, after, magnitude))


def _tile(sizes: tuple[int, ...], axes: str, tile_size: int | None) -> tuple[int, ...]:
    """Returns the size of a tile along each axis of one layer's kernel: `tile_size` along the last
    input axis, and 1 along all others; the whole of every input axis where it is None."""
    if tile_size is None:
        return tuple(size if axis == "i" else 1 for axis, size in zip(axes, sizes, strict=True))
    last = axes.rindex("i")
    if sizes[last] % tile_size:
        divisors = [one for one in range(1, tile_size + 1) if sizes[last] % one == 0]
        raise ValueError(
            f"its kernel has {sizes[last]} input features along axis {last}, of which tiles of "
            f"{tile_size} do not divide; expected a multiple: give tile_size={divisors[-1]}, or 0 "
            "for a scale of all of them, or leave the layer out of path"
        )
    return tuple(tile_size if axis == last else 1 for axis in range(len(sizes)))


def placed(kernel: Any, sharding: jax.sharding.Sharding | None) -> Any:
    """Returns a quantised array sharded so, with its scales alike where they divide; as it is
    where None is given."""
    if sharding is None:
        return kernel
    if not isinstance(sharding, NamedSharding):
        return jax.device_put(kernel, sharding)
    mesh, names = sharding.mesh, padded(sharding.spec, kernel.ndim)

    def part(one: jax.Array) -> jax.Array:
        parts = [math.prod(mesh.shape[name] for name in jax.tree.leaves(axis)) for axis in names]
        kept = [
            axis if size % count == 0 else None
            for axis, size, count in zip(names, one.shape, parts, strict=True)
        ]
        return jax.device_put(one, NamedSharding(mesh, PartitionSpec(*kept)))

    return jax.tree.map(part, kernel)
