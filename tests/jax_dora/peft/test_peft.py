"""PEFT folders in Flax: what PEFT wrote is computed as PEFT computes it, and the reverse."""

import itertools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import peft
import pytest
import torch
from flax import nnx
from safetensors.numpy import load_file, save_file
from torch import nn

import jax_dora
from jax_dora.peft import Names, load_adapter, save_adapter
from jax_dora.peft.named_model import named_model
from tests.jax_dora.meshes import automatic
from tests.jax_dora.peft.peft_folders import assert_same, rewritten, tensors_of
from tests.tables import thinned
from tests.torch_dora.peft_folders import perturbed, reconfigured

VOCABULARY, WIDTH, HIDDEN, CLASSES = 11, 12, 20, 5


class TorchBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(WIDTH, HIDDEN)
        self.norm = nn.LayerNorm(HIDDEN)
        self.o_proj = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x):
        return x + self.o_proj(torch.tanh(self.norm(self.q_proj(x))))


class TorchModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding="same")
        self.image = nn.Conv2d(1, CLASSES, (3, 2))
        self.layers = nn.ModuleList([TorchBlock(), TorchBlock(), TorchBlock()])
        self.score = nn.Linear(WIDTH, CLASSES)

    def forward(self, ids):
        x = self.embed(ids)
        x = x + self.conv(x.mT).mT
        for layer in self.layers:
            x = layer(x)
        return self.score(x) + self.image(x[:, None]).amax((2, 3))[:, None]


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.q_proj = nnx.Linear(WIDTH, HIDDEN, rngs=rngs)
        self.norm = nnx.LayerNorm(HIDDEN, epsilon=1e-5, use_fast_variance=False, rngs=rngs)
        self.o_proj = nnx.Linear(HIDDEN, WIDTH, use_bias=False, rngs=rngs)

    def __call__(self, x):
        return x + self.o_proj(jnp.tanh(self.norm(self.q_proj(x))))


class Model(nnx.Module):
    """As `TorchModel`; its blocks stand in a list, or stacked along the leading axis."""

    def __init__(self, *, stacked: bool = False) -> None:
        rngs = nnx.Rngs(0)
        self.embed = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.conv = nnx.Conv(WIDTH, WIDTH, 3, padding="SAME", rngs=rngs)
        self.image = nnx.Conv(1, CLASSES, (3, 2), padding="VALID", rngs=rngs)
        if stacked:
            self.layers: Any = nnx.split_rngs(splits=3)(nnx.vmap(Block))(rngs)
        else:
            self.layers = nnx.List([Block(rngs) for _ in range(3)])
        self.score = nnx.Linear(WIDTH, CLASSES, rngs=rngs)

    def __call__(self, ids):
        x = self.embed(ids)
        x = x + self.conv(x)
        if isinstance(self.layers, nnx.List):
            for layer in self.layers:
                x = layer(x)
        else:
            graphdef, state = nnx.split(self.layers)
            for i in range(3):
                x = nnx.merge(graphdef, jax.tree.map(lambda a, i=i: a[i], state))(x)
        return self.score(x) + self.image(x[..., None]).max((1, 2))[:, None]


IDS = np.random.default_rng(0).integers(0, VOCABULARY, (3, 7))

CASES: dict[str, dict[str, Any]] = {
    "names": {"target_modules": ["q_proj", "o_proj"]},
    "expression": {"target_modules": r"layers\.\d\.q_proj|score"},
    "all-linear": {"target_modules": "all-linear"},
    "rslora": {"target_modules": ["q_proj"], "use_rslora": True},
    "embedding": {"target_modules": ["embed", "q_proj"]},
    "conv": {"target_modules": ["conv", "image"]},
    "everything": {"target_modules": ["embed", "conv", "image", "q_proj", "o_proj", "score"]},
    "exclude": {"target_modules": ["q_proj", "o_proj"], "exclude_modules": ["1.o_proj"]},
    "modules_to_save": {"target_modules": ["q_proj"], "modules_to_save": ["score", "norm"]},
    "all biases": {"target_modules": ["q_proj"], "bias": "all"},
    "all biases and modules": {
        "target_modules": ["q_proj"],
        "bias": "all",
        "modules_to_save": ["score"],
    },
    "own biases": {"target_modules": ["q_proj", "o_proj"], "bias": "lora_only"},
    "dropout": {"target_modules": ["q_proj"], "lora_dropout": 0.5},
    "patterns": {
        "target_modules": ["q_proj", "conv"],
        "rank_pattern": {"q_proj": 6, r"conv": 2},
        "alpha_pattern": {"q_proj": 1.5},
    },
}
PARTIAL: dict[str, dict[str, Any]] = {
    "layers": {"target_modules": ["q_proj", "o_proj"], "layers_to_transform": [0, 2]},
    "pattern": {
        "target_modules": ["q_proj"],
        "layers_to_transform": 1,
        "layers_pattern": "layers",
    },
}


