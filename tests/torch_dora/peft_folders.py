"""Small models, and folders that PEFT writes of them."""

import json
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

IDS = torch.randint(0, 40, (2, 9), generator=torch.Generator().manual_seed(0))
SIZES = {
    "vocab_size": 40,
    "hidden_size": 24,
    "intermediate_size": 36,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 32,
}


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 6)
        self.conv = nn.Conv1d(6, 6, 3, padding=1)
        self.image = nn.Conv2d(1, 5, (3, 2), stride=2, bias=False)
        self.volume = nn.Conv3d(1, 2, 2)
        self.score = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3))

    def forward(self, ids):
        x = self.conv(self.embed(ids).mT)
        image = self.image(x[:, None])
        volume = self.volume(image[:, None]).flatten(1).mean(1)
        return self.score(image.amax((2, 3))) + volume[:, None]


def llama() -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, attention_bias=True))


def qwen3() -> nn.Module:
    return transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(**SIZES, tie_word_embeddings=True)
    )


def gpt2() -> nn.Module:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=40, n_positions=32, n_embd=24, n_layer=2, n_head=4)
    )


def classifier() -> nn.Module:
    return transformers.LlamaForSequenceClassification(
        transformers.LlamaConfig(**SIZES, num_labels=3, pad_token_id=0)
    )


def base(make: Any) -> nn.Module:
    torch.manual_seed(0)
    return make().eval()


def perturbed(module: nn.Module, seed: int = 1) -> nn.Module:
    """Every trained parameter moved, so that no magnitude is its norm and no lora_b is zero."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.requires_grad:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.add_(0.2 * noise.to(parameter.dtype))
    return module


def resize(model: Any, size: int) -> None:
    """Resizes the vocabulary of a transformers model, with other weights than before."""
    model.resize_token_embeddings(size, mean_resizing=False)
    for part in {model.get_input_embeddings(), model.get_output_embeddings()}:
        perturbed(part)


def output(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        found = model.eval()(IDS)
    return found if isinstance(found, torch.Tensor) else found.logits


def peft_folder(folder: Path, make: Any, *, seed: int = 1, **fields: Any) -> tuple[Path, Any]:
    """A folder that PEFT wrote, and its model."""
    config = peft.LoraConfig(**({"r": 4, "lora_alpha": 6, "use_dora": True} | fields))
    theirs = perturbed(peft.get_peft_model(base(make), config), seed).eval()
    # PEFT says at every turn that it stores an embedding that it was told to store.
    theirs.save_pretrained(folder, save_embedding_layers=False)
    return folder, theirs


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "adapter_model.safetensors")


def assert_same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype, name
        assert torch.equal(a[name], b[name]), name


def rewritten(folder: Path, rename: Any = lambda key: key, change: Any = lambda t: t) -> None:
    file = folder / "adapter_model.safetensors"
    tensors = {rename(key): change(t).contiguous() for key, t in load_file(file).items()}
    save_file(tensors, file)


def snapshot(model: nn.Module) -> list[Any]:
    return [
        [(name, type(module)) for name, module in model.named_modules()],
        [(name, id(p), p.requires_grad, p.clone()) for name, p in model.named_parameters()],
    ]


def reconfigured(folder: Path, **fields: Any) -> None:
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def assert_unchanged(before: list[Any], after: list[Any]) -> None:
    assert before[0] == after[0]
    for (name, *old, value), (_, *new, now) in zip(before[1], after[1], strict=True):
        assert old == new, name
        assert torch.equal(value, now), name
