"""Rules and hyperparameters: ranges, matching, assignment, and the messages that list paths."""

import dataclasses
import math
import subprocess
import sys

import numpy as np
import pytest

from dora_common.hyperparameters import adapter_scale
from dora_common.rules import Rule, as_rules, assign, listing


@dataclasses.dataclass(frozen=True)
class Special(Rule):
    """A package's rule, with fields of its own."""

    keep: bool = False
    dtype: str | None = None


PATHS = [("model.q_proj",), ("model.norm",), ("lm_head",), ("blocks/0/up", "again")]
LINEAR = [True, False, True, True]


def test_no_framework_is_imported():
    names = "dora_common.hyperparameters, dora_common.merge_report, dora_common.rules"
    code = f"import sys, {names}\nprint({{'jax', 'flax', 'torch', 'numpy'}} & set(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "set()"


def chosen(*paths):
    rules = [Rule(path, rank, 1.0) for rank, path in enumerate(paths, 1)]
    return [rule and rule.rank for rule in assign(rules, PATHS, LINEAR)]


def test_the_whole_path_is_matched_and_the_first_rule_wins():
    assert chosen(r".*q_proj", "blocks/0/up|model.*") == [1, 2, None, 2]
    assert chosen("again") == [None, None, None, 1]
    with pytest.raises(ValueError, match="rules\\[0\\], path 'q_proj', matches no layer"):
        chosen("q_proj")


def test_all_linear_leaves_out_the_output_head_and_what_is_not_linear():
    assert chosen("all-linear") == [1, None, None, 1]
    assert not Rule("all-linear", 1, 1.0).matches("decoder/head", linear=True)
    assert not Rule("all-linear", 1, 1.0).matches("all-linear")
    # A name that only begins or ends as an output head's does is none.
    assert Rule("all-linear", 1, 1.0).matches("model.head_proj", linear=True)
    assert Rule("all-linear", 1, 1.0).matches("attention.output.dense", linear=True)


@pytest.mark.parametrize(
    ("path", "paths", "hint"),
    [
        ("q_proj|up", PATHS, r"of a layer: '.*/(q_proj|up)' does. The layers"),
        ("q_proj|up", ["model.0.up"], r"of a layer: '.*\\.(q_proj|up)' does. The layers"),
        ("(?i)UP", PATHS, "of a layer: '(?i).*/(UP)' does. The layers"),
        ("(?x)ip#)", PATHS, "of a layer; the nearest are "),
        (r"\d+/+x", PATHS, "of a layer; the nearest are "),
        (r"blocks\..*", ["blocks/0/up"], "of a layer: 'blocks/.*' does. The layers"),
        (r"layers\.\d+\.up", ["layers/up"], "of a layer: 'layers/up' does. The layers"),
        ("model/.*", ["model.up"], r"of a layer: 'model\\..*' does. The layers"),
        (r".*\.q_prj", ["a.q_proj"], "of a layer; the nearest are q_proj, a.q_proj. The layers"),
        ("all_linear", PATHS, "of a layer: every linear layer is 'all-linear'. The layers"),
        ("up", [""], "of a layer. The layers with parameters are:\n  ''"),
        ("up", [], "of a layer. The layers with parameters are: none"),
    ],
)
def test_a_rule_that_matches_nothing_gets_a_hint(path, paths, hint):
    names = [(one,) if isinstance(one, str) else one for one in paths]
    with pytest.raises(ValueError, match="matches no layer") as caught:
        assign([Rule(path, 1, 1.0)], names, [True] * len(names))
    assert hint in str(caught.value)


@pytest.mark.parametrize(("alpha", "count"), [(0, 1), (0.0, 1), (4, 0), (-4, 0)])
def test_a_scale_of_zero_is_told(alpha, count, caplog):
    assign([Rule(".*norm", 2, 4), Rule(".*", 2, alpha)], PATHS, LINEAR)
    assert len(caplog.messages) == count
    assert all(f"rules[1] has alpha {alpha}, and so" in one for one in caplog.messages)


def test_a_long_list_names_layers_that_differ_by_numbers_once():
    names = [f"{end}layers{end}{i}{end}{name}" for end in "./" for i in range(12) for name in "ab"]
    found = listing([*names, "x.0", "x.1"]).splitlines()
    assert len(names) == 48
    assert found == [
        "",
        "  .layers.0.a, and 11 with other numbers",
        "  .layers.0.b, and 11 with other numbers",
        "  /layers/0/a, and 11 with other numbers",
        "  /layers/0/b, and 11 with other numbers",
        "  x.0",
        "  x.1",
    ]
    assert len(listing(names[:40]).splitlines()) == 41


