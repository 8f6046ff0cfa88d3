"""Recognizes adapters that are not PEFT folders, to say what they are and how to convert them."""

import re
from collections.abc import Iterable
from pathlib import Path

from safetensors import SafetensorError, safe_open

_THROUGH_DIFFUSERS = (
    "load it with load_lora_weights of diffusers' pipeline, and write a folder for each of its "
    "models: model.peft_config[name].save_pretrained(folder) and, as adapter_model.safetensors, "
    "peft.get_peft_model_state_dict(model, adapter_name=name)"
)
MLX = (
    "MLX's format: merge it with mlx_lm.fuse and load the merged model, or convert it: transposed, "
    "lora_a is PEFT's lora_A.weight and lora_b its lora_B.weight; m is its lora_magnitude_vector; "
    "lora_alpha is scale * rank. An embedding's m is a norm per token, which PEFT has not"
)
_ORBAX = (
    "an Orbax checkpoint, such as MaxText's: restore it into the model that wrote it, and save the "
    "adapter with jax_dora.peft.save_adapter; MaxText's to_huggingface leaves out the magnitudes"
)
# By the end of a file's name, or by its name.
_FILES = {
    ".keras": (
        keras := "Keras' format: transposed, lora_a is PEFT's lora_A.weight and lora_b its "
        "lora_B.weight; the magnitude of a norm over the kernel's first axis, as of KerasHub's "
        "DoRADense, is its lora_magnitude_vector"
    ),
    ".h5": keras,
    ".npz": f"NumPy's format; if an old version of mlx-lm wrote it, {MLX}",
    "_CHECKPOINT_METADATA": _ORBAX,
    "_METADATA": _ORBAX,
}
# By the first pattern that is found in a key.
_FORMATS = {
    r"\.(lora_a|lora_b|m)$": MLX,
    r"\.(hada_w1_a|hada_w1_b|lokr_w1|lokr_w1_a|oft_blocks|glora_a|a1\.weight)$": (
        "LyCORIS's format with another algorithm than LoRA: merge it into its base model with "
        "LyCORIS, and load that"
    ),
    r"^lycoris_": f"LyCORIS's format: {_THROUGH_DIFFUSERS}",
    r"^lora_(unet|te\d?|transformer|prior)_": f"kohya's format: {_THROUGH_DIFFUSERS}",
    r"^diffusion_model\..*\.lora_": f"ComfyUI's format: {_THROUGH_DIFFUSERS}",
    r"^(unet|transformer|text_encoder(_\d)?)\..*(lora_A|lora_B|lora\.down|lora\.up|lora_linear)": (
        f"diffusers' format: {_THROUGH_DIFFUSERS}"
    ),
}


def hint(path: Path) -> str:
    """Returns the end of an error message for a path that is not a PEFT folder: the format of this
    file, or of a file in this folder, or "" if it is not known."""
    files = [path] if path.is_file() else sorted(one for one in path.glob("*") if one.is_file())
    for file in files:
        if description := _FILES.get(file.suffix or file.name) or format_of(_keys(file)):
            return f"; {file.name} is in {description}"
    return ""


def format_of(keys: Iterable[str]) -> str:
    """Returns a description of the format of another tool's adapter, or ""."""
    for key in keys:
        for pattern, description in _FORMATS.items():
            if re.search(pattern, key):
                return description
    return ""


def _keys(file: Path) -> list[str]:
    if file.suffix != ".safetensors":
        return []
    try:
        with safe_open(file, framework="np") as tensors:
            return list(tensors.keys())
    except (OSError, SafetensorError):
        return []
