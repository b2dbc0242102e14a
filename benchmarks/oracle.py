"""Simulated peak, tracked peak and the peak of PyTorch's own allocation events, in bytes: they must be
equal.

    python benchmarks/oracle.py                    # 18 combinations, under a minute
    python benchmarks/oracle.py --only llama --seq 64

Three witnesses of the same two optimizer steps on tiny models: `simulate` sees shapes and no values; the
tracker watches real ones in the dispatcher; the c10 allocator reports what it handed out, and knows nothing
of skimp.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import measure

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {
        "model_type": "llama", "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 320, "max_position_embeddings": 512,
        "tie_word_embeddings": False,
    },
    "gpt2": {
        "model_type": "gpt2", "n_embd": 64, "n_layer": 3, "n_head": 4, "vocab_size": 320, "n_positions": 512,
        "bos_token_id": 1, "eos_token_id": 2,
        "tie_word_embeddings": False,
    },
    "qwen": {
        "model_type": "qwen3", "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 320,
        "max_position_embeddings": 512, "tie_word_embeddings": False,
    },
}  # fmt: skip
#: Each is one change of the plain run: all rows at once, nothing recomputed, gradients held, float32 AdamW,
#: untied.
TECHNIQUES: dict[str, dict[str, Any]] = {
    "plain": {},
    "recompute": {"recompute": (0, 1, 2)},
    "accumulation": {"micro_rows": 1},
    "tied": {"tied": True},
    "in-backward": {"in_backward": True},
    "8-bit": {"rule": "adamw8bit"},
}
ROWS = 3


def compare(family: str, technique: str, seq: int) -> dict[str, Any]:
    """One row of the table."""
    from skimp.core.exact import ExactChoices
    from skimp.plan.simulate import simulate
    from skimp.recipe import load_recipe

    change = dict(TECHNIQUES[technique])
    config = {**FAMILIES[family], "tie_word_embeddings": change.pop("tied", False)}
    recipe = load_recipe({
        "model": "smollm2-135m", "data": {"train": "pydoc", "seq_len": seq}, "output": "unused", "eval": None,
        "train": {"steps": 4, "batch_tokens": ROWS * seq, "clip": 1.0},
        "optimizer": change.pop("rule", "adamw"),
    })  # fmt: skip
    exact = ExactChoices(change.pop("micro_rows", ROWS), **change)
    documents = (0, seq // 3, seq)
    simulated = simulate(recipe, exact, config, documents=documents).peak.total
    tracked, allocated = real(recipe, exact, config, documents)
    same = simulated == tracked == allocated
    return {"family": family, "technique": technique, "simulated": simulated, "tracked": tracked,
            "c10": allocated, "equal": same}  # fmt: skip


def real(recipe: Any, exact: Any, config: dict[str, Any], documents: tuple[int, ...]) -> tuple[int, int]:
    """(tracked, allocated) peaks of two real steps in bytes, what rests included.

    Each witness has a run of its own from the first step on: a block that was handed out before the profiler
    started is not deducted when it is freed.
    """
    from skimp.core.memory.oracle import witness
    from skimp.core.memory.tracker import Tracker
    from skimp.data import synthetic_batch
    from skimp.run.build import build
    from skimp.run.weights import init_scratch

    batch = synthetic_batch(recipe.data.seq_len, recipe.rows_per_step, config["vocab_size"], documents)

    def fresh() -> Any:
        return build(recipe, exact, config, fill=lambda model: init_scratch(model, 0))

    def two_steps(run: Any) -> None:
        for _ in range(2):
            run.step(batch)

    run = fresh()
    tracker = Tracker()
    run.show_to(tracker, batch)
    rest = tracker.live
    with tracker:
        two_steps(run)
    run.close()
    other = fresh()
    _, seen = witness(lambda: two_steps(other))
    other.close()
    return tracker.peak.total, rest + seen.peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seq", type=int, default=96, help="tokens in a row")
    parser.add_argument("--steps", type=int, default=2, choices=[2], help="steps of each witness")
    parser.add_argument("--only", default="", help="families or techniques, comma-separated; all unless given")
    parser.add_argument("--json", help="write the figures here as well")
    args = parser.parse_args()
    wanted = {word for word in args.only.split(",") if word}
    unknown = wanted - set(FAMILIES) - set(TECHNIQUES)
    if unknown:
        parser.error(f"--only {', '.join(sorted(unknown))}: known are {', '.join([*FAMILIES, *TECHNIQUES])}")
    rows = [
        compare(family, technique, args.seq)
        for family in FAMILIES
        if not wanted & set(FAMILIES) or family in wanted
        for technique in TECHNIQUES
        if not wanted & set(TECHNIQUES) or technique in wanted
    ]
    print(f"two optimizer steps of {ROWS} rows of {args.seq} tokens, bytes at the peak\n{measure.machine()}\n")
    head = ["model", "technique", "simulated", "tracked", "c10 allocator", "difference", ""]
    lines = [
        [r["family"], r["technique"], f"{r['simulated']:,}", f"{r['tracked']:,}", f"{r['c10']:,}",
         max(abs(r["c10"] - r["simulated"]), abs(r["tracked"] - r["simulated"])),
         "equal" if r["equal"] else "NOT EQUAL"]
        for r in rows
    ]  # fmt: skip
    print(measure.table(head, lines))
    equal = sum(r["equal"] for r in rows)
    print(f"\n{equal} of {len(rows)} equal to the byte")
    measure.write_json(args.json, {"rows": rows, "machine": measure.machine()})
    sys.exit(0 if equal == len(rows) else 1)


if __name__ == "__main__":
    main()
