"""`quantize`: replaces a model's kernels by quantised ones, in layers that keep their class."""

import logging
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from dora_common.hyperparameters import is_integer
from dora_common.rules import ALL_LINEAR, Rule, listing
from jax_dora.adapt.adapted_class import adapter_of
from jax_dora.adapt.inventory import find_weights
from jax_dora.adapt.tree import check_model, named_in_errors
from jax_dora.adapt.weight import AdaptableWeight, raise_for, raise_for_no_parameters
from jax_dora.layers import kind_of
from jax_dora.layers.base_layer import check_has_values, pad_axes, set_and_verify
from jax_dora.layers.magnitude import fresh_magnitude
from jax_dora.layers.quantised_kernel import LAYERS, compute_quantised
from jax_dora.layers.rule import DoRARule
from jax_dora.layers.stack import without_stack_axes
from jax_dora.ops import check, quantised
from jax_dora.ops.rounding import make, round_to
from jax_dora.ops.row_scaled import QTYPE, check_formats, with_contiguous_columns

_LOG = logging.getLogger("jax_dora")

TILE_SIZES = {"nf4": 64, "int4": 64, "int8": None, "float8_e4m3fn": None}


def quantize[Model: nnx.Module](
    model: Model,
    qtype: str,
    *,
    path: str = "all-linear",
    tile_size: int | None = None,
    act_qtype: str | None = None,
    bwd_qtype: str | None = None,
) -> Model:
    """Returns a copy of `model` whose linear layers, adapted or not, have quantised kernels.

        model = quantize(model, "nf4")
        model = apply_dora(model, DoRARule("all-linear", rank=16, alpha=32), rngs=nnx.Rngs(0))

    A kernel becomes a `qwix.QArray`, which `jax_dora.ops` accept in place of an array. The layer
    keeps its class and dequantises the kernel for every product. Adapters and biases stay as they
    are, with one exception: a fresh adapter, whose magnitude equals its norm, gets the norm of the
    quantised kernel. So quantising first and adapting first give the same model.

    Weights that the code of their modules reads can be quantised once they are adapted, and
    "all-linear" then selects them too. Their products dequantise them, and the backward pass keeps
    these arrays unless the module is rematerialised.

    The scales have the kernel's dtype, or fp32 for an fp16 kernel, because the range of fp16 is too
    small. A tile whose numbers are below about 1e-18 becomes zeros, because the squares of its
    scale are too small for fp32.

    Args:
      model: an nnx module, which stays unchanged.
      qtype: "nf4", "int4", "int8" or "float8_e4m3fn".
      path: a regular expression that must match a layer's whole path; or "all-linear", every linear
        projection but embeddings and the output head.
      tile_size: the number of input features, along the last input axis, that share a scale; 0
        means all of them. The default is 64 for nf4 and int4, since 16 levels cannot cover the
        range of a whole column; bitsandbytes uses the same size, so its folders fit without
        conversion. int8 and float8_e4m3fn have one scale for each output feature by default.
      act_qtype: "float8_e4m3fn" makes the layers quantise their activations too (qwix's name for
        it); the kernels must have that format. Each row is scaled by its largest magnitude, so the
        products with the kernels are FP8 products. Gradients are computed as without it. The
        columns of kernels that are not stacked are stored contiguously, as these products read
        them, unless gradients are quantised too.
      bwd_qtype: with `act_qtype`, "float8_e4m3fn" or "float8_e5m2" makes the products of gradients
        with the kernels FP8 products too (qwix's name for it); see `jax_dora.ops.dora_linear`.

    Raises:
      TypeError: `model` is not an nnx module; or `path` matches a module that is not an
        `nnx.Linear`, `nnx.LinearGeneral`, `nnx.Einsum` or `nnx.Conv`, or whose kernel is a value
        of `qwix.quantize_model`.
      TypeError: with `act_qtype`, `path` matches a module that is neither an `nnx.Linear` nor an
        `nnx.LinearGeneral` without batch axes.
      ValueError: `qtype` is unknown, `act_qtype` does not go with it, `bwd_qtype` is unknown or
        without `act_qtype`, or no layer's path matches. Or a matched layer is quantised already,
        has given norms, has weights that are not finite, or has a kernel that `tile_size` does not
        divide. Or `model` is abstract, outside `nnx.eval_shape`.
      NotImplementedError: a kernel's variable returns another value than was set.
      ModuleNotFoundError: qwix is not installed.
    """
    check_model(model)
    check_has_values(model, "jax_dora.quantize")
    tile_size = _tile_size(qtype, tile_size)
    qtype = str(qtype)  # jnp.iinfo refuses a str that is a NumPy scalar, np.str_.
    _check_formats(qtype, tile_size, act_qtype, bwd_qtype)
    make(jnp.zeros((1, 1), jnp.int8), jnp.ones((1, 1)), "int8")  # Raises here if qwix is missing.
    copy = nnx.clone(model)
    found = find_weights(copy, is_leading=True)
    matched = _matched(found, path)
    row_scaled = nnx.Linear | nnx.LinearGeneral
    others = [
        weight
        for weight in matched
        if not isinstance(layer := weight.module, row_scaled) or getattr(layer, "batch_axis", None)
    ]
    raise_for(
        others if act_qtype else [],
        TypeError,
        "act_qtype is given and path matches layers that do not multiply rows by one matrix; "
        "expected nnx.Linear, and nnx.LinearGeneral without batch axes: omit act_qtype, or narrow "
        "path so that it does not match these",
    )
    left_out = [
        f"{weight.path} {list(weight.shape)}"
        for weight in found
        if path == ALL_LINEAR and weight.param and not (weight.is_layer or weight.is_adapted)
        if not _is_stacked_vector(weight, matched)
    ]
    if left_out:
        _LOG.warning(
            "quantize: %r leaves out weights that the code of their modules reads; of these only "
            "the layers nnx.Linear, nnx.LinearGeneral, nnx.Einsum and nnx.Conv compute with a "
            "quantised kernel: %s",
            path,
            ", ".join(left_out),
        )
    done: dict[int, str] = {}
    for weight in matched:
        parameter = weight.parameter
        if id(parameter) not in done:
            done[id(parameter)] = weight.path
            with named_in_errors(weight.path, "quantised"):
                _quantize_layer(weight, qtype, tile_size)
                if act_qtype is not None and bwd_qtype is None:
                    parameter.set_value(with_contiguous_columns(parameter.get_value()))
        if weight.is_layer:
            compute_quantised(weight.module, act_qtype, bwd_qtype)
    for weight in found:
        name = done.get(id(weight.parameter)) if weight.param else None
        if name is not None and not any(weight is other for other in matched):
            raise ValueError(
                f"{name!r} cannot be quantised: {weight.path!r}, which path does not match, "
                "shares its kernel; expected both or neither"
            )
    return copy


