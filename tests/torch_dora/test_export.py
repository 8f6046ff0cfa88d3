"""Exported programs: their operators become plain operations where ONNX needs that."""

import pytest
import torch
from torch import nn

from tests.tables import ci
from tests.torch_dora.adapters import Experts, trained
from torch_dora import DoRARule, apply_dora, freeze

EXPORTED = {
    "linear": (lambda: nn.Linear(6, 5), lambda: torch.randn(3, 6)),
    "unbiased": (lambda: nn.Linear(6, 5, bias=False), lambda: torch.randn(3, 4, 6)),
    "bf16": (lambda: nn.Linear(6, 5).bfloat16(), lambda: torch.randn(3, 6).bfloat16()),
    "convolution": (lambda: nn.Conv1d(6, 4, 2), lambda: torch.randn(3, 6, 5)),
    "groups": (lambda: nn.Conv2d(4, 6, 3, groups=2), lambda: torch.randn(3, 4, 5, 5)),
    "embedding": (lambda: nn.Embedding(7, 4), lambda: torch.randint(7, (3, 2))),
    "experts": (Experts, lambda: torch.randn(3, 5, 6)),
}


class Every(nn.Module):
    """All layers in one program: making a program takes longer than what is in it."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleDict({kind: make() for kind, (make, _) in EXPORTED.items()})

    def forward(self, xs):
        return {kind: layer(xs[kind]) for kind, layer in self.layers.items()}


@pytest.mark.ci
@pytest.mark.parametrize("implementation", [None, ci("triton")])
def test_operators_decompose_for_onnx(implementation):
    """torch.onnx.export decomposes what ONNX does not know by torch's table of decompositions."""
    rule = DoRARule(".*", 2, 4, implementation=implementation)
    model = trained(apply_dora(Every(), rule)).eval()
    first, second = ({kind: draw() for kind, (_, draw) in EXPORTED.items()} for _ in range(2))
    program = torch.export.export(model, (first,))
    paths = [str(node.meta["nn_module_stack"]) for node in nodes(program, "torch_dora")]
    kinds = {kind for kind in EXPORTED if any(f"layers.{kind}" in path for path in paths)}
    assert kinds | {"groups"} == EXPORTED.keys()
    table = torch.export.default_decompositions()
    for operator, definition in torch._decomp.decomposition_table.items():
        if getattr(operator, "namespace", "") == "torch_dora":
            table[operator] = definition
    decomposed = program.run_decompositions(table)
    assert not nodes(decomposed, "torch_dora")
    torch.testing.assert_close(decomposed.module()(second), model(second))


def test_a_frozen_program_has_no_operator_of_this_package():
    model = trained(apply_dora(nn.Sequential(nn.Linear(6, 5)), DoRARule("0", 2, 4)))
    program = torch.export.export(freeze(model), (torch.randn(3, 6),))
    assert not nodes(program, "torch_dora")


def nodes(program, name):
    """Returns the calls of operators of which `name` is a part."""
    calls = [node for node in program.graph.nodes if node.op == "call_function"]
    return [node for node in calls if name in str(node.target)]
