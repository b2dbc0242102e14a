"""LoftQ: codes and product fitted in turn, against the published loop in plain torch and against PEFT's own."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from skimp.adapters.loftq import Fitted, Fitting, LoftQ, alternate, scratch
from skimp.adapters.lora import LoRA
from skimp.adapters.lora_peft import plain_parts
from skimp.adapters.spec import Spec
from skimp.adapters.targets import TargetError
from skimp.core.codecs.integers import Int4, Int8
from skimp.core.codecs.nf4 import NF4
from skimp.core.codecs.sketch import Sketch
from skimp.core.coded_linear import CodedLinear, coded_layers
from skimp.core.coded_model import encode_model
from skimp.core.errors import ConflictError, SkimpError
from skimp.core.memory.oracle import witness
from skimp.core.structure import read_structure

CODECS = {"nf4": NF4(), "nf4-32": NF4(block=32, double_quant=False), "int8": Int8(group=8), "int4": Int4(group=8),
          "sketch-4": Sketch(), "sketch-2": Sketch(bits=2)}  # fmt: skip
IDS = torch.arange(1, 25).view(2, 12)


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def published(weight: Tensor, codec: Any, rank: int, steps: int) -> tuple[list[float], list[Tensor], list[Tensor]]:
    """Algorithm 1 as printed, with torch's SVD: what is left, Q and L R' after every turn."""
    low = torch.zeros_like(weight)
    left, codes, products = [], [], []
    for _ in range(steps):
        q = codec.decode(codec.encode(weight - low), tuple(weight.shape), weight.dtype)
        u, s, v = torch.linalg.svd(weight - q, full_matrices=False)
        low = (u[:, :rank] * s[:rank]) @ v[:rank]
        left.append(float((weight - q - low).norm()))
        codes.append(q)
        products.append(low)
    return left, codes, products


@pytest.mark.parametrize("shape", [(37, 64), (96, 40), (33, 33)])
@pytest.mark.parametrize("name", CODECS)
def test_every_turn_is_the_published_one_and_the_best_is_kept(name: str, shape: tuple[int, int]) -> None:
    codec, weight, scale = CODECS[name], numbers(*shape, seed=3), 1.7
    expected, codes, products = published(weight, codec, 4, 6)
    fit = alternate(weight, codec, 4, scale, 6)
    assert fit.a is not None
    assert fit.b is not None
    alone = float((weight - codes[0]).norm())
    assert fit.left == pytest.approx([alone, *expected], rel=1e-9)
    assert fit.kept == 1 + min(range(6), key=lambda turn: expected[turn])
    q = codec.decode(fit.parts, shape, torch.float64)
    assert torch.equal(q, codes[fit.kept - 1])
    torch.testing.assert_close(scale * fit.b @ fit.a, products[fit.kept - 1], rtol=1e-9, atol=1e-9)
    # Nearer than codes alone, in every case; and balanced: both factors carry the root of each singular value.
    assert float((weight - q - scale * fit.b @ fit.a).norm()) == pytest.approx(min(expected), rel=1e-9)
    assert min(expected) < alone
    torch.testing.assert_close(fit.b.T @ fit.b, fit.a @ fit.a.T, rtol=1e-8, atol=1e-8)


def test_the_first_turn_is_the_best_product_for_what_the_codes_of_the_weight_leave_over() -> None:
    for name, codec in CODECS.items():
        weight = numbers(48, 64, seed=5)
        fit = alternate(weight, codec, 5, 1.0, 1)
        plain = codec.encode(weight)
        assert all(torch.equal(fit.parts[key], plain[key]) for key in plain), name
        over = weight - codec.decode(plain, (48, 64), torch.float64)
        rest = torch.linalg.svdvals(over)[5:].square().sum().sqrt()
        assert fit.left == pytest.approx([float(over.norm()), float(rest)], rel=1e-9)


def test_what_is_left_may_grow_again_so_the_best_turn_is_kept() -> None:
    """Half the rank of a matrix, at any width of codes: levels are scaled by the largest number of each block, which a
    large product moves, and the sequence has a minimum. Small ranks go on falling, ever more slowly."""
    for codec in (NF4(), NF4(double_quant=False), Int4(group=64), Int8(group=64)):
        for seed in range(2):
            weight = numbers(64, 128, seed=seed, dtype=torch.float32)
            fit = alternate(weight, codec, 32, 1.0, 8)
            assert fit.left[1] < fit.left[0]  # one turn is never worse than codes alone
            assert 2 <= fit.kept <= 4
            assert fit.left[fit.kept] == min(fit.left) < fit.left[-1]
            low = alternate(weight, codec, 4, 1.0, 5).left
            assert list(low) == sorted(low, reverse=True)


def test_no_turns_are_the_codec_alone() -> None:
    weight = numbers(40, 64, seed=1, dtype=torch.float32)
    fit, plain = alternate(weight, NF4(), 4, 2.0, 0), NF4().encode(weight)
    assert fit.a is None
    assert all(torch.equal(fit.parts[key], plain[key]) for key in plain)


@pytest.mark.parametrize("turns", [1, 3, 5])
def test_pefts_own_gives_the_same_codes_and_product(turns: int) -> None:
    """`peft.utils.loftq_utils.loftq_init` with its one accelerator's name replaced by "cpu"."""
    pytest.importorskip("bitsandbytes")
    theirs = pytest.importorskip("peft.utils.loftq_utils")
    source = inspect.getsource(theirs.loftq_init)
    assert source.count('"xpu" if is_xpu_available() else "cuda"') == 1
    scope = dict(vars(theirs))
    exec(source.replace('"xpu" if is_xpu_available() else "cuda"', '"cpu"'), scope)
    weight = 0.02 * numbers(128, 192, seed=7, dtype=torch.float32)
    q, low, up = scope["loftq_init"](weight, num_bits=4, reduced_rank=8, num_iter=turns)
    codec, left = NF4(double_quant=False), published(weight.double(), NF4(double_quant=False), 8, turns)[0]
    fitting = Fitting(codec, 8, 1.0, turns)
    ours = codec.decode(fitting(weight), (128, 192), torch.float32)
    fit = fitting.fit
    assert fit is not None
    assert fit.kept == turns, "on this matrix the last turn is the best, as PEFT takes it"
    assert float((weight - q - up @ low).norm()) == pytest.approx(left[-1], rel=1e-3)
    # The last digit of an SVD at a border between two codes may choose the other one.
    assert float(((ours - q).abs() > 1e-6).float().mean()) < 2e-3
    torch.testing.assert_close(fit.b @ fit.a, up @ low, rtol=0, atol=5e-3 * float((up @ low).abs().max()))


