"""Rows that choose their adapters in torch: each is as the model with that adapter alone."""

import copy
import types

import numpy as np
import peft
import pytest
import torch
import transformers
from accelerate import cpu_offload, dispatch_model
from torch import nn

import torch_dora
from parity import oracle, tolerances
from tests.torch_dora.peft_folders import IDS, SIZES

IN, OUT = 13, 10
RANKS = (1, 16, 5)
ROWS = [2, -1, 0, 1, 1]


def adapted(seed, rank, dtype, **options):
    """A layer whose base is the same for every seed, away from its start."""
    torch.manual_seed(0)
    base = nn.Linear(IN, OUT, dtype=dtype)
    torch.manual_seed(seed)
    layer = torch_dora.DoRALinear.from_linear(base, rank=rank, alpha=3, **options)
    with torch.no_grad():
        layer.lora_b.normal_(0, 0.3)
        layer.magnitude.mul_(1 + 0.2 * torch.randn(OUT))
    return layer


def filled(dtype=torch.float32, slots=4):
    torch.manual_seed(0)
    base = nn.Linear(IN, OUT, dtype=dtype)
    bank = torch_dora.AdapterBank(base, slots, 16, path=".*")
    alone = [adapted(1 + at, rank, dtype, use_rslora=rank == 5) for at, rank in enumerate(RANKS)]
    for slot, layer in enumerate(alone):
        bank.load(slot, layer)
    return base, bank, alone


@pytest.mark.parametrize(
    ("dtype", "implementation"),
    [(torch.float32, None), (torch.bfloat16, None), (torch.bfloat16, "triton")],
)
@pytest.mark.parametrize("time", [(), (4,)])
def test_every_row_is_within_its_bound_of_the_oracle(dtype, implementation, time):
    base, bank, alone = filled(dtype)
    x = torch.randn(len(ROWS), *time, IN, generator=torch.Generator().manual_seed(1)).to(dtype)
    with torch.no_grad():
        model = torch_dora.with_bank(base, bank, ROWS, implementation=implementation)
        y, plain = model(x), base(x)
    assert (y.dtype, y.shape) == (dtype, plain.shape)
    for row, slot in enumerate(ROWS):
        if slot < 0:
            assert torch.equal(y[row], plain[row])
            continue
        one = alone[slot]
        bias = base.bias.detach()
        weights = [t.detach() for t in (one.weight, one.lora_a, one.lora_b, one.magnitude)]
        exact = oracle.dora_linear(x[row], *weights, one.scale, bias=bias, dtype=dtype)
        bound = tolerances.dora_linear(
            torch.zeros_like(exact), x[row], *weights, one.scale, dtype, bias=bias
        ).y.reshape(exact.shape)
        assert bool((abs(y[row].double() - exact) <= bound).all())


def test_numbers_may_be_numpy_s():
    assert torch_dora.AdapterBank(nn.Linear(4, 3), np.int64(2), np.int32(3)).slots == 2


@pytest.mark.parametrize("kind", [torch.tensor, np.array])
def test_ids_that_the_caller_changes_later(kind):
    """A model keeps the ids that it was made with."""
    base, bank, _ = filled()
    ids = kind(ROWS)
    assert str(ids.dtype).endswith("int64")
    x = torch.randn(len(ROWS), IN, generator=torch.Generator().manual_seed(1))
    model = torch_dora.with_bank(base, bank, ids)
    y = model(x)
    ids[:] = 0
    assert torch.equal(model(x), y)


def test_an_adapter_whose_norm_overflows_is_refused():
    """Its g would be 0, and so would all that the projection computes."""
    _, bank, alone = filled()
    before = [tensor.clone() for tensors in bank.tensors.values() for tensor in tensors]
    with torch.no_grad():
        alone[0].lora_a *= 1e12
        alone[0].lora_b *= 1e12
    with pytest.raises(ValueError, match="the norm of '' with its adapter holds NaN or infinity"):
        bank.load(0, alone[0])
    after = [tensor for tensors in bank.tensors.values() for tensor in tensors]
    assert all(
        torch.equal(a.nan_to_num(7), b.nan_to_num(7)) for a, b in zip(before, after, strict=True)
    )


def test_a_slot_forgets_what_it_held_and_nothing_moves():
    _, bank, alone = filled()
    (tensors,) = bank.tensors.values()
    before = tensors.lora_a.data_ptr()
    assert bank.load(np.int64(1), alone[0]) is bank
    assert tensors.lora_a.data_ptr() == before
    for tensor in tensors:
        assert torch.equal(tensor[0], tensor[1])
    bank.evict(1)
    assert (tensors.lora_a[1] == 0).all()
    assert tensors.g[1].isnan().all()


