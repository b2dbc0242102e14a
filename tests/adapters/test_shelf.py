"""Several additions for one base: each alone, in turn, in a weighted sum, and the base again to the bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from skimp.adapters.lora import LoRA
from skimp.adapters.shelf import Shelf, taken
from skimp.adapters.spec import Spec
from skimp.core.errors import ConflictError, SkimpError
from skimp.export.peft import read_peft, write_peft

IDS = torch.arange(1, 25).view(2, 12)
SPECS = {
    "maths": Spec(r=3, targets=("q_proj", "up_proj")),
    "code": Spec(r=5, alpha=4.0, scale="rslora", init="olora", seed=4),
    "chat": Spec(r=2, reparam="dora"),
}


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(input_ids=IDS, use_cache=False).logits
    return found


def moved(lora: LoRA) -> LoRA:
    with torch.no_grad():
        for index, p in enumerate(lora.parameters()):
            p.add_(0.03 * torch.randn(p.shape, generator=torch.Generator().manual_seed(index + lora.spec.r)))
    return lora


@pytest.fixture
def shelf(make_tiny: Callable[..., Any]) -> tuple[Shelf, dict[str, Tensor], dict[str, Tensor]]:
    """Three adapters, each one's logits, and each weight's change by two of them."""
    model = make_tiny("llama")
    kept, expected, changes = Shelf(model), {"base": logits(model)}, {}
    weights = {n: p.detach().clone() for n, p in model.named_parameters()}
    for name, spec in SPECS.items():
        lora = moved(LoRA(model, spec))
        expected[name] = logits(model)
        kept.add(name, *taken(lora))
        lora.merge(keep=True)
        changes[name] = {n: p.detach() - weights[n] for n, p in model.named_parameters() if n in weights}
        lora.detach()
    return kept, expected, changes


def test_each_alone_in_turn_and_the_base_again(shelf: Any) -> None:
    kept, expected, _ = shelf
    for name in ("maths", "chat", "code", "maths"):
        lora = kept.use(name)
        torch.testing.assert_close(logits(kept.model), expected[name], rtol=0, atol=1e-5)
        assert lora is kept.active
    kept.off()
    kept.off()
    assert torch.equal(logits(kept.model), expected["base"])
    assert kept.names() == list(SPECS)


def test_a_weighted_sum_is_one_addition(shelf: Any, tmp_path: Path) -> None:
    kept, expected, changes = shelf
    lora = kept.use({"maths": 0.7, "code": -0.4})
    assert lora.spec.rank_of("model.layers.0.self_attn.q_proj") == 3 + 2 * 5
    found = logits(kept.model)
    write_peft(tmp_path / "sum", lora, base_name="owner/name")  # and it is exported as any other
    kept.add("both", *read_peft(tmp_path / "sum", kept.model))
    kept.use("both")
    torch.testing.assert_close(logits(kept.model), found, rtol=0, atol=1e-6)
    kept.off()
    with torch.no_grad():
        for name, p in kept.model.named_parameters():
            p.add_(0.7 * changes["maths"][name] - 0.4 * changes["code"][name])
    torch.testing.assert_close(logits(kept.model), found, rtol=0, atol=1e-5)
    assert float((found - expected["base"]).abs().max()) > 1e-2


def test_what_cannot_be_is_refused(shelf: Any) -> None:
    kept, _, _ = shelf
    spec, tensors = Spec(r=2, head=True), {"lm_head.weight": torch.zeros(2, 2)}
    for act, said in (
        (lambda: kept.use({"maths": 1.0, "chat": 1.0}), r"scales rows[\s\S]*use it alone"),
        (lambda: kept.use("math"), "did you mean 'maths'"),
        (lambda: kept.use({}), "none named"),
        (lambda: kept.remove("x"), "not on the shelf"),
    ):
        with pytest.raises(SkimpError, match=said):
            act()
    with pytest.raises(ConflictError, match="one has that name"):
        kept.add("maths", spec, {})
    with pytest.raises(ConflictError, match=r"lm_head\.weight in full"):
        kept.add("head", spec, tensors)
    kept.remove("maths")
    assert "maths" not in kept.names()
