"""Decodes generated tokens to text as they arrive."""

from collections.abc import Sequence

from tokenizers import Tokenizer

# Decoders look back, so each new token is decoded together with the last `_WINDOW` tokens. The
# window grows to 2 * _WINDOW before it is shortened between two whole characters. If there is no
# such place, because the bytes are not valid UTF-8, it grows to `_LONGEST` and is cut anywhere.
_WINDOW, _LONGEST = 16, 256
# Tokenizers decode the bytes of an incomplete character to this; there can be up to three of them.
_INCOMPLETE = "\ufffd"


class TextStream:
    """Decodes tokens to text, one at a time.

    The texts returned by `add` and `end` together are the text that the tokenizer decodes from all
    tokens, up to the first stop string. The stream never returns a part of a character or of a stop
    string. There is one exception: SentencePiece's decoder replaces characters it has decoded
    before if invalid bytes follow. Characters that were returned already stay as they are, where
    `tokenizers.decoders.DecodeStream` raises an error; it also returns no incomplete rest.

    Attributes:
      stopped: whether a stop string was found; `add` then returns nothing more.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: Sequence[str] = (),
        *,
        before: Sequence[int] = (),
        least: int = 0,
    ) -> None:
        """
        Args:
          tokenizer: decodes the tokens.
          stops: the stop strings.
          before: tokens that the text continues. Their own text is not returned. They matter since
            some decoders remove a space at the beginning of a text.
          least: the number of tokens whose text no stop string ends.
        """
        self.stopped = False
        self._least = least
        self._tokenizer = tokenizer
        self._stops = tuple(stops)
        self._window = list(before[-_WINDOW:])
        text = tokenizer.decode(self._window)
        self._emitted = _complete_part(text)  # the part of the window's text that was emitted
        # What follows in the text is part of `before`, unless a token completes a character there.
        self._of_before = text[len(self._emitted) :]
        # Lengths of prefixes of the window that ended with a complete character.
        self._boundaries = [len(self._window)] if self._emitted == text else []
        self._withheld = ""  # text that may be the beginning of a stop string

    def add(self, token: int) -> str:
        """Returns the text that is complete with this token."""
        self._least -= 1
        self._window.append(token)
        text = self._tokenizer.decode(self._window)
        if not _complete_part(text).startswith(self._emitted):
            # The decoder has changed text that was emitted before. Start over after that text.
            start = self._boundaries[-1] if self._boundaries else len(self._window) - 1
            self._window, self._boundaries, self._emitted = self._window[start:], [], ""
            self._of_before = ""
            text = self._tokenizer.decode(self._window)
        complete = _complete_part(text)
        new = complete[len(self._emitted) :]
        self._emitted = complete
        if self._emitted == text:
            self._boundaries.append(len(self._window))
        self._shorten_window(is_complete=self._emitted == text)
        return self._cut_at_stop(self._without_before(new))

    def _without_before(self, new: str) -> str:
        """Returns the text without its beginning that belongs to `before`."""
        if new:
            new, self._of_before = new.removeprefix(self._of_before), ""
        return new

    def _shorten_window(self, *, is_complete: bool) -> None:
        """Removes the beginning of a long window, at a boundary between two characters."""
        size = len(self._window)
        if size > _LONGEST:
            cut = size - _WINDOW
        elif is_complete and size > 2 * _WINDOW:
            cut = max((end for end in self._boundaries if end <= size - _WINDOW), default=0)
        else:
            return
        self._window = self._window[cut:]
        self._boundaries = [end - cut for end in self._boundaries if end > cut]
        self._emitted = _complete_part(self._tokenizer.decode(self._window))

    def end(self) -> str:
        """Returns the remaining text, after the last token."""
        if self.stopped:
            return ""
        new = self._tokenizer.decode(self._window)[len(self._emitted) :]
        self._window, self._emitted = [], ""
        text = self._cut_at_stop(self._without_before(new))
        if not self.stopped:
            text, self._withheld = text + self._withheld, ""
        return text

    def _cut_at_stop(self, new: str) -> str:
        """Returns the text up to a stop string, or up to what may become one."""
        if self.stopped:
            return ""
        text, old = self._withheld + new, len(self._withheld)
        # A stop string that ends in the withheld text was not to stop there.
        places = [text.find(stop, max(0, old - len(stop) + 1)) for stop in self._stops]
        starts = [start for start in places if start >= 0 > self._least]
        if starts:
            self.stopped, self._withheld = True, ""
            return text[: min(starts)]
        length = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._withheld = text[len(text) - length :]
        return text[: len(text) - length]


def _complete_part(text: str) -> str:
    """Returns the text without an incomplete character at its end."""
    return text[:-3] + text[-3:].rstrip(_INCOMPLETE)


def _overlap(text: str, stop: str) -> int:
    """Returns the length of the longest suffix of `text` that is a proper prefix of `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
