"""DoRALayer: what every adapted layer is, whatever its base."""

import copy
import math
import numbers
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from dora_common.hyperparameters import ADAPTER_NAMES, DropoutMode, adapter_scale, check_dropout
from torch_dora.layers import placement
from torch_dora.ops import check, choose, factored_norm, magnitude_scale, quantised, shards
from torch_dora.ops.dtypes import accumulation_dtype, keeping_float32, no_autocast
from torch_dora.ops.products import product
from torch_dora.ops.quantised import dense


class DoRALayer(nn.Module):
    """An existing layer with an adapter beside it.

    The magnitude starts as the norm of the adapter as it is initialised, so a fresh adapter with
    lora_a or lora_b zero gives back the base's output bit for bit, and any other that of
    weight + s·lora_b lora_a. The norm is per output feature and constant under differentiation
    (arXiv 2402.09353, section 4.3). The magnitude is fp32 (fp64 for an fp64 layer) whatever
    ``adapter_dtype``, and whatever a model is cast to by ``to``, ``half`` or ``bfloat16``: rounded
    to 16 bits it would differ from the norm in a fresh adapter already.

    The layer has the attributes of its base, such as ``in_features`` or ``stride``.

    Args:
        base: the layer to adapt. Its weight and bias are shared, not copied, and frozen.
        rank: r, at least 1.
        alpha: s = alpha / rank, or alpha / sqrt(rank) with ``use_rslora``.
        use_rslora: see ``alpha``.
        dropout: probability of dropping an element of the input in training.
        dropout_mode: "adapter" drops the input that lora_a reads, as LoRA does elsewhere; "input"
            drops it in the magnitude's correction too, as Hugging Face PEFT does in training, at
            the cost of a second product: y = xWᵀ + b + (g-1)·drop(x)Wᵀ + g·s·drop(x)(BA)ᵀ.
        adapter_dtype: dtype of lora_a and lora_b.
        implementation: of the operators: None for the best, "triton" or "eager".

    Raises:
        TypeError, ValueError: an argument is out of its range, or this class adapts no such base.
        NotImplementedError: the base has a setting that its adapter would not honour.
    """

    BASES: ClassVar[tuple[type[nn.Module], ...]] = ()
    """The layers that this class adapts, and those subclasses of them that compute the same."""
    BASES_NAMED: ClassVar[str] = ""  # the same, for messages
    SHARDED_AXES: ClassVar[Mapping[str, int]] = {}
    """Which axis of lora_a, lora_b and magnitude is sharded as the same axis of the weight matrix;
    nothing in layers that tensor parallelism does not reach."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    lora_a: nn.Parameter
    lora_b: nn.Parameter
    magnitude: nn.Parameter
    constant_norm: Tensor | None
    """The norm that calls use; None, as a rule, to compute it on every call."""

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
    ) -> None:
        scale = adapter_scale(rank, alpha, use_rslora)
        check_dropout(dropout, dropout_mode)
        check.is_float_dtype("adapter_dtype", adapter_dtype)
        choose.check_name(implementation)
        self.check_base(base, int(rank), float(dropout))
        super().__init__()
        # In a tuple, so that it is no submodule: its parameters are this layer's already.
        self._base = (base,)
        for name, value in vars(base).items():
            taken = name in vars(self) or hasattr(type(self), name)
            if not (name.startswith("_") or taken):
                setattr(self, name, value)
        # Python's numbers, whichever library they come from.
        self.rank, self.use_rslora, self.scale = int(rank), use_rslora, scale
        self.alpha = int(alpha) if isinstance(alpha, numbers.Integral) else float(alpha)
        self.dropout, self.dropout_mode = float(dropout), dropout_mode
        self.implementation = implementation
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
            empty = shards.empty_beside(weight, shape, self.SHARDED_AXES.get(name), dtype)
            setattr(self, name, nn.Parameter(empty))
        self.reset_adapter()
        self.train(base.training)

    @classmethod
    def from_base(cls, base: nn.Module, *, rank: int, alpha: float, **options: Any) -> Self:
        """Returns a layer of this class that adapts ``base``; arguments as :class:`DoRALayer`'s."""
        layer = cls.__new__(cls)
        DoRALayer.__init__(layer, base, rank=rank, alpha=alpha, **options)
        return layer

    @classmethod
    def adapts(cls, module: nn.Module) -> bool:
        """Returns whether ``module`` is a layer that this class adapts."""
        kind = next((kind for kind in cls.BASES if isinstance(module, kind)), None)
        return kind is not None and type(module).forward is kind.forward

    @classmethod
    def check_base(cls, base: Any, rank: int, dropout: float) -> None:
        """Raises unless an adapter of this rank and dropout can stand beside ``base``."""
        if not isinstance(base, nn.Module) or not cls.adapts(base):
            raise TypeError(
                f"base is a {type(base).__name__}; {cls.__name__} adapts {cls.BASES_NAMED}, and "
                "subclasses only where they compute the same"
            )
        # accelerate wraps the forward of an instance, too, but that one computes the same.
        if "forward" in vars(base) and not hasattr(base, "_hf_hook"):
            raise NotImplementedError(
                "base.forward was replaced on this very layer, and its adapter would not call it; "
                "delete that attribute, or make the replacement a forward hook"
            )
        if parametrize.is_parametrized(base):
            parametrized: Any = base.parametrizations
            named = ", ".join(
                f"{name} by {' and '.join(type(one).__name__ for one in each)}"
                for name, each in parametrized.items()
            )
            raise NotImplementedError(
                f"base has parametrized tensors, {named}, which every call computes anew; call "
                "torch.nn.utils.parametrize.remove_parametrizations first"
            )
        if base._parameters.get("weight") is None:
            raise NotImplementedError(
                "base.weight is no parameter but computed from others "
                f"({', '.join(base._parameters)}), as the hooks of torch.nn.utils.weight_norm, "
                "spectral_norm and prune do it; remove them first, by remove_weight_norm and so on"
            )
        if quantised.is_quantised(base.weight):
            quantised.check("base.weight", base.weight)
            quantised.check_activations("base.weight", base.weight)
            quantised.check_scales("base.weight", base.weight)
        else:
            check.is_float("weight", base.weight)

    @property
    def base(self) -> Any:
        """Returns the layer that this one adapts, on this one's tensors: whoever replaces a
        parameter (``load_state_dict(assign=True)``, tying, ...) replaces it here alone."""
        self._update_base()
        return self.settings

    def _release_base(self) -> None:
        """Lets go of the base's tensors once FSDP or offloading has put others in this layer, so
        that nothing keeps them whole."""
        if placement.is_offloaded(self) or placement.is_in_fsdp(self):
            for tensors in (self.settings._parameters, self.settings._buffers):
                tensors.update(dict.fromkeys(tensors))
        elif not placement.is_lent(self.weight):
            self._update_base()

    @property
    def _fsdp_use_orig_params(self) -> bool:
        return True

    @_fsdp_use_orig_params.setter
    def _fsdp_use_orig_params(self, _: bool) -> None:
        """Lets go of the base's tensors: fully_shard sets this attribute once it has sharded."""
        self._release_base()

    def _load_from_state_dict(
        self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
    ) -> None:
        others = local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        super()._load_from_state_dict(state_dict, prefix, *others)
        loaded = any(f"{prefix}{name}" in state_dict for name in ("weight", *ADAPTER_NAMES))
        if loaded and self.constant_norm is not None:
            self.constant_norm = shards.whole(self.norm())

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Moves and casts the layer, as torch has it, but leaves the magnitude and a constant norm
        in fp32."""
        kept = self.magnitude, self.magnitude.grad, self.constant_norm
        return super()._apply(keeping_float32(fn, kept), recurse)

    def _update_base(self) -> None:
        base = self.settings
        for tensors in (base._parameters, base._buffers):
            for name in tensors:
                tensors[name] = getattr(self, name)

    @property
    def settings(self) -> Any:
        """Returns the layer that this one adapts, to read its settings: its tensors may be old."""
        return self._base[0]

    def adapter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of lora_a, lora_b and magnitude: of a weight [out, in], here."""
        features, width = self.weight_matrix().shape
        return {
            "lora_a": (self.rank, width),
            "lora_b": (features, self.rank),
            "magnitude": (features,),
        }

    def weight_matrix(self) -> Tensor:
        """Returns the weight as [out, in], or [groups, out, in] where groups have their own."""
        return self.weight

    def matrices(self) -> tuple[Tensor, Tensor, Tensor]:
        """Returns weight [out, in], lora_a [r, in] and lora_b [out, r]; a layer whose groups have a
        matrix and an adapter each returns three stacks of them, [groups, ...]."""
        return self.weight_matrix(), self.lora_a, self.lora_b

    def as_weight(self, matrix: Tensor) -> Tensor:
        """Returns a matrix like :meth:`weight_matrix`'s in the shape that the weight has."""
        return matrix.reshape(self.weight.shape)

    def reset_adapter(self) -> None:
        """Draws a fresh adapter: lora_a uniform in ±1/sqrt(in), as PEFT, lora_b zero."""
        bound = 1 / math.sqrt(max(1, math.prod(self.lora_a.shape[1:])))
        shards.initialize(self.lora_a, lambda lora_a: nn.init.uniform_(lora_a, -bound, bound))
        nn.init.zeros_(self.lora_b)
        self.reset_magnitude()

    @torch.no_grad()
    def reset_magnitude(self) -> None:
        """Sets the magnitude to the norm: call it after setting lora_a or lora_b by hand."""
        self.magnitude.copy_(self.norm())

    def norm(self) -> Tensor:
        """Returns ‖weight + scale·lora_b lora_a‖ of every output feature: f32[out], detached."""
        weight, lora_a, lora_b = self.matrices()
        if weight.ndim == 2:
            return factored_norm(
                weight, lora_a, lora_b, self.scale, implementation=self.implementation
            )
        # One batched product instead of a factored norm for each group. The matrices of groups are
        # small, and float64 is out of reach of TensorFloat-32 and of autocast.
        weight, lora_a, lora_b = (matrices.detach() for matrices in (weight, lora_a, lora_b))
        direction = weight.double() + self.scale * (lora_b.double() @ lora_a.double())
        norm = torch.linalg.vector_norm(direction, dim=2).flatten()
        return norm.to(accumulation_dtype(weight, lora_a, lora_b))

    def current_norm(self) -> Tensor:
        """Returns the norm that a call uses: the constant one where there is one, or a new one.

        Raises:
            TypeError: FSDP has cast the magnitude to 16 bits.
        """
        placement.check_magnitude(self)
        placement.watch_offloaded(self)
        held = self.settings.weight
        if held is not None and held is not self.weight:
            self._release_base()
        constant = self.constant_norm
        return self.norm() if constant is None else constant

    def g(self, dtype: torch.dtype) -> Tensor:
        """Returns magnitude / norm, for a result of ``dtype``: f32[out]."""
        return magnitude_scale(self.magnitude, self.current_norm(), dtype)

    def drop(self, x: Tensor) -> Tensor | None:
        """Returns x after dropout, or None where nothing is dropped."""
        return F.dropout(x, self.dropout) if self.training and self.dropout > 0 else None

    @torch.no_grad()
    def merged_weight(self) -> Tensor:
        """Returns g∘(weight + scale·lora_b lora_a), in the weight's shape, in fp32 (fp64)."""
        matrices: tuple[Any, Any, Any] = self.matrices()
        whole, g = matrices[0], self.g(matrices[0].dtype)
        weight, lora_a, lora_b = shards.local_matrices(*matrices)
        dtype = accumulation_dtype(weight, lora_a, lora_b)
        g = shards.local_rows(g, whole).to(dtype)
        with no_autocast(weight):
            if weight.ndim == 2:
                merged = product(lora_b, lora_a, dtype)
            else:
                pairs = zip(lora_b, lora_a, strict=True)
                merged = torch.stack([product(b, a, dtype) for b, a in pairs])
            weight = dense(weight, dtype) if quantised.is_quantised(weight) else weight
            merged = merged.mul_(self.scale).add_(weight)
            merged = merged.mul_(g.reshape(*weight.shape[:-1], 1))
        if shards.is_sharded(whole):
            merged = shards.joined(merged, whole, whole.placements, whole.shape)
        return self.as_weight(merged)

    @torch.no_grad()
    def merge(self) -> nn.Module:
        """Returns a plain layer like the base, whose weight is the merged one cast once to the
        base's dtype. This layer and its base are unchanged; the bias is shared."""
        base, dtype = self.base, self.weight.dtype
        bias = getattr(self, "bias", None)
        if bias is not None and quantised.is_quantised(self.weight):
            dtype = bias.dtype  # torchao's weights keep theirs, whatever the model is cast to
        merged = copy.deepcopy(base, {id(p): p for p in base.parameters()})
        merged.weight = nn.Parameter(self.merged_weight().to(dtype), requires_grad=False)
        return merged.train(self.training)

    def __prepare_scriptable__(self) -> None:
        """Refuses torch.jit.script, which asks for this and could not compile what a call does."""
        raise NotImplementedError(
            f"torch.jit.script cannot compile a {type(self).__name__}; call torch.jit.trace with "
            "an example input, torch.compile or torch.export, or script what torch_dora.merge_dora "
            "returns"
        )

    def extra_repr(self) -> str:
        names = ["rank", "alpha", "use_rslora"] + ["dropout", "dropout_mode"] * (self.dropout > 0)
        told = (f"{name}={getattr(self, name)!r}" for name in names)
        return ", ".join([self.base.extra_repr() or str(self.settings), *told])
