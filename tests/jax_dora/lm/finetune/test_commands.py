"""generate, merge and inspect, on the tiny model and an adapter of it."""

import io
import json
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from flax import nnx
from safetensors.numpy import load_file

import jax_dora
import jax_dora.peft
from jax_dora.lm.commands import finetune, main
from jax_dora.lm.commands.flags import Parser, flags_of, with_flag_names
from jax_dora.lm.finetune.checkpoints import Checkpoints
from jax_dora.lm.models import Sampling, generate, generation, load_model
from jax_dora.lm.models.tokenizer import read_tokenizer
from parity import tolerances
from tests.jax_dora.lm.finetune.runs import assert_one_line
from tests.jax_dora.small_models import train


@pytest.fixture(scope="module")
def model(inputs):
    return inputs[1]


@pytest.fixture(scope="module")
def adapter(model, tmp_path_factory):
    """A run's folder with an adapter as if it had been trained."""
    rule = jax_dora.DoRARule("model/layers/.*_proj", rank=3, alpha=5)
    adapted = train(jax_dora.apply_dora(load_model(model), rule, rngs=nnx.Rngs(0)))
    run = tmp_path_factory.mktemp("run")
    jax_dora.peft.save_adapter(adapted, run / "adapter", base_model_name_or_path=model)
    return run


# Adapters are held to PEFT's elsewhere.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("quantize", "is_adapted"), [(None, False), (None, True), ("nf4", True)], ids=str
)
def test_generate(quantize, is_adapted, model, adapter, capsys):
    ours, flags = load_model(model, quantize=quantize), ["--model", model]
    if is_adapted:
        ours = jax_dora.peft.load_adapter(ours, adapter / "adapter")
        flags = ["--adapter", str(adapter), *(["--quantize", quantize] if quantize else [])]
    tokenizer = read_tokenizer(Path(model))
    (wanted,) = generate(ours, [tokenizer.encode("12+30=").ids], 9, ends=[256])
    assert main(["generate", *flags, "--prompt", "12+30=", "--tokens", "9"]) == 0
    assert capsys.readouterr().out == f"{tokenizer.decode(wanted)}\n"


@pytest.mark.ci
def test_another_format_than_that_of_the_run_is_warned_of(adapter, tmp_path, capsys):
    run = shutil.copytree(adapter, tmp_path / "run")
    checkpoints = Checkpoints(run / "checkpoints")
    checkpoints.save(3, {"step": jnp.zeros(2)}, {"settings": {"quantize": "int8"}})
    command = ["inspect", str(run)]
    assert main(command) == 0
    error = capsys.readouterr().err
    assert "was trained with --quantize int8 and is used without --quantize" in error
    assert main([*command, "--quantize", "int8"]) == 0
    assert capsys.readouterr().err == ""
    (run / "checkpoints" / "3" / "facts.json").write_text("damaged")
    assert main(command) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.slow
def test_generate_with_quantised_activations(model, adapter, capsys):
    formats = {"quantize": "float8_e4m3fn", "act_qtype": "float8_e4m3fn"}
    ours = jax_dora.peft.load_adapter(load_model(model, **formats), adapter / "adapter")
    tokenizer = read_tokenizer(Path(model))
    (wanted,) = generate(ours, [tokenizer.encode("12+30=").ids], 9, ends=[256])
    flags = ["--quantize", "float8_e4m3fn", "--activations", "float8_e4m3fn", "--tokens", "9"]
    assert main(["generate", "--adapter", str(adapter), *flags, "--prompt", "12+30="]) == 0
    assert capsys.readouterr().out == f"{tokenizer.decode(wanted)}\n"


@pytest.mark.slow
def test_generate_with_a_cache_in_fp8(model, monkeypatch, capsys):
    tokenizer, fp8 = read_tokenizer(Path(model)), "float8_e4m3fn"
    asked, make = [], generation.make_cache
    monkeypatch.setattr(generation, "make_cache", lambda *one: asked.append(one[-1]) or make(*one))
    prompt = tokenizer.encode("12+30=").ids
    (wanted,) = generate(load_model(model), [prompt], 5, ends=[256], kv_cache=fp8)
    flags = ["--model", model, "--kv-cache", fp8, "--tokens", "5"]
    for prompts in (["12+30="], ["12+30="] * 2):
        assert main(["generate", *flags, *(f"--prompt={one}" for one in prompts)]) == 0
    first, *lines = capsys.readouterr().out.splitlines()
    assert [first, *(json.loads(one)["completion"] for one in lines)] == [
        tokenizer.decode(wanted)
    ] * 3
    assert asked == [fp8] * 3


