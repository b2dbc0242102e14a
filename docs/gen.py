"""The pages nobody writes by hand: the recipe reference, one page per method, and two files of the root.

A hook of mkdocs. The pages exist only inside a build, so they can never be out of date; a test renders them
without mkdocs. The recipe reference comes from the recipe's JSON schema, the methods from the registry.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from itertools import combinations
from pathlib import Path
from typing import Any

from skimp.core.registry import Facts, alternatives, conflict_of, methods, refusal
from skimp.core.source import docstring
from skimp.recipe.keys import held_section

ROOT = Path(__file__).resolve().parents[1]


# ---------------------------------------------------------------------- mkdocs calls these two
def on_config(config: Any) -> Any:
    """Put the methods' pages where the navigation says `Methods: []`."""
    entries = [{"All methods": "methods/index.md"}, {"What goes with what": "methods/pairs.md"}]
    entries += [{name: f"methods/{name}.md"} for name in sorted(methods())]
    for section in config.nav:
        for inner in section.values():
            for item in inner if isinstance(inner, list) else []:
                if "Methods" in item:
                    item["Methods"] = entries
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add every generated page to the build."""
    from mkdocs.structure.files import File

    for uri, text in pages().items():
        files.append(File.generated(config, uri, content=text))
    return files


def pages() -> dict[str, str]:
    """All generated pages: path in the site -> Markdown."""
    from skimp.recipe import json_schema

    made = {
        "reference/recipe.md": recipe_page(json_schema()),
        "methods/index.md": methods_index(methods()),
        "methods/pairs.md": pairs_page(methods()),
        "contributing.md": from_root("CONTRIBUTING.md"),
        "changelog.md": from_root("CHANGELOG.md"),
    }
    return made | {f"methods/{name}.md": method_page(facts, methods()) for name, facts in methods().items()}


# ---------------------------------------------------------------------- files of the root
def from_root(name: str) -> str:
    """A file of the root as a page; its links into docs/ lose that folder."""
    return (ROOT / name).read_text(encoding="utf-8").replace("](docs/", "](")


# ---------------------------------------------------------------------- methods
def methods_index(known: Mapping[str, Facts]) -> str:
    """Every method in one table per kind."""
    lines = [
        "# Methods",
        "",
        "**Exact** methods leave the mathematics of a run alone; the planner may choose them freely. "
        "**Approximate** ones change it; only you choose them. `skimp methods` prints this list "
        "(`--attacks`, `--kind`, `--stage`, `--exact`, `--approximate` and any words narrow it), "
        "`skimp methods NAME` one of these pages, `--json` either of them for a program.",
    ]
    for kind in sorted({facts.kind for facts in known.values()}):
        lines += ["", f"## {kind[0].upper()}{kind[1:]}", "", "| method | what it does | attacks | exact |"]
        lines += ["|---|---|---|---|"]
        for name, facts in sorted(known.items()):
            if facts.kind == kind:
                attacks, exact = ", ".join(facts.attacks), "yes" if facts.exact else "no"
                lines.append(f"| [{name}]({name}.md) | {cell(facts.summary)} | {attacks} | {exact} |")
    return "\n".join(lines) + "\n"


#: What switches a method on in another trainer, as an argument of `skimp.hf.attach`; update rules go in themselves.
IN_TRAINER = {
    "chunked-cross-entropy": "chunked_loss=True",
    "fused-rmsnorm": "fused=True",
    "fused-rotary": "fused=True",
    "fused-swiglu": "fused=True",
    "lora": "positions=True",
    "packing": "documents=True",
    "recompute": 'recompute="all"',
    "selective-recompute": 'keep="attention"',
    "step-in-backward": "step_in_backward=True",
}


def pairs_page(known: Mapping[str, Facts]) -> str:
    """Every two methods: together, or why not. Drawn from the refusals that runs make."""
    names = sorted(known)
    number = {name: i + 1 for i, name in enumerate(names)}
    either = {pair for pair in combinations(names, 2) if alternatives(*pair)}
    refused = {pair: c for pair in combinations(names, 2) if pair not in either and (c := conflict_of(*pair))}
    count = len(names) * (len(names) - 1) // 2 - len(either)
    lines = [
        "# What goes with what",
        "",
        "Each ✓ is a run of the test suite: three steps on a CPU with both methods switched on, each held to its "
        "effect and both to the losses of the run without the exact ones (`tests/contract/test_contract_pairs.py`; "
        f"`make test-all` runs all of them). Of {count} pairs {len(refused)} are refused, each for a reason of "
        "mathematics; a ✗ leads to it. *or* stands between two values of one key, such as two update rules: a recipe "
        "names one of them. Columns are numbered as rows.",
        "",
        "| # | method | " + " | ".join(str(number[name]) for name in names) + " |",
        "|---|---|" + ":-:|" * len(names),
    ]
    for one in names:
        cells = []
        for other in names:
            pair = (min(one, other), max(one, other))
            cells.append(
                "·"
                if one == other
                else "or"
                if pair in either
                else f"[✗](#{pair[0]}-with-{pair[1]})"
                if pair in refused
                else "✓"
            )
        lines.append(f"| {number[one]} | {link(one, known)} | " + " | ".join(cells) + " |")
    for (one, other), conflict in refused.items():
        lines += ["", f"### {one} with {other} {{ #{one}-with-{other} }}", ""]
        lines += [f"Why not: {conflict.reason}.", "", f"Instead: {conflict.instead}."]
    return "\n".join(lines) + "\n"


def method_page(facts: Facts, known: Mapping[str, Facts]) -> str:
    """One method: its facts, what it cannot go with, and the docstring of its module."""
    rows = [
        ("Kind", facts.kind),
        ("Attacks", ", ".join(facts.attacks)),
        (
            "Mathematics",
            "unchanged (exact)" if facts.exact else "changed (approximate): only you switch it on",
        ),
        ("Saves", facts.saves),
        ("Stages", ", ".join(facts.stages)),
        ("Needs", "; ".join(facts.needs)),
        ("Paper", paper(facts)),
        ("Code", f"`{facts.where}`"),
    ]
    lines = [f"# {facts.name}", "", sentence(facts.summary), "", "| | |", "|---|---|"]
    lines += [f"| **{name}** | {cell(value)} |" for name, value in rows if value]
    lines += ["", "## Goes with", ""]
    against = {name: c for name, other in known.items() if name != facts.name and (c := refusal(facts, other))}
    if against:
        lines += ["Everything but:", "", "| method | why not | instead |", "|---|---|---|"]
        lines += [f"| {link(n, known)} | {cell(c.reason)} | {cell(c.instead)} |" for n, c in sorted(against.items())]
    else:
        lines.append("Every other method.")
    if facts.snippet:
        lines += ["", "## In a recipe", "", "```yaml", facts.snippet, "```"]
    if facts.options:
        lines += ["", "## Options", "", "| key | takes | default | effect |", "|---|---|---|---|"]
        for key, option in facts.options.items():
            lines.append(f"| `{key}` | {cell(option.takes)} | `{literal(option.default)}` | {cell(option.about)} |")
    lines += ["", "## From Python", "", "```python", import_line(facts.where), "```"]
    attached = IN_TRAINER.get(facts.name)
    if facts.kind == "update rule":
        roles = any("role_groups" in need for need in facts.needs)
        given = "role_groups(model.named_parameters(), 0.1, roles(model))" if roles else "model.named_parameters()"
        attached = f"optimizers=({facts.where.partition(':')[2]}({given}, lr=…), None)"
    elif attached is not None:
        attached = f"attach(trainer, {attached})"
    if attached is not None:
        lines += ["", "## In Trainer and SFTTrainer", "", f"`{attached}`; see [In your own trainer](../elsewhere.md)."]
    about = docstring(facts.where)
    if about:
        lines += ["", "## In detail", "", "```text", about, "```"]
    return "\n".join(lines) + "\n"


def paper(facts: Facts) -> str:
    """The source, linked where there is a preprint."""
    if facts.paper is None:
        return ""
    if not facts.paper.arxiv:
        return str(facts.paper)
    url = facts.paper.arxiv if "://" in facts.paper.arxiv else f"https://arxiv.org/abs/{facts.paper.arxiv}"
    return f"[{facts.paper.title}]({url}), {facts.paper.year}"


def import_line(where: str) -> str:
    module, _, name = where.partition(":")
    return f"from {module} import {name}"


def link(name: str, known: Mapping[str, Facts]) -> str:
    return f"[{name}]({name}.md)" if name in known else f"`{name}`"


# ---------------------------------------------------------------------- the recipe
def recipe_page(schema: Mapping[str, Any]) -> str:
    """Every key of a recipe with its type, its default and its effect, section by section."""
    lines = [
        "# Recipe reference",
        "",
        "A recipe is a YAML file that describes a run once. Any key can be changed on the command line as "
        "`section.key=value`. Unknown keys are errors, with the nearest known key named. "
        "This page is made from the schema that checks your recipe.",
        "",
        "```yaml",
        (ROOT / "examples" / "quickstart.yaml").read_text(encoding="utf-8").rstrip(),
        "```",
    ]
    definitions = schema.get("$defs", {})
    lines += ["", "## Top level", "", *table(schema, definitions)]
    for path, section in sections(schema, definitions):
        lines += [
            "",
            f"## `{path}:`",
            "",
            sentence(section.get("description", "")),
            "",
            *table(section, definitions),
        ]
    return "\n".join(lines) + "\n"


def sections(schema: Mapping[str, Any], definitions: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted path, schema) of every nested section, depth first."""
    for key, value in schema.get("properties", {}).items():
        found = held_section(value, definitions)
        if found is not None:
            yield above + key, found
            yield from sections(found, definitions, f"{above}{key}.")


