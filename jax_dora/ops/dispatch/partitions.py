"""The custom call that XLA partitions an operator by, the same in every process.

JAX's `custom_partitioning` writes the address of an object into the program. So JAX's compilation
cache, whose key is a hash of the program, never finds a program of another process. And XLA asks
for the shards of every call, which JAX would trace and lower for every layer anew. Here a call is
written with a hash of its operator instead, and equal calls share what was lowered.
"""

import functools
import types
from typing import Any

from jax._src import custom_partitioning as jax_partitioning
from jax._src import xla_bridge
from jaxlib import xla_client
from jaxlib.mlir import ir

from jax_dora.ops.identity import digest

TARGET = "dora_partitioned"
# For each hash, what JAX's callbacks need to know. JAX keeps it with one program, which may end
# before XLA partitions another one.
_calls: dict[bytes, Any] = {}


def share(call: Any, *identity: Any) -> None:
    """Changes the custom call of `custom_partitioning` to one that equal operators share.
    `identity` is all that the call's shards depend on; if another process cannot know it, like a
    function without a name, the call is left as it is."""
    name = digest(*identity)
    target = call.attributes["call_target_name"]
    if name is None or target != ir.StringAttr.get(jax_partitioning._CUSTOM_PARTITIONING_CALL_NAME):
        return
    key = name.encode()
    if key not in _calls:
        address = ir.StringAttr(call.attributes["backend_config"]).value
        known = jax_partitioning._sharding_callbacks[address.encode()]
        # The whole context would keep the module of the program.
        context = known.module_context
        known.module_context = types.SimpleNamespace(
            platforms=context.platforms, backend=context.backend
        )
        # Two threads may come here at once; both must write the object that is kept.
        jax_partitioning._sharding_callbacks[key] = _calls.setdefault(key, known)
    call.attributes["backend_config"] = ir.StringAttr.get(name)
    call.attributes["call_target_name"] = ir.StringAttr.get(TARGET)


def _partition(shapes: Any, shardings: Any, result: Any, sharding: Any, name: bytes) -> Any:
    return _lowered(tuple(shapes), tuple(shardings), result, sharding, name)


@functools.cache
def _lowered(shapes: Any, shardings: Any, result: Any, sharding: Any, name: bytes) -> Any:
    """Returns the module of one device, and the shardings of its operands and results."""
    partition = jax_partitioning._custom_partitioning_partition
    return partition(list(shapes), list(shardings), result, sharding, name)


_register = functools.partial(
    xla_client.register_custom_call_partitioner,
    name=TARGET,
    prop_user_sharding=jax_partitioning._custom_partitioning_propagate_user_sharding,
    partition=_partition,
    infer_sharding_from_operands=jax_partitioning._custom_partitioning_infer_sharding_from_operands,
    can_side_effecting_have_replicated_sharding=True,
)
_register()
xla_bridge.register_plugin_callbacks(_register)
