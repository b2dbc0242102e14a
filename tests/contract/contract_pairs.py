"""Every two registered methods as one run: what switches each on, and how it is seen that it acted.

A pair is either refused by the registry (with its reason and the way out) or run here: three steps on a CPU from one
recipe that switches both on. The page "What goes with what" of the docs is drawn from the registry's refusals alone;
the tests beside this file are what its other cells stand on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from itertools import combinations
from typing import Any

import torch
from contract_rows import (
    BLOCKS,
    COMPACT,
    DERIVATIVE,
    DISK,
    FAMILY,
    PACKED,
    PAMM,
    RULES,
    S2,
    STYLES,
    Technique,
    batch_of,
    make_run,
    state_tensors,
)

from skimp.core.coded_linear import coded_layers
from skimp.core.registry import alternatives, conflict_of, load, methods
from skimp.run.build import Run
from skimp.run.effect import Effect
from skimp.run.techniques import techniques

#: Small, because there are many: 3 rows in micro-batches of 3, or of 2 and 1 where the pair accumulates.
ROWS, SEQ, STYLE, STEPS = 3, 24, "llama-tied", 3


def _rule(name: str) -> Callable[[Run], bool]:
    return lambda run: run.optimizer.rule == name and name in techniques(run.recipe, run.exact)


def _adapter(name: str) -> Callable[[Run], bool]:
    return lambda run: run.adapter.name == name and bool(run.adapter.modules)


def _listed(name: str) -> Callable[[Run], bool]:
    return lambda run: name in techniques(run.recipe, run.exact)


def _resting(name: str) -> Callable[[Run], bool]:
    return lambda run: _listed(name)(run) and sum(not p.requires_grad for _, p in run.parameters()) > 0


def _coded(name: str) -> Callable[[Run], bool]:
    return lambda run: {module.codec.name for _, module in coded_layers(run.model)} == {name}


def _stores(dtype: torch.dtype) -> Callable[[Run], bool]:
    return lambda run: any(t.dtype == dtype for t in [*state_tensors(run), *(p for _, p in run.parameters())])


@dataclass(frozen=True)
class Switch:
    """How one method is switched on.

    Attributes:
        on: whether a run has it, asked after its first step (beyond the effects every run is held to).
        exact, overrides, documents: as in `Technique`.
    """

    on: Callable[[Run], bool]
    exact: dict[str, Any] = field(default_factory=dict)
    overrides: tuple[str, ...] = ()
    documents: tuple[int, ...] | None = None


SWITCHES: dict[str, Switch] = {
    "adamw": Switch(_rule("adamw"), overrides=("optimizer=adamw",)),
    "adamw8bit": Switch(_rule("adamw8bit"), overrides=("optimizer=adamw8bit",)),
    "adamw-bf16": Switch(_rule("adamw-bf16"), overrides=("precision=bf16", "optimizer=adamw")),
    "float32": Switch(_stores(torch.float32)),
    "bf16": Switch(_stores(torch.bfloat16), overrides=("precision=bf16",)),
    "dynamic8": Switch(_stores(torch.uint8), overrides=("optimizer=adamw8bit",)),
    "activation-offload": Switch(
        lambda run: run.offload.saved.fetched > 0, {"offload": tuple(range(BLOCKS))}, overrides=DISK
    ),
    "state-offload": Switch(lambda run: run.optimizer.away.opened > 0, {"states": "disk"}, overrides=DISK),
    "block4": Switch(_stores(torch.uint8), overrides=("optimizer=adamw4bit",)),
    "recompute": Switch(_listed("recompute"), {"recompute": tuple(range(BLOCKS))}),
    "selective-recompute": Switch(
        lambda run: min(run.recompute.taken.values()) > 0, {"recompute": tuple(range(BLOCKS)), "keep": "attention"}
    ),
    "chunked-cross-entropy": Switch(lambda run: run.head.chunk == 7, {"loss_chunk": 7}),
    "chunked-mlp": Switch(lambda run: max(run.mlps.widest.values()) == 7, {"mlp_chunk": 7}),
    "coded-activations": Switch(
        lambda run: min(run.coded.coded_bytes.values()) > 0, overrides=("activations.kept_bits=8",)
    ),
    "pamm": Switch(lambda run: sum(run.pamm.kept_bytes.values()) > 0, overrides=PAMM),
    "first-order": Switch(lambda run: run.stepper.forwards > 1, {"micro_rows": 2}),
    "step-in-backward": Switch(_listed("step-in-backward"), {"in_backward": True}),
    "packing": Switch(_listed("packing"), overrides=("data.packing=true",), documents=PACKED),
    "fused-rmsnorm": Switch(lambda run: run.fused.norms > 0 < run.fused.runs, overrides=("exact.kernels=fused",)),
    "fused-swiglu": Switch(lambda run: run.fused.mlps > 0 < run.fused.runs, overrides=("exact.kernels=fused",)),
    "lisa": Switch(_resting("lisa"), overrides=("train.layers={name: lisa, active: 2}",)),
    "owlore": Switch(_resting("owlore"), overrides=("train.layers={name: owlore, active: 2}",)),
    "badam": Switch(_resting("badam"), overrides=("train.layers=badam",)),
    "momentum-reset": Switch(_listed("momentum-reset"), overrides=("train.restart=1",)),
    "fused-rotary": Switch(
        lambda run: run.fused.rotary.modules > 0 < run.fused.rotary.runs, overrides=("exact.kernels=fused",)
    ),
    "qst": Switch(lambda run: run.adapter.rungs_run > 0, overrides=("adapter={name: qst, reduce: 2, gate: sigmoid}",)),
    "s2a": Switch(lambda run: bool(run.adapter.linears), overrides=("adapter={name: s2a, prompt: 9, rank: 6}",)),
    "derivative": Switch(lambda run: any(run.derivatives.runs.values()), overrides=DERIVATIVE),
    "lora": Switch(lambda run: bool(run.adapter.modules), overrides=("adapter={r: 4}",)),
    "s2ft": Switch(lambda run: bool(run.adapter.slices), overrides=("adapter={name: s2ft, v: 0.5, o: 0.5, d: 0.9}",)),
}

CODECS = ("nf4", "int8", "int4", "sketch")
SWITCHES |= {name: Switch(_coded(name), overrides=(f"model.weights={name}", "adapter={r: 4}")) for name in CODECS}
SWITCHES["sst"] = Switch(
    lambda run: "weight" not in run.adapter.module(next(iter(run.adapter.modules)))._parameters,
    overrides=("adapter={name: sst, r: 8, every: 20, warmup: 2}",),
)
SWITCHES["sketchtune"] = Switch(
    _adapter("sketchtune"), overrides=("model.weights={name: sketch, groups: 4}", "adapter=sketchtune")
)
SWITCHES["s2-attention"] = Switch(lambda run: run.sparse.runs > 0, overrides=S2)
#: Low-rank additions made of the same layer: each is switched on by its name.
KIN = ("rslora", "lora-plus", "dora", "olora", "pissa", "gradnormlorp", "relora", "loftq")
SWITCHES |= {name: Switch(_adapter(name), overrides=(f"adapter={{name: {name}, r: 4}}",)) for name in KIN}
#: Of a coded base.
SWITCHES["loftq"] = Switch(_adapter("loftq"), overrides=("model.weights=nf4", "adapter={name: loftq, r: 4}"))
SWITCHES |= {name: Switch(_rule(name), overrides=(f"optimizer={name}",)) for name in RULES}
SWITCHES |= {name: Switch(_rule(name), overrides=(override,)) for name, override in FAMILY.items()}
SWITCHES["compact"] = Switch(lambda run: bool(run.optimizer.factored or run.compact is None), overrides=COMPACT)

#: What a pair needs beside both switches. A step in backward is one micro-batch (with clipping it is run twice, so it
#: still has more than one forward). States of float32 beside bfloat16 weights: small tensors of the 8-bit rule.
#: Additions of rank 4 are all below the 4,096 numbers from which states are 8-bit: train the head as well.
BESIDE: dict[frozenset[str], Technique] = {
    frozenset(("first-order", "step-in-backward")): Technique({"micro_rows": ROWS}),
    frozenset(("float32", "bf16")): Technique(overrides=("optimizer=adamw8bit",)),
    frozenset(("lora", "state-offload")): Technique(overrides=("adapter={r: 4, embeddings: true, head: true}",)),
    frozenset(("lora", "dynamic8")): Technique(overrides=("adapter={r: 4, embeddings: true, head: true}",)),
    frozenset(("lora", "block4")): Technique(overrides=("adapter={r: 4, embeddings: true, head: true}",)),
}
BESIDE |= {
    frozenset((name, "dynamic8")): Technique(overrides=(f"{override[:-1]}, states: int8}}",))
    for name, override in FAMILY.items()
    if name != "ldadam"
}
BESIDE[frozenset(("first-order", "pamm"))] = Technique(overrides=("exact.micro_batch=2",))
BESIDE[frozenset(("compact", "dynamic8"))] = Technique(overrides=(f"{COMPACT[0][:-1]}, states: int8}}", *COMPACT[1:]))
#: Additions of rank 4 have two dimensions of 4 × 48: a basis of them has two directions at most.
BESIDE |= {frozenset((name, "lora")): Technique(overrides=("optimizer.rank=1",)) for name in FAMILY}
#: And no layer of theirs is a plain linear layer that could keep a projection: gradients arrive whole.
BESIDE |= {
    frozenset(("compact", name)): Technique(overrides=("optimizer.compact=false", "optimizer.rank=1"))
    for name, known in methods().items()
    if known.kind == "adapter"
}
#: Large enough for states to be coded (4,096 numbers), or to wait elsewhere.
BESIDE |= {
    frozenset(("s2a", other)): Technique(overrides=("adapter={name: s2a, prompt: 90, rank: 90}",))
    for other in ("dynamic8", "block4", "state-offload")
}
BESIDE |= {frozenset((name, "s2a")): Technique(overrides=("optimizer.rank=1",)) for name in FAMILY}
#: Eight vectors of a layer have eight directions.
BESIDE |= {frozenset((name, "sst")): Technique(overrides=("optimizer.rank=1",)) for name in FAMILY}
#: A coded base has an adapter beside it, which needs the same.
BESIDE |= {
    frozenset((name, other)): BESIDE[frozenset(("lora", other))]
    for name in CODECS
    for other in ("state-offload", "dynamic8", "block4", "compact", *FAMILY)
}
#: And of another adapter it is that one which is meant.
BESIDE |= {
    frozenset((name, other)): Technique(overrides=SWITCHES[other].overrides)
    for name in CODECS
    for other, known in methods().items()
    if known.kind == "adapter"
}

#: What LoRA needs beside another method its kin need too; one of them in the fast tests will do.
BESIDE_KIN = {
    frozenset(name if part == "lora" else part for part in pair): Technique(
        overrides=tuple(o.replace("adapter={", f"adapter={{name: {name}, ") for o in line.overrides)
    )
    for pair, line in BESIDE.items()
    if "lora" in pair
    for name in KIN
}

#: Its own switch names a codec; the pair's is meant.
BESIDE_KIN |= {
    frozenset((name, "loftq")): Technique(overrides=(f"model.weights={name}", "adapter={name: loftq, r: 4}"))
    for name in CODECS
}

#: Pairs whose both sides no recipe key switches on together; a plain loop does.
IN_A_LOOP: dict[frozenset[str], dict[str, Any]] = {frozenset(("adamw-bf16", "float32")): {"states": "fp32"}}

#: Two values of one key (two update rules) are alternatives: no recipe can ask for both.
PAIRS = [pair for pair in combinations(sorted(methods()), 2) if not alternatives(*pair)]
REFUSED = [pair for pair in PAIRS if conflict_of(*pair) is not None]
RUN = [pair for pair in PAIRS if pair not in REFUSED]


def loop_losses(pair: tuple[str, str]) -> list[float]:
    """Three steps of the pair's rule, with its options, on the model of the table in a plain loop."""
    rule = next(name for name in pair if methods()[name].kind == "update rule")
    run = make_run(Technique({"micro_rows": ROWS}, SWITCHES[rule].overrides), STYLE, rows=ROWS, seq=SEQ)
    run.delivery.close()
    run.head.close()
    optimizer = load(rule, "update rule")(run.parameters(), lr=1e-3, **IN_A_LOOP[frozenset(pair)])
    before = {n: p.detach().clone() for n, p in run.parameters()}
    found = []
    for step in range(STEPS):
        batch = batch_of("plain", rows=ROWS, seq=SEQ, seed=step)
        logits = run.model(input_ids=batch.ids).logits.float()
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.labels.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(loss.detach()))
    optimizer.assert_effect(before, dict(run.parameters()))
    held = {value.dtype for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)}
    assert held == {torch.float32}, held
    return found


