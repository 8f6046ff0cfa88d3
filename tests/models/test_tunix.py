"""Tunix's models, whole: all that products read is adapted, trains and merges."""

import importlib
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import jax_dora
from benchmarks import __main__ as command
from benchmarks import results
from jax_dora import DoRARule, apply_dora, coverage, get_adapter
from jax_dora.linen import split_adapters
from tests.jax_dora.programs import equations
from tests.models import gemma_models
from tests.models.model_coverage import rows
from tests.models.tunix_models import EXAMPLE, MODELS, TOKENS, made, qwen3
from tests.tables import slow, thinned
from tests.whole_models import check_nnx, difference

pytestmark = [
    pytest.mark.models,
    pytest.mark.filterwarnings("ignore"),  # what Tunix warns of is Tunix's
]


def _loss(model) -> jax.Array:
    logits = model(*EXAMPLE)[0][:, :-1].astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, TOKENS[:, 1:]).mean()


@nnx.jit
def _logits(model) -> jax.Array:
    return model(*EXAMPLE)[0]


@pytest.mark.parametrize(
    "name",
    thinned(MODELS, ["Qwen3", "Qwen3 MoE", "Qwen2", "Gemma3", "Gemma4", "Gemma4 MoE"]),
)
def test_a_whole_model_trains_and_merges(name):
    base = made(name)
    table = coverage(base, *EXAMPLE)
    assert table.count("adaptable") == len(table.weights)
    assert not any(one.merged_bytes for one in table.weights)
    rules = [DoRARule("all-linear", 4, 8), DoRARule(r"embedder(/per_layer_input_embedding)?", 4, 8)]
    model = apply_dora(base, rules, rngs=nnx.Rngs(1), example=EXAMPLE)
    expected = {one.path for one in table.weights if one.path != "lm_head"}
    assert get_adapter(model).arrays.keys() == expected
    dtype = nnx.eval_shape(_logits, base).dtype
    # bf16 activations round each of a few sums once more.
    close = 0.03 if dtype == jnp.bfloat16 or name == "Gemma3" else 2e-5
    check_nnx(model, base, lambda model: model(*EXAMPLE)[0], TOKENS, close)


def test_registrations_alone_reach_all_of_qwen3():
    table = coverage(qwen3())
    assert table.count("adaptable") == len(table.weights)
    model = apply_dora(qwen3(), DoRARule("all-linear", 4, 8), rngs=nnx.Rngs(1))
    assert len(get_adapter(model).arrays) == 7


def test_a_cache_is_filled_as_by_the_base():
    base = qwen3()
    model = apply_dora(base, DoRARule("all-linear", 4, 8), rngs=nnx.Rngs(1))
    tokens, positions, _, mask = EXAMPLE
    results = []
    for one in (base, model):
        cache = one.init_cache(2, 5, jnp.float32)
        results.append(one(tokens, positions, cache, mask))
    for one, other in zip(*map(jax.tree.leaves, results), strict=True):
        assert difference(one, other) <= 2e-5 if jnp.abs(other).max() else True


def _trainer(model, steps, folder):
    peft_trainer = importlib.import_module("tunix.sft.peft_trainer")
    config = peft_trainer.TrainingConfig(
        eval_every_n_steps=100, max_steps=steps, checkpoint_root_directory=str(folder)
    )
    trainer = peft_trainer.PeftTrainer(model, optax.adam(1e-2), config)
    trainer.with_gen_model_input_fn(
        lambda batch: {
            "input_tokens": batch.input_tokens,
            "input_mask": batch.input_mask,
            "positions": EXAMPLE[1],
            "attention_mask": EXAMPLE[3],
        }
    )
    mask = jnp.ones_like(TOKENS, dtype=bool)
    return trainer, peft_trainer.TrainingInput(input_tokens=TOKENS, input_mask=mask)


def test_peft_trainer_trains_checkpoints_and_resumes(tmp_path):
    def trainer(steps):
        model = apply_dora(made("Qwen3"), DoRARule("all-linear", 4, 8), rngs=nnx.Rngs(1))
        return _trainer(model, steps, tmp_path)

    first, batch = trainer(6)
    start = float(_loss(first.model))
    first.train([batch] * 6)
    first.close()
    assert float(_loss(first.model)) < start
    second, batch = trainer(8)
    for one, other in zip(
        *(jax.tree.leaves(get_adapter(one.model).arrays) for one in (first, second)), strict=True
    ):
        assert jnp.array_equal(one, other)
    second.train([batch] * 8)
    assert float(_loss(second.model)) < float(_loss(first.model))
    assert jax_dora.coverage(second.model).count("adapted") == 7