def peft_folder(folder: Path, seed: int = 1, **fields: Any) -> tuple[Path, np.ndarray]:
    """A folder that PEFT wrote, and what its model returns for IDS."""
    options = {"r": 4, "lora_alpha": 6, "use_dora": True} | fields
    model = peft.PeftModel(base(), peft.LoraConfig(**options))
    perturbed(model, seed).eval().save_pretrained(folder)
    with torch.no_grad():
        return folder, model(torch.from_numpy(IDS)).numpy()


def base() -> TorchModel:
    torch.manual_seed(0)
    return TorchModel()


def flax_model(*, stacked: bool = False, dtype: Any = None) -> Model:
    """`base()` in Flax, loaded by the same rules as an adapter's whole modules."""
    model = Model(stacked=stacked)
    state = {name: value.numpy() for name, value in base().state_dict().items()}
    places = named_model(model, Names())
    assert set(places.parameters) == set(state)
    for name, place in places.parameters.items():
        variable = getattr(places.modules[place.path], place.attribute)
        value = jnp.asarray(place.from_torch(state[name]))
        value = variable[...].at[place.at].set(value) if place.at else value
        variable.set_value(value if dtype is None else value.astype(dtype))
    return model


def values(model: nnx.Module) -> dict[str, np.ndarray]:
    flat = nnx.to_flat_state(nnx.state(model, nnx.Any(nnx.Param, nnx.BatchStat)))
    return {"/".join(map(str, path)): np.asarray(leaf[...]) for path, leaf in flat}


def outputs(model: Model) -> np.ndarray:
    model.eval()
    return np.asarray(model(jnp.asarray(IDS)))


# A stack is read layer by layer as a list is, which "everything" and the partial ones below guard.
@pytest.mark.parametrize(
    ("stacked", "name"),
    thinned(
        itertools.product([False, True], CASES),
        [
            *((False, name) for name in ("names", "embedding", "own biases")),
            (True, "everything"),
        ],
        [
            (False, name)
            for name in ("conv", "all biases and modules", "patterns", "modules_to_save")
        ],
    ),
)
def test_a_folder_of_peft_computes_as_in_peft_and_goes_back(
    stacked: bool, name: str, tmp_path: Path
) -> None:
    fields = CASES[name]
    folder, expected = peft_folder(tmp_path / "theirs", **fields)

    model = load_adapter(flax_model(stacked=stacked), folder)

    np.testing.assert_allclose(outputs(model), expected, atol=1e-5, rtol=0)
    assert np.abs(outputs(flax_model()) - expected).max() > 0.1

    options = {key: fields[key] for key in ("bias", "modules_to_save") if key in fields}
    save_adapter(model, tmp_path / "ours", **options)
    again = load_adapter(flax_model(stacked=stacked), tmp_path / "ours")

    kept = tensors_of(folder)
    if "bias" in fields:
        # PEFT stores the biases of a module it saves whole a second and a third time.
        doubled = ("score.original", "score.modules_to_save")
        kept = {key: kept[key] for key in kept if not any(one in key for one in doubled)}
    assert_same(tensors_of(tmp_path / "ours"), kept)
    assert_same(values(model), values(again))
    loaded = peft.PeftModel.from_pretrained(base(), tmp_path / "ours").eval()
    with torch.no_grad():
        np.testing.assert_array_equal(loaded(torch.from_numpy(IDS)).numpy(), expected)


