"""A plugin with which vLLM serves DoRA adapters, un-merged, mixed with LoRA and the base model.

vLLM finds :func:`register` through the entry point ``vllm.general_plugins`` of this distribution,
so installing it beside vLLM is enough and there is nothing to call. A folder of PEFT with
``use_dora`` is then an adapter like any other, for ``--lora-modules``, ``LoRARequest`` and
``/v1/load_lora_adapter``.

With g = m / ‖W + sBA‖ per output feature, a DoRA layer computes (arXiv 2402.09353)

    y = g ∘ (x Wᵀ) + (x Aᵀ) (g ∘ sB)ᵀ + bias

The result of a base layer is multiplied by the g of each row's adapter
(:mod:`torch_dora.vllm.scaling`), and B by g when it is copied into its slot. The norms are computed
when an adapter is loaded (:mod:`torch_dora.vllm.base_weight`).
"""


def register() -> None:
    """Replaces what has to be replaced in vLLM. A second call changes nothing.

    Raises:
        RuntimeError: this version of vLLM is not as the plugin expects.
    """
    from torch_dora.vllm import hooks

    hooks.install()
