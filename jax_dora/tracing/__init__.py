"""Adapts weights that a module's own code reads, in the products that read them.

While the code runs, a JAX trace propagates the adapted weight through casts, transposes, reshapes
and indexing to the operations that read it. Products and lookups become adapted ones; any other
operation gets the effective weight W'.

A call takes these steps:

1. The caller (`jax_dora.adapt` for nnx, `jax_dora.linen`) starts a `WeightTrace` (trace.py) and
   replaces the array of each adapted parameter by a tracer of a `Weight` (weight_view.py).
2. The trace handles each operation on such a tracer by `evaluate_primitive` (jaxpr_interpreter.py),
   which also evaluates the jaxprs inside jit, checkpoint, scan, while and cond.
3. `propagate` (primitives.py) handles an operation whose result is a view of the weight, such as a
   transpose. `apply_reader` passes a product or a lookup to the weight's `Reader`.
4. `AdaptedReader` (adapted_products.py) computes the adapted product or lookup. `Recorder`
   (read_log.py), which `apply_dora` and `coverage` use to find what reads each weight, records the
   operation and computes the base result.
"""
