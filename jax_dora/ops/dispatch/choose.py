"""Chooses the Mosaic or Triton kernel for a call, or XLA.

A kernel is a module of `jax_dora.ops.mosaic` or `jax_dora.ops.triton` with four functions. `call`
holds sizes and dtypes.

    refuses(*call)                      why the kernel does not support the call, or None
    wins(*call)                         whether the kernel is faster than XLA
    config(*call)                       the tile sizes and other tuning parameters; Triton's of
                                        (capability, *call)
    launch(…, config=, sm_count=)       runs the kernel; Triton's with capability= for sm_count=

The choice depends on these functions, on the target device, and on the implementation that the
caller names.
"""

import dataclasses
import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.export
import jax.numpy as jnp
from jax._src import config as _jax_config
from jax.extend import backend

from dora_common.triton.cards import CARDS
from jax_dora.ops.mosaic.hopper.launch import launch_shared
from jax_dora.ops.triton import kernel_call

KERNELS = ("mosaic", "triton")
IMPLEMENTATIONS = (*KERNELS, "xla", "eager")
PLAIN = ("xla", "eager")
HOPPER_SM_COUNT = 132
UNLIMITED_BLOCKS = 2**31 - 1
# Code for it runs on every later GPU, too: what a program is built for on a machine without a GPU.
LEAST_CAPABILITY = 80


@dataclasses.dataclass(frozen=True)
class Target:
    """The device and the configuration that a call will run on.

    Attributes:
      platform: the default backend, "cpu", "gpu" or "tpu".
      compute_capability: such as "9.0"; "" if the device has none.
      sm_count: the number of streaming multiprocessors; 132, a full Hopper, without a GPU.
      partitioned: the program may run on several devices: several are visible, and the call is not
        inside a fully manual `jax.shard_map`.
      interpreted: Pallas' GPU interpreter is forced on.
      x64: jax_enable_x64 is set.
    """

    platform: str
    compute_capability: str = ""
    sm_count: int = HOPPER_SM_COUNT
    partitioned: bool = False
    interpreted: bool = False
    x64: bool = False

    @property
    def capability(self) -> int:
        """Returns the compute capability that Triton compiles for, such as 86 for 8.6. On a GPU
        that is not in `CARDS` it is the highest whose code runs on every later GPU, as Hopper's and
        Blackwell's does not: LLVM aborts the process for a GPU that is too new for the PTX."""
        major, _, minor = self.compute_capability.partition(".")
        if self.platform != "gpu" or not (major.isdigit() and minor.isdigit()):
            return LEAST_CAPABILITY
        found = 10 * int(major) + int(minor)
        portable = (card for card in CARDS if card <= found and card < 90)
        return found if found in CARDS else max(portable, default=found)

    def refuses(self, implementation: str) -> str | None:
        """Returns why no kernel of "mosaic" or "triton" can run on this target, or None. Without a
        GPU it is None, so that a program that names one can be lowered for CUDA; lowering it for
        another platform raises."""
        found = f"and this one has {self.compute_capability}"
        if implementation == "triton":
            if not kernel_call.is_installed():
                return "the triton package, 3.4 or later, is not installed: pip install triton"
            is_nvidia = self.compute_capability.replace(".", "").isdigit()
            if self.platform == "gpu" and not (is_nvidia and self.capability >= LEAST_CAPABILITY):
                return f"it needs an NVIDIA GPU of compute capability 8.0 or later, {found}"
            return None
        if self.x64:
            return "jax_enable_x64 is set, and a Mosaic kernel's indices would be of two widths"
        hopper = self.compute_capability == "9.0"
        if self.platform == "gpu" and not (hopper or self.interpreted):
            return f"it needs a Hopper GPU (compute capability 9.0), {found}"
        return None

    def prefers(self, implementation: str) -> bool:
        """Returns whether a call without a named implementation may use a kernel of "mosaic" or
        "triton": of Triton where Mosaic cannot run."""
        if self.platform != "gpu" or self.interpreted:
            return False
        return implementation == "mosaic" or self.refuses("mosaic") is not None


def target() -> Target:
    """Returns the target of a call that is traced in the current context."""
    device = backend.get_default_device()
    mesh = jax.sharding.get_abstract_mesh()
    manual = not mesh.empty and mesh.are_all_axes_manual
    abstract = mesh.abstract_device
    sm_count = device.core_count if device.platform == "gpu" else HOPPER_SM_COUNT
    return Target(
        platform=device.platform,
        compute_capability=str(getattr(device, "compute_capability", "")),
        sm_count=(abstract and abstract.num_cores) or sm_count,
        partitioned=jax.device_count() > 1 and not manual,
        interpreted=interpreted(),
        x64=jax.config.jax_enable_x64,
    )


