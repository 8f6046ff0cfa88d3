"""Codes of quantised weights inside kernels.

"int4"    numbers of 4 bits of levels f32[16], the first of two in the lower half of a byte
"high4"   the same, with the first in the upper half
"int8"    integers
"float8"  the bytes of float8_e4m3fn
""        floats, which are not changed
"""

import triton.language as tl

from dora_common.triton.jit import jit


@jit
def decoded(code, levels_ptr, CODES: tl.constexpr):
    """Returns the values of a tile of codes, in fp32; twice as many along the last axis as bytes of
    two codes."""
    if CODES == "int4" or CODES == "high4":
        code = code.to(tl.int32)
        low, high = tl.load(levels_ptr + (code & 15)), tl.load(levels_ptr + (code >> 4))
        return tl.interleave(low, high) if CODES == "int4" else tl.interleave(high, low)
    elif CODES == "float8":
        # Sign, exponent and mantissa are those of a float16 of another bias, 15 for 7.
        code = code.to(tl.int16)
        half = ((code & 128) << 8 | (code & 127) << 7).to(tl.float16, bitcast=True)
        return tl.where((code & 127) == 127, float("nan"), half.to(tl.float32) * 256.0)
    elif CODES == "int8":
        return code.to(tl.float32)
    else:
        return code
