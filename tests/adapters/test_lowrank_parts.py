"""The parts of a low-rank layer against their plain formulas: where it begins, what scales its rows, what it costs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from skimp.adapters.dropout import Dropout
from skimp.adapters.initial import from_base, scratch
from skimp.adapters.linear import lora_linear, lora_linear_reference
from skimp.adapters.lora import LoRA
from skimp.adapters.norms import row_norms
from skimp.adapters.spec import Spec
from skimp.adapters.targets import TargetError
from skimp.core.codecs.nf4 import NF4
from skimp.core.coded import Coded
from skimp.core.errors import EffectError, SkimpError
from skimp.core.memory.tracker import Tracker

ROWS, SEQ = 3, 7
IDS = torch.arange(1, 25).view(2, 12)


def numbers(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def near(found: Tensor, expected: Tensor, within: float = 1e-11) -> None:
    torch.testing.assert_close(found, expected, rtol=within, atol=within)


# ---------------------------------------------------------------------- the layer with all its parts
@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize(("gained", "begun"), [(True, True), (True, False), (False, True)])
def test_value_and_every_gradient_with_gain_and_start(
    monkeypatch: pytest.MonkeyPatch, gained: bool, begun: bool, p: float, transposed: bool
) -> None:
    monkeypatch.setattr("skimp.adapters.linear.PIECE", 4 * 11)  # several pieces of tokens
    outputs, inputs, r = 5, 11, 3
    x = numbers(ROWS, SEQ, inputs, seed=0).requires_grad_()
    weight, bias = numbers(outputs, inputs, seed=1), numbers(outputs, seed=2)
    a, b = numbers(r, inputs, seed=3).requires_grad_(), numbers(outputs, r, seed=4).requires_grad_()
    gain = numbers(outputs, seed=5).requires_grad_() if gained else None
    start = (numbers(r, inputs, seed=6), numbers(outputs, r, seed=7)) if begun else None
    masks = Dropout(p, 7, "layer", 4, 0) if p else None
    mask = masks.mask(0, ROWS * SEQ, x.detach().reshape(-1, inputs)).view(ROWS, SEQ, -1) if masks else None
    plain = lora_linear_reference(x, weight, bias, a, b, 0.7, mask, start, gain)
    stored = weight.t().contiguous() if transposed else weight
    options = {"transposed": transposed, "dropout": masks, "start": start, "gain": gain}
    found = lora_linear(x, stored, bias, a, b, 0.7, **options)
    near(found, plain)
    trained = [t for t in (x, a, b, gain) if t is not None]
    upstream = numbers(*plain.shape, seed=8)
    for mine, theirs in zip(
        torch.autograd.grad(found, trained, upstream), torch.autograd.grad(plain, trained, upstream), strict=True
    ):
        near(mine, theirs)


def formula(weight: Tensor, pairs: list[tuple[Tensor, Tensor, float]]) -> Tensor:
    """V = W + Σ s B A, in full."""
    return weight + sum(s * (b @ a) for a, b, s in pairs)


@pytest.mark.parametrize("begun", [True, False])
@pytest.mark.parametrize("transposed", [True, False])
def test_row_norms_and_their_gradients_are_those_of_the_whole_matrix(
    monkeypatch: pytest.MonkeyPatch, transposed: bool, begun: bool
) -> None:
    outputs, inputs, r = 7, 5, 2
    weight = numbers(outputs, inputs, seed=1)
    a, b = numbers(r, inputs, seed=3).requires_grad_(), numbers(outputs, r, seed=4).requires_grad_()
    pairs = [(a, b, 0.7)] + ([(numbers(r, inputs, seed=6), numbers(outputs, r, seed=7), -0.7)] if begun else [])
    whole = formula(weight, pairs)
    norms = torch.linalg.vector_norm(whole, dim=1)
    upstream = numbers(outputs, seed=9)
    expected = torch.autograd.grad(norms, [a, b], upstream)
    # A base in float32 beside float64 factors is widened two rows at a time.
    monkeypatch.setattr("skimp.adapters.norms.NUMBERS", 2 * inputs)
    for kind, within in ((torch.float64, 1e-11), (torch.float32, 1e-6)):
        stored = (weight.t().contiguous() if transposed else weight).to(kind)
        found = row_norms(stored, pairs, transposed=transposed)
        near(found, norms, within)
        for mine, theirs in zip(torch.autograd.grad(found, [a, b], upstream), expected, strict=True):
            near(mine, theirs, 10 * within)


def test_row_norms_of_a_coded_base_are_those_of_what_it_decodes_to() -> None:
    codec, shape = NF4(), (6, 64)
    coded = Coded(codec.encode(numbers(*shape, seed=1, dtype=torch.float32)), codec, torch.Size(shape), torch.float32)
    pairs = [(numbers(2, 64, seed=3, dtype=torch.float32), numbers(6, 2, seed=4, dtype=torch.float32), 0.5)]
    near(row_norms(coded, pairs), torch.linalg.vector_norm(formula(coded.dense(), pairs), dim=1), 1e-5)


def layer(reparam: str, init: str = "kaiming") -> tuple[LoRA, str]:
    """A float64 model with one adapted layer, moved away from where it began."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(2)
    sizes = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 1, "num_attention_heads": 4}
    model: Any = LlamaForCausalLM(LlamaConfig(vocab_size=61, **sizes)).double()
    lora = LoRA(model, Spec(r=3, alpha=4.5, targets=("gate_proj",), reparam=reparam, init=init))
    with torch.no_grad():
        for index, p in enumerate(lora.parameters()):
            p.add_(numbers(*p.shape, seed=20 + index) * 0.1)
    return lora, "model.layers.0.mlp.gate_proj"


