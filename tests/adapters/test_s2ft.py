"""S2FT on a model: selection, identities with full training, merge, detach, switch, fuse, serve, PEFT."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from skimp.adapters.lora import LoRA
from skimp.adapters.s2ft import DELTA, S2FT
from skimp.adapters.s2ft_adapter import Served, SliceAdapter, side_by_side
from skimp.adapters.s2ft_select import S2FTSpec, Slice, choose, weight_norms
from skimp.core.codecs.nf4 import NF4
from skimp.core.coded_linear import coded_layers
from skimp.core.coded_model import encode_model
from skimp.core.errors import ConflictError, EffectError, SkimpError
from skimp.core.structure import read_structure

IDS = torch.arange(1, 25).view(2, 12)
ALL = S2FTSpec(v=0.5, o=0.25, u=0.1, d=0.1)


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(input_ids=IDS, use_cache=False).logits
    return found


def train(model: Any, parameters: list[nn.Parameter], steps: int = 4, lr: float = 1e-2, decay: float = 0.0) -> None:
    optimizer = torch.optim.AdamW(parameters, lr=lr, weight_decay=decay)
    for _ in range(steps):
        optimizer.zero_grad()
        model(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
        optimizer.step()


def trained(model: Any, spec: S2FTSpec, **more: Any) -> S2FT:
    handle = S2FT(model, spec, **more)
    train(model, list(handle.parameters()))
    return handle


def state(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.detach().clone() for n, p in model.named_parameters()}


# ---------------------------------------------------------------------- what is chosen
def test_random_units_are_drawn_over_all_blocks_and_stored(make_tiny: Callable[..., Any]) -> None:
    model = make_tiny("llama", num_hidden_layers=5)
    spec = S2FTSpec(v=0.3, o=0.15, u=0.01, d=0.05, seed=3)
    slices = choose(model, read_structure(model), spec)
    units = {"v_proj": 3 * 16, "o_proj": 3 * 16, "up_proj": 8, "down_proj": 40}  # floor(share x units of 5 blocks)
    for leaf, count in units.items():
        assert sum(len(s.index) for n, s in slices.items() if n.endswith(leaf)) == count
    assert {s.side for n, s in slices.items() if n.endswith(("v_proj", "up_proj"))} == {"rows"}
    assert {s.side for n, s in slices.items() if n.endswith(("o_proj", "down_proj"))} == {"columns"}
    assert len({len(s.index) for n, s in slices.items() if n.endswith("down_proj")}) > 1  # blocks differ
    assert choose(model, read_structure(model), spec) == slices
    other = choose(model, read_structure(model), S2FTSpec(v=0.3, o=0.15, u=0.01, d=0.05, seed=4))
    assert other != slices
    assert S2FTSpec.from_dict(S2FT(model, spec).spec.as_dict()).slices == slices


@pytest.mark.parametrize("smallest", [False, True])
def test_scored_units_are_the_best_of_each_block(make_tiny: Callable[..., Any], smallest: bool) -> None:
    model = make_tiny("llama")
    slices = choose(model, read_structure(model), S2FTSpec(o=0.5, d=0.1, select="weight", smallest=smallest))
    for block in model.model.layers:
        down = block.mlp.down_proj.weight.norm(dim=0)
        heads = block.self_attn.o_proj.weight.view(64, 4, 16).square().sum((0, 2))
        best = sorted(down.argsort(descending=not smallest)[:16].tolist())
        name = next(n for n, m in model.named_modules() if m is block)
        assert slices[f"{name}.mlp.down_proj"].index == tuple(best)
        wide = sorted(heads.argsort(descending=not smallest)[:2].tolist())
        assert slices[f"{name}.self_attn.o_proj"].index == tuple(16 * h + i for h in wide for i in range(16))


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ({"d": 0.001}, r"0 of 320 channels of down in all[\s\S]*d=0.0032: one of them"),
        ({"o": 0.1, "select": "weight"}, r"0 of 4 query heads in model\.layers\.0[\s\S]*o=0.25"),
        ({"d": 0.5, "select": "gradient"}, r"no scores of[\s\S]*select=random"),
    ],
)
def test_shares_that_choose_nothing_are_refused(make_tiny: Callable[..., Any], spec: Any, said: str) -> None:
    model = make_tiny("llama")
    before = {n: p.requires_grad for n, p in model.named_parameters()}
    with pytest.raises(SkimpError, match=said):
        S2FT(model, S2FTSpec(**spec))
    assert before == {n: p.requires_grad for n, p in model.named_parameters()}


def test_a_spec_out_of_range_is_refused() -> None:
    with pytest.raises(SkimpError, match="all are 0"):
        S2FTSpec()
    with pytest.raises(SkimpError, match=r"d=1\.5"):
        S2FTSpec(d=1.5)


@pytest.mark.parametrize("select", ["random", "weight"])
def test_slices_beside_a_coded_base_are_those_beside_its_decoded_weights(
    make_tiny: Callable[..., Any], select: Any
) -> None:
    coded, plain = make_tiny("llama"), make_tiny("llama")
    structure = read_structure(coded)
    encode_model(coded, structure, NF4())
    with torch.no_grad():
        for name, module in coded_layers(coded):
            plain.get_submodule(name).weight.copy_(module.weight.dense())
    spec = S2FTSpec(v=0.5, o=0.25, u=0.1, d=0.1, select=select)
    one, other = trained(coded, spec, structure=structure), trained(plain, spec)
    assert one.slices == other.slices
    torch.testing.assert_close(logits(coded), logits(plain), rtol=0, atol=1e-5)
    with pytest.raises(ConflictError, match=r"merging into .* layers kept in codec 'nf4'"):
        one.merge()
    one.detach()
    with pytest.raises(ConflictError, match=r"permute on [\s\S]*codec 'nf4'[\s\S]*permute=false"):
        S2FT(coded, S2FTSpec(d=0.1, permute=True), structure)


def test_foreign_codes_and_second_adapter_are_refused(make_tiny: Callable[..., Any]) -> None:
    model = make_tiny("llama")
    down = model.model.layers[0].mlp.down_proj
    codes = nn.Parameter(torch.zeros(64, 160, dtype=torch.uint8), requires_grad=False)
    weight, down.weight = down.weight, codes
    with pytest.raises(ConflictError, match=r"down_proj[\s\S]*torch.uint8[\s\S]*model\.weights=nf4"):
        S2FT(model, S2FTSpec(d=0.1))
    down.weight = weight
    handle = S2FT(model, S2FTSpec(d=0.1))
    for make in (lambda: S2FT(model, S2FTSpec(o=0.5)), lambda: LoRA(model)):
        with pytest.raises(ConflictError, match="one addition a layer"):
            make()
    handle.detach()
    LoRA(model)
    with pytest.raises(ConflictError, match="has an adapter"):
        S2FT(model, S2FTSpec(o=0.5))


# ---------------------------------------------------------------------- identities
@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen2"])
def test_step_zero_is_the_base_to_the_bit_and_only_slices_train(make_tiny: Callable[..., Any], family: str) -> None:
    model = make_tiny(family)
    before = logits(model)
    handle = S2FT(model, ALL)
    assert torch.equal(logits(model), before)
    assert {n for n, p in model.named_parameters() if p.requires_grad} == {n for n, _ in handle.named_parameters()}
    numbers = sum(p.numel() for p in handle.parameters())
    assert (
        numbers
        == sum(row.parameters for row in handle.table())
        == 64 * sum(len(s.index) for s in handle.slices.values())
    )


@pytest.mark.parametrize("permuted", [False, True])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_all_of_every_matrix_is_full_adamw_on_them_step_by_step(
    make_tiny: Callable[..., Any], family: str, permuted: bool
) -> None:
    """Share 1 of v, o, u and d against AdamW on those matrices, float64, eps and decay as torch has them."""
    sliced, dense = make_tiny(family).double(), make_tiny(family).double()
    handle = S2FT(sliced, S2FTSpec(v=1, o=1, u=1, d=1, permute=permuted))
    if family == "gpt2":  # v alone is a third of c_attn: the dense run takes the gradient of that third

        def third(grad: Tensor) -> Tensor:
            return torch.cat([torch.zeros_like(grad[:, :128]), grad[:, 128:]], 1)

    weights = [dense.get_submodule(name).weight for name in handle.slices]
    for p in dense.parameters():
        p.requires_grad_(any(p is w for w in weights))
    for name, weight in zip(handle.slices, weights, strict=True):
        if name.endswith("c_attn"):
            weight.register_hook(third)
    one = torch.optim.AdamW(handle.parameters(), lr=1e-3, eps=1e-6, weight_decay=0.0)
    other = torch.optim.AdamW(weights, lr=1e-3, eps=1e-6, weight_decay=0.0)
    for _ in range(4):
        for model, optimizer in ((sliced, one), (dense, other)):
            optimizer.zero_grad()
            model(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
            optimizer.step()
        found = handle.extract_adapter()
        for name, weight in zip(handle.slices, weights, strict=True):
            base = make_tiny(family).double().get_submodule(name)
            moved = found.apply(f"{name}.weight", base.weight.detach().clone(), family == "gpt2")
            torch.testing.assert_close(moved, weight.detach(), rtol=0, atol=1e-10)


@pytest.mark.parametrize("permuted", [False, True])
def test_entries_that_are_not_chosen_stay_to_the_bit_with_decay(make_tiny: Callable[..., Any], permuted: bool) -> None:
    model, base = make_tiny("llama"), state(make_tiny("llama"))
    handle = S2FT(model, S2FTSpec(v=0.5, o=0.25, u=0.1, d=0.1, permute=permuted))
    train(model, list(handle.parameters()), steps=5, decay=0.1)
    adapter = handle.extract_adapter()
    for name, before in base.items():
        layer = name.removesuffix(".weight")
        now = adapter.apply(name, before.clone(), False) if name in adapter.changed else before
        if layer not in handle.slices:
            continue
        chosen = handle.slices[layer]
        changed = (now != before).any(0 if chosen.side == "columns" else 1)
        assert set(changed.nonzero().flatten().tolist()) == set(chosen.index)
    handle.detach()
    assert all(torch.equal(p, base[n]) for n, p in state(model).items())


def test_optimizer_states_are_two_numbers_a_trained_one(make_tiny: Callable[..., Any]) -> None:
    model = make_tiny("llama")
    handle = S2FT(model, ALL)
    optimizer = torch.optim.AdamW(handle.parameters())
    model(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
    optimizer.step()
    held = sum(v.numel() for s in optimizer.state.values() for k, v in s.items() if k != "step")
    assert held == 2 * sum(p.numel() for p in handle.parameters())
    assert all(p.grad is None for n, p in model.named_parameters() if not n.endswith(DELTA))


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen2"])
def test_permuted_and_gathered_slices_are_the_same_training(make_tiny: Callable[..., Any], family: str) -> None:
    found = []
    for permuted in (False, True):
        model = make_tiny(family).double()
        handle = trained(model, S2FTSpec(v=0.5, o=0.25, u=0.1, d=0.1, permute=permuted))
        adapter = handle.extract_adapter()
        moved = {
            n: adapter.apply(n, make_tiny(family).double().get_parameter(n).detach(), family == "gpt2")
            for n in adapter.changed
        }
        handle.detach()
        assert all(
            torch.equal(p, q) for p, q in zip(model.parameters(), make_tiny(family).double().parameters(), strict=True)
        )
        found.append(moved)
    assert found[0].keys() == found[1].keys()
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value, rtol=0, atol=1e-9)


# ---------------------------------------------------------------------- merge, detach, rebuild
@pytest.mark.parametrize("permuted", [False, True])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_merge_gives_the_same_logits_and_detach_the_base_to_the_bit(
    make_tiny: Callable[..., Any], family: str, permuted: bool
) -> None:
    model = make_tiny(family)
    before, shown = state(model), logits(model)
    handle = trained(model, S2FTSpec(v=0.5, o=0.25, u=0.1, d=0.1, permute=permuted))
    expected = logits(model)
    assert not torch.equal(expected, shown)
    merged = handle.merge(keep=True, probe=lambda: logits(model))
    assert merged.logits is not None
    assert merged.logits < 1e-5
    assert merged.rounding < 1e-7 < merged.change
    torch.testing.assert_close(logits(model), expected, rtol=0, atol=1e-5)
    handle.unmerge()
    torch.testing.assert_close(logits(model), expected, rtol=0, atol=1e-6)
    handle.merge(keep=True)
    handle.detach()
    assert all(torch.equal(p, before[n]) for n, p in state(model).items())
    assert torch.equal(logits(model), shown)
    assert not any("forward" in vars(m) or m._non_persistent_buffers_set & {"s2ft_index"} for m in model.modules())


def test_merging_twice_nothing_or_without_a_way_back_is_refused(make_tiny: Callable[..., Any]) -> None:
    handle = trained(make_tiny("llama"), ALL)
    with pytest.raises(ConflictError, match="nothing is merged"):
        handle.unmerge()
    handle.merge()
    with pytest.raises(ConflictError, match="merged already"):
        handle.merge()
    with pytest.raises(ConflictError, match=r"keep=True"):
        handle.detach()
    with pytest.raises(ConflictError, match="unmerge first"):
        handle.switch(handle.extract_adapter())
    with pytest.raises(EffectError, match="merged"):
        handle.assert_effect({}, {})


@pytest.mark.parametrize("permuted", [False, True])
def test_a_handle_is_rebuilt_from_its_meta_and_state(make_tiny: Callable[..., Any], permuted: bool) -> None:
    one = trained(make_tiny("llama"), S2FTSpec(o=0.25, d=0.1, permute=permuted))
    saved = {n: t.detach().clone() for n, t in one.named_state()}
    other = make_tiny("llama")
    again = S2FT.rebuild(other, read_structure(other), one.meta())
    again.load(saved.__getitem__)
    assert torch.equal(logits(other), logits(one.model))
    assert again.slices == one.slices
    with pytest.raises(SkimpError, match="this base needs"):
        again.load(lambda name: torch.zeros(2, 2))


def test_mutations_are_seen(make_tiny: Callable[..., Any]) -> None:
    """A layer whose own forward came back, and a base weight that trains."""
    handle = S2FT(make_tiny("llama"), ALL)
    name = next(iter(handle.slices))
    del handle.module(name).forward
    before = state(handle.model)
    train(handle.model, list(handle.parameters()), steps=1)
    with pytest.raises(EffectError, match=name):
        handle.assert_effect(before, state(handle.model))
    handle = S2FT(make_tiny("llama"), ALL)
    handle.model.model.norm.weight.requires_grad_(True)
    with pytest.raises(EffectError, match=r"frozen base[\s\S]*model\.norm\.weight"):
        handle.assert_effect(state(handle.model), state(handle.model))


# ---------------------------------------------------------------------- several adapters
def two_adapters(make_tiny: Callable[..., Any]) -> tuple[SliceAdapter, SliceAdapter]:
    """Trained on the same base, on slices that do not meet."""
    one = trained(make_tiny("llama"), S2FTSpec(o=0.25, d=0.1, u=0.05))
    two = trained(make_tiny("llama"), S2FTSpec(o=0.25, d=0.1, v=0.5, seed=1), avoid=[one.slices])
    return one.extract_adapter(), two.extract_adapter()


def with_adapter(make_tiny: Callable[..., Any], *adapters: SliceAdapter) -> Any:
    model = make_tiny("llama")
    for adapter in adapters:
        for name in adapter.changed:
            adapter.apply(name, model.get_parameter(name).data, False)
    return model


def test_switching_there_and_back_is_exact_in_delta_storage(make_tiny: Callable[..., Any]) -> None:
    one, two = two_adapters(make_tiny)
    for permuted in (False, True):
        model = make_tiny("llama")
        base = state(model)
        handle = S2FT(model, S2FTSpec(o=0.25, d=0.1, u=0.05, permute=permuted))
        handle.switch(one)
        first = logits(model)
        torch.testing.assert_close(first, logits(with_adapter(make_tiny, one)), rtol=0, atol=1e-5)
        handle.switch(two)
        torch.testing.assert_close(logits(model), logits(with_adapter(make_tiny, two)), rtol=0, atol=1e-5)
        handle.switch(one)
        assert torch.equal(logits(model), first)
        handle.detach()
        assert all(torch.equal(p, base[n]) for n, p in state(model).items())


def test_served_adapters_switch_fuse_and_leave_the_base(make_tiny: Callable[..., Any]) -> None:
    one, two = two_adapters(make_tiny)
    assert one.overlaps(two) == []
    model = make_tiny("llama")
    base, served = state(model), Served(model)
    served.switch(one)
    first = state(model)
    served.switch(two)
    served.switch(one)
    assert all(torch.equal(p, first[n]) for n, p in state(model).items())
    served.fuse([one, two], [1.0, 0.5])
    half = SliceAdapter(two.slices, lambda name: two.delta(name) * 0.5)
    expected = state(with_adapter(make_tiny, one, half))
    assert all(torch.equal(p, expected[n]) for n, p in state(model).items())
    served.fuse([one, one])  # the same slice twice
    served.restore()
    assert all(torch.equal(p, base[n]) for n, p in state(model).items())
    with pytest.raises(SkimpError, match="2 adapters and 1 weights"):
        served.fuse([one, two], [1.0])


def test_adapters_side_by_side_in_one_batch(make_tiny: Callable[..., Any]) -> None:
    one, two = two_adapters(make_tiny)
    model, ids = make_tiny("llama"), torch.arange(1, 37).view(3, 12)
    off = side_by_side(model, [one, two], [1, None, 0])
    with torch.no_grad():
        mixed = model(input_ids=ids, use_cache=False).logits
        off()
        plain = model(input_ids=ids, use_cache=False).logits
        alone = [with_adapter(make_tiny, a)(input_ids=ids, use_cache=False).logits for a in (one, two)]
    for row, expected in enumerate((alone[1][0], plain[1], alone[0][2])):
        torch.testing.assert_close(mixed[row], expected, rtol=0, atol=1e-5)


def test_slices_kept_for_another_adapter_are_left_alone(make_tiny: Callable[..., Any]) -> None:
    model = make_tiny("llama")
    structure = read_structure(model)
    one = choose(model, structure, S2FTSpec(d=0.5))
    two = choose(model, structure, S2FTSpec(d=0.5), avoid=[one])
    assert all(not set(one[n].index) & set(two[n].index) for n in one.keys() & two.keys())
    with pytest.raises(SkimpError, match=r"160 that no other adapter tunes[\s\S]*d=0.5"):
        choose(model, structure, S2FTSpec(d=0.6), avoid=[one])
    assert SliceAdapter(one, lambda n: torch.zeros(1)).overlaps(SliceAdapter(one, lambda n: torch.zeros(1)))


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_as_a_lora_of_one_hot_factors_the_logits_are_the_same(make_tiny: Callable[..., Any], family: str) -> None:
    handle = trained(make_tiny(family), S2FTSpec(v=0.5, o=0.25, u=0.1, d=0.1, permute=True))
    expected = logits(handle.model)
    config, tensors = handle.peft("base")
    assert config["rank_pattern"] == config["alpha_pattern"] == {n: len(s.index) for n, s in handle.slices.items()}
    plain = make_tiny(family)
    with torch.no_grad():
        for name in handle.slices:
            a, b = (tensors[f"base_model.model.{name}.lora_{part}.weight"] for part in "AB")
            weight = plain.get_submodule(name).weight
            (weight.t() if family == "gpt2" else weight).add_(b @ a)
    torch.testing.assert_close(logits(plain), expected, rtol=0, atol=1e-5)


def test_peft_itself_gives_the_same_logits(make_tiny: Callable[..., Any], tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    import json

    from safetensors.torch import save_file

    handle = trained(make_tiny("llama"), S2FTSpec(v=0.5, o=0.25, u=0.1, d=0.1))
    config, tensors = handle.peft("base")
    assert len(set(config["rank_pattern"].values())) > 1
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    loaded = peft.PeftModel.from_pretrained(make_tiny("llama"), tmp_path)
    torch.testing.assert_close(logits(loaded), logits(handle.model), rtol=0, atol=1e-5)
    (tmp_path / "adapter_config.json").write_text(json.dumps({**config, "alpha_pattern": {}}))
    wrong = peft.PeftModel.from_pretrained(make_tiny("llama"), tmp_path)
    assert float((logits(wrong) - logits(handle.model)).abs().max()) > 1e-3


def test_weight_norms_of_units(make_tiny: Callable[..., Any]) -> None:
    from skimp.adapters.s2ft_select import units_of

    model = make_tiny("gpt2")
    units = units_of(model, read_structure(model))["v"][0][0]
    expected = model.transformer.h[0].attn.c_attn.weight[:, 128:].view(64, 4, 16).square().sum((0, 2)).sqrt()
    torch.testing.assert_close(weight_norms(model, units), expected)
    assert Slice("rows", units.numbers([1])).index == tuple(range(144, 160))