@pytest.mark.ci
def test_generate_is_that_of_transformers(model, tmp_path, capsys):
    transformers.utils.logging.disable_progress_bar()
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    given = tokenizer("12+30=", return_tensors="pt")
    config = transformers.GenerationConfig(
        max_new_tokens=9, do_sample=False, eos_token_id=256, pad_token_id=256
    )
    theirs = transformers.AutoModelForCausalLM.from_pretrained(model)
    # Large enough for tokens to depend on those before, and on where they stand.
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    folder = shutil.copytree(model, tmp_path / "model")
    theirs.save_pretrained(folder)
    (answer,) = theirs.generate(**given, generation_config=config)
    wanted = tokenizer.decode(answer[given["input_ids"].shape[1] :], skip_special_tokens=True)
    command = ["generate", "--model", str(folder), "--prompt", "12+30=", "--tokens", "9"]
    assert main(command) == 0
    assert capsys.readouterr().out == f"{wanted}\n"


@pytest.mark.slow
def test_generate_with_settings_that_change_logits(model, capsys):
    flags = {"--repetition-penalty": 2.5, "--presence-penalty": 1, "--min-tokens": 7}
    flat = [str(word) for pair in flags.items() for word in pair]
    ours, tokenizer = load_model(model), read_tokenizer(Path(model))
    sampling = Sampling(repetition_penalty=2.5, presence_penalty=1.0, min_tokens=7)
    (wanted,) = generate(ours, [tokenizer.encode("12").ids], 9, sampling, ends=[256])
    assert main(["generate", "--model", model, *flat, "--prompt", "12", "--tokens", "9"]) == 0
    assert capsys.readouterr().out == tokenizer.decode(wanted) + "\n"


@pytest.mark.ci
def test_generate_for_several(model, adapter, capsys):
    prompts = ["--prompt", "1+1=", "--prompt", "ä"]
    sampling = ["--temperature", "0.9", "--top-k", "50", "--top-p", "0.9", "--seed", "3"]
    command = ["generate", "--adapter", str(adapter), *prompts, *sampling, "--tokens", "5"]
    answers = []
    for _ in range(2):
        assert main([*command, "--chat", "--system", "S"]) == 0
        answers.append([json.loads(line) for line in capsys.readouterr().out.splitlines()])
    assert answers[0] == answers[1]
    assert [one["prompt"] for one in answers[0]] == ["1+1=", "ä"]


@pytest.mark.slow
def test_merge(model, adapter, tmp_path, capsys):
    command = ["merge", "--adapter", str(adapter), "--output", str(tmp_path / "merged")]
    assert main(command) == 0
    assert "Rounding errors of merging" in capsys.readouterr().out
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")(tokens)
    ours = jax_dora.peft.load_adapter(load_model(model), adapter / "adapter")
    expected = np.asarray(ours(jnp.arange(20)[None]))
    peak = max(1.0, np.abs(expected).max())
    assert (
        np.abs(theirs.logits.numpy() - expected).max()
        <= tolerances.caps.OPERATOR_FP32_MAX_ABS * peak
    )
    assert (tmp_path / "merged" / "tokenizer.json").exists()
    assert main(command) == 2
    assert "exists already; expected a new folder" in capsys.readouterr().err


def row_of_up_proj(kernel, adapter):
    """Returns what is told of a layer over a kernel of fp64."""
    tensors = load_file(adapter / "adapter" / "adapter_model.safetensors")
    at = "base_model.model.model.layers.{}.mlp.up_proj.{}"
    a, b, magnitude = (
        np.stack([np.float64(tensors[at.format(layer, name)]) for layer in range(len(kernel))])
        for name in ("lora_A.weight", "lora_B.weight", "lora_magnitude_vector")
    )
    change = 5 / 3 * np.swapaxes(b @ a, 1, 2)
    share = np.linalg.norm(change) / np.linalg.norm(kernel)
    ratio = magnitude / np.linalg.norm(kernel + change, axis=1)
    return f"{share:.2%} │ {ratio.min():.4f} to {ratio.max():.4f}"