@pytest.mark.parametrize(("stacked", "use_rslora"), [(False, False), (True, True)])
def test_layers_may_differ_in_rank_and_scale(
    stacked: bool, use_rslora: bool, tmp_path: Path
) -> None:
    folder, expected = peft_folder(
        tmp_path / "theirs",
        target_modules=["q_proj"],
        rank_pattern={r"layers\.1\.q_proj": 7},
        alpha_pattern={r"layers\.2\.q_proj": 3},
        use_rslora=use_rslora,
    )

    loaded = load_adapter(flax_model(stacked=stacked), folder)
    np.testing.assert_allclose(outputs(loaded), expected, atol=1e-5, rtol=0)
    save_adapter(loaded, tmp_path / "ours")
    again = peft.PeftModel.from_pretrained(base(), tmp_path / "ours").eval()
    with torch.no_grad():
        np.testing.assert_allclose(again(torch.from_numpy(IDS)).numpy(), expected, atol=1e-5)


def test_layers_of_a_stack_that_differ_in_rank_alone_keep_their_numbers(tmp_path: Path) -> None:
    folder, _ = peft_folder(
        tmp_path,
        target_modules=["q_proj"],
        rank_pattern={r"layers\.1\.q_proj": 7},
        alpha_pattern={r"layers\.1\.q_proj": 10.5},
    )
    rewritten(folder, change=lambda array: array.astype(np.float16))

    layer = load_adapter(flax_model(stacked=True), folder).layers.q_proj

    assert (layer.rank, layer.scale, layer.lora_a.dtype) == (7, 1.5, jnp.float16)
    stored = tensors_of(folder)
    for number, rank in enumerate([4, 7, 4]):
        key = f"base_model.model.layers.{number}.q_proj.lora_{{}}.weight"
        lora_a, lora_b = layer.lora_a[number], layer.lora_b[number]
        np.testing.assert_array_equal(lora_a[:, :rank], stored[key.format("A")].T)
        np.testing.assert_array_equal(lora_b[:rank], stored[key.format("B")].T)
        assert not lora_a[:, rank:].any()
        assert not lora_b[rank:].any()


@pytest.mark.parametrize(
    ("name", "stacked"),
    thinned(itertools.product(PARTIAL, [False, True]), [("layers", True), ("pattern", False)]),
)
def test_some_layers_of_many(name: str, stacked: bool, tmp_path: Path) -> None:
    """PEFT wants something before a numbered block, so these models have a root of another name."""
    fields = {"r": 4, "lora_alpha": 6, "use_dora": True} | PARTIAL[name]
    theirs = nn.ModuleDict({"model": base()})
    theirs.forward = theirs["model"].forward
    theirs = perturbed(peft.PeftModel(theirs, peft.LoraConfig(**fields))).eval()
    theirs.save_pretrained(tmp_path)
    names = Names(rules=[("^", "model/")])

    ours = load_adapter(flax_model(stacked=stacked), tmp_path, names=names)
    save_adapter(ours, tmp_path / "again", names=names)

    with torch.no_grad():
        expected = theirs(torch.from_numpy(IDS)).numpy()
    np.testing.assert_allclose(outputs(ours), expected, atol=1e-5, rtol=0)
    assert_same(tensors_of(tmp_path / "again"), tensors_of(tmp_path))


