"""What the pages say is so: commands exist, keys are known, examples run, links lead somewhere."""

from __future__ import annotations

import importlib.util
import re
from itertools import combinations
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from skimp.core.registry import Conflict, Facts, Paper, alternatives, conflict_of, methods
from skimp.recipe import json_schema, load_recipe
from skimp.recipe.resources import Exact

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"])
QUICKSTART = ROOT / "examples" / "quickstart.yaml"


@pytest.fixture(scope="module")
def gen() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_gen", ROOT / "docs" / "gen.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S)


def commands(page: Path) -> list[str]:
    """The command lines of a page, without their comments."""
    lines = [line for block in blocks(page, "console") for line in block.splitlines()]
    return [line.partition(" #")[0].strip() for line in lines if line.strip()]


def each(language: str) -> list[Any]:
    return [
        pytest.param(block, id=f"{page.name}-{number}")
        for page in PAGES
        for number, block in enumerate(blocks(page, language))
    ]


# ---------------------------------------------------------------------- generated pages
def leaves(values: dict[str, Any], above: str = "") -> list[tuple[str, str]]:
    """(section, key) of every key of a recipe, as the reference page should list it."""
    found = []
    for key, value in values.items():
        found.append((above.rstrip("."), key))
        if isinstance(value, dict):
            found += leaves(value, f"{above}{key}.")
    return found


def test_the_reference_lists_every_key_under_its_section(gen: ModuleType) -> None:
    page = gen.recipe_page(json_schema())
    sections = {"": page.partition("## Top level")[2].partition("\n## ")[0]}
    for part in page.partition("## Top level")[2].split("\n## `")[1:]:
        name, _, rest = part.partition(":`")
        sections[name] = rest
    for section, key in leaves(load_recipe(QUICKSTART).as_dict()):
        assert f"| `{key}` |" in sections[section], f"{section}.{key} is not in the reference"


def test_every_key_says_what_it_does(gen: ModuleType) -> None:
    rows = re.findall(r"^\| `(\w+)` \|.*\| (.*) \|$", gen.recipe_page(json_schema()), re.M)
    assert rows
    assert not [key for key, effect in rows if len(effect) < 5]


def test_every_method_has_its_page(gen: ModuleType) -> None:
    pages = gen.pages()
    for name, facts in methods().items():
        assert f"methods/{name}.md" in pages
        assert gen.cell(facts.summary) in pages["methods/index.md"]


def test_a_method_page_shows_conflicts_from_both_sides(gen: ModuleType) -> None:
    one = Facts(
        name="one",
        kind="step",
        summary="halves a|b <c>",
        where="skimp.core.units:parse_bytes",
        attacks=("gradients",),
        exact=False,
        paper=Paper("Title", 2024, "2401.00001"),
        conflicts={"two": Conflict("they both own the gradient", "use one after the other")},
    )
    two = Facts(name="two", kind="step", summary="s", where="skimp.core.units:parse_bytes", attacks=(), exact=True)
    known = {"one": one, "two": two}
    for facts, other in ((one, "two"), (two, "one")):
        page = gen.method_page(facts, known)
        assert f"[{other}]({other}.md) | they both own the gradient | use one after the other" in page
        assert "Every other method" not in page
        assert "from skimp.core.units import parse_bytes" in page
    assert "https://arxiv.org/abs/2401.00001" in gen.method_page(one, known)
    assert "halves a\\|b &lt;c>" in gen.methods_index(known)


def test_what_a_page_says_of_other_trainers_is_an_argument_there(gen: ModuleType) -> None:
    import inspect

    from skimp.hf import attach

    known = inspect.signature(attach).parameters
    assert {line.partition("=")[0] for line in gen.IN_TRAINER.values()} == set(known) - {"trainer"}
    assert set(gen.IN_TRAINER) <= set(methods())
    assert "attach(trainer, fused=True)" in gen.pages()["methods/fused-swiglu.md"]
    assert "optimizers=(AdamW8bit(" in gen.pages()["methods/adamw8bit.md"]


def test_the_pair_matrix_shows_every_refusal_from_both_sides(gen: ModuleType) -> None:
    page, known = gen.pages()["methods/pairs.md"], methods()
    rows = [line for line in page.splitlines() if re.match(r"\| \d+ \|", line)]
    assert len(rows) == len(known)
    pairs = list(combinations(sorted(known), 2))
    either = [pair for pair in pairs if alternatives(*pair)]
    refused = {pair: found for pair in pairs if pair not in either and (found := conflict_of(*pair))}
    assert sum(row.count("✗") for row in rows) == 2 * len(refused) > 0
    assert sum(row.count("| or ") for row in rows) == 2 * len(either) > 0
    assert sum(row.count("✓") for row in rows) == len(known) * (len(known) - 1) - 2 * len(refused) - 2 * len(either)
    for pair, conflict in refused.items():
        assert f"[✗](#{'-with-'.join(pair)})" in page
        assert f"{{ #{'-with-'.join(pair)} }}" in page
        assert conflict.reason in page