# ---------------------------------------------------------------------- on a model


@pytest.mark.parametrize("style", ["llama", "gpt2"])
@pytest.mark.parametrize("reparam", ["plain", "dora"])
def test_the_model_is_codes_and_product_and_nearer_to_the_dense_one(
    make_tiny: Callable[..., Any], style: str, reparam: str
) -> None:
    dense, codec = make_tiny(style), Int4(group=16)
    expected = dense(input_ids=IDS).logits.detach()
    gaps = {}
    for steps in (0, 1, 5):
        model = make_tiny(style)
        lora = LoftQ.on(model, codec, Spec(r=6, init="loftq", steps=steps, reparam=reparam))
        found = model(input_ids=IDS).logits.detach()
        gaps[steps] = float((found - expected).norm())
        # The same from dense layers that hold Q + s B A.
        plain = make_tiny(style)
        for name in lora.modules:
            module = model.get_submodule(name)
            assert module.coder is None or steps == 0
            whole = module.weight.dense() + lora.scale[name] * module.lora_B.detach() @ module.lora_A.detach()
            target = plain.get_submodule(name).weight
            target.data.copy_(whole.T if module.stored_transposed else whole)
        torch.testing.assert_close(found, plain(input_ids=IDS).logits.detach(), rtol=1e-4, atol=1e-4)
    assert gaps[1] < gaps[0]
    assert gaps[5] < gaps[0]


def test_no_turns_on_a_model_are_qlora_to_the_bit(make_tiny: Callable[..., Any]) -> None:
    mine, theirs = make_tiny("llama"), make_tiny("llama")
    lora = LoftQ.on(mine, NF4(), Spec(r=4, init="loftq", steps=0, seed=3))
    encode_model(theirs, read_structure(theirs), NF4())
    other = LoRA(theirs, Spec(r=4, seed=3))
    state = dict(other.named_state())
    assert dict(lora.named_state()).keys() == state.keys()
    assert all(torch.equal(t, state[n]) for n, t in lora.named_state())
    assert all(float(t.detach().abs().max()) == 0.0 for n, t in lora.named_parameters() if n.endswith("lora_B"))
    assert torch.equal(mine(input_ids=IDS).logits, theirs(input_ids=IDS).logits)


def test_gradients_are_those_of_autograd_through_the_decoded_weight(make_tiny: Callable[..., Any]) -> None:
    model = make_tiny("llama").double()
    lora = LoftQ.on(model, Int8(group=8), Spec(r=3, init="loftq", targets=("gate_proj",)))
    module: Any = model.model.layers[1].mlp.gate_proj
    x = numbers(5, 7, module.in_features, seed=9).requires_grad_()
    given = [x, module.lora_A, module.lora_B]
    upstream = numbers(5, 7, module.out_features, seed=10)
    found = torch.autograd.grad(module(x), given, upstream)
    whole = module.weight.dense(torch.float64)
    s = lora.scale["model.layers.1.mlp.gate_proj"]
    plain = x @ whole.T + s * (x @ module.lora_A.T) @ module.lora_B.T
    for mine, theirs in zip(found, torch.autograd.grad(plain, given, upstream), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10)


