import numpy as np
import pytest

from dora_common.lora_report import LoRALayer, LoRAReport, check_arguments


def test_the_error_is_that_of_the_worst_matrix():
    values = [[2.0, 1.0, 1.0], [3.0, 0.0, 0.0]]
    row = LoRALayer.from_singular_values("a", values, 1, limit=0.5)
    assert row == LoRALayer("a", pytest.approx((2 / 6) ** 0.5), 2)
    assert LoRALayer.from_singular_values("a", values, 2, limit=0.9) == LoRALayer(
        "a", pytest.approx((1 / 6) ** 0.5), 1
    )
    for rank in (3, 7):
        assert LoRALayer.from_singular_values("a", values, rank, limit=0) == LoRALayer("a", 0, 3)


def test_the_groups_of_a_convolution_share_the_rank():
    row = LoRALayer.from_singular_values("a", [[4.0, 3.0], [1.0, 1.0]], 2, limit=0.1, groups=2)
    assert row == LoRALayer("a", pytest.approx(0.5**0.5), 4)


def test_an_adapter_that_changes_nothing_needs_no_more_than_rank_one():
    row = LoRALayer.from_singular_values("a", np.zeros((1, 4)), 1, limit=0)
    assert row == LoRALayer("a", 0.0, 1)


def test_the_layers_above_the_limit_are_listed_with_the_rank_that_would_do():
    rows = LoRALayer("a.b", 0.25, 24), LoRALayer("c", 0.01, 3), LoRALayer("d", 0.125, 17)
    report = LoRAReport(8, 0.05, rows)
    assert str(report).splitlines() == [
        "layer  error     rank for an error of 0.05",
        "a.b    2.50e-01  24",
        "c      1.00e-02  3",
        "d      1.25e-01  17",
    ]
    with pytest.raises(ValueError, match=r"rank is 8 and limit is 0.05.*at least 24") as error:
        report.check()
    assert str(error.value).splitlines()[1:] == [
        "  a.b: error 0.25, rank 24 would do",
        "  d: error 0.125, rank 17 would do",
    ]
    LoRAReport(8, 0.25, rows).check()


@pytest.mark.parametrize("limit", [-0.1, float("nan"), float("inf")])
def test_a_limit_is_an_error(limit):
    with pytest.raises(ValueError, match=r"limit is .*; expected the largest relative error"):
        check_arguments(4, limit)


def test_arguments_have_types():
    with pytest.raises(TypeError, match="limit is '1', a str; expected the largest relative"):
        check_arguments(4, "1")
    with pytest.raises(TypeError, match=r"rank is 2.5"):
        check_arguments(2.5, 0.1)
