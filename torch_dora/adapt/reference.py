"""The base model as a reference, without a second copy of it: for DPO, and for a KL penalty."""

import contextlib
from collections.abc import Iterator

from torch import nn

from dora_common.peft.replaced_parameters import described, replaced_parameters
from torch_dora.layers import adapted_layers


@contextlib.contextmanager
def disable_adapters(model: nn.Module) -> Iterator[None]:
    """Makes ``model`` compute as its base model inside a ``with`` statement, bit for bit.

        with torch.no_grad(), torch_dora.disable_adapters(model):
            reference = model(tokens)

    The DoRA layers call their base layers, and their adapters get no gradient. Statements can be
    nested; the adapters are on again after the outermost one, also after an error.

    - With activation checkpointing, run the backward pass inside the statement too. Outside, the
      recomputation would use the adapters: torch raises CheckpointError for that, except with
      ``use_reentrant=True``.
    - Parameters that were trained beside the adapters keep their values.
    - On a CPU, bitsandbytes' Linear4bit computes as in training.

    Raises:
        TypeError: ``model`` is not a module.
        ValueError: ``model`` has no DoRA layer.
        NotImplementedError: a PEFT folder has replaced parameters of the base model
            (modules_to_save, biases, rows of single tokens).
    """
    layers = adapted_layers(model).values()
    if replaced := replaced_parameters(model):
        raise NotImplementedError(
            "without its adapters, the model would not be the base model, since a PEFT folder has "
            "replaced these parameters; use a second copy of the base model as the reference:"
            f"{described(replaced)}"
        )
    before = [(layer, layer.is_disabled) for layer in layers]
    try:
        for layer in layers:
            layer.is_disabled = True
        yield
    finally:
        for layer, was_disabled in before:
            layer.is_disabled = was_disabled
