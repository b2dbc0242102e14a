"""Spectral training of a model: replacement, what trains, draws, rounds, dense again."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from skimp.adapters.lora import LoRA
from skimp.adapters.spec import Spec
from skimp.adapters.sst import LEFT, ORDER, RIGHT, SIGMA, SST, U, V
from skimp.adapters.sst_sample import decompose_bytes
from skimp.adapters.sst_spec import SSTSpec
from skimp.core.errors import ConflictError, EffectError, SkimpError
from skimp.core.events import Events
from skimp.core.memory.tracker import Tracker
from skimp.core.structure import read_structure
from skimp.optim import AdamW, AdamW8bit

IDS = torch.arange(1, 25).view(2, 12)
SPEC = SSTSpec(r=8, every=3, warmup=1, draws=2)


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(input_ids=IDS, use_cache=False).logits
    return found


def steps(sst: SST, optimizer: Any, count: int, events: Events | None = None, first: int = 0) -> list[float]:
    """A plain loop, as the docstring shows it."""
    events = events or Events(*sst.events(optimizer))
    losses = []
    model: Any = sst.model
    for step in range(first, first + count):
        events.run(step)
        optimizer.zero_grad()
        loss = model(input_ids=IDS, labels=IDS, use_cache=False).loss
        loss.backward()
        optimizer.step()
        sst.after_step()
        losses.append(float(loss.detach()))
    return losses


def state(model: nn.Module) -> dict[str, Tensor]:
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {n: t.detach().clone() for n, t in tensors.items()}


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen2"])
def test_replacement_leaves_logits_and_merging_gives_the_weights_back(
    make_tiny: Callable[..., Any], family: str
) -> None:
    model = make_tiny(family)
    before, weights = logits(model), state(model)
    sst = SST(model, SPEC)
    assert not any("weight" in sst.module(n)._parameters for n in sst.modules)
    torch.testing.assert_close(logits(model), before, rtol=0, atol=1e-5)
    merged = sst.merge(keep=True, probe=lambda: logits(model))
    assert merged.logits is not None
    assert merged.logits < 1e-5
    for name in sst.modules:
        torch.testing.assert_close(model.get_parameter(f"{name}.weight"), weights[f"{name}.weight"], rtol=0, atol=1e-5)
    sst.unmerge()
    assert (
        sst.module(next(iter(sst.modules))).sst_u.data_ptr() == sst.module(next(iter(sst.modules))).sst_left.data_ptr()
    )
    torch.testing.assert_close(logits(model), before, rtol=0, atol=1e-5)


def test_what_trains_and_what_it_takes(make_tiny: Callable[..., Any]) -> None:
    """Gradients and states of m x r, n x r and m shapes alone beside what the model trains anyway."""
    model = make_tiny("llama")
    sst = SST(model, SPEC)
    optimizer = AdamW(model.named_parameters(), lr=1e-3)
    steps(sst, optimizer, 1)
    spectral = {n: p for n, p in sst.named_parameters() if n.rpartition(".")[2] in (SIGMA, U, V)}
    assert len(spectral) == 3 * 14
    expected = sum(8 * sum(shape) + min(shape) for shape in sst.shapes.values())
    assert sum(p.numel() for p in spectral.values()) == expected == sum(row.parameters for row in sst.table())
    held = sum(v.numel() for p in spectral.values() for v in optimizer.state[p].values() if isinstance(v, Tensor))
    assert held == 2 * expected
    assert {n for n, _ in model.named_parameters()} == {n for n, _ in sst.named_parameters()}
    at = {(n, key): sst.module(n)._buffers[key].data_ptr() for n in sst.modules for key in (LEFT, RIGHT, ORDER)}
    steps(sst, optimizer, 6, first=1)
    assert at == {(n, key): sst.module(n)._buffers[key].data_ptr() for n, key in at}
    assert all(sst.module(n).sst_u.data_ptr() == sst.module(n).sst_left.data_ptr() for n in sst.modules)


def test_lengths_stay_one_singular_values_stay_above_zero_and_resting_vectors_rest(
    make_tiny: Callable[..., Any],
) -> None:
    sst = SST(make_tiny("llama"), SPEC)
    optimizer = torch.optim.AdamW(sst.model.parameters(), lr=5e-2)
    events = Events(*sst.events(optimizer))
    for step in range(7):
        before = state(sst.model)
        events_fired = events.due(step)
        steps(sst, optimizer, 1, events, step)
        for name in sst.modules:
            module = sst.module(name)
            assert float(module.sst_sigma.detach().min()) >= 0.0
            for key in (LEFT, RIGHT):
                assert float((module._buffers[key].norm(dim=1) - 1).abs().max()) < 1e-6 + 4e-7
                if not events_fired:
                    assert torch.equal(module._buffers[key][8:], before[f"{name}.{key}"][8:])
                    assert not torch.equal(module._buffers[key][:8], before[f"{name}.{key}"][:8])
    assert any(float(sst.module(n).sst_sigma.detach().min()) == 0.0 for n in sst.modules)  # clamped, and may return


def test_a_draw_swaps_rows_and_begins_their_moments_anew(make_tiny: Callable[..., Any]) -> None:
    sst = SST(make_tiny("llama"), SPEC)
    optimizer = AdamW(sst.model.named_parameters(), lr=1e-2)
    events = Events(*sst.events(optimizer))
    steps(sst, optimizer, 3, events)
    shown, before = logits(sst.model), state(sst.model)
    assert events.due(3) == ["sst-draw"]
    events.run(3)
    torch.testing.assert_close(logits(sst.model), shown, rtol=0, atol=1e-5)
    name = "model.layers.0.mlp.up_proj"
    module = sst.module(name)
    order, old = module.sst_order, before[f"{name}.{ORDER}"]
    assert not torch.equal(order[:8], old[:8])
    assert torch.equal(module.sst_left[order.argsort()], before[f"{name}.{LEFT}"][old.argsort()])
    for key, zero in ((U, True), (V, True), (SIGMA, False)):
        moments = optimizer.state[module._parameters[key]]
        assert (moments["step"] == 0) is zero
        assert bool((moments["m"] == 0).all()) is zero
    assert events.lr_factor(3) == 0.5
    assert events.lr_factor(4) == 1.0


def test_a_round_ends_orthogonal_sorted_and_with_the_same_function(make_tiny: Callable[..., Any]) -> None:
    sst = SST(make_tiny("llama"), SPEC)
    optimizer = AdamW(sst.model.named_parameters(), lr=2e-2)
    events = Events(*sst.events(optimizer))
    steps(sst, optimizer, 6, events)
    shown = logits(sst.model)
    drifted = sst.module("model.layers.0.mlp.up_proj").sst_left
    assert float((drifted @ drifted.t() - torch.eye(64)).abs().max()) > 1e-3
    assert events.due(6) == ["sst-round", "sst-draw"]
    events.run(6)
    torch.testing.assert_close(logits(sst.model), shown, rtol=0, atol=1e-5)
    for name in sst.modules:
        module = sst.module(name)
        for key in (LEFT, RIGHT):
            rows = module._buffers[key]
            assert float((rows @ rows.t() - torch.eye(rows.shape[0])).abs().max()) < 1e-5
        assert bool((module.sst_sigma[:-1] >= module.sst_sigma[1:]).all())
        assert optimizer.state[module.sst_sigma]["step"] == 0


@pytest.mark.parametrize("make", [AdamW, AdamW8bit, torch.optim.AdamW])
def test_a_plain_loop_learns_across_draws_with_any_optimizer(make_tiny: Callable[..., Any], make: Any) -> None:
    sst = SST(make_tiny("llama"), SPEC)
    names = sst.model.named_parameters() if make is not torch.optim.AdamW else sst.model.parameters()
    losses = steps(sst, make(names, lr=3e-3), 14)
    assert losses[-1] < 0.7 * losses[0]
    assert all(b < a + 0.5 for a, b in pairwise(losses))  # no spike where moments begin anew


def test_rebuilt_from_meta_and_state(make_tiny: Callable[..., Any]) -> None:
    sst = SST(make_tiny("llama"), SPEC)
    steps(sst, torch.optim.AdamW(sst.model.parameters(), lr=1e-2), 4)
    saved = {n: t.detach().clone() for n, t in sst.named_state()}
    assert not any(n.endswith((f".{U}", f".{V}")) for n in saved)
    other = make_tiny("llama")
    again = SST.rebuild(other, read_structure(other), sst.meta())
    again.load(saved.__getitem__)
    assert torch.equal(logits(other), logits(sst.model))
    spectra = SST.merging(sst.meta(), frozenset(saved), saved.__getitem__)
    assert spectra.changed == {f"{n}.weight" for n in sst.modules}
    for name in sst.modules:
        found = spectra.apply(f"{name}.weight", torch.full(sst.shapes[name], 9.0), False)
        torch.testing.assert_close(found, sst.dense(name).detach(), rtol=0, atol=0)


def test_merged_with_a_share_of_the_singular_values(make_tiny: Callable[..., Any]) -> None:
    sst = SST(make_tiny("llama"), SPEC)
    sst.merge(values=0.25)
    ranks = {int(torch.linalg.matrix_rank(sst.module(n).weight)) for n in sst.modules}
    assert ranks == {16, 8}  # a quarter of 64; of the 32 of keys and values


def test_what_cannot_be_is_refused(make_tiny: Callable[..., Any]) -> None:
    with pytest.raises(
        SkimpError, match=r"adapter\.r=40[\s\S]*32 singular vectors in model\.layers\.0\.self_attn\.k_proj"
    ):
        SST(make_tiny("llama"), SSTSpec(r=40))
    with pytest.raises(ConflictError, match=r"bfloat16[\s\S]*bf16-mixed"):
        SST(make_tiny("llama").to(torch.bfloat16), SPEC)
    slow = SST(make_tiny("llama"), SSTSpec(r=8, every=3, warmup=3))
    with pytest.raises(SkimpError, match="the rate would never be full again"):
        slow.events(torch.optim.AdamW(slow.model.parameters()))
    sst = SST(make_tiny("llama"), SPEC)
    with pytest.raises(ConflictError, match=r"sst_sigma[\s\S]*an addition and a spectrum"):
        SST(sst.model, SPEC)
    with pytest.raises(ConflictError, match="nothing is merged"):
        sst.unmerge()
    with pytest.raises(ConflictError, match=r"originals are not given[\s\S]*merge\(\)"):
        sst.detach()
    with pytest.raises(ConflictError, match="PEFT"):
        sst.peft("base")
    sst.merge()
    with pytest.raises(ConflictError, match="without keeping"):
        sst.unmerge()
    with pytest.raises(EffectError, match="merged"):
        sst.assert_effect({}, {})


def test_detach_puts_the_given_base_back_to_the_bit(make_tiny: Callable[..., Any]) -> None:
    model = make_tiny("gpt2")
    base, shown = state(model), logits(model)
    sst = SST(model, SPEC)
    steps(sst, torch.optim.AdamW(model.parameters(), lr=1e-2), 2)
    sst.detach(base)
    after = state(model)
    assert after.keys() == base.keys()
    assert all(torch.equal(after[n], base[n]) for n in base)
    assert torch.equal(logits(model), shown)


def test_attaching_peaks_at_the_base_its_factors_and_one_layer(make_tiny: Callable[..., Any]) -> None:
    """One layer after the other gives up its weight: never a second model."""
    model = make_tiny("llama", num_hidden_layers=4)
    weights = sum(p.nbytes for p in model.parameters())
    tracker = Tracker()
    with tracker:
        tracker.hold(model.parameters(), "weights")
        sst = SST(model, SPEC)
    after = sum(t.nbytes for _, t in sst.named_state())
    layer = max(sum(decompose_bytes(*shape)) + 4 * shape[0] * shape[1] for shape in sst.shapes.values())
    assert max(weights, after) < tracker.peak.total <= max(weights, after) + layer + (64 << 10)
    assert tracker.peak.total < weights + after


@pytest.mark.slow
def test_tiny_pretraining_ends_below_low_rank_additions_of_the_same_rank(make_tiny: Callable[..., Any]) -> None:
    """Best of three rates each, mean of two seeds; nothing but the linear layers differs in what may move."""
    sizes = {"hidden_size": 32, "intermediate_size": 88, "vocab_size": 64, "bos_token_id": 1, "eos_token_id": 2}
    table = torch.randn(64, 64, generator=torch.Generator().manual_seed(1)).mul(2).softmax(-1)

    def text(seed: int) -> Tensor:
        draws = torch.Generator().manual_seed(seed)
        rows = [torch.randint(0, 64, (16,), generator=draws)]
        for _ in range(31):  # the next token depends on the sum of the last two
            last = rows[-1] if len(rows) < 2 else (rows[-1] + rows[-2]) % 64
            rows.append(torch.multinomial(table[last], 1, generator=draws).squeeze(1))
        return torch.stack(rows, 1)

    def final(method: str, lr: float, seed: int) -> float:
        model = make_tiny("llama", **sizes)
        with torch.no_grad():
            for index, p in enumerate(q for q in model.parameters() if q.dim() == 2):
                p.copy_(0.05 * torch.randn(p.shape, generator=torch.Generator().manual_seed(100 * seed + index)))
        sst = SST(model, SSTSpec(r=4, every=40, warmup=5, seed=seed)) if method == "sst" else None
        if sst is None:
            LoRA(model, Spec(r=4, alpha=8, embeddings=True, head=True, seed=seed))
            for n, p in model.named_parameters():
                p.requires_grad_(p.requires_grad or "norm" in n)
        optimizer = AdamW([(n, p) for n, p in model.named_parameters() if p.requires_grad], lr=lr)
        events = Events(*(sst.events(optimizer) if sst is not None else ()))
        losses = []
        for step in range(400):
            events.run(step)
            for group in optimizer.param_groups:
                group["lr"] = lr * events.lr_factor(step) * (1 - step / 400)
            optimizer.zero_grad()
            ids = text(1000 * seed + step)
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
            optimizer.step()
            if sst is not None:
                sst.after_step()
            losses.append(float(loss.detach()))
        return sum(losses[-40:]) / 40

    best = {m: min(sum(final(m, lr, s) for s in (0, 1)) / 2 for lr in (3e-3, 1e-2, 3e-2)) for m in ("sst", "lora")}
    print(best)
    assert best["sst"] < best["lora"]


def test_a_plain_spec_is_plain_values() -> None:
    spec = SSTSpec(r=3, targets=("q_proj",))
    assert SSTSpec.from_dict(spec.as_dict()) == spec