@pytest.mark.parametrize("remat", [slow("NONE"), "BLOCK", slow("DECODER")])
def test_peft_trainers_step_computes_each_norm_once(remat, tmp_path):
    """Tunix rematerialises its blocks without a policy."""
    config = importlib.import_module("tunix.models.qwen3.model").RematConfig
    base = qwen3(remat_config=config[remat])
    model = apply_dora(base, DoRARule("all-linear", 4, 8), rngs=nnx.Rngs(1))
    trainer, batch = _trainer(model, 1, tmp_path)
    step, _ = trainer.jit_train_and_eval_step(skip_jit=True)
    graphdef, state = nnx.split((trainer.model, trainer.optimizer))

    def run(state):
        parts = nnx.merge(graphdef, state)
        loss = step(*parts, batch)
        return loss, nnx.state(parts)

    operators = [str(one.params.get("op")) for one in equations(run, state)]
    assert operators.count("norm") == 7
    trainer.close()


def test_peft_trainer_trains_beside_qwixs_lora(tmp_path):
    """All of Qwen3's projections, the same batches, rank and scale."""
    qwix = importlib.import_module("qwix")
    layers = r".*(attn/[qkvo]_proj|mlp/(gate|up|down)_proj)"
    provider = qwix.LoraProvider(module_path=layers, rank=4, alpha=8)
    models = {
        "LoRA": qwix.apply_lora_to_model(
            made("Qwen3"), provider, *EXAMPLE, rngs=nnx.Rngs(params=1)
        ),
        "DoRA": apply_dora(made("Qwen3"), DoRARule(layers, 4, 8), rngs=nnx.Rngs(1)),
    }
    losses = {}
    for name, model in models.items():
        trainer, batch = _trainer(model, 20, tmp_path / name)
        before = float(_loss(trainer.model))
        trainer.train([batch] * 20)
        trainer.close()
        losses[name] = (before, float(_loss(trainer.model)))
        print(f"{name}: {before:.4f} → {losses[name][1]:.4f}")
    arrays = {
        name: len(jax.tree.leaves(nnx.state(model, nnx.LoRAParam)))
        for name, model in models.items()
    }
    assert arrays == {"LoRA": 2 * 7, "DoRA": 3 * 7}
    assert losses["LoRA"][0] == pytest.approx(losses["DoRA"][0], rel=1e-4)
    assert all(after < before for before, after in losses.values())


