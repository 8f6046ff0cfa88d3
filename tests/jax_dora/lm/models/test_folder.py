"""Hugging Face folders: both ways bitwise, placed as asked, and refused when they are not sound."""

import copy
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from safetensors.numpy import load_file, save_file
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

import jax_dora
import jax_dora.lm.models as decoder
from jax_dora.lm.models import rope, stored_arrays
from jax_dora.lm.models.tensor_files import stored_tensors
from jax_dora.peft import load_adapter
from parity.tolerances.caps import OPERATOR_FP32_MAX_ABS
from tests.jax_dora.lm.models.conftest import LLAMA3
from tests.jax_dora.meshes import automatic
from tests.jax_dora.peft.peft_folders import peft_model
from tests.tables import thinned

ROOT = Path(__file__).parents[4]
YARN = {"rope_type": "yarn", "rope_theta": 5e3, "factor": 4.0}
YARNS = (
    {},
    {"attention_factor": 1.5, "original_max_position_embeddings": 64},
    {"beta_fast": 8.0, "beta_slow": 2.0, "truncate": False},
    {"beta_fast": 2.0, "beta_slow": 2.0, "truncate": False},
)
WINDOW = {"use_sliding_window": True, "sliding_window": 9}


def same_arrays(a, b):
    jax.tree.map(np.testing.assert_array_equal, nnx.state(a), nnx.state(b))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("max_file_bytes", thinned([2 << 30, 50_000], [50_000]))
@pytest.mark.ci
def test_written_folder_is_the_same_model(
    make_folder, make_torch_model, tmp_path, dtype, max_file_bytes
):
    source = make_folder("qwen3", dtype=dtype)
    (source / "tokenizer.json").write_text("{}")
    template = Path("additional_chat_templates") / "tool_use.jinja"
    (source / template).parent.mkdir()
    (source / template).write_text("{{ tools }}")
    model = decoder.load_model(source, segments=4)
    decoder.save_model(
        model,
        tmp_path / "new" / "folder",
        decoder.read_config(source),
        tokenizer_from=source,
        max_file_bytes=max_file_bytes,
    )
    written = tmp_path / "new" / "folder"
    assert (written / "tokenizer.json").exists()
    assert (written / template).read_text() == "{{ tools }}"
    assert (len(list(written.glob("*.safetensors"))) > 1) == (max_file_bytes < 1 << 20)
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["folder"]
    theirs = transformers.AutoModelForCausalLM.from_pretrained(written)
    expected = make_torch_model("qwen3", dtype).state_dict()
    assert theirs.dtype == dtype
    assert theirs.state_dict().keys() == expected.keys()
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(tensor, expected[name]), name
    same_arrays(decoder.load_model(written), model)


def test_small_blocks_change_nothing(make_folder, monkeypatch):
    source = make_folder("qwen3-tied")
    model = decoder.load_model(source)
    monkeypatch.setattr(stored_arrays, "BLOCK_BYTES", 1000)
    same_arrays(decoder.load_model(source), model)


def test_dtype_on_loading(make_folder):
    model = decoder.load_model(make_folder("llama"), dtype=jnp.bfloat16, attention="xla")
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(model))} == {jnp.dtype("bfloat16")}
    assert model.model.layers.self_attn.config.attention == "xla"


@pytest.mark.slow
def test_sharded(make_folder, tokens, monkeypatch):
    source = make_folder("qwen3")
    whole = decoder.load_model(source)
    monkeypatch.setattr(stored_arrays, "BLOCK_BYTES", 1000)
    mesh = automatic(data=2, model=4)

    def sharding(path, shape):
        if path.endswith("kernel"):
            spec = (*(None,) * (len(shape) - 2), "data", "model")
            if path.startswith("lm_head"):
                spec = ("data", None)
            return NamedSharding(mesh, PartitionSpec(*spec))
        return NamedSharding(mesh, PartitionSpec())

    model = decoder.load_model(source, sharding=sharding)
    same_arrays(model, whole)
    kernel = model.model.layers.mlp.up_proj.kernel[...]
    assert kernel.sharding == sharding("x/kernel", kernel.shape)
    assert {shard.data.shape for shard in kernel.addressable_shards} == {(3, 24, 20)}
    np.testing.assert_allclose(
        nnx.jit(type(model).__call__)(model, jnp.asarray(tokens)),
        whole(jnp.asarray(tokens)),
        rtol=0,
        atol=1e-4,
    )


