"""Folders quantised as they are read, and folders that are quantised already."""

import json
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

import jax_dora
from jax_dora.layers.quantised_kernel import act_qtype_of
from jax_dora.lm.commands.flags import with_flag_names
from jax_dora.lm.models import abstract_model, load_model, make_model, read_config, save_model
from jax_dora.lm.models.config import DecoderConfig
from jax_dora.ops import quantised
from tests import quantised as kernels
from tests.tables import thinned

CONFIG = {
    "model_type": "llama",
    "vocab_size": 40,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "dtype": "float32",
}
Q_PROJ = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A small model's folder, of floats."""
    folder = tmp_path_factory.mktemp("float") / "model"
    save_model(make_model(DecoderConfig.from_hf(CONFIG)), folder, CONFIG)
    return folder


def rewritten(folder, to, change, settings, suffix="_proj.weight"):
    """A copy of a folder whose projections `change(name, weight)` has turned into other tensors."""
    to.mkdir()
    tensors = {}
    for name, weight in load_file(folder / "model.safetensors").items():
        is_projection = name.endswith(suffix)
        tensors |= change(name, weight) if is_projection else {name: weight}
    save_file(tensors, to / "model.safetensors")
    config = read_config(folder) | {"quantization_config": settings}
    (to / "config.json").write_text(json.dumps(config))
    return to


def same(one, other):
    assert nnx.graphdef(one) == nnx.graphdef(other)
    for a, b in zip(*(jax.tree.leaves(nnx.state(m)) for m in (one, other)), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.ci
def test_quantised_as_it_is_read(folder):
    model = load_model(folder, quantize="nf4")
    same(model, jax_dora.quantize(load_model(folder), "nf4"))
    assert quantised.is_quantised(model.model.layers.mlp.up_proj.kernel[...])
    shapes = jax.tree.map(lambda a: (a.shape, a.dtype), nnx.state(model))
    wanted = jax.tree.map(
        lambda a: (a.shape, a.dtype), nnx.state(abstract_model(folder, quantize="nf4"))
    )
    assert jax.tree.leaves(shapes) == jax.tree.leaves(wanted)
    tokens = jnp.arange(6)[None]
    assert np.all(np.isfinite(nnx.jit(lambda model, tokens: model(tokens))(model, tokens)))


FP8 = "float8_e4m3fn"


@pytest.mark.ci
@pytest.mark.parametrize("is_quantised", [False, True])
def test_activations_are_quantised_too(folder, tmp_path, is_quantised):
    if is_quantised:
        folder = rewritten(folder, tmp_path / "model", *FORMATS["fp8 rows"])
    given = {"act_qtype": FP8} | ({} if is_quantised else {"quantize": FP8})
    model = load_model(folder, **given)
    down = model.model.layers.mlp.down_proj
    assert act_qtype_of(down) == FP8
    # A scan would copy a stack of another layout whole, at the begin of the program.
    assert down.kernel[...].qvalue.format.layout.major_to_minor == (0, 1, 2)
    assert nnx.graphdef(abstract_model(folder, **given)) == nnx.graphdef(model)
    if not is_quantised:
        same(model, jax_dora.quantize(load_model(folder), FP8, act_qtype=FP8))
    tokens = jnp.arange(6)[None]
    wanted = load_model(folder, **(given | {"act_qtype": None}))(tokens)
    off = np.linalg.norm(model(tokens) - wanted) / np.linalg.norm(wanted)
    assert 1e-3 < off < 0.1


@pytest.mark.parametrize(
    ("quantize", "message"),
    [(None, "the model is not quantised"), ("nf4", "with qtype 'nf4' and tile_size 64")],
)
def test_activations_need_their_format(folder, quantize, message):
    with pytest.raises(ValueError, match=message):
        abstract_model(folder, quantize=quantize, act_qtype=FP8)


@pytest.mark.ci
def test_activations_over_a_folder_of_blocks(folder, tmp_path):
    """The error's remedy works: the weights as floats, quantised while they are loaded."""
    blocks = rewritten(folder, tmp_path / "blocks", *FORMATS["fp8 blocks"])
    message = r"_proj is quantised as .*expected .* \[1, out\]: .* in 16 bits .* quantize='float8"
    with pytest.raises(ValueError, match=message):
        abstract_model(blocks, act_qtype=FP8)
    save_model(load_model(blocks), tmp_path / "floats", read_config(blocks))
    model = abstract_model(tmp_path / "floats", quantize=FP8, act_qtype=FP8)
    assert act_qtype_of(model.model.layers.mlp.down_proj) == FP8


@pytest.mark.ci
def test_features_that_tiles_do_not_divide(tmp_path):
    """The error's remedies work for `load_model`, which takes no tile size, and for commands."""
    config = CONFIG | {"intermediate_size": 48}
    save_model(make_model(DecoderConfig.from_hf(config)), tmp_path / "model", config)
    message = (
        "down_proj' cannot .* 48 input features .* choose int8 or float8_e4m3fn.* or load the "
        r"model without quantize and call jax_dora\.quantize with tile_size=16, or 0"
    )
    with pytest.raises(ValueError, match=message) as raised:
        load_model(tmp_path / "model", quantize="nf4")
    assert with_flag_names(str(raised.value), {"quantize": "--quantize"}).endswith(
        "expected a multiple: pass --quantize int8 or float8_e4m3fn, which need no tiles"
    )
    abstract_model(tmp_path / "model", quantize="int8")
    for tile_size in (16, 0):
        jax_dora.quantize(load_model(tmp_path / "model"), "nf4", tile_size=tile_size)


@pytest.mark.ci
def test_weights_that_are_not_finite(folder, tmp_path):
    def with_nan(name, weight):
        if name == Q_PROJ:
            weight[3, 1] = np.nan
        return {name: weight}

    folder = rewritten(folder, tmp_path / "model", with_nan, None)
    message = r"q_proj\.weight has weights that are not finite, in 1 of its 64 tiles; expected"
    with pytest.raises(ValueError, match=message):
        load_model(folder, quantize="nf4")


def place(path, shape):
    """Inputs of projections are sharded over two devices."""
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])
    axes = (None, "x", None) if path.endswith("proj/kernel") else ()
    return jax.sharding.NamedSharding(mesh, jax.P(*axes))


