"""Reads the folder of an adapter for the server: its arrays, and how it reads and writes text."""

import hashlib
import re
import weakref
from pathlib import Path

from dora_common.peft.folder import open_folder
from dora_common.peft.keys import parse
from dora_common.rules import listing
from jax_dora.bank import AdapterBank, HostAdapter
from jax_dora.lm.models.tokenizer import TextSettings, text_files

# The embedding and the output head, as every model that the server loads names them.
_TABLES = re.compile(r"(.*\.)?(embed_tokens|lm_head)")
# The largest file for text. The largest tokenizer.json of public models has half of it.
_TEXT_BYTES = 1 << 26


def read_arrays(bank: AdapterBank, folder: Path) -> HostAdapter:
    """Returns the arrays of an adapter, for the bank of a server.

    Raises:
      ValueError, NotImplementedError: the adapter has too large a rank, or something else than
        adapters of the projections in the layers; or the errors of `AdapterBank.read`.
    """
    with open_folder(folder, "np") as source:
        keys = {key: parse(key, source.adapter) for key in source.tensors}
        ranks = [source.tensors[key][1][0] for key, one in keys.items() if one.role == "lora_a"]
    if tables := [key for key, one in keys.items() if _TABLES.fullmatch(one.module)]:
        raise NotImplementedError(
            f"{folder} changes the embedding or the output head, which all adapters of a server "
            "share; expected adapters of the projections in the layers alone: train one without "
            f"them, or serve the model that jax-dora merge makes of it. They are:{listing(tables)}"
        )
    if ranks and max(ranks) > bank.max_rank:
        raise ValueError(
            f"{folder} has rank {max(ranks)}; expected at most {bank.max_rank}: start the server "
            f"with max_rank={max(ranks)} or more"
        )
    return bank.read(folder)


class AdapterTexts:
    """How adapters read and write text. Adapters with the same files for text share it."""

    def __init__(self, base: TextSettings) -> None:
        """
        Args:
          base: that of the base model, for adapters without such files.
        """
        self._base = base
        self._read: weakref.WeakValueDictionary[str, TextSettings] = weakref.WeakValueDictionary()

    def read(self, folder: Path) -> TextSettings:
        """Returns the settings of the base model with the adapter in a folder.

        Raises:
          ValueError: a file is invalid or too large.
        """
        digest = hashlib.sha256()
        files = text_files(folder)
        for file in files:
            contents = _contents(file)
            name = str(file.relative_to(folder))
            digest.update(f"{name} {len(contents)} ".encode() + contents)
        if not files:
            return self._base
        key = digest.hexdigest()
        if (texts := self._read.get(key)) is None:
            texts = self._base.with_adapter(folder)
            texts.template  # noqa: B018  reads it now, since the folder may change later
            self._read[key] = texts
        return texts


def _contents(file: Path) -> bytes:
    with file.open("rb") as stream:
        contents = stream.read(_TEXT_BYTES + 1)
    if len(contents) > _TEXT_BYTES:
        raise ValueError(f"{file} has more than {_TEXT_BYTES:,} bytes; expected at most that")
    return contents
