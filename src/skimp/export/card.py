"""The model card: what the model is, how it came about, what it cost, and how to load it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

import skimp
from skimp.core.units import format_bytes
from skimp.run.found import Found


def model_card(found: Found, layout: Any, target: Path) -> str:
    """README.md of an exported model, in Markdown with the Hub's front matter.

    Args:
        found: the model; a run brings its recipe, its summary and its plan.
        layout: what is written (`tensors`, `dtype`).
        target: where, for the commands.
    """
    parameters = sum(_count(t.spec.shape) for t in layout.tensors.values())
    parts = [
        _front(found),
        f"# {target.name}",
        f"A causal language model of {parameters:,} parameters ({str(layout.dtype).removeprefix('torch.')}), "
        f"written by skimp {skimp.__version__} from {found.why}.",
        _load(target),
        _attention(found),
        *_training(found),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def adapter_card(found: Found, base: str, target: Path) -> str:
    """README.md of an exported adapter."""
    facts = {"library_name": "peft", "tags": ["skimp", "lora"], **({"base_model": base} if _on_hub(base) else {})}
    parts = [
        "---\n" + yaml.safe_dump(facts, sort_keys=False) + "---",
        f"# {target.name}",
        f"A LoRA adapter for `{base}`, written by skimp {skimp.__version__} from {found.why.partition(', its')[0]}.",
        f"""## Use it

```python
from peft import PeftModel
from transformers import AutoModelForCausalLM

base = AutoModelForCausalLM.from_pretrained("{base}")
model = PeftModel.from_pretrained(base, "{target.name}")
```""",
        _attention(found),
        *_training(found),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def own_card(found: Found, meta: Any, base: str, target: Path) -> str:
    """README.md of an adapter in skimp's own format."""
    facts = {"tags": ["skimp", str(meta["name"])], **({"base_model": base} if _on_hub(base) else {})}
    parts = [
        "---\n" + yaml.safe_dump(facts, sort_keys=False) + "---",
        f"# {target.name}",
        f"A {meta['name']} adapter for `{base}`, written by skimp {skimp.__version__} from "
        f"{found.why.partition(', its')[0]}.",
        f"""## Use it

```
skimp generate {target.name} "Once upon a time"
skimp eval {target.name} --data FILE
```

```python
import skimp.adapters
from skimp.core import attention
from transformers import AutoModelForCausalLM

base = AutoModelForCausalLM.from_pretrained("{base}", attn_implementation=attention.register())
handle = skimp.adapters.attach_folder("{target.name}", base)
```""",
        _attention(found),
        *_training(found),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _on_hub(name: str) -> bool:
    return "/" in name and not Path(name).exists()


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for extent in shape:
        count *= extent
    return count


def _front(found: Found) -> str:
    facts: dict[str, Any] = {"library_name": "transformers", "pipeline_tag": "text-generation", "tags": ["skimp"]}
    base = found.recipe.model.name if found.recipe is not None else found.asked
    if _on_hub(base):
        facts["base_model"] = base
    return "---\n" + yaml.safe_dump(facts, sort_keys=False) + "---"


def _load(target: Path) -> str:
    return f"""## Use it

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{target.name}")
model = AutoModelForCausalLM.from_pretrained("{target.name}")
```

```
skimp generate {target.name} "Once upon a time"
skimp eval {target.name} --data FILE
lm_eval --model hf --model_args pretrained={target.name} --tasks TASK
```"""


def _attention(found: Found) -> str:
    """What a program that knows nothing of the pattern has to be told; empty for a model with its own attention."""
    if found.recipe is None or found.recipe.attention is None:
        return ""
    options = found.recipe.attention.options()
    keys = ", ".join(f"{key} {value}" for key, value in options.items())
    return f"""## Its attention

Trained with `attention: {found.recipe.attention.name}` ({keys}): a window and one block in {options["stride"]}.
Programs that know nothing of it attend to everything, and then only the first {options["local"] * options["block"]:,}
tokens of a text are as in training. skimp uses it from the run's folder."""


def _training(found: Found) -> list[str]:
    if found.recipe is None:
        return []
    parts = ["## How it was trained", _results(found)]
    plan, summary = _plan(found), _summary(found)
    memory = _memory(plan, summary)
    if memory:
        parts += ["### Memory, planned and measured", memory]
    recipe = yaml.safe_dump(found.recipe.as_dict(), sort_keys=False, allow_unicode=True)
    parts += ["### Recipe", f"```yaml\n{recipe}```"]
    versions = summary.get("versions") or (found.meta or {}).get("environment") or {}
    if versions:
        lines = [f"| {key} | {value} |" for key, value in versions.items() if isinstance(value, (str, int, float))]
        parts += ["### Versions", "| what | version |\n|---|---|\n" + "\n".join(lines)]
    return parts


def _results(found: Found) -> str:
    loop = (found.meta or {}).get("loop", {})
    rows = [
        ("optimizer steps", found.step),
        ("trained tokens", loop.get("tokens")),
        ("training loss, first step", loop.get("loss_first")),
        ("training loss, last step", loop.get("loss_last")),
        ("held-out loss before", loop.get("eval_before")),
        ("held-out loss after", loop.get("eval_after") or _summary(found).get("eval_loss_after")),
        ("held-out loss, best", loop.get("best_eval")),
        ("commit of the base model", found.revision),
    ]
    return "| what | value |\n|---|---|\n" + "\n".join(f"| {k} | {_shown(v)} |" for k, v in rows if v is not None)


def _memory(plan: dict[str, Any], summary: dict[str, Any]) -> str:
    planned, measured = plan.get("phases", {}).get("train"), summary.get("measured_peak_bytes")
    rows = [
        ("tensors at the peak of a step", summary.get("planned_peak_bytes") or planned, measured),
        ("whole process at its peak", summary.get("planned_rss_bytes"), summary.get("rss_peak_bytes")),
    ]
    shown = [f"| {k} | {_bytes(a)} | {_bytes(b)} |" for k, a, b in rows if a or b]
    return "| what | planned | measured |\n|---|---|---|\n" + "\n".join(shown) if shown else ""


def _plan(found: Found) -> dict[str, Any]:
    return dict((found.meta or {}).get("plan") or {})


def _summary(found: Found) -> dict[str, Any]:
    """summary.json of the run, when it is of the very step that is exported."""
    file = found.folder / "summary.json" if found.folder is not None else None
    if file is None or not file.is_file():
        return {}
    read: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return read if read.get("steps") == found.step else {}


def _shown(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)


def _bytes(value: Any) -> str:
    return format_bytes(value) if value else "—"
