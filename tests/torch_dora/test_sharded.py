"""Sharded models: PEFT folders, fresh adapters, checkpoints, what is sent, and what is refused."""

import re

import pytest
import torch
from accelerate import cpu_offload
from accelerate.hooks import remove_hook_from_submodules
from torch import nn

from parity.sides.torch import processes
from tests.torch_dora import adapters
from tests.torch_dora import in_processes as inside
from tests.torch_dora.peft_folders import tensors_of
from torch_dora import DoRARule, apply_dora, merge_dora, norms, peft, remove_dora


@pytest.fixture
def trained():
    """One device's model, its adapter away from where it began."""
    return adapters.trained(apply_dora(inside.base(), inside.RULE))


@pytest.mark.ci
@pytest.mark.parametrize(("count", "kind"), [(2, "tp"), (4, "fsdp"), (4, "fsdp tp")])
def test_folders_are_those_of_one_device(trained, tmp_path, count, kind):
    peft.save_adapter(trained, tmp_path / "one")
    found = processes.run(
        inside.folders, count, "cpu", kind, str(tmp_path / "one"), str(tmp_path / "many")
    )
    one, many = tensors_of(tmp_path / "one"), tensors_of(tmp_path / "many")
    assert one.keys() == many.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, many[name]), name
    config = "adapter_config.json"
    assert (tmp_path / "one" / config).read_text() == (tmp_path / "many" / config).read_text()
    assert "many" in found["refused"]
    want = trained(inside.batch())
    for name in ("y", "with norms"):
        torch.testing.assert_close(found[name], want)
    for name, norm in norms(trained).items():
        torch.testing.assert_close(found["norms"][name], norm)
    assert not found.get("held whole")
    if kind == "tp":
        torch.testing.assert_close(found["merged"], want)
        torch.testing.assert_close(found["removed"], inside.base()(inside.batch()))


@pytest.fixture(scope="module")
def in_two():
    """What two processes find, which take longer to start than to compute."""
    return processes.run(inside.quick, 2, "cpu")


@pytest.mark.ci
def test_fresh_adapters_are_the_base_model_and_the_same_everywhere(in_two):
    found = in_two["fresh"]
    base = inside.base()
    want = base(inside.batch())
    base.load_state_dict({name: 2 * value for name, value in base.state_dict().items()})
    doubled = base(inside.batch())
    for kind in ("fsdp", "tp"):
        torch.testing.assert_close(found[kind], want)
        torch.testing.assert_close(found[f"doubled {kind}"], doubled)
        torch.testing.assert_close(found[f"disabled {kind}"], doubled)
    assert all(torch.equal(part, found["lora_a"][0]) for part in found["lora_a"])
    assert found["lora_a"][0].abs().min() > 0


@pytest.mark.ci
@pytest.mark.parametrize("way", ["linear", "bmm", "grouped"])
def test_packed_experts_are_those_of_one_device(way):
    found = processes.run(inside.experts, 2, "cpu", way)
    for many, one in zip(found["many"], found["one"], strict=True):
        torch.testing.assert_close(many, one)


@pytest.mark.ci
def test_checkpoints_go_on_in_fewer_processes(tmp_path):
    folder = str(tmp_path)
    want = processes.run(inside.train, 4, "cpu", folder, 0, 6)
    assert want[-1] < want[0]
    assert processes.run(inside.train, 4, "cpu", folder, 3, 6) == want[3:]
    found = processes.run(inside.train, 2, "cpu", folder, 3, 6)
    assert found == pytest.approx(want[3:], rel=1e-5)


# Forward, then backward, of a layer of 8 inputs and 12 outputs, rank 2, 5 rows.
@pytest.mark.parametrize(
    ("style", "base", "adapter"),
    [
        # The norm; the gradients of magnitude and lora_b, whose z is a sum over the processes.
        ("row", [(5, 12)], [(12,), (12,), (12, 2)]),
        # The gradient of lora_a, as in LoRA.
        ("column", [(5, 8)], [(2, 8)]),
    ],
)
@pytest.mark.ci
def test_what_is_sent(in_two, style, base, adapter):
    found = in_two["sent", style]
    assert found["base"] == base
    assert sorted(found["DoRA"]) == sorted(base + adapter)


