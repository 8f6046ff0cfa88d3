"""Examples, packed into rows of one length."""

import bisect
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jax_dora.models.sharding import put


class Example(NamedTuple):
    tokens: list[int]
    learned: list[bool]  # whether the loss counts of predicting each


class Rows(NamedTuple):
    """Packed examples, five arrays [..., time], by the names by which `next_token_loss` of
    `jax_dora.models` takes them."""

    tokens: np.ndarray  # i32
    targets: np.ndarray  # i32
    weights: np.ndarray  # f32: 1 where the target is to be learned
    positions: np.ndarray  # i32, from 0 in every example
    segment_ids: np.ndarray  # i32: 1, 2, … for the examples of a row, 0 for padding

    def take(self, index: int | np.ndarray | slice) -> "Rows":
        return Rows(*(array[index] for array in self))

    def placed(self, sharding: jax.sharding.Sharding) -> Any:
        """Returns these rows as arrays on the devices, each of which is sent its part."""
        return jax.tree.map(lambda array: put(array, sharding), self)


class Packed(NamedTuple):
    rows: Rows
    examples: int
    truncated: int  # examples of which the end was cut off
    dropped: int  # examples of which no completion was left


def pack(examples: Sequence[Example], length: int) -> Packed:
    """Packs examples into as few rows of `length` tokens as best-fit decreasing finds."""
    # A row reads all but the last token of an example, and predicts all but the first.
    kept = [Example(one.tokens[: length + 1], one.learned[: length + 1]) for one in examples]
    truncated = sum(len(example.tokens) > length + 1 for example in examples)
    kept = [example for example in kept if any(example.learned[1:])]
    if not kept:
        raise ValueError(
            f"none of {len(examples)} examples has a completion within {length} tokens: "
            "raise --length, or give completions that are not empty"
        )
    contents: list[list[Example]] = []
    room: list[tuple[int, int]] = []  # (free tokens, row), sorted
    for example in sorted(kept, key=lambda example: len(example.tokens), reverse=True):
        size = len(example.tokens) - 1
        place = bisect.bisect_left(room, (size, 0))
        free, row = room.pop(place) if place < len(room) else (length, len(contents))
        if row == len(contents):
            contents.append([])
        contents[row].append(example)
        bisect.insort(room, (free - size, row))
    dtypes = (np.int32, np.int32, np.float32, np.int32, np.int32)
    rows = Rows(*(np.zeros((len(contents), length), dtype) for dtype in dtypes))
    for number, content in enumerate(contents):
        _fill(rows.take(number), content)
    return Packed(rows, len(kept), truncated, len(examples) - len(kept))


def batch(rows: Rows, step: int, shape: tuple[int, int], seed: int) -> Rows:
    """Returns the rows of one optimizer step, each array [accumulate, batch, time].

    A function of its arguments alone, so that a run can be taken up at any step: every epoch is a
    permutation of its own, and steps count on across epochs.
    """
    count, size = len(rows.tokens), shape[0] * shape[1]
    chosen = []
    while len(chosen) < size:
        epoch, place = divmod(step * size + len(chosen), count)
        order = np.random.default_rng((seed, epoch)).permutation(count)
        chosen.extend(order[place : place + size - len(chosen)])
    taken = rows.take(np.array(chosen))
    return Rows(*(array.reshape(*shape, -1) for array in taken))


def _fill(row: Rows, examples: Sequence[Example]) -> None:
    start = 0
    for segment, example in enumerate(examples, 1):
        size = len(example.tokens) - 1
        place = slice(start, start + size)
        row.tokens[place] = example.tokens[:-1]
        row.targets[place] = example.tokens[1:]
        row.weights[place] = example.learned[1:]
        row.positions[place] = np.arange(size)
        row.segment_ids[place] = segment
        start += size