@pytest.mark.parametrize("init", ["kaiming", "olora"])
@pytest.mark.parametrize("reparam", ["dora", "weightnorm"])
def test_gradients_of_a_normed_layer_equal_autograd_of_the_full_expression(reparam: str, init: str) -> None:
    """DoRA with the norm detached, GradNormLoRP with it; and the two differ."""
    lora, name = layer(reparam, init)
    module = lora.module(name)
    x = numbers(2, 5, 32, seed=1)
    trained = [p for _, p in lora.layers[name].trained()]
    upstream = numbers(2, 5, 40, seed=2)
    found = torch.autograd.grad(module(x), trained, upstream)
    expected = {}
    for detach in (True, False):
        whole = formula(module.weight, lora.layers[name].pairs())
        norms = torch.linalg.vector_norm(whole, dim=1, keepdim=True)
        direction = whole / (norms.detach() if detach else norms)
        y = x @ (module.lora_magnitude_vector.unsqueeze(1) * direction).t()
        expected[detach] = torch.autograd.grad(y, trained, upstream)
    for mine, theirs in zip(found, expected[reparam == "dora"], strict=True):
        near(mine, theirs, 1e-9)
    assert not torch.allclose(found[1], expected[reparam != "dora"][1])


def test_the_gradient_of_the_direction_is_orthogonal_to_it() -> None:
    """dV = (g / ||V||)(dW - dg V / ||V||): the radial component is gone, and plain descent on V never shortens it."""
    a = numbers(9, 9, seed=4).requires_grad_()  # V = W + I A with I the identity: the norm's gradient reaches all of V
    eye, w = torch.eye(9, dtype=torch.float64), numbers(9, 9, seed=5)
    length = numbers(9, seed=6)
    whole = w + a
    out = numbers(4, 9, seed=7) @ (length / row_norms(w, [(a, eye, 1.0)])).unsqueeze(1).mul(whole).t()
    (dv,) = torch.autograd.grad(out, a, numbers(4, 9, seed=8))
    radial = (dv * whole.detach()).sum(1).abs()
    assert (radial < 1e-12 * dv.norm(dim=1) * whole.detach().norm(dim=1)).all()
    assert ((whole - 0.1 * dv).norm(dim=1) >= whole.norm(dim=1)).all()


@pytest.mark.parametrize("reparam", ["plain", "dora", "weightnorm"])
@pytest.mark.parametrize("init", ["kaiming", "olora"])
def test_what_is_kept_for_backward_is_the_input_and_numbers_per_output(reparam: str, init: str) -> None:
    lora, name = layer(reparam, init)
    module = lora.module(name)
    lasting = {t.data_ptr() for t in (*module._parameters.values(), *module._buffers.values()) if t is not None}
    x, kept = numbers(2, 5, 32, seed=1).requires_grad_(), {}
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.setdefault(t.data_ptr(), t), lambda t: t):
        module(x)
    new = sum(t.nbytes for pointer, t in kept.items() if pointer not in lasting)
    assert new == x.nbytes + 8 * 40 * {"plain": 0, "dora": 2, "weightnorm": 2}[reparam]  # gain and norms


