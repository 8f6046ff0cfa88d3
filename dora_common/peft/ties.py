"""Parameters that share one array, as an output head that is tied to the embedding does.

PEFT gives every module of modules_to_save a copy of its own, and leaves what it was tied to as it
was, unless ensure_weight_tying is set.
"""

from collections.abc import Collection, Hashable, Iterable, Mapping

from dora_common.peft.config import AdapterConfig


def tied_names(arrays: Mapping[str, Hashable]) -> list[list[str]]:
    """The groups of two and more names that share an array.

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
    """The parameters that need an array of their own once the `stored` ones are loaded."""
    untied = []
    for names in tied_names(arrays):
        saved = [name for name in names if name in stored and config.saves(name)]
        if not config.ensure_weight_tying:
            untied += saved[len(saved) == len(names) :]
    return untied


def refuse_to_split(
    config: AdapterConfig, arrays: Mapping[str, Hashable], adapted: Iterable[str]
) -> None:
    """
    Args:
      adapted: the names of the adapted layers, whose own weights are frozen.

    Raises:
      ValueError: modules_to_save names one of two modules that share a weight.
    """
    frozen = {f"{name}.weight" for name in adapted}
    for names in tied_names(arrays):
        saved = [name for name in names if config.saves(name)]
        others = sorted(set(names) - set(saved) - frozen)
        if saved and others and not config.ensure_weight_tying:
            told = ", ".join(repr(one.rpartition(".")[0]) for one in [*saved, *others])
            raise ValueError(
                f"modules_to_save has {saved[0]}, which shares its array with {others[0]}; "
                f"expected all of {told} or none: PEFT gives a copy of its own to what is saved, "
                "and would leave the other as the base model has it"
            )
