"""Checkpoints by orbax, of what training changes; the base model is in its folder."""

from pathlib import Path
from typing import Any, Self

import jax
import orbax.checkpoint as ocp


class Checkpoints:
    """The checkpoints of one run. Each appears whole or not at all."""

    def __init__(self, folder: Path, keep: int) -> None:
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, enable_async_checkpointing=False)
        self._manager = ocp.CheckpointManager(folder.absolute(), options=options)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._manager.close()

    def latest(self) -> int | None:
        """The step of the last checkpoint, or None."""
        return self._manager.latest_step()

    def facts(self, step: int) -> dict[str, Any]:
        """Returns what `save` was given as `facts`."""
        args = ocp.args.Composite(facts=ocp.args.JsonRestore())
        return self._manager.restore(step, args=args)["facts"]

    def restore(self, step: int, like: Any) -> Any:
        """The tree of arrays of a step, in the structure and with the shardings of `like`."""
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, _by_name(like))
        args = ocp.args.Composite(arrays=ocp.args.StandardRestore(abstract))
        arrays = self._manager.restore(step, args=args)["arrays"]
        return jax.tree.unflatten(jax.tree.structure(like), [arrays[name] for name in abstract])

    def save(self, step: int, arrays: Any, facts: dict[str, Any]) -> None:
        """
        Args:
          arrays: a tree of arrays.
          facts: whatever JSON can say.
        """
        args = ocp.args.Composite(
            arrays=ocp.args.StandardSave(_by_name(arrays)), facts=ocp.args.JsonSave(facts)
        )
        self._manager.save(step, args=args)


def _by_name(tree: Any) -> dict[str, jax.Array]:
    """Leaf by leaf: orbax need not know Flax's and optax's classes."""
    leaves = jax.tree.leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}