@pytest.mark.parametrize("use_dora", [True, False])
@pytest.mark.ci
def test_a_layer_of_a_stack_that_is_saved_whole(use_dora: bool, tmp_path: Path) -> None:
    """It has no adapter in PEFT; here its norm is that of the kernel in the folder."""
    saved = {"modules_to_save": ["layers.1.q_proj"]}
    fields = {"target_modules": ["q_proj", "o_proj"], "use_dora": use_dora} | saved
    folder, expected = peft_folder(tmp_path / "theirs", **fields)
    model = load_adapter(flax_model(stacked=True), folder)
    np.testing.assert_allclose(outputs(model), expected, atol=1e-5, rtol=0)
    save_adapter(model, tmp_path / "ours", **saved)
    again = peft.PeftModel.from_pretrained(base(), tmp_path / "ours").eval()
    with torch.no_grad():
        found = again(torch.from_numpy(IDS)).numpy()
    np.testing.assert_allclose(found, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("stacked", thinned([False, True], [True]))
@pytest.mark.ci
def test_peft_computes_what_a_model_adapted_here_does(stacked: bool, tmp_path: Path) -> None:
    path = r"layers/q_proj" if stacked else r"layers/\d/q_proj"
    rules = [
        jax_dora.DoRARule(path, rank=3, alpha=5, use_rslora=True),
        jax_dora.DoRARule("embed|conv|image|score", rank=2, alpha=1.5, use_rslora=True),
    ]
    model = jax_dora.apply_dora(flax_model(stacked=stacked), rules, rngs=nnx.Rngs(0))
    rng = np.random.default_rng(7)
    for _, leaf in nnx.to_flat_state(nnx.state(model, nnx.LoRAParam)):
        noise = 0.2 * rng.standard_normal(leaf.shape, np.float32)
        leaf.set_value(jnp.asarray(np.asarray(leaf[...]) + noise))

    save_adapter(model, tmp_path / "adapter", base_model_name_or_path="base", task_type="SEQ_CLS")

    config = peft.PeftConfig.from_pretrained(tmp_path / "adapter")
    assert (config.base_model_name_or_path, config.task_type) == ("base", "SEQ_CLS")
    loaded = peft.PeftModel(base(), config)
    loaded.load_adapter(tmp_path / "adapter", "default")
    with torch.no_grad():
        expected = loaded.eval()(torch.from_numpy(IDS)).numpy()
    np.testing.assert_allclose(outputs(model), expected, atol=1e-5, rtol=0)


def test_a_list_with_the_name_of_an_adapted_layer_is_no_target(tmp_path: Path) -> None:
    class Mixed(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.proj = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
            self.mlp = nnx.Dict(proj=nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs)]))

    mlp = nn.ModuleDict({"proj": nn.ModuleList([nn.Linear(WIDTH, WIDTH)])})
    torch_model = nn.ModuleDict({"proj": nn.Linear(WIDTH, WIDTH), "mlp": mlp})
    rule = jax_dora.DoRARule("proj", rank=2, alpha=4)
    model = jax_dora.apply_dora(Mixed(nnx.Rngs(0)), rule, rngs=nnx.Rngs(1))

    save_adapter(model, tmp_path)
    adapted = peft.PeftModel.from_pretrained(torch_model, str(tmp_path))

    assert adapted.targeted_module_names == ["proj"]


def test_a_lora_folder_becomes_the_dora_that_computes_the_same(tmp_path: Path) -> None:
    folder, expected = peft_folder(tmp_path / "lora", use_dora=False, **CASES["everything"])

    model = load_adapter(flax_model(), folder)
    save_adapter(model, tmp_path / "again", use_dora=False)

    np.testing.assert_allclose(outputs(model), expected, atol=1e-5, rtol=0)
    assert_same(tensors_of(tmp_path / "again"), tensors_of(folder))
    model.score.magnitude[...] = model.score.magnitude[...] * 1.5
    with pytest.raises(ValueError, match="use_dora is False and the magnitude of score"):
        save_adapter(model, tmp_path / "third", use_dora=False)


@pytest.mark.slow
def test_a_folder_takes_the_place_of_another_adapter(tmp_path: Path) -> None:
    one, _ = peft_folder(tmp_path / "one", **CASES["everything"])
    two, expected = peft_folder(tmp_path / "two", seed=2, r=5, target_modules=["q_proj", "conv"])
    first = load_adapter(flax_model(), one)
    before = values(first)
    first = jax_dora.with_norms(first, jax_dora.norms(first))

    second = load_adapter(first, two)

    np.testing.assert_allclose(outputs(second), expected, atol=1e-5, rtol=0)
    assert_same(values(first), before)
    assert_same(values(second), values(load_adapter(flax_model(), two)))
    save_adapter(jax_dora.freeze(first), tmp_path / "frozen")
    assert_same(tensors_of(tmp_path / "frozen"), tensors_of(one))


def test_numbers_of_numpy_are_written(tmp_path: Path) -> None:
    numbers: Any = {"rank": np.int64(2), "alpha": np.float32(4), "dropout": np.float32(0.5)}
    layer = jax_dora.DoRALinear(4, 5, **numbers, rngs=nnx.Rngs(0))
    save_adapter(nnx.Dict(q=layer), tmp_path / "adapter")
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["lora_dropout"]) == (2, 4.0, 0.5)