@pytest.mark.slow
def test_inspect(model, adapter, tmp_path, capsys):
    assert main(["inspect", str(adapter)]) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert "DoRA, rank 3, alpha 5" in output
    assert "tensors 42 of F32" in output
    assert f"The adapter fits {model} (qwen3)" in output.replace("\n", "")
    layer = load_model(model).model.layers.mlp.up_proj
    assert row_of_up_proj(np.float64(layer.kernel[...]), adapter) in output
    assert " model/layers/self_attn/q_proj │ 3 " in output
    assert main(["inspect", str(adapter), "--quantize", "int8"]) == 0
    kernel = load_model(model, quantize="int8").model.layers.mlp.up_proj.kernel[...]
    kernel = np.float64(kernel.qvalue) * np.float64(kernel.scale)
    assert row_of_up_proj(kernel, adapter) in " ".join(capsys.readouterr().out.split())

    elsewhere = shutil.copytree(adapter / "adapter", tmp_path / "adapter")
    config = elsewhere / "adapter_config.json"
    fields = json.loads(config.read_text()) | {"base_model_name_or_path": "gone"}
    config.write_text(json.dumps(fields))
    assert main(["inspect", str(elsewhere)]) == 0
    assert "The base model was not found: " in capsys.readouterr().out
    (elsewhere / "adapter_model.safetensors").write_bytes(b"cut off")
    assert main(["inspect", str(elsewhere)]) == 2
    assert "adapter_model.safetensors: not a whole safetensors" in capsys.readouterr().err


@pytest.mark.slow
def test_merge_unties_an_embedding_that_is_the_head(model, tmp_path, capsys):
    rule = jax_dora.DoRARule("model/embed_tokens", rank=2, alpha=2, adapt_attend=False)
    adapted = jax_dora.apply_dora(load_model(model), rule, rngs=nnx.Rngs(0))
    magnitude = adapted.model.embed_tokens.magnitude
    magnitude.set_value(1.5 * magnitude.get_value())
    jax_dora.peft.save_adapter(adapted, tmp_path / "adapter", base_model_name_or_path=model)
    command = ["merge", "--adapter", str(tmp_path), "--output", str(tmp_path / "merged")]
    assert main(command) == 0
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")(tokens)
    expected = np.asarray(adapted(jnp.arange(20)[None]))
    peak = max(1.0, np.abs(expected).max())
    cap = tolerances.caps.OPERATOR_FP32_MAX_ABS * peak
    assert np.abs(theirs.logits.numpy() - expected).max() <= cap


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("generate --prompt x", "--model is missing"),
        ("generate --model MODEL --prompt=", "--prompt is empty"),
        ("generate --model MODEL --prompt x --system y", "--system is given without --chat"),
        (
            "generate --model MODEL --prompt x --chat-template-kwargs {}",
            "--chat-template-kwargs is given without --chat",
        ),
        ("generate --model MODEL --prompt x --chat-template-kwargs 1", "'1' is not a JSON object"),
        ("generate --model MODEL --prompt x --chat-template-kwargs {", "'{' is not valid JSON"),
        (
            'generate --model MODEL --prompt x --chat --chat-template-kwargs {"a":1}',
            "chat_template_kwargs has 'a', which the chat template does not read; expected some o",
        ),
        ("generate --model MODEL --prompt x --kv-cache int8", "--kv-cache: invalid choice: 'int8'"),
        ("generate --model MODEL --prompt x --top-k 5", "--top-k is given without --temperature"),
        ("generate --model MODEL --prompt x --top-p .5", "--top-p is given without --temperature"),
        ("generate --model MODEL --prompt x\udcff", "--prompt 'x\\udcff' is not valid text: "),
        (
            "generate --model MODEL --prompt x --repetition-penalty 0",
            "--repetition-penalty 0.0: ex",
        ),
        ("generate --model MODEL --prompt x --top-p 0", "--top-p 0.0: expected a number above 0"),
        ("generate --model MODEL --prompt x --top-p 1e-50", "magnitude from 1.2e-38 to"),
        ("generate --model MODEL --prompt x --top-p nan", "--top-p nan: expected a number above 0"),
        ("generate --model MODEL --prompt x --tokens 0", "'0' is out of range"),
        ("generate --model MODEL --prompt x --tokens 512", "together 513; expected at most"),
        ("generate --model MODEL --adapter MODEL --prompt x", "has no adapter_config.json"),
        ("generate --adapter nowhere --prompt x", "nowhere has no adapter_config.json"),
        ("merge --model MODEL --output x", "--adapter is missing"),
        (f"merge --adapter nowhere --output {__file__}", "exists already; expected a new folder"),
        (f"merge --adapter nowhere --output {__file__}/x", f"{__file__} is a file"),
        ("merge --adapter x", "the following arguments are required: --output"),
        ("inspect MODEL", "has no adapter_config.json"),
        ("inspect", "the following arguments are required: FOLDER"),
        ("nothing", "invalid choice: 'nothing'"),
        ("", "the following arguments are required: COMMAND"),
    ],
)
def test_bad_commands(command, message, model, capsys):
    assert main([model if word == "MODEL" else word for word in command.split()]) == 2
    assert_one_line(capsys, message)