def test_alternatives_of_a_key_are_put_in_words(gen: ModuleType) -> None:
    definitions = {"S": {"type": "object", "properties": {"a": {"type": "integer"}}}}
    value = {"anyOf": [{"type": "string"}, {"$ref": "#/$defs/S"}, {"type": "null"}]}
    assert gen.takes(value, definitions) == "text or a section or null"
    assert gen.takes({"enum": ["all", None]}, {}) == "`all` or `null`"
    assert gen.takes({"type": "array", "items": {"type": "integer"}}, {}) == "list of whole number"
    assert gen.takes({"type": "number", "exclusiveMinimum": 0, "maximum": 1}, {}) == "number > 0, ≤ 1"


# ---------------------------------------------------------------------- commands
def test_every_make_target_named_exists() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z0-9-]+):", makefile, re.M))
    named = [
        word
        for page in PAGES
        for line in commands(page)
        if line.startswith("make ")
        for word in re.sub(r'\w+=("[^"]*"|\S*)', "", line).split()[1:]
    ]
    assert len(named) > 10
    assert set(named) <= targets, set(named) - targets


def test_every_benchmark_that_make_calls_exists() -> None:
    called = re.findall(r"benchmarks/\w+\.py", (ROOT / "Makefile").read_text(encoding="utf-8"))
    assert len(called) >= 6
    assert not [name for name in called if not (ROOT / name).is_file()]


def test_every_verb_named_exists() -> None:
    named = {line.split()[1] for page in PAGES for line in commands(page) if ".venv/bin/skimp " in line}
    assert named >= {"plan", "train", "methods"}
    have = {path.stem for path in (ROOT / "src" / "skimp" / "cli").glob("*.py")}
    assert named <= have, f"verbs in the docs without a file in cli/: {sorted(named - have)}"


def test_every_override_in_a_command_is_a_key() -> None:
    made = 0
    for page in PAGES:
        for line in commands(page):
            if line.startswith(".venv/bin/skimp"):
                load_recipe(QUICKSTART, [word for word in line.split() if re.match(r"[a-z_.]+=", word)])
                made += 1
    assert made > 5


def test_the_short_quickstart_is_a_recipe() -> None:
    short = re.search(r"^SHORT := (.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)
    assert short is not None
    recipe = load_recipe(QUICKSTART, short.group(1).split())
    assert (recipe.train.steps, recipe.data.seq_len, recipe.rows_per_step) == (3, 128, 4)


def test_the_quickstart_is_the_promised_run() -> None:
    recipe = load_recipe(QUICKSTART)
    assert (recipe.model.name, recipe.model.init, recipe.precision) == ("smollm2-135m", "pretrained", "fp32")
    assert (recipe.data.train, recipe.data.seq_len, recipe.data.packing) == (("pydoc",), 512, True)
    assert (recipe.train.steps, recipe.train.batch_tokens, recipe.train.clip) == (20, 2048, 1.0)
    assert (recipe.optimizer.name, recipe.budget.host, recipe.output) == (
        "adamw8bit",
        2 * 10**9,
        "runs/quickstart",
    )
    assert recipe.eval is not None
    assert (recipe.eval.at_start, recipe.eval.at_end) == (True, True)
    assert recipe.eval.tokens <= 4096
    assert recipe.sample is not None
    assert recipe.exact == Exact(), "the planner chooses"


def test_every_line_of_the_quickstart_says_its_effect() -> None:
    lines = QUICKSTART.read_text(encoding="utf-8").splitlines()
    silent = [line for line in lines if re.match(r"\s*\w+: *\S", line) and "#" not in line]
    assert not silent, silent


# ---------------------------------------------------------------------- examples and links
@pytest.mark.parametrize("code", each("python"))
def test_python_examples_run(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole runs are left to other tests: there only the names are checked. So are class sketches."""
    compile(code, "example", "exec")
    if "skimp.train(" in code:
        import skimp

        assert all(callable(getattr(skimp, name)) for name in re.findall(r"skimp\.(\w+)\(", code))
    elif "import " in code and "class " not in code:
        exec(code, {"__name__": "example"})


def test_links_between_files_lead_somewhere() -> None:
    made_in_build = {"recipe.md", "index.md", "contributing.md", "changelog.md"}
    broken = []
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+?)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            if not (page.parent / target).exists() and Path(target).name not in made_in_build:
                broken.append(f"{page.relative_to(ROOT)}: {target}")
    assert not broken, broken