def _is_stacked_vector(weight: AdaptableWeight, layers: list[AdaptableWeight]) -> bool:
    """Whether the weight is a vector in each of the blocks that are stacked, as its module's layers
    or their neighbours show: a norm's scale."""
    path = weight.module_paths[0]
    around = [f"{one}/" for one in (path, path.rpartition("/")[0]) if one]
    stacks = {one.stack.shape for one in layers if one.path.startswith(tuple(around))}
    return any(stack and stack == weight.shape[:-1] for stack in stacks)


def _tile_size(qtype: Any, tile_size: Any) -> int | None:
    if qtype not in quantised.FORMATS:
        raise ValueError(
            f"qtype is {qtype!r}; expected one of {', '.join(map(repr, quantised.FORMATS))}"
        )
    if tile_size is None:
        return TILE_SIZES[qtype]
    if not is_integer(tile_size) or tile_size < 0:
        raise ValueError(
            f"tile_size is {tile_size!r}; expected a number of input features, or 0 for all of them"
        )
    return int(tile_size) or None


def _check_formats(qtype: str, tile_size: int | None, act_qtype: Any, bwd_qtype: Any) -> None:
    check_formats(act_qtype, bwd_qtype)
    if act_qtype is None:
        return
    if qtype != QTYPE or tile_size is not None:
        tiles = "" if tile_size is None else f" and tile_size {tile_size}"
        raise ValueError(
            f"act_qtype is {act_qtype!r} with qtype {qtype!r}{tiles}; expected qtype {QTYPE!r} "
            "with one scale for each output feature: pass that qtype and no tile_size, or omit "
            "act_qtype"
        )


def _matched(found: list[AdaptableWeight], path: str) -> list[AdaptableWeight]:
    """Returns the layers that `path` matches; raises if one of them cannot be quantised."""
    rule = Rule(path, 1, 1.0)
    matched = [
        weight
        for weight in found
        if weight.is_matched
        and any(rule.matches(path, linear=weight.is_linear) for path in weight.paths)
    ]
    if not matched:
        names = {name for weight in found for name in weight.paths}
        raise ValueError(
            f"path {path!r} matches no layer; expected a regular expression that matches a whole "
            f"path. The layers with parameters are:{listing(names)}"
        )
    raise_for_no_parameters(matched, "path matches layers that cannot be quantised")
    raise_for(
        [one for one in matched if not _computes_quantised(one)],
        TypeError,
        "path matches modules that cannot be quantised; expected nnx.Linear, nnx.LinearGeneral, "
        "nnx.Einsum and nnx.Conv themselves, which can compute with a quantised kernel, or adapted "
        "weights of other modules: adapt these first, or narrow path so that it does not match "
        "them",
    )
    raise_for(
        [weight for weight in matched if quantised.is_quantised(weight.parameter.get_value())],
        ValueError,
        "path matches layers that are quantised already; expected float kernels: narrow path so "
        "that it does not match these",
    )
    return matched


