"""The limits of NVIDIA's GPUs that a kernel must fit: by compute capability.

Source: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability"; bandwidth and
multiprocessors from the data sheets of the named cards.
"""

from typing import NamedTuple


class Card(NamedTuple):
    """What a program may use on the cards of a compute capability.

    Attributes:
        names: cards with it.
        shared_bytes: the most shared memory of a program.
        multiprocessors: of the first card.
        bandwidth: of the first card, in GB/s.
    """

    names: str
    shared_bytes: int
    multiprocessors: int
    bandwidth: int


# A thread has at most 255 registers, and a multiprocessor 65,536, on all of them.
REGISTERS_PER_THREAD, REGISTERS = 255, 65536
CARDS = {
    80: Card("A100, A30", 163 << 10, 108, 2039),
    86: Card("RTX 3090, A40, A10, RTX A6000", 99 << 10, 82, 936),
    89: Card("RTX 4090, L40S, L4", 99 << 10, 128, 1008),
    90: Card("H100, H200, GH200", 227 << 10, 132, 3350),
    100: Card("B200, GB200", 227 << 10, 148, 8000),
    120: Card("RTX 5090, RTX PRO 6000 Blackwell", 99 << 10, 170, 1792),
}
