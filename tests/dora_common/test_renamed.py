"""Names that the packages have had say what to use instead."""

import importlib

import pytest

from dora_common.renamed import INSTEAD


@pytest.mark.parametrize(
    ("module", "name"), [(m, n) for m, names in INSTEAD.items() for n in names]
)
def test_an_old_name_says_what_to_use(module, name):
    with pytest.raises(AttributeError, match=rf"{name}.* any more; use .*CHANGELOG"):
        getattr(importlib.import_module(module), name)


@pytest.mark.parametrize("module", INSTEAD)
def test_another_name_is_plainly_absent(module):
    with pytest.raises(AttributeError, match=r"has no attribute 'nonsense'$"):
        _ = importlib.import_module(module).nonsense
