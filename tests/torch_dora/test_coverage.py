"""`coverage`, and what "all-linear" leaves out."""

import logging
import math

import pytest
import torch
from torch import nn
from transformers import Llama4TextConfig
from transformers.models.llama4.modeling_llama4 import Llama4Router

import torch_dora
from tests.torch_dora.architectures import DECODER, of
from torch_dora import DoRARule, apply_dora, coverage

RULE = DoRARule("all-linear", 2, 4.0)


class Codes(nn.Module):
    """As GPTQ's and AWQ's: a projection whose weight is codes in buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.in_features, self.out_features = 8, 16
        self.register_buffer("qweight", torch.zeros(1, 16, dtype=torch.int32))
        self.register_buffer("scales", torch.ones(1, 16))

    def forward(self, x):
        return x.repeat(1, 2)


class Bytes(nn.Linear):
    """As FP8Linear: a Linear whose weight is codes, with a forward of its own."""

    def __init__(self) -> None:
        super().__init__(8, 8, bias=False)
        weight = torch.zeros(8, 8, dtype=torch.float8_e4m3fn)
        self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, input):
        return input @ self.weight.float().T


class Odd(nn.Module):
    """Everything that cannot be adapted, beside what can."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.attention = nn.MultiheadAttention(8, 2)
        sizes = {"num_local_experts": 3, "num_experts_per_tok": 1}
        self.router = Llama4Router(Llama4TextConfig(**DECODER | {"hidden_size": 8}, **sizes))
        self.codes = Codes()
        self.bytes = Bytes()
        self.grouped = nn.Conv1d(8, 8, 3, groups=4)
        self.own = nn.Parameter(torch.zeros(2, 3, 4))
        self.linear = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.lm_head = nn.Linear(8, 11, bias=False)
        self.lm_head.weight = self.embed.weight
        self.score = nn.Linear(8, 2)


LEFT_OUT = ["attention.out_proj", "bytes", "codes", "router"]


def rows(model):
    return {row.path: row for row in coverage(model).weights}


def test_every_weight_has_one_row():
    model = Odd()
    found = rows(model)
    assert {path: (row.shape, row.status, row.is_linear) for path, row in found.items()} == {
        "own": ((2, 3, 4), "not adaptable", False),
        "embed": ((11, 8), "adaptable", False),
        "attention.in_proj_weight": ((24, 8), "not adaptable", False),
        "attention.out_proj": ((8, 8), "not adaptable", False),
        "router": ((3, 8), "not adaptable", False),
        "codes": ((16, 8), "not adaptable", False),
        "bytes": ((8, 8), "not adaptable", False),
        "grouped": ((8, 2, 3), "adaptable", False),
        "linear": ((8, 8), "adaptable", True),
        "score": ((2, 8), "adaptable", False),
    }
    reasons = {
        "own": "set the module's is_transposed",
        "attention.in_proj_weight": "a MultiheadAttention computes with it in code of its own",
        "attention.out_proj": "never calls",
        "router": "a Llama4Router computes with it",
        "codes": "a Codes keeps it in qweight, scales",
        "bytes": "torch.float8_e4m3fn",
        "linear": "Linear",
    }
    assert all(reason in found[path].how for path, reason in reasons.items())
    elements = 24 + 88 + 192 + 64 + 24 + 128 + 64 + 48 + 64 + 16
    assert sum(math.prod(row.shape) for row in found.values()) == elements
    assert apply_dora(model, RULE) is model
    assert {path for path, row in rows(model).items() if row.status == "adapted"} == {"linear"}
    assert coverage(model).share("adapted") == 64 / elements
    lines = str(coverage(model)).splitlines()
    assert lines[-1] == coverage(model).summary()
    assert lines[0].split() == ["path", "shape", "elements", "share", "status", "how"]
    assert len(lines) == len(found) + 2


def test_what_all_linear_leaves_out_is_told(caplog):
    caplog.set_level(logging.INFO, "torch_dora")
    model = apply_dora(Odd(), RULE)
    warning, summary = (record.getMessage() for record in caplog.records)
    listed = [line.split()[0] for line in warning.splitlines()[1:]]
    assert listed == LEFT_OUT
    assert summary == coverage(model).summary()
    caplog.clear()
    apply_dora(Odd(), DoRARule("all-linear", 2, 4.0, exclude="|".join(LEFT_OUT)))
    assert [record.levelname for record in caplog.records] == ["INFO"]
    with pytest.raises(ValueError, match=r"matches no layer(.|\n)*leaves out .*\n  0 \(Codes\)$"):
        apply_dora(nn.Sequential(Codes()), RULE)


@pytest.mark.parametrize("path", LEFT_OUT)
def test_a_path_that_names_what_cannot_be_adapted_is_refused(path):
    with pytest.raises(TypeError, match=rf"cannot be adapted(.|\n)*\n  {path} "):
        apply_dora(Odd(), DoRARule(path, 2, 4.0))


def test_on_the_meta_device_and_of_no_module():
    sizes = DECODER | {"num_local_experts": 4}
    with torch.device("meta"):
        model = of("MixtralForCausalLM", "MixtralConfig", **sizes)()
    table = coverage(model)
    assert table.count("adaptable") == 14
    assert rows(model)["model.layers.0.mlp.experts.down_proj"].is_linear
    assert not rows(model)["lm_head"].is_linear
    with pytest.raises(TypeError, match="model is a list"):
        coverage([])  # pyright: ignore[reportArgumentType]


class TestZero3:
    """DeepSpeed's partitions, by what they are known by."""

    def partitioned(self, model):
        for index, parameter in enumerate(model.parameters()):
            parameter.ds_id, parameter.ds_shape = index, parameter.shape
            parameter.data = torch.empty(0)
        return model

    def test_adapting_is_refused(self, tmp_path):
        model = self.partitioned(nn.Sequential(nn.Linear(3, 4), nn.Embedding(5, 6)))
        match = r"ZeRO-3 has partitioned(.|\n)*adapt first(.|\n)*\n  0\.bias\n  0\.weight\n  1"
        with pytest.raises(NotImplementedError, match=match):
            apply_dora(model, DoRARule("0", 2, 4.0))
        with pytest.raises(NotImplementedError, match=match):
            torch_dora.peft.load_adapter(model, tmp_path)
        assert [row.shape for row in coverage(model).weights] == [(4, 3), (5, 6)]

    def test_what_reads_the_values_says_how(self, tmp_path):
        model = self.partitioned(apply_dora(nn.Sequential(nn.Linear(3, 4)), RULE))
        for call in (
            torch_dora.norms,
            torch_dora.merge_dora,
            torch_dora.remove_dora,
            lambda model: torch_dora.peft.save_adapter(model, tmp_path / "a"),
        ):
            with pytest.raises(NotImplementedError, match=r"GatheredParameters(.|\n)*\n  0$"):
                call(model)
