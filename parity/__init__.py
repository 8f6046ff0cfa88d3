"""`python -m parity`: compares jax_dora and torch_dora with each other and with an fp64 oracle.

Both packages get the same weights, inputs and cotangents. Every result is compared with an fp64
reference, and the two packages' results with each other.

Terms:

    level       what is computed: operators, a layer, a whole decoder, training runs, ... A level
                writes one report. `python -m parity` runs the levels operator, layer, quantised and
                bank; others have a command (`parity.command.MODULES`).
    side        a framework, "jax" or "torch", with one module of functions per level
                (`parity.sides`). Tensors on both sides have PyTorch's layout.
    oracle      the fp64 reference (`parity.oracle`; `parity.model.reference` for the decoder). It
                forms the dense matrix W' = m ∘ (W + sBA) / ‖W + sBA‖ and differentiates the dense
                product. It shares no formula with the packages.
    tolerance   the allowed error, either a cap on a whole result (`parity.tolerances.caps`) or a
                bound per element. Every one is derived where it is defined (`parity.tolerances`;
                the rules are in `parity.tolerances.rules`).
    fault       a deliberate error in a package (`parity.faults`). `python -m parity controls`
                shows that the levels detect every fault.

`parity.compare` runs a case and judges it. `parity.report` writes the reports and prints them.
"""
