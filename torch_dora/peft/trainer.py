"""Makes transformers' Trainer save adapters and resume from them."""

import functools
import os
from pathlib import Path
from typing import Any

import transformers
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import SAFE_WEIGHTS_NAME

from dora_common.hyperparameters import ADAPTER_NAMES
from dora_common.rules import listing
from torch_dora.layers import adapted_layers, dora_layers
from torch_dora.ops import shards
from torch_dora.peft.save import prepare, save_adapter


class TrainerCallback(transformers.TrainerCallback):
    """Makes transformers' Trainer, and trainers made from it, save the adapter as a PEFT folder
    instead of the whole model.

        model = torch_dora.apply_dora(model, rules)
        trainer = Trainer(model, args, callbacks=[torch_dora.peft.TrainerCallback()], ...)
        trainer.train(resume_from_checkpoint=...)
        trainer.save_model("adapter")

    Without it, ``save_model`` and checkpoints hold the base model with the adapter's tensors beside
    it, which ``from_pretrained`` loads as the plain base model.

    With it, the model's ``save_pretrained`` writes adapter_config.json and
    adapter_model.safetensors. In the Trainer's checkpoints, model.safetensors has everything that
    changes in training under torch_dora's names, and the Trainer resumes from it, or loads the best
    model: first load the base model and adapt it by the same rules. A model that is not one of
    transformers' is saved whole, and checkpoints have the adapter beside it.

    Args:
        **options: of :func:`save_adapter`, except ``overwrite``, which is True. For
            ``base_model_name_or_path`` the default is the model's ``name_or_path``, so that
            transformers and PEFT find the base model.

    Raises:
        TypeError, ValueError, NotImplementedError: the errors of :func:`save_adapter`, when the
            Trainer is made, and before the first step; FSDP or DeepSpeed's ZeRO-3 has sharded the
            model.
    """

    def __init__(self, **options: Any) -> None:
        self.options: dict[str, Any] = options

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._attach(kwargs["model"])

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        model = kwargs["model"]
        self._attach(model)  # model_init may have made another one
        if sharded := [name for name, parameter in model.named_parameters() if _sharded(parameter)]:
            raise NotImplementedError(
                "the Trainer saves in one process, but FSDP, tensor parallelism or ZeRO-3 has "
                "sharded these parameters over several; train without this callback, and call "
                f"torch_dora.peft.save_adapter in all processes:{listing(sharded)}"
            )
        prepare(model, **self.options)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        model = kwargs["model"]
        if args.should_save and not isinstance(model, transformers.PreTrainedModel):
            folder = Path(args.output_dir, f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")
            save_adapter(model, folder, overwrite=True, **self.options)

    def _attach(self, model: Any) -> None:
        adapted_layers(model)
        if not isinstance(model, transformers.PreTrainedModel):
            return
        if model.name_or_path:
            self.options = {"base_model_name_or_path": model.name_or_path} | self.options
        vars(model)["save_pretrained"] = functools.partial(_save, model, self.options)
        if _accept_checkpoint not in model._load_state_dict_post_hooks.values():
            model.register_load_state_dict_post_hook(_accept_checkpoint)


def _sharded(parameter: Any) -> bool:
    """Returns whether this process has a part of ``parameter`` only; FSDP1's is flat."""
    is_flat = parameter.ndim == 1 and type(parameter).__name__ == "FlatParameter"
    return shards.is_sharded(parameter) or hasattr(parameter, "ds_id") or is_flat


def _save(
    model: Any,
    options: dict[str, Any],
    save_directory: str | os.PathLike[str],
    is_main_process: bool = True,
    **arguments: Any,
) -> None:
    """Saves the adapter of ``model``, with transformers' arguments of ``save_pretrained``."""
    if not [*dora_layers(model)]:  # it has been removed, or merged
        type(model).save_pretrained(model, save_directory, is_main_process, **arguments)
    elif arguments.get("push_to_hub"):
        raise NotImplementedError(
            "push_to_hub is True; expected a call of model.push_to_hub, or an upload of the folder"
        )
    elif is_main_process:
        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        if folder.name.startswith(PREFIX_CHECKPOINT_DIR):
            state = {name: tensor.detach() for name, tensor in _changing(model).items()}
            save_file(state, folder / SAFE_WEIGHTS_NAME, metadata={"format": "pt"})
        save_adapter(model, folder, overwrite=True, **options)


def _changing(model: nn.Module) -> dict[str, Tensor]:
    """Returns what training changes: the adapters, what is trained beside them, and buffers. One
    name of each tensor."""
    buffers = {name for name, _ in model.named_buffers()}
    found: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        is_adapter = name.rpartition(".")[2] in ADAPTER_NAMES
        if is_adapter or name in buffers or tensor.requires_grad:
            found.setdefault(id(tensor), (name, tensor))
    return dict(found.values())


def _accept_checkpoint(model: nn.Module, keys: Any) -> None:
    """Makes the state of a checkpoint complete, so that the Trainer does not list the base model's
    parameters as missing."""
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    if set(keys.missing_keys) == names - _changing(model).keys():
        keys.missing_keys.clear()
