"""Any subset of blocks at any mixture of levels: the ledger is what a full simulation says, its solution is brute
force's, and nothing is slower than the lattice's own points."""

from __future__ import annotations

from itertools import product
from random import Random
from typing import Any

import pytest

from skimp.core.exact import ExactChoices
from skimp.plan.cost import Rates
from skimp.plan.levels import ALL, Ledger, chosen
from skimp.plan.mixed import MixedSearch
from skimp.plan.search import Search
from skimp.recipe import load_recipe

LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 48, "intermediate_size": 112, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024, "vocab_size": 101,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
#: Blocks whose window is shorter than the rows take turns with full attention.
GEMMA: dict[str, Any] = {
    **LLAMA, "model_type": "gemma2", "head_dim": 12, "sliding_window": 192, "query_pre_attn_scalar": 12,
    "layer_types": ["sliding_attention", "full_attention"] * 2, "attn_logit_softcapping": None,
}  # fmt: skip
RATES = Rates(1e11, 2e10, "a test's", attention=4e10, dense=1e10, call=1e-6)
SOME = "adapter={name: lora, r: 4, targets: [layers.1.mlp.up_proj, layers.3.mlp.up_proj, layers.3.self_attn.q_proj]}"
LEVELS = (ALL, "products", "attention", "nothing")
CASES = [(LLAMA, ()), (GEMMA, ()), (LLAMA, (SOME, "optimizer=adamw")), (LLAMA, ("exact.in_backward=true",))]


def recipe(*overrides: str, seq: int = 384) -> Any:
    values = {
        "model": "tiny", "data": {"train": "pydoc", "seq_len": seq, "validation": None}, "output": "runs/none",
        "train": {"steps": 2, "batch_tokens": 2 * seq}, "eval": None,
    }  # fmt: skip
    pins = () if any("in_backward" in word for word in overrides) else ("exact.in_backward=false",)
    return load_recipe(values, ("exact.loss_chunk=64", "exact.kernels=plain", *pins, *overrides))


def searched(config: dict[str, Any], overrides: tuple[str, ...], budget: int = 10**12, kind: Any = MixedSearch) -> Any:
    return kind(recipe(*overrides), config, 4, {"return": (budget, 0.0)}, RATES, "cpu")


@pytest.mark.parametrize(("config", "overrides"), CASES)
def test_the_ledger_says_what_a_full_simulation_does(config: dict[str, Any], overrides: tuple[str, ...]) -> None:
    search = searched(config, overrides)
    rows = 2 if "exact.in_backward=true" in overrides else 1
    draw = Random(0)
    # Where some blocks attend in a window, whose attention is no single operator, a search keeps no block's.
    words = tuple(word for word in LEVELS if word != "attention" or config is not GEMMA)
    for _ in range(2):
        levels = [draw.choice(words) for _ in range(4)]
        again, keep = chosen(levels)
        exact = ExactChoices(rows, again, loss_chunk=64, in_backward=rows == 2, keep=keep)
        profile, said = search.full(exact, short=True), search.at(exact)
        assert said.peak == profile.phases["train"], exact
        assert said.seconds == pytest.approx(profile.seconds, rel=1e-6)


def test_the_solution_is_brute_forces_on_any_chain() -> None:
    draw = Random(1)
    for _ in range(40):
        blocks, levels = draw.randint(1, 5), ("all", "some", "nothing")

        chain = Ledger(
            *(
                tuple({level: draw.randint(low, high) for level in levels} for _ in range(blocks))
                for low, high in ((0, 9), (5, 25), (0, 6))
            ),
            *(draw.randint(0, 20), draw.randint(0, 20), 1.0),
        )
        every = list(product(levels, repeat=blocks))
        for budget in range(min(map(chain.peak, every)) - 1, max(map(chain.peak, every)) + 1, 3):
            fitting = [chain.time(choice) for choice in every if chain.peak(choice) <= budget]
            found = chain.solve(budget, [levels] * blocks)
            if not fitting:
                assert found is None
                continue
            assert found is not None
            assert chain.peak(found) <= budget
            assert chain.time(found) == pytest.approx(min(fitting), abs=1e-13)


def test_equal_blocks_are_recomputed_from_the_first_on() -> None:
    alike = ({"all": 10, "nothing": 1},) * 4
    chain = Ledger(alike, ({"all": 12, "nothing": 12},) * 4, ({"all": 0, "nothing": 5},) * 4, 0, 0, 1.0)
    assert chain.solve(31, [("all", "nothing")] * 4) == ("nothing", "nothing", "all", "all")
    assert chain.solve(10**3, [("all", "nothing")] * 4) == ("all",) * 4
    assert chain.solve(11, [("all", "nothing")] * 4) is None


@pytest.mark.parametrize(
    ("config", "overrides"),
    [
        pytest.param(GEMMA, (), marks=pytest.mark.slow),
        (LLAMA, (SOME, "optimizer=adamw", "data.seq_len=768", "train.batch_tokens=1536")),
    ],
)
def test_at_every_budget_the_plan_is_brute_forces_and_no_slower_than_the_ladder(
    config: dict[str, Any], overrides: tuple[str, ...]
) -> None:
    pins = ("exact.micro_batch=1", "exact.malloc=return", *overrides)
    known = searched(config, pins)
    every = []
    for levels in product(LEVELS, repeat=4):
        again, keep = chosen(levels)
        point = known.at(ExactChoices(1, again, loss_chunk=64, keep=keep))
        every.append((point.peak, point.seconds))
    resting = known.full(ExactChoices(1, loss_chunk=64), short=True).phases
    least = max(min(p for p, _ in every), *(size for phase, size in resting.items() if phase != "train"))
    most = max(p for p, _ in every)
    last, faster = float("inf"), 0
    for budget in [least + (most - least) * n // 4 for n in range(5)]:
        search = searched(config, pins, budget)
        search._profiles, search._corners, search._rows = known._profiles, known._corners, known._rows
        search._ledgers = known._ledgers
        profile, _, seconds = search.best()
        ladder = searched(config, pins, budget, Search)
        ladder._profiles, ladder._corners, ladder._rows = known._profiles, known._corners, known._rows
        old, _, _ = ladder.best()
        assert profile.peak_bytes <= budget
        assert profile.seconds == pytest.approx(seconds, rel=1e-6)
        assert seconds == pytest.approx(min(s for p, s in every if p <= budget), rel=1e-6)
        if ladder.fits(old):
            assert profile.seconds <= old.seconds * (1 + 1e-9)
            faster += profile.seconds < 0.999 * old.seconds
        assert seconds <= last
        last = seconds
    assert faster, "blocks differ: which of them are recomputed must matter somewhere"