def test_the_recipes_for_qwixs_provider_run(monkeypatch):
    qwix = importlib.import_module("qwix")
    monkeypatch.setattr(qwix, "LoraProvider", qwix.LoraProvider)
    page = (Path(__file__).parents[2] / "docs" / "your_model.md").read_text()
    [text] = re.findall(r"^## qwix's provider\n(.*?)^## ", page, re.MULTILINE | re.DOTALL)
    names = {"nnx": nnx}
    for recipe in re.findall(r"^```py\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        exec(compile(recipe, "your_model.md", "exec"), names)
    assert qwix.LoraProvider is jax_dora.provider.DoRAProvider


@pytest.mark.parametrize("name", ["Qwen3", slow("Llama3"), slow("Gemma3"), "Gemma4"])
def test_qwixs_call_with_our_provider_adapts_what_lora_adapts(name, tmp_path):
    qwix = importlib.import_module("qwix")
    base, options = made(name), {"module_path": ".*(attn|mlp)/.*", "rank": 4, "alpha": 8}
    adapted = {
        provider: qwix.apply_lora_to_model(
            base, provider(**options), *EXAMPLE, rngs=nnx.Rngs(params=1)
        )
        for provider in (qwix.LoraProvider, jax_dora.provider.DoRAProvider)
    }
    lora, model = adapted.values()
    owners = [
        {path[:-1] for path, _ in nnx.to_flat_state(nnx.state(one, nnx.LoRAParam))}
        for one in (lora, model)
    ]
    assert owners[0] == owners[1]
    if name == "Qwen3":
        trainer, batch = _trainer(model, 20, tmp_path)
        before = float(_loss(trainer.model))
        trainer.train([batch] * 20)
        trainer.close()
        assert float(_loss(trainer.model)) < before
        jax_dora.peft.save_adapter(trainer.model, tmp_path / "adapter")
        loaded = jax_dora.peft.load_adapter(base, tmp_path / "adapter")
        assert jnp.array_equal(_logits(loaded), _logits(trainer.model))
    else:
        check_nnx(model, base, lambda model: model(*EXAMPLE)[0], TOKENS, 0.03)


def test_tunixs_command_gives_qdora_by_our_provider(monkeypatch):
    qwix = importlib.import_module("qwix")
    monkeypatch.setattr(qwix, "LoraProvider", jax_dora.provider.DoRAProvider)
    command = importlib.import_module("tunix.cli.utils.model")
    layers = r".*(attn/[qkvo]_proj|mlp/(gate|up|down)_proj)"
    config = {"module_path": layers, "rank": 4, "alpha": 8.0, "weight_qtype": "nf4", "tile_size": 2}
    model = command.apply_lora_to_model(made("Qwen3"), None, config)
    kernels = [model.layers[0].attn.q_proj.w, model.layers[0].mlp.up_proj.kernel]
    assert all(one.get_value().qtype == "nf4" for one in kernels)
    plain = jax_dora.remove_dora(model).layers[0].attn.q_proj.w
    assert jnp.array_equal(plain[...], qwix.dequantize(kernels[0].get_value()))
    # Merged kernels are rounded to bf16.
    assert difference(_logits(model), _logits(jax_dora.merge_dora(model))) <= 0.03
    grads = nnx.jit(nnx.grad(_loss, argnums=nnx.DiffState(0, nnx.LoRAParam)))(model)
    magnitudes = [one for path, one in nnx.to_flat_state(grads) if "magnitude" in path[-1]]
    assert len(magnitudes) == 7
    assert all(bool(jnp.any(one[...] != 0)) for one in magnitudes)


def test_the_page_has_the_table():
    page = (Path(__file__).parents[2] / "docs" / "your_model.md").read_text()
    found = re.search(r"<!-- coverage.*?\| --- \|\n(.*?)\n<!-- end -->", page, re.DOTALL)
    assert found is not None
    assert found[1].splitlines() == list(rows())


# What the names of a section's recipes hold in the end.
ADAPTERS = {
    "Tunix": (lambda names: get_adapter(names["model"]).arrays, 2 * 7),
    "gemma": (lambda names: jax.tree.leaves(names["adapters"]), 2 * 5 * 3),
    "MaxText": (lambda names: jax.tree.leaves(split_adapters(names["params"])[0]), 3),
}


@pytest.mark.parametrize("section", ADAPTERS)
def test_the_recipes_of_the_page_run(section):
    page = (Path(__file__).parents[2] / "docs" / "your_model.md").read_text()
    [text] = re.findall(rf"^## {section}\n(.*?)^## ", page, re.MULTILINE | re.DOTALL)
    gemma_models.gemma3()  # which imports gemma without what its models do not use
    names = {"jax": jax, "jnp": jnp, "jax_dora": jax_dora, "nnx": nnx, "DoRARule": DoRARule}
    for recipe in re.findall(r"^```py\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        exec(compile(recipe, "your_model.md", "exec"), names)
    adapters, count = ADAPTERS[section]
    assert len(adapters(names)) == count


def test_the_recipe_for_a_mesh_runs():
    """Adapters lie as the weights that Tunix has annotated."""
    page = (Path(__file__).parents[2] / "docs" / "several-gpus.md").read_text()
    [recipe] = re.findall(r"^```py\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    names = {"jax": jax, "jax_dora": jax_dora, "nnx": nnx, "model": qwen3(vocab_size=32)}
    names |= {"AxisType": jax.sharding.AxisType, "NamedSharding": jax.sharding.NamedSharding}
    exec(compile(recipe, "several-gpus.md", "exec"), names)
    layer = names["model"].layers[0].mlp.up_proj
    kernel, lora_a, lora_b = (
        getattr(layer, name)[...].sharding.spec for name in ("kernel", "lora_a", "lora_b")
    )
    assert tuple(kernel) == ("fsdp", "tp")
    assert (lora_a[0], lora_b[1]) == tuple(kernel)


@pytest.mark.slow
def test_a_step_of_the_trainer_is_measured(tmp_path):
    words = ["step", "--tunix", "--quick", "--device", "cpu", "--out", str(tmp_path)]
    assert command.main([*words, "--commit", "abc"]) == 0
    header, rows = results.read(tmp_path / "step_tunix.jsonl")
    assert {"google-tunix", "qwix"} <= header.keys()
    assert [row["kind"] for row in rows] == ["LoRA", "DoRA"]
    assert all(row["ms"] > 0 for row in rows)
    assert rows[1]["over_lora"] == pytest.approx(rows[1]["ms"] / rows[0]["ms"])
