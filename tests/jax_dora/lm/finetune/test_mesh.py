"""Fine-tuning on meshes of virtual devices, beside one device."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

import jax_dora
import jax_dora.peft
from jax_dora.lm.commands import main
from jax_dora.lm.finetune import estimate, packing, training
from jax_dora.lm.finetune.run import Run
from jax_dora.lm.models import DecoderSharding, load_model, read_config, save_model
from parity import tolerances
from tests.jax_dora.lm.finetune import runs
from tests.jax_dora.lm.finetune.runs import assert_one_line, last_of, metrics

OPTIONS = (
    *("--rank", "3", "--alpha", "5", "--dropout", "0.1", "--length", "24", "--batch", "4"),
    *("--accumulate", "2", "--steps", "3", "--learning-rate", "1e-2", "--samples", "0"),
)
MESHES = (
    {"dp": 2, "fsdp": 2, "tp": 2},
    *({"dp": 4}, {"fsdp": 4}, {"fsdp": 2, "tp": 2}, {"dp": 2, "tp": 2}),
)
# Of quantised bases: how tensor parallelism shards the scales of down_proj's inputs.
FORMATS = {"nf4": "tp", "int8": None}
# One whose outputs tensor parallelism shards, and one whose inputs.
TARGET = "model/layers/.*/(q|down)_proj"


@pytest.fixture
def four(monkeypatch):
    """Four of the devices, as if there were no others."""
    devices = jax.devices()[:4]
    monkeypatch.setattr(jax, "devices", lambda *_: devices)
    monkeypatch.setattr(jax, "device_count", lambda *_: 4)


@functools.cache
def rows():
    """Two micro-batches of four packed rows, of which tokens of any number count."""
    rng = np.random.default_rng(0)
    shape = (2, 4, 24)
    return packing.Rows(
        rng.integers(0, 257, shape).astype(np.int32),
        rng.integers(0, 257, shape).astype(np.int32),
        (rng.random(shape) < rng.random((2, 4, 1))).astype(np.float32),
        np.broadcast_to(np.arange(24, dtype=np.int32) % 16, shape),
        np.broadcast_to(np.where(np.arange(24) < 16, 1, 2).astype(np.int32), shape),
    )


def adapted(folder, sharding, quantize=None):
    """The tiny model with an adapter as if it had been trained, in training."""
    model = load_model(folder, sharding=sharding, quantize=quantize)
    init = nnx.initializers.normal(0.1)
    rule = jax_dora.DoRARule(TARGET, rank=3, alpha=5, dropout=0.1, lora_b_init=init)
    model = jax_dora.apply_dora(model, rule, rngs=nnx.Rngs(0))
    for path, variable in nnx.to_flat_state(nnx.state(model, jax_dora.DoRAParam)):
        key = jax.random.key(len("".join(map(str, path))))
        noise = jax.device_put(jax.random.normal(key, variable.shape), variable.sharding)
        variable.set_value(variable.get_value() * (1 + jnp.float32(0.2) * noise))
    model.train()
    return model


def gradient(folder, sharding=None, quantize=None):
    """Returns (loss, gradients by path) of a step, and the model's parts."""
    parts, given = training.Parts.of(adapted(folder, sharding, quantize)), rows()
    if sharding is not None:
        parts = parts._replace(streams=sharding.placed(parts.streams))
        given = given.placed(sharding.micro_batches)
    loss, gradients, _ = training.accumulate(*parts, given)
    flat = nnx.to_flat_state(gradients)
    return loss, {"/".join(map(str, path)): one.get_value() for path, one in flat}, parts


@pytest.fixture(scope="module")
def alone(inputs):
    """A function of the base's format, which computes once for each."""
    return functools.cache(lambda quantize: gradient(inputs[1], None, quantize))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "quantize"),
    [*((sizes, None) for sizes in MESHES), *(({"fsdp": 2, "tp": 2}, one) for one in FORMATS)],
    ids=str,
)
def test_a_batch_has_the_same_gradient_on_any_mesh(sizes, quantize, inputs, alone):
    sharding = DecoderSharding.over(**sizes, devices=jax.devices()[: math.prod(sizes.values())])
    loss, found, parts = gradient(inputs[1], sharding, quantize)
    wanted_loss, wanted, _ = alone(quantize)
    np.testing.assert_allclose(loss, wanted_loss, rtol=1e-6)
    for path, other in wanted.items():
        # Lies as the design says, as the adapter itself does.
        place = sharding(path, other.shape)
        assert found[path].sharding.is_equivalent_to(place, other.ndim), path
        limit = tolerances.caps.OPERATOR_FP32_MAX_ABS * max(1.0, float(jnp.abs(other).max()))
        assert np.abs(np.asarray(found[path]) - np.asarray(other)).max() <= limit, path
    if quantize is not None:
        kernel = parts.model().model.layers.mlp.down_proj.kernel[...]
        # Two blocks of 64 inputs in nf4, one a device; int8 has one scale for an output.
        assert kernel.qvalue.sharding.spec == jax.P(None, "tp", "fsdp")
        assert kernel.scale.sharding.spec == jax.P(None, FORMATS[quantize], "fsdp")
        return
    for state in (parts.adapters, parts.frozen):
        for path, variable in nnx.to_flat_state(state):
            place = sharding("/".join(map(str, path)), variable.shape)
            assert variable.get_value().sharding.is_equivalent_to(place, variable.ndim), path


