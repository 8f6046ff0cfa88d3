"""Exported programs: their operators become plain operations where ONNX needs that."""

import pytest
import torch
from torch import nn

from tests.torch_dora.adapters import Experts, trained
from torch_dora import DoRARule, apply_dora, freeze

EXPORTED = {
    "linear": (lambda: nn.Linear(6, 5), lambda: torch.randn(3, 6)),
    "no bias": (lambda: nn.Linear(6, 5, bias=False), lambda: torch.randn(3, 4, 6)),
    "half": (lambda: nn.Linear(6, 5).bfloat16(), lambda: torch.randn(3, 6).bfloat16()),
    "convolution": (lambda: nn.Conv1d(6, 4, 2), lambda: torch.randn(3, 6, 5)),
    "groups": (lambda: nn.Conv2d(4, 6, 3, groups=2), lambda: torch.randn(3, 4, 5, 5)),
    "embedding": (lambda: nn.Embedding(7, 4), lambda: torch.randint(7, (3, 2))),
    "experts": (Experts, lambda: torch.randn(3, 5, 6)),
}


@pytest.mark.parametrize("kind", EXPORTED)
@pytest.mark.parametrize("implementation", [None, "triton"])
def test_operators_decompose_for_onnx(kind, implementation):
    """torch.onnx.export decomposes what ONNX does not know by torch's table of decompositions."""
    make, draw = EXPORTED[kind]
    rule = DoRARule(".*", 2, 4, implementation=implementation)
    model = trained(apply_dora(nn.Sequential(make()), rule)).eval()
    program = torch.export.export(model, (draw(),))
    assert any("torch_dora" in name for name in operators(program)) or kind == "groups"
    table = torch.export.default_decompositions()
    for operator, definition in torch._decomp.decomposition_table.items():
        if getattr(operator, "namespace", "") == "torch_dora":
            table[operator] = definition
    decomposed = program.run_decompositions(table)
    assert not [name for name in operators(decomposed) if "torch_dora" in name]
    x = draw()
    torch.testing.assert_close(decomposed.module()(x), model(x))


def test_a_frozen_program_has_no_operator_of_this_package():
    model = trained(apply_dora(nn.Sequential(nn.Linear(6, 5)), DoRARule("0", 2, 4)))
    program = torch.export.export(freeze(model), (torch.randn(3, 6),))
    assert not [name for name in operators(program) if "torch_dora" in name]


def operators(program):
    return {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
