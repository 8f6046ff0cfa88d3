"""Rules, which say which layer of a model gets which adapter."""

import dataclasses
import difflib
import logging
import re
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from dora_common.hyperparameters import DropoutMode, adapter_scale, check_dropout

_LOG = logging.getLogger(__name__)

ALL_LINEAR = "all-linear"
"""The path of a rule that matches every linear projection except embeddings and the output head."""

OUTPUT_HEADS = ("lm_head", "embed_out", "output", "head", "score", "classifier")
"""A layer is an output head for "all-linear" if its path ends in one of these names."""

# The number of a layer in a path, and the lines of a message in which they are listed one by one.
_NUMBER = re.compile(r"(?<![^./])\d+(?=[./])")
_LONG_LIST = 40

SELECTORS = ("path", "exclude")
"""The attributes of a rule that select layers; the others describe their adapters."""


@dataclasses.dataclass(frozen=True)
class Rule:
    """Describes the adapter of every layer with a matching path. The packages add fields of their
    own.

    Attributes:
        path: a regular expression for the whole path, matched with ``re.fullmatch``; or
            "all-linear", which matches every linear projection except embeddings and the output
            head (a path that ends in one of :data:`OUTPUT_HEADS`).
        rank: the rank r of the adapter, at least 1.
        alpha: the numerator of the adapter's scale s = alpha / rank.
        use_rslora: whether the scale is alpha / sqrt(rank) instead.
        dropout: the probability of dropping an input in training; 0 for embeddings, since their
            inputs are tokens and not activations.
        dropout_mode: "adapter" drops inputs of lora_a only, "input" drops inputs of the whole
            correction.
        exclude: a regular expression for the whole paths of layers that the rule leaves out; a
            shared layer is left out if it matches one of the layer's paths. None leaves out none.

    Raises:
        TypeError, ValueError: an attribute is out of range, or ``path`` or ``exclude`` is not a
            valid regular expression.
    """

    path: str
    rank: int
    alpha: float
    use_rslora: bool = False
    dropout: float = 0.0
    dropout_mode: DropoutMode = dataclasses.field(default="adapter", kw_only=True)
    exclude: str | None = dataclasses.field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        _check_expression("path", self.path)
        if self.exclude is not None:
            _check_expression("exclude", self.exclude)
        adapter_scale(self.rank, self.alpha, self.use_rslora)
        check_dropout(self.dropout, self.dropout_mode)

    @property
    def scale(self) -> float:
        """The scale s of the adapter."""
        return adapter_scale(self.rank, self.alpha, self.use_rslora)

    def matches(self, path: str, *, linear: bool = False) -> bool:
        """Returns whether the rule matches the layer at ``path``, "a/b/0/c" or "a.b.0.c".

        Args:
            path: the whole path of the layer.
            linear: whether the layer is a linear projection other than the model's output head.
        """
        if self.excludes(path):
            return False
        if self.path == ALL_LINEAR:
            return linear and re.split(r"[./]", path)[-1] not in OUTPUT_HEADS
        return re.fullmatch(self.path, path) is not None

    def excludes(self, path: str) -> bool:
        """Returns whether the rule leaves out the layer at ``path``, whatever its own path."""
        return self.exclude is not None and re.fullmatch(self.exclude, path) is not None

    def options(self) -> dict[str, Any]:
        """Returns the keyword arguments for a DoRA layer: all attributes except those that select
        layers and those that are None."""
        names = (field.name for field in dataclasses.fields(self))
        values = {name: getattr(self, name) for name in names if name not in SELECTORS}
        return {name: value for name, value in values.items() if value is not None}


def _check_expression(name: str, value: Any) -> None:
    if not isinstance(value, str):
        names = "|".join(map(str, value)) if isinstance(value, list | tuple | set) else ""
        hint = f", such as '.*({names})' for ends of paths" if names else ""
        raise TypeError(f"{name} is {value!r}; expected a regular expression as a string{hint}")
    try:
        re.compile(value)
    except re.error as error:
        raise ValueError(
            f"{name} is {value!r}, which is not a valid regular expression ({error}); put a "
            "backslash before a '.' or '*' that stands for itself"
        ) from error


def as_rules[R: Rule](kind: type[R], rules: R | Sequence[R]) -> tuple[R, ...]:
    """Returns one rule or several rules of class ``kind`` as a tuple. Raises TypeError for another
    class, ValueError if there are none."""

    def described(given: Any) -> str:
        if not isinstance(given, Rule):
            return f"a {type(given).__name__}; expected a {kind.__name__}"
        # The packages' rules have the same name.
        theirs, ours = (
            f"{one.__module__.split('.')[0]}.{one.__name__}" for one in (type(given), kind)
        )
        return f"a {theirs}; expected a {ours}"

    if isinstance(rules, str) or not isinstance(rules, kind | Iterable):
        raise TypeError(f"rules is {described(rules)}, or a list of them")
    found = (rules,) if isinstance(rules, kind) else tuple(rules)  # pyright: ignore[reportArgumentType]
    for index, rule in enumerate(found):
        if not isinstance(rule, kind):
            raise TypeError(f"rules[{index}] is {described(rule)}")
    if not found:
        raise ValueError(f"rules is empty; expected at least one {kind.__name__}")
    return found


