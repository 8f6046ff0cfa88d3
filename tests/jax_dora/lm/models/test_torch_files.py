"""Weights in PyTorch's format are those of transformers, and no code of their file is run."""

import json
import os
import zipfile
from collections import OrderedDict

import pytest
import torch
import transformers

import jax_dora.lm.models as decoder
from jax_dora.lm.models.tensor_files import fingerprint
from tests.jax_dora.lm.models.test_folder import same_arrays

BIN = "pytorch_model.bin"


class Code:
    """What runs a command when it is unpickled."""

    def __reduce__(self):
        return os.system, ("touch /tmp/unpickled-by-jax-dora",)


@pytest.fixture
def folder(make_folder):
    return make_folder("qwen3-tied", dtype=torch.bfloat16, max_shard_size="1GB")


def replace_weights(folder, parts):
    """Writes .bin files in place of the folder's safetensors file."""
    (folder / "model.safetensors").unlink()
    names = [BIN]
    if len(parts) > 1:
        names = [f"pytorch_model-{n:05}-of-{len(parts):05}.bin" for n in range(1, len(parts) + 1)]
        mapping = {key: name for name, part in zip(names, parts, strict=True) for key in part}
        index = {"metadata": {}, "weight_map": mapping}
        (folder / f"{BIN}.index.json").write_text(json.dumps(index))
    for name, part in zip(names, parts, strict=True):
        torch.save(part, folder / name)


@pytest.mark.parametrize("count", [1, 2])
def test_the_model_is_that_of_transformers(count, folder, tmp_path):
    """Tied weights, views of one storage, and parameters are stored too."""
    expected, before = decoder.load_model(folder), fingerprint(folder)
    load = transformers.AutoModelForCausalLM.from_pretrained
    state = load(folder).state_dict()
    names = sorted(name for name in state if name != "lm_head.weight")
    if count == 1:
        norms = [f"model.layers.{n}.input_layernorm.weight" for n in range(3)]
        state |= dict(zip(norms, torch.stack([state[name] for name in norms]), strict=True))
        state["model.norm.weight"] = torch.nn.Parameter(state["model.norm.weight"])
        replace_weights(folder, [state])
    else:
        halves = names[: len(names) // 2], names[len(names) // 2 :]
        replace_weights(
            folder, [OrderedDict((name, state[name]) for name in one) for one in halves]
        )
        assert fingerprint(folder) == before
    ours = decoder.load_model(folder)
    same_arrays(ours, expected)
    theirs = load(folder).state_dict()
    decoder.save_model(ours, tmp_path / "new", decoder.read_config(folder), tokenizer_from=folder)
    assert not list((tmp_path / "new").glob(f"*{BIN}*"))
    for name, tensor in load(tmp_path / "new").state_dict().items():
        assert torch.equal(tensor, theirs[name]), name


def contents(**others):
    return {"model.norm.weight": torch.ones(48), **others}


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (contents(code=Code()), ValueError, r"it refers to posix\.system, which is not run"),
        (contents(step=3), ValueError, "'step' is a int instead of a tensor"),
        (contents(model=contents()), ValueError, "'model' is a dict instead of a tensor"),
        ([torch.ones(2)], ValueError, "a list instead of tensors by name"),
        (contents(x=torch.ones(2, 3).T), NotImplementedError, r"'x' is stored with strides \(1, 3"),
        (contents(x=torch.arange(2)), NotImplementedError, "a LongStorage; expected BFloat16Stor"),
        (contents(x=torch.nn.Linear(2, 2)), ValueError, r"refers to torch\.nn\.modules\.linear"),
    ],
)
def test_what_is_no_tensor_is_refused(value, error, message, folder):
    replace_weights(folder, [value])
    with pytest.raises(error, match=rf"{BIN}.*{message}.*save_pretrained"):
        decoder.load_model(folder)
    assert not os.path.exists("/tmp/unpickled-by-jax-dora")


def rewritten(file, **changes):
    """The archive with other contents of some entries."""
    with zipfile.ZipFile(file) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    kind = changes.pop("kind", zipfile.ZIP_STORED)
    with zipfile.ZipFile(file, "w", kind) as archive:
        for name, data in entries.items():
            archive.writestr(name, changes.get(name.partition("/")[2].replace("/", "_"), data))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda file: rewritten(file, data_0=b"1234"), "larger than its storage"),
        (lambda file: rewritten(file, byteorder=b"big"), "its byte order is b'big'"),
        (lambda file: rewritten(file, kind=zipfile.ZIP_DEFLATED), "it is compressed"),
        (lambda file: rewritten(file, **{"data.pkl": b"\x80\x02."}), "more or less than a dict"),
        (lambda file: os.truncate(file, 900), "not a whole zip archive"),
        (
            lambda file: torch.save(contents(), file, _use_new_zipfile_serialization=False),
            "not a whole zip archive, as torch.save has written since 1.6",
        ),
    ],
)
def test_damaged_files_are_refused(damage, message, folder):
    replace_weights(folder, [contents()])
    damage(folder / BIN)
    with pytest.raises(ValueError, match=rf"{BIN}.*{message}.*save_pretrained"):
        decoder.load_model(folder)
