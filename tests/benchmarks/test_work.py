import pytest
import torch

from benchmarks.work import SAME_FUNCTION, Expectation, judge

WANT = torch.tensor([1.0, -2.0, 4.0], dtype=torch.float64)
EXPECTED = {"y": Expectation(WANT, torch.full((3,), 0.01, dtype=torch.float64))}


def test_exact_results_are_held_to_every_element_s_bound() -> None:
    inside = judge({"y": WANT + torch.tensor([0.0, 0.009, 0.0])}, EXPECTED, exact=True)
    assert inside["passed"]
    assert inside["of_bound"] == pytest.approx(0.9)
    outside = judge({"y": WANT + torch.tensor([0.0, 0.0, 0.011])}, EXPECTED, exact=True)
    assert not outside["passed"]
    assert (outside["worst"], outside["exact"]) == ("y", True)


def test_a_bound_of_zero_allows_no_error_and_hides_none() -> None:
    expected = {"y": Expectation(WANT, torch.tensor([0.0, 0.01, 0.01], dtype=torch.float64))}
    assert judge({"y": WANT}, expected, exact=True)["passed"]
    for wrong in ([0.001, 0.0, 0.0], [0.0, 0.0, 0.011]):
        assert not judge({"y": WANT + torch.tensor(wrong)}, expected, exact=True)["passed"]


def test_others_must_compute_the_same_function() -> None:
    near = judge({"y": WANT * (1 + 0.9 * SAME_FUNCTION)}, EXPECTED, exact=False)
    assert near["passed"]
    assert near["relative"] == pytest.approx(0.9 * SAME_FUNCTION)
    assert not judge({"y": WANT * (1 + 1.1 * SAME_FUNCTION)}, EXPECTED, exact=False)["passed"]


@pytest.mark.parametrize("exact", [True, False])
def test_nan_never_passes(exact: bool) -> None:
    nan = torch.tensor([1.0, torch.nan, 4.0], dtype=torch.float64)
    others = {"x": Expectation(WANT, EXPECTED["y"].bound)}
    for got, want in ((nan, WANT), (WANT, nan), (nan, nan)):
        expected = others | {"y": Expectation(want, EXPECTED["y"].bound)}
        assert not judge({"x": WANT, "y": got}, expected, exact)["passed"]


def test_unexpected_results_are_errors() -> None:
    with pytest.raises(ValueError, match="results are"):
        judge({"y": WANT, "inner": WANT}, EXPECTED, exact=True)
    with pytest.raises(ValueError, match="shape"):
        judge({"y": WANT[:2]}, EXPECTED, exact=True)
    with pytest.raises(ValueError, match="no bound"):
        judge({"y": WANT}, {"y": Expectation(WANT)}, exact=True)
