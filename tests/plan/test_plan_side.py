"""What a plan says of side networks, S2A and coded derivatives beside LoRA, by simulation of the very run."""

from __future__ import annotations

from functools import cache

from skimp.core.exact import ExactChoices
from skimp.plan.simulate import simulate
from skimp.recipe import load_recipe

CONFIG = {
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "vocab_size": 67,
    "tie_word_embeddings": True,
}
POOL = "adapter={name: qst, reduce: 8, down: avgpool}"


@cache
def above(*overrides: str, again: bool = False) -> int:
    """Peak bytes beyond what rests, of one row of 512 tokens."""
    values = {
        "model": "tiny",
        "data": {"train": "pydoc", "seq_len": 512, "validation": None},
        "output": "runs/x",
        "train": {"steps": 2, "batch_tokens": 512},
        "eval": None,
    }
    exact = ExactChoices(1, recompute=tuple(range(4)) if again else ())
    profile = simulate(load_recipe(values, overrides), exact, CONFIG)
    return profile.peak.total - sum(profile.resting.values())


def test_a_side_network_peaks_below_lora_that_runs_every_block_again() -> None:
    lora = above("adapter={r: 4}", again=True)
    assert above(POOL) < lora < above("adapter={r: 4}") / 2  # with all of the side's own activations kept
    # A trained downsampler keeps hidden states besides; the last block's is gone when the peak comes.
    assert above(POOL) + 3 * 512 * 128 * 4 < above("adapter={name: qst, reduce: 8}") < lora


def test_coded_derivatives_pay_where_what_reads_them_is_frozen() -> None:
    s2a, lora = "adapter={name: s2a, prompt: 4}", "adapter={r: 4}"
    saved = {a: above(a) - above(a, "activations.derivative=4") for a in (s2a, lora)}
    assert saved[s2a] > saved[lora] > 0
    assert above(s2a, "activations.derivative=4") < 0.65 * above(s2a)


def test_recompute_and_chunks_mean_the_sides_own_blocks() -> None:
    assert above(POOL, again=True) < above(POOL)