def test_a_rule_that_adapts_nothing_lists_the_paths():
    everything = r"(.|\n)*:\n  again\n  blocks/0/up\n  lm_head\n  model\.norm\n  model\.q_proj$"
    with pytest.raises(ValueError, match=r"rules\[1\], path 'x', matches no layer" + everything):
        chosen("lm_head", "x")
    with pytest.raises(ValueError, match=r"rules\[1\], .*earlier.* the more specific rule first"):
        chosen(".*", "again")


class TestExclude:
    def chosen(self, *rules):
        return [rule and rule.rank for rule in assign(rules, PATHS, LINEAR)]

    def test_what_it_matches_is_left_to_other_rules(self):
        rule = Rule("all-linear", 1, 1.0, exclude=r".*q_proj")
        assert self.chosen(rule) == [None, None, None, 1]
        assert self.chosen(rule, Rule(r"model\..*", 2, 1.0)) == [2, 2, None, 1]
        assert not rule.matches("model.q_proj", linear=True)
        assert rule.matches("model.q_projection", linear=True)

    def test_every_path_of_a_shared_layer_counts(self):
        assert self.chosen(Rule(".*", 1, 1.0, exclude="again")) == [1, 1, 1, None]

    @pytest.mark.parametrize(
        ("path", "exclude", "message"),
        [
            ("all-linear", "q_proj", r"\[0\], exclude 'q_proj', matches no layer; exclude has"),
            ("again", ".*up", r"'again', matches no layer that exclude '\.\*up' leaves; a rule"),
        ],
    )
    def test_what_leaves_out_nothing_or_everything_is_refused(self, path, exclude, message):
        with pytest.raises(ValueError, match=message + r"(.|\n)*:\n  again\n  blocks/0/up\n"):
            self.chosen(Rule(path, 1, 1.0, exclude=exclude))


def test_rules_may_be_one_or_several_of_the_packages_class():
    rule = Special("a", 2, 4.0, False, 0.1, True, dropout_mode="input", exclude="b")
    assert as_rules(Special, rule) == as_rules(Special, [rule]) == (rule,)
    assert rule.keep
    assert rule.options() == {
        "rank": 2,
        "alpha": 4.0,
        "use_rslora": False,
        "dropout": 0.1,
        "dropout_mode": "input",
        "keep": True,
    }
    with pytest.raises(
        TypeError, match=r"rules\[1\] is a dora_common.Rule; expected a tests.Special"
    ):
        as_rules(Special, [rule, Rule("a", 2, 4.0)])  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="rules is empty; expected at least one Special"):
        as_rules(Special, [])


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"path": "("}, ValueError, r"path is '\(', which is not a valid regular expression"),
        ({"path": 3}, TypeError, "path is 3; expected a regular expression"),
        ({"path": ["a", "b"]}, TypeError, r"as a string, such as '\.\*\(a\|b\)' for ends of paths"),
        ({"exclude": "("}, ValueError, r"exclude is '\(', which is not a valid regular expression"),
        ({"exclude": ("a",)}, TypeError, r"exclude is \('a',\); expected a regular expression"),
        ({"rank": 0}, ValueError, "rank is 0; expected at least 1"),
        ({"rank": -3}, ValueError, "rank is -3"),
        ({"rank": 2.0}, TypeError, "rank is 2.0, a float; expected an integer"),
        ({"rank": True}, TypeError, "rank is True"),
        ({"alpha": "8"}, TypeError, "alpha is '8', a str; expected a real number"),
        ({"alpha": np.bool_(True)}, TypeError, "expected a real number"),
        ({"alpha": math.nan}, ValueError, "alpha is nan; expected a finite number"),
        ({"alpha": math.inf}, ValueError, "alpha is inf; expected a finite number"),
        ({"alpha": 1e300}, ValueError, "alpha is 1e[+]300, a scale of 5e[+]299 at rank 2;"),
        ({"alpha": -1e-300}, ValueError, "expected a scale of 0, or .* from 1.2e-38"),
        ({"use_rslora": "no"}, TypeError, "use_rslora is 'no'; expected True or False"),
        ({"dropout": None}, TypeError, "dropout is None"),
        ({"dropout": 1.0}, ValueError, "dropout is 1.0; expected a probability"),
        ({"dropout": -0.1}, ValueError, r"dropout is -0\.1"),
        ({"dropout": math.nan}, ValueError, "dropout is nan"),
        ({"dropout_mode": "both"}, ValueError, "dropout_mode is 'both'; expected 'adapter'"),
    ],
)
def test_what_is_out_of_range_is_named(change, error, message):
    with pytest.raises(error, match=message):
        Rule(**({"path": "a", "rank": 2, "alpha": 4.0} | change))


def test_the_scale_is_alpha_over_the_rank_or_its_root():
    assert adapter_scale(4, 6) == 1.5
    assert adapter_scale(4, 6, use_rslora=True) == 3.0
    assert type(adapter_scale(np.int64(4), np.float32(6))) is float