def _computes_quantised(weight: AdaptableWeight) -> bool:
    if weight.is_layer:
        return isinstance(weight.module, LAYERS)
    return weight.is_adapted and not weight.is_lookup


def _quantize_layer(weight: AdaptableWeight, qtype: str, tile_size: int | None) -> None:
    module, kernel, adapter = weight.module, weight.parameter.get_value(), adapter_of(weight)
    if adapter is None:
        rule = DoRARule("", getattr(module, "feature_group_count", 1), 1.0)
        kind_of(module).check(module, rule)
    elif adapter.given_norm is not None or adapter.given_g is not None:
        raise ValueError(
            "it has a given norm, which belongs to the kernel before quantisation; expected none: "
            "quantise first, then call with_norms or freeze"
        )
    if kernel.dtype not in (jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64):
        raise ValueError(f"its kernel has dtype {kernel.dtype}; expected a float dtype")
    if 0 in kernel.shape:
        raise ValueError(
            f"its kernel has shape {kernel.shape}, without elements; expected at least one: narrow "
            "path so that it does not match this layer"
        )
    stack = weight.stack
    axes = kind_of(module).kernel_axes(module) if weight.is_layer else None
    axes = without_stack_axes(weight.axes) if axes is None else axes
    tile = _tile(stack.layer_part(kernel.shape), axes, tile_size)
    tile = stack.combine((1,) * stack.count, tile)
    half = kernel.dtype == jnp.float16
    rounded = round_to(kernel, qtype, tile, jnp.float32 if half else kernel.dtype)
    check.rounded("its kernel", rounded)
    if half and not weight.is_layer:
        raise ValueError(
            f"its {weight.param} has dtype float16, and the code of its module would get fp32 "
            "results, since the range of fp16 is too small for scales; expected bf16 or fp32"
        )
    if half and getattr(module, "dtype", None) is None:
        module.dtype = jnp.float16
    sharding = None if isinstance(kernel, Tracer) else kernel.sharding
    on_mesh = isinstance(sharding, NamedSharding)
    before = None if adapter is None else fresh_magnitude(adapter)
    set_and_verify(weight.parameter, shard_kernel(rounded, sharding if on_mesh else None))
    if weight.is_layer:
        compute_quantised(module)
    if adapter is not None and before is not None:
        magnitude = adapter.magnitude.get_value()
        is_fresh = magnitude.astype(before.dtype) == before
        after = fresh_magnitude(adapter).astype(magnitude.dtype)
        adapter.magnitude.set_value(jnp.where(is_fresh, after, magnitude))


def _tile(sizes: tuple[int, ...], axes: str, tile_size: int | None) -> tuple[int, ...]:
    """Returns the tile's size along each axis of a single layer's kernel: `tile_size` along the
    last input axis, and 1 along all others. If `tile_size` is None, a tile spans every input
    axis."""
    if tile_size is None:
        return tuple(size if axis == "i" else 1 for axis, size in zip(axes, sizes, strict=True))
    last = axes.rindex("i")
    if sizes[last] % tile_size:
        # A divisor of the tile size divides the other layers' features as well.
        divisor = math.gcd(sizes[last], tile_size)
        raise ValueError(
            f"its kernel has {sizes[last]} input features along axis {last}, which is not a "
            f"multiple of the tile size {tile_size}; expected a multiple: choose int8 or "
            "float8_e4m3fn, which need no tiles, or load the model without quantize and call "
            f"jax_dora.quantize with tile_size={divisor}, or 0 for one scale over all input "
            "features, or with a path that does not match this layer"
        )
    return tuple(tile_size if axis == last else 1 for axis in range(len(sizes)))


def shard_kernel(kernel: Any, sharding: jax.sharding.Sharding | None) -> Any:
    """Returns a kernel, quantised or not, with this sharding, or as it is for None. Scales are
    sharded alike along each axis that the mesh axes divide, for which tiles are split if necessary.
    """
    if sharding is None:
        return kernel
    if not isinstance(sharding, NamedSharding):
        return jax.device_put(kernel, sharding)
    mesh, names = sharding.mesh, pad_axes(sharding.spec, kernel.ndim)
    counts = [math.prod(mesh.shape[name] for name in jax.tree.leaves(axis)) for axis in names]

    def shard(array: jax.Array) -> jax.Array:
        divided = [
            axis if size % count == 0 else None
            for axis, size, count in zip(names, array.shape, counts, strict=True)
        ]
        return jax.device_put(array, NamedSharding(mesh, PartitionSpec(*divided)))

    if quantised.is_quantised(kernel):
        kernel = quantised.with_tiles_for(kernel, tuple(counts))
    return jax.tree.map(shard, kernel)