def interpreted() -> bool:
    """Returns whether `plgpu.force_gpu_interpret_mode` is active; JAX has no public getter."""
    return _jax_config.pallas_tpu_interpret_mode_context_manager.value is not None


def interprets(implementation: str | None) -> bool:
    """Returns whether a call runs in an interpreter, of Mosaic or of Triton."""
    return interpreted() or (implementation == "triton" and kernel_call.interpreted())


class Choice(NamedTuple):
    """The kernel that was chosen for a call, and the static arguments of its `launch`; `capability`
    is None for a Mosaic kernel."""

    kernel: ModuleType
    config: Any
    sm_count: int
    capability: int | None = None

    @property
    def launch(self) -> Callable[..., Any]:
        """Returns the kernel's `launch` for the remaining arguments."""
        launch = self.kernel.launch
        # The interpreters use callbacks, which a lowered kernel cannot.
        if not interprets("triton" if self.capability else "mosaic"):
            launch = functools.partial(launch_shared, launch)
        if self.capability is not None:
            launch = functools.partial(_without_fp64, launch)
            return functools.partial(launch, config=self.config, capability=self.capability)
        return functools.partial(launch, config=self.config, sm_count=self.sm_count)

    def during_collectives(self, running: bool) -> "Choice":
        """Returns the choice, with one thread block per tile if collectives are `running`.

        By default a kernel launches one block per multiprocessor, which takes its tiles before it
        starts: a block whose multiprocessor is occupied by a collective starts only when that ends.
        One block per tile runs on any free multiprocessor; without a collective it makes a
        projection 2 % slower (H200).
        """
        return self._replace(sm_count=UNLIMITED_BLOCKS) if running else self


def _without_fp64(launch: Callable[..., Any], *arrays: Any, **options: Any) -> Any:
    """Returns `launch(*arrays, **options)` with scales and vectors in fp32, in which the kernels
    compute; under jax_enable_x64 they may be fp64."""

    def narrow(array: jax.Array) -> jax.Array:
        return array.astype(jnp.float32) if array.dtype == jnp.float64 else array

    return launch(*jax.tree.map(narrow, arrays), **options)


def choose(
    op: str,
    implementation: str | None,
    *candidates: tuple[ModuleType, tuple[Any, ...]],
    optional: bool = False,
) -> Choice | None:
    """Returns the kernel for a call, or None for XLA. Of the (kernel, call) candidates, the best
    first, None takes the first that supports the call and is faster than XLA, "mosaic" or "triton"
    the first of its own that supports it, "xla" and "eager" none.

    Raises ValueError for another implementation; NotImplementedError, with the operator's name
    `op`, if "mosaic" or "triton" is named and not `optional`, and no candidate supports the call.
    """
    check_name(implementation)
    if implementation in PLAIN:
        return None
    device, reason = target(), f"it has no {implementation} kernel"
    # An operator that has only Triton kernels uses them on every GPU.
    only_triton = all(package_of(kernel) == "triton" for kernel, _ in candidates)
    for kernel, call in candidates:
        package = package_of(kernel)
        is_named = implementation == package
        is_preferred = device.prefers("mosaic" if only_triton else package)
        if not is_named and (implementation is not None or not is_preferred):
            continue
        reason = device.refuses(package)
        if reason is None and any(map(jax.export.is_symbolic_dim, call)):
            reason = f"a size is symbolic in {call}"  # in some exports
        reason = reason or kernel.refuses(*call)
        if reason is None and (is_named or kernel.wins(*call)):
            if package == "mosaic":
                return Choice(kernel, kernel.config(*call), device.sm_count)
            capability = device.capability
            config = kernel.config(capability, *call)
            return Choice(kernel, config, device.sm_count, capability)
    if implementation in KERNELS and not optional:
        raise NotImplementedError(
            f"{op}: implementation {implementation!r} does not support this call: {reason}; pass "
            "implementation=None to use another implementation"
        )
    return None


def package_of(kernel: ModuleType) -> str:
    """Returns "mosaic" or "triton", whose kernel a module is."""
    return kernel.__name__.split(".")[2]


def check_name(implementation: str | None) -> None:
    """Raises ValueError unless `implementation` is None or one of `IMPLEMENTATIONS`."""
    if implementation is not None and implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"implementation is {implementation!r}; expected None (the fastest that supports the "
            f"call) or one of {', '.join(map(repr, IMPLEMENTATIONS))}"
        )
