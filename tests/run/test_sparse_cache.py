"""Generation over a pattern: every position as in the whole sequence, and a cache of exactly what is still needed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from skimp.core.errors import ConflictError, SkimpError
from skimp.core.structure import read_structure
from skimp.kernels.block_pattern import BlockPattern
from skimp.kernels.native.sparse import SPARSE
from skimp.kernels.sparse_apply import SparseAttention
from skimp.recipe import load_recipe
from skimp.run.attend import pattern_of
from skimp.run.kv_cache import GrowingCache
from skimp.run.skeleton import materialise, skeleton
from skimp.run.sparse_cache import SparseCache
from skimp.run.weights import init_scratch

pytestmark = pytest.mark.skipif(not SPARSE.available(), reason="native kernels not built")

CONFIG = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 64, "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
PATTERN = BlockPattern(2, 16, 1, 2)


def sparse_model(dense: tuple[int, ...] = ()) -> tuple[Any, SparseAttention]:
    model = skeleton(CONFIG, torch.float32)
    materialise(model, torch.float32, lambda shape, kind: torch.empty(shape, dtype=kind))
    init_scratch(model, 3)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(3.0)  # attention that prefers some keys
    return model.eval(), SparseAttention(model, read_structure(model), PATTERN, dense)


@torch.no_grad()
def through(model: Any, cache: Any, ids: torch.Tensor, pieces: list[int]) -> torch.Tensor:
    found, at = [], 0
    for count in pieces:
        places = torch.arange(at, at + count).unsqueeze(0)
        out = model(ids[:, at : at + count], position_ids=places, use_cache=True, past_key_values=cache)
        found.append(out.logits)
        at += count
    return torch.cat(found, 1)


@pytest.mark.parametrize("pieces", [[1] * 90, [40, 1, 1, 30, 1, 17], [90]])
@pytest.mark.parametrize("dense", [(), (1,)])
def test_decoding_with_an_evicting_cache_is_the_whole_sequence_at_every_position(
    pieces: list[int], dense: tuple[int, ...]
) -> None:
    model, sparse = sparse_model(dense)
    ids = torch.randint(64, (2, 90), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        whole = model(ids, use_cache=False).logits
    found = through(model, SparseCache(sparse, 3), ids, pieces)
    full = through(model, GrowingCache(3), ids, pieces)  # the pattern over a cache that keeps everything
    for one in (found, full):
        assert (one - whole).abs().max() < 2e-5 * whole.abs().max()


def test_the_cache_holds_exactly_the_blocks_still_needed() -> None:
    model, sparse = sparse_model()
    ids = torch.randint(64, (1, 90), generator=torch.Generator().manual_seed(0))
    cache = SparseCache(sparse, 3)
    for t in range(90):
        with torch.no_grad():
            model(ids[:, t : t + 1], position_ids=torch.tensor([[t]]), use_cache=True, past_key_values=cache)
        block = t // 16
        for layer in cache.layers:
            for head in range(2):
                before = sum(PATTERN.allowed(head, block, j) for j in range(block))
                assert len(layer.places[head]) == 16 * before + t % 16 + 1
        assert cache.held == t + 1
    # 90 tokens: a window of the 10 of block 5, and blocks 0, 2, 4 or 1, 3 before it: of two heads 48 and 32
    assert cache.nbytes == 3 * (48 + 32 + 2 * 10) * 8 * 2 * 4
    assert cache.nbytes < 0.6 * 3 * 2 * 90 * 8 * 2 * 4


def test_going_back_reads_again_because_blocks_that_went_do_not_come_back() -> None:
    model, sparse = sparse_model()
    ids = torch.randint(64, (1, 60), generator=torch.Generator().manual_seed(0))
    cache = SparseCache(sparse, 3)
    through(model, cache, ids, [60])
    assert cache.keep(60) == 60
    assert cache.keep(30) == 0
    again = through(model, cache, ids, [30])
    with torch.no_grad():
        assert (again - model(ids[:, :30], use_cache=False).logits).abs().max() < 1e-4


def test_a_model_goes_back_to_its_own_attention() -> None:
    model, sparse = sparse_model()
    ids = torch.arange(50).unsqueeze(0)
    changed = model(ids, use_cache=False).logits
    sparse.remove()
    own = model(ids, use_cache=False).logits
    again, _ = sparse_model()
    assert not torch.equal(own, changed)
    assert torch.equal(again(ids, use_cache=False).logits, changed)


def test_what_a_recipe_asks_for_is_held_against_the_models_key_heads(tmp_path: Path) -> None:
    structure = read_structure(skeleton(CONFIG, torch.float32))

    def asked(words: str) -> Any:
        values = {"model": "x", "data": {"train": "pydoc", "seq_len": 64}, "output": "o", "train": {"batch_tokens": 64}}
        return pattern_of(load_recipe(values, [f"attention={words}"]), structure)

    assert asked("{block: 16, local: 1, stride: 2}") == PATTERN
    with pytest.raises(SkimpError, match=r"residue 1, 3[\s\S]*stride: 2"):
        asked("{block: 16, local: 1, stride: 4}")
    assert asked("{block: 16, local: 1, stride: 4, coverage: partial}").uncovered() == (1, 3)
    with pytest.raises(SkimpError, match=r"attention\.blocks"):
        asked("{blocks: 16}")
    with pytest.raises(SkimpError, match="the window is the whole row"):
        asked("{block: 16, local: 4}")
    with pytest.raises(SkimpError, match="s2-attention"):
        asked("{name: s2}")
    with pytest.raises(ConflictError, match="every block is dense"):
        SparseAttention(skeleton(CONFIG, torch.float32), structure, PATTERN, range(3))


def test_a_card_says_what_another_program_would_do_wrong() -> None:
    from types import SimpleNamespace

    from skimp.export.card import _attention

    values = {"model": "x", "data": {"train": "pydoc", "seq_len": 64}, "output": "o", "train": {"batch_tokens": 64}}
    given = load_recipe(values, ["attention={block: 16, local: 2, stride: 2}"])
    said = _attention(SimpleNamespace(recipe=given))  # type: ignore[arg-type]
    assert "the first 32\ntokens" in said
    assert _attention(SimpleNamespace(recipe=load_recipe(values))) == ""  # type: ignore[arg-type]
