"""Lines of JSON to samples: what is learnt of them, and errors that name the line."""

from __future__ import annotations

import json

import pytest
from support.byte_tokenizer import ByteTokenizer

from cupyattn.models.training.batch import IGNORED
from cupyattn.models.training.data import Reader

BEGIN, END = 256, 257


class ChatTokenizer(ByteTokenizer):
    """Its template writes U:...; and A:...; - and refuses roles it does not know."""

    def apply_chat_template(self, messages, *, add_generation_prompt=True):
        if any(set(each) != {"role", "content"} for each in messages):
            raise ValueError("the chat template failed: a message has a role and a content")
        text = "".join(f"{each['role'][0].upper()}:{each['content']};" for each in messages)
        return text + ("A:" if add_generation_prompt else "")


class Forgetful(ChatTokenizer):
    """Drops what was thought before, as some templates do."""

    def apply_chat_template(self, messages, *, add_generation_prompt=True):
        written = super().apply_chat_template(messages[-2:], add_generation_prompt=False)
        return written + ("A:" if add_generation_prompt else "")


def reader(tokenizer=None, *, end=END, longest=100):
    return Reader(tokenizer or ChatTokenizer(BEGIN), end, longest)


def learnt(sample):
    """What is to be predicted, as text; # is the end."""
    ids = sample.labels[sample.labels != IGNORED].tolist()
    return "".join("#" if each == END else chr(each) for each in ids)


def test_a_text():
    (sample,) = reader().samples({"text": "abc"}, "here")
    assert sample.ids.tolist() == [BEGIN, *b"abc", END]
    assert sample.labels.tolist() == [*b"abc", END, IGNORED]


def test_a_prompt_carries_no_loss():
    given = {"prompt": "2+2=", "completion": "4!", "id": 7}
    (sample,) = reader().samples(given, "here")
    assert sample.ids.tolist() == [BEGIN, *b"2+2=4!", END]
    assert learnt(sample) == "4!#"
    # The prompt's last token predicts the completion's first.
    assert sample.labels[4] == ord("4") and (sample.labels[:4] == IGNORED).all()


def test_chats_learn_the_answers_alone():
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "yo"},
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "ok"},
    ]
    (sample,) = reader().samples({"messages": messages}, "here")
    assert bytes(sample.ids.tolist()) == b"U:hi;A:yo;U:?;A:ok;"  # the template begins and ends it
    assert learnt(sample) == "yo;ok;"


def test_long_texts_are_cut_and_prompts_are_not():
    samples = reader(longest=4, end=None).samples({"text": "abcdefg"}, "here")
    assert [learnt(sample) for sample in samples] == ["abc", "efg"]
    assert [len(sample.ids) for sample in samples] == [4, 4]
    (sample,) = reader(longest=4, end=None).samples({"text": "abcd"}, "here")  # one token is left
    assert len(sample.ids) == 4
    with pytest.raises(ValueError, match=r"line 3 has 10 tokens; a sample has at most 9, .*--max"):
        reader(longest=9).samples({"prompt": "abcdef", "completion": "gh"}, "line 3")


def test_a_file(tmp_path):
    file = tmp_path / "data.jsonl"
    file.write_text('\ufeff{"text": "a"}\n\n{"prompt": "b", "completion": "ü"}\r\n', "utf-8")
    samples = reader().read(file)
    assert [len(sample.ids) for sample in samples] == [3, 5]


MESSAGES = [{"role": "user", "content": "x"}]
ANSWERED = [*MESSAGES, {"role": "assistant", "content": "y"}]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": ', "no JSON .Expecting value"),
        (b"[" * 100_000, "it is nested more than 64 deep"),
        (b'{"text": NaN}', "no JSON .NaN is no JSON"),
        (b"[1]", r"it is \[1\]"),
        (b"{}", "it has nothing; each line is"),
        (b'{"prompt": "a"}', "it has 'prompt'; each line is"),
        (
            b'{"text": "a", "prompt": "b", "completion": "c"}',
            "it has 'text', 'prompt', 'completion'; .* those of one form alone",
        ),
        (b'{"prompt": "b", "completion": "c", "messages": []}', "'completion', 'messages'"),
        (b'{"text": ""}', "its text is ''; .*not empty"),
        (b'{"text": 3}', "its text is 3"),
        (b'{"prompt": "a", "completion": null}', "its completion is None"),
        (b'{"text": "\xff"}', "it is no UTF-8"),
        (rb'{"text": "\ud800"}', "it has characters, and no surrogates"),
        (b'{"messages": "hello"}', "its messages are 'hello'"),
        (b'{"messages": []}', "none of its messages is of the assistant"),
        (json.dumps({"messages": MESSAGES}).encode(), "none of its messages is of the assistant"),
        (b'{"messages": [{"role": "assistant"}]}', "its message 0 has the content None"),
        (
            b'{"messages": [{"role": "user", "content": ["x"]}, '
            b'{"role": "assistant", "content": "y"}]}',
            r"its message 0 has the content \['x'\]; .*write a text",
        ),
        (
            b'{"messages": [{"role": "user", "content": "x"}, {"role": 3, "content": "y"}, '
            b'{"role": "assistant", "content": "y"}]}',
            "its message 1 has the role 3",
        ),
        (
            b'{"messages": [{"role": "assistant", "content": "y", "name": "z"}]}',
            "the chat template failed",
        ),
    ],
)
def test_bad_lines_are_named(line, message, tmp_path):
    file = tmp_path / "data.jsonl"
    file.write_bytes(b'{"text": "fine"}\n' + line + b"\n")

    class Checking(ChatTokenizer):
        def encode(self, text, *, special_tokens=True):
            if any("\ud800" <= each <= "\udfff" for each in text):
                raise ValueError("text is odd; it has characters, and no surrogates; decode it")
            return super().encode(text, special_tokens=special_tokens)

    with pytest.raises(ValueError, match=f"line 2 of .*data.jsonl: .*{message}"):
        reader(Checking(BEGIN)).read(file)


def test_ids_beyond_the_vocabulary_name_their_line(tmp_path):
    file = tmp_path / "data.jsonl"
    file.write_text('{"text": "fine"}\n{"prompt": "a", "completion": "~"}\n')
    tokenizer = ByteTokenizer()
    assert len(Reader(tokenizer, None, 9, ord("~") + 1).read(file)) == 2
    with pytest.raises(ValueError, match=r"line 2 of .*data.jsonl has the token 126, as .*ByteTok"):
        Reader(tokenizer, None, 9, ord("~")).read(file)


def test_templates_that_change_what_they_wrote_are_refused():
    longer = [*ANSWERED, *ANSWERED]
    with pytest.raises(ValueError, match="line 1: the chat template writes what is before messa"):
        reader(Forgetful(BEGIN)).samples({"messages": longer}, "line 1")


def test_files_without_samples(tmp_path):
    file = tmp_path / "data.jsonl"
    file.write_text("\n\n")
    with pytest.raises(ValueError, match=r"data.jsonl has no samples; each line is"):
        reader().read(file)
    file.write_text('{"text": "a"}\n')
    with pytest.raises(ValueError, match=r"has no samples; its lines are single tokens"):
        reader(ByteTokenizer(), end=None).read(file)
    with pytest.raises(FileNotFoundError):
        reader().read(tmp_path / "other.jsonl")
