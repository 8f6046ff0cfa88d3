"""A contraction by products of matrices is NumPy's einsum."""

import numpy as np
import pytest
from jax import lax

from jax_dora.layers.contraction import Contraction

SIZES = dict(zip("abcdefgh", (2, 3, 4, 5, 6, 7, 3, 2), strict=True))


def drawn(letters, seed):
    shape = [SIZES[letter] for letter in letters]
    # Small integers, so that sums in any order are exact.
    return np.random.default_rng(seed).integers(-4, 5, shape).astype(np.float32)


def multiply(x, arrays, dropout):
    assert dropout is None
    return x @ arrays["kernel"]


def product(contraction, x, weight):
    contraction = contraction.with_sizes(weight.shape)
    return contraction(multiply, x, contraction.matrices(kernel=weight))


@pytest.mark.parametrize(
    ("equation", "roles"),
    [
        ("abc,cd->abd", "io"),
        ("abc,dec->aebd", "ooi"),
        ("abcd,dec->eab", "ioi"),
        ("bac,abce->eab", "bbio"),
        ("...c,cd->...d", "io"),
        ("a...c,acd->a...d", "bio"),
    ],
)
def test_einsum(equation, roles):
    whole = equation.replace("...", "gh")
    x, weight = (
        drawn(letters, seed) for seed, letters in enumerate(whole.split("->")[0].split(","))
    )
    contraction = Contraction.of_einsum(equation, x.ndim)
    assert contraction.roles == roles
    np.testing.assert_array_equal(product(contraction, x, weight), np.einsum(whole, x, weight))


@pytest.mark.parametrize(
    ("x", "weight", "numbers", "roles"),
    [
        ("abc", "cd", ((2,), (0,)), "io"),
        ("abc", "dbc", ((2, 1), (2, 1)), "oii"),
        ("dabc", "edcf", ((3,), (2,), (0,), (1,)), "obio"),
    ],
)
@pytest.mark.parametrize("weight_first", [False, True])
def test_dot_general(x, weight, numbers, roles, weight_first):
    x, weight = drawn(x, 0), drawn(weight, 1)
    numbers = numbers[:2], numbers[2:] or ((), ())
    operands = x, weight
    if weight_first:
        operands, numbers = (weight, x), tuple(pair[::-1] for pair in numbers)
    contraction = Contraction.of_dot_general(
        numbers, x.ndim, weight.ndim, weight_first=weight_first
    )
    assert contraction.roles == roles
    expected = lax.dot_general(*operands, numbers)
    np.testing.assert_array_equal(product(contraction, x, weight), expected)


@pytest.mark.parametrize(
    ("x", "y"),
    [
        ("bc", "abd"),  # every batch index reads the same rows
        ("abc", "bd"),  # and is summed
        ("gabc", "gbd"),
        ("gbc", "dgab"),
    ],
)
def test_batch_axes_that_only_one_of_input_and_result_has(x, y):
    contraction = Contraction("acd", "bio", x=x, y=y)
    x_array, weight = drawn(x, 0), drawn("acd", 1)
    expected = np.einsum(f"{x},acd->{y}", x_array, weight)
    np.testing.assert_array_equal(product(contraction, x_array, weight), expected)


def test_joined_axes():
    x, weight = drawn("gabc", 0), drawn("abcde", 1)
    expected = np.einsum("gabc,abcde->agde", x, weight).reshape(2, -1, 5)
    contraction = Contraction("abcde", "biioo", x=("g", ("a", "b"), "c"), y=("a", ("g", "d"), "e"))
    found = product(contraction, x.reshape(3, 6, 4), weight)
    np.testing.assert_array_equal(found, expected.reshape(found.shape))


def test_a_layer_with_several_axes_is_seen_as_matrices_and_back():
    contraction = Contraction.of_weight((4, 2, 3, 5), "ibio", rank=7)
    assert contraction.kernel.matrices == (2, 12, 5)
    assert contraction.lora_a.stored == (2, 4, 3, 7)
    assert contraction.lora_b.stored == (2, 7, 5)
    assert contraction.magnitude.stored == (2, 5)
    assert contraction.adapter_axes("wxyz") == {
        "lora_a": ("x", "w", "y", None),
        "lora_b": ("x", None, "z"),
        "magnitude": ("x", "z"),
    }
    kernel = np.arange(120).reshape(4, 2, 3, 5)
    matrices = contraction.kernel.to_matrices(kernel)
    np.testing.assert_array_equal(matrices, kernel.transpose(1, 0, 2, 3).reshape(2, 12, 5))
    np.testing.assert_array_equal(contraction.kernel.from_matrices(matrices), kernel)