def table(section: Mapping[str, Any], definitions: Mapping[str, Any]) -> list[str]:
    required = set(section.get("required", ()))
    lines = ["| key | takes | default | effect |", "|---|---|---|---|"]
    for key, value in section.get("properties", {}).items():
        if held_section(value, definitions) is not None:
            default = "required" if key in required else "null" if value.get("default", 0) is None else "its defaults"
        else:
            default = "required" if key in required else f"`{literal(value.get('default'))}`"
        described = value.get("description") or (held_section(value, definitions) or {}).get("description", "")
        lines.append(f"| `{key}` | {cell(takes(value, definitions))} | {default} | {cell(described)} |")
    return lines


def takes(value: Mapping[str, Any], definitions: Mapping[str, Any]) -> str:
    """The values a key accepts, in words."""
    if "$ref" in value:
        return takes(definitions[value["$ref"].rpartition("/")[2]], definitions)
    if "enum" in value:
        return " or ".join(f"`{literal(v)}`" for v in value["enum"])
    if "const" in value:
        return f"`{literal(value['const'])}`"
    for several in ("anyOf", "oneOf", "allOf"):
        if several in value:
            found = [takes(option, definitions) for option in value[several]]
            return " or ".join(dict.fromkeys(found))
    kinds = value.get("type", "anything")
    return " or ".join(one_type(k, value, definitions) for k in ([kinds] if isinstance(kinds, str) else kinds))


