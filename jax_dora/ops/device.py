"""The one place that asks about the device."""

import dataclasses

import jax
from jax._src import config as _jax_config
from jax.extend import backend

H100_SM_COUNT = 132


@dataclasses.dataclass(frozen=True)
class Target:
    """What dispatch may know of where a call will run.

    Attributes:
      platform: the default backend, "cpu", "gpu" or "tpu".
      compute_capability: such as "9.0"; "" where there is none.
      device_kind: such as "NVIDIA H200"; the key of the tuning tables.
      partitioned: several devices are visible and the call is not inside a fully manual
        `jax.shard_map`, so that XLA may split it and a bare kernel would see global shapes.
      interpreted: Pallas' GPU interpreter is forced on.
      x64: jax_enable_x64 is set.
    """

    platform: str
    compute_capability: str = ""
    device_kind: str = ""
    partitioned: bool = False
    interpreted: bool = False
    x64: bool = False


def target() -> Target:
    """The target of a call that is traced now."""
    device = backend.get_default_device()
    return Target(
        platform=device.platform,
        compute_capability=str(getattr(device, "compute_capability", "")),
        device_kind=device.device_kind,
        partitioned=jax.device_count() > 1 and not _fully_manual(),
        interpreted=_gpu_interpreter_forced(),
        x64=jax.config.jax_enable_x64,
    )


def sm_count() -> int:
    """Streaming multiprocessors of the target; a Hopper's full 132 where no GPU is present."""
    if abstract := jax.sharding.get_abstract_mesh().abstract_device:
        if abstract.num_cores:
            return abstract.num_cores
    device = backend.get_default_device()
    return device.core_count if device.platform == "gpu" else H100_SM_COUNT


def _fully_manual() -> bool:
    mesh = jax.sharding.get_abstract_mesh()
    return not mesh.empty and mesh.are_all_axes_manual


def _gpu_interpreter_forced() -> bool:
    # `plgpu.force_gpu_interpret_mode` has no public getter.
    return _jax_config.pallas_tpu_interpret_mode_context_manager.value is not None
