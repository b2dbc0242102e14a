"""The fine-tuning tasks: parts that share nothing, the same bytes each time, right answers that are right."""

from __future__ import annotations

import ast
import re
from decimal import Decimal
from itertools import islice
from pathlib import Path

import pytest

from skimp.bench import library, maths, tasks
from skimp.bench.scorers import exact, final_number, number
from skimp.bench.tasks import PARTS, Item, Sizes
from skimp.bench.text import parsed_files

SIZES = Sizes(120, 15, 30, 20)


def test_parts_of_word_problems_share_no_pair_of_numbers() -> None:
    pairs = {}
    for part in PARTS:
        drawn = list(islice(maths.problems(part, 20, 2, 0), 300))
        assert drawn == list(islice(maths.problems(part, 20, 2, 0), 300)), "the same seed, the same problems"
        pairs[part] = {sum_ for _, answer in drawn for sum_ in re.findall(r"\d+ [+-] \d+", answer)}
        assert len(pairs[part]) > 20
    assert not pairs["train"] & pairs["test"]
    assert not pairs["train"] & pairs["dev"]
    assert not pairs["dev"] & pairs["test"]


def test_the_working_of_a_word_problem_is_right_and_its_numbers_are_those_of_the_story() -> None:
    lengths = set()
    for question, answer in islice(maths.problems("train", 20, 2, 1), 300):
        *working, last = answer.strip().split("\n")
        have = int(re.findall(r"\d+", question)[0])
        for line, told in zip(working, re.findall(r"\d+", question)[1:], strict=True):
            left, result = line.split(" = ")
            first, sign, second = left.split()
            assert int(first) == have
            assert second == told
            have = have + int(second) if sign == "+" else have - int(second)
            assert 0 <= int(result) == have <= 20
        assert last == f"#### {have}"
        lengths.add(len(working))
    assert lengths == {1, 2}


def test_stories_of_the_pre_training_hold_training_pairs_alone_and_no_answer() -> None:
    told = [line for text in maths.stories(20, 2, 200, 1) for line in text.split("\n")]
    assert len(told) == 200
    tested = {sum_ for _, a in islice(maths.problems("test", 20, 2, 0), 300) for sum_ in re.findall(r"\d+ [+-] \d+", a)}
    for line in told:
        assert re.fullmatch(r"\w+ has \d+ .*: (\d+ [+-] \d+ = \d+(, )?){1,2}\.", line), line
        assert not set(re.findall(r"\d+ [+-] \d+", line.partition(": ")[2])) & tested


def test_bare_sums_are_all_there_and_right() -> None:
    both = [line.removeprefix("Sums: ") for text in maths.facts(6, 2, 0) for line in text.split("\n")]
    lines = both[::2]
    assert both[1::2] == [f"#### {line.split()[-1]}" for line in lines]
    assert len(lines) == 2 * 2 * sum(range(1, 8))
    for line in lines:
        a, sign, b, _, c = line.split()
        assert int(a) + int(b) * (1 if sign == "+" else -1) == int(c)
    assert lines.count("2 + 3 = 5") == 2


def test_code_pairs_are_real_lines_and_a_module_is_in_one_part(some_library: None) -> None:
    pairs = library.completions()
    assert len(pairs) == len({prompt for _, prompt, _ in pairs}) > 300
    sources = {relative.parts[0].removesuffix(".py"): "" for relative, _, _ in library.parsed_files()}
    for relative, source, _ in library.parsed_files():
        sources[relative.parts[0].removesuffix(".py")] += source
    for part, prompt, answer in pairs[::40]:
        line = prompt.split("\n")[-1].strip() + answer
        inside = {module for module, source in sources.items() if line in source}
        assert part in {maths.part_of(module) for module in inside}
        ast.parse(line)


def test_pre_training_reads_no_source_of_modules_that_are_asked_about_later(some_library: None) -> None:
    text = set(library.code(10**9))
    assert text
    for relative, source, _ in library.parsed_files():
        assert (source in text) == (maths.part_of(relative.parts[0].removesuffix(".py")) == "train")


