"""Fused RMSNorm and SwiGLU against their plain float64 references: values, every gradient, odd shapes, threads."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from skimp.core.errors import EffectError
from skimp.core.memory.oracle import witness
from skimp.core.memory.tracker import Tracker
from skimp.kernels.apply import Fused
from skimp.kernels.fused import rms_norm, rms_norm_reference, swiglu, swiglu_reference
from skimp.kernels.native import library
from skimp.run.skeleton import materialise, skeleton

pytestmark = pytest.mark.skipif(not library.available(), reason=library.why() or "native kernels")
#: A few float32 ulp (6e-8 each) of sums over up to a few hundred terms, relative to the largest value.
CLOSE = 2e-6


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    error = (found.double() - wanted).abs().max() / wanted.abs().max()
    assert error < CLOSE, error


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 3, 17), (5, 123, 37), (1, 257, 576), (4, 64, 100)])
def test_rms_norm(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    x, w, dy = torch.randn(shape) * 3, torch.rand(shape[-1]) + 0.5, torch.randn(shape)
    a, b = x.clone().requires_grad_(), w.clone().requires_grad_()
    y = rms_norm(a, b, 1e-5)
    y.backward(dy)
    c, d = x.double().requires_grad_(), w.double().requires_grad_()
    z = rms_norm_reference(c, d, 1e-5)
    z.backward(dy.double())
    close(y, z)
    assert c.grad is not None
    assert d.grad is not None
    if shape[-1] > 1:  # one number divided by its own size has no gradient but rounding
        close(a.grad, c.grad)
    close(b.grad, d.grad)


@pytest.mark.parametrize("shape", [(1,), (3, 85), (2, 129, 301), (1, 100, 1536)])
def test_swiglu(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    gate, up, dy = torch.randn(shape) * 8, torch.randn(shape), torch.randn(shape)
    a, b = gate.clone().requires_grad_(), up.clone().requires_grad_()
    y = swiglu(a, b)
    y.backward(dy)
    c, d = gate.double().requires_grad_(), up.double().requires_grad_()
    z = swiglu_reference(c, d)
    z.backward(dy.double())
    close(y, z)
    close(a.grad, c.grad)
    close(b.grad, d.grad)


def test_extremes_and_non_finite_numbers_pass_through() -> None:
    gate = torch.tensor([-1e4, -200.0, -88.0, 0.0, 88.0, 200.0, 1e4])
    found = swiglu(gate, torch.ones(7))
    torch.testing.assert_close(found, torch.nn.functional.silu(gate), rtol=1e-6, atol=1e-30)
    assert torch.isnan(swiglu(torch.tensor([float("nan")]), torch.ones(1))).all()
    assert torch.isnan(rms_norm(torch.tensor([[1.0, float("nan")]]), torch.ones(2), 1e-5)).all()


def test_threads_do_not_change_a_bit() -> None:
    torch.manual_seed(0)
    x, w = torch.randn(4, 257, 576), torch.rand(576)
    found = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            a, b = x.clone().requires_grad_(), w.clone().requires_grad_()
            y = rms_norm(a, b, 1e-5)
            swiglu(y, a).sum().backward()
            found.append((y.detach(), a.grad, b.grad))
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(torch.equal(p, q) for p, q in zip(found[0], other, strict=True))


def test_a_model_is_the_same_function_and_goes_back(make_tiny: Any) -> None:
    model = make_tiny("llama")
    ids = torch.arange(40).view(2, 20)
    plain = model(ids, use_cache=False).logits
    fused = Fused(model)
    assert (fused.norms, fused.mlps) == (5, 2)
    changed = model(ids, use_cache=False).logits
    assert not torch.equal(plain, changed)  # it did something
    torch.testing.assert_close(plain, changed, rtol=1e-4, atol=1e-5)
    fused.remove()
    assert torch.equal(plain, model(ids, use_cache=False).logits)


OTHERS: dict[str, tuple[dict[str, Any], int, int]] = {
    # two blocks of two norms and one at the end; Gemma 2 has four a block
    "gpt2": ({"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}, 5, 2),
    "opt": (
        {"hidden_size": 32, "ffn_dim": 48, "word_embed_proj_dim": 32, "activation_function": "gelu", "dropout": 0.0},
        5, 2,
    ),
    "gemma": ({"hidden_size": 32, "intermediate_size": 48, "head_dim": 8, "num_key_value_heads": 2}, 5, 2),
    "gemma2": ({"hidden_size": 32, "intermediate_size": 48, "head_dim": 8, "num_key_value_heads": 2}, 9, 2),
}  # fmt: skip


@pytest.mark.parametrize("family", OTHERS)
def test_other_families_are_the_same_function_with_the_same_gradients_and_go_back(family: str) -> None:
    """LayerNorm, (1 + w) RMSNorm, GELU of both kinds and GeGLU, by what they are; weights far from their start."""
    own, norms, mlps = OTHERS[family]
    common = {"num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64, "pad_token_id": 0}
    config = {"model_type": family, **common, "bos_token_id": 1, "eos_token_id": 2, **own}
    model = skeleton(config, torch.float32)
    materialise(model, torch.float32, lambda shape, kind: torch.empty(shape, dtype=kind))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * 0.3 + (0.5 if p.dim() == 1 else 0.0))
    ids = torch.arange(34).view(2, 17)

    def run() -> list[torch.Tensor]:
        model.zero_grad(set_to_none=True)
        logits = model(ids, use_cache=False).logits
        logits.square().mean().backward()
        return [logits.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]

    plain = run()
    fused = Fused(model)
    assert (fused.norms, fused.mlps) == (norms, mlps)
    changed = run()
    fused.assert_effect()
    assert not torch.equal(plain[0], changed[0])  # it did something
    # A gradient that vanishes (of a key's bias, to which softmax is blind) is rounding of the others.
    rounding = 1e-6 * max(g.abs().max() for g in plain[1:])
    for one, other in zip(changed, plain, strict=True):
        assert (one - other).abs().max() <= 2e-5 * other.abs().max() + rounding
    fused.remove()
    assert all(torch.equal(one, other) for one, other in zip(run(), plain, strict=True))


def test_gpt2_keeps_six_widths_a_block_less() -> None:
    """Of each block: two norms' outputs (2 H), the activation's (4 H) and what its plain form keeps on the way."""

    def kept(fused: bool) -> int:
        model = skeleton({"model_type": "gpt2", **OTHERS["gpt2"][0], "vocab_size": 64}, torch.float32)
        materialise(model, torch.float32, lambda shape, kind: torch.ones(shape, dtype=kind))
        if fused:
            Fused(model)
        seen: dict[int, int] = {}

        def note(t: torch.Tensor) -> torch.Tensor:
            seen[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            held.append(t)
            return t

        held: list[torch.Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
            model.transformer.h[0](torch.randn(1, 16, 32, requires_grad=True))
        return sum(seen.values())

    assert kept(False) - kept(True) >= 6 * 32 * 16 * 4


# ---------------------------------------------------------------------- bfloat16
@pytest.mark.parametrize("shape", [(2, 3, 17), (5, 123, 37), (1, 100, 576)])
def test_halves_are_rounded_once_from_the_float32_result(shape: tuple[int, ...]) -> None:
    """Values and gradients are those of float32 inputs, rounded: within half a bfloat16 ulp (2^-8) of the reference."""
    torch.manual_seed(0)
    x, up, dy = (torch.randn(shape).bfloat16() for _ in range(3))
    w = (torch.rand(shape[-1]) + 0.5).bfloat16()
    for call, reference, first, second in (
        (lambda a, b: rms_norm(a, b, 1e-5), lambda a, b: rms_norm_reference(a, b, 1e-5), x, w),
        (swiglu, swiglu_reference, x, up),
    ):
        a, b = first.clone().requires_grad_(), second.clone().requires_grad_()
        c, d = first.double().requires_grad_(), second.double().requires_grad_()
        y, z = call(a, b), reference(c, d)
        y.backward(dy)
        z.backward(dy.double())
        for found, wanted in ((y, z), (a.grad, c.grad), (b.grad, d.grad)):
            assert found.dtype == torch.bfloat16
            near = (found.double() - wanted).abs() <= 2.0**-8 * wanted.abs() + 1e-6 * wanted.abs().max()
            assert bool(near.all())


def test_halves_keep_nothing_wider_for_backward() -> None:
    kept: list[torch.Tensor] = []
    x = torch.randn(8, 64).bfloat16().requires_grad_()
    w = torch.ones(64).bfloat16().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t), t)[1], lambda t: t):
        swiglu(rms_norm(x, w, 1e-5), x)
    wide = [t for t in kept if t.dtype == torch.float32]
    assert [tuple(t.shape) for t in wide] == [(8,)]  # the norm's one number a row


def test_halves_only_when_asked_for(make_tiny: Any) -> None:
    ids = torch.arange(12).unsqueeze(0)
    for halves, dtype, autocast in ((False, torch.bfloat16, False), (False, torch.float32, True)):
        model = make_tiny("llama").to(dtype)
        fused = Fused(model, halves=halves)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            model(input_ids=ids, labels=ids).loss.backward()
        assert fused.plain_runs == 7
        with pytest.raises(EffectError, match="7 plain"):
            fused.assert_effect()
        fused.remove()
        fused = Fused(model, halves=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            model(input_ids=ids, labels=ids).loss.backward()
        assert (fused.runs, fused.plain_runs) == (7, 0)
        fused.assert_effect()


def test_halves_are_simulated_to_the_byte() -> None:
    """The widened copies live for a call: simulated, tracked and allocated bytes agree."""

    def layers(x: torch.Tensor, w: torch.Tensor) -> None:
        swiglu(rms_norm(x, w, 1e-5), x).backward(torch.ones_like(x))

    def peak(simulate: bool) -> tuple[int, list[str]]:
        mode = FakeTensorMode() if simulate else nullcontext()
        tracker = Tracker(operators=True)
        with mode:
            x = torch.zeros(40, 300, dtype=torch.bfloat16, requires_grad=True)
            w = torch.zeros(300, dtype=torch.bfloat16, requires_grad=True)
            with tracker:
                layers(x, w)
        return tracker.peak.total, tracker.operators or []

    x = torch.zeros(40, 300, dtype=torch.bfloat16, requires_grad=True)
    w = torch.zeros(300, dtype=torch.bfloat16, requires_grad=True)
    fake, real = peak(True), peak(False)
    assert fake == real
    assert real[0] == witness(lambda: layers(x, w))[1].peak > 40 * 300 * 4
