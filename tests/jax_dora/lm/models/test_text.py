"""Text as its tokens come: nothing lost, nothing doubled, nothing of a stop string."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from jax_dora.lm.finetune.tiny import byte_level_tokenizer
from jax_dora.lm.models.text import TextStream


def byte_fallback_tokenizer():
    """As Llama 2's: words with a mark for their space, and bytes for what is no word."""
    words = {"▁a": 256, "b": 257, "▁": 258}
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)} | words
    tokenizer = Tokenizer(models.BPE(vocab, [], byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    return tokenizer


# The characters that stand for bytes in byte-level tokens.
PRINTED = [*range(33, 127), *range(161, 173), *range(174, 256)]
OTHERS = [byte for byte in range(256) if byte not in PRINTED]
BYTES = {byte: chr(byte) for byte in PRINTED} | {b: chr(256 + n) for n, b in enumerate(OTHERS)}
TOKENIZERS = {"bytes": byte_level_tokenizer(), "fallback": byte_fallback_tokenizer()}


def as_ids(name, text):
    """Returns the tokens of single bytes; that of a word for b."""
    if name == "fallback":
        return [257 if byte == ord("b") else byte for byte in text]
    return [TOKENIZERS["bytes"].token_to_id(BYTES[byte]) for byte in text]


def said(tokenizer, tokens, stops=()):
    stream = TextStream(tokenizer, stops)
    pieces = [stream.add(token) for token in tokens]
    return [*pieces, stream.end()], stream.stopped


@pytest.mark.parametrize("name", TOKENIZERS)
@given(text=st.text(alphabet="aäß中😀 \n", max_size=60))
@pytest.mark.ci
def test_text_comes_whole(name, text):
    tokenizer = TOKENIZERS[name]
    if name == "bytes":
        tokens = tokenizer.encode(text).ids
    else:
        tokens = [256 if one == "a" else byte for one in text for byte in one.encode()]
        tokens = [258, *tokens]
    pieces, _ = said(tokenizer, tokens)
    assert "".join(pieces) == tokenizer.decode(tokens)
    assert not any("\ufffd" in piece for piece in pieces)


@given(tokens=st.lists(st.integers(0, 255), max_size=300))
@pytest.mark.ci
def test_bytes_that_are_no_letters_come_too(tokens):
    tokenizer = TOKENIZERS["bytes"]
    pieces, _ = said(tokenizer, tokens)
    assert "".join(pieces) == tokenizer.decode(tokens)


@given(tokens=st.lists(st.sampled_from([0x0A, 0xC3, 0xA4, 0xF0, 0xB7, 256, 257]), max_size=80))
def test_no_word_is_lost_behind_bytes_that_are_no_letters(tokens):
    """Which make the decoder take back the line's end before them."""
    tokenizer = TOKENIZERS["fallback"]
    pieces, _ = said(tokenizer, tokens)
    words = [
        [one for one in text if one in "ab"] for text in ("".join(pieces), tokenizer.decode(tokens))
    ]
    assert words[0] == words[1]


@pytest.mark.parametrize(("before", "text"), [((), "a b"), ((256, 257), " a b")])
def test_the_space_after_what_a_text_goes_on_from_is_said(before, text):
    """Which the decoder takes away where a text begins."""
    stream = TextStream(TOKENIZERS["fallback"], before=before)
    assert "".join([*map(stream.add, (256, 258, 257)), stream.end()]) == text


@given(
    text=st.text(alphabet="abc", max_size=40),
    stops=st.lists(st.text(alphabet="abc", min_size=1, max_size=4), max_size=3),
    least=st.integers(0, 9),
)
def test_it_ends_before_the_first_stop_string(text, stops, least):
    """Of those that are complete after the `least` tokens that no stop string ends."""
    tokenizer = TOKENIZERS["bytes"]
    stream = TextStream(tokenizer, stops, least=least)
    found = ""
    places = [
        (start + len(stop), start)
        for stop in stops
        for start in range(len(text))
        if text.startswith(stop, start) and start + len(stop) > least
    ]
    ends = [end for end, _ in places]
    for number, token in enumerate(tokenizer.encode(text).ids, 1):
        found += stream.add(token)
        assert text.startswith(found)
        assert stream.stopped == bool(ends and min(ends) <= number)
        if stream.stopped:
            break
    found += stream.end()
    begins = [start for end, start in places if end == min(ends)]
    assert found == (text[: min(begins)] if begins else text)


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize(
    ("before", "tokens", "text"),
    [
        ("b\ufffd".encode(), b"bb", "bb"),
        ("b\ufffd\ufffd".encode(), b"b", "b"),
        ("b\ufffdb".encode(), "中b".encode(), "中b"),
        (b"b\xe4", b"\xb8\xadb", "中b"),
        (b"b\xe4", b"bb", "bb"),
        (b"b\xe4", b"", ""),
        ("b\ufffd".encode(), b"b\xe4", "b\ufffd"),
    ],
)
def test_the_end_of_what_a_text_goes_on_from_is_not_said_again(name, before, tokens, text):
    """It may be a part of a character, which the tokens complete or not."""
    tokenizer = TOKENIZERS[name]
    stream = TextStream(tokenizer, before=as_ids(name, before))
    assert "".join([*map(stream.add, as_ids(name, tokens)), stream.end()]) == text


def test_a_stop_string_is_not_found_in_what_a_text_goes_on_from():
    before = as_ids("bytes", "b\ufffd".encode())
    stream = TextStream(TOKENIZERS["bytes"], ["\ufffd"], before=before)
    assert "".join([*map(stream.add, as_ids("bytes", b"xy")), stream.end()]) == "xy"
    assert not stream.stopped


def test_a_letter_waits_for_its_last_byte():
    tokens = list("😀".encode())
    byte_of = {byte: TOKENIZERS["bytes"].encode("😀").ids[n] for n, byte in enumerate(tokens)}
    pieces, _ = said(TOKENIZERS["bytes"], [byte_of[one] for one in tokens])
    assert pieces == ["", "", "", "😀", ""]


def test_each_piece_is_said_at_once():
    pieces, _ = said(TOKENIZERS["bytes"], TOKENIZERS["bytes"].encode("a" * 100).ids)
    assert pieces == ["a"] * 100 + [""]
