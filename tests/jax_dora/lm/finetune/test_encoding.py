"""Data files of every form, and what is said of those that have none."""

import gzip
import json

import datasets
import pyarrow
import pyarrow.parquet
import pytest
import transformers
from tokenizers import Tokenizer, decoders, models, normalizers, processors

from jax_dora.lm.finetune import tiny
from jax_dora.lm.finetune.encoding import Encoder
from jax_dora.lm.finetune.records import read_records
from jax_dora.lm.models.chat import ChatTemplate
from tests.jax_dora.lm.chat_templates import CHATML, TALK, THINKING, folder_of

END = 256
SUM = {"prompt": "ab", "completion": "c"}
RECORDS = [SUM, {"text": "de"}]


@pytest.fixture(scope="module")
def tokenizer():
    return tiny.byte_level_tokenizer()


@pytest.fixture(scope="module")
def encoder(tokenizer):
    return Encoder(tokenizer, [END], None)


def lines(records):
    return "".join(json.dumps(record) + "\n" for record in records)


def shown(encoder, example):
    """The text, and what of it is learned."""
    learned = [t for t, counts in zip(example.tokens, example.learned, strict=True) if counts]
    decode = encoder.tokenizer.decode
    return decode(example.tokens, skip_special_tokens=False), decode(
        learned, skip_special_tokens=False
    )


def test_prompts_and_texts(tmp_path, encoder):
    file = tmp_path / "x.jsonl"
    file.write_text(lines(RECORDS))
    examples = list(encoder.examples(read_records(file)))
    assert [shown(encoder, one) for one in examples] == [
        ("abc<|end|>", "c<|end|>"),
        ("de<|end|>", "de<|end|>"),
    ]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_every_file_has_the_same_records(tmp_path):
    def written(name, text):
        (tmp_path / name).write_bytes(text)
        return tmp_path / name

    table = pyarrow.Table.from_pylist(
        [{"prompt": "ab", "completion": "c", "text": None}, {"text": "de"}]
    )
    pyarrow.parquet.write_table(table, tmp_path / "x.parquet")
    datasets.Dataset(table).save_to_disk(tmp_path / "dataset")
    files = [
        written("plain.jsonl", lines(RECORDS).encode()),
        written("bom.jsonl", b"\xef\xbb\xbf" + lines(RECORDS).encode()),
        written("windows.jsonl", lines(RECORDS).replace("\n", "\r\n\r\n").encode()),
        written("list.json", json.dumps(RECORDS, indent=1).encode()),
        written("lines.csv", b'\xef\xbb\xbfprompt,completion,text\n"ab",c,\n,,de\n'),
        written("tabs.tsv.gz", gzip.compress(b"prompt\tcompletion\ttext\r\nab\tc\t\r\n\t\tde")),
        written("compressed.jsonl.gz", gzip.compress(lines(RECORDS).encode())),
        written("compressed.json", gzip.compress(json.dumps(RECORDS).encode())),
        written("bom.json", b"\xef\xbb\xbf" + json.dumps(RECORDS).encode()),
        tmp_path / "x.parquet",
        tmp_path / "dataset",
    ]
    for file in files:
        assert [one.fields for one in read_records(file)] == RECORDS, file


def test_a_table_s_messages_have_the_fields_that_were_given(tmp_path):
    records = [
        {"messages": [{"role": "user", "content": "a", "name": "x"}]},
        {"messages": [{"role": "assistant", "content": "b", "weight": 1}]},
    ]
    table = pyarrow.Table.from_pylist(records)
    pyarrow.parquet.write_table(table, tmp_path / "x.parquet")
    assert [one.fields for one in read_records(tmp_path / "x.parquet")] == records