def test_a_mesh_over_which_the_heads_do_not_divide(make_folder):
    sharding = decoder.DecoderSharding.over(tp=4, devices=jax.devices()[:4])
    message = "num_attention_heads=6: expected a multiple of 4, since tp of the mesh is 4"
    with pytest.raises(ValueError, match=message):
        decoder.load_model(make_folder("llama"), sharding=sharding)


def test_one_sharding_for_all(make_folder):
    device = jax.devices()[3]
    sharding = jax.sharding.SingleDeviceSharding(device)
    model = decoder.load_model(make_folder("llama"), sharding=sharding)
    assert {leaf.device for leaf in jax.tree.leaves(nnx.state(model))} == {device}


# Run in a process of its own, whose peak is loading's. A tiny model first: imports, the backend
# and the first compilation are not the folder's. (getrusage's peak would be the parent's.)
MEASURE = """
import gc
import sys

import jax
from flax import nnx

import jax_dora.lm.models as decoder
from jax_dora.ops.quantised import bits

def memory(field):
    lines = open("/proc/self/status").read().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(field)).split()[1])

big, tiny, quantize = sys.argv[1], sys.argv[2], sys.argv[3] or None
decoder.load_model(tiny, quantize=quantize)
gc.collect()
open("/proc/self/clear_refs", "w").write("5")  # the peak starts again
before = memory("VmRSS")
model = decoder.load_model(big, quantize=quantize)
peak = memory("VmHWM") - before
print(peak, sum(x.size * bits(x.dtype) // 8 for x in jax.tree.leaves(nnx.state(model))))
"""


@pytest.fixture(scope="module")
def measured_folders(tmp_path_factory):
    """A big folder, in several files, and a tiny one."""
    folder = tmp_path_factory.mktemp("measured")
    for name, hidden, layers, max_file_bytes in (
        ("tiny", 128, 1, 1 << 30),
        ("big", 1024, 12, 90 << 20),
    ):
        config = {
            "model_type": "qwen3",
            "hidden_size": hidden,
            "intermediate_size": 3 * hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": hidden // 64,
            "num_key_value_heads": hidden // 128,
            "head_dim": 64,
            "vocab_size": 4 * hidden,
            "dtype": "bfloat16",
        }
        model = decoder.make_model(decoder.DecoderConfig.from_hf(config))
        decoder.save_model(model, folder / name, config, max_file_bytes=max_file_bytes)
    return folder


def peak_and_result(folders, quantize):
    """The peak while the big folder is loaded, and the size of the result, in bytes."""
    result = subprocess.run(
        [sys.executable, "-c", MEASURE, folders / "big", folders / "tiny", quantize],
        env={
            **os.environ,
            "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'examples'}",
            "MALLOC_MMAP_THRESHOLD_": "65536",  # What is freed goes back to the system at once.
        },
        capture_output=True,
        text=True,
        check=True,
    )
    return map(int, result.stdout.split())


@pytest.mark.slow
def test_host_memory(measured_folders):
    """The peak stays below 1.2 times the folder."""
    size = sum(file.stat().st_size for file in (measured_folders / "big").iterdir())
    assert size > 200 << 20
    peak, _ = peak_and_result(measured_folders, "")
    assert peak < 1.2 * size


@pytest.mark.slow
@pytest.mark.parametrize("quantize", ["nf4", "int8"])
def test_memory_of_quantising_while_reading(measured_folders, quantize):
    """Beside the result there is one matrix: in bf16 as a block on the host and on the device, and
    in fp32 twice while it is rounded. The stack of all layers' matrices in bf16 is twice as large.
    """
    peak, result = peak_and_result(measured_folders, quantize)
    elements = 1024 * 3072
    assert peak - result < (2 + 2 + 2 * 4) * elements


@pytest.fixture
def llama(make_folder, tmp_path) -> Path:
    """A folder of one file to do harm to."""
    return shutil.copytree(make_folder("llama", max_shard_size="1GB"), tmp_path / "llama")


@pytest.fixture
def change(llama):
    def change(edit):
        tensors = load_file(llama / "model.safetensors")
        edit(tensors)
        save_file(tensors, llama / "model.safetensors", metadata={"format": "pt"})

    return change


NAME = "model.layers.1.mlp.up_proj.weight"