def technique_of(pair: tuple[str, str]) -> Technique:
    """One recipe that has both."""
    # A codec needs some adapter: what the other side says of one comes later.
    sides = [SWITCHES[name] for name in sorted(pair, key=lambda name: name not in CODECS)]
    beside = (BESIDE | BESIDE_KIN).get(frozenset(pair), Technique())
    exact = {"micro_rows": ROWS}
    for part in (*sides, beside):
        exact |= part.exact
    overrides = [o for side in sides for o in side.overrides] + list(beside.overrides)
    documents = next((s.documents for s in sides if s.documents is not None), None)
    return Technique(exact, tuple(reversed(dict.fromkeys(reversed(overrides)))), documents)  # the last word counts


def plain_of(technique: Technique) -> Technique:
    """The same mathematics without any exact method: what the pair's losses must be."""
    kept = tuple(o for o in technique.overrides if not o.startswith("exact."))
    return Technique({"micro_rows": ROWS}, (*kept, "exact.kernels=plain"), technique.documents)


def style_of(technique: Technique) -> str | dict[str, Any]:
    """Twice as wide where a side network of half the width should have states of 4,096 numbers, which are coded."""
    side = any("name: qst" in override for override in technique.overrides)
    coded = not {"optimizer=adamw8bit", "optimizer=adamw4bit"}.isdisjoint(technique.overrides)
    return {**STYLES[STYLE], "hidden_size": 96, "intermediate_size": 208} if side and coded else STYLE


def losses(technique: Technique, check: Callable[[Run], None] | None = None) -> list[float]:
    """Three steps, held to every effect the run promises, then to `check`."""
    run = make_run(technique, style_of(technique), rows=ROWS, seq=SEQ)
    effect = Effect(run)
    found = []
    for step in range(STEPS):
        found.append(run.step(batch_of(technique, rows=ROWS, seq=SEQ, seed=step)).loss)
        if step == 0:
            effect.check(run, 1e-3)
            if check is not None:
                check(run)
    run.close()
    return found


@cache
def plain_losses(overrides: tuple[str, ...], documents: tuple[int, ...] | None) -> list[float]:
    """Kept for the many pairs that share them."""
    return losses(Technique({"micro_rows": ROWS}, overrides, documents))