@pytest.mark.parametrize(("rows", "ids"), [((0, IN), []), ((0, 3, IN), []), ((2, 0, IN), [0, -1])])
def test_a_batch_may_be_without_rows(rows, ids):
    base, bank, _ = filled()
    for implementation in (None, "eager"):
        model = torch_dora.with_bank(base, bank, ids, implementation=implementation)
        assert model(torch.ones(rows)).shape == (*rows[:-1], OUT)


# torch says that there is nothing to draw.
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_a_projection_may_be_without_outputs():
    model = nn.Sequential(nn.Linear(IN, 0), nn.Linear(0, OUT))
    bank = torch_dora.AdapterBank(model, 2, 4)
    bank.load(
        0, torch_dora.apply_dora(copy.deepcopy(model), torch_dora.DoRARule("all-linear", 4, 8))
    )
    x = torch.randn(2, IN)
    assert torch.equal(torch_dora.with_bank(model, bank, [0, -1])(x), model(x))
    with pytest.raises(ValueError, match=r"\[1\], whose slots hold no adapter"):
        torch_dora.with_bank(model, bank, [1, -1])


def test_layers_that_compute_something_else_are_left_out():
    class Rectified(nn.Linear):
        def forward(self, input):
            return super().forward(input).relu()

    model = nn.Sequential(nn.Linear(IN, OUT), Rectified(OUT, OUT))
    assert list(torch_dora.AdapterBank(model, 2, 4).layers) == ["0"]


def test_what_is_wrong_is_told():
    base, bank, alone = filled()
    bank.evict(1)
    before = [tensor.clone() for tensor in bank.tensors[""]]
    for slot, adapter, error, message in [
        (4, alone[0], ValueError, "slot is 4; expected 0 to 3"),
        (True, alone[0], TypeError, "slot is True"),
        (0, {}, TypeError, "adapter is a dict"),
        (0, base, ValueError, "without DoRA layers"),
        (0, adapted(9, 17, torch.float32), ValueError, "rank 17 for ''; expected at most 16"),
        (0, nn.Sequential(alone[0]), ValueError, "'0', which the bank does not cover"),
    ]:
        with pytest.raises(error, match=message):
            bank.load(slot, adapter)
    with torch.no_grad():
        alone[2].lora_b[0, 0] = torch.nan
    with pytest.raises(ValueError, match="NaN or infinity in lora_b of ''"):
        bank.load(0, alone[2])
    halves, half, (large, *_) = filled(torch.float16)
    large.lora_a.data[0, 0] = 1e5
    with pytest.raises(ValueError, match="NaN or infinity in lora_a of '', in the bank's dtype"):
        half.load(1, large)
    assert torch_dora.with_bank(halves, half, [1])(torch.ones(1, IN).half()).isfinite().all()
    for ids, error, message in [
        ([0, 4], ValueError, r"\[4\]; expected slots from 0 to 3"),
        ([-2], ValueError, r"\[-2\]; expected"),
        (None, TypeError, r"adapter_ids is None; expected integers \[batch\]"),
        ([1], ValueError, r"\[1\], whose slots hold no adapter"),
        ([0.0], TypeError, "float32; expected integers"),
        ([[0]], ValueError, r"shape \(1, 1\)"),
    ]:
        with pytest.raises(error, match=message):
            torch_dora.with_bank(base, bank, ids)
    with pytest.raises(ValueError, match="adapter_ids has 2 rows"):
        torch_dora.with_bank(base, bank, [0, -1])(torch.zeros(3, IN))
    with pytest.raises(ValueError, match="model holds an adapter"):
        torch_dora.with_bank(alone[0], bank, [0])
    with pytest.raises(ValueError, match="holds an adapter already"):
        torch_dora.AdapterBank(alone[0], 1, 1, path=".*")
    plain = nn.Sequential(base)
    bank_of_plain = torch_dora.AdapterBank(plain, 1, 1)
    copied = torch_dora.with_bank(plain, bank_of_plain, [-1])
    for function in (
        lambda: torch_dora.with_bank(copied, bank_of_plain, [-1]),
        lambda: torch_dora.AdapterBank(copied, 1, 1),
        lambda: torch_dora.apply_dora(copied, torch_dora.DoRARule("all-linear", 1, 1)),
    ):
        with pytest.raises(TypeError, match=r"model\.0 is a BankLinear, .* torch_dora\.with_bank"):
            function()
    pairs = zip(before, bank.tensors[""], strict=True)
    assert all(torch.equal(a.nan_to_num(7), b.nan_to_num(7)) for a, b in pairs)