SURPLUS = "model.layers.3.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("edit", "error", "message"),
    [
        (lambda tensors: tensors.pop(NAME), ValueError, f"lacks 1 tensors of the model.*{NAME}"),
        (
            lambda tensors: tensors.update({SURPLUS: tensors[NAME]}),
            ValueError,
            f"not part of the model.*{SURPLUS}",
        ),
        (
            lambda tensors: tensors.update({NAME: tensors[NAME].T.copy()}),
            ValueError,
            rf"{NAME}.*has shape \(48, 80\); config.json says \(80, 48\)",
        ),
        (
            lambda tensors: tensors.update({NAME: tensors[NAME].astype(np.float64)}),
            NotImplementedError,
            f"{NAME}.*F64; expected BF16, F16, F32",
        ),
    ],
)
def test_other_tensors_than_the_model_has(llama, change, edit, error, message):
    change(edit)
    with pytest.raises(error, match=message):
        decoder.load_model(llama)


def test_old_rotary_buffers_are_passed_over(llama, change):
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    change(lambda tensors: tensors.update({name: np.ones(8, np.float32)}))
    decoder.load_model(llama)


@pytest.mark.parametrize("keep", [0, 5, 1000, -1])
def test_truncated_file(llama, keep):
    file = llama / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ValueError, match="not a valid safetensors file"):
        decoder.load_model(llama)


def test_file_cut_while_reading(llama):
    """The header was sound when it was read."""
    stored = stored_tensors(llama)
    file = llama / "model.safetensors"
    file.write_bytes(file.read_bytes()[:2000])
    tensor = max(stored.values(), key=lambda tensor: tensor.offset)
    with pytest.raises(ValueError, match="truncated"):
        list(tensor.blocks(slice(0, tensor.shape[0]), slice(None), 1 << 20))


def test_index_and_files_disagree(make_folder, tmp_path):
    folder = shutil.copytree(make_folder("llama"), tmp_path / "llama")
    file = folder / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    del index["weight_map"][NAME]
    file.write_text(json.dumps(index))
    with pytest.raises(ValueError, match=f"does not match the tensors in its files: {NAME}"):
        decoder.load_model(folder)
    file.write_text("{}")
    with pytest.raises(ValueError, match="not a valid index of files"):
        decoder.load_model(folder)
    file.write_text(json.dumps({"weight_map": {NAME: "../elsewhere.safetensors"}}))
    with pytest.raises(FileNotFoundError, match="not a file in"):
        decoder.load_model(folder)


@pytest.mark.ci
def test_a_head_that_an_adapter_s_folder_unties(make_folder, make_torch_model, tmp_path, recwarn):
    """Every program reads the folder of the merged model with both weights."""
    theirs = peft_model(
        make_torch_model("qwen3-tied"), target_modules=["q_proj"], modules_to_save=["lm_head"]
    )
    with torch.no_grad():
        theirs.get_output_embeddings().weight.mul_(1.5)
    theirs.save_pretrained(tmp_path / "adapter")
    folder = make_folder("qwen3-tied")
    adapted = load_adapter(decoder.load_model(folder), tmp_path / "adapter")
    config = decoder.read_config(folder)
    decoder.save_model(jax_dora.merge_dora(adapted), tmp_path / "merged", config)
    assert decoder.read_config(tmp_path / "merged")["tie_word_embeddings"] is False
    assert config["tie_word_embeddings"] is True
    tokens = np.arange(7)[None]
    with torch.no_grad():
        expected = theirs(torch.from_numpy(tokens)).logits.numpy()
        read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
        found = read(torch.from_numpy(tokens)).logits.numpy()
    np.testing.assert_allclose(found, expected, atol=OPERATOR_FP32_MAX_ABS)
    ours = decoder.load_model(tmp_path / "merged")(jnp.asarray(tokens))
    np.testing.assert_allclose(ours, expected, atol=OPERATOR_FP32_MAX_ABS)


