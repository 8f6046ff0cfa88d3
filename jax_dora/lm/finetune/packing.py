"""Packs examples into rows of equal length, and draws batches of rows."""

import bisect
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jax_dora.lm.models.sharding import to_devices


class Example(NamedTuple):
    """A text to train on."""

    tokens: list[int]
    learned: list[bool]  # whether the loss of predicting each token counts
    is_text: bool = False  # whether it is a plain text, without a prompt


class Rows(NamedTuple):
    """Packed examples: five arrays [..., time], the arguments of `models.next_token_loss`."""

    tokens: np.ndarray  # i32
    targets: np.ndarray  # i32
    weights: np.ndarray  # f32: 1 if the target is learned, else 0
    positions: np.ndarray  # i32, which restart from 0 in every example
    segment_ids: np.ndarray  # i32: 1, 2, … for the examples of a row, 0 for padding

    def take(self, index: int | np.ndarray | slice) -> "Rows":
        """Returns the rows at `index`."""
        return Rows(*(array[index] for array in self))

    def placed(self, sharding: jax.sharding.Sharding) -> Any:
        """Returns the rows on devices. Each device gets its part."""
        return jax.tree.map(lambda array: to_devices(array, sharding), self)


class Packed(NamedTuple):
    """The result of `pack`."""

    rows: Rows
    examples: int  # number of packed examples
    truncated: int  # number of examples whose end was cut off
    dropped: int  # number of examples without any token to learn


def split(example: Example, length: int) -> list[Example]:
    """Returns the parts of an example for rows of `length` tokens.

    A part begins with the last token of the one before, so every token is predicted in one part.
    """
    tokens, learned, is_text = example
    starts = range(0, max(1, len(tokens) - 1), length)
    spans = [slice(start, start + length + 1) for start in starts]
    return [Example(tokens[span], learned[span], is_text) for span in spans]


def pack(examples: Sequence[Example], length: int) -> Packed:
    """Packs examples into rows of `length` tokens, with best-fit decreasing bin packing.

    Raises:
      ValueError: no example has a token to learn.
    """
    # The last token of an example is only a target, and the first one only an input.
    kept = [Example(one.tokens[: length + 1], one.learned[: length + 1]) for one in examples]
    truncated = sum(len(example.tokens) > length + 1 for example in examples)
    kept = [example for example in kept if any(example.learned[1:])]
    if not kept:
        raise ValueError(
            f"none of {len(examples)} examples has a completion within {length} tokens: "
            "raise `length`, or use completions that are not empty"
        )
    contents: list[list[Example]] = []
    free_space: list[tuple[int, int]] = []  # (free tokens, row), sorted
    for example in sorted(kept, key=lambda example: len(example.tokens), reverse=True):
        size = len(example.tokens) - 1
        index = bisect.bisect_left(free_space, (size, 0))
        fits = index < len(free_space)
        free, row = free_space.pop(index) if fits else (length, len(contents))
        if row == len(contents):
            contents.append([])
        contents[row].append(example)
        bisect.insort(free_space, (free - size, row))
    dtypes = (np.int32, np.int32, np.float32, np.int32, np.int32)
    rows = Rows(*(np.zeros((len(contents), length), dtype) for dtype in dtypes))
    for number, content in enumerate(contents):
        _fill(rows.take(number), content)
    return Packed(rows, len(kept), truncated, len(examples) - len(kept))


def batch(rows: Rows, step: int, shape: tuple[int, int], seed: int) -> Rows:
    """Returns the rows of one optimizer step, with arrays [accumulate, batch, time].

    Every epoch is a random permutation of the rows, and a step can span two epochs. The result
    depends only on the arguments, so that a run can be resumed at any step.

    Args:
      rows: all rows.
      step: the number of the step, from 0.
      shape: (accumulate, batch).
      seed: the seed of the permutations.
    """
    count, size = len(rows.tokens), shape[0] * shape[1]
    chosen = []
    while len(chosen) < size:
        epoch, start = divmod(step * size + len(chosen), count)
        order = np.random.default_rng((seed, epoch)).permutation(count)
        chosen.extend(order[start : start + size - len(chosen)])
    taken = rows.take(np.array(chosen))
    return Rows(*(array.reshape(*shape, -1) for array in taken))


def _fill(row: Rows, examples: Sequence[Example]) -> None:
    start = 0
    for segment, example in enumerate(examples, 1):
        size = len(example.tokens) - 1
        span = slice(start, start + size)
        row.tokens[span] = example.tokens[:-1]
        row.targets[span] = example.tokens[1:]
        row.weights[span] = example.learned[1:]
        row.positions[span] = np.arange(size)
        row.segment_ids[span] = segment
        start += size