def test_saved_it_is_q_and_the_product_or_what_training_moved_on_the_original(make_tiny: Callable[..., Any]) -> None:
    dense, model, codec = make_tiny("llama"), make_tiny("llama"), NF4(block=32)
    lora = LoftQ.on(model, codec, Spec(r=4, init="loftq", targets=("down_proj", "q_proj")))
    with torch.no_grad():
        for index, p in enumerate(lora.parameters()):
            p.add_(0.1 * numbers(*p.shape, seed=index, dtype=p.dtype))
    state = {n: t.detach() for n, t in lora.named_state()}
    merging = LoftQ.merging(lora.meta(), frozenset(state), state.__getitem__)
    assert isinstance(merging, Fitted)
    for name in lora.modules:
        module, weight = model.get_submodule(name), dense.get_submodule(name).weight.detach()
        s, a, b = lora.scale[name], module.lora_A.detach(), module.lora_B.detach()
        merging.coded = True
        seen = merging.seen(f"{name}.weight", weight, codec, torch.float32)
        assert torch.equal(seen, module.weight.dense())
        trained = merging.apply(f"{name}.weight", seen.clone(), False)
        torch.testing.assert_close(trained, seen + s * b @ a, rtol=1e-5, atol=1e-6)
        merging.coded = False
        moved = merging.apply(f"{name}.weight", weight.clone(), False)
        torch.testing.assert_close(moved, weight + s * (b @ a - module.lora_B0 @ module.lora_A0), rtol=1e-5, atol=1e-6)
        # And PEFT's form, rank 2 r on the original weights, is the latter.
        wide = plain_parts(module)
        torch.testing.assert_close(weight + s * wide["lora_B"] @ wide["lora_A"], moved, rtol=1e-5, atol=1e-6)


def test_bytes_beside_the_codes_and_detaching(make_tiny: Callable[..., Any]) -> None:
    model, alone = make_tiny("llama"), make_tiny("llama")
    lora = LoftQ.on(model, NF4(), Spec(r=3, init="loftq"))
    encode_model(alone, read_structure(alone), NF4())
    sides = sum(sum(module.weight.shape) for _, module in coded_layers(model))
    assert sum(p.nbytes for p in lora.parameters()) == 4 * 3 * sides
    assert sum(t.nbytes for t in lora.additions()) == 2 * 4 * 3 * sides
    parts = {n: [t.nbytes for t in m.parts().values()] for n, m in coded_layers(model)}
    assert parts == {n: [t.nbytes for t in m.parts().values()] for n, m in coded_layers(alone)}
    lora.detach()
    assert not any("lora" in n for n, _ in (*model.named_parameters(), *model.named_buffers()))


@pytest.mark.parametrize("shape", [(256, 256), (640, 192), (192, 640)])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_coding_one_layer_takes_no_more_than_the_formula(shape: tuple[int, int], kind: torch.dtype) -> None:
    weight = numbers(*shape, seed=2, dtype=kind)
    fitting = Fitting(NF4(), 8, 1.0, 3)
    fitting(weight)  # tables, buffers of LAPACK: once
    _, found = witness(lambda: fitting(weight))
    most = scratch(*shape, 8, weight.dtype.itemsize)
    assert 0.5 * most < found.peak <= most + 2**16  # the encoder's own table of one chunk is small


def test_what_cannot_be_is_refused(make_tiny: Callable[..., Any]) -> None:
    spec = Spec(r=4, init="loftq")
    with pytest.raises(ConflictError, match=r"fitted to the dense weight[\s\S]*model\.weights=nf4[\s\S]*LoftQ\.on"):
        LoftQ(make_tiny("llama"), spec)
    coded = make_tiny("llama")
    encode_model(coded, read_structure(coded), NF4())
    with pytest.raises(ConflictError, match="no codes that were made with a product"):
        LoftQ(coded, spec)
    with pytest.raises(TargetError, match=r"adapter\.r=32"):
        LoftQ.on(make_tiny("llama"), NF4(), Spec(r=33, init="loftq"))
    with pytest.raises(TargetError, match="no linear layer"):
        LoftQ.on(make_tiny("llama"), NF4(), Spec(r=3, init="loftq", targets=("k_prok",)))
    with pytest.raises(SkimpError, match="steps -1"):
        Spec(init="loftq", steps=-1)
    broken = make_tiny("llama")
    broken.model.layers[1].mlp.up_proj.weight.data[0, 0] = float("nan")
    with pytest.raises(SkimpError, match=r"layers\.1\.mlp\.up_proj\.weight in codec 'nf4'[\s\S]*NaN"):
        LoftQ.on(broken, NF4(), spec)


def test_a_layer_alone_is_told_apart_from_one_that_was_fitted() -> None:
    layer = CodedLinear(64, 8, NF4())
    layer.coder = Fitting(NF4(), 2, 1.0, 2)
    layer.take(nn.Linear(64, 8).weight.detach())
    assert layer.coder.fit is not None
    assert layer.coder.fit.parts == {}