# ---------------------------------------------------------------------- where it begins
@pytest.mark.parametrize(("r", "scale"), [(4, 1.0), (4, 8.0), (9, 45.0), (2, 0.25)])
@pytest.mark.parametrize("init", ["olora", "pissa"])
def test_the_effective_weight_at_step_0_is_the_base(init: str, r: int, scale: float) -> None:
    """W + s (B A - B0 A0) with B A = B0 A0, and W_base = W - s B0 A0 as in the papers is W's own rest."""
    weight = numbers(24, 17, seed=1, dtype=torch.float32)
    a, b = from_base(init, weight, r, scale, 0, "w")
    rest = weight - scale * (b @ a)
    assert float((rest + scale * (b @ a) - weight).abs().max()) <= 2e-7 * max(1.0, scale) * float(weight.abs().max())


def test_olora_is_the_head_of_a_qr_decomposition() -> None:
    weight = numbers(24, 17, seed=1, dtype=torch.float32)
    q, corner = torch.linalg.qr(weight.double())
    for scale in (1.0, 3.0):
        a, b = from_base("olora", weight, 5, scale, 0, "w")
        assert float((b.t() @ b - torch.eye(5)).abs().max()) < 1e-5
        assert float(torch.tril(a[:, :5], -1).abs().max()) == 0.0
        near(b @ a, (q[:, :5] @ corner[:5]).float(), 1e-5)
        rest = weight - scale * (b @ a)
        near(rest[:, :5], (1 - scale) * weight[:, :5], 1e-5)
    a, b = from_base("olora", weight.t().contiguous(), 17, 1.0, 0, "w")  # r = the smaller side: nothing is left
    assert float((weight.t() - b @ a).abs().max()) < 1e-5


@pytest.mark.parametrize("shape", [(24, 17), (11, 30)])
def test_pissa_is_the_best_product_of_its_rank_and_balanced(shape: tuple[int, int]) -> None:
    # Singular values that fall by half: the subspace of the largest is then well defined.
    u, _, v = torch.linalg.svd(numbers(*shape, seed=1), full_matrices=False)
    sizes = 4.0 * 0.5 ** torch.arange(min(shape), dtype=torch.float64)
    weight = (u * sizes @ v).float()
    best = (u[:, :3] * sizes[:3] @ v[:3]).float()
    for init, within in (("pissa", 1e-6), ("pissa-fast", 1e-5)):
        a, b = from_base(init, weight, 3, 2.0, 0, "w")
        near(2.0 * (b @ a), best, within * 10)
        assert a.is_contiguous()
        assert b.is_contiguous()
        near(b.t() @ b, a @ a.t(), within * 10)
        near((b.t() @ b).diagonal(), (sizes[:3] / 2.0).float(), within * 10)