def test_splits_are_named(tmp_path):
    data = datasets.Dataset.from_list(RECORDS)
    datasets.DatasetDict(train=data, test=data).save_to_disk(tmp_path / "both")
    with pytest.raises(ValueError, match=r"has the splits test, train; expected the folder of one"):
        list(read_records(tmp_path / "both"))
    assert len(list(read_records(tmp_path / "both" / "train"))) == 2


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "a"', "line 2 is not valid JSON"),
        ("prompt,completion", "line 2 is not valid JSON: .*; expected JSON Lines, a JSON list"),
        ('{"conversations": [{"from": "me"}]}', "line 2: a turn is from 'me'; expected one of hum"),
        ('{"prompt": "a"}', r'line 2: it has prompt \(str\); expected a list "messages"'),
        ('{"messages": []}', "line 2: it has messages, but the model has no chat template"),
        ('{"prompt": "a", "completion": 4}', r"line 2: it has .* completion \(int\); expected"),
        ('{"text": "\\ud800"}', "line 2: .*surrogates"),
        ('{"instruction": "a", "output": "b", "input": [1]}', 'line 2: "input" is a list'),
        ('{"text": "a", "text": "b"}', "line 2 is not valid JSON: text given twice"),
        ("[]", "line 2 is a list; expected a JSON object"),
        ("\udcff", "line 2 is not UTF-8: invalid start byte at byte 0"),
        ("[" * 100_000, "line 2 is not valid JSON"),
    ],
)
def test_bad_line(tmp_path, encoder, line, message):
    file = tmp_path / "data.jsonl"
    file.write_text('{"text": "good"}\n' + line, encoding="utf-8", errors="surrogateescape")
    with pytest.raises(ValueError, match=f"{file}, {message}"):
        list(encoder.examples(read_records(file)))


def test_bad_files(tmp_path):
    (tmp_path / "empty").write_text("\n\n")
    (tmp_path / "cut.parquet").write_bytes(b"PAR1 and no more")
    (tmp_path / "folder").mkdir()
    for name, message in (
        ("empty", "has no records"),
        ("cut.parquet", "is not a valid parquet file"),
        ("folder", "is a folder without state.json"),
    ):
        with pytest.raises(ValueError, match=f"{tmp_path / name} {message}"):
            list(read_records(tmp_path / name))


def spaced(normalizer, decoder, merges=()):
    """A tokenizer of single letters whose spaces are a letter, too."""
    letters = ["▁", *"abc:\x01", *map("".join, merges)]
    vocabulary = {letter: number for number, letter in enumerate(letters)}
    tokenizer = Tokenizer(models.BPE(vocabulary, list(merges)))
    underscores = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizer, underscores])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), *decoder])
    return tokenizer


@pytest.mark.parametrize("completion", ["b", " b", "  b"])
@pytest.mark.parametrize(
    "tokenizer",
    [
        spaced(normalizers.Prepend("▁"), [decoders.Strip(" ", 1, 0)]),  # as Llama 2's
        spaced(normalizers.Strip(left=True, right=False), []),
    ],
)
def test_the_spaces_between_pieces_are_those_of_the_data(tokenizer, completion):
    template = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}", {})
    encoder = Encoder(tokenizer, [0], template)
    [example] = encoder.examples([("here", {"prompt": "a:", "completion": completion})])
    assert tokenizer.decode(example.tokens[:-1]) == f"a:{completion}"
    talk = [{"role": "user", "content": "a:"}, {"role": "assistant", "content": completion}]
    [example] = encoder.examples([("here", {"messages": talk})])
    assert tokenizer.decode(example.tokens) == f"a:{completion}"


@pytest.mark.parametrize(("prompt", "completion"), [("c:a", "b c"), ("c: ", " ab")])
def test_a_completion_that_goes_on_with_the_prompt_s_last_token_gets_no_space(prompt, completion):
    merges = [("a", "b"), ("▁", "ab"), ("▁", "▁")]
    strip = [decoders.Strip(" ", 1, 0)]
    encoder = Encoder(spaced(normalizers.Prepend("▁"), strip, merges), [0], None)
    [example] = encoder.examples([("here", {"prompt": prompt, "completion": completion})])
    assert encoder.tokenizer.decode(example.tokens[:-1]) == prompt + completion


def test_alpaca(encoder):
    record = {"instruction": "Add.", "input": "1 2", "output": "3"}
    for given, told in (("1 2", "### Input:\n1 2\n\n"), ("", "")):
        [example] = encoder.examples([("here", record | {"input": given})])
        text, learned = shown(encoder, example)
        assert text.endswith(f"\n\n### Instruction:\nAdd.\n\n{told}### Response:\n3<|end|>")
        assert learned == "3<|end|>"


