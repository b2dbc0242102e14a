"""Every adapter's initialisation, loading included: peak = result + one layer, or what the adapter states above it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from skimp.run.skeleton import materialise, skeleton
from skimp.run.weights import init_scratch

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
#: One layer is 655,360 bytes in float32, a tenth of the base; everything else in it is small.
CONFIG = {
    "model_type": "llama", "hidden_size": 256, "intermediate_size": 640, "num_hidden_layers": 2, "vocab_size": 64,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "tie_word_embeddings": True,
}  # fmt: skip
LAYER = 4 * 640 * 256


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("weights")
    model = skeleton(dict(CONFIG), torch.float32)
    materialise(model, torch.float32, lambda shape, kind: torch.empty(shape, dtype=kind))
    init_scratch(model, 3)
    save_file({n: p.detach() for n, p in model.named_parameters()}, folder / "model.safetensors")
    return folder


@pytest.fixture
def initial(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import initial

    monkeypatch.setattr(initial, "ASKED", {"qst": {"reduce": 2}, "s2ft": {"o": 0.25}})
    return initial


#: An exact decomposition of a layer in float64 takes several times the layer.
DECOMPOSED = ("pissa", "sst", "loftq")
SKETCHED = "lora, init: pissa-fast"


@pytest.mark.parametrize("codec", [None, "nf4"])
def test_the_peak_is_the_result_and_one_layer(initial: Any, weights: Path, codec: str | None) -> None:
    wrong, measured = [], 0
    for case, adapter in initial.cases().items():
        if not initial.goes(adapter, codec):
            continue
        if not measured:  # tables that are made once in a process
            initial.initialised(adapter, codec, CONFIG, weights)
        found, measured = initial.initialised(adapter, codec, CONFIG, weights), measured + 1
        assert found["layer"] == LAYER
        # A coded layer is there dense, as new parts and as those they go into, with a chunk of the encoder's.
        most = LAYER + 4096 if codec is None else 1.25 * LAYER
        if case in DECOMPOSED:
            assert LAYER < found["above"] <= found["stated"], (case, found)
        elif case == SKETCHED:  # of codes: the layer decoded, and thin products with it
            assert found["above"] <= min(found["stated"], 1.5 * LAYER), (case, found)
        elif found["above"] > most or found["result"] < 0:
            wrong.append((case, found))
    assert measured >= 14
    assert not wrong


def test_what_an_adapter_states_is_no_less_than_what_it_takes(initial: Any, weights: Path) -> None:
    """On a float32 base nothing but the additions is made after loading."""
    for case, adapter in initial.cases().items():
        if adapter is not None and adapter["name"] in (
            "lora",
            "dora",
            "olora",
            "pissa",
            "gradnormlorp",
            "relora",
            "sst",
        ):
            found = initial.initialised(adapter, None, CONFIG, weights)
            assert 0 < found["above"] <= found["stated"], (case, found)