def test_a_forward_of_a_module_s_own_calls_the_layers_of_the_copy():
    base, _, (one, *_) = filled()
    model = nn.Sequential(nn.Sequential(base))
    bank = torch_dora.AdapterBank(model, 1, 16, path=".*")
    bank.load(0, nn.Sequential(nn.Sequential(one)))
    x = torch.randn(1, IN)
    dispatch_model(model, {"": "cpu"}, force_hooks=True)
    model[0].forward = types.MethodType(type(model[0]).forward, model[0])
    with torch.no_grad():
        torch.testing.assert_close(torch_dora.with_bank(model, bank, [0])(x), one(x))
        assert torch.equal(model(x), base(x))
    forward = model.forward
    model.forward = lambda x: forward(x)
    with pytest.raises(
        NotImplementedError, match=r"a copy would call the original.*:\n  the model itself"
    ):
        torch_dora.with_bank(model, bank, [0])


def test_a_layer_is_called_by_the_name_of_its_base_s_argument():
    base, bank, (one, *_) = filled()
    x = torch.randn(1, IN)
    torch.testing.assert_close(torch_dora.with_bank(base, bank, [0])(input=x), one(input=x))


def test_hooks_see_what_adapters_read_and_return():
    layer, _, (one, *_) = filled()
    model, alone = nn.Sequential(layer), nn.Sequential(one)
    for hooked in (layer, one):
        hooked.register_forward_pre_hook(lambda _, given: (given[0] + 1,))
        hooked.register_forward_hook(lambda _, given, result: result * given[0][:, :1])
    bank = torch_dora.AdapterBank(model, 1, 16, path=".*").load(0, alone)
    x = torch.randn(2, IN)
    with torch.no_grad():
        y = torch_dora.with_bank(model, bank, [0, -1])(x)
        torch.testing.assert_close(y[0], alone(x)[0])
        assert torch.equal(y[1], model(x)[1])


def test_weights_that_are_elsewhere_are_refused():
    model = nn.Sequential(nn.Linear(4, 3))
    with pytest.raises(NotImplementedError, match=r"meta device(.|\n)*\n  0\.weight"):
        torch_dora.AdapterBank(copy.deepcopy(model).to("meta"), 1, 1)
    with pytest.raises(NotImplementedError, match=r"offloaded(.|\n)*\n  0"):
        torch_dora.AdapterBank(cpu_offload(model, execution_device="cpu"), 1, 1)
    model = nn.Sequential(nn.Linear(4, 3))
    bank = torch_dora.AdapterBank(model, 1, 1)
    adapter = torch_dora.apply_dora(copy.deepcopy(model), torch_dora.DoRARule("0", 1, 1))
    with pytest.raises(NotImplementedError, match=r"meta device(.|\n)*\n  0\.lora_a"):
        bank.load(0, copy.deepcopy(adapter).to("meta"))
    with pytest.raises(TypeError, match=r"DataParallel, which wraps .*model\.module"):
        bank.load(0, nn.DataParallel(copy.deepcopy(adapter)))
    with pytest.raises(NotImplementedError, match=r"offloaded(.|\n)*\n  0"):
        bank.load(0, cpu_offload(adapter, execution_device="cpu"))


SETTINGS = [
    {"r": 5, "lora_alpha": 8, "target_modules": "all-linear", "use_dora": True},
    {"r": 16, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "use_rslora": True},
    {"r": 2, "target_modules": ["down_proj"], "layers_to_transform": [1]},
]


def test_every_row_is_as_peft_has_it(tmp_path):
    def make():
        torch.manual_seed(0)
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).eval()

    model = make()
    bank = torch_dora.AdapterBank(model, 3, 16)
    tokens = IDS[:1].repeat(4, 1)
    rows = [2, -1, 0, 1]
    with torch.no_grad():
        expected = model(tokens).logits
        for slot, setting in enumerate(SETTINGS):
            theirs = peft.get_peft_model(
                make(), peft.LoraConfig(task_type="CAUSAL_LM", **setting)
            ).eval()
            for name, parameter in theirs.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(0, 0.3)
                elif "magnitude" in name:
                    parameter.mul_(1 + 0.2 * torch.randn_like(parameter))
            theirs.save_pretrained(tmp_path / str(slot))
            bank.load(slot, tmp_path / str(slot))
            alone = theirs(tokens[:1]).logits[0]
            assert (alone - expected[rows.index(slot)]).abs().max() > 1e-3
            expected[rows.index(slot)] = alone
        logits = torch_dora.with_bank(model, bank, rows)(tokens).logits
    assert np.abs((logits - expected).numpy()).max() <= tolerances.caps.OPERATOR_FP32_MAX_ABS