def nf4(name, weight, *, nested):
    """A weight as bitsandbytes stores it, and in `MEANT` what it stands for."""
    codebook = kernels.nf4_codebook().astype(np.float32)
    runs = weight.reshape(-1, 64)
    absmax = np.abs(runs).max(1)
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": list(weight.shape)}
    parts = {"quant_map": codebook}
    if nested:
        levels = np.linspace(-1, 1, 256, dtype=np.float32)
        offset = float(absmax.mean())
        pieces = np.array_split(absmax - offset, range(256, absmax.size, 256))
        tops = np.array([np.abs(piece).max() for piece in pieces], np.float32)
        pairs = list(zip(pieces, tops, strict=True))
        codes = [np.abs(piece[:, None] / top - levels).argmin(1) for piece, top in pairs]
        parts["absmax"] = np.concatenate(codes).astype(np.uint8)
        parts |= {"nested_absmax": tops, "nested_quant_map": levels}
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
        scales = [levels[c] * t + offset for c, t in zip(codes, tops, strict=True)]
        absmax = np.concatenate(scales).astype(np.float32)
    else:
        parts["absmax"] = absmax
    codes = np.abs(runs[..., None] / absmax[:, None, None] - codebook).argmin(-1)
    MEANT[name] = (codebook[codes] * absmax[:, None]).reshape(weight.shape)
    pairs = codes.reshape(-1, 2).astype(np.uint8)
    text = np.frombuffer(json.dumps(state).encode(), np.uint8)
    parts["quant_state.bitsandbytes__nf4"] = text
    packed = (pairs[:, 0] << 4 | pairs[:, 1])[:, None]
    return {name: packed, **{f"{name}.{part}": value for part, value in parts.items()}}


