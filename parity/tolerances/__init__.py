"""Every tolerance of parity, each with its derivation.

    caps        limits for whole results: the paper's numbers and this project's promises
    rules       the error rules (rounding, fp32 arithmetic, sums) that all bounds are built from
    operators   bounds for the norm, g, compose, SwiGLU, attention, and rows in FP8
    linear      bounds for a whole adapted layer and its gradients

A bound is absolute, per element, in fp64, in the layout of `parity.oracle`.
"""

from parity.tolerances import caps as caps
from parity.tolerances.linear import dora_linear as dora_linear
from parity.tolerances.operators import attention as attention
from parity.tolerances.operators import compose as compose
from parity.tolerances.operators import compose_delta as compose_delta
from parity.tolerances.operators import compose_grads as compose_grads
from parity.tolerances.operators import expanded as expanded
from parity.tolerances.operators import magnitude_scale as magnitude_scale
from parity.tolerances.operators import norm as norm
from parity.tolerances.operators import quantised_rows as quantised_rows
from parity.tolerances.operators import stored_inner as stored_inner
from parity.tolerances.operators import swiglu as swiglu
from parity.tolerances.rules import FP8_QUOTIENT as FP8_QUOTIENT
from parity.tolerances.rules import TRITON_INTERPRETER_BF16 as TRITON_INTERPRETER_BF16
from parity.tolerances.rules import UNIT_ROUNDOFF as UNIT_ROUNDOFF
from parity.tolerances.rules import accumulation as accumulation
from parity.tolerances.rules import flash_rule as flash_rule
from parity.tolerances.rules import fp8_product as fp8_product
from parity.tolerances.rules import independent as independent
from parity.tolerances.rules import product as product
from parity.tolerances.rules import rounding as rounding
from parity.tolerances.rules import two_norm_of_products as two_norm_of_products
from parity.tolerances.rules import unit_roundoff as unit_roundoff