def with_ends(begin):
    """A tokenizer that puts `begin` before a text and </s> behind it."""
    tokenizer = tiny.byte_level_tokenizer()
    tokenizer.add_special_tokens(["<s>", "</s>", *begin])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{' '.join(begin)} $A </s>",
        pair=f"{' '.join(begin)} $A </s> $B </s>",
        special_tokens=[(name, tokenizer.token_to_id(name)) for name in {*begin, "</s>"}],
    )
    return tokenizer


@pytest.mark.parametrize("begin", [["<s>"], ["<m>", "<s>"]])
@pytest.mark.parametrize(
    ("record", "learned"),
    [
        ({"prompt": "a b", "completion": " c"}, " c</s>"),
        ({"prompt": "BEGINa b", "completion": " c</s>"}, " c</s>"),
        ({"prompt": "a b", "completion": " c<|end|>"}, " c<|end|>"),
        ({"prompt": "a b", "completion": ""}, "</s>"),
        ({"text": "a b"}, "a b</s>"),
        ({"text": "BEGINa b</s>"}, "a b</s>"),
        ({"text": ""}, "</s>"),
    ],
)
def test_texts_begin_and_end_once(begin, record, learned):
    """The ids of the pieces, by the tokenizer alone."""
    tokenizer = with_ends(begin)
    record = {name: text.replace("BEGIN", "".join(begin)) for name, text in record.items()}
    encoder = Encoder(tokenizer, [tokenizer.token_to_id("</s>"), END], None)
    [example] = encoder.examples([("here", record)])
    start = "".join(begin) + record.get("prompt", "").removeprefix("".join(begin))
    before, after = (
        tokenizer.encode(text, add_special_tokens=False).ids for text in (start, learned)
    )
    assert example.tokens == before + after
    assert example.learned == [False] * len(before) + [True] * len(after)


def test_tools_are_objects(tokenizer):
    encoder = Encoder(tokenizer, [END], ChatTemplate(CHATML, {}))
    with pytest.raises(ValueError, match=r'"tools" is .*; expected a list of objects'):
        list(encoder.examples([("here", {"messages": TALK, "tools": '[{"type": "function"}]'})]))


def test_replies_are_learned(tokenizer):
    encoder = Encoder(tokenizer, [END], ChatTemplate(CHATML, {}))
    talk = [one | {"weight": None} for one in TALK]  # as if it were not given
    [example] = encoder.examples([("here", {"messages": talk})])
    text, learned = shown(encoder, example)
    assert text == ChatTemplate(CHATML, {}).render(TALK)
    assert learned == "yes<|im_end|>\nno<|im_end|>\n"


@pytest.mark.parametrize("template", [CHATML, THINKING])
def test_a_completion_of_messages_is_learned_as_by_trl(template, tokenizer, tmp_path):
    """TRL learns what the template renders behind the prompt that it renders for a reply."""
    folder = folder_of(tmp_path, tokenizer, chat_template=template)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    encoder = Encoder(tokenizer, [END], ChatTemplate.of(folder))
    prompt, completion = TALK[:4], TALK[4:]
    options = {"tokenize": True, "return_dict": False}
    before = theirs.apply_chat_template(prompt, add_generation_prompt=True, **options)
    whole = theirs.apply_chat_template(TALK, **options)
    record = {"prompt": prompt, "completion": completion}
    [example] = encoder.examples([("here", record)])
    assert example.tokens == whole
    assert example.learned == [False] * len(before) + [True] * (len(whole) - len(before))
    weights = {2: 0, 4: 1}
    talk = [one | {"weight": weights.get(n)} for n, one in enumerate(TALK)]
    names = {"system": "system", "user": "human", "assistant": "gpt"}
    turns = [{"from": names[m["role"]], "value": m["content"], "weight": m["weight"]} for m in talk]
    forms = [{"messages": talk}, {"conversations": turns}, {"conversations": talk}]
    forms += [{"conversations": turns[1:], "system": turns[0]["value"]}]
    assert [one for form in forms for one in encoder.examples([("here", form)])] == [example] * 4


