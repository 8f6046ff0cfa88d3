"""Tensor parallelism in two processes, with both of vLLM's ways to shard LoRA."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.torch_dora.vllm.engines import (
    ADAPTERS,
    PROMPTS,
    Zoo,
    check,
    engine,
    generate,
    request,
)

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize(("kind", "fully_sharded"), [("Llama", False), ("Qwen2", True)])
def test_two_processes_answer_as_peft(kind, fully_sharded, tmp_path):
    zoo, names = Zoo(kind, tmp_path), [None, *ADAPTERS]
    pairs = [(name, prompt) for prompt in PROMPTS[:3] for name in names]
    requests = {
        name: request(name, name and zoo.path(name), number) for number, name in enumerate(names)
    }
    # The second process alone has the row that is NaN, and both must refuse it.
    folder = _damaged(zoo)
    options = {"tensor_parallel_size": 2, "fully_sharded_loras": fully_sharded}
    with engine(zoo.folder, distributed_executor_backend="mp", **options) as made:
        with pytest.raises(Exception, match=r"refused by process 1|lora_B of .*up_proj holds NaN"):
            made.llm_engine.add_lora(request("damaged", folder, 99))
        # vLLM would take the second process's answer for the one to this.
        assert made.llm_engine.add_lora(requests["dora"])
        with pytest.raises(Exception, match="No adapter found for /nowhere"):
            made.llm_engine.add_lora(request("absent", Path("/nowhere"), 98))
        assert 99 not in made.llm_engine.list_loras()
        found = generate(
            made, [prompt for _, prompt in pairs], [requests[name] for name, _ in pairs]
        )
        check(found, [zoo.expected(name, tuple(prompt)) for name, prompt in pairs])


def _damaged(zoo):
    folder, key = zoo.root / "damaged", "base_model.model.model.layers.1.mlp.up_proj.lora_B.weight"
    folder.mkdir()
    file = "adapter_model.safetensors"
    tensors = load_file(zoo.path("dora") / file)
    tensors[key][-1] = torch.nan
    save_file(tensors, folder / file)
    config = (zoo.path("dora") / "adapter_config.json").read_text()
    (folder / "adapter_config.json").write_text(config)
    return folder
