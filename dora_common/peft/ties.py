"""Parameters that share an array, and which of them PEFT takes apart."""

from collections.abc import Collection, Hashable, Mapping

from dora_common.peft.config import AdapterConfig


def tied_names(arrays: Mapping[str, Hashable]) -> list[list[str]]:
    """Returns the groups of two and more parameters that share an array, as an output head that is
    tied to the embedding does.

    Args:
      arrays: what identifies the array of every parameter, by the parameter's name.
    """
    groups: dict[Hashable, list[str]] = {}
    for name, array in arrays.items():
        groups.setdefault(array, []).append(name)
    return [names for names in groups.values() if len(names) > 1]


def untied_names(
    config: AdapterConfig, arrays: Mapping[str, Hashable], stored: Collection[str]
) -> list[str]:
    """Returns the parameters that need an array of their own once the `stored` ones are loaded:
    PEFT gives one to every module of modules_to_save, and leaves what it was tied to as it was,
    unless ensure_weight_tying is set."""
    untied = []
    for names in tied_names(arrays):
        saved = [name for name in names if name in stored and config.saves(name)]
        if not config.ensure_weight_tying:
            untied += saved[len(saved) == len(names) :]
    return untied