def trained(folder, sharding=None):
    """Returns the losses of 200 steps."""
    parts, given = training.Parts.of(adapted(folder, sharding)), rows()
    optimizer = training.make_optimizer("adamw", lambda _: 1e-3, clip=1.0, weight_decay=0.01)
    state = optimizer.init(parts.adapters)
    if sharding is not None:
        parts = parts._replace(streams=sharding.placed(parts.streams))
        state, given = sharding.placed(state), given.placed(sharding.micro_batches)
    losses = []
    for _ in range(200):
        loss, gradients, streams = training.accumulate(*parts, given)
        adapters, state, _ = training.update(optimizer, parts.adapters, state, gradients, loss)
        parts = parts._replace(adapters=adapters, streams=streams)
        losses.append(float(loss))
    return np.array(losses)


@pytest.mark.slow
def test_two_hundred_steps_are_those_of_one_device(inputs):
    wanted = trained(inputs[1])
    assert wanted[-1] < wanted[0] - 1
    for sizes in ({"dp": 4}, {"fsdp": 4}, {"fsdp": 2, "tp": 2}):
        found = trained(inputs[1], DecoderSharding.over(**sizes, devices=jax.devices()[:4]))
        # Roundings in other orders, which training neither damps nor blows up much.
        np.testing.assert_allclose(found, wanted, rtol=1e-3, err_msg=str(sizes))


def test_where_a_decoder_lies():
    sharding = DecoderSharding.over(fsdp=2, tp=2, devices=jax.devices()[:4])

    def spec(path, *shape):
        return tuple(sharding(f"model/layers/{path}", shape).spec)

    assert spec("mlp/up_proj/kernel", 2, 8, 16) == (None, "fsdp", "tp")
    assert spec("mlp/up_proj/lora_a", 2, 8, 3) == (None, "fsdp", None)
    assert spec("mlp/up_proj/lora_b", 2, 3, 16) == (None, None, "tp")
    assert spec("mlp/up_proj/magnitude", 2, 16) == (None, "tp")
    assert spec("mlp/down_proj/kernel", 2, 16, 8) == (None, "tp", "fsdp")
    assert spec("mlp/down_proj/lora_b", 2, 3, 8) == (None, None, "fsdp")
    assert spec("self_attn/q_proj/bias", 2, 16) == (None, "tp")
    assert spec("input_layernorm/scale", 2, 8) == (None, None)
    # A vocabulary of an odd number of tokens.
    assert tuple(sharding("model/embed_tokens/embedding", (257, 8)).spec) == (None, "fsdp")
    assert tuple(sharding("lm_head/kernel", (8, 256)).spec) == ("fsdp", "tp")


def finetune(inputs, output, *options):
    command = ["finetune", *inputs, *OPTIONS, *options, "--output", str(output)]
    assert main(last_of(command)) == 0
    return [line["loss"] for line in metrics(output)]


@pytest.mark.slow
def test_folders_from_a_mesh_are_those_of_one_device(inputs, tmp_path):
    """To the roundings of the norms that magnitudes start from, and of merging."""
    sharding = DecoderSharding.over(dp=2, fsdp=2, tp=2, devices=jax.devices()[:8])
    config = read_config(inputs[1])
    files = []
    for number, place in enumerate((None, sharding)):
        model = adapted(inputs[1], place)
        jax_dora.peft.save_adapter(model, tmp_path / f"{number}")
        save_model(jax_dora.merge_dora(model), tmp_path / f"{number}-merged", config)
        names = f"{number}/adapter_model.safetensors", f"{number}-merged/model.safetensors"
        files.append([load_file(tmp_path / name) for name in names])
    for one, other in zip(*files, strict=True):
        assert one.keys() == other.keys()
        for name, array in one.items():
            np.testing.assert_allclose(array, other[name], rtol=1e-6, atol=1e-6, err_msg=name)


