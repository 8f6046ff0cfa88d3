import math

from dora_common.merge_report import MergedLayer, MergeReport


def test_ratios_of_norms():
    norms = {"weight": 4.0, "merged": 5.0, "change": 2.0, "error": 1.0}
    row = MergedLayer.from_norms("a.b", "bfloat16", **norms, max_abs=0.25)
    assert row == MergedLayer("a.b", "bfloat16", 0.5, 0.2, 0.5, 0.25)


def test_norms_of_zero_give_no_error():
    zero = dict.fromkeys(("weight", "merged", "change", "error"), 0.0)
    row = MergedLayer.from_norms("a", "float32", **zero, max_abs=0.0)
    assert row == MergedLayer("a", "float32", 0.0, 0.0, 0.0, 0.0)
    row = MergedLayer.from_norms("a", "float32", **zero | {"change": 1.0}, max_abs=0.0)
    assert row.change == math.inf


def test_the_table_has_a_line_for_every_layer():
    rows = (MergedLayer("a.b.c.d", "bfloat16", 0.5, 2e-3, 0.25, 0), MergedLayer("e", "x", *[1] * 4))
    assert str(MergeReport(rows)).splitlines() == [
        "layer    dtype     change    rounding  lost      max abs",
        "a.b.c.d  bfloat16  5.00e-01  2.00e-03  2.50e-01  0.00e+00",
        "e        x         1.00e+00  1.00e+00  1.00e+00  1.00e+00",
    ]
    assert str(MergeReport(())).startswith("layer  dtype")
