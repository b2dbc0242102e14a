"""Conversations and answers: which tokens are trained, told by place; and what is said when a row will not do."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from data_chats import BARE, CHATML, DEFAULT_SYSTEM, DROPS_REASONING, HEADERS, TOOLS, turns

from skimp.core.batch import IGNORE
from skimp.core.errors import DataError, ModelError
from skimp.data import TextData, TokenStore, prepare
from skimp.data.kinds import RowReader, Rules

TALK = turns("Hi there", "Hello!  How are you?", "Fine; 12 + 30?", "It's 42.\n\n  Indented,\nnaïve 한국어 🙂")


@pytest.fixture
def with_template(smollm2_tokenizer: Path, tmp_path: Path) -> Callable[[str], Path]:
    """The real tokenizer with another template; the model's own file stays as it is."""

    def make(template: str | None) -> Path:
        folder = tmp_path / "tokenizer"
        folder.mkdir(exist_ok=True)
        (folder / "tokenizer.json").write_bytes((smollm2_tokenizer / "tokenizer.json").read_bytes())
        (folder / "tokenizer_config.json").write_bytes((smollm2_tokenizer / "tokenizer_config.json").read_bytes())
        if template is not None:
            (folder / "chat_template.jinja").write_text(template)
        return folder

    return make


@pytest.fixture
def rows(tmp_path: Path) -> Callable[[Sequence[Any]], str]:
    def write(records: Sequence[Any], name: str = "rows.jsonl") -> str:
        path = tmp_path / name
        path.write_text("".join(json.dumps(r) + "\n" for r in records))
        return str(path)

    return write


def documents(prepared: Any) -> list[tuple[list[int], list[bool]]]:
    """(ids, trained) of every document in the store."""
    store = TokenStore(Path(prepared.report.train.folder))
    offsets = store.column("documents")
    out = []
    for a, b in itertools.pairwise(offsets):
        mask = store.trained(int(a), int(b - a))
        out.append((store.read(int(a), int(b - a)).tolist(), [True] * int(b - a) if mask is None else mask.tolist()))
    return out


