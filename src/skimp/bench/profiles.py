"""Sizes of the pre-training benchmark, and the learning rates that are tried for a method.

The rates are a ladder of half decades. A method starts on three neighbouring rungs around its usual rate; while the
best of those tried is the lowest or the highest, the next rung outward is tried too. So nobody's rate is chosen by
hand, and no method is shown at the edge of what was tried, unless the ladder itself ends there (the table marks it).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from skimp.core.errors import SkimpError, did_you_mean
from skimp.core.registry import methods

LADDER = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
#: The middle rung to start from. Rules whose step is a sign or an orthogonal matrix take other rates than Adam's.
USUAL = {"lion": 3e-4, "muon": 1e-2, "dion": 1e-2, "adafactor": 1e-2, "came": 1e-3}
USUAL_RATE = 3e-3
#: What a method needs in the recipe beside its name.
BESIDE: dict[str, dict[str, Any]] = {"adamw-bf16": {"precision": "bf16", "optimizer": {"name": "adamw"}}}
SAMPLERS = ("lisa", "owlore", "badam")


def llama(vocab: int, hidden: int, inner: int, blocks: int, heads: int, positions: int) -> dict[str, Any]:
    """config.json of a small Llama with tied embedding and head."""
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": blocks,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "vocab_size": vocab,
        "max_position_embeddings": positions,
        "tie_word_embeddings": True,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "rms_norm_eps": 1e-6,
    }


@dataclass(frozen=True)
class Profile:
    """One size of the benchmark.

    Attributes:
        vocab, hidden, inner, blocks, heads: the Llama; embedding and head are tied.
        seq, batch_tokens, tokens: of a row, of a step, and of a run.
        warmup: share of the steps.
        eval_tokens: held-out tokens at the end.
        rungs: how many neighbouring rates a method starts with.
        code: the text is Python's own documentation, or also the source of its standard library.
        methods, seeds: what is run where nothing is said; no methods: every update rule.
    """

    name: str
    vocab: int
    hidden: int
    inner: int
    blocks: int
    heads: int
    seq: int
    batch_tokens: int
    tokens: int
    warmup: float = 0.1
    eval_tokens: int = 32768
    rungs: int = 3
    code: bool = False
    methods: tuple[str, ...] = ()
    seeds: tuple[int, ...] = (0, 1, 2)

    @property
    def steps(self) -> int:
        """Optimizer steps of a run."""
        return self.tokens // self.batch_tokens

    @property
    def parameters(self) -> int:
        """Numbers of the model."""
        block = 4 * self.hidden**2 + 3 * self.hidden * self.inner + 2 * self.hidden
        return self.vocab * self.hidden + self.blocks * block + self.hidden

    @property
    def config(self) -> dict[str, Any]:
        """config.json of the model."""
        return llama(self.vocab, self.hidden, self.inner, self.blocks, self.heads, self.seq)

    def digest(self, text: str) -> str:
        """What results of this profile on this text have in common; others are never mixed in."""
        facts = {key: value for key, value in asdict(self).items() if key not in ("methods", "seeds")}
        return hashlib.sha256(json.dumps([facts, text]).encode()).hexdigest()[:16]


#: One of each kind: the yardstick, coded states, a sign, an orthogonal update, and four ways of low-rank gradients.
EIGHT = ("adamw", "adamw8bit", "lion", "muon", "galore8bit", "grass", "apollo-mini", "fira")

PROFILES: dict[str, Profile] = {
    p.name: p
    for p in (
        Profile("seconds", 320, 32, 88, 2, 2, 32, 256, 2048, eval_tokens=1024, rungs=2),
        Profile("short", 1024, 96, 256, 3, 4, 64, 1024, 500_000, eval_tokens=16384, methods=EIGHT, seeds=(0,)),
        Profile("tiny", 2048, 128, 344, 4, 4, 128, 2048, 500_000),
        Profile("small", 4096, 256, 688, 6, 4, 256, 8192, 5_000_000, code=True),
        Profile("medium", 8192, 384, 1024, 8, 6, 256, 16384, 20_000_000, code=True),
    )
}


def profile_of(name: str) -> Profile:
    """A profile by name.

    Raises:
        SkimpError: there is none; says the nearest.
    """
    if name not in PROFILES:
        raise SkimpError(f"bench profile '{name}'", "no such name", instead=did_you_mean(name, PROFILES))
    return PROFILES[name]


def chosen(names: Sequence[str], profile: Profile) -> list[str]:
    """The methods to run: those named, or the profile's own, or every update rule that is registered.

    Raises:
        SkimpError: a name that is neither an update rule nor a way to train blocks in turn.
    """
    rules = [n for n, f in methods().items() if f.kind == "update rule"]
    known = [*rules, *(s for s in SAMPLERS if s in methods())]
    for name in names:
        if name not in known:
            raise SkimpError(f"bench of method '{name}'", "no update rule", instead=did_you_mean(name, known))
    return list(dict.fromkeys(names)) or list(profile.methods) or rules


def changes(method: str, profile: Profile) -> dict[str, Any]:
    """The sections of a recipe that switch a method on. A rank is at most a quarter of the width, as in the papers'
    tables; one that a method has smaller, or counts as a share, stays. A basis lasts a tenth of the run at most."""
    if method in SAMPLERS:
        layers = {"name": method, "active": max(1, profile.blocks // 2), "every": max(1, profile.steps // 12)}
        return {"train": {"layers": layers}}
    if method in BESIDE:
        return BESIDE[method]
    usual = {key: option.default for key, option in methods()[method].options.items()}
    own: dict[str, Any] = {}
    for key, most in (("rank", profile.hidden // 4), ("refresh", profile.steps // 10)):
        value = usual.get(key)
        if isinstance(value, int):
            own[key] = min(value, max(1, most))
    # CompAct never forms the gradients whose norm there would be to clip by.
    return {"optimizer": {"name": method, **own}} | ({"train": {"clip": None}} if method == "compact" else {})


def due(
    method: str,
    seeds: Sequence[int],
    rungs: int,
    losses: dict[tuple[float, int], float],
    usual: float | None = None,
    ladder: Sequence[float] = LADDER,
) -> list[tuple[float, int]]:
    """The (rate, seed) pairs that a method still needs, as far as is known now; empty when it is done.

    Args:
        rungs: of the ladder that are tried at first; the next one outward is tried from 3 on.
        losses: held-out losses so far; infinite where a run diverged.
        usual: the middle rung to start from; None: that of an update rule. ladder: all rungs.
    """
    first = seeds[0]
    tried = [i for i, rate in enumerate(ladder) if (rate, first) in losses]
    middle = ladder.index(USUAL.get(method, USUAL_RATE) if usual is None else usual)
    start = range(middle - (rungs - 1) // 2, middle + rungs // 2 + 1)
    missing = [ladder[i] for i in start if i not in tried]
    if missing:
        return [(rate, first) for rate in missing]
    top = best(first, losses)
    outward = {ladder[tried[0]]: tried[0] - 1, ladder[tried[-1]]: tried[-1] + 1}.get(top)
    if outward is not None and 0 <= outward < len(ladder) and rungs > 2:
        return [(ladder[outward], first)]
    return [(top, seed) for seed in seeds[1:] if (top, seed) not in losses]


def best(seed: int, losses: dict[tuple[float, int], float]) -> float:
    """The rate with the lowest loss for this seed; of equal ones the smallest."""
    return min((loss, rate) for (rate, s), loss in losses.items() if s == seed)[1]
