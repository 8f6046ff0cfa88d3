"""DoRALayer: the base class of all adapted layers."""

import copy
import logging
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from dora_common.hyperparameters import ADAPTER_NAMES, DropoutMode, adapter_scale, check_dropout
from torch_dora.layers import placement
from torch_dora.ops import (
    check,
    choose,
    factored_norm,
    magnitude_scale,
    quantised,
    row_scaled,
    shards,
)
from torch_dora.ops.dtypes import accumulation_dtype, keep_float32, no_autocast
from torch_dora.ops.products import product
from torch_dora.ops.quantised import dense

_LOG = logging.getLogger(__name__)


def computes_like(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Returns whether a call of ``module`` computes what one of a plain ``kind`` does."""
    names = ("forward", "__call__", "_call_impl")
    return all(getattr(type(module), name) is getattr(kind, name) for name in names)


def _lost_magnitude(missing_keys: list[str]) -> bool:
    """Returns whether an earlier layer of the same ``load_state_dict`` got a weight without a
    magnitude; ``missing_keys`` are the call's keys so far."""
    return any(
        key.endswith("magnitude") and f"{key.removesuffix('magnitude')}weight" not in missing_keys
        for key in missing_keys
    )


def parameter_aliases(module: nn.Module) -> dict[int, Any]:
    """Returns, by the ids of a module's parameters, other parameters in the same memory: the memo
    of a ``copy.deepcopy`` that needs no memory, and whose result can be cast and moved in place."""
    return {id(parameter): parameter_alias(parameter) for parameter in module.parameters()}


def parameter_alias(parameter: Any) -> Any:
    """Returns another parameter in the memory of `parameter`, or `parameter` itself if it is of a
    class of its own, such as bitsandbytes', or None."""
    is_torch = type(parameter) is nn.Parameter or is_traceable_wrapper_subclass(parameter)
    if not (is_torch and isinstance(parameter, nn.Parameter)):
        return parameter
    return nn.Parameter(parameter.detach(), parameter.requires_grad)


class DoRALayer(nn.Module):
    """An existing layer and its adapter.

    The initial magnitude is the norm of the freshly initialised adapter. So the layer first
    computes with weight + s·lora_b lora_a; while lora_a or lora_b is zero, its output equals the
    base's bit for bit. There is one norm per output feature, constant under differentiation (arXiv
    2402.09353, section 4.3).

    The magnitude is fp32 (fp64 for an fp64 layer), whatever ``adapter_dtype`` is, and stays so when
    ``to``, ``half`` or ``bfloat16`` casts the model: rounded to 16 bits, even a fresh adapter's
    magnitude would differ from the norm.

    The layer has the attributes of its base, such as ``in_features`` or ``stride``.

    Args:
        base: the layer to adapt. Its weight and bias are shared, not copied, and frozen.
        rank: r, at least 1.
        alpha: s = alpha / rank, or alpha / sqrt(rank) with ``use_rslora``.
        use_rslora: see ``alpha``.
        dropout: the probability of dropping an element of the input in training.
        dropout_mode: "adapter" drops elements of lora_a's input only, as in LoRA; "input" also
            drops them in the magnitude's correction, as Hugging Face PEFT does in training, which
            takes a second product: y = xWᵀ + b + (g-1)·drop(x)Wᵀ + g·s·drop(x)(BA)ᵀ.
        adapter_dtype: the dtype of lora_a and lora_b.
        implementation: of the operators: None for the best one, "triton" or "eager".
        bwd_qtype: the format of gradients for their products with the weight, "float8_e4m3fn" or
            "float8_e5m2", as in :func:`torch_dora.ops.dora_linear`; for a base whose weight makes
            it quantise its input to FP8.

    Raises:
        TypeError, ValueError: an argument is out of its range, or this class cannot adapt ``base``.
        NotImplementedError: the base has a setting that the adapted layer would not respect.
    """

    BASES: ClassVar[tuple[type[nn.Module], ...]] = ()
    """The layers that this class adapts, including subclasses for which ``computes_like`` holds."""
    BASES_NAMED: ClassVar[str] = ""  # BASES in words, for error messages
    SHARDED_AXES: ClassVar[Mapping[str, int]] = {}
    """The axis of lora_a, lora_b and magnitude that is sharded like the same axis of the weight
    matrix. Empty for layers without tensor parallelism."""
    _RANK_AXES: ClassVar[Mapping[str, int]] = {"lora_a": 0, "lora_b": -1}

    weight: nn.Parameter
    bias: nn.Parameter | None
    lora_a: nn.Parameter
    lora_b: nn.Parameter
    magnitude: nn.Parameter
    constant_norm: Tensor | None
    """The norm that calls use; None (the usual case) to compute it on every call."""
    is_disabled = False
    """Whether calls compute as the base layer does; see :func:`torch_dora.disable_adapters`."""

    def __init__(
        self,
        base: Any,
        *,
        rank: int,
        alpha: float,
        use_rslora: bool = False,
        dropout: float = 0.0,
        dropout_mode: DropoutMode = "adapter",
        adapter_dtype: torch.dtype = torch.float32,
        implementation: str | None = None,
        bwd_qtype: str | None = None,
    ) -> None:
        adapter_scale(rank, alpha, use_rslora)
        check_dropout(dropout, dropout_mode)
        check.is_float_dtype("adapter_dtype", adapter_dtype)
        choose.check_name(implementation)
        self.check_base(base, int(rank), float(dropout))
        act_qtype = quantised.act_qtype(getattr(base, "weight", None))
        row_scaled.check(getattr(base, "weight", None), act_qtype, bwd_qtype)
        super().__init__()
        # A tuple keeps the base from being a submodule: this layer has the same parameters.
        self._base = (base,)
        for name, value in vars(base).items():
            is_taken = name in vars(self) or hasattr(type(self), name)
            if not (name.startswith("_") or is_taken):
                setattr(self, name, value)
        # Python numbers, also when NumPy numbers were passed.
        self.rank, self.use_rslora = int(rank), use_rslora
        self.alpha = alpha
        self.dropout, self.dropout_mode = float(dropout), dropout_mode
        self.implementation = implementation
        self.act_qtype, self.bwd_qtype = act_qtype, bwd_qtype
        for name, parameter in base._parameters.items():
            frozen = None if parameter is None else parameter.requires_grad_(False)
            self.register_parameter(name, frozen)
        for name, buffer in base._buffers.items():
            persistent = name not in base._non_persistent_buffers_set
            self.register_buffer(name, buffer, persistent=persistent)
        self.register_buffer("constant_norm", None, persistent=False)
        weight = self.weight_matrix()
        wide = accumulation_dtype(weight, torch.empty(0, dtype=adapter_dtype))
        for name, shape in self.adapter_shapes().items():
            dtype = wide if name == "magnitude" else adapter_dtype
            empty = shards.empty_adapter(weight, shape, self.SHARDED_AXES.get(name), dtype)
            setattr(self, name, nn.Parameter(empty))
        self.reset_adapter()
        self.train(base.training)

    @classmethod
    def from_base(cls, base: nn.Module, *, rank: int, alpha: float, **options: Any) -> Self:
        """Returns a layer of this class that adapts ``base``. :class:`DoRALayer` describes the
        arguments."""
        layer = cls.__new__(cls)
        DoRALayer.__init__(layer, base, rank=rank, alpha=alpha, **options)
        return layer

    @classmethod
    def adapts(cls, module: nn.Module) -> bool:
        """Returns whether this class adapts ``module``."""
        kind = next((kind for kind in cls.BASES if isinstance(module, kind)), None)
        return kind is not None and computes_like(module, kind)

    @classmethod
    def check_base(cls, base: Any, rank: int, dropout: float) -> None:
        """Raises the constructor's errors if this class cannot adapt ``base`` with this rank and
        dropout."""
        if not isinstance(base, nn.Module) or not cls.adapts(base):
            raise TypeError(
                f"base is a {type(base).__name__}; {cls.__name__} adapts {cls.BASES_NAMED}, and "
                "subclasses that do not override forward or the call"
            )
        placement.refuse_customised_base(base)
        if quantised.is_quantised(base.weight):
            quantised.check("base.weight", base.weight)
            quantised.act_qtype(base.weight)
            quantised.check_scales(base.weight)
        else:
            check.is_float("weight", base.weight)

    @property
    def base(self) -> Any:
        """Returns the adapted base layer, with this layer's current tensors. If a parameter was
        replaced (``load_state_dict(assign=True)``, tying, ...), it was replaced in this layer
        only."""
        self._update_base()
        return self.settings

    def call_base(self, input: Tensor) -> Tensor:
        """Returns the base layer's own result, with this layer's current tensors."""
        base = self.settings
        if any(getattr(self, name) is not tensor for name, tensor in base._parameters.items()):
            base = self._base_copy()
        # The instance's forward may be accelerate's, whose work this layer's own has done.
        return type(base).forward(base, input)

    def _base_copy(self) -> Any:
        """Returns a copy of the base layer that has this layer's current tensors. The base keeps no
        references to tensors of this call, as FSDP gathers them."""
        base = copy.copy(self.settings)
        for kind in ("_parameters", "_buffers"):
            setattr(base, kind, {name: getattr(self, name) for name in getattr(base, kind)})
        return base

    def _release_base(self) -> None:
        """Drops the base's references to the original tensors after FSDP or offloading has replaced
        them in this layer, so that the full tensors can be freed."""
        if placement.is_offloaded(self) or placement.is_in_fsdp(self):
            for tensors in (self.settings._parameters, self.settings._buffers):
                tensors.update(dict.fromkeys(tensors))
        elif not placement.is_temporary(self.weight):
            self._update_base()

    @property
    def _fsdp_use_orig_params(self) -> bool:
        return True

    @_fsdp_use_orig_params.setter
    def _fsdp_use_orig_params(self, _: bool) -> None:
        """Releases the base's tensors: fully_shard sets this attribute after sharding."""
        self._release_base()

    def register_parameter(self, name: str, param: Any) -> None:
        """Registers a parameter, as setting an attribute does. Raises ValueError for a lora_a or
        lora_b of another rank, by which the scale would be wrong."""
        old, axis = self._parameters.get(name), self._RANK_AXES.get(name)
        # FSDP with flat parameters sets parts of them, [size].
        if axis is not None and old is not None and getattr(param, "ndim", 0) == old.ndim > 1:
            if param.shape[axis] != old.shape[axis]:
                raise self._rank_error(name, param.shape, old.shape)
        super().register_parameter(name, param)

    def _rank_error(self, name: str, shape: Sequence[int], expected: Sequence[int]) -> ValueError:
        return ValueError(
            f"{name} is set to the shape {tuple(shape)}; expected the layer's rank {self.rank}, by "
            f"which its scale is computed, as in {tuple(expected)}: adapt the base model by a rule "
            "with the adapter's rank and alpha, or load the adapter by "
            "torch_dora.peft.load_adapter"
        )

    def _load_from_state_dict(
        self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
    ) -> None:
        others = local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        loaded = [name for name in ("weight", *ADAPTER_NAMES) if f"{prefix}{name}" in state_dict]
        if "weight" in loaded and "magnitude" not in loaded and not _lost_magnitude(missing_keys):
            _LOG.warning(
                "%sweight was loaded without %smagnitude, and maybe those of other layers: if the "
                "loaded weights are others than before, the old magnitudes scale them wrongly; "
                "then call torch_dora.reset_magnitudes(model), or load an adapter",
                prefix,
                prefix,
            )
        super()._load_from_state_dict(state_dict, prefix, *others)
        if loaded and self.constant_norm is not None:
            self.constant_norm = shards.full_tensor(self.norm())

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Moves and casts the layer as torch does, but keeps the magnitude and a constant norm in
        fp32."""
        kept = self.magnitude, self.magnitude.grad, self.constant_norm
        return super()._apply(keep_float32(fn, kept), recurse)

    def _update_base(self) -> None:
        base = self.settings
        for tensors in (base._parameters, base._buffers):
            for name in tensors:
                tensors[name] = getattr(self, name)

    @property
    def alpha(self) -> float:
        """The numerator of the scale. Setting it sets the scale."""
        return self._alpha

    @alpha.setter
    def alpha(self, alpha: float) -> None:
        self._scale = adapter_scale(self.rank, alpha, self.use_rslora)
        self._alpha = int(alpha) if isinstance(alpha, numbers.Integral) else float(alpha)

    @property
    def scale(self) -> float:
        """The scale s of the adapter, by its rank and alpha."""
        return self._scale

    @property
    def settings(self) -> Any:
        """Returns the adapted base layer, only for reading its settings: its tensors may be
        outdated."""
        return self._base[0]

    def adapter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of lora_a, lora_b and magnitude; here for a weight [out, in]."""
        features, width = self.weight_matrix().shape
        return {
            "lora_a": (self.rank, width),
            "lora_b": (features, self.rank),
            "magnitude": (features,),
        }

    def weight_matrix(self) -> Tensor:
        """Returns the weight as [out, in], or as [groups, out, in] if each group has its own
        matrix."""
        return self.weight

    def matrices(self) -> tuple[Tensor, Tensor, Tensor]:
        """Returns weight [out, in], lora_a [r, in] and lora_b [out, r]; if each group has its own
        weight and adapter, stacks of them, [groups, ...]."""
        return self.weight_matrix(), self.lora_a, self.lora_b

    def as_weight(self, matrix: Tensor) -> Tensor:
        """Reshapes a matrix from the shape of :meth:`weight_matrix` to the shape of the weight."""
        return matrix.reshape(self.weight.shape)

    def reset_adapter(self) -> None:
        """Initialises the adapter: lora_a uniform in ±1/sqrt(in), as in PEFT, lora_b zero."""
        bound = 1 / math.sqrt(max(1, self.weight_matrix().shape[-1]))
        shards.initialize(self.lora_a, lambda lora_a: nn.init.uniform_(lora_a, -bound, bound))
        nn.init.zeros_(self.lora_b)
        self.reset_magnitude()
        quantised.check_norm(self.weight, self.magnitude)

    @torch.no_grad()
    def reset_magnitude(self) -> None:
        """Sets the magnitude to the norm. Call this after setting lora_a or lora_b by hand."""
        self.magnitude.copy_(self.norm())

    def norm(self) -> Tensor:
        """Returns ‖weight + scale·lora_b lora_a‖ per output feature: f32[out], detached."""
        weight, lora_a, lora_b = self.matrices()
        if weight.ndim == 2:
            return factored_norm(
                weight, lora_a, lora_b, self.scale, implementation=self.implementation
            )
        # One batched product replaces a factored norm per group: the matrices of groups are small.
        # float64 keeps TensorFloat-32 and autocast out.
        weight, lora_a, lora_b = (matrices.detach() for matrices in (weight, lora_a, lora_b))
        direction = weight.double() + self.scale * (lora_b.double() @ lora_a.double())
        norm = torch.linalg.vector_norm(direction, dim=2).flatten()
        return norm.to(accumulation_dtype(weight, lora_a, lora_b))

    def current_norm(self, *index: int) -> Tensor:
        """Returns the norm that a call uses: the constant norm if there is one, else a new norm.

        Args:
            *index: the number of one expert, if the layer has packed experts; by default all.

        Raises:
            TypeError, ValueError: see :meth:`begin_call`.
        """
        constant = self.begin_call()
        if constant is None:
            return self.norm(*index)
        return constant[index] if index else constant

    def begin_call(self) -> Tensor | None:
        """Checks that the layer can be called, and returns its constant norm or None.

        Raises:
            TypeError: FSDP has cast the magnitude to 16 bits.
            ValueError: lora_a has another rank than the layer; ``.data`` was set.
        """
        shape, axis = self.lora_a.shape, self._RANK_AXES["lora_a"]
        if len(shape) > 1 and shape[axis] != self.rank:
            raise self._rank_error("lora_a", shape, self.adapter_shapes()["lora_a"])
        placement.check_magnitude(self)
        placement.refuse_offloaded_gradients(self)
        base_weight = self.settings.weight
        if base_weight is not None and base_weight is not self.weight:
            self._release_base()
        return self.constant_norm

    def g(self, dtype: torch.dtype) -> Tensor:
        """Returns magnitude / norm, for a result of ``dtype``: f32[out]."""
        return magnitude_scale(self.magnitude, self.current_norm(), dtype)

    def drop(self, x: Tensor) -> Tensor | None:
        """Returns x after dropout, or None if nothing is dropped."""
        return F.dropout(x, self.dropout) if self.training and self.dropout > 0 else None

    @torch.no_grad()
    def merged_weight(self) -> Tensor:
        """Returns W' = g∘(weight + scale·lora_b lora_a) in the weight's shape, in fp32 (fp64 for
        fp64)."""
        return self.as_weight(self.weight_change(is_merged=True))

    @torch.no_grad()
    def weight_change(self, *, is_merged: bool = False) -> Tensor:
        """Returns W' - weight, or W' itself with ``is_merged``, in the shape of
        :meth:`weight_matrix` and in fp32 (fp64 for fp64)."""
        matrices: tuple[Any, Any, Any] = self.matrices()
        global_weight = matrices[0]
        weight, lora_a, lora_b = shards.local_matrices(*matrices)
        dtype = accumulation_dtype(weight, lora_a, lora_b)
        g = shards.local_rows(self.g(global_weight.dtype), global_weight).to(dtype)
        with no_autocast(weight):
            if weight.ndim == 2:
                change = product(lora_b, lora_a, dtype)
            else:
                pairs = zip(lora_b, lora_a, strict=True)
                change = torch.stack([product(b, a, dtype) for b, a in pairs])
            weight = dense(weight, dtype) if quantised.is_quantised(weight) else weight
            g = g.reshape(*weight.shape[:-1], 1)
            # g(W + sBA) - W would lose the small change by cancellation.
            change = change.mul_(g * self.scale).add_((g - 1) * weight)
            change = change.add_(weight) if is_merged else change
        if shards.is_sharded(global_weight):
            placements, shape = global_weight.placements, global_weight.shape
            change = shards.from_local(change, global_weight, placements, shape)
        return change

    @torch.no_grad()
    def merge(self) -> nn.Module:
        """Returns a plain layer like the base with the merged weight, cast once to the base's
        dtype. This layer and its base are unchanged; the bias is another parameter in the same
        memory."""
        base, dtype = self.base, self.weight.dtype
        bias = getattr(self, "bias", None)
        if bias is not None and quantised.is_quantised(self.weight):
            dtype = bias.dtype  # casting the model does not change the dtype of torchao's weights
        merged = copy.deepcopy(base, parameter_aliases(base))
        merged.weight = nn.Parameter(self.merged_weight().to(dtype), requires_grad=False)
        return merged.train(self.training)

    def __prepare_scriptable__(self) -> None:
        """Raises in torch.jit.script, which calls this method and cannot compile the layer."""
        raise NotImplementedError(
            f"torch.jit.script cannot compile a {type(self).__name__}; call torch.jit.trace with "
            "an example input, torch.compile or torch.export, or script the result of "
            "torch_dora.merge_dora"
        )

    def extra_repr(self) -> str:
        names = ["rank", "alpha", "use_rslora"] + ["dropout", "dropout_mode"] * (self.dropout > 0)
        options = (f"{name}={getattr(self, name)!r}" for name in names)
        return ", ".join([self.base.extra_repr() or str(self.settings), *options])
