"""transformers' vision-language models: at their real dimensions, small, and inputs with an image.

Nothing is downloaded: a model's dimensions are those of its published config.json.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor
from transformers import AutoModelForImageTextToText, PretrainedConfig

from benchmarks.torch_decoder import random_model

RULE = r"model\.language_model\.layers\.\d+\.(self_attn|mlp)\.\w+_proj"
"""The projections of the language model."""

IMAGE_TOKENS = 256


class Dimensions(NamedTuple):
    """The dimensions of a language model, then of the layers of a vision tower."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head: int
    vocabulary: int
    vision_layers: int
    vision_hidden: int
    vision_intermediate: int
    vision_heads: int

    def text(self, **fields: Any) -> dict[str, Any]:
        return {
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": 32_768,
            "rms_norm_eps": 1e-6,
            "use_cache": False,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            **fields,
        }

    def vision(self, **fields: Any) -> dict[str, Any]:
        return {
            "hidden_size": self.vision_hidden,
            "intermediate_size": self.vision_intermediate,
            "num_hidden_layers": self.vision_layers,
            "num_attention_heads": self.vision_heads,
            **fields,
        }

    def qwen_vision(self, **fields: Any) -> dict[str, Any]:
        return {
            "depth": self.vision_layers,
            "hidden_size": self.vision_hidden,
            "intermediate_size": self.vision_intermediate,
            "num_heads": self.vision_heads,
            "out_hidden_size": self.hidden,
            **fields,
        }

    def rope(self, theta: float, interleaved: bool = False) -> dict[str, Any]:
        """Returns the rotary positions of Qwen's models: time, height and width of an image."""
        side = self.head * (5 if interleaved else 6) // 32
        sections = [self.head // 2 - 2 * side, side, side]
        return {
            "rope_type": "default",
            "rope_theta": theta,
            "mrope_section": sections,
            "mrope_interleaved": interleaved,
        }


def _qwen2_5(sizes: Dimensions, image: int) -> PretrainedConfig:
    return transformers.Qwen2_5_VLConfig(
        text_config=sizes.text(rope_parameters=sizes.rope(1e6)),
        vision_config=sizes.qwen_vision(fullatt_block_indexes=[sizes.vision_layers - 1]),
        image_token_id=sizes.vocabulary - 1,
        video_token_id=sizes.vocabulary - 2,
        vision_start_token_id=sizes.vocabulary - 3,
        vision_end_token_id=sizes.vocabulary - 4,
    )


def _qwen3(sizes: Dimensions, image: int) -> PretrainedConfig:
    deep = sizes.vision_layers
    return transformers.Qwen3VLConfig(
        text_config=sizes.text(rope_parameters=sizes.rope(5e6, interleaved=True)),
        vision_config=sizes.qwen_vision(deepstack_visual_indexes=[deep - 3, deep - 2, deep - 1]),
        image_token_id=sizes.vocabulary - 1,
        video_token_id=sizes.vocabulary - 2,
        vision_start_token_id=sizes.vocabulary - 3,
        vision_end_token_id=sizes.vocabulary - 4,
    )


def _gemma3(sizes: Dimensions, image: int) -> PretrainedConfig:
    return transformers.Gemma3Config(
        text_config=sizes.text(
            sliding_window=1024, query_pre_attn_scalar=sizes.hidden // sizes.heads
        ),
        vision_config=sizes.vision(image_size=image, patch_size=14, vision_use_head=False),
        mm_tokens_per_image=IMAGE_TOKENS if image == 896 else 16,
        image_token_index=sizes.vocabulary - 1,
        boi_token_index=sizes.vocabulary - 2,
        eoi_token_index=sizes.vocabulary - 3,
    )


def _mistral3(sizes: Dimensions, image: int) -> PretrainedConfig:
    head = sizes.vision_hidden // sizes.vision_heads
    return transformers.Mistral3Config(
        text_config=sizes.text(
            model_type="mistral", rope_parameters={"rope_type": "default", "rope_theta": 1e9}
        ),
        vision_config=sizes.vision(
            model_type="pixtral", image_size=1540, patch_size=14, head_dim=head
        ),
        image_token_index=sizes.vocabulary - 1,
        tie_word_embeddings=False,
    )


def _internvl(sizes: Dimensions, image: int) -> PretrainedConfig:
    return transformers.InternVLConfig(
        text_config=sizes.text(
            model_type="qwen2", rope_parameters={"rope_type": "default", "rope_theta": 1e6}
        ),
        vision_config=sizes.vision(image_size=[image, image]),
        image_token_id=sizes.vocabulary - 1,
        tie_word_embeddings=False,
    )


class VisionLanguageModel(NamedTuple):
    """A model that reads one image and text.

    Attributes:
      name: of the published model.
      config: returns its config for dimensions and the image's size.
      sizes: the real dimensions.
      image: the size of the image, in pixels, that takes `IMAGE_TOKENS` tokens.
      patch: the size of a patch, if the model reads patches.
      tiny_image: the size of the image of a small model.
    """

    name: str
    config: Callable[[Dimensions, int], PretrainedConfig]
    sizes: Dimensions
    image: int = 448
    patch: int = 0
    tiny_image: int = 112

    def cut(self, layers: int) -> "VisionLanguageModel":
        """Returns the model with fewer layers, and as few in its vision tower, but at least 4."""
        return self._replace(
            sizes=self.sizes._replace(
                layers=layers, vision_layers=min(self.sizes.vision_layers, max(4, layers))
            )
        )

    def tiny(self) -> "VisionLanguageModel":
        """Returns a small model of this architecture."""
        return self._replace(
            sizes=Dimensions(4, 64, 96, 4, 2, 16, 128, 4, 32, 48, 2), image=self.tiny_image
        )

    def make(self, device: str, dtype: torch.dtype = torch.bfloat16) -> Any:
        """Returns the model with random weights, frozen."""
        config = self.config(self.sizes, self.image)
        model = random_model(config, device, dtype, AutoModelForImageTextToText)
        for parameter in model.parameters():
            if parameter.ndim > 1 and not parameter.any():  # Gemma 3's projector begins at zero.
                parameter.normal_(0, 0.02)
        return model

    def inputs(self, model: Any, tokens: int, device: str) -> dict[str, Tensor]:
        """Returns the arguments of a call with an image and random text, ``tokens`` in all."""
        generator = torch.Generator(device).manual_seed(3)
        vocabulary, side = self.sizes.vocabulary, self.image
        ids = torch.randint(vocabulary - 8, (1, tokens), generator=generator, device=device)
        rows = side // (self.patch or 14)
        if self.patch:
            count, pixels = rows * rows // 4, (rows * rows, 3 * 2 * self.patch**2)
        else:
            count, pixels = (
                getattr(model.config, "mm_tokens_per_image", (side // 28) ** 2),
                (1, 3, side, side),
            )
        image = slice(5, 5 + count)
        ids[:, image] = vocabulary - 1
        ids[:, 4] = vocabulary - 3
        draw = torch.randn(pixels, generator=generator, device=device)
        found = {"input_ids": ids, "pixel_values": draw.to(model.dtype)}
        types = (ids == vocabulary - 1).int()
        if self.patch:
            found["image_grid_thw"] = torch.tensor([[1, rows, rows]], device=device)
            found["mm_token_type_ids"] = types
        elif self.config is _gemma3:
            found["token_type_ids"] = types
        elif self.config is _mistral3:
            found["image_sizes"] = torch.tensor([[side, side]], device=device)
        return found


MODELS = (
    VisionLanguageModel(
        "Qwen3-VL-8B",
        _qwen3,
        Dimensions(36, 4096, 12_288, 32, 8, 128, 151_936, 27, 1152, 4304, 16),
        image=512,
        patch=16,
        tiny_image=128,
    ),
    VisionLanguageModel(
        "Qwen3-VL-32B",
        _qwen3,
        Dimensions(64, 5120, 25_600, 64, 8, 128, 151_936, 27, 1152, 4304, 16),
        image=512,
        patch=16,
        tiny_image=128,
    ),
    VisionLanguageModel(
        "Gemma3-27B",
        _gemma3,
        Dimensions(62, 5376, 21_504, 32, 16, 128, 262_208, 27, 1152, 4304, 16),
        image=896,
    ),
    VisionLanguageModel(
        "Mistral-Small-3.1-24B",
        _mistral3,
        Dimensions(40, 5120, 32_768, 32, 8, 128, 131_072, 24, 1024, 4096, 16),
    ),
    VisionLanguageModel(
        "Qwen2.5-VL-32B",
        _qwen2_5,
        Dimensions(64, 5120, 27_648, 40, 8, 128, 152_064, 32, 1280, 3456, 16),
        patch=14,
    ),
    VisionLanguageModel(
        "InternVL3-14B",
        _internvl,
        Dimensions(48, 5120, 13_824, 40, 8, 128, 151_674, 24, 1024, 4096, 16),
    ),
)
