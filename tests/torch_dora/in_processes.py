"""What the tests of sharded models do in every one of several processes."""

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint import state_dict as states
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode

import torch_dora
from dora_common.hyperparameters import ADAPTER_NAMES
from tests.torch_dora.adapters import trained
from tests.torch_dora.layers import test_experts
from torch_dora import DoRALayer, DoRALinear, DoRARule, apply_dora
from torch_dora.ops import factored_norm
from torch_dora.ops.shards import fill, full_tensor

# None of them divides over four processes.
IN, HIDDEN, OUT, RANK = 11, 10, 6, 3
RULE = DoRARule("up|down", RANK, 6)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(IN, HIDDEN), nn.Linear(HIDDEN, OUT)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)))


def base() -> Model:
    torch.manual_seed(3)
    return Model()


def batch() -> torch.Tensor:
    torch.manual_seed(4)
    return torch.randn(5, IN)


def sharded(kind: str, adapted: Callable[[nn.Module], Any] = lambda m: apply_dora(m, RULE)) -> Any:
    """The base model, sharded and adapted: "fsdp", "tp", "fsdp tp"."""
    count = torch.distributed.get_world_size()
    model: Any = base()
    torch.manual_seed(torch.distributed.get_rank())  # each draws adapters of its own
    if kind == "fsdp tp":
        mesh = init_device_mesh("cpu", (2, count // 2), mesh_dim_names=("rows", "model"))
        rows, columns = mesh["rows"], mesh["model"]
    else:
        rows = columns = init_device_mesh("cpu", (count,))
    if "tp" in kind:
        plan: Any = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        model = parallelize_module(model, columns, plan)
    model = adapted(model)
    if "fsdp" in kind:
        for layer in (model.up, model.down):
            fully_shard(layer, mesh=rows)
        fully_shard(model, mesh=rows)
    return model


def folders(kind: str, source: str, target: str) -> dict[str, Any]:
    """Loads an adapter into a sharded model and saves it again; the results, norms and, where it
    can be merged, what it is merged to."""
    if kind == "tp":  # where there is no adapter yet
        model, held = sharded(kind, lambda m: m), 0
    else:
        model = sharded(kind)
        held = _held_whole(model)
    torch_dora.peft.load_adapter(model, source)
    torch_dora.peft.save_adapter(model, target)
    refused = ""
    try:
        torch_dora.peft.save_adapter(model, target)
    except FileExistsError as error:
        refused = str(error)
    norms = torch_dora.norms(model)
    found: dict[str, Any] = {"y": model(batch()), "norms": norms, "refused": refused}
    with torch_dora.with_norms(model, norms):
        found["with norms"] = model(batch())
    if "fsdp" in kind:  # Which keeps shards, before calls and after, and nobody anything beside.
        found["held whole"] = held + _held_whole(model)
    if kind == "tp":
        merged, report = torch_dora.merge_dora(model, return_report=True)
        found |= {"merged": merged(batch()), "report": report}
        found["removed"] = torch_dora.remove_dora(model)(batch())
    return torch.utils._pytree.tree_map(_plain, found)


def _held_whole(model: Any) -> int:
    """The bytes of the tensors that layers hold beside their own."""
    held = [
        one.to_local() if isinstance(one, DTensor) else one
        for layer in (model.up, model.down)
        for name, one in layer.settings.named_parameters()
        if one is not getattr(layer, name)
    ]
    return sum(one.untyped_storage().size() for one in held)


def _plain(value: Any) -> Any:
    # A style's result may still be on its way; a copy waits for it.
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def fresh() -> dict[str, Any]:
    """Models that begin on the meta device: their results, which are the base model's, also after
    their weights have been doubled, and what each process has of the lora_a that all have."""
    full = base().state_dict()
    with torch.device("meta"):
        model: Any = apply_dora(Model(), RULE)
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    options = states.StateDictOptions(full_state_dict=True, strict=False)
    states.set_model_state_dict(model, full, options=options)
    torch.manual_seed(torch.distributed.get_rank())
    for layer in model.modules():
        if isinstance(layer, DoRALayer):
            layer.reset_adapter()
    parallel = sharded("tp")
    parts: list[Any] = [None] * mesh.size()
    torch.distributed.all_gather_object(parts, parallel.up.lora_a.to_local())
    found = {"fsdp": model(batch()), "tp": parallel(batch()), "lora_a": parts}
    for kind, one in (("fsdp", model), ("tp", parallel)):
        for name, value in base().state_dict().items():
            fill(one.get_parameter(name), 2 * value)
        torch_dora.reset_magnitudes(one)
        found[f"doubled {kind}"] = one(batch())
        fill(one.up.lora_b, torch.ones(HIDDEN, RANK))
        with torch_dora.disable_adapters(one):
            found[f"disabled {kind}"] = one(batch())
    return torch.utils._pytree.tree_map(_plain, found)


def experts(way: str) -> dict[str, Any]:
    """Packed experts on one device, and under FSDP: results, gradients and norms."""
    _, x, model = test_experts.make(way)
    whole = trained(model)
    parts = fully_shard(copy.deepcopy(whole), mesh=init_device_mesh("cpu", (2,)))
    found: dict[str, Any] = {}
    for name, one in (("one", whole), ("many", parts)):
        y = one(x)
        y.square().sum().backward()
        layer = one.get_submodule("w_dora")
        gradients = [getattr(layer, kind).grad for kind in ADAPTER_NAMES]
        found[name] = [y, torch_dora.norms(one)["w"], *map(full_tensor, gradients)]
    return torch.utils._pytree.tree_map(_plain, found)


def train(folder: str, begin: int, end: int) -> list[float]:
    """Losses of the steps from ``begin`` to ``end``, from the checkpoint in ``folder`` where that
    is not the first; after the third there is one."""
    model = sharded("fsdp")
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=0.05)
    options = states.StateDictOptions(ignore_frozen_params=True)

    def state() -> dict[str, Any]:
        of_model, of_optimizer = states.get_state_dict(model, optimizer, options=options)
        return {"model": of_model, "optimizer": of_optimizer}

    if begin:
        loaded = state()
        load(loaded, checkpoint_id=f"{folder}/{begin}")
        states.set_state_dict(
            model,
            optimizer,
            model_state_dict=loaded["model"],
            optim_state_dict=loaded["optimizer"],
            options=states.StateDictOptions(strict=False),
        )
    losses = []
    for _ in range(begin, end):
        loss = (model(batch()) - 1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if begin + len(losses) == 3:
            save(state(), checkpoint_id=f"{folder}/3")
    return losses


class _Sent(TorchDispatchMode):
    """The shapes of what is sent to other processes, as it happens."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(kind.__name__ == "DTensor" for kind in types):
            return NotImplemented
        collective = func.namespace == "_c10d_functional" and "wait" not in func.name()
        if collective and "wrap" not in func.name():
            self.shapes.append(tuple(args[0].shape))
        return func(*args, **(kwargs or {}))


def sent(style: str) -> dict[str, list[tuple[int, ...]]]:
    """The shapes that a plain layer of 8 inputs and 12 outputs sends, and one of rank 2."""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    found = {}
    for name in ("base", "DoRA"):
        made = {"column": ColwiseParallel, "row": RowwiseParallel}[style]
        model: Any = parallelize_module(nn.Sequential(nn.Linear(8, 12)), mesh, {"0": made()})
        model.requires_grad_(False)
        if name == "DoRA":
            apply_dora(model, DoRARule("0", 2, 2))
        x = torch.randn(5, 8 if style == "column" else 8 // mesh.size(), requires_grad=True)
        with _Sent() as mode:
            model(x).sum().backward()
        found[name] = mode.shapes
    return found


def compiled(kind: str) -> None:
    """Compiled models compute what eager ones do."""
    model = sharded(kind)
    for layer in (model.up, model.down):
        nn.init.normal_(layer.lora_b)
    x = batch()
    want, wanted = _gradients(model, x)
    if kind == "tp":
        model.compile(fullgraph=True, backend="aot_eager")
    else:  # FSDP's hooks stay outside
        model.up.compile(backend="aot_eager")
        model.down.compile(backend="aot_eager")
    got, found = _gradients(model, x)
    torch.testing.assert_close(got, want)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other)


def _gradients(model, x):
    y = model(x)
    y.square().sum().backward()
    found = [p.grad.full_tensor() for p in model.parameters() if p.requires_grad]
    model.zero_grad()
    return y.detach(), found


def dropping(mode: str) -> tuple[torch.Tensor, torch.Tensor]:
    """A row-parallel layer's result with dropout, and that of the formula on one device with the
    mask that it drew."""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    model: Any = parallelize_module(nn.Sequential(nn.Linear(8, 6)), mesh, {"0": RowwiseParallel()})
    apply_dora(model, DoRARule("0", 2, 3, dropout=0.4, dropout_mode=mode))
    layer = model[0]
    fill(layer.lora_b, torch.arange(12.0).reshape(6, 2) / 10)
    fill(layer.magnitude, torch.arange(1.0, 7.0))
    x = torch.arange(40.0).reshape(5, 8) / 10
    part = x.tensor_split(mesh.size(), 1)[mesh.get_local_rank()].contiguous()
    state = torch.random.get_rng_state()
    y = model(part)
    torch.random.set_rng_state(state)
    parts: list[Any] = [None] * mesh.size()
    torch.distributed.all_gather_object(parts, nn.functional.dropout(part, 0.4))
    dropped = torch.cat(parts, 1)
    weight, lora_a, lora_b = (one.full_tensor() for one in layer.matrices())
    bias, magnitude = layer.bias.full_tensor(), layer.magnitude.full_tensor()
    g = (magnitude / (weight + 1.5 * lora_b @ lora_a).norm(dim=1)).detach()
    inner = (x if mode == "adapter" else dropped) @ weight.T
    change = (g - 1) * inner + g * (1.5 * (dropped @ lora_a.T) @ lora_b.T)
    return y.detach().clone(), (x @ weight.T + bias + change).detach()


def quick() -> dict[Any, Any]:
    """What `make test` asks of the functions above."""
    found: dict[Any, Any] = {"fresh": fresh()}
    found |= {("sent", style): sent(style) for style in ("row", "column")}
    return found | {("dropping", mode): dropping(mode) for mode in ("adapter", "input")}


def refusals(folder: str) -> dict[str, str]:
    """The messages of what is refused, by what was tried."""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    found = {}

    @contextlib.contextmanager
    def trying(name):
        try:
            yield
            found[name] = "was not refused"
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"

    model = sharded("fsdp")
    with trying("apply"):
        apply_dora(fully_shard(base(), mesh=mesh), RULE)
    with trying("bank"):
        torch_dora.AdapterBank(fully_shard(base(), mesh=mesh), 1, RANK)
    plain = base()
    bank = torch_dora.AdapterBank(plain, 1, RANK).load(0, sharded("fsdp"))
    with trying("with bank"):
        torch_dora.with_bank(fully_shard(plain, mesh=mesh), bank, [0])
    with trying("load into bank"):
        bank.load(0, folder)
    with trying("remove"):
        torch_dora.remove_dora(model)
    with trying("merge"):
        torch_dora.merge_dora(model)
    with trying("load"):
        torch_dora.peft.load_adapter(
            sharded("fsdp", lambda m: apply_dora(m, DoRARule("up|down", RANK + 1, 6))), folder
        )
    cast: Any = apply_dora(base(), RULE)
    fully_shard(cast, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    with trying("cast"):
        cast(batch())
    adapted = apply_dora(base(), RULE)
    flat = FullyShardedDataParallel(adapted, device_id=torch.device("cpu"), use_orig_params=True)
    with trying("flat"):
        torch_dora.norms(flat)
    with torch.device("meta"):
        empty: Any = apply_dora(Model(), RULE)
    with trying("meta"):
        torch_dora.norms(fully_shard(empty, mesh=mesh))
    parallel = sharded("tp")
    with trying("plain x"):
        DoRALinear.forward(parallel.up, batch())
    table = nn.Embedding(8, 4)
    table.weight = nn.Parameter(distribute_tensor(table.weight.detach(), mesh, [Shard(1)]))
    with trying("embedding"):
        apply_dora(table, DoRARule("", 2, 2))
    pending = DTensor.from_local(torch.randn(OUT, HIDDEN), mesh, [Partial()])
    with trying("pending sum"):
        factored_norm(pending, *parallel.down.matrices()[1:], 2.0)
    return found
