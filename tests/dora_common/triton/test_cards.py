"""Every kernel of both packages compiles for every card, on a machine that has none."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from dora_common.triton.cards import CARDS
from tests.tables import ci, slow

PRODUCTS = ("one_pass_norm", "expand_compose", "bank_shrink", "bank_expand", "decode_attention")
PRODUCTS += ("ring_norm", "ring_expand")


def compiled(*arguments: str) -> list[dict[str, Any]]:
    """Returns what `python -m tools.cards` prints: here, Triton's kernels are interpreted."""
    environment = {name: v for name, v in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tools.cards", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.stdout, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize(
    ("capability", "kernels"),
    [
        ci(86, ["compose_forward", "compose_backward", "column_sums"]),
        *(slow(capability, []) for capability in CARDS),
    ],
)
def test_every_kernel_fits_its_card_without_spilling(capability, kernels):
    found = compiled(str(capability), *kernels)
    assert {one["package"] for one in found} == {"jax_dora", "torch_dora"}
    assert {one["kernel"] for one in found} >= set(kernels)
    assert not [one for one in found if not one["fits"]]
    for one in found:
        # Sums have a fixed order, and bf16 operands reach the tensor cores as they are.
        assert not one["atomics"]
        if one["kernel"] in PRODUCTS:
            assert one["product"] in ("mma.sync", "wgmma", "tcgen05.mma")
        assert one["vectors"] or not one["kernel"].startswith("compose")
    if capability == 90 and not kernels:
        wide = [one for one in found if one["constants"].get("RANK") == 384]
        assert all(one["product"] == "wgmma" for one in wide if one["kernel"] != "adapter_pieces")
