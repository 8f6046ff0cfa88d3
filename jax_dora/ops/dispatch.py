"""The one dispatch loop: which implementation of an op takes a call, or why none does."""

import dataclasses
from collections.abc import Sequence

import jax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from jax_dora.ops.device import Target

NAMES = ("mosaic", "xla")


@dataclasses.dataclass(frozen=True)
class Option:
    """One implementation's answer to one call.

    Attributes:
      name: one of `NAMES`.
      refusal: why it cannot take the call, or None.
      slower: why another is the better choice though it could, or None; only an unnamed call
        minds.
    """

    name: str
    refusal: str | None = None
    slower: str | None = None


def check_name(implementation: str | None) -> None:
    """Raises ValueError unless `implementation` is None or one of `NAMES`."""
    if implementation is not None and implementation not in NAMES:
        raise ValueError(
            f"implementation is {implementation!r}; expected None (the best that takes the call) "
            f"or one of {', '.join(map(repr, NAMES))}"
        )


def choose(op: str, implementation: str | None, options: Sequence[Option]) -> str:
    """The name of the implementation that runs `op`; `options` come best first.

    Raises:
      ValueError: the name is unknown.
      NotImplementedError: the named implementation refuses the call; it never falls back.
    """
    check_name(implementation)
    for option in options:
        if implementation is None and not option.refusal and not option.slower:
            return option.name
        if implementation == option.name:
            if option.refusal:
                raise NotImplementedError(
                    f"{op}: implementation {option.name!r} cannot take this call: "
                    f"{option.refusal}; pass implementation=None to let another one take it"
                )
            return option.name
    raise NotImplementedError(f"{op}: implementation {implementation!r} does not exist for it")


def runs_mosaic(target: Target) -> Option:
    """What the target alone says of Mosaic: a Hopper, or the interpreter.

    A call that names "mosaic" where neither is present is still traced, so that it can be lowered
    for CUDA from a machine without a GPU (`jax.export`); `on_cuda` refuses it when it is lowered
    for anything else.
    """
    if target.x64:
        return Option(
            "mosaic",
            refusal="jax_enable_x64 is set, and a Mosaic kernel's indices would be of two widths",
        )
    if target.interpreted:
        return Option("mosaic", slower="the interpreter is there for tests; name it to use it")
    if target.platform != "gpu":
        return Option("mosaic", slower=f"the default device is a {target.platform}, not a GPU")
    if target.compute_capability != "9.0":
        return Option(
            "mosaic",
            refusal=f"it needs a Hopper GPU (compute capability 9.0), this {target.device_kind} "
            f"has {target.compute_capability}",
        )
    if target.partitioned:
        return Option(
            "mosaic",
            slower="several devices are visible, and XLA cannot partition the kernel; on a mesh "
            "with explicit axes, and inside jax.shard_map over the whole mesh, it is used",
        )
    return Option("mosaic")


def on_cuda(x: jax.Array, target: Target) -> jax.Array:
    """x, in a program that refuses with NotImplementedError to be lowered for anything but CUDA."""
    return x if target.interpreted else _on_cuda_p.bind(x)


_on_cuda_p = Primitive("dora_on_cuda")
_on_cuda_p.def_impl(jax.jit(lambda x: _on_cuda_p.bind(x)))
_on_cuda_p.def_abstract_eval(lambda x: x)
batching.defvectorized(_on_cuda_p)


def _refuse(ctx, x):
    raise NotImplementedError(
        "implementation 'mosaic' runs on a Hopper GPU (compute capability 9.0), and this program "
        f"is being built for {', '.join(ctx.module_context.platforms)}; pass implementation=None "
        "or 'xla', or run it under plgpu.force_gpu_interpret_mode()"
    )


mlir.register_lowering(_on_cuda_p, _refuse)
mlir.register_lowering(_on_cuda_p, lambda ctx, x: [x], platform="cuda")