@pytest.mark.parametrize(
    ("magnitude", "shape"),
    [
        ("lora_magnitude_vector.weight", (-1,)),
        ("lora_magnitude_vector.default", (-1,)),
        ("lora_magnitude_vector.default.weight", (-1,)),
        ("lora_magnitude_vector.mine.weight", (-1,)),
        ("weight_m_wdecomp.weight", (-1, 1)),
        ("dora_scale", (-1, 1)),
    ],
)
def test_other_spellings_are_read(magnitude: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    folder, expected = peft_folder(tmp_path, target_modules=["q_proj"])
    rewritten(
        folder,
        lambda key: (
            key.removeprefix("base_model.model." if "mine" in magnitude else "")
            .replace("lora_magnitude_vector", magnitude)
            .replace("lora_A", "lora_A.default")
        ),
        lambda array: array.reshape(shape) if array.ndim == 1 else array,
    )

    named = "mine" if "mine" in magnitude else None
    model = load_adapter(flax_model(), folder, adapter=named)

    np.testing.assert_allclose(outputs(model), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_dtypes_are_kept(dtype: str, tmp_path: Path) -> None:
    folder, _ = peft_folder(tmp_path / "theirs", target_modules=["q_proj"])
    rewritten(folder, change=lambda array: array.astype(jnp.dtype(dtype)))

    model = load_adapter(flax_model(dtype=jnp.bfloat16), folder)
    save_adapter(model, tmp_path / "ours", dtype=dtype)

    layer = model.layers[0].q_proj
    assert layer.lora_a.dtype == layer.lora_b.dtype == jnp.dtype(dtype)
    assert layer.magnitude.dtype == jnp.float32
    assert layer.kernel.dtype == jnp.bfloat16
    assert_same(tensors_of(tmp_path / "ours"), tensors_of(folder))


def small(seed: int = 0) -> nnx.Dict:
    return nnx.Dict(q=jax_dora.DoRALinear(4, 5, rank=2, alpha=4, rngs=nnx.Rngs(seed)))


@pytest.mark.parametrize("dtype", ["int8", "int32", "float8_e4m3fn"])
def test_a_dtype_that_would_destroy_the_adapter_is_refused(dtype: str, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=f"dtype is {dtype}; expected float16, bfloat16"):
        save_adapter(small(), tmp_path / "a", dtype=dtype)


@pytest.mark.parametrize(("value", "dtype"), [(np.nan, None), (np.inf, None), (7e4, "float16")])
def test_what_is_not_finite_is_not_written(value: float, dtype: Any, tmp_path: Path) -> None:
    model = small()
    model.q.lora_a[...] = model.q.lora_a[...].at[0, 1].set(value)
    with pytest.raises(ValueError, match=r"model\.q\.lora_A.weight holds NaN or infinity, in 1 of"):
        save_adapter(model, tmp_path / "a", dtype=dtype)
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_magnitude_keeps_its_values(dtype: str, tmp_path: Path) -> None:
    model = small()
    model.q.magnitude[...] = model.q.magnitude[...] * 1.1
    save_adapter(model, tmp_path / "a", dtype=dtype)

    magnitude = load_adapter(small(1), tmp_path / "a").q.magnitude[...]

    assert magnitude.dtype == jnp.float32
    np.testing.assert_array_equal(magnitude, model.q.magnitude[...].astype(dtype))
    rewritten(tmp_path / "a", change=lambda a: np.float64(a) + 1e-12 if a.ndim == 1 else a)
    with pytest.raises(ValueError, match="is F64, and rounded in a magnitude of float32"):
        load_adapter(small(1), tmp_path / "a")
    load_adapter(small(1), tmp_path / "a", adapter_dtype=jnp.float32)


def test_rounding_wants_to_be_asked_for(tmp_path: Path) -> None:
    folder, _ = peft_folder(tmp_path, target_modules=["q_proj"])
    low = load_adapter(flax_model(), folder, adapter_dtype=jnp.bfloat16)
    assert low.layers[0].q_proj.lora_a.dtype == jnp.bfloat16

    rewritten(folder, change=lambda array: array.astype(np.float64))
    with pytest.raises(ValueError, match="adapter_dtype='float32'"):
        load_adapter(flax_model(), folder)
    with pytest.raises(TypeError, match="adapter_dtype"):
        load_adapter(flax_model(), folder, adapter_dtype=jnp.int32)


def test_arrays_stay_where_the_layer_lies(tmp_path: Path) -> None:
    folder, _ = peft_folder(tmp_path, target_modules=["q_proj"])
    mesh = automatic(x=2, y=4)
    model = flax_model()
    place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x", "y"))
    kernel = model.layers[0].q_proj.kernel
    kernel.set_value(jax.device_put(kernel[...], place))

    layer = load_adapter(model, folder).layers[0].q_proj

    assert layer.lora_a[...].sharding.spec[0] == "x"
    assert layer.lora_b[...].sharding.spec[1] == "y"
    assert layer.magnitude[...].sharding.spec[0] == "y"
    assert layer.kernel[...] is kernel[...]


def test_arrays_are_sharded_as_the_layer_s_metadata_says(tmp_path: Path) -> None:
    mesh = automatic(x=2, y=4)

    class Sharded(nnx.Module):
        def __init__(self) -> None:
            init = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("x", "y"))
            self.q = nnx.Linear(8, 4, kernel_init=init, rngs=nnx.Rngs(0))

    with jax.set_mesh(mesh):
        base = Sharded()
    model = jax_dora.apply_dora(base, jax_dora.DoRARule("q", 2, 3), rngs=nnx.Rngs(1))
    save_adapter(model, tmp_path / "a")

    layer = load_adapter(base, tmp_path / "a").q

    assert layer.lora_a.get_metadata("out_sharding") == ("x", None)
    assert layer.lora_a[...].sharding.spec[0] == "x"
    assert layer.lora_b[...].sharding.spec[1] == "y"
    np.testing.assert_array_equal(layer.lora_a[...], model.q.lora_a[...])


def test_dropout_is_as_in_peft_unless_told_and_off_until_it_is_trained(tmp_path: Path) -> None:
    folder, _ = peft_folder(tmp_path, **CASES["dropout"])

    layer = load_adapter(flax_model(), folder).layers[0].q_proj
    assert (layer.dropout.rate, layer.dropout_mode) == (0.5, "input")
    x = jnp.ones((3, layer.in_features))
    assert jnp.array_equal(layer(x), layer(x))
    layer.train()
    assert not jnp.array_equal(layer(x), layer(x))
    layer = load_adapter(flax_model(), folder, dropout_mode="adapter").layers[0].q_proj
    assert layer.dropout_mode == "adapter"


def renamed(old: str, new: str) -> Any:
    return lambda folder: rewritten(folder, lambda key: key.replace(old, new, 1))


def cut(name: str, size: int) -> Any:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:size])