def test_tied_head_stored_as_well(make_folder, tmp_path):
    folder = make_folder("qwen3-tied", max_shard_size="1GB")
    folder = shutil.copytree(folder, tmp_path / "tied")
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    save_file(tensors, folder / "model.safetensors")
    decoder.load_model(folder)
    tensors["lm_head.weight"][5, 5] += 1
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"lm_head\.weight that differs.*tie_word_embeddings"):
        decoder.load_model(folder)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"model_type": "gpt2"}, NotImplementedError, "model_type 'gpt2'; expected one of llama"),
        ({"hidden_act": "gelu"}, NotImplementedError, "hidden_act 'gelu'"),
        ({"rope_parameters": {"rope_type": "longrope"}}, NotImplementedError, "pe 'longrope'"),
        ({"rope_parameters": {"rope_type": "yarn"}}, ValueError, "'yarn' without a factor"),
        ({"rope_parameters": {"rope_type": "linear"}}, ValueError, "'linear' without a factor"),
        ({"rope_parameters": {"short_factor": []}}, NotImplementedError, "short_factor"),
        ({"quantization_config": {}}, NotImplementedError, "quantization_config"),
        ({"model_type": "mistral", "sliding_window": 0}, ValueError, "sliding_window 0; expected"),
        (
            {"model_type": "qwen3", "max_window_layers": 2} | WINDOW,
            NotImplementedError,
            "sliding_window 9 in 1 of 3 layers; expected it in all or none",
        ),
        ({"layer_types": ["sliding_attention"]}, NotImplementedError, "layer_types"),
        ({"hidden_size": None}, ValueError, "hidden_size None; expected a positive integer"),
        ({"num_key_value_heads": 4}, ValueError, "heads 6; expected a multiple of .*_heads 4"),
        ({"head_dim": 7}, ValueError, "head_dim 7; expected an even number"),
        ({"rms_norm_eps": "x"}, ValueError, "rms_norm_eps is 'x'; expected a positive number or 0"),
        (
            {"rope_parameters": {"rope_theta": 10**309}},
            ValueError,
            "rope_theta is 1000.*; expected",
        ),
        ({"dtype": "float64"}, ValueError, "dtype 'float64'; expected bfloat16, float16 or"),
        ({"rope_parameters": {"rope_theta": "x"}}, ValueError, "rope_theta is 'x'; expected a"),
        ({"rope_parameters": {"rope_theta": -1}}, ValueError, "rope_theta is -1; expected a"),
        ({"rms_norm_eps": float("inf")}, ValueError, "rms_norm_eps is inf; expected a positive"),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": "8"}},
            ValueError,
            "factor is '8'; expected a positive number",
        ),
        (
            {
                "rope_parameters": {"rope_type": "llama3", "factor": 8},
                "max_position_embeddings": None,
            },
            ValueError,
            "original_max_position_embeddings is None; expected a positive number",
        ),
        ({"num_hidden_layers": 0}, ValueError, "num_hidden_layers 0"),
    ],
)
def test_config_refused(llama, change, error, message):
    config = decoder.read_config(llama) | change
    with pytest.raises(error, match=message):
        decoder.DecoderConfig.from_hf(config)


def test_a_window_that_spans_all_positions_is_none(llama):
    whole = decoder.read_config(llama) | {"model_type": "qwen3"}
    window = {"use_sliding_window": True, "sliding_window": 256}
    slides = whole | window | {"layer_types": ["sliding_attention"] * 3}
    assert decoder.DecoderConfig.from_hf(slides) == decoder.DecoderConfig.from_hf(whole)


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("mistral", {}),  # 4096, which all positions of this one are within
        ("mistral", {"sliding_window": None}),
        ("llama", WINDOW | {"max_window_layers": 0}),
        ("qwen3", WINDOW | {"max_window_layers": 3}),
        ("qwen3", WINDOW | {"max_window_layers": 0, "layer_types": ["full_attention"] * 3}),
    ],
)
def test_a_window_that_no_layer_has(llama, kind, fields):
    config = decoder.read_config(llama) | {"model_type": kind}
    whole = decoder.DecoderConfig.from_hf(config | {"sliding_window": None})
    assert decoder.DecoderConfig.from_hf(config | fields) == whole


@pytest.mark.ci
@pytest.mark.parametrize(
    ("kind", "field"),
    [("mistral", "attention_bias"), *((one, "mlp_bias") for one in ("mistral", "qwen2", "qwen3"))],
)
def test_biases_that_a_family_has_not(llama, kind, field):
    config = decoder.read_config(llama) | {"model_type": kind}
    theirs = transformers.AutoConfig.for_model(**config | {field: True})
    theirs = transformers.AutoModelForCausalLM.from_config(theirs).state_dict()
    model = decoder.make_model(decoder.DecoderConfig.from_hf(config | {field: True}))
    ours = stored_arrays.stored_arrays(nnx.state(model), model.config)
    assert {name for array in ours for name in array.names} == theirs.keys()


