"""Sizes of the fine-tuning benchmark, and the methods it runs.

Learning rates are walked as in the pre-training benchmark (`profiles.due`), each method around a rate of its own; the
loss on the dev part decides, and the test part is scored once a run and never looked at before.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from skimp.bench.profiles import llama
from skimp.bench.tasks import Sizes
from skimp.core.errors import SkimpError, did_you_mean
from skimp.core.registry import methods

LADDER = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
FULL, BASE = "full", "base"
#: Methods that are an adapter on a coded base: name -> (adapter, codec).
ON_CODES = {"qlora": ("lora", "nf4"), "loftq": ("loftq", "nf4"), "sketchtune": ("sketchtune", "sketch")}
#: Rates of a method over that of LoRA: what trains few or shared numbers moves further in a step.
FASTER = {"sst": 0.3, "s2a": 3.0}


@dataclass(frozen=True)
class Grown:
    """A small Llama that is pre-trained for the purpose, on Python's documentation, some of its source, and sums.

    Attributes:
        vocab, hidden, inner, blocks, heads: its sizes; embedding and head are tied.
        tokens, batch_tokens, lr: of the pre-training.
        characters: of documentation, and as many of source.
        rounds: how often every sum comes in the text. stories: told with their sums.
    """

    vocab: int
    hidden: int
    inner: int
    blocks: int
    heads: int
    tokens: int
    batch_tokens: int
    lr: float
    characters: int
    rounds: int
    stories: int

    @property
    def steps(self) -> int:
        """Optimizer steps of the pre-training."""
        return self.tokens // self.batch_tokens

    def config(self, positions: int) -> dict[str, Any]:
        """config.json of the model."""
        return llama(self.vocab, self.hidden, self.inner, self.blocks, self.heads, positions)


@dataclass(frozen=True)
class Tuning:
    """One size of the benchmark.

    Attributes:
        model: a recipe's model name, or what is pre-trained first.
        seq, batch_tokens, steps: of a fine-tuning.
        usual: LoRA's middle rung; others start at `FASTER` times it, on the nearest rung. full: of full fine-tuning.
        rank: of low-rank additions. reduce: of side networks. heads: of the model, one of which s2ft trains.
        sizes: of the three tasks. answer: new tokens at most.
        rungs: how many neighbouring rates a method starts with.
        methods, seeds: what is run where nothing is said; no methods: full fine-tuning and every adapter.
    """

    name: str
    model: str | Grown
    seq: int
    batch_tokens: int
    steps: int
    usual: float
    full: float
    rank: int
    reduce: int
    heads: int
    sizes: Sizes
    answer: int = 48
    rungs: int = 3
    methods: tuple[str, ...] = ()
    seeds: tuple[int, ...] = (0, 1, 2)

    def digest(self, found: str) -> str:
        """What results of this profile on these items and texts have in common; others are never mixed in."""
        facts = {
            key: value
            for key, value in asdict(self).items()
            if key not in ("methods", "seeds", "rungs", "usual", "full")
        }
        return hashlib.sha256(json.dumps([facts, found]).encode()).hexdigest()[:16]

    def rate(self, method: str) -> float:
        """The rung that a method's search starts around."""
        wanted = self.full if method == FULL else self.usual * FASTER.get(method, 1.0)
        return min(LADDER, key=lambda rung: abs(rung / wanted - 1))


_TINY = Grown(2048, 128, 344, 4, 4, 2_000_000, 2048, 5e-3, 800_000, rounds=60, stories=20_000)
_SHORT = Grown(1024, 64, 176, 3, 4, 1_200_000, 1024, 5e-3, 200_000, rounds=60, stories=12_000)
_SECONDS = Grown(512, 32, 88, 2, 2, 8192, 512, 5e-3, 20_000, rounds=2, stories=40)
#: For the short table, and for the real model: LoRA and some of its kin, 4 bits, slices, and beside the model.
EIGHT = (FULL, "lora", "dora", "olora", "qlora", "s2ft", "s2a", "qst")
SIX = (FULL, "lora", "olora", "qlora", "s2ft", "qst")

_LISTED = (
    Tuning(
        "seconds",
        _SECONDS,
        seq=128,
        batch_tokens=512,
        steps=4,
        usual=3e-3,
        full=3e-3,
        rank=4,
        reduce=2,
        heads=2,
        sizes=Sizes(40, 8, 12, largest=9),
        answer=24,
        rungs=1,
        methods=(FULL, "lora"),
        seeds=(0,),
    ),
    Tuning(
        "short",
        _SHORT,
        seq=128,
        batch_tokens=512,
        steps=400,
        usual=3e-3,
        full=3e-3,
        rank=8,
        reduce=2,
        heads=4,
        sizes=Sizes(1000, 100, 130, largest=10, deepest=1),
        answer=24,
        rungs=2,
        methods=EIGHT,
        seeds=(0, 1),
    ),
    Tuning(
        "tiny",
        _TINY,
        seq=128,
        batch_tokens=1024,
        steps=400,
        usual=3e-3,
        full=3e-3,
        rank=8,
        reduce=4,
        heads=4,
        sizes=Sizes(2400, 150, 300, largest=20),
    ),
    Tuning(
        "smollm2",
        "smollm2-135m",
        seq=128,
        batch_tokens=1024,
        steps=24,
        usual=3e-4,
        full=3e-5,
        rank=16,
        reduce=16,
        heads=9,
        sizes=Sizes(600, 60, 100, largest=50),
        answer=56,
        rungs=2,
        methods=SIX,
        seeds=(0,),
    ),
)
TUNINGS: dict[str, Tuning] = {tuning.name: tuning for tuning in _LISTED}
#: What a name stands for when it is more than one.
TOGETHER = {"default": ("tiny", "smollm2")}


def tunings_of(name: str) -> list[Tuning]:
    """The profiles that a name stands for.

    Raises:
        SkimpError: there is none; says the nearest.
    """
    known = [*TOGETHER, *TUNINGS]
    if name not in known:
        raise SkimpError(f"bench profile '{name}'", "no such name", instead=did_you_mean(name, known))
    return [TUNINGS[part] for part in TOGETHER.get(name, (name,))]


def chosen(names: Sequence[str], profile: Tuning) -> list[str]:
    """The methods to run: those named, or the profile's own, or full fine-tuning and every adapter.

    Raises:
        SkimpError: a name that is no adapter, nor `full`, nor an adapter on codes.
    """
    known = list(dict.fromkeys([FULL, *(n for n, f in methods().items() if f.kind == "adapter"), *ON_CODES]))
    for name in names:
        if name not in known:
            raise SkimpError(f"bench of method '{name}'", "no adapter", instead=did_you_mean(name, known))
    return list(dict.fromkeys(names)) or list(profile.methods) or known
