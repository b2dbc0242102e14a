"""What `long.py` starts in a process of its own.

python benchmarks/long_child.py plain 8000000000   # the longest row of the plain Hugging Face model, by simulation
python benchmarks/long_child.py cut FOLDER 4       # a model folder of so many of SmolLM2's blocks, without weights
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

STEP = 64


def source() -> Any:
    from skimp.recipe import load_recipe, resolve_model

    return resolve_model(load_recipe({"model": "smollm2-135m", "data": {"train": "pydoc"}, "output": "x"}).model)


def plain_peak(config: dict[str, Any], seq: int) -> int:
    """Tracked bytes of one step of the plain model: its own layers, its own loss over all logits, torch's AdamW."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from skimp.core import attention
    from skimp.core.memory.tracker import Tracker
    from skimp.run.skeleton import simulate_tensors, skeleton

    mode = FakeTensorMode()
    model: Any = skeleton(config, torch.float32)
    simulate_tensors(model, torch.float32, mode)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    with mode, Tracker() as tracker:
        tracker.hold(model.parameters(), "weights")
        ids = torch.zeros(1, seq, dtype=torch.int64)
        for _ in range(2):
            with attention.declared(None):
                loss = model(input_ids=ids, position_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
            del loss
            optimizer.step()
            optimizer.zero_grad()
        return tracker.peak.total


def plain(budget: int) -> dict[str, Any]:
    """The longest row; nothing is added for what an allocator holds beside the tensors, in the plain model's favour."""
    from skimp.core.memory.process import resident
    from skimp.plan.sweep import largest
    from skimp.run import skeleton  # noqa: F401

    config = source().config
    rest = resident().now
    peaks: dict[int, int] = {}

    def measure(seq: int) -> tuple[int, bool]:
        peaks[seq] = plain_peak(config, seq)
        above = peaks[seq] + rest - budget
        return above, above <= 0

    found = largest(measure, 1 << 16, STEP)
    return {"seq": found, "tracked": peaks.get(found or 0), "baseline": rest}


def cut(folder: Path, blocks: int) -> dict[str, Any]:
    from transformers import AutoTokenizer

    found = source()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**found.config, "num_hidden_layers": blocks}), "utf-8")
    tokenizer: Any = AutoTokenizer.from_pretrained(str(found.tokenizer.parent), gguf_file=found.tokenizer.name)
    tokenizer.save_pretrained(folder)
    return {"folder": str(folder)}


if __name__ == "__main__":
    made = plain(int(sys.argv[2])) if sys.argv[1] == "plain" else cut(Path(sys.argv[2]), int(sys.argv[3]))
    print(json.dumps(made))