def without(part: str) -> Any:
    def change(folder: Path) -> None:
        file = folder / "adapter_model.safetensors"
        save_file({key: a for key, a in load_file(file).items() if part not in key}, file)

    return change


@pytest.mark.parametrize(
    ("damage", "error", "message"),
    [
        (
            renamed("layers.0", "layers.9"),
            ValueError,
            "layers.9.q_proj.lora_A.weight finds no layer",
        ),
        (renamed("q_proj", "norm"), ValueError, "layers.0.norm.lora_A.weight finds no layer"),
        (renamed("q_proj", "o_proj"), ValueError, "does not select"),
        (renamed("lora_A", "lora_C"), ValueError, "lora_C.weight finds no parameter"),
        (renamed("lora_A.weight", "lora_embedding_A"), ValueError, "not for linear layers"),
        (
            renamed("layers.0.q_proj.lora_magnitude_vector", "layers.0.norm.weight"),
            ValueError,
            "modules_to_save",
        ),
        (without("layers.1.q_proj"), ValueError, "layers.1.q_proj has no tensors"),
        (without("layers.1.q_proj.lora_B"), ValueError, "layers.1.q_proj.lora_B.weight is missing"),
        (without("magnitude"), ValueError, "lora_magnitude_vector are missing; use_dora is true"),
        (lambda f: reconfigured(f, use_dora=False), ValueError, "since use_dora is false"),
        (lambda f: reconfigured(f, r=5), ValueError, "of rank 4; expected rank 5, by r"),
        (lambda f: reconfigured(f, target_modules=["x"]), ValueError, "'x', which names no layer;"),
        (lambda f: reconfigured(f, bias="all"), ValueError, "norm.bias is missing"),
        (lambda f: reconfigured(f, modules_to_save=["score"]), ValueError, "score.bias is missing"),
        (lambda f: reconfigured(f, layer_replication=[[0, 1]]), NotImplementedError, "layer_repl"),
        (lambda f: rewritten(f, change=lambda a: a.astype("i4")), ValueError, "is I32"),
        (lambda f: rewritten(f, change=lambda a: a[..., None]), ValueError, "has shape"),
        (lambda f: rewritten(f, change=lambda a: a.T), ValueError, r"has shape \[12, 4\]"),
        (cut("adapter_model.safetensors", 2000), ValueError, "not a whole safetensors file"),
        (cut("adapter_model.safetensors", 5), ValueError, "not a whole"),
        (cut("adapter_config.json", 50), ValueError, "not JSON"),
        (
            lambda f: (f / "adapter_config.json").write_bytes(b"\xff\xfe"),
            ValueError,
            "not UTF-8",
        ),
        (lambda f: (f / "adapter_config.json").unlink(), FileNotFoundError, "adapter_config.json"),
        (
            lambda f: (f / "adapter_model.safetensors").rename(f / "adapter_model.bin"),
            FileNotFoundError,
            "never read",
        ),
    ],
)
def test_a_folder_that_does_not_fit_changes_nothing(
    damage: Any, error: type[Exception], message: str, tmp_path: Path
) -> None:
    folder, _ = peft_folder(tmp_path, target_modules=["q_proj"])
    model = flax_model()
    before, structure = values(model), nnx.graphdef(model)
    damage(folder)

    with pytest.raises(error, match=message) as refusal:
        load_adapter(model, folder)

    assert str(folder) in str(refusal.value)
    assert_same(values(model), before)
    assert nnx.graphdef(model) == structure


