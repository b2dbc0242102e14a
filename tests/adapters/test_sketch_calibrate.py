"""Sketches of a whole model learned from text: block by block, its own forward to the bit, bounded and better."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from test_sketchtune import IDS, SIZES, logits, model
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from skimp.adapters import SketchTune
from skimp.adapters.sketch_calibrate import _moments, _Rows, calibrate, peak_bytes
from skimp.core.attention import register
from skimp.core.batch import Batch
from skimp.core.codecs import Sketch
from skimp.core.coded_linear import coded_layers
from skimp.core.coded_model import encode_model
from skimp.core.errors import ConflictError, SkimpError
from skimp.core.memory.tracker import Tracker
from skimp.core.structure import read_structure


def dense(kind: str) -> dict[str, Tensor]:
    """Every linear layer's weight (outputs, inputs) of `model(kind)` before it was coded: the seed is the same."""

    class Nothing(Sketch):
        def encode(self, x: Tensor, importance: Tensor | None = None) -> dict[str, Tensor]:
            kept.append(x.clone())
            return super().encode(x, importance)

    kept: list[Tensor] = []
    names = [name for name, _ in coded_layers(model(kind, Nothing()))]
    return dict(zip(names, kept, strict=True))


def text(vocabulary: int, rows: int = 4, seq: int = 24, seed: int = 0) -> list[Batch]:
    ids = torch.randint(0, vocabulary, (rows, seq), generator=torch.Generator().manual_seed(seed))
    positions = torch.arange(seq).unsqueeze(0)
    return [Batch(row.unsqueeze(0), row.unsqueeze(0), positions, ((0, seq),), seq) for row in ids]


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_rows_walk_as_the_model_does_and_moments_are_of_what_layers_are_given(kind: str) -> None:
    base = model(kind)
    structure, batches = read_structure(base), text(60)
    rows = _Rows(base, structure, batches, autocast=False)
    given: dict[str, list[Tensor]] = {}
    layers = {n: m for n, m in coded_layers(base) if n.startswith(structure.blocks[1])}
    for name, layer in layers.items():
        layer.register_forward_pre_hook(lambda m, args, name=name: given.setdefault(name, []).append(args[0].double()))
    with torch.no_grad():
        rows.through(0, True)
        found = _moments(layers, partial(rows.through, 1, False))
        walked, given = dict(given), {}
        for batch in batches:
            base(input_ids=batch.ids, position_ids=batch.positions)
    for name in layers:
        seen, whole = (torch.cat(of[name]).flatten(0, 1) for of in (walked, given))
        assert torch.equal(seen, whole), name
        torch.testing.assert_close(found[name].double(), seen.t() @ seen / seen.shape[0], rtol=1e-4, atol=1e-6)
    assert not any("forward" in vars(base.get_submodule(name)) for name in structure.blocks)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_learned_sketches_have_a_lower_error_and_trained_they_bring_their_codes_along(kind: str) -> None:
    before, base = dense(kind), model(kind, Sketch(2, 2))
    base.train()
    structure = read_structure(base)
    names = [name for name, _ in coded_layers(base)]
    found = calibrate(base, structure, names, text(60), before.__getitem__)
    assert base.training
    assert [one.layer for one in found] == names
    assert sum(one.learned for one in found) < 0.8 * sum(one.plain for one in found)
    for one in found:
        assert one.learned < one.plain, one.layer
    tuned = SketchTune(base.eval(), own_codes=True)
    state = {name: tensor.clone() for name, tensor in tuned.named_state()}
    assert sum(".weight_codes" in name for name in state) == len(names)
    # On a base of plain k-means, as a resume has it.
    again = SketchTune.rebuild(model(kind, Sketch(2, 2)), structure, tuned.meta())
    again.load(state.__getitem__)
    again.load_values(tuned.values())
    assert torch.equal(logits(again.model), logits(base))
    with pytest.raises(ConflictError, match=r"not given[\s\S]*came with its own"):
        again.detach()
    plain = model(kind, Sketch(2, 2)).state_dict()
    again.detach(plain)
    assert all(torch.equal(value, plain[name]) for name, value in again.model.state_dict().items())
    grids = SketchTune.merging(tuned.meta(), frozenset(state), state.__getitem__)
    layer = base.get_submodule(names[0])
    own = grids.kept(f"{names[0]}.weight", layer.codec, layer.weight.shape, torch.float32)
    assert own is not None
    assert torch.equal(grids.of_codes(f"{names[0]}.weight", own, None), layer.weight.dense())


@pytest.mark.parametrize(("hidden", "inner"), [(256, 512), (128, 640)])
def test_its_memory_is_that_of_one_block_and_below_the_formula(hidden: int, inner: int) -> None:
    peaks = []
    for count in (2, 5):
        torch.manual_seed(0)
        sizes: Any = {**SIZES, "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": count}
        config = LlamaConfig(vocab_size=97, attn_implementation=register(), **sizes)
        base: Any = LlamaForCausalLM(config)
        structure = read_structure(base)
        encode_model(base, structure, Sketch(4, 2))
        layers = dict(coded_layers(base))
        shapes = {name: (m.out_features, m.in_features) for name, m in layers.items()}
        with Tracker() as tracker:
            tracker.hold(base.parameters(), "weights")
            tracker.hold(base.buffers(), "weights")
            rest = tracker.live
            calibrate(base, structure, layers, text(97, 8, 48), lambda name: layers[name].weight.dense())  # noqa: B023
            peaks.append(tracker.peak.total - rest)
        assert peaks[-1] <= peak_bytes(shapes, structure.blocks, 48, 8, hidden, 4) < 1.5 * peaks[-1]
    assert peaks[1] == peaks[0]


def test_no_text_and_layers_that_see_none_are_refused() -> None:
    base = model()
    structure, before = read_structure(base), dense("llama")
    names = [name for name, _ in coded_layers(base)]
    with pytest.raises(SkimpError, match="no rows of text"):
        calibrate(base, structure, names, [], before.__getitem__)
    with pytest.raises(SkimpError, match=r"elsewhere[\s\S]*no token"):
        calibrate(base, structure, [names[0], "elsewhere"], text(60, 1), before.__getitem__)
    broken = {**before, names[3]: before[names[3]] * float("nan")}
    with pytest.raises(SkimpError, match=names[3]):
        calibrate(base, structure, names, text(60, 1), broken.__getitem__)
    assert logits(base).shape == (*IDS.shape, 97)
