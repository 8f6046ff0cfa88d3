"""What the plugin replaces, and that it changes nothing else."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from tests.torch_dora.vllm.engines import PROMPTS, Zoo, engine, generate, request

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

NAMES = [None, "lora", "lora, some"]


def answers(folder, paths):
    """Returns the answers of the base and of LoRA adapters."""
    requests = [request(name, name and paths[name], number) for number, name in enumerate(paths)]
    with engine(folder) as made:
        return generate(
            made, [prompt for prompt in PROMPTS for _ in requests], requests * len(PROMPTS)
        )


@pytest.mark.parametrize("kind", ["Llama", "Qwen2"])
def test_rows_of_the_base_and_of_lora_have_the_same_bits_without_the_plugin(kind, tmp_path):
    zoo = Zoo(kind, tmp_path)
    paths = {"": "", **{name: str(zoo.path(name)) for name in NAMES if name}}
    command = [sys.executable, __file__, str(zoo.folder), json.dumps(paths)]
    found = {}
    for plugins in ("torch_dora", ""):
        environment = os.environ | {"VLLM_PLUGINS": plugins, "PYTHONPATH": os.getcwd()}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        found[plugins] = json.loads(done.stdout.splitlines()[-1])
    # The first engine has the plugin, the second has not.
    assert [found[plugins]["has_plugin"] for plugins in ("torch_dora", "")] == [True, False]
    assert found["torch_dora"]["answers"] == found[""]["answers"]


def test_another_vllm_is_refused_by_its_version(monkeypatch):
    from vllm.lora.model_manager import (  # pyright: ignore[reportMissingImports]
        LoRAModelManager,
    )

    from torch_dora.vllm import hooks

    hooks.install()
    hooks.install()  # changes nothing
    monkeypatch.setattr(LoRAModelManager, "activate_adapter", lambda self, lora: None)
    monkeypatch.delattr("vllm.lora.lora_model.LoRAModel.from_lora_tensors")
    with pytest.raises(RuntimeError) as error:
        hooks.install()
    text = str(error.value)
    assert "does not know vLLM 0.32.0+cpu; it works with 0.25.0, 0.32.0 and 0.33.0" in text
    assert "there is no vllm.lora.lora_model.LoRAModel.from_lora_tensors" in text
    assert "activate_adapter takes self, lora; expected self, lora_id" in text


def test_graphs_that_were_compiled_without_the_plugin_are_not_used():
    from vllm.config.lora import LoRAConfig  # pyright: ignore[reportMissingImports]

    from torch_dora.vllm import hooks

    hooks.install()
    assert LoRAConfig().compute_hash() != LoRAConfig.compute_hash.__wrapped__(LoRAConfig())


def test_keys_are_parsed_again_for_another_model():
    from vllm.lora import lora_model  # pyright: ignore[reportMissingImports]
    from vllm.model_executor.models.utils import (  # pyright: ignore[reportMissingImports]
        WeightsMapper,
    )

    from torch_dora.vllm import hooks

    hooks.install()
    key = "base_model.model.layers.0.q_proj.lora_magnitude_vector"
    for before in ("", "language_model.", "language_model.", "text."):
        mapper = WeightsMapper(orig_to_new_prefix={"layers.": f"{before}layers."})
        found = lora_model.parse_fine_tuned_lora_name(key, mapper)
        assert found == (f"{before}layers.0.q_proj", False)
    assert lora_model.parse_fine_tuned_lora_name(key) == ("layers.0.q_proj", False)


def test_a_key_is_parsed_once_for_all_adapters_of_a_model():
    """For each, vLLM makes an equal mapper, and asks with it and without it in turn."""
    from vllm.model_executor.models.utils import (  # pyright: ignore[reportMissingImports]
        WeightsMapper,
    )

    from torch_dora.vllm import hooks

    parsed = []
    parse = hooks._parse_name(lambda name, mapper=None: parsed.append(name) or (name, mapper))
    for _ in range(3):
        mapper = WeightsMapper(orig_to_new_prefix={"layers.": "text.layers."})
        for layer in range(4):
            key = f"base_model.model.layers.{layer}.q_proj.lora_A.weight"
            assert parse(key, mapper) == (key, mapper)
            assert parse(key) == (key, None)
    assert len(parsed) == 8


@pytest.mark.parametrize(
    ("option", "ubatches", "is_fast"),
    [("--enable-dbo", True, False), ("--kv-sharing-fast-prefill", False, True)],
)
def test_options_that_divide_a_batch_are_refused(option, ubatches, is_fast):
    from vllm.v1.worker.lora_model_runner_mixin import (  # pyright: ignore[reportMissingImports]
        LoRAModelRunnerMixin,
    )

    from torch_dora.vllm import hooks

    hooks.install()
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(use_ubatching=ubatches),
        cache_config=SimpleNamespace(kv_sharing_fast_prefill=is_fast),
    )
    with pytest.raises(ValueError, match=option):
        LoRAModelRunnerMixin().load_lora_model(None, config, "cpu")


def main(folder, paths):
    made = answers(folder, {name or None: path for name, path in json.loads(paths).items()})
    from vllm.lora.model_manager import (  # pyright: ignore[reportMissingImports]
        LoRAModelManager,
    )

    has_plugin = hasattr(LoRAModelManager.activate_adapter, "__wrapped__")
    bits = [[tokens, [one.hex() for one in chosen]] for tokens, chosen in made]
    print()
    print(json.dumps({"has_plugin": has_plugin, "answers": bits}))


if __name__ == "__main__":
    main(*sys.argv[1:])
