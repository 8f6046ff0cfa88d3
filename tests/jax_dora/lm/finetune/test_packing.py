"""Packing and the order of rows."""

import itertools

import numpy as np
import pytest

from jax_dora.lm.finetune import packing, tiny


@pytest.fixture(scope="module")
def tokenizer():
    return tiny.byte_level_tokenizer()


def test_tokenizer_has_one_token_a_byte(tokenizer):
    text = "1+2=3\nÄ\x00"
    tokens = tokenizer.encode(text).ids
    assert len(tokens) == len(text.encode())
    assert tokenizer.decode(tokens) == text
    assert tokenizer.token_to_id(tiny.END) == tiny.CONFIG["eos_token_id"]
    assert tokenizer.get_vocab_size() == tiny.CONFIG["vocab_size"]


def example(tokens, prompt):
    """The first `prompt` tokens are read, the others learned."""
    return packing.Example(tokens, [place >= prompt for place in range(len(tokens))])


def unpack(rows):
    """The examples that rows hold, with the tokens whose prediction counts."""
    found = []
    for row in range(len(rows.tokens)):
        segments = rows.segment_ids[row]
        assert not rows.weights[row][segments == 0].any()
        for segment in range(1, segments.max() + 1):
            place = np.flatnonzero(segments == segment)
            assert (np.diff(place) == 1).all()
            one = rows.take((row, place))
            np.testing.assert_array_equal(one.positions, np.arange(len(place)))
            np.testing.assert_array_equal(one.tokens[1:], one.targets[:-1])
            tokens = [*one.tokens.tolist(), int(one.targets[-1])]
            found.append((tokens, len(tokens) - int(one.weights.sum())))
            assert (np.diff(one.weights) >= 0).all()  # prompt first, then completion
    return found


def test_packing_keeps_every_example():
    rng = np.random.default_rng(0)
    examples = []
    for size in rng.integers(2, 34, 200):
        tokens = rng.integers(0, 99, size).tolist()
        # Without a prompt the first token is never predicted, so it counts as one of it.
        examples.append(example(tokens, int(rng.integers(1, size))))
    packed = packing.pack(examples, 32)
    expected = [(one.tokens, one.learned.count(False)) for one in examples]
    assert sorted(unpack(packed.rows)) == sorted(expected)
    assert (packed.examples, packed.truncated, packed.dropped) == (200, 0, 0)
    # Best-fit decreasing is within 11/9 of the best.
    assert len(packed.rows.tokens) <= 11 / 9 * (packed.rows.segment_ids > 0).sum() / 32 + 1


def test_long_examples_are_cut_and_counted():
    examples = [
        example(list(range(20)), 3),
        example(list(range(20)), 12),
        example([1, 2, 3], 1),
    ]
    packed = packing.pack(examples, 10)
    assert (packed.examples, packed.truncated, packed.dropped) == (2, 2, 1)
    assert unpack(packed.rows) == [(list(range(11)), 3), ([1, 2, 3], 1)]
    with pytest.raises(ValueError, match="none of 3 examples has a completion within 0 tokens"):
        packing.pack(examples, 0)


@pytest.mark.parametrize("size", [1, 2, 10, 11, 12, 21, 22, 45])
def test_parts_predict_every_token_once(size):
    tokens = np.random.default_rng(size).integers(0, 99, size).tolist()
    learned = [number % 3 > 0 for number in range(size)]
    parts = packing.split(packing.Example(tokens, learned, is_text=True), 10)
    assert all(len(part.tokens) <= 11 and part.is_text for part in parts)
    pairs = [pair for part in parts for pair in itertools.pairwise(part.tokens)]
    assert pairs == list(itertools.pairwise(tokens))
    assert [counts for part in parts for counts in part.learned[1:]] == learned[1:]


def test_order_is_a_permutation_of_each_epoch():
    count, shape = 7, (2, 2)
    column = np.arange(count, dtype=np.int32)[:, None]
    rows = packing.Rows(column, column, np.float32(column), column, column)
    seen = []
    for step in range(7):
        batch = packing.batch(rows, step, shape, seed=3)
        assert all(array.shape == (2, 2, 1) for array in batch)
        seen.extend(batch.tokens.ravel().tolist())
    epochs = np.array(seen).reshape(4, count)
    np.testing.assert_array_equal(np.sort(epochs), np.tile(np.arange(count), (4, 1)))
    assert len({tuple(epoch) for epoch in epochs}) == 4
    np.testing.assert_array_equal(packing.batch(rows, 4, shape, 3).tokens.ravel(), seen[16:20])
