"""The text of an answer as its tokens come: whole letters only, and nothing of a stop string."""

from collections.abc import Sequence

from tokenizers import Tokenizer

# So many of the last tokens are decoded with each new one, and twice as many for a while: decoders
# look back. Only a text that is no letters, however long it becomes, is cut anywhere.
_WINDOW, _LONGEST = 16, 256
# What stands for the bytes of a letter that is not whole yet, of which there may be three.
_INCOMPLETE = "\ufffd"


class TextStream:
    """Turns tokens into text, one at a time.

    What `add` and `end` return, put together, is what the tokenizer makes of all tokens, up to the
    first stop string. Only where bytes that are no letter follow others, for which SentencePiece's
    decoder takes back the letters that those were, these stay as they were said.

    Attributes:
      stopped: whether a stop string has come; `add` says nothing any more.
    """

    def __init__(
        self, tokenizer: Tokenizer, stops: Sequence[str] = (), *, before: Sequence[int] = ()
    ) -> None:
        """
        Args:
          before: tokens that the text goes on from, none of whose own text is said: at a text's
            beginning some decoders take a space away.
        """
        self.stopped = False
        self._tokenizer = tokenizer
        self._stops = tuple(stops)
        self._window = list(before[-_WINDOW:])
        text = tokenizer.decode(self._window)
        self._said = _certain(text)  # of the window's text
        # Where in the window all was said.
        self._ends = [len(self._window)] if self._said == text else []
        self._held = ""  # what may begin a stop string

    def add(self, token: int) -> str:
        """Returns the text that is certain with this token."""
        self._window.append(token)
        text = self._tokenizer.decode(self._window)
        if not _certain(text).startswith(self._said):
            # Letters are taken back: what comes after them is a text of its own.
            start = self._ends[-1] if self._ends else len(self._window) - 1
            self._window, self._ends, self._said = self._window[start:], [], ""
            text = self._tokenizer.decode(self._window)
        certain = _certain(text)
        new = certain[len(self._said) :]
        self._said = certain
        if self._said == text:
            self._ends.append(len(self._window))
        self._shorten(is_whole=self._said == text)
        return self._before_stop(new)

    def _shorten(self, *, is_whole: bool) -> None:
        """Forgets the beginning of a long window, between two letters."""
        size = len(self._window)
        if size > _LONGEST:
            cut = size - _WINDOW
        elif is_whole and size > 2 * _WINDOW:
            cut = max((end for end in self._ends if end <= size - _WINDOW), default=0)
        else:
            return
        self._window = self._window[cut:]
        self._ends = [end - cut for end in self._ends if end > cut]
        self._said = _certain(self._tokenizer.decode(self._window))

    def end(self) -> str:
        """Returns the text that was held back."""
        if self.stopped:
            return ""
        new = self._tokenizer.decode(self._window)[len(self._said) :]
        self._window, self._said = [], ""
        text = self._before_stop(new)
        if not self.stopped:
            text, self._held = text + self._held, ""
        return text

    def _before_stop(self, new: str) -> str:
        if self.stopped:
            return ""
        text = self._held + new
        places = [place for stop in self._stops if (place := text.find(stop)) >= 0]
        if places:
            self.stopped, self._held = True, ""
            return text[: min(places)]
        held = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]


def _certain(text: str) -> str:
    return text[:-3] + text[-3:].rstrip(_INCOMPLETE)


def _overlap(text: str, stop: str) -> int:
    """Returns the length of the longest end of `text` that `stop` begins with."""
    most = min(len(text), len(stop) - 1)
    return next((n for n in range(most, 0, -1) if text.endswith(stop[:n])), 0)
