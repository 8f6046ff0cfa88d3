"""Mosaic modules that are smaller and compiled in less time.

Pallas lowers a kernel to a module with many equal constants and addresses. XLA keeps the module
with every call, and writes it into JAX's compilation cache as often. jaxlib simplifies a module
when it compiles it, too; what is done here, once for all calls, takes a third of its bytes away.
It is done before Pallas writes the module, which would have to be read again.
"""

import itertools
import re
import threading
from typing import Any

from jax.experimental.mosaic.gpu import core
from jax.experimental.mosaic.gpu.launch_context import MOSAIC_GPU_SMEM_ALLOC_ATTR as DESCRIPTORS
from jaxlib.mlir import ir
from jaxlib.mlir.passmanager import PassManager

# The last pass makes it a module of a dialect that all versions of jaxlib can read.
PASSES = "builtin.module(cse,strip-debuginfo,mosaic_gpu-serde{serialize=true})"

# None in a JAX that serialises in another way: kernels stay as Pallas writes them.
_pallas_serialises = getattr(core, "_run_serde_pass", None)
_thread = threading.local()


def simplify_in_this_thread() -> None:
    """Simplifies the kernels that this thread lowers from now on."""
    if _pallas_serialises is None:
        return
    _thread.simplifies = True
    core._run_serde_pass = _serialised


def _serialised(module: ir.Module, **options: Any) -> ir.Module:
    """Returns the module of a kernel in the dialect that is stored; of ours the module itself."""
    if not getattr(_thread, "simplifies", False):
        assert _pallas_serialises is not None
        return _pallas_serialises(module, **options)
    context = module.context
    allowed, context.allow_unregistered_dialects = context.allow_unregistered_dialects, True
    try:
        with context:
            _pass_words(module)
            PassManager.parse(PASSES).run(module.operation)
    finally:
        context.allow_unregistered_dialects = allowed
    return module


def _pass_words(module: ir.Module) -> None:
    """Makes the host pass descriptors of TMA copies to the kernel as words of 64 bits. Pallas
    passes bytes, and LLVM would compile a load and a store of each, up to 768, for as long as the
    kernel itself."""
    for function in module.body.operations:
        for op in itertools.chain(*itertools.chain(*function.operation.regions)):
            attributes = op.operation.attributes
            if DESCRIPTORS in attributes and (
                size := re.fullmatch(r"!llvm\.array<(\d+) x i8>", str(attributes["elem_type"]))
            ):
                words = ir.Type.parse(f"!llvm.array<{int(size[1]) // 8} x i64>")
                attributes["elem_type"] = ir.TypeAttr.get(words)
                for use in op.operation.results[0].uses:
                    if use.owner.name == "llvm.load":
                        use.owner.results[0].set_type(words)