def test_fields_with_other_names(tokenizer):
    columns = {"instruction": "question", "output": "answer", "input": "context"}
    records = [{"question": "a", "answer": "b", "text": 1}, {"question": "c", "answer": "d"}]
    plain = [{"instruction": "a", "output": "b"}, {"instruction": "c", "output": "d"}]
    plain[0]["input"] = records[0]["context"] = "e"
    where = ["here", "there"]
    examples = Encoder(tokenizer, [END], None, columns).examples(zip(where, records, strict=True))
    expected = Encoder(tokenizer, [END], None).examples(zip(where, plain, strict=True))
    assert list(examples) == list(expected)
    with pytest.raises(ValueError, match=r"no record has a field 'context'; expected some of answ"):
        list(Encoder(tokenizer, [END], None, columns).examples([("there", records[1])]))
    with pytest.raises(ValueError, match=r"'promt' is no field of a record; expected some of mess"):
        Encoder(tokenizer, [END], None, {"promt": "question"})


@pytest.mark.parametrize(
    ("name", "contents", "message"),
    [
        ("x.csv", b"text,prompt\na,b\nc", "line 3 has 1 cells; expected the 2 of the header"),
        ("x.csv", b"text,text\na,b", "text given twice"),
        ("x.csv", b'text\n"a', "is not valid CSV in UTF-8 after line 2"),
        ("x.csv", b"text\n\xff", "is not valid CSV in UTF-8 after line"),
        ("x.csv", b"text\n", "has no records"),
        ("x.jsonl.gz", gzip.compress(b'{"text": 1}', mtime=0)[:-9], "is not a complete gzip file"),
    ],
)
def test_bad_tables(name, contents, message, tmp_path):
    (tmp_path / name).write_bytes(contents)
    with pytest.raises(ValueError, match=message):
        list(read_records(tmp_path / name))


def test_a_template_that_rewrites_replies_gives_one_text_each(tokenizer):
    encoder = Encoder(tokenizer, [END], ChatTemplate(THINKING, {"eos_token": tiny.END}))
    examples = list(encoder.examples([("here", {"messages": TALK})]))
    begin = "<system> S <|end|><user>hi<|end|><assistant>"
    assert [shown(encoder, one) for one in examples] == [
        (f"{begin}[thought]yes<|end|>", "[thought]yes<|end|>"),
        (
            f"{begin}yes<|end|><user>so?<|end|><assistant>[thought]no<|end|>",
            "[thought]no<|end|>",
        ),
    ]


@pytest.mark.parametrize(
    ("template", "messages", "message"),
    [
        ("{{ raise_exception('no system') }}", TALK, "here: the chat template failed: no system"),
        ("{{ messages[9].role }}", TALK, "here: the chat template failed: .*has no element 9"),
        ("{{ ''.__class__.__mro__ }}", TALK, "here: the chat template failed: .*unsafe"),
        (CHATML, [{"role": "user", "content": "a"}], 'here: no message has the role "assistant"'),
        (CHATML, [TALK[2] | {"weight": 0}], 'here: no message has the role "assistant" and a wei'),
        (CHATML, [{"content": "a"}], 'here: message 1 has no "role"'),
        (CHATML, [{"role": "user", "content": [1]}], r"here: message 1 has content '\[1\]'; exp"),
        ("{{ messages | length }}", TALK, "renders message 3 without the prompt"),
        (CHATML, [*TALK, {**TALK[-1], "weight": 2}], '"weight" 2; expected 1 or none'),
    ],
)
def test_bad_conversations(template, messages, message, tokenizer):
    encoder = Encoder(tokenizer, [END], ChatTemplate(template, {}))
    with pytest.raises(ValueError, match=message):
        list(encoder.examples([("here", {"messages": messages})]))


def test_contents_in_parts_are_joined(tokenizer):
    encoder = Encoder(tokenizer, [END], ChatTemplate(CHATML, {}))
    whole, parts = (
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": content}]
        for content in ("bcd", [{"type": "text", "text": "b"}, {"type": "text", "text": "cd"}])
    )
    one, other = encoder.examples([("x", {"messages": whole}), ("y", {"messages": parts})])
    assert (one.tokens, one.learned) == (other.tokens, other.learned)