def pieces(folder: Path, *parts: tuple[str, bool]) -> tuple[list[int], list[bool]]:
    """The reference: parts tokenised one by one, each trained or not."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids: list[int] = []
    trained: list[bool] = []
    for text, learn in parts:
        part = tokenizer.encode(text, add_special_tokens=False).ids
        ids += part
        trained += [learn] * len(part)
    return ids, trained


def test_chatml_trains_each_answer_and_its_end_token_and_nothing_else(with_template: Callable, rows: Callable) -> None:
    folder = with_template(CHATML)
    found = documents(prepare(TextData(rows([{"messages": TALK}]), seq_len=128), folder))
    parts = []
    for turn in TALK:
        learn = turn["role"] == "assistant"
        parts += [
            (f"<|im_start|>{turn['role']}\n", False),
            (turn["content"], learn),
            ("<|im_end|>", learn),
            ("\n", False),
        ]
    assert found == [pieces(folder, *parts)]


def test_the_tokens_are_those_transformers_gives(with_template: Callable, rows: Callable) -> None:
    from transformers import PreTrainedTokenizerFast

    for template in (CHATML, HEADERS, BARE, DEFAULT_SYSTEM):
        folder = with_template(template)
        theirs = PreTrainedTokenizerFast.from_pretrained(folder)
        given = [TALK, turns("a", "b", system="s"), turns("One", "two", "three")]
        found = documents(prepare(TextData(rows([{"messages": m} for m in given]), seq_len=128), folder))
        wanted = [theirs.apply_chat_template(m, tokenize=True, return_dict=False) for m in given]
        if template in (CHATML, DEFAULT_SYSTEM):
            assert [ids for ids, _ in found] == wanted
        # Elsewhere the last token before an answer is that of the prompt alone, as it is when the model answers.
        assert [theirs.decode(ids) for ids, _ in found] == [theirs.decode(ids) for ids in wanted]
        asked = theirs.apply_chat_template(TALK[:3], tokenize=True, return_dict=False, add_generation_prompt=True)
        first = len(theirs.apply_chat_template(TALK[:1], tokenize=True, return_dict=False, add_generation_prompt=True))
        assert found[0][1].index(True) == first
        assert found[0][0][:first] == asked[:first] or template in (HEADERS, BARE)
        answers = [theirs.decode([i for i, t in zip(*d, strict=True) if t]) for d in found]
        ends = {CHATML: "<|im_end|>", DEFAULT_SYSTEM: "<|im_end|>", HEADERS: "<|eot|>", BARE: "\n"}[template]
        assert answers[1] == {BARE: " b\n"}.get(template, "b" + ends)
        assert answers[2] == {BARE: " two\n"}.get(template, "two" + ends)


def test_generation_tags_and_tool_calls(with_template: Callable, rows: Callable) -> None:
    """The trained tokens are those transformers marks by the tag in the template."""
    from transformers import PreTrainedTokenizerFast

    folder = with_template(TOOLS)
    theirs = PreTrainedTokenizerFast.from_pretrained(folder)
    call = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": "é"}'}}
    talk = [
        {"role": "user", "content": "1 + 2?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "3"},
        {"role": "assistant", "content": [{"type": "text", "text": "It is "}, {"type": "text", "text": "3."}]},
    ]
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    found = documents(prepare(TextData(rows([{"messages": talk, "tools": tools}]), seq_len=128), folder))
    call["function"]["arguments"] = {"a": 1, "b": "é"}
    talk[1]["content"], talk[3]["content"] = "", "It is 3."
    wanted = theirs.apply_chat_template(
        talk, tools=tools, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    assert found == [(wanted["input_ids"], [bool(x) for x in wanted["assistant_masks"]])]
    with pytest.raises(DataError, match="no place for tools"):
        prepare(TextData(rows([{"messages": talk, "tools": tools}], "t.jsonl"), seq_len=128), with_template(CHATML))


def test_prompt_and_completion_train_the_completion_and_the_end(smollm2_tokenizer: Path, rows: Callable) -> None:
    given = [("2 + 2 = ", "4"), ("foo", "bar baz"), ("", "alone"), ("def f():\n", "    return 1")]
    records = [{"prompt": p, "completion": c} for p, c in given]
    found = documents(prepare(TextData(rows(records), seq_len=64), smollm2_tokenizer))
    end = "<|im_end|>"
    assert found == [pieces(smollm2_tokenizer, (p, False), (c, True), (end, True)) for p, c in given]
    whole = documents(prepare(TextData(rows(records), seq_len=64, train_on="all"), smollm2_tokenizer))
    assert [ids for ids, _ in whole] == [ids for ids, _ in found]
    assert all(all(trained) for _, trained in whole)


def test_labels_are_the_trained_tokens_one_place_before_them(smollm2_tokenizer: Path, rows: Callable) -> None:
    """Packed and alone, stored and streamed: a label stands before each trained token that is not first."""
    records = [{"prompt": "the cat " * (1 + i % 3), "completion": f"sat {i}"} for i in range(9)]
    for packing, streaming in itertools.product((True, False), (True, False)):
        data = TextData(rows(records), seq_len=32, packing=packing, streaming=streaming, window_rows=4)
        stored = prepare(TextData(rows(records), seq_len=32), smollm2_tokenizer)
        reference = {tuple(ids): trained for ids, trained in documents(stored)}
        with (
            prepare(data, smollm2_tokenizer).stream(32, epochs=1)
            if streaming
            else _closing(prepare(data, smollm2_tokenizer).stream(32, epochs=1)) as stream
        ):
            batches = list(stream)
        seen = 0
        for batch in batches:
            for begin, end in itertools.pairwise(batch.documents[0]):
                ids, labels = batch.ids[0, begin:end].tolist(), batch.labels[0, begin:end].tolist()
                if tuple(ids) not in reference:  # padding
                    assert set(labels) == {IGNORE}
                    continue
                trained = reference[tuple(ids)]
                assert labels == [
                    ids[t + 1] if t + 1 < len(ids) and trained[t + 1] else IGNORE for t in range(len(ids))
                ]
                seen += 1
            assert batch.trained == int((batch.labels != IGNORE).sum())
        assert seen == 9


class _closing:
    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def __enter__(self) -> Any:
        return self.stream

    def __exit__(self, *_: object) -> None:
        self.stream.close()


def test_only_the_last_answer_and_turns_with_weight_nought(with_template: Callable, rows: Callable) -> None:
    folder = with_template(CHATML)
    talk = [dict(t) for t in TALK]
    last = documents(prepare(TextData(rows([{"messages": talk}]), seq_len=128, train_on="last"), folder))[0]
    talk[1]["weight"] = 0
    weighed = documents(prepare(TextData(rows([{"messages": talk}]), seq_len=128), folder))[0]
    assert last == weighed
    start = len(pieces(folder, ("<|im_start|>user\nHi there<|im_end|>\n<|im_start|>assistant\n", False))[0])
    assert not any(last[1][: start + 8])
    assert any(last[1])
    talk[1]["weight"] = 0.5
    with pytest.raises(DataError, match="turn 2: weight 0 or 1"):
        prepare(TextData(rows([{"messages": talk}]), seq_len=128), folder)


def test_a_template_that_changes_earlier_turns_is_refused_with_the_turn(
    with_template: Callable, rows: Callable
) -> None:
    folder = with_template(DROPS_REASONING)
    talk = turns("q1", "<think>\nhm\n</think>\nA1", "q2", "<think>\nso\n</think>\nA2")
    path = rows([{"messages": turns("q", "<think>\nx\n</think>\ny")}, {"messages": talk}])
    with pytest.raises(
        DataError, match=r"row 2, turn 2: an answer whose text does not depend on what comes after"
    ) as raised:
        prepare(TextData(path, seq_len=128), folder)
    assert "data.train_on=last" in str(raised.value)
    one, two = documents(prepare(TextData(path, seq_len=128, train_on="last"), folder))
    start = "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n<think>\n"
    assert one == pieces(folder, (start, False), ("x\n</think>\ny<|im_end|>", True), ("\n", False))
    tags = rows([{"messages": turns("q", "<b>bold</b>")}], "tags.jsonl")  # begins as the header's "<think>" does
    found = documents(prepare(TextData(tags, seq_len=128, train_on="last"), folder))
    header = "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"
    assert found == [pieces(folder, (header, False), ("<b>bold</b><|im_end|>", True), ("\n", False))]
    before = "<|im_start|>user\nq1<|im_end|>\n<|im_start|>assistant\nA1<|im_end|>\n<|im_start|>user\nq2<|im_end|>\n"
    before += "<|im_start|>assistant\n<think>\n"
    assert two == pieces(folder, (before, False), ("so\n</think>\nA2<|im_end|>", True), ("\n", False))


def test_no_template(with_template: Callable, rows: Callable, tmp_path: Path) -> None:
    folder = with_template(None)
    path = rows([{"messages": TALK}])
    for streaming in (False, True):
        with pytest.raises(ModelError, match=r"has none(.|\n)*data.template=FILE(.|\n)*data.template=chatml"):
            prepare(TextData(path, seq_len=128, streaming=streaming), folder)
    own = documents(prepare(TextData(path, seq_len=128, template="chatml"), folder))
    (tmp_path / "mine.jinja").write_text(CHATML)
    assert own == documents(prepare(TextData(path, seq_len=128, template=str(tmp_path / "mine.jinja")), folder))
    with pytest.raises(DataError, match=r"data\.template=nope"):
        prepare(TextData(path, seq_len=128, template="nope"), folder)
    (tmp_path / "mine.jinja").write_text("{% for %}")
    with pytest.raises(ModelError, match="no Jinja template"):
        prepare(TextData(path, seq_len=128, template=str(tmp_path / "mine.jinja")), folder)


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        (turns("a", "b")[::-1], ["turn 1", "role assistant", "first comes system or developer or user"]),
        ([*turns("a"), *turns("b", "c")], ["turn 2", "role user", "after user comes assistant"]),
        ([*turns("a", "b"), {"role": "tool", "content": "x"}], ["turn 3", "role tool", "calls a tool"]),
        ([*turns("a"), {"role": "narrator", "content": "x"}], ["turn 2", "'narrator'", "one of system"]),
        ([*turns("a"), {"role": "assistant", "content": 7}], ["turn 2", "content that is text", "int"]),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}], ["turn 1", "reads text only"]),
        ([], ["an empty list"]),
        ("hello", ["the conversation as JSON"]),
    ],
)
def test_rows_that_are_no_conversation_are_named_or_dropped(
    with_template: Callable, rows: Callable, messages: Any, words: list[str]
) -> None:
    path = rows([{"messages": TALK}, {"messages": messages}])
    with pytest.raises(DataError) as raised:
        prepare(TextData(path, seq_len=128), with_template(CHATML))
    for word in [f"{path}, row 2", *words]:
        assert word in str(raised.value)
    report = prepare(TextData(path, seq_len=128, bad_rows="drop"), with_template(CHATML)).report.train
    assert sum(report.dropped.values()) == 1
    assert report.packing.documents_in == 1


def test_other_names_and_forms_of_conversations(with_template: Callable, rows: Callable) -> None:
    folder = with_template(CHATML)
    wanted = documents(prepare(TextData(rows([{"messages": TALK}]), seq_len=128), folder))
    said = [{"from": {"user": "human", "assistant": "gpt"}[t["role"]], "value": t["content"]} for t in TALK]
    from skimp.data.kinds import Fields

    for record, fields in (
        ({"conversations": said}, Fields(messages="conversations")),
        ({"messages": json.dumps(TALK)}, Fields()),
        ({"messages": [{**t, "name": None} for t in TALK], "tools": None}, Fields()),
    ):
        assert documents(prepare(TextData(rows([record]), seq_len=128, fields=fields), folder)) == wanted
    parted = [{"prompt": TALK[:3], "completion": TALK[3:]}]
    last = documents(prepare(TextData(rows([{"messages": TALK}]), seq_len=128, train_on="last"), folder))
    assert documents(prepare(TextData(rows(parted), seq_len=128), folder)) == last


def test_b09_a_prompt_as_long_as_a_row_is_dropped_and_counted(smollm2_tokenizer: Path, rows: Callable) -> None:
    long, short = {"prompt": "cat " * 60, "completion": "x"}, {"prompt": "a", "completion": "b"}
    for streaming in (False, True):
        data = TextData(rows([long, short, long]), seq_len=16, streaming=streaming)
        prepared = prepare(data, smollm2_tokenizer)
        with _closing(prepared.stream(16, epochs=1)) as stream:
            batches = list(stream)
            if streaming:
                assert stream.total().untrained_documents == 2
        assert [b.trained for b in batches] == [2]
        if not streaming:
            packing = prepared.report.train.packing
            assert packing.untrained_documents == 2
            assert packing.tokens_in == packing.tokens + packing.untrained_tokens
            assert "2 rows dropped" in "\n".join(prepared.report.lines())
        with (
            pytest.raises(DataError, match="nothing is left to train on"),
            _closing(
                prepare(TextData(rows([long]), seq_len=16, streaming=streaming), smollm2_tokenizer).stream(16)
            ) as s,
        ):
            next(s)


def test_rows_without_an_answer_are_dropped_and_counted(with_template: Callable, rows: Callable) -> None:
    folder = with_template(CHATML)
    records = [{"messages": turns("only a question")}, {"messages": TALK}]
    assert prepare(TextData(rows(records), seq_len=128), folder).report.train.dropped == {
        "empty": 0,
        "no assistant turn to train on": 1,
    }
    with pytest.raises(DataError, match="1 no assistant turn to train on"):
        prepare(TextData(rows(records[:1]), seq_len=128), folder)
    records = [{"prompt": "q", "completion": " "}, {"prompt": "q", "completion": "a"}]
    assert prepare(TextData(rows(records), seq_len=128), folder).report.train.dropped["completion empty"] == 1


def test_the_store_follows_template_format_and_fields(with_template: Callable, rows: Callable) -> None:
    path = rows([{"messages": TALK, "prompt": "p", "completion": "c", "text": "t"}])
    folders = []
    for template, keys in (
        (CHATML, {}),
        (HEADERS, {}),
        (CHATML, {"format": "prompt"}),
        (CHATML, {"format": "text"}),
        (CHATML, {"field": "prompt"}),
        (CHATML, {"train_on": "all"}),
        (CHATML, {"template": "chatml"}),
    ):
        data = TextData(path, seq_len=128, **keys)
        folders.append(prepare(data, with_template(template)).report.train.folder)
        assert prepare(data, with_template(template)).report.train.reused
    assert len(set(folders)) == len(folders)


def test_a_begin_token_comes_once(with_template: Callable, rows: Callable) -> None:
    """The tokenizer puts one before a text; a template that prints it gets no second one, and none is trained."""
    from tokenizers import Tokenizer, processors

    folder = with_template(HEADERS)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    begin = tokenizer.token_to_id("<|im_start|>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", begin)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    for record in ({"messages": TALK}, {"prompt": "2 + 2 = ", "completion": "4"}, {"text": "a text"}):
        ids, trained = documents(prepare(TextData(rows([record]), seq_len=128), folder))[0]
        assert ids[0] == begin
        assert ids.count(begin) == 1
        assert trained[0] == ("text" in record)  # never a label: nothing comes before it


def test_a_tokenizer_that_puts_a_blank_before_each_text_is_not_cut(tmp_path: Path, rows: Callable) -> None:
    """SentencePiece style: answers tokenised apart would begin with a blank that is not there."""
    from tokenizers import SentencePieceBPETokenizer

    bpe = SentencePieceBPETokenizer()
    bpe.train_from_iterator(
        ["say it : the cat sat on a mat"] * 3, vocab_size=60, special_tokens=["</s>"], show_progress=False
    )
    folder = tmp_path / "sp"
    folder.mkdir()
    bpe.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    given = [("say it:", "the cat"), ("say", " it"), ("a ", "mat")]
    records = [{"prompt": p, "completion": c} for p, c in given]
    found = documents(prepare(TextData(rows(records), seq_len=64), folder))
    for (ids, trained), (prompt, answer) in zip(found, given, strict=True):
        assert ids[:-1] == bpe.encode(prompt + answer).ids
        assert trained[-1]
        learnt = [i for i, t in zip(ids[:-1], trained, strict=False) if t]
        # A blank at the boundary belongs to the token after it, whichever side it is on.
        assert bpe.decode(learnt).strip() == answer.strip()
        assert not any(trained[: len(bpe.encode(prompt.strip()).ids) - 1])


def test_tools_of_a_prompt_of_turns_are_read_from_files_with_columns_too() -> None:
    """parquet gives the columns it is asked for; jsonl gives all: the same rows must give the same tokens."""
    there, chat = ["prompt", "completion", "tools", "other"], cast(Any, None)
    for kind, read in (("prompt", ["prompt", "completion", "tools"]), ("text", [])):
        assert RowReader(kind, Rules(), chat).columns(there) == read
