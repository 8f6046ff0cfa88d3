"""The device, and the one choice of a kernel for a call.

A kernel is a module of `jax_dora.ops.mosaic` with `refuses(*call)`, `wins(*call)`, `config(*call)`
and `launch(…, config=, sm_count=)`, where `call` holds sizes and dtypes. Whether a kernel takes a
call is a function of these, of the target, and of the implementation that the caller names.
"""

import dataclasses
from types import ModuleType
from typing import Any, NamedTuple

import jax
from jax._src import config as _jax_config
from jax.extend import backend

IMPLEMENTATIONS = ("mosaic", "xla", "eager")
PLAIN = ("xla", "eager")
HOPPER_SM_COUNT = 132
ANY_NUMBER = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class Target:
    """The facts about where a call will run.

    Attributes:
      platform: the default backend, "cpu", "gpu" or "tpu".
      compute_capability: such as "9.0"; "" where there is none.
      sm_count: streaming multiprocessors; a Hopper's full 132 where no GPU is present.
      partitioned: several devices are visible and the call is not inside a fully manual
        `jax.shard_map`, so that its program may be for several.
      interpreted: Pallas' GPU interpreter is forced on.
      x64: jax_enable_x64 is set.
    """

    platform: str
    compute_capability: str = ""
    sm_count: int = HOPPER_SM_COUNT
    partitioned: bool = False
    interpreted: bool = False
    x64: bool = False

    def refuses_mosaic(self) -> str | None:
        """Returns why no Mosaic kernel runs there, or None.

        A named kernel is still traced where there is no GPU, so that it can be lowered for CUDA
        (`jax.export`); lowering it for anything else raises.
        """
        if self.x64:
            return "jax_enable_x64 is set, and a Mosaic kernel's indices would be of two widths"
        hopper = self.compute_capability == "9.0"
        if self.platform == "gpu" and not (hopper or self.interpreted):
            return (
                "it needs a Hopper GPU (compute capability 9.0), and this one has "
                f"{self.compute_capability}"
            )
        return None

    @property
    def prefers_mosaic(self) -> bool:
        """Returns whether a call that names no implementation may take a Mosaic kernel."""
        return self.platform == "gpu" and not self.interpreted


def target() -> Target:
    """Returns the target of a call that is traced now."""
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
    """Returns whether `plgpu.force_gpu_interpret_mode`, which has no public getter, is on."""
    return _jax_config.pallas_tpu_interpret_mode_context_manager.value is not None


class Choice(NamedTuple):
    """A kernel that takes a call, with its launch knobs; as a whole a static argument."""

    kernel: ModuleType
    config: Any
    sm_count: int

    @property
    def knobs(self) -> dict[str, Any]:
        """Returns the keyword arguments of the kernel's `launch` that the choice decides."""
        return {"config": self.config, "sm_count": self.sm_count}

    def beside(self, collectives: bool) -> "Choice":
        """Returns the choice with a thread block for each tile if `collectives` run meanwhile.

        Otherwise there are as many blocks as multiprocessors, which share the tiles before they
        begin. One whose multiprocessor a collective holds would begin when it ends, and the kernel
        take longer by the whole collective; a block of one tile goes wherever there is room. Beside
        nothing else such blocks cost a projection 2 %, and its gradient nothing (H200).
        """
        return self._replace(sm_count=ANY_NUMBER) if collectives else self


def choose(
    op: str,
    implementation: str | None,
    *candidates: tuple[ModuleType, tuple[Any, ...]],
    optional: bool = False,
) -> Choice | None:
    """Returns the first kernel that takes the call, or None where XLA does.

    An unnamed call takes a kernel where it neither refuses nor loses to XLA; "mosaic" takes the
    first that does not refuse; "xla" and "eager" take none.

    Args:
      op: for the message.
      implementation: None, or one of `IMPLEMENTATIONS`.
      *candidates: (kernel, call), best first.
      optional: XLA steps in where every candidate refuses a call that names "mosaic".

    Raises:
      ValueError: the name is unknown.
      NotImplementedError: "mosaic" is named, not optional, and every candidate refuses.
    """
    check_name(implementation)
    if implementation in PLAIN:
        return None
    here = target()
    reason = here.refuses_mosaic()
    for kernel, call in candidates if reason is None else ():
        reason = kernel.refuses(*call)
        if reason is None and (
            implementation == "mosaic" or (here.prefers_mosaic and kernel.wins(*call))
        ):
            return Choice(kernel, kernel.config(*call), here.sm_count)
    if implementation == "mosaic" and not optional:
        raise NotImplementedError(
            f"{op}: implementation 'mosaic' cannot take this call: {reason}; pass "
            "implementation=None to let another one take it"
        )
    return None


def check_name(implementation: str | None) -> None:
    """Raises ValueError unless `implementation` is None or one of `IMPLEMENTATIONS`."""
    if implementation is not None and implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"implementation is {implementation!r}; expected None (the best that takes the call) "
            f"or one of {', '.join(map(repr, IMPLEMENTATIONS))}"
        )
