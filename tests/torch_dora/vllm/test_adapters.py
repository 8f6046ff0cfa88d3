"""Adapters that are loaded, replaced and removed while an engine runs, and those that are refused.

All tests share an engine with two slots. It gets no rows without an adapter: when all slots are
full, vLLM's CPU build gives them the last slot's LoRA."""

import copy
import json
import math
import shutil
from types import SimpleNamespace

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.torch_dora.vllm.engines import (
    ADAPTERS,
    DORA,
    PROMPTS,
    Zoo,
    check,
    engine,
    generate,
    greedy,
    manager_of,
    request,
    worker_of,
)
from tests.torch_dora.vllm.test_slices import linear, wrapped

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

PROMPT = PROMPTS[0]


@pytest.fixture(scope="module")
def zoo(tmp_path_factory):
    return Zoo("Llama", tmp_path_factory.mktemp("zoo"))


@pytest.fixture(scope="module")
def made(zoo):
    options = {"max_loras": 2, "max_cpu_loras": 4, "enable_prefix_caching": True}
    # The CPU build's own blocks are longer than the model's longest answer, and never cached.
    with engine(zoo.folder, block_size=32, **options) as one:
        yield one


numbers = iter(range(1, 1000))


def asked(zoo, name, prompts=(PROMPT,)):
    return [zoo.expected(name, tuple(prompt)) for prompt in prompts]


def test_adapters_come_and_go_in_two_slots(zoo, made):
    """Five adapters in turns; two of them in slots, and four in memory."""
    names = [*DORA, "lora"]
    requests = {name: request(name, zoo.path(name), next(numbers)) for name in names}
    for i in range(9):
        pair = [names[i % 5], names[(i + 1) % 5]]
        found = generate(made, [PROMPT] * 2, [requests[name] for name in pair])
        check(found, [zoo.expected(name, tuple(PROMPT)) for name in pair])


def test_an_adapter_is_replaced_in_place_removed_and_pinned(zoo, made):
    number, llm = next(numbers), made.llm_engine
    zoo.add("first", ADAPTERS["dora"], 50)
    zoo.add("second", ADAPTERS["some"], 51)
    assert llm.add_lora(request("changing", zoo.root / "first", number))
    before = request("changing", zoo.root / "first", number)
    check(generate(made, [PROMPT], [before]), asked(zoo, "first"))
    changed = request("changing", zoo.root / "second", number, load_inplace=True)
    assert llm.add_lora(changed)
    after = request("changing", zoo.root / "second", number)
    check(generate(made, [PROMPT], [after]), asked(zoo, "second"))
    back = request("changing", zoo.root / "first", number, load_inplace=True)
    check(generate(made, [PROMPT], [back]), asked(zoo, "first"))
    assert llm.add_lora(changed)
    assert llm.pin_lora(number)
    for name in DORA:
        other = request(name, zoo.path(name), next(numbers))
        check(generate(made, [PROMPT], [other]), asked(zoo, name))
    check(generate(made, [PROMPT], [after]), asked(zoo, "second"))
    assert llm.remove_lora(number)
    assert number not in llm.list_loras()


def test_a_request_loads_in_place_once_and_not_in_each_of_its_steps(zoo, made, monkeypatch):
    """The server's requests do so after an adapter was replaced by its API."""
    from vllm.lora import worker_manager  # pyright: ignore[reportMissingImports]

    loaded = []

    def load(self, one, original=worker_manager.WorkerLoRAManager._load_adapter):
        loaded.append(one.lora_path)
        return original(self, one)

    monkeypatch.setattr(worker_manager.WorkerLoRAManager, "_load_adapter", load)
    number, names = next(numbers), ("dora", "some", "dora")
    other = request("rslora", zoo.path("rslora"), next(numbers))
    for count, name in enumerate(names, 1):
        one = request("changing", zoo.path(name), number, load_inplace=True)
        found = generate(made, [PROMPT] * 2, [one, other])
        check(found, [*asked(zoo, name), *asked(zoo, "rslora")])
        assert len(loaded) == count + 1  # and the other, once