def test_questions_are_sentences_of_the_module_they_name(some_library: None) -> None:
    asked = library.questions()
    assert len({prompt for _, prompt, _ in asked}) == len(asked) > 300
    assert {answer.strip() for *_, answer in asked} <= set(library.MODULES)
    per = [sum(answer.strip() == module for *_, answer in asked) for module in library.MODULES]
    assert max(per) <= library.EACH
    whole: dict[str, str] = {}
    for relative, source, _ in parsed_files(library.MODULES):
        whole[relative.parts[0].removesuffix(".py")] = whole.get(relative.parts[0], "") + source
    word = re.compile(r"Sentence: (\S+)")
    for _, prompt, answer in asked[::50]:
        assert word.findall(prompt)[0] in whole[answer.strip()]


def test_items_are_written_once_to_the_same_bytes_and_parts_share_no_prompt(some_library: None, tmp_path: Path) -> None:
    digest = tasks.write(tmp_path / "a", SIZES)
    assert tasks.write(tmp_path / "b", SIZES) == digest == tasks.write(tmp_path / "a", SIZES)
    assert tasks.write(tmp_path / "c", Sizes(119, 15, 30, 20)) != digest
    parts = {part: tasks.read(tmp_path / "a" / f"{part}.jsonl") for part in PARTS}
    prompts = [item.prompt for found in parts.values() for item in found]
    assert len(set(prompts)) == len(prompts)
    assert tasks.facts_of(tmp_path / "a")["test"] == {"maths": 30, "code": 30, "docs": 30}
    assert all(item.completion.startswith(" ") for item in parts["train"])


def test_right_answers_are_marked_right_and_others_wrong(some_library: None) -> None:
    items = tasks.items("test", SIZES)
    assert tasks.marked(items, [item.completion for item in items]) == dict.fromkeys(tasks.MARKS, (30, 30))
    assert tasks.marked(items, [""] * 90) == dict.fromkeys(tasks.MARKS, (0, 30))
    assert tasks.marked(items[:1], [tasks.final(items[0])])["maths"] == (1, 1), "the working is no part of the mark"


def test_the_floor_is_what_the_most_frequent_answer_of_training_reaches(tmp_path: Path) -> None:
    def of(task: str, answers: list[str]) -> list[Item]:
        return [Item(task, f"{task} {i}", answer) for i, answer in enumerate(answers)]

    train = [*of("maths", [" 1 + 2 = 3\n#### 3", " 2 + 1 = 3\n#### 3", "x\n#### 4"]), *of("code", [" a", " a", " b"])]
    test = [*of("maths", ["#### 3", "#### 5"]), *of("code", [" a", " a", " a", " b"]), *of("docs", [" m"])]
    for part, items in (("train", [*train, *of("docs", [" n"])]), ("test", test)):
        lines = [f'{{"task": "{i.task}", "prompt": "p", "completion": {i.completion!r}}}' for i in items]
        (tmp_path / f"{part}.jsonl").write_text("\n".join(lines).replace("'", '"'))
    assert tasks.floors(tmp_path) == {"maths": 0.5, "code": 0.75, "docs": 0.0}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (" 3 + 4 = 7\n#### 7", "7"),
        ("#### 1,234,567.50 coins", "1234567.5"),
        ("it is 4, no, 5", "5"),
        ("#### -12", "-12"),
        ("#### 7\nQuestion: 9", "7"),
        ("#### 1\n#### 2", "2"),
        ("3 + 4 = 7 ####", None),
        ("none", None),
        ("007", "7"),
    ],
)
def test_the_final_number_of_a_text(text: str, value: str | None) -> None:
    assert final_number(text) == (None if value is None else Decimal(value))


def test_marks() -> None:
    assert number("so #### 1,000", " 400 + 600 = 1000\n#### 1000.0")
    assert not number("#### 10", "#### 1")
    assert not number("", "no number")
    assert exact("  name\n    self.x = 1", " name")
    assert exact("\n[] ", " []")
    assert not exact("names", " name")
    assert not exact("", " ")