@pytest.mark.slow
def test_a_run_on_a_mesh_is_that_of_one_device(inputs, four, caplog, tmp_path):
    """Each program is compiled once."""
    training.accumulate.clear_cache()
    training.update.clear_cache()
    mesh = ("--mesh", "fsdp=2,tp=2")
    with jax.log_compiles():
        found = finetune(inputs, tmp_path / "run", *mesh, "--merge", str(tmp_path / "merged"))
    for name in ("accumulate", "update"):
        compiled = [one for one in caplog.messages if re.match(rf"Compiling \S*{name}\b", one)]
        assert len(compiled) == 1, name
    assert (tmp_path / "merged" / "model.safetensors").is_file()
    np.testing.assert_allclose(found, finetune(inputs, tmp_path / "one"), rtol=1e-5)


@pytest.mark.slow
def test_a_run_goes_on_on_other_devices(inputs, four, tmp_path):
    run, constant = tmp_path / "run", ("--schedule", "constant")
    assert len(finetune(inputs, run, *constant, "--steps", "2")) == 2
    found = finetune(inputs, run, *constant, "--resume", "--mesh", "fsdp=4")
    np.testing.assert_allclose(found, finetune(inputs, tmp_path / "one", *constant), rtol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--mesh", "fsdp=3"], "the mesh dp=1,fsdp=3,tp=1 has 3 devices, but there are 4"),
        (["--mesh", "tp=4"], "num_key_value_heads=2: expected a multiple of 4, since tp"),
        (
            ["--mesh", "auto", "--batch", "2"],
            "--batch 2: expected a multiple of 4, since dp×fsdp of",
        ),
        (
            ["--mesh", "ep=4"],
            "'ep=4' is not a mesh: expected auto, or sizes of dp, fsdp, tp of at least 1, as in "
            "fsdp=2,tp=2",
        ),
        (["--mesh", "fsdp=0"], "'fsdp=0' is not a mesh"),
        (["--mesh", "fsdp=2,fsdp=2"], "'fsdp=2,fsdp=2' is not a mesh"),
    ],
)
def test_meshes_that_do_not_fit(options, message, inputs, four, tmp_path, capsys):
    command = ["finetune", *inputs, *OPTIONS, *options, "--output", str(tmp_path / "run")]
    assert main(last_of(command)) == 2
    assert_one_line(capsys, message)


@pytest.mark.ci
def test_a_small_model_is_whole_on_every_device(inputs, four, tmp_path, monkeypatch):
    """By itself; a large one is in parts."""
    assert plan_of(inputs, tmp_path, "--mesh", "auto").sharding.mesh.shape["dp"] == 4
    monkeypatch.setattr(estimate, "device_memory", lambda: 1_000_000)
    assert plan_of(inputs, tmp_path, "--mesh", "auto").sharding.mesh.shape["fsdp"] == 4
    # In four bits it fits.
    options = ("--mesh", "auto", "--quantize", "nf4")
    assert plan_of(inputs, tmp_path, *options).sharding.mesh.shape["dp"] == 4


def plan_of(inputs, tmp_path, *options):
    return runs.plan_of([*inputs, *OPTIONS, *options, "--output", str(tmp_path / "run")])


@pytest.mark.ci
def test_the_estimate_knows_the_mesh(inputs, four, tmp_path):
    shares = [
        estimate.memory(plan_of(inputs, tmp_path, *mesh).abstract_model, 4, 24)
        for mesh in ((), ("--mesh", "fsdp=2,tp=2"))
    ]
    one, several = shares
    assert 0.25 <= several["base model"] / one["base model"] < 0.3
    assert 0.25 <= several["adapters and optimizer"] / one["adapters and optimizer"] <= 0.5
    assert several["inputs of the layers"] == one["inputs of the layers"] / 2
    # The kernels, scales and adapters of a layer, of which each of two devices computes a half.
    assert several["gathered weights"] == 4 * (36_864 + 160 + 3_584) // 2


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [None, "dp=4", "fsdp=4", "fsdp=2,tp=2"])
def test_memory_is_about_what_xla_takes(mesh, inputs, four, tmp_path):
    sizes = ("--length", "256", "--batch", "8", "--rank", "8", "--dropout", "0")
    run = Run(plan_of(inputs, tmp_path, *sizes, *(("--mesh", mesh) if mesh else ())))
    given = packing.batch(run.plan.rows, 0, (2, 8), 0)
    if mesh:
        given = given.placed(run.plan.sharding.micro_batches)
    compiled = training.accumulate.lower(*run.parts, given).compile().memory_analysis()
    taken = compiled.argument_size_in_bytes + compiled.temp_size_in_bytes
    assert 0.5 < sum(estimate.memory(run.plan.abstract_model, 8, 256).values()) / taken < 2