@pytest.mark.parametrize("base", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("init", ["olora", "pissa", "pissa-fast"])
def test_beginning_takes_the_base_and_one_layer(make_tiny: Callable[..., Any], init: str, base: torch.dtype) -> None:
    """Measured while attaching: what lasts, and above it no more than the largest single layer's formula."""
    model = make_tiny("llama").to(base)
    tracker = Tracker()
    with tracker:
        tracker.hold(model.parameters(), "weights")
        rest = tracker.live
        lora = LoRA(model, Spec(r=4, init=init))
    lasting = sum(t.nbytes for t in lora.additions())
    assert tracker.live - rest == lasting
    above = tracker.peak.total - rest - lasting
    assert 0 < above <= lora.peaks()["attach"]
    assert above >= max(m.weight.numel() for m in map(lora.module, lora.modules)) * (4 if base != torch.float32 else 0)
    assert scratch(init, 160, 64, 4, 2) - scratch(init, 160, 64, 4, 4) == 4 * 160 * 64


# ---------------------------------------------------------------------- presets on a model
PARTS = {
    "dora": {"reparam": "dora"},
    "gradnormlorp": {"reparam": "weightnorm"},
    "olora": {"init": "olora", "scale": "rslora"},
    "pissa": {"init": "pissa"},
    "dora-on-olora": {"init": "olora", "reparam": "dora"},
}


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(input_ids=IDS, use_cache=False).logits
    return found


def trained(lora: LoRA, steps: int = 4, lr: float = 3e-3) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A few steps in a plain loop; every parameter before the first and after it."""
    optimizer, losses, seen = torch.optim.AdamW(lora.parameters(), lr=lr), [], []
    model: Any = lora.model
    for _ in range(steps):
        if len(seen) < 2:
            seen.append({n: p.detach().clone() for n, p in model.named_parameters()})
        loss = model(input_ids=IDS, labels=IDS, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
    return seen[0], seen[1]


@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_step_0_merge_unmerge_and_detach(make_tiny: Callable[..., Any], family: str, name: str) -> None:
    model = make_tiny(family)
    before, weights = logits(model), {n: p.detach().clone() for n, p in model.named_parameters()}
    lora = LoRA(model, Spec(r=4, **PARTS[name]))
    assert float((logits(model) - before).abs().max()) <= 1e-5
    if name in ("dora", "gradnormlorp"):
        assert torch.equal(logits(model), before)  # every gain is exactly 1
    first, second = trained(lora)
    lora.assert_effect(first, second)
    after = logits(model)
    assert float((after - before).abs().max()) > 1e-3
    for keep in (False, True):
        report = lora.merge(keep=keep, probe=lambda: logits(model))
        assert report.logits is not None
        assert report.logits < 1e-5
        assert report.rounding < 1e-6 < report.change
        lora.unmerge()
        assert float((logits(model) - after).abs().max()) < 1e-5
        if not keep:  # rounding is left behind; a copy has none
            for n, p in lora.base():
                near(p, weights[n], 1e-6)
                with torch.no_grad():
                    p.copy_(weights[n])
    lora.detach()
    assert {n for n, _ in model.named_parameters()} == set(weights)
    assert not list(model.layers[0].buffers() if hasattr(model, "layers") else [])
    assert all(torch.equal(p, weights[n]) for n, p in model.named_parameters())
    assert torch.equal(logits(model), before)


@pytest.mark.parametrize(
    ("parts", "part"),
    [
        ({"init": "olora"}, "lora_A"),
        ({"reparam": "dora"}, "lora_magnitude_vector"),
        ({"reparam": "weightnorm"}, "lora_m"),
    ],
)
def test_a_part_that_is_switched_off_is_seen(make_tiny: Callable[..., Any], parts: dict[str, str], part: str) -> None:
    lora = LoRA(make_tiny("llama"), Spec(r=2, **parts))
    first, second = trained(lora, steps=2)
    lora.assert_effect(first, second)
    still = {n: first[n] if part in n else p for n, p in second.items()}
    with pytest.raises(EffectError, match=rf"no {part}\w* moved"):
        lora.assert_effect(first, still)


def test_counts_of_what_trains(make_tiny: Callable[..., Any]) -> None:
    sides = 2 * (4 * (64 + 64) + 3 * (160 + 64)) - 2 * 2 * 32  # two blocks; keys and values have half the outputs
    outputs = 2 * (64 + 32 + 32 + 64 + 160 + 160 + 64)
    for parts, expected in (
        ({}, 3 * sides),
        ({"reparam": "dora"}, 3 * sides + outputs),
        ({"init": "olora"}, 3 * sides),
    ):
        lora = LoRA(make_tiny("llama"), Spec(r=3, **parts))
        assert sum(p.numel() for p in lora.parameters()) == expected
        beside = sum(t.nbytes for t in lora.additions()) - 4 * expected
        assert beside == (4 * 3 * sides if parts.get("init") else 0)
        assert len(dict(lora.named_state())) == sum(1 for _ in lora.additions())


def test_lora_plus_moves_b_faster(make_tiny: Callable[..., Any]) -> None:
    lora = LoRA(make_tiny("llama"), Spec(r=3, ratio=16.0, reparam="dora"))
    scales = {n.rpartition(".")[2]: lora.lr_scale(n) for n, _ in lora.named_parameters()}
    assert scales == {"lora_A": 1.0, "lora_B": 16.0, "lora_magnitude_vector": 16.0}


def test_a_rank_above_the_matrix_is_refused_with_the_largest_that_works(make_tiny: Callable[..., Any]) -> None:
    with pytest.raises(
        TargetError, match=r"33 on model\.layers\.0\.self_attn\.k_proj[\s\S]*32 x 64[\s\S]*adapter\.r=32"
    ):
        LoRA(make_tiny("llama"), Spec(r=33))
    LoRA(make_tiny("llama"), Spec(r=33, targets=("q_proj",)))
    for wrong in ({"init": "qr"}, {"reparam": "norm"}, {"ratio": 0.0}, {"ratio": math.inf}):
        with pytest.raises(SkimpError, match=next(iter(wrong))):
            Spec(**wrong)