def one_type(kind: str, value: Mapping[str, Any], definitions: Mapping[str, Any]) -> str:
    names = {"integer": "whole number", "boolean": "true or false", "string": "text", "null": "null"}
    if kind == "object":
        return "a section" if value.get("properties") else "keys and values"
    if kind == "array":
        items = value.get("items") or (value.get("prefixItems") or [None])[0]
        return f"list of {takes(items, definitions)}" if items else "list"
    limits = (("minimum", "≥"), ("exclusiveMinimum", ">"), ("maximum", "≤"), ("exclusiveMaximum", "<"))
    found = [f"{sign} {value[key]:g}" for key, sign in limits if key in value and kind in ("integer", "number")]
    return names.get(kind, kind) + (f" {', '.join(found)}" if found else "")


# ---------------------------------------------------------------------- small things of Markdown
def literal(value: Any) -> str:
    """A default as it is written in YAML."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def cell(text: str) -> str:
    """Text that may stand in a table: one line, no bar, nothing taken for HTML."""
    return re.sub(r"\s+", " ", text).strip().replace("|", "\\|").replace("<", "&lt;")


def sentence(text: str) -> str:
    """The text with a capital and a full stop."""
    text = text.replace("<", "&lt;").strip()
    if not text:
        return ""
    return text[0].upper() + text[1:] + ("" if text[-1] in ".!?:" else ".")