@pytest.mark.parametrize(
    ("fields", "same"),
    [({"hidden_act": "swish"}, {}), ({"dtype": "half"}, {"dtype": "float16"})],
)
def test_names_of_torch(llama, fields, same):
    config = decoder.read_config(llama)
    found = decoder.DecoderConfig.from_hf(config | fields)
    assert found == decoder.DecoderConfig.from_hf(config | same)


def test_without_a_dtype_it_is_the_weights(make_folder, tmp_path):
    folder = make_folder("llama", dtype=torch.bfloat16)
    config = decoder.read_config(folder)
    del config["dtype"]
    (folder / "config.json").write_text(json.dumps(config))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
    model = decoder.load_model(folder)
    assert str(theirs.dtype) == f"torch.{jnp.dtype(model.config.dtype)}" == "torch.bfloat16"
    # Older files have the older name too.
    names = ("dtype", "torch_dtype")
    older = decoder.read_config(folder) | dict.fromkeys(names, "float32")
    decoder.save_model(model, tmp_path / "new", older)
    assert decoder.load_model(tmp_path / "new").config == model.config
    written = decoder.read_config(tmp_path / "new")
    assert [written[name] for name in names] == ["bfloat16"] * 2


def test_a_change_is_no_fault_of_the_file(llama):
    with pytest.raises(TypeError, match="atention"):
        decoder.DecoderConfig.from_hf(decoder.read_config(llama), atention="xla")


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_scaling": {"type": "linear", "factor": 4, "low_freq_factor": None}},
        {"rope_scaling": {"type": "linear", "factor": 4.0}, "rope_parameters": {"rope_theta": 5e5}},
        {"rope_parameters": {"rope_theta": 5e5, "partial_rotary_factor": 1.0}},
        {"rope_parameters": LLAMA3, "original_max_position_embeddings": 32},
        *({"rope_parameters": YARN | more, "max_position_embeddings": 512} for more in YARNS),
        {"rope_parameters": LLAMA3 | {"low_freq_factor": 2.0, "high_freq_factor": 2.0}},
        {"rope_parameters": LLAMA3 | {"low_freq_factor": 4.0, "high_freq_factor": 1.0}},
    ],
)
def test_forms_of_a_rope(fields):
    """Old fields, nulls, and what goes before what, as in transformers."""
    config = {"model_type": "llama", "hidden_size": 48, "num_attention_heads": 3} | fields
    theirs = LlamaRotaryEmbedding(transformers.LlamaConfig(**copy.deepcopy(config)))
    described = decoder.Rope.from_hf(config)
    ours = rope.frequencies(described, 16)
    assert described.attention_factor == theirs.attention_scaling
    np.testing.assert_allclose(ours, theirs.inv_freq.numpy(), rtol=0, atol=OPERATOR_FP32_MAX_ABS)


def test_no_partial_rotation_and_no_epsilon(llama):
    config = decoder.read_config(llama) | {"partial_rotary_factor": None, "rms_norm_eps": 0.0}
    assert decoder.DecoderConfig.from_hf(config).rms_norm_eps == 0


def test_no_config(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"config\.json does not exist"):
        decoder.load_model(tmp_path)
    with pytest.raises(FileNotFoundError, match="hf download Qwen/Qwen3-8B"):
        decoder.load_model("Qwen/Qwen3-8B")
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match="this is an adapter's folder: load its base model"):
        decoder.load_model(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="is not valid JSON"):
        decoder.load_model(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="holds a list"):
        decoder.load_model(tmp_path)


def test_no_weights(llama):
    (llama / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"no weights; expected model\.saf"):
        decoder.load_model(llama)


def test_save_refuses(llama, tmp_path):
    config = decoder.read_config(llama)
    model = decoder.load_model(llama)
    with pytest.raises(FileExistsError, match="exists already"):
        decoder.save_model(model, llama, config)
    with pytest.raises(TypeError, match=r"config is a str; expected the contents of config\.json"):
        decoder.save_model(model, tmp_path / "new", str(llama))
    with pytest.raises(ValueError, match="config describes"):
        decoder.save_model(model, tmp_path / "new", config | {"rms_norm_eps": 1e-3})
    model.model.layers.mlp.up_proj.lora_a = nnx.LoRAParam(jnp.zeros((3, 48, 2)))
    with pytest.raises(ValueError, match=r"up_proj/lora_a.*merge the adapters"):
        decoder.save_model(model, tmp_path / "new", config)
    assert not (tmp_path / "new").exists()
