"""Reads the values of a command's flags from a YAML file."""

import argparse
import difflib
from pathlib import Path
from typing import Any

from dora_common.fields import reject_duplicate_fields


def read_settings(file: Path, command: argparse.ArgumentParser) -> dict[str, Any]:
    """Returns values by the `dest` of the flags that they are for.

    The file is a mapping of flags without their dashes, such as "learning-rate" or "learning_rate",
    or of their `dest`. A null leaves a flag at its default.

    Raises:
      ValueError, OSError: the file cannot be read, or has an unknown name or a wrong value.
      ImportError: PyYAML is not installed.
    """
    try:
        import yaml
    except ImportError as error:
        raise ImportError("--settings needs PyYAML: pip install pyyaml") from error
    try:
        loader = yaml.SafeLoader(file.read_text("utf-8"))
        node = loader.get_single_node()
        if not isinstance(node, yaml.MappingNode):
            raise ValueError("expected a mapping, such as learning-rate: 1e-4")
        # loader.construct_mapping would keep the last of several equal names.
        pairs = [
            (str(key.value), loader.construct_object(value, deep=True)) for key, value in node.value
        ]
        values = reject_duplicate_fields(pairs)
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(f"--settings {file}: {error}") from error
    actions = {action.dest: action for action in command._actions}
    for action in [*actions.values()]:
        actions |= {option.lstrip("-"): action for option in action.option_strings}
    for name in ("help", "h", "settings"):
        del actions[name]
    found = {}
    for name, value in values.items():
        action = actions.get(name) or actions.get(name.replace("_", "-"))
        if action is None:
            near = difflib.get_close_matches(name, actions, 1) or ["another name"]
            raise ValueError(f"--settings {file}: {name} is unknown; did you mean {near[0]}?")
        if action.dest in found:
            raise ValueError(f"--settings {file}: {name} is given twice; expected one value")
        if value is not None:
            try:
                found[action.dest] = _value(action, value)
            except (ValueError, argparse.ArgumentTypeError) as error:
                raise ValueError(f"--settings {file}: {name}: {error}") from error
    return found


def _value(action: argparse.Action, value: Any) -> Any:
    """Returns a value as the flag would store it. The dataclass of settings checks it."""
    if action.nargs == 0 and not isinstance(value, bool):
        raise ValueError(f"it is {value!r}; expected true or false")
    if isinstance(action, argparse._AppendAction):  # of which "extend" is one, too
        values = map(str, value if isinstance(value, list) else [value])
        return [action.type(one) if callable(action.type) else one for one in values]
    # YAML reads 1e-4 as a text.
    return action.type(value) if isinstance(value, str) and callable(action.type) else value
