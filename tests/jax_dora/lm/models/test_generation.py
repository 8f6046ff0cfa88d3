"""Generation with a cache: the full forward pass's tokens, and transformers'."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from flax import nnx

import jax_dora
from jax_dora.lm import models
from jax_dora.lm.models import Sampling, generate
from parity import tolerances
from tests.jax_dora.lm.models.conftest import FAMILIES
from tests.jax_dora.small_models import train
from tests.tables import thinned

LENGTHS = (5, 11, 1)


def prompts_of(tokens):
    return [tokens[0, : LENGTHS[0]].tolist(), tokens[1, : LENGTHS[1]].tolist(), [7]]


def perturbed(model):
    """With an adapter whose lora_b is not 0 and whose magnitude is not the norm."""
    rule = jax_dora.DoRARule("model/layers/.*_proj", rank=3, alpha=5, dropout=0.5)
    model = train(jax_dora.apply_dora(model, rule, rngs=nnx.Rngs(0)))
    model.train()
    return model


@pytest.mark.slow
@pytest.mark.parametrize("adapted", [False, True])
def test_greedy_is_the_full_forward_pass(make_folder, tokens, adapted):
    model = models.load_model(make_folder("qwen3-tied"))
    if adapted:
        model = perturbed(model)
    prompts = prompts_of(tokens)
    found = generate(model, prompts, 9)
    # The model given is left in training, with its dropout streams where they were.
    whole = nnx.merge(*nnx.split(model))
    whole.eval()
    longest = max(LENGTHS) + 9
    forward = nnx.jit(lambda model, tokens: model(tokens))
    for prompt, answer in zip(prompts, found, strict=True):
        text = [*prompt, *answer]
        row = np.zeros((1, longest), np.int32)
        row[0, : len(text)] = text
        logits = np.asarray(forward(whole, jnp.asarray(row)))[0]
        assert np.argmax(logits[len(prompt) - 1 : len(text) - 1], axis=-1).tolist() == answer


@pytest.mark.ci
@pytest.mark.parametrize("family", thinned(FAMILIES, ["qwen3"]))
def test_greedy_is_that_of_transformers(make_folder, make_torch_model, family, tokens):
    theirs = make_torch_model(family)
    model = models.load_model(make_folder(family))
    prompts = prompts_of(tokens)
    for prompt, answer in zip(prompts, generate(model, prompts, 7), strict=True):
        config = transformers.GenerationConfig(
            max_new_tokens=7, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        given = torch.tensor([prompt])
        mask = torch.ones_like(given)
        expected = theirs.generate(given, attention_mask=mask, generation_config=config)
        assert answer == expected[0, len(prompt) :].tolist()


class OpenAIPenalties(transformers.LogitsProcessor):
    """As their documentation writes them; transformers has none of its own."""

    def __init__(self, prompt, one):
        self.prompt, self.one = prompt, one

    def __call__(self, input_ids, scores):
        counts = torch.bincount(input_ids[0, self.prompt :], minlength=scores.shape[-1])
        scores = scores - self.one.frequency_penalty * counts
        return scores - self.one.presence_penalty * (counts > 0)


END = 150  # a token that this model does not draw by itself
# Of each kind at least one that changes what this model says.
PROCESSED = [
    Sampling(),
    Sampling(repetition_penalty=6.0),
    Sampling(repetition_penalty=0.2),
    Sampling(frequency_penalty=2.0),
    Sampling(presence_penalty=-2.0),
    Sampling(min_tokens=9, logit_bias={END: 100.0}),
    Sampling(logit_bias={11: 1.5, 3: -100.0, 40: 0.8}),
    Sampling(
        repetition_penalty=1.3,
        frequency_penalty=-0.3,
        presence_penalty=0.4,
        min_tokens=6,
        logit_bias={END: 100.0, 5: 0.7, 30: -2.0},
    ),
]


@pytest.mark.ci
def test_processed_is_what_transformers_says(make_folder, make_torch_model, tokens):
    """Rows of one batch with other settings each, and two lengths of prompts."""
    theirs, model = make_torch_model("qwen3"), models.load_model(make_folder("qwen3"))
    prompts = prompts_of(tokens)[:2] * (len(PROCESSED) // 2)
    answers = generate(model, prompts, 12, PROCESSED, ends=[END])
    for prompt, one, answer in zip(prompts, PROCESSED, answers, strict=True):
        config = transformers.GenerationConfig(
            max_new_tokens=12,
            do_sample=False,
            eos_token_id=END,
            pad_token_id=0,
            repetition_penalty=one.repetition_penalty,
            min_new_tokens=one.min_tokens,
            sequence_bias={(token,): bias for token, bias in one.logit_bias.items()} or None,
        )
        given = torch.tensor([prompt])
        expected = theirs.generate(
            given,
            attention_mask=torch.ones_like(given),
            generation_config=config,
            logits_processor=[OpenAIPenalties(len(prompt), one)],
        )[0, len(prompt) :].tolist()
        assert answer == [token for token in expected if token != END], one
        assert len(answer) == (one.min_tokens or 12)
    plain = generate(model, prompts, 12, ends=[END])
    assert [answers[n] != plain[n] for n in range(8)] == [n > 0 for n in range(8)]


@pytest.mark.slow
@pytest.mark.parametrize("unroll", [False, True])
def test_rows_come_and_go(make_folder, tokens, unroll):
    """Slots of a server: a row is filled while another waits, freed, and filled anew."""
    model = models.load_model(make_folder("llama"), unroll=unroll)
    whole = np.asarray(model(jnp.asarray(tokens)))
    extend = nnx.jit(lambda model, *given: model.extend(*given))

    def close(hidden, row, start, count):
        found = np.asarray(model.logits(hidden))[row, :count]
        expected = whole[0 if row == 2 else row, start : start + count]
        peak = max(1.0, np.abs(expected).max())
        assert np.abs(found - expected).max() <= tolerances.caps.OPERATOR_FP32_MAX_ABS * peak

    cache = models.make_cache(model.config, 3, 40)
    # Row 0 gets 8 tokens, row 1 gets 3 and padding, row 2 nothing.
    given = np.zeros((3, 8), np.int32)
    given[:2] = tokens[:, :8]
    hidden, cache = extend(model, jnp.asarray(given), cache, jnp.array([8, 3, 0]))
    assert cache.lengths.tolist() == [8, 3, 0]
    close(hidden, 0, 0, 8)
    close(hidden, 1, 0, 3)
    # Row 0 waits, row 1 goes on, row 2 starts with row 0's text.
    given[1], given[2] = tokens[1, 3:11], tokens[0, :8]
    hidden, cache = extend(model, jnp.asarray(given), cache, jnp.array([0, 8, 5]))
    assert cache.lengths.tolist() == [8, 11, 5]
    close(hidden, 1, 3, 8)
    close(hidden, 2, 0, 5)
    # Row 1 is freed, and starts anew; the others go on.
    cache = cache._replace(lengths=cache.lengths.at[1].set(0))
    given = np.stack([tokens[0, 8:16], tokens[1, :8], tokens[0, 5:13]])
    hidden, cache = extend(model, jnp.asarray(given), cache, jnp.array([8, 8, 8]))
    for row, start in ((0, 8), (1, 0), (2, 5)):
        close(hidden, row, start, 8)


@pytest.mark.slow
def test_one_token_each_over_what_a_row_held_before(make_folder, tokens):
    """Token by token, in rows of different lengths whose places hold another text's tokens, up to
    the last place; a row that is full stays as it is."""
    model = models.load_model(make_folder("llama"), unroll=True)
    expected = np.asarray(nnx.jit(type(model).__call__)(model, tokens[:, :12]))

    @nnx.jit
    def extend(model, given, cache, counts):
        hidden, cache = model.extend(given, cache, counts)
        return model.logits(hidden)[:, -1], cache

    cache = models.make_cache(model.config, 2, 12)
    _, cache = extend(model, tokens[::-1, :12], cache, np.array([12, 12]))
    cache = cache._replace(lengths=jnp.zeros_like(cache.lengths))
    _, cache = extend(model, tokens[:, :12], cache, np.array([10, 7]))
    for step in range(5):
        places = np.array([10 + step, 7 + step])
        going = places < 12
        given = tokens[[0, 1], np.minimum(places, 11)][:, None]
        logits, after = extend(model, given, cache, going.astype(np.int32))
        for row in np.flatnonzero(going):
            found, known = np.asarray(logits)[row], expected[row, places[row]]
            peak = max(1.0, np.abs(known).max())
            assert np.abs(found - known).max() <= tolerances.caps.OPERATOR_FP32_MAX_ABS * peak
        for row in np.flatnonzero(~going):
            assert jnp.array_equal(after.keys[:, row], cache.keys[:, row])
        cache = after
    assert cache.lengths.tolist() == [12, 12]


@pytest.mark.slow
def test_ends(make_folder, tokens):
    model = models.load_model(make_folder("llama"))
    prompts = prompts_of(tokens)
    free = generate(model, prompts, 6)
    end = free[0][2]
    cut = generate(model, prompts, 6, ends={end})
    assert cut == [text[: text.index(end)] if end in text else text for text in free]


@pytest.mark.ci
def test_a_row_is_sampled_the_same_in_any_batch(make_folder, tokens):
    model = models.load_model(make_folder("llama"))
    first, second, _ = prompts_of(tokens)
    settings = [Sampling(1.5, seed=seed) for seed in (3, 3, 4)] + [Sampling(0.9, top_p=0.8)]
    same, again, other, last = generate(model, [first] * 3 + [second], 5, settings)
    assert same == again != other
    assert [last] == generate(model, [second], 5, settings[-1])
    with pytest.raises(ValueError, match="sampling has 4 settings; expected one for all prompts"):
        generate(model, [first], 5, settings)


def test_logits_that_are_not_finite(make_folder):
    model = models.load_model(make_folder("llama"))
    embedding = model.model.embed_tokens.embedding
    embedding.set_value(embedding[...].at[9].set(jnp.nan))
    with pytest.raises(models.NotFiniteError, match="row 1 are not finite at new token 0"):
        generate(model, [[7], [7, 9]], 1)


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([], "expected at least one in each row"),
        ([[1], []], "expected at least one in each row"),
        ([[1], [2, 10**6]], "prompts have token 1000000; expected 0 to "),
        ([[-1]], "prompts have token -1; expected 0 to "),
    ],
)
def test_bad_prompts(make_folder, prompts, message):
    model = models.load_model(make_folder("llama"))
    with pytest.raises(ValueError, match=message):
        generate(model, prompts, 1)


def test_tokens_that_the_model_does_not_have(make_folder):
    model = models.load_model(make_folder("llama"))
    with pytest.raises(ValueError, match="logit_bias has token 1000000; expected 0 to "):
        generate(model, [[1]], 1, Sampling(logit_bias={10**6: 1.0}))
    with pytest.raises(ValueError, match="min_tokens is given, and 600 end tokens; expected 512"):
        generate(model, [[1]], 1, Sampling(min_tokens=1), ends=range(600))