@pytest.mark.parametrize("mode", ["adapter", "input"])
@pytest.mark.ci
def test_dropout_of_a_row_parallel_layer(in_two, mode):
    found, want = in_two["dropping", mode]
    torch.testing.assert_close(found, want)


@pytest.mark.ci
@pytest.mark.parametrize("kind", ["tp", "fsdp"])
def test_compiled_models(kind):
    processes.run(inside.compiled, 2, "cpu", kind)


REFUSED = {
    "apply": r"NotImplementedError: FSDP manages .*apply_dora before fully_shard.*\n  down\n  up$",
    "remove": r"NotImplementedError: FSDP manages .*before fully_shard:\n  down\n  up$",
    "merge": r"NotImplementedError: FSDP manages .*unsharded model, and merge that:\n  down\n  up$",
    "load": r"NotImplementedError: FSDP manages .*rank, alpha and dropout:\n  down\n  up$",
    "cast": r"TypeError: magnitude is torch.bfloat16 .*param_dtype None",
    "flat": r"NotImplementedError: FullyShardedDataParallel keeps .*use fully_shard.*\.up$",
    "plain x": r"TypeError: x: plain, while weight.*make x a DTensor.*DTensor\.from_local$",
    "embedding": r"NotImplementedError: '' cannot be adapted: .*only linear layers",
    "bank": r"NotImplementedError: the weights of these layers are DTensors.*\n  down\n  up$",
    "with bank": r"NotImplementedError: the weights of these layers are DTensors.*\n  down\n  up$",
    "load into bank": r"NotImplementedError: the weights of these layers.*\n  down\n  up$",
    "pending sum": r"NotImplementedError: weight has the placements .*call redistribute",
    "meta": r"NotImplementedError: .*meta device.*\n  down\.weight\n  up\.weight$",
}


@pytest.mark.ci
def test_what_cannot_be_is_refused(trained, tmp_path):
    peft.save_adapter(trained, tmp_path / "adapter")
    found = processes.run(inside.refusals, 2, "cpu", str(tmp_path / "adapter"))
    assert found.keys() == REFUSED.keys()
    for name, pattern in REFUSED.items():
        assert re.match(pattern, found[name], re.DOTALL), found[name]


@pytest.mark.ci
def test_offloaded_adapters_are_refused(trained, tmp_path):
    want = trained(inside.batch())
    cpu_offload(trained, execution_device="cpu")
    y = trained(inside.batch())
    torch.testing.assert_close(y, want)
    with pytest.raises(RuntimeError, match=r"accelerate offloads.*freeze"):
        y.sum().backward()
    for function in (
        remove_dora,
        merge_dora,
        norms,
        lambda model: peft.save_adapter(model, tmp_path / "adapter"),
    ):
        with pytest.raises(NotImplementedError, match=r"remove_hook_from_sub(.|\n)*\n  down\n  up"):
            function(trained)
    remove_hook_from_submodules(trained)
    trained(inside.batch()).sum().backward()
    assert trained.up.magnitude.grad.abs().min() > 0
    torch.testing.assert_close(merge_dora(trained)(inside.batch()), want)


@pytest.mark.ci
def test_a_model_on_the_meta_device_is_refused(trained, tmp_path):
    peft.save_adapter(trained, tmp_path / "adapter")
    with torch.device("meta"):
        model = inside.Model()
    with pytest.raises(NotImplementedError, match=r"meta device(.|\n)*\n  down\.weight\n  up\.w"):
        peft.load_adapter(model, tmp_path / "adapter")
    assert type(model.up) is nn.Linear
    apply_dora(model, DoRARule("up", 2, 2))
    with pytest.raises(NotImplementedError, match=r"meta device(.|\n)*\n  up\.lora_a"):
        peft.save_adapter(model, tmp_path / "another")