def stored_in_bf16(name, weight):
    """As `nf4`, with bnb_4bit_quant_storage of bfloat16, by which FSDP shares bytes like floats."""
    tensors = nf4(name, weight, nested=False)
    return tensors | {name: tensors[name].reshape(-1).view(ml_dtypes.bfloat16)[:, None]}


def fp8(name, weight, *, scales):
    """A weight in FP8 with a scale for it all, for each output feature, or for blocks of 48."""
    if scales == "blocks":
        tall, wide = (-(-size // 48) for size in weight.shape)
        padded = np.zeros((tall * 48, wide * 48), np.float32)
        padded[: weight.shape[0], : weight.shape[1]] = weight
        top = np.abs(padded.reshape(tall, 48, wide, 48)).max((1, 3)) / 448
        each = np.repeat(np.repeat(top, 48, 0), 48, 1)[: weight.shape[0], : weight.shape[1]]
    else:
        axis = 1 if scales == "rows" else None
        each = top = np.asarray(np.abs(weight).max(axis, keepdims=scales == "rows") / 448)
    values = (weight / each).astype(ml_dtypes.float8_e4m3fn)
    MEANT[name] = values.astype(np.float64) * each
    suffix = "weight_scale_inv" if scales == "blocks" else "weight_scale"
    part = name.replace("weight", suffix)
    return {name: values, part: top.astype(np.float32)}


def compressed_blocks(name, weight):
    """As compressed-tensors stores FP8 in blocks of 48: with scales named as those of a tensor."""
    scales = name.replace("weight", "weight_scale")
    tensors = fp8(name, weight, scales="blocks")
    return {name: tensors[name], scales: tensors[f"{scales}_inv"]}


def with_a_block_of_zeros(name, weight):
    """As bitsandbytes stores a block of zeros: with the scale 0."""
    tensors = nf4(name, weight, nested=False)
    tensors[f"{name}.absmax"][1] = 0
    MEANT[name].reshape(-1, 64)[1] = 0
    return tensors


def compressed(*structures):
    """The quantization_config of compressed-tensors, with a group for each block structure."""
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "block"}
    groups = {
        f"group_{number}": {"targets": ["Linear"], "weights": weights | {"block_structure": one}}
        for number, one in enumerate(structures)
    }
    settings = {"quant_method": "compressed-tensors", "format": "float-quantized"}
    return settings | {"config_groups": groups}


MEANT = {}
NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
FORMATS = {
    "nf4": (lambda *a: nf4(*a, nested=False), NF4),
    "nf4 twice": (lambda *a: nf4(*a, nested=True), NF4),
    "nf4 in bf16": (stored_in_bf16, NF4 | {"bnb_4bit_quant_storage": "bfloat16"}),
    "nf4 with zeros": (with_a_block_of_zeros, NF4),
    "fp8": (lambda *a: fp8(*a, scales="one"), {"quant_method": "fp8"}),
    "fp8 rows": (lambda *a: fp8(*a, scales="rows"), {"quant_method": "fbgemm_fp8"}),
    "fp8 blocks": (
        lambda *a: fp8(*a, scales="blocks"),
        {"quant_method": "fp8", "weight_block_size": [48, 48]},
    ),
    "compressed blocks": (compressed_blocks, compressed([48, 48])),
}


@pytest.mark.ci
@pytest.mark.parametrize("name", thinned(FORMATS, ["nf4 twice", "fp8 blocks", "compressed blocks"]))
def test_quantised_folders_are_read_as_they_are(folder, tmp_path, name):
    model = load_model(rewritten(folder, tmp_path / "model", *FORMATS[name]))
    layers = model.model.layers
    both = {"self_attn.k_proj": layers.self_attn.k_proj, "mlp.down_proj": layers.mlp.down_proj}
    for path, one in both.items():
        found = kernels.meant(one.kernel[...])
        for number in range(2):
            wanted = MEANT[f"model.layers.{number}.{path}.weight"].T
            np.testing.assert_allclose(found[number], wanted, rtol=2e-6)
    adapted = jax_dora.apply_dora(model, jax_dora.DoRARule("all-linear", 2, 4), rngs=nnx.Rngs(0))
    tokens = jnp.arange(6)[None]
    np.testing.assert_array_equal(adapted(tokens), model(tokens))
    if name == "nf4":
        save_model(model, tmp_path / "floats", read_config(folder))
        written = load_file(tmp_path / "floats" / "model.safetensors")[Q_PROJ]
        np.testing.assert_allclose(written, MEANT[Q_PROJ], rtol=2e-6)
        with pytest.raises(ValueError, match=r"quantize is 'int8', but .* is quantised already"):
            load_model(tmp_path / "model", quantize="int8")


@pytest.mark.ci
@pytest.mark.parametrize("name", [None, "nf4", "fp8 blocks"])
def test_sharded_as_it_is_read(folder, tmp_path, name):
    """A folder that is quantised, or by `quantize` is as it is read."""
    quantize = None if name else "nf4"
    folder = rewritten(folder, tmp_path / "model", *FORMATS[name]) if name else folder
    found, wanted = (
        load_model(folder, quantize=quantize, sharding=one).model.layers.mlp.down_proj.kernel[...]
        for one in (place, None)
    )
    assert {one.sharding.spec[1] for one in (found.qvalue, found.scale)} == {"x"}
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(one, other)


def without(part, *, nested=False):
    def change(name, weight):
        tensors = nf4(name, weight, nested=nested)
        return {one: value for one, value in tensors.items() if not one.endswith(part)}

    return change


def with_a_state(**changes):
    """As bitsandbytes with double quantisation, with changes of `quant_state`; None removes."""

    def change(name, weight):
        tensors = nf4(name, weight, nested=True)
        part = f"{name}.quant_state.bitsandbytes__nf4"
        state = json.loads(bytes(tensors[part])) | changes
        state = {field: value for field, value in state.items() if value is not None}
        return tensors | {part: np.frombuffer(json.dumps(state).encode(), np.uint8)}

    return change


def with_a_code(code):
    """As FP8 with one scale, with one code of the second layer replaced."""

    def change(name, weight):
        tensors = fp8(name, weight, scales="one")
        if name == Q_PROJ.replace("0", "1"):
            tensors[name].view(np.uint8)[5, 3] = code
        return tensors

    return change


def only_the_first(name, weight):
    return nf4(name, weight, nested=False) if name == Q_PROJ else {name: weight}


def with_a_scale(value, make, part):
    def change(name, weight):
        tensors = make(name, weight)
        tensors[name.replace("weight", part)][0] = value
        return tensors

    return change


def reshaped(make, part, shape):
    """A way in which `part` of a square weight has another shape."""

    def change(name, weight):
        tensors = make(name, weight)
        if name == Q_PROJ:
            part_name = name.replace("weight", part)
            tensors[part_name] = np.resize(tensors[part_name], shape)
        return tensors

    return change


TWICE, ROWS, BLOCKS = (FORMATS[name] for name in ("nf4 twice", "fp8 rows", "fp8 blocks"))


@pytest.mark.parametrize(
    ("format", "part", "shape", "expected"),
    [
        # q_proj is square, so only the shape tells that these are scales of input features.
        (ROWS, "weight_scale", (1, 64), r"\(64,\) or \(64, 1\), one scale, or one for each output"),
        (ROWS, "weight_scale", (8, 8), r"\(64,\) or \(64, 1\)"),
        (ROWS, "weight_scale", (2,), r"\(64,\) or \(64, 1\)"),
        (BLOCKS, "weight_scale_inv", (1, 4), r"\(2, 2\), for blocks of \(48, 48\)"),
        (TWICE, "weight.absmax", (1, 64), r"\(64,\), for a weight of shape \(64, 64\)"),
        (TWICE, "weight.absmax", (32,), r"\(64,\), for"),
        (TWICE, "weight.nested_absmax", (2,), r"\(1,\), for"),
        (TWICE, "weight.nested_quant_map", (16,), r"\(256,\), for"),
        (TWICE, "weight.quant_map", (1,), r"\(16,\), for"),
    ],
)
def test_scales_of_another_shape(folder, tmp_path, format, part, shape, expected):
    make, settings = format
    folder = rewritten(folder, tmp_path / "model", reshaped(make, part, shape), settings)
    name, found = Q_PROJ.replace("weight", part), re.escape(str(shape))
    message = rf"{name} in .* has shape {found}; expected .*{expected}.*: use .* in 16 bits"
    with pytest.raises(ValueError, match=message):
        abstract_model(folder)


@pytest.mark.parametrize(
    ("change", "settings", "error", "message"),
    [
        (
            with_a_scale(np.nan, FORMATS["nf4"][0], "weight.absmax"),
            *(NF4, ValueError, r"weight\.absmax in .* has scales from nan to nan; expected finite"),
        ),
        (
            with_a_scale(0, FORMATS["fp8 rows"][0], "weight_scale"),
            *({"quant_method": "fp8"}, ValueError, r"weight_scale in .* from 0\.0 to .* positive"),
        ),
        (
            with_a_scale(np.inf, FORMATS["fp8 blocks"][0], "weight_scale_inv"),
            *(FORMATS["fp8 blocks"][1], ValueError, "weight_scale_inv in .* to inf; .* positive"),
        ),
        (
            without(".absmax"),
            NF4,
            NotImplementedError,
            "expected bitsandbytes NF4: absmax.* in 16 bits",
        ),
        (
            without(".nested_absmax", nested=True),
            *(NF4, ValueError, r"has no nested_absmax, but .* uint8; .* of shape \(1,\)"),
        ),
        (
            lambda n, w: fp8(n, w, scales="one") | fp8(n, w, scales="blocks"),
            *({"quant_method": "fp8"}, NotImplementedError, "either weight_scale or weight_scale_"),
        ),
        (
            FORMATS["fp8 blocks"][0],
            {"quant_method": "fp8", "weight_block_size": [48, 0]},
            *(ValueError, r"weight_block_size \[48, 0\]; expected two positive integers"),
        ),
        (
            FORMATS["fp8 blocks"][0],
            {"quant_method": "fp8", "weight_block_size": 48},
            *(ValueError, r"weight_block_size 48; expected two positive integers"),
        ),
        (
            compressed_blocks,
            compressed("48x48"),
            *(ValueError, r"block_structure '48x48'; expected two positive integers"),
        ),
        (
            compressed_blocks,
            compressed([48, 48], [64, 48]),
            *(NotImplementedError, r"block_structure \[48, 48\] and \[64, 48\]; expected the same"),
        ),
        (
            compressed_blocks,
            compressed([32, 48]),
            *(ValueError, r"\(128, 1\) or \(4, 2\), one scale.* blocks of \(32, 48\)"),
        ),
        (
            with_a_code(0x7F),
            {"quant_method": "fp8"},
            *(ValueError, r"layers\.1\.self_attn\.q_proj.* 1 of 4096 codes that are"),
        ),
        (
            with_a_code(0xFF),
            *({"quant_method": "fp8"}, ValueError, "0x7F or 0xFF; expected finite.*: copy the"),
        ),
        (
            only_the_first,
            NF4,
            *(ValueError, r"q_proj/kernel .*layers 0 \(uint8 .*layers 1 \(not quantised\); .* use"),
        ),
        (
            lambda n, w: fp8(n, w, scales="rows" if n == Q_PROJ else "one"),
            {"quant_method": "fp8"},
            *(ValueError, r"layers 0 .*scale float32 \(64, 1\)\), and layers 1 .*scale float32 \("),
        ),
        (
            lambda n, w: {n: w.astype(ml_dtypes.float8_e4m3fn)},
            None,
            NotImplementedError,
            "float8_e4m3fn .* with no scales; expected",
        ),
        (
            lambda n, w: {n.replace("weight", "qweight"): w.astype(np.int32)},
            *({"quant_method": "gptq"}, NotImplementedError, "'gptq'.* folder in 16 bits"),
        ),
        (lambda n, w: {n: w}, NF4 | {"bnb_4bit_quant_type": "fp4"}, NotImplementedError, "fp4"),
    ],
)
def test_other_ways_are_refused(folder, tmp_path, change, settings, error, message):
    with pytest.raises(error, match=message):
        load_model(rewritten(folder, tmp_path / "model", change, settings))


def test_a_quantised_embedding_is_refused(folder, tmp_path):
    folder = rewritten(folder, tmp_path / "model", *FORMATS["fp8"], suffix="embed_tokens.weight")
    message = r"embed_tokens\.weight is quantised .* projections only: use .* in 16 bits"
    with pytest.raises(ValueError, match=message):
        abstract_model(folder)


@pytest.mark.ci
def test_layers_that_stayed_in_16_bits(tmp_path):
    """The error names them, and shortens the list of the others."""
    config = CONFIG | {"num_hidden_layers": 8}
    save_model(make_model(DecoderConfig.from_hf(config)), tmp_path / "floats", config)

    def change(name, weight):
        return {name: weight} if ".layers.1." in name else fp8(name, weight, scales="rows")

    settings = {"quant_method": "fp8", "modules_to_not_convert": ["model.layers.1"]}
    folder = rewritten(tmp_path / "floats", tmp_path / "model", change, settings)
    message = (
        r"_proj/kernel .* layers 0, 2, 3, 4, 5 and 2 more \(float8_e4m3fn .*\), and layers 1 "
        r"\(not quantised\); expected the same format .*: use .* in 16 bits, with `quantize`"
    )
    with pytest.raises(ValueError, match=message):
        abstract_model(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shape": None}, "has no shape; expected two positive integers"),
        ({"shape": [64, 64, 1]}, r"has shape \[64, 64, 1\]; expected two positive integers"),
        ({"shape": 64}, "has shape 64; expected two positive integers"),
        ({"shape": [64, 0]}, r"has shape \[64, 0\]; expected two"),
        ({"blocksize": None}, "has no blocksize; expected a positive integer"),
        ({"blocksize": "64"}, "has blocksize '64'; expected a positive integer"),
        ({"nested_blocksize": None}, "has no nested_blocksize; expected a positive integer"),
        ({"nested_blocksize": 0}, "has nested_blocksize 0; expected a positive integer"),
        ({"nested_offset": None}, "has no nested_offset; expected a finite number"),
        ({"nested_offset": float("nan")}, "has nested_offset nan; expected a finite number"),
        ({"nested_offset": 10**400}, r"has nested_offset 10*\.\.\.0*; expected a finite number"),
    ],
)
def test_a_damaged_state_is_refused(folder, tmp_path, changes, message):
    folder = rewritten(folder, tmp_path / "model", with_a_state(**changes), NF4)
    found = rf"_proj.*__nf4 in .*model\.safetensors {message}.*: use .* in 16 bits"
    with pytest.raises(ValueError, match=found):
        abstract_model(folder)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"shape": "\xff"}', "is not JSON: 'utf-8' codec"),
        (b'{"shape": [', "is not JSON: Expecting value"),
        (b"", "is not JSON: Expecting value"),
        (b"[64, 64]", "holds a list"),
    ],
)
def test_a_state_that_is_no_object_is_refused(folder, tmp_path, content, message):
    def change(name, weight):
        text = np.frombuffer(content, np.uint8)
        tensors = nf4(name, weight, nested=False)
        return tensors | {f"{name}.quant_state.bitsandbytes__nf4": text}

    folder = rewritten(folder, tmp_path / "model", change, NF4)
    found = rf"_proj.*__nf4 in .* {message}.*; expected a JSON object.*: use .* in 16 bits"
    with pytest.raises(ValueError, match=found):
        abstract_model(folder)


def test_a_nested_block_larger_than_the_weight(folder, tmp_path):
    """Its size allocates nothing."""
    change = with_a_state(nested_blocksize=1 << 50)
    model = load_model(rewritten(folder, tmp_path / "model", change, NF4))
    found = kernels.meant(model.model.layers.self_attn.q_proj.kernel[...])[0]
    np.testing.assert_allclose(found, MEANT[Q_PROJ].T, rtol=2e-6)