def assign[R: Rule](
    rules: Sequence[R], paths: Sequence[Sequence[str]], linear: Sequence[bool]
) -> list[R | None]:
    """Returns for each layer, by all its paths and the argument of :meth:`Rule.matches`, the first
    rule that matches, or None. Raises ValueError if a rule applies to no layer, or its ``exclude``
    matches none. Logs a warning if the scale of a rule is 0."""

    def matched(rule: R, index: int) -> bool:
        names = paths[index]
        if any(rule.excludes(path) for path in names):
            return False
        return any(rule.matches(path, linear=linear[index]) for path in names)

    layers = range(len(paths))
    chosen = [next((rule for rule in rules if matched(rule, at)), None) for at in layers]
    every_path = {path for names in paths for path in names}
    for index, rule in enumerate(rules):
        unmatched = ""
        if rule.exclude is not None and not any(map(rule.excludes, every_path)):
            problem = f"exclude {rule.exclude!r}, matches no layer; exclude"
            unmatched = rule.exclude
        elif any(rule is one for one in chosen):
            continue
        elif any(matched(rule, at) for at in layers):
            problem = (
                f"path {rule.path!r}, matches only layers that earlier rules take (the first match "
                "wins): put the more specific rule first; a rule's path"
            )
        elif rule.exclude is None:
            problem = f"path {rule.path!r}, matches no layer; a rule's path"
            unmatched = "" if rule.path == ALL_LINEAR else rule.path
        else:
            problem = (
                f"path {rule.path!r}, matches no layer that exclude {rule.exclude!r} leaves; a "
                "rule's path"
            )
        raise ValueError(
            f"rules[{index}], {problem} has to match the whole path of a layer"
            f"{_suggestion(unmatched, every_path)}. The layers with parameters are:"
            f"{listing(every_path)}"
        )
    for index, rule in enumerate(rules):
        if not rule.scale:
            _LOG.warning(
                "rules[%d] has alpha %s, and so the scale 0: lora_a and lora_b have no effect and "
                "are not trained, only magnitudes are; alpha is often rank or 2 * rank",
                index,
                rule.alpha,
            )
    return chosen


def _suggestion(expression: str, paths: Collection[str]) -> str:
    """Returns the end of an error message with an expression that matches a layer, if `expression`
    is the end of a path or has the other package's separators, or with the nearest names; or
    with "all-linear" if it is spelt in another way."""
    if re.sub(r"[ _-]", "", expression).lower() == re.sub("-", "", ALL_LINEAR):
        return f": every linear layer is {ALL_LINEAR!r}"
    if not expression:
        return ""
    separator = "/" if any("/" in path for path in paths) else r"\."
    others = (
        with_any_beginning(expression, separator),
        expression.replace(r"\.", "/"),
        expression.replace(r"\.", "/").replace(r"\d+/", ""),  # stacked layers have no number
        expression.replace("/", r"\."),
    )
    for other in filter(_is_expression, others):
        if any(re.fullmatch(other, path) for path in paths):
            return f": {other!r} does"
    plain = re.sub(r"[\\^$]|\.\*", "", expression)
    # With several numbers or a beginning left open, the end of the path is what was meant.
    return nearest(plain if plain == expression else re.split(r"[./]", plain)[-1], paths)


def with_any_beginning(expression: str, separator: str) -> str:
    """Returns an expression for paths that end in what `expression` matches after a separator, or
    "" if there is none. Flags stay in front, as Python requires."""
    flags = re.match(r"(\(\?[aimsux]+\))*", expression)
    end = flags.end() if flags else 0
    longer = rf"{expression[:end]}.*{separator}({expression[end:]})"
    return longer if _is_expression(longer) else ""


def _is_expression(text: str) -> bool:
    try:
        re.compile(text)
    except re.error:
        return False
    return True


def listing(lines: Iterable[str]) -> str:
    """Returns the sorted lines for the end of an error message, each indented on a line of its own,
    or " none". In a long list, lines that differ by numbers in their paths alone are one.

    An empty line, which is the path of the model itself, is shown as ''."""
    alike: dict[str, list[str]] = {}
    shown = sorted(lines)
    for line in shown:
        alike.setdefault(_NUMBER.sub("0", line), []).append(line)
    if len(shown) > _LONG_LIST:
        shown = [
            one[0] + (f", and {len(one) - 1} with other numbers" if one[1:] else "")
            for one in alike.values()
        ]
    return "".join(f"\n  {line or repr(line)}" for line in shown) or " none"


def nearest(name: str, there: Iterable[str]) -> str:
    """Returns the end of an error message with the paths in `there`, or ends of them if `name` is
    one, that are nearest to `name`, or "" if there are none."""
    separators = r"[./]"
    names = set(there) - {""}
    if not re.search(separators, name):
        names |= {re.split(separators, one)[-1] for one in names}
    found = difflib.get_close_matches(name, sorted(names), n=3, cutoff=0)
    return f"; the nearest are {', '.join(found)}" if found else ""