def test_an_adapter_that_could_not_be_copied_is_in_no_slot(zoo, made, monkeypatch):
    from torch_dora.vllm.adapters import Adapters

    one, manager = request("dora", zoo.path("dora"), next(numbers)), manager_of(made)
    with monkeypatch.context() as patch:
        patch.setattr(Adapters, "place", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            made.llm_engine.add_lora(one)
    assert one.lora_int_id not in manager.lora_index_to_id
    assert one.lora_int_id not in manager._active_adapters
    check(generate(made, [PROMPT], [one]), asked(zoo, "dora"))


def test_norms_that_could_not_be_renewed_are_still_outdated(zoo, made, monkeypatch):
    """Else the next step would go on with the old ones."""
    adapters = manager_of(made).dora
    made.llm_engine.add_lora(request("dora", zoo.path("dora"), next(numbers)))
    adapters.is_outdated = True
    with monkeypatch.context() as patch:
        patch.setattr(adapters, "_scales", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            made.llm_engine.add_lora(request("some", zoo.path("some"), next(numbers)))
    assert adapters.is_outdated
    check(generate(made, [PROMPT], [request("some", zoo.path("some"), 990)]), asked(zoo, "some"))
    assert not adapters.is_outdated


def test_slots_change_between_the_steps_of_a_batch(zoo, made, monkeypatch):
    """The batch has the same adapters in all of its steps."""
    llm, manager, names = made.llm_engine, manager_of(made), ("dora", "some")
    used = [request(name, zoo.path(name), next(numbers)) for name in names]
    others = [request(name, zoo.path(name), next(numbers)) for name in ("lora", "rslora")]
    changes = {
        3: lambda: llm.remove_lora(used[0].lora_int_id),
        5: lambda: [llm.add_lora(one) for one in others],
        7: lambda: [llm.remove_lora(one.lora_int_id) for one in used],
        8: lambda: llm.add_lora(others[0]),
    }
    slots = []

    def step(original=llm.step):
        changes.get(len(slots), lambda: None)()
        found = original()
        slots.append([manager.lora_index_to_id.index(one.lora_int_id) for one in used])
        return found

    monkeypatch.setattr(llm, "step", step)
    found = generate(made, [PROMPT] * 2, used)
    check(found, [zoo.expected(name, tuple(PROMPT)) for name in names])
    assert {*map(tuple, slots)} == {(0, 1), (1, 0)}


def test_an_adapter_in_a_slot_is_marked_as_used_and_not_looked_up(zoo, made, monkeypatch):
    """For each adapter of each step, vLLM would list all that it holds."""
    from vllm.lora import worker_manager  # pyright: ignore[reportMissingImports]

    def refused(self):
        raise AssertionError

    first, second, *more = (request("some", zoo.path("some"), next(numbers)) for _ in range(5))
    llm, manager = made.llm_engine, manager_of(made)
    for one in (first, second):
        llm.add_lora(one)
    for one in more:
        with monkeypatch.context() as patch:
            patch.setattr(worker_manager.WorkerLoRAManager, "list_adapters", refused)
            check(generate(made, [PROMPT], [first]), asked(zoo, "some"))
        llm.add_lora(one)
        # What was used before goes first, of two slots and four places in memory.
        assert {*manager.lora_index_to_id} == {first.lora_int_id, one.lora_int_id}
    assert llm.list_loras() == {one.lora_int_id for one in (first, *more)}


def test_a_lora_in_the_slot_of_a_dora_has_no_g(zoo, made):
    for name in ("dora", "lora", "some", "lora, some", "dora"):
        made.llm_engine.add_lora(request(name, zoo.path(name), number := next(numbers)))
        check(generate(made, [PROMPT], [request(name, zoo.path(name), number)]), asked(zoo, name))
        made.llm_engine.remove_lora(number)


def test_adapters_share_no_blocks_of_the_prefix_cache(zoo, made):
    """The prompt's first block is in the cache for the adapters before."""
    prompt = [*range(2, 42)]
    for cached in (0, 32):
        for number, name in enumerate((*DORA, "lora"), 900):
            one = request(name, zoo.path(name), number)
            options = {"lora_request": one, "use_tqdm": False}
            (output,) = made.generate([{"prompt_token_ids": prompt}], **options)
            assert output.num_cached_tokens == cached
            check(generate(made, [prompt], [one]), [zoo.expected(name, tuple(prompt))])


def damaged(zoo, name, change):
    """Returns a copy of the folder of adapter `dora` that `change` has changed."""
    folder = zoo.root / "damaged" / name
    shutil.copytree(zoo.path("dora"), folder, dirs_exist_ok=True)
    config = json.loads((folder / "adapter_config.json").read_text())
    tensors = load_file(folder / "adapter_model.safetensors")
    tensors = change(config, tensors) or tensors
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(
        {key: one.contiguous() for key, one in tensors.items()},
        folder / "adapter_model.safetensors",
    )
    return folder


def field(**values):
    return lambda config, tensors: config.update(values)


UP = "base_model.model.model.layers.1.mlp.up_proj"


def tensor(key, value):
    def change(config, tensors):
        tensors[f"{UP}.{key}"] = value(tensors[f"{UP}.{key}"])

    return change


def spoilt(number):
    def value(given):
        given[0] = number
        return given

    return value


def only(end):
    return lambda config, tensors: {key: one for key, one in tensors.items() if end not in key}


def more(key, shape):
    def change(config, tensors):
        tensors[f"base_model.model.{key}"] = torch.ones(shape)

    return change


def too_large(config, tensors):
    config["r"] = 32
    config["lora_alpha"] = 32
    return {
        key: one.repeat_interleave(2, 0 if "lora_A" in key else 1) if one.ndim == 2 else one
        for key, one in tensors.items()
    }


def other_model(config, tensors):
    return {
        key: torch.cat([one, one], 1) if "down_proj.lora_A" in key else one
        for key, one in tensors.items()
    }


def of_layer(name):
    def change(config, tensors):
        return {key.replace("layers.1.", name): one for key, one in tensors.items()}

    return change


def without_norm(zoo):
    """An adapter that makes a row of the weight zero."""

    def change(config, tensors):
        weight = zoo.base.model.layers[1].mlp.up_proj.weight.detach()
        a, b = torch.zeros(16, 64), torch.zeros(96, 16)
        a[0], b[3, 0] = weight[3] / weight[3].norm(), -weight[3].norm()
        config.update(lora_alpha=16)
        return tensors | {f"{UP}.lora_A.weight": a, f"{UP}.lora_B.weight": b}

    return change


REFUSED = {
    "magnitudes without use_dora": (field(use_dora=False), "no use_dora"),
    "use_dora without magnitudes": (only("magnitude"), "has no magnitude"),
    "a magnitude is missing": (only("1.mlp.up_proj.lora_magnitude"), "up_proj has no magnitude"),
    "a short magnitude": (
        tensor("lora_magnitude_vector", lambda one: one[:-1]),
        "up_proj.lora_magnitude_vector is",
    ),
    "NaN in a magnitude": (
        tensor("lora_magnitude_vector", spoilt(math.nan)),
        "magnitude of .*up_proj holds NaN",
    ),
    "infinity in a magnitude": (
        tensor("lora_magnitude_vector", spoilt(math.inf)),
        "magnitude of .*up_proj holds NaN or infinity",
    ),
    "NaN in lora_A": (tensor("lora_A.weight", spoilt(math.nan)), "lora_A of .*up_proj holds NaN"),
    "infinity in lora_B": (
        tensor("lora_B.weight", spoilt(math.inf)),
        "lora_B of .*up_proj holds NaN",
    ),
    "a zero norm": (without_norm, "norm of .*up_proj with its adapter is 0.* at output 3"),
    "modules_to_save": (field(modules_to_save=["lm_head"]), "modules_to_save"),
    "trainable tokens": (field(trainable_token_indices=[1, 2]), "trainable_token_indices"),
    "biases": (field(bias="all"), "bias is 'all'"),
    "lora_bias": (field(lora_bias=True), "lora_bias"),
    "PiSSA": (field(init_lora_weights="pissa"), "init_lora_weights is 'pissa'"),
    "aLoRA": (field(alora_invocation_tokens=[1, 2]), "alora_invocation_tokens"),
    "experts": (field(target_parameters=["mlp.experts.up"]), "target_parameters"),
    "an embedding": (more("model.embed_tokens.lora_embedding_A", (16, 128)), "embed"),
    "the head": (
        lambda config, tensors: (
            tensors
            | {
                f"base_model.model.lm_head.{key}": torch.ones(shape)
                for key, shape in {
                    "lora_A.weight": (16, 64),
                    "lora_B.weight": (128, 16),
                    "lora_magnitude_vector": (128,),
                }.items()
            }
        ),
        "lm_head",
    ),
    "another model": (other_model, "down_proj is of a layer with 192 inputs"),
    "more layers": (of_layer("layers.7."), "layers.7.*the model has no such layer"),
    "a large rank": (too_large, "max-lora-rank|max_lora_rank"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_served_is_refused_and_the_engine_lives_on(zoo, made, name):
    change, named = REFUSED[name]
    change = change(zoo) if change is without_norm else change
    folder, number = damaged(zoo, name, change), next(numbers)
    before = made.llm_engine.list_loras()
    with pytest.raises(Exception, match=f"(?s){named}"):
        made.llm_engine.add_lora(request("damaged", folder, number))
    assert made.llm_engine.list_loras() == before
    good = request("dora", zoo.path("dora"), number)
    check(generate(made, [PROMPT], [good]), asked(zoo, "dora"))


class Trainer:
    """In place of vLLM's weight transfer: writes weights without a call that the plugin sees."""

    supports_draft_weight_update = False

    def __init__(self, runner):
        self.runner = runner

    def start_weight_update(self):
        pass

    reset_weight_update_target = finish_weight_update = start_weight_update

    def update_weights(self, info):
        self.runner.reload_weights(**info)
        self.runner.lora_manager._adapter_manager.dora.is_outdated = False


@pytest.mark.parametrize("how", ["reloaded", "reloaded, adapters kept", "by a trainer"])
def test_norms_follow_the_base_weights(zoo, made, tmp_path, monkeypatch, how):
    """Last, since the engine has other weights afterwards. vLLM 0.25 keeps the adapters, in memory
    and in slots, when it reloads weights, and 0.32 drops them."""
    worker = worker_of(made)
    runner = worker.model_runner
    if how != "reloaded":
        monkeypatch.setattr(runner, "reset_lora_state", lambda: None)
    requests = {name: request(name, zoo.path(name), next(numbers)) for name in DORA[:2]}
    for one in requests.values():
        generate(made, [PROMPT], [one])
    other = Zoo("Llama", tmp_path, seed=99 + len(how))
    path = {"weights_path": str(other.folder)}
    if how == "by a trainer":
        monkeypatch.setattr(worker, "weight_transfer_engine", Trainer(runner))
        made.collective_rpc("start_weight_update")
        made.collective_rpc("update_weights", args=(path,))
        made.collective_rpc("finish_weight_update")
    else:
        made.collective_rpc("reload_weights", kwargs=path)
    made.reset_prefix_cache()
    for name, one in requests.items():
        base = copy.deepcopy(other.base)
        expected = peft.PeftModel.from_pretrained(base, zoo.path(name)).eval()
        check(generate(made, [PROMPT], [one]), [greedy(expected, tuple(PROMPT))])


def test_models_with_an_encoder_are_refused():
    """Such as Whisper: vLLM looks up the rows of its encoder among the decoder's tokens."""
    from torch_dora.vllm.adapters import Adapters

    adapters = Adapters.__new__(Adapters)
    adapters.manager = SimpleNamespace(model=SimpleNamespace(config=transformers.WhisperConfig()))
    with pytest.raises(Exception, match="the model has an encoder"):
        adapters._find_magnitudes(SimpleNamespace(dora_layers={}))


def test_layers_that_vllm_calls_for_a_part_of_a_batch_are_left_to_it(monkeypatch):
    """It looks up adapters by the places in the part: of encoders, that is a group of a batch's
    images, and beside experts of several processes the tokens of one."""
    from vllm.lora import layers  # pyright: ignore[reportMissingImports]
    from vllm.model_executor.layers.linear import (  # pyright: ignore[reportMissingImports]
        ReplicatedLinear,
    )

    from torch_dora.vllm import adapters, punica

    class Wrapper:
        def __init__(self):
            self._token_lora_indices = torch.zeros(9, dtype=torch.int64)

    language, tower = Wrapper(), Wrapper()
    modules = {}
    wrappers = {"model.q": language, "visual.q": tower, "visual.k": tower}
    for name, wrapper in {**wrappers, "model.mlp.gate": language}.items():
        base = linear(ReplicatedLinear)
        base.output_size = 4
        modules[name] = wrapped(layers.ReplicatedLinearWithLoRA, base)
        modules[name].punica_wrapper = wrapper
    model = torch.nn.Module()
    model.model = torch.nn.Module()
    model.model.mlp = torch.nn.Module()
    model.model.mlp.is_sequence_parallel = True
    manager = SimpleNamespace(
        model=model,
        modules=modules,
        lora_slots=1,
        lora_config=SimpleNamespace(max_lora_rank=8),
        punica_wrapper_mapping={"model": language, "visual": tower, "merger": tower},
    )
    asked = []
    monkeypatch.setattr(adapters.Adapters, "_compile_norms", lambda self: None)
    monkeypatch.setattr(punica, "refuses", lambda layer: asked.append(layer) or "not here")
    made = adapters.Adapters(manager, keeps_punica=False)
    assert made._layers == {"model.q": modules["model.q"]}
    assert asked == [modules["model.q"]]
    assert {"visual.q", "visual.k", "model.mlp.gate"} == {*made._reasons}
    assert made._reasons["model.mlp.gate"].startswith("vLLM calls it for a part of a batch")
    assert made._reasons["visual.q"].startswith("it is in an encoder")
    assert not hasattr(modules["visual.q"].base_layer, "row_scales")
    assert all((one._token_lora_indices == -1).all() for one in (language, tower))


def test_the_norms_of_all_projections_are_compiled_before_the_first_adapter(zoo, made, monkeypatch):
    """Triton has other kernels for small weights. Those of `dora` are all that there are."""
    from torch_dora.vllm import adapters, base_weight

    shapes = []

    def squares(self, parts):
        shapes.append({(len(b), a.shape[1]) for _, a, b in parts})
        return [torch.ones(len(b)) for _, _, b in parts]

    def weight_of(name, layer):
        features, base = layer.input_size, layer.base_layer
        one = torch.empty(base.output_size_per_partition, features)
        found = base_weight.BaseWeight(name, one, lambda x: x, features=features, dtype=one.dtype,
                                       device=SimpleNamespace(type="cuda"))  # fmt: skip
        return found

    dora = manager_of(made).dora
    monkeypatch.setattr(adapters.BaseWeight, "squares", squares)
    monkeypatch.setattr(adapters, "_base_weight", weight_of)
    monkeypatch.setattr(dora, "_operands", lambda weight, *operands: operands)
    monkeypatch.setattr(dora, "_weights", {})
    dora._compile_norms()
    before = set().union(*shapes)
    assert len(shapes) == len(before)
    made.llm_engine.add_lora(request("dora", zoo.path("dora"), next(numbers)))
    assert set().union(*shapes) == before
    made.llm_engine.remove_lora(next(numbers) - 1)