@pytest.mark.ci
def test_projections_over_several_axes_are_linear_layers(tmp_path: Path) -> None:
    class Heads(nnx.Module):
        def __init__(self) -> None:
            rngs = nnx.Rngs(0)
            self.query = nnx.LinearGeneral(12, (4, 5), rngs=rngs)
            self.key = nnx.Einsum("...d,hdk->...hk", (4, 12, 5), (4, 5), rngs=rngs)
            self.out = nnx.LinearGeneral((4, 5), 12, axis=(-2, -1), rngs=rngs)

        def __call__(self, x):
            return self.out(jnp.tanh(self.query(x)) * self.key(x))

    model = Heads()
    places = named_model(model, Names(rules=[("query", "q_proj")]))
    theirs = nn.ModuleDict(
        {"q_proj": nn.Linear(12, 20), "key": nn.Linear(12, 20), "out": nn.Linear(20, 12)}
    )
    weights = {
        name: np.array(place.to_torch(np.asarray(places.variable(place)[...])))
        for name, place in places.parameters.items()
    }
    theirs.load_state_dict({name: torch.from_numpy(weight) for name, weight in weights.items()})
    theirs.forward = lambda x: theirs["out"](torch.tanh(theirs["q_proj"](x)) * theirs["key"](x))
    x = np.random.default_rng(0).standard_normal((3, 12), np.float32)
    config = peft.LoraConfig(r=3, use_dora=True, target_modules=["q_proj", "key", "out"])
    wrapped = perturbed(peft.PeftModel(theirs, config)).eval()
    wrapped.save_pretrained(tmp_path)

    loaded = load_adapter(model, tmp_path, names=Names(rules=[("query", "q_proj")]))
    save_adapter(loaded, tmp_path / "again", names=Names(rules=[("query", "q_proj")]))

    with torch.no_grad():
        expected = wrapped(torch.from_numpy(x)).numpy()
    np.testing.assert_allclose(np.asarray(loaded(jnp.asarray(x))), expected, atol=1e-5, rtol=0)
    assert_same(tensors_of(tmp_path / "again"), tensors_of(tmp_path))


@pytest.mark.parametrize("count", [1, 3])
def test_adapters_are_merged_as_by_peft(count: int, tmp_path: Path) -> None:
    base_weight = nn.Linear(5, 4)
    theirs: Any = nn.ModuleDict({"q": base_weight})
    flax = nnx.Dict(q=nnx.Linear(5, 4, rngs=nnx.Rngs(0)))
    flax.q.kernel.set_value(jnp.asarray(base_weight.weight.detach().numpy().T))
    names = [str(number) for number in range(count)]
    config = peft.LoraConfig(r=2, lora_alpha=3, use_dora=True, target_modules=["q"])
    theirs = peft.PeftModel(theirs, config, "0")
    for name in names[1:]:
        theirs.add_adapter(name, config)
    generator = torch.Generator().manual_seed(1)
    for parameter in [p for name, p in theirs.named_parameters() if "lora" in name]:
        parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator)
    theirs.save_pretrained(tmp_path)
    folders = [tmp_path / name for name in names]
    adapters = [jax_dora.get_adapter(load_adapter(flax, folder)) for folder in folders]

    merged = jax_dora.merge_dora(flax, adapters=adapters).q.kernel[...]

    expected = theirs.merge_and_unload(adapter_names=names)["q"].weight.detach().numpy()
    np.testing.assert_allclose(merged.T, expected, atol=1e-6)
