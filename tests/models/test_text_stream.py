"""Text that grows by tokens: whole characters, and strings that end it wherever tokens end."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from support.byte_tokenizer import ByteTokenizer
from support.search import examples

from cupyattn.models.generation.text import INCOMPLETE, TextStream

TEXTS = st.text(st.sampled_from("ab\nüé€𝄞 "), max_size=30)


def streamed(text: bytes, prompt: bytes = b"", stop=()):
    stream = TextStream(ByteTokenizer(), prompt, stop)
    pieces = [stream.push(token) for token in text]
    return [*pieces, stream.finish()], stream


@given(text=TEXTS, prompt=TEXTS)
@examples(134)
def test_pieces_are_whole_characters_and_make_the_text(text, prompt):
    pieces, stream = streamed(text.encode(), prompt.encode())
    assert "".join(pieces) == stream.text == text
    assert not any(INCOMPLETE in piece for piece in pieces)
    assert [len(piece) for piece in pieces if piece] == [1] * len(text), "as soon as it is whole"


@given(text=TEXTS, cut=st.integers(0, 90))
@examples(134)
def test_a_prompt_may_end_within_a_character(text, cut):
    """As one of ids may: the character belongs to what follows."""
    whole = text.encode()
    before = whole[:cut].decode(errors="ignore")
    pieces, stream = streamed(whole[cut:], whole[:cut])
    assert "".join(pieces) == stream.text == text[len(before) :]


@given(text=TEXTS, stop=st.lists(st.text(st.sampled_from("ab\nü€"), min_size=1, max_size=3)))
@examples(200)
def test_the_first_string_ends_it(text, stop):
    pieces, stream = streamed(text.encode(), stop=stop)
    found = [at for at in map(text.find, stop) if at >= 0]
    # What ends first, byte by byte: of two strings one may begin earlier and end later.
    for end in range(len(text) + 1):
        begun = [at for at in (text[:end].find(each) for each in stop) if at >= 0]
        if begun:
            assert "".join(pieces) == text[: min(begun)]
            break
    else:
        assert "".join(pieces) == text
    assert stream.stopped
    assert bool(found) == ("".join(pieces) != text)


@given(st.binary(max_size=40))
@examples(134)
def test_bytes_that_are_no_characters_come_as_a_decoder_writes_them(data):
    pieces, _ = streamed(data)
    assert "".join(pieces) == ByteTokenizer().decode(data)


def test_nothing_comes_behind_the_end():
    stream = TextStream(ByteTokenizer(), b"", ["."])
    assert [stream.push(token) for token in b"ab.c"] == ["a", "b", "", ""]
    assert stream.finish() == ""
    assert stream.text == "ab"


class Spaced:
    """Tokens are words, and decoding drops the space of the first, as SentencePiece's does."""

    def encode(self, text):
        raise NotImplementedError

    def decode(self, ids):
        return "".join(f" {number}" for number in ids)[1:]


def test_spaces_between_tokens_are_kept():
    stream = TextStream(Spaced(), [1, 2])
    assert [stream.push(token) for token in (3, 4)] == [" 3", " 4"]
    long = TextStream(Spaced(), range(100))
    assert "".join(long.push(token) for token in range(20)) == "".join(f" {i}" for i in range(20))