@pytest.mark.ci
def test_a_terminal_that_has_not_all_letters(model, monkeypatch):
    command = ["generate", "--model", model, "--tokens", "4", "--prompt", "ä🙂"]
    printed = []
    for more in ([], ["--prompt", "ä"]):
        out = io.BytesIO()
        monkeypatch.setattr("sys.stdout", io.TextIOWrapper(out, "ascii", write_through=True))
        assert main([*command, *more]) == 0
        printed.append(out.getvalue().decode("ascii").splitlines())
    assert [json.loads(line)["prompt"] for line in printed[1]] == ["ä🙂", "ä"]


@pytest.mark.parametrize(
    ("contents", "message"),
    [(b"[]", "the JSON is []; expected"), (b"{", "not JSON"), (b"\xff", "not UTF-8")],
)
@pytest.mark.parametrize("command", ["generate --prompt x --adapter", "inspect"])
def test_a_damaged_configuration_of_an_adapter(command, contents, message, tmp_path, capsys):
    file = tmp_path / "adapter_config.json"
    file.write_bytes(contents)
    assert main([*command.split(), str(tmp_path)]) == 2
    assert_one_line(capsys, f"Error: {file}: {message}")


@pytest.mark.parametrize(
    "command", ["inspect ADAPTER", "generate --model MODEL --adapter ADAPTER --prompt x"]
)
@pytest.mark.ci
def test_tensors_that_may_not_be_read(command, model, adapter, monkeypatch, capsys):
    folder, opened = adapter / "adapter", Path.open

    def refuse(path, *arguments, **options):
        if path.suffix == ".safetensors" and path.parent == folder:
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, *arguments, **options)

    monkeypatch.setattr(Path, "open", refuse)
    words = {"MODEL": model, "ADAPTER": str(folder)}
    assert main([words.get(word, word) for word in command.split()]) == 2
    assert_one_line(capsys, f"Error: [Errno 13] Permission denied: '{folder}/adapter_model.safe")


def test_errors_of_files_name_the_file(adapter, tmp_path, capsys):
    folder = shutil.copytree(adapter / "adapter", tmp_path / "copy")
    (folder / "adapter_model.safetensors").unlink()
    (folder / "adapter_model.safetensors").mkdir()
    assert main(["inspect", str(folder)]) == 2
    assert_one_line(capsys, f"Is a directory: '{folder}/adapter_model.safetensors'")
    assert main(["inspect", "x" * 5000]) == 1
    assert_one_line(capsys, "A file could not be read or written: [Errno 36] File name too long")


def _tiles_that_do_not_divide() -> None:
    jax_dora.quantize(nnx.Linear(80, 4, rngs=nnx.Rngs(0)), "nf4", path=".*")


def _layers_that_cannot_be_adapted() -> None:
    norm = nnx.RMSNorm(4, rngs=nnx.Rngs(0))
    jax_dora.apply_dora(norm, jax_dora.DoRARule(".*", rank=1, alpha=1), rngs=nnx.Rngs(0))


def _another_adapter_s_name() -> None:
    raise ValueError("a is of the adapter 'b'; pass adapter='b'")


@pytest.mark.parametrize(
    ("fail", "message"),
    [
        (_tiles_that_do_not_divide, "expected a multiple: pass --quantize int8 or float8_e4m3fn"),
        (_layers_that_cannot_be_adapted, "has named: narrow --target so that it does not match"),
        (_another_adapter_s_name, "pass jax_dora.peft.load_adapter adapter='b'"),
    ],
)
def test_errors_of_the_library_name_flags(fail, message):
    finetune.add_flags(parser := Parser())
    with pytest.raises((ValueError, NotImplementedError, TypeError)) as raised:
        fail()
    assert message in with_flag_names(str(raised.value), flags_of(parser))


def test_settings_become_flags_and_paths_stay_as_they_are():
    message = "batch=4: expected `accumulate` (resume=True) in /data/batch=4/a, not rank=16 or `x`"
    flags = {name: f"--{name}" for name in ("batch", "accumulate", "resume", "rank")}
    assert with_flag_names(message, flags) == (
        "--batch 4: expected --accumulate (--resume) in /data/batch=4/a, not --rank 16 or `x`"
    )
