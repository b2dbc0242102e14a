"""The rows of the contract: techniques × model styles, each a real `Run` built from a recipe by `build`.

A technique is a change to the recipe and the exact choices it comes with; a style is a tiny HF config. What
every row buys is in the `test_contract_*` files beside this one. Adding a technique is adding a line here.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from sys import intern
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from skimp.core.batch import Batch
from skimp.core.coded_trained import stored
from skimp.core.disk import IN_MEMORY, file_system
from skimp.core.exact import ExactChoices
from skimp.core.memory.oracle import Witness, witness
from skimp.core.memory.tracker import Tracker
from skimp.data.synthetic import synthetic_batch
from skimp.recipe import load_recipe
from skimp.run.build import Run, build
from skimp.run.choosing import choose_on_text
from skimp.run.weights import init_scratch
from skimp.steps.draws import Fixed

ROWS, SEQ, BLOCKS = 4, 24, 3
#: Three documents of odd lengths, the second of one token's neighbours only.
PACKED = (0, 11, 13, SEQ)

_LLAMA = {
    "hidden_size": 48,
    "intermediate_size": 104,
    "num_hidden_layers": BLOCKS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "vocab_size": 131,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}

#: name -> content of config.json
STYLES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **_LLAMA},
    "llama-tied": {"model_type": "llama", **_LLAMA, "tie_word_embeddings": True},
    "gpt2": {
        "model_type": "gpt2",
        "n_embd": 48,
        "n_layer": BLOCKS,
        "n_head": 4,
        "n_positions": 512,
        "vocab_size": 131,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "qwen2": {"model_type": "qwen2", **_LLAMA},
    "qwen3": {"model_type": "qwen3", **_LLAMA, "head_dim": 16, "tie_word_embeddings": True},
    "mistral": {"model_type": "mistral", **_LLAMA, "sliding_window": 7},
    "gemma2": {
        "model_type": "gemma2",
        **_LLAMA,
        "head_dim": 12,
        "query_pre_attn_scalar": 12,
        "sliding_window": 7,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "attn_logit_softcapping": 20.0,
        "final_logit_softcapping": 15.0,
        "tie_word_embeddings": True,
    },
}


#: Styles whose rows are longer than a window, or whose scores are capped: attention is no single operator there.
IN_PIECES = ("mistral", "gemma2")


@dataclass(frozen=True)
class Technique:
    """One line of the table.

    Attributes:
        exact: keyword arguments of `ExactChoices`; `micro_rows` is the whole step's rows unless given.
        overrides: recipe keys, "key=value".
        documents: boundaries of every row, None for one document.
        base: the technique whose mathematics it shares, None when it changes them.
        reordered: sums are formed in another order than in `base`, so equal to rounding and not to the bit.
        without: styles that it refuses, with its reason.
        mapped: holds bytes that no allocator gave out (a mapped file), so the allocator's own count is less.
    """

    exact: dict[str, Any] = field(default_factory=dict)
    overrides: tuple[str, ...] = ()
    documents: tuple[int, ...] | None = None
    base: str | None = None
    reordered: bool = False
    mapped: bool = False
    without: tuple[str, ...] = ()


def scratch() -> str:
    """A folder on a disk, for files without names."""
    near = (Path(tempfile.gettempdir()), Path(__file__).parent, Path.home())
    return str(next(path for path in near if file_system(path) not in IN_MEMORY))


DISK = (f"exact.offload.folder={scratch()}",)
#: Only the gate has a gradient in the first step: a smaller norm to clip by.
GATE = "train.clip=1e-6"
QST = ("adapter={name: qst, reduce: 2, down: 'adapter:5'}", GATE)
S2A = ("adapter={name: s2a, prompt: 3, rank: 2}",)
DERIVATIVE = ("activations.derivative=4",)
#: Seeds whose first draw is one of the costliest sets of three blocks, which is what a simulation runs.
LISA = ("train.layers={name: lisa, active: 2, every: 20}", "train.seed=2")
LISA_BLOCKS = ("train.layers={name: lisa, active: 2, every: 20, embeddings: false, head: false}",)
S2FT = ("adapter={name: s2ft, v: 0.5, o: 0.25, u: 0.05, d: 0.1}",)
S2FT_GRADIENT = ("adapter={name: s2ft, v: 0.5, o: 0.5, d: 0.1, select: gradient, batches: 1}",)
QLORA = ("model.weights=nf4", "adapter=lora")
LOFTQ = ("model.weights=nf4", "adapter={name: loftq, r: 4}")
SKETCHTUNE = ("model.weights={name: sketch, groups: 2}", "adapter=sketchtune")
#: A draw within the steps of a resume, and the end of a round.
SST = ("adapter={name: sst, r: 8, every: 2, warmup: 1, draws: 2}",)
#: Compact states below the rank of the additions, and a change of basis within the steps of a test.
GRADNORMLORP = (
    "adapter={name: gradnormlorp, r: 6, alpha: 12, init: olora}",
    "optimizer={name: galore, rank: 3, refresh: 2}",
)
OWLORE = ("train.layers={name: owlore, active: 2, threshold: 4}", "train.seed=2")

TECHNIQUES: dict[str, Technique] = {
    "plain": Technique(),
    "recompute": Technique({"recompute": tuple(range(BLOCKS))}, base="plain"),
    "recompute-some": Technique({"recompute": (0, 2)}, base="plain"),
    "recompute-but-attention": Technique({"recompute": tuple(range(BLOCKS)), "keep": "attention"}, base="plain"),
    "recompute-but-products": Technique({"recompute": (0, 2), "keep": "products"}, base="plain"),
    "recompute-mixed": Technique({"recompute": (0, 2), "keep": ("attention", "nothing")}, base="plain"),
    "accumulation": Technique({"micro_rows": 1}, base="plain", reordered=True),
    "accumulation-uneven": Technique({"micro_rows": 3, "recompute": (1,)}, base="plain", reordered=True),
    "in-backward": Technique({"in_backward": True}, base="plain"),
    "no-clip": Technique(overrides=("train.clip=null",)),
    "in-backward-no-clip": Technique({"in_backward": True}, ("train.clip=null",), base="no-clip"),
    "in-backward-recompute": Technique({"in_backward": True, "recompute": tuple(range(BLOCKS))}, base="plain"),
    "plain-kernels": Technique(overrides=("exact.kernels=plain",), base="plain", reordered=True),
    "chunk": Technique({"loss_chunk": 7}, base="plain", reordered=True),
    "mlp-chunk": Technique({"mlp_chunk": 7}, base="plain", reordered=True),
    "mlp-chunk-recompute": Technique(
        {"mlp_chunk": 7, "recompute": (0, 2), "keep": "attention"}, base="plain", reordered=True
    ),
    "mlp-chunk-offload": Technique({"mlp_chunk": 50, "offload": (0, 1, 2)}, DISK, base="plain", reordered=True),
    "8-bit": Technique(overrides=("optimizer=adamw8bit",)),
    "8-bit-in-backward": Technique({"in_backward": True}, ("optimizer=adamw8bit",), base="8-bit"),
    "bf16": Technique(overrides=("precision=bf16",)),
    "bf16-8-bit": Technique(overrides=("precision=bf16", "optimizer=adamw8bit")),
    "bf16-mixed": Technique(overrides=("precision=bf16-mixed",)),
    "bf16-mixed-recompute": Technique(
        {"recompute": tuple(range(BLOCKS))}, ("precision=bf16-mixed",), base="bf16-mixed"
    ),
    "packing": Technique(documents=PACKED),
    "packing-accumulation": Technique({"micro_rows": 1}, documents=PACKED, base="packing", reordered=True),
    "packing-recompute": Technique({"recompute": tuple(range(BLOCKS))}, documents=PACKED, base="packing"),
    "offload": Technique({"offload": tuple(range(BLOCKS))}, DISK, base="plain"),
    "offload-some-accumulation": Technique({"offload": (0, 1), "micro_rows": 1}, DISK, base="plain", reordered=True),
    "offload-recompute-mixed": Technique(
        {"offload": (1,), "recompute": (0, 2), "keep": ("nothing", "products")}, DISK, base="plain"
    ),
    "offload-recompute": Technique({"offload": (0, 1), "recompute": (1, 2)}, DISK, base="plain"),
    "offload-in-backward": Technique({"offload": (0, 2), "in_backward": True}, DISK, base="plain"),
    "states-on-disk": Technique({"states": "disk"}, DISK, base="plain", mapped=True),
    "states-on-disk-in-backward": Technique({"states": "disk", "in_backward": True}, DISK, base="plain", mapped=True),
    "states-on-disk-8-bit": Technique(
        {"states": "disk", "offload": (0, 1, 2)}, (*DISK, "optimizer=adamw8bit"), base="8-bit", mapped=True
    ),
    "lora": Technique(overrides=("adapter=lora",)),
    "lora-offload": Technique({"offload": (0, 1, 2)}, (*DISK, "adapter=lora"), base="lora"),
    "lora-recompute": Technique({"recompute": tuple(range(BLOCKS))}, ("adapter=lora",), base="lora"),
    "lora-accumulation": Technique({"micro_rows": 1}, ("adapter=lora",), base="lora", reordered=True),
    "lora-in-backward": Technique({"in_backward": True}, ("adapter=lora",), base="lora"),
    "lora-plain-kernels": Technique(overrides=("adapter=lora", "exact.kernels=plain"), base="lora", reordered=True),
    "lora-chunk": Technique({"loss_chunk": 7}, ("adapter=lora",), base="lora", reordered=True),
    "lora-8-bit": Technique(overrides=("adapter=lora", "optimizer=adamw8bit")),
    "lora-bf16": Technique(overrides=("adapter=lora", "precision=bf16")),
    "lora-bf16-mixed": Technique(overrides=("adapter=lora", "precision=bf16-mixed")),
    "lora-packing": Technique({"micro_rows": 3}, ("adapter=lora",), PACKED),
    "lora-some": Technique(overrides=("adapter={targets: '.*(q_proj|v_proj|c_attn)', scale: rslora, r: 3}",)),
    "lora-dropout": Technique(overrides=("adapter={dropout: 0.25}",)),
    "lora-dropout-recompute": Technique({"recompute": (0, 2)}, ("adapter={dropout: 0.25}",), base="lora-dropout"),
    "lora-dropout-accumulation": Technique(
        {"micro_rows": 1}, ("adapter={dropout: 0.25}",), base="lora-dropout", reordered=True
    ),
    "coded": Technique(overrides=("activations.kept_bits=8",)),
    "coded-4-bits-recompute": Technique({"recompute": (0, 1)}, ("activations.kept_bits=4",)),
    "coded-offload": Technique({"offload": (0, 1, 2)}, (*DISK, "activations.kept_bits=8"), base="coded"),
    "lora-coded": Technique(overrides=("adapter=lora", "activations.kept_bits=8")),
    "lora-dropout-mlp-chunk": Technique(
        {"mlp_chunk": 11, "micro_rows": 1}, ("adapter={dropout: 0.25}",), base="lora-dropout", reordered=True
    ),
    "qlora": Technique(overrides=QLORA),
    "qlora-recompute": Technique({"recompute": tuple(range(BLOCKS))}, QLORA, base="qlora"),
    "qlora-in-backward": Technique({"in_backward": True}, QLORA, base="qlora"),
    "qlora-accumulation": Technique({"micro_rows": 1}, QLORA, base="qlora", reordered=True),
    "qlora-bf16": Technique(overrides=(*QLORA, "precision=bf16")),
    "qlora-bf16-mixed": Technique(overrides=(*QLORA, "precision=bf16-mixed")),
    "qlora-some": Technique(
        overrides=("model.weights={name: nf4, double_quant: false}", "adapter={targets: '.*(q_proj|v_proj|c_attn)'}")
    ),
    "int8-lora": Technique(overrides=("model.weights=int8", "adapter=lora")),
    "int4-lora": Technique(overrides=("model.weights={name: int4, symmetric: false}", "adapter=lora")),
    "lora-plus": Technique(overrides=("adapter=lora-plus",)),
    "rslora": Technique(overrides=("adapter=rslora",)),
    "dora": Technique(overrides=("adapter=dora",)),
    "dora-recompute": Technique({"recompute": (0, 2)}, ("adapter=dora",), base="dora"),
    "dora-in-backward": Technique({"in_backward": True}, ("adapter=dora",), base="dora"),
    "dora-bf16-dropout": Technique(overrides=("adapter={name: dora, dropout: 0.25}", "precision=bf16")),
    "olora": Technique(overrides=("adapter={name: olora, r: 4}",)),
    "olora-in-backward": Technique({"in_backward": True}, ("adapter={name: olora, r: 4}",), base="olora"),
    "olora-bf16-mixed": Technique(overrides=("adapter={name: olora, reparam: dora}", "precision=bf16-mixed")),
    "pissa": Technique(overrides=("adapter={name: pissa, r: 4}",)),
    "pissa-packing": Technique({"micro_rows": 3}, ("adapter={name: pissa, r: 4}",), PACKED),
    "loftq": Technique(overrides=LOFTQ),
    "loftq-no-turns": Technique(overrides=("model.weights=nf4", "adapter={name: loftq, steps: 0}"), base="qlora"),
    "loftq-in-backward": Technique({"in_backward": True}, LOFTQ, base="loftq"),
    "loftq-recompute": Technique({"recompute": (0, 2)}, LOFTQ, base="loftq"),
    "loftq-bf16": Technique(overrides=(*LOFTQ, "precision=bf16")),
    "loftq-int4": Technique(overrides=("model.weights=int4", "adapter={name: loftq, r: 4, steps: 2}")),
    "loftq-sketch-dora": Technique(
        overrides=("model.weights={name: sketch, bits: 2}", "adapter={name: loftq, r: 4, reparam: dora}")
    ),
    "relora": Technique(overrides=("adapter={name: relora, r: 4, every: 2, warmup: 1}",)),
    "relora-in-backward": Technique(
        {"in_backward": True}, ("adapter={name: relora, r: 4, every: 2, warmup: 1}",), base="relora"
    ),
    "gradnormlorp": Technique(overrides=GRADNORMLORP),
    #: B begins at 0, so that A's first gradient is 0 and its first basis that of the second step.
    "gradnormlorp-galore": Technique(overrides=("adapter={name: gradnormlorp, r: 6, alpha: 12}", "optimizer=galore")),
    "lora-galore": Technique(overrides=("adapter=lora", "optimizer=galore")),
    "lora-galore-in-backward": Technique(
        {"in_backward": True}, ("adapter=lora", "optimizer=galore"), base="lora-galore"
    ),
    "gradnormlorp-recompute": Technique({"recompute": (0, 1, 2)}, GRADNORMLORP, base="gradnormlorp"),
    "sketch-lora": Technique(overrides=("model.weights={name: sketch, groups: 2}", "adapter=lora")),
    "sketchtune": Technique(overrides=SKETCHTUNE),
    "sketchtune-2-bit": Technique(
        overrides=(
            "model.weights={name: sketch, bits: 2, groups: 3}",
            "adapter={name: sketchtune, targets: '.*proj|.*c_.*'}",
        )
    ),
    "sketchtune-recompute": Technique({"recompute": (0, 2)}, SKETCHTUNE, base="sketchtune"),
    "sketchtune-accumulation": Technique({"micro_rows": 1}, SKETCHTUNE, base="sketchtune", reordered=True),
    "sketchtune-in-backward": Technique({"in_backward": True}, SKETCHTUNE, base="sketchtune"),
    "sketchtune-8-bit": Technique(overrides=(*SKETCHTUNE, "optimizer=adamw8bit")),
    "sketchtune-bf16": Technique(overrides=(*SKETCHTUNE, "precision=bf16")),
    "sketchtune-bf16-mixed": Technique(overrides=(*SKETCHTUNE, "precision=bf16-mixed")),
    "sketchtune-packing": Technique({"micro_rows": 3}, SKETCHTUNE, PACKED),
    "lora-full": Technique(overrides=("adapter={embeddings: true, head: true}",)),
    "s2ft": Technique(overrides=S2FT),
    "s2ft-permuted": Technique(overrides=("adapter={name: s2ft, v: 0.5, o: 0.25, u: 0.05, d: 0.1, permute: true}",)),
    "s2ft-weight": Technique(overrides=("adapter={name: s2ft, o: 0.5, d: 0.1, select: weight}",)),
    "s2ft-activation": Technique(
        overrides=("adapter={name: s2ft, v: 0.5, o: 0.5, u: 0.05, d: 0.1, select: activation, batches: 1}",)
    ),
    "s2ft-gradient": Technique(overrides=S2FT_GRADIENT),
    "s2ft-gradient-recompute": Technique({"recompute": (0, 1, 2)}, S2FT_GRADIENT, base="s2ft-gradient"),
    "s2ft-gradient-accumulation": Technique({"micro_rows": 1}, S2FT_GRADIENT, base="s2ft-gradient", reordered=True),
    "s2ft-product-permuted": Technique(
        overrides=("adapter={name: s2ft, o: 0.5, d: 0.1, select: product, permute: true, batches: 2}",)
    ),
    "s2ft-recompute": Technique({"recompute": (0, 2)}, S2FT, base="s2ft"),
    "s2ft-accumulation": Technique({"micro_rows": 1}, S2FT, base="s2ft", reordered=True),
    "s2ft-in-backward": Technique({"in_backward": True}, S2FT, base="s2ft"),
    "s2ft-8-bit": Technique(overrides=(*S2FT, "optimizer=adamw8bit")),
    "s2ft-bf16": Technique(overrides=(*S2FT, "precision=bf16")),
    "s2ft-bf16-mixed": Technique(overrides=(*S2FT, "precision=bf16-mixed")),
    "s2ft-packing": Technique({"micro_rows": 3}, S2FT, PACKED),
    "qst": Technique(overrides=QST),
    "qst-pool": Technique(overrides=("adapter={name: qst, reduce: 2, down: avgpool, gate: sigmoid}", GATE)),
    "qst-recompute": Technique({"recompute": (0, 2)}, QST, base="qst"),
    "qst-accumulation": Technique({"micro_rows": 1}, QST, base="qst", reordered=True),
    "qst-in-backward": Technique({"in_backward": True}, QST, base="qst"),
    "qst-8-bit": Technique(overrides=(*QST, "optimizer=adamw8bit")),
    "qst-bf16": Technique(overrides=(*QST, "precision=bf16")),
    "qst-bf16-mixed": Technique(overrides=(*QST, "precision=bf16-mixed")),
    "qst-packing": Technique({"micro_rows": 3}, QST, PACKED),
    "s2a": Technique(overrides=S2A),
    "s2a-bias": Technique(overrides=("adapter={name: s2a, prompt: 0}",)),
    "s2a-derivative": Technique(overrides=(*S2A, *DERIVATIVE)),
    "s2a-recompute": Technique({"recompute": (0, 2)}, S2A, base="s2a"),
    "s2a-accumulation": Technique({"micro_rows": 1}, S2A, base="s2a", reordered=True),
    "s2a-bf16": Technique(overrides=(*S2A, "precision=bf16")),
    "s2a-bf16-mixed": Technique(overrides=(*S2A, "precision=bf16-mixed")),
    "s2a-packing": Technique({"micro_rows": 3}, S2A, PACKED),
    "derivative": Technique(overrides=DERIVATIVE),
    "derivative-recompute": Technique({"recompute": (0, 2)}, DERIVATIVE, base="derivative"),
    "derivative-plain-kernels": Technique(overrides=(*DERIVATIVE, "exact.kernels=plain")),
    "derivative-stochastic": Technique(overrides=("activations.derivative={rounding: stochastic}",)),
    "lora-derivative": Technique(overrides=("adapter=lora", *DERIVATIVE)),
    "sst": Technique(overrides=SST),
    "sst-recompute": Technique({"recompute": (0, 2)}, SST, base="sst"),
    "sst-accumulation": Technique({"micro_rows": 1}, SST, base="sst", reordered=True),
    "sst-in-backward": Technique({"in_backward": True}, SST, base="sst"),
    "sst-8-bit": Technique(overrides=(*SST, "optimizer=adamw8bit")),
    "sst-bf16-mixed": Technique(overrides=("adapter={name: sst, r: 8, every: 3, warmup: 1}", "precision=bf16-mixed")),
    "lisa": Technique(overrides=LISA),
    "lisa-in-backward": Technique({"in_backward": True}, LISA, base="lisa"),
    "lisa-recompute": Technique({"recompute": tuple(range(BLOCKS))}, LISA, base="lisa"),
    "lisa-accumulation": Technique({"micro_rows": 1}, LISA, base="lisa", reordered=True),
    "lisa-8-bit": Technique(overrides=(*LISA, "optimizer=adamw8bit")),
    "lisa-bf16": Technique(overrides=(*LISA, "precision=bf16")),
    "lisa-blocks": Technique(overrides=LISA_BLOCKS),
    "lisa-blocks-recompute": Technique({"recompute": tuple(range(BLOCKS))}, LISA_BLOCKS, base="lisa-blocks"),
    "lisa-blocks-in-backward": Technique({"in_backward": True}, LISA_BLOCKS, base="lisa-blocks"),
    "lisa-all": Technique(overrides=("train.layers={active: 3, on_switch: keep}",), base="plain"),
    "owlore": Technique(overrides=OWLORE),
    "owlore-in-backward": Technique({"in_backward": True}, OWLORE, base="owlore"),
    "badam": Technique(overrides=("train.layers=badam",)),
    "badam-packing": Technique({"micro_rows": 3}, ("train.layers=badam",), PACKED),
    "smoothing-z": Technique(overrides=("train.loss.label_smoothing=0.1", "train.loss.z_loss=0.001")),
}

#: Rules beside AdamW: each plain, in backward and on bfloat16 weights.
RULES = ("lion", "adafactor", "came", "adam-mini", "adamw4bit", "muon", "spam", "stable-spam", "dion")
for _rule in RULES:
    TECHNIQUES[_rule] = Technique(overrides=(f"optimizer={_rule}",))
    TECHNIQUES[f"{_rule}-in-backward"] = Technique({"in_backward": True}, (f"optimizer={_rule}",), base=_rule)
    TECHNIQUES[f"bf16-{_rule}"] = Technique(overrides=("precision=bf16", f"optimizer={_rule}"))
#: The projected family, with ranks below those of the tiny matrices and a change of basis within the steps of a test.
FAMILY = {
    name: f"optimizer={{name: {name}, {options}}}"
    for name, options in {
        "galore": "rank: 8, refresh: 2",
        "galore8bit": "rank: 8, refresh: 2",
        "galore2": "rank: 8, refresh: 2",
        "q-galore": "rank: 8, refresh: 2",
        "online-subspace-descent": "rank: 6",
        "natural-galore": "rank: 8, refresh: 2, history: 3",
        "grass": "rank: 8, refresh: 2",
        "apollo": "rank: 8, refresh: 2",
        "apollo-mini": "refresh: 2",
        "fira": "rank: 8, refresh: 2",
        "ldadam": "rank: 4",
        "frugal": "rank: 8, refresh: 2",
    }.items()
}
#: Micro-batches added up as projected, each gradient freed at once.
TECHNIQUES["galore-adds-up"] = Technique({"in_backward": True, "micro_rows": 1}, (FAMILY["galore"], "train.clip=null"))
TECHNIQUES["grass-adds-up"] = Technique(
    {"in_backward": True, "micro_rows": 3}, (FAMILY["grass"], "train.clip=null", "precision=bf16")
)
#: Moments that begin anew before the second step.
RESET, REFACTOR = ("train.restart=1",), ("adapter=lora", "train.restart={every: 1, refactor: true}")
TECHNIQUES["momentum-reset"] = Technique(overrides=RESET)
TECHNIQUES["momentum-reset-in-backward"] = Technique({"in_backward": True}, RESET, base="momentum-reset")
TECHNIQUES["momentum-reset-8-bit-disk"] = Technique(
    {"states": "disk"}, (*DISK, *RESET, "optimizer=adamw8bit"), mapped=True
)
TECHNIQUES["momentum-reset-galore"] = Technique(overrides=(*RESET, FAMILY["galore"]))
TECHNIQUES["refactor"] = Technique(overrides=REFACTOR)
TECHNIQUES["refactor-recompute"] = Technique({"recompute": tuple(range(BLOCKS))}, REFACTOR, base="refactor")
#: Gradients that arrive projected.
NO_CLIP = ("train.clip=null",)
GRASS_COMPACT = (FAMILY["grass"], "optimizer.compact=true", *NO_CLIP)
TECHNIQUES["grass-no-clip"] = Technique(overrides=(FAMILY["grass"], *NO_CLIP))
TECHNIQUES["grass-compact"] = Technique(overrides=GRASS_COMPACT)  # its norm is that of the projections
TECHNIQUES["grass-compact-in-backward"] = Technique({"in_backward": True}, GRASS_COMPACT, base="grass-compact")
TECHNIQUES["grass-compact-recompute"] = Technique(
    {"recompute": tuple(range(BLOCKS))}, GRASS_COMPACT, base="grass-compact"
)
TECHNIQUES["galore8bit-compact-adds-up"] = Technique(
    {"in_backward": True, "micro_rows": 1},
    (FAMILY["galore8bit"], "optimizer.compact=true", "exact.micro_batch=1", *NO_CLIP),
)
TECHNIQUES["bf16-galore2-compact"] = Technique(
    {"micro_rows": 3}, ("precision=bf16", FAMILY["galore2"], "optimizer.compact=true", "exact.micro_batch=3", *NO_CLIP)
)
TECHNIQUES["mixed-q-galore-compact"] = Technique(
    overrides=("precision=bf16-mixed", FAMILY["q-galore"], "optimizer.compact=true", *NO_CLIP)
)
TECHNIQUES["lisa-grass-compact"] = Technique(overrides=(*LISA, *GRASS_COMPACT))
#: Weights that train as int8 codes. A rate at which a step moves most codes.
INT8 = ("model.weights={name: int8, group: 16}", FAMILY["q-galore"])
TECHNIQUES["int8-q-galore"] = Technique(overrides=INT8)
TECHNIQUES["int8-q-galore-in-backward"] = Technique({"in_backward": True}, INT8, base="int8-q-galore")
TECHNIQUES["int8-q-galore-recompute"] = Technique({"recompute": tuple(range(BLOCKS))}, INT8, base="int8-q-galore")
TECHNIQUES["int8-q-galore-accumulation"] = Technique({"micro_rows": 1}, INT8)  # rounded sums are drawn otherwise
TECHNIQUES["int8-q-galore-mlp-chunk"] = Technique({"mlp_chunk": 7}, INT8)
TECHNIQUES["int8-q-galore-disk"] = Technique({"states": "disk"}, (*DISK, *INT8), base="int8-q-galore", mapped=True)
TECHNIQUES["int8-q-galore-compact-adds-up"] = Technique(
    {"in_backward": True, "micro_rows": 1},
    (*INT8, "model.weights.symmetric=false", "optimizer.compact=true", "exact.micro_batch=1", *NO_CLIP),
)
TECHNIQUES["bf16-int8-q-galore"] = Technique(overrides=("precision=bf16", *INT8))
TECHNIQUES["bf16-mixed-int8-q-galore-compact"] = Technique(
    overrides=("precision=bf16-mixed", *INT8, "optimizer.compact=true", *NO_CLIP)
)
#: Layers that keep a random projection of their inputs.
COMPACT = ("optimizer={name: compact, refresh: 2}", *NO_CLIP)
TECHNIQUES |= {
    "compact": Technique(overrides=COMPACT),
    "compact-plain-kernels": Technique(overrides=(*COMPACT, "exact.kernels=plain")),
    "compact-in-backward": Technique({"in_backward": True}, COMPACT, base="compact"),
    "compact-recompute": Technique({"recompute": (0, 2)}, COMPACT, base="compact"),
    "compact-accumulation": Technique({"micro_rows": 1}, COMPACT, base="compact", reordered=True),
    "compact-adds-up": Technique({"in_backward": True, "micro_rows": 1}, (*COMPACT, "exact.micro_batch=1")),
    "compact-mlp-chunk": Technique({"mlp_chunk": 7}, COMPACT, base="compact", reordered=True),
    "compact-offload": Technique(
        {"offload": (0, 1, 2)}, (*DISK, *COMPACT, "exact.kernels=plain"), base="compact-plain-kernels"
    ),
    "compact-states-on-disk": Technique({"states": "disk"}, (*DISK, *COMPACT), base="compact", mapped=True),
    "compact-signs-8-bit-packing": Technique(
        {"micro_rows": 3}, ("optimizer={name: compact, refresh: 2, draw: signs, states: int8}", *NO_CLIP), PACKED
    ),
    "compact-kept-bits": Technique(overrides=(*COMPACT, "exact.kernels=plain", "activations.kept_bits=8")),
    "compact-bf16": Technique(overrides=(*COMPACT, "precision=bf16")),
    "compact-bf16-mixed": Technique(overrides=(*COMPACT, "precision=bf16-mixed", "optimizer.policy=reset")),
    "compact-whole": Technique(overrides=("optimizer={name: compact, refresh: 2, compact: false}",)),
    "lisa-compact": Technique(overrides=(*LISA, *COMPACT)),
}
#: Queries, keys and values that keep a few tokens of their input.
PAMM = ("activations.pamm=8", "exact.kernels=plain")
TECHNIQUES |= {
    "pamm": Technique(overrides=PAMM),
    "pamm-recompute": Technique({"recompute": (0, 2)}, PAMM, base="pamm"),
    "pamm-in-backward": Technique({"in_backward": True}, PAMM, base="pamm"),
    "pamm-offload": Technique({"offload": (0, 1, 2)}, (*DISK, *PAMM), base="pamm"),
    "pamm-accumulation": Technique({"micro_rows": 3}, (*PAMM, "exact.micro_batch=3")),
    "pamm-eps-packing": Technique(
        overrides=("activations.pamm={one_of: 5, eps: 0.9}", "exact.kernels=plain"), documents=PACKED
    ),
    "pamm-8-bit-kept-bits": Technique(overrides=(*PAMM, "optimizer=adamw8bit", "activations.kept_bits=8")),
    "pamm-bf16": Technique(overrides=("activations.pamm=8", "precision=bf16")),
    "pamm-bf16-mixed": Technique(overrides=("activations.pamm=8", "precision=bf16-mixed")),
    "pamm-compact": Technique(overrides=(*PAMM, *COMPACT)),
    "pamm-grass-compact-in-backward": Technique({"in_backward": True}, (*PAMM, *GRASS_COMPACT)),
    "lisa-pamm": Technique(overrides=(*LISA, *PAMM)),
}
for _rule, _override in FAMILY.items():
    TECHNIQUES[_rule] = Technique(overrides=(_override,))
    TECHNIQUES[f"{_rule}-in-backward"] = Technique({"in_backward": True}, (_override,), base=_rule)
    TECHNIQUES[f"bf16-{_rule}"] = Technique(overrides=("precision=bf16", _override))


#: A window of one block and every second block before it, so that a row of 24 tokens leaves blocks out. Models with
#: windows or caps of their own are refused.
S2 = ("attention={name: s2-attention, block: 16, local: 1, stride: 2}",)
WINDOWED = ("mistral", "gemma2")
TECHNIQUES["s2"] = Technique(overrides=S2, without=WINDOWED)
TECHNIQUES["s2-recompute"] = Technique({"recompute": (0, 2)}, S2, base="s2", without=WINDOWED)
TECHNIQUES["s2-packing"] = Technique({"micro_rows": 3}, S2, PACKED, without=WINDOWED)
TECHNIQUES["s2-lora-bf16-mixed"] = Technique(overrides=(*S2, "adapter=lora", "precision=bf16-mixed"), without=WINDOWED)
TECHNIQUES["s2-some-dense"] = Technique(
    overrides=("attention={block: 16, local: 1, stride: 3, offset: 1, dense_every: 2, coverage: partial}",),
    without=WINDOWED,
)


def keeps_attention(technique: str) -> bool:
    """Whether recomputed blocks keep what attention gave, which needs it to be one operator."""
    kept = TECHNIQUES[technique].exact.get("keep", "nothing")
    return "attention" in ((kept,) if isinstance(kept, str) else kept)


#: (technique, style) of everything that runs; the others are refused, by test.
CELLS = [
    (t, s)
    for t in TECHNIQUES
    for s in STYLES
    if s not in TECHNIQUES[t].without and not (s in IN_PIECES and keeps_attention(t))
]


def recipe_of(technique: Technique, rows: int = ROWS, seq: int = SEQ, **train: Any) -> Any:
    """A recipe of `rows` rows of `seq` tokens a step, no evaluation."""
    values = {
        "model": "tiny",
        "data": {"train": "pydoc", "seq_len": seq, "validation": None},
        "output": "runs/contract",
        # So small a norm is always reached: a clip that does not act saves a product that a simulation
        # counts.
        "train": {
            "steps": 6,
            "batch_tokens": rows * seq,
            "lr": 1e-3,
            "weight_decay": 0.1,
            "clip": 0.05,
            **train,
        },
        "eval": None,
    }
    return load_recipe(values, technique.overrides)


def exact_of(technique: Technique, rows: int = ROWS) -> ExactChoices:
    return ExactChoices(**{"micro_rows": rows, **technique.exact})


def make_run(
    technique: str | Technique,
    style: str | dict[str, Any],
    *,
    rows: int = ROWS,
    seq: int = SEQ,
    seed: int = 0,
    simulate: FakeTensorMode | None = None,
    **train: Any,
) -> Run:
    """The run of one cell of the table, seeded weights."""
    line = TECHNIQUES[technique] if isinstance(technique, str) else technique
    config = dict(STYLES[style]) if isinstance(style, str) else dict(style)
    fill = None if simulate is not None else (lambda model: init_scratch(model, seed))
    run = build(recipe_of(line, rows, seq, **train), exact_of(line, rows), config, simulate=simulate, fill=fill)
    if simulate is None and run.adapter is not None and run.adapter.waits:
        documents = line.documents if seq == SEQ else None
        vocab = config["vocab_size"]
        batches = [synthetic_batch(seq, rows, vocab, documents, 90 + i) for i in range(run.recipe.adapter.batches)]
        choose_on_text(run, batches)
    return run


def batch_of(technique: str | Technique, *, rows: int = ROWS, seq: int = SEQ, vocab: int = 131, seed: int = 0) -> Batch:
    """Random tokens with the technique's documents."""
    line = TECHNIQUES[technique] if isinstance(technique, str) else technique
    documents = line.documents if line.documents is None or seq == SEQ else (0, seq // 3, seq - 1, seq)
    return synthetic_batch(seq, rows, vocab, documents, seed)


def simulated_batch(mode: FakeTensorMode, batch: Batch) -> Batch:
    """The same declared facts without values."""
    with mode:
        ids, labels, positions = (torch.zeros(batch.ids.shape, dtype=torch.int64) for _ in range(3))
        source = torch.zeros(batch.rows, dtype=torch.int64)
    return Batch(ids, labels, positions, batch.documents, batch.trained, source=source)


def at_rest(tracker: Tracker, run: Run, batch: Batch) -> int:
    """Register what exists before the step; returns its bytes."""
    run.show_to(tracker, batch)
    tracker.reset_peak()
    return tracker.live


def state_tensors(run: Run) -> Iterator[Tensor]:
    for state in run.optimizer.state.values():
        yield from (v for v in state.values() if isinstance(v, Tensor))


@dataclass
class Measured:
    """Bytes of two optimizer steps: alive before, peak above that, alive after less before, operators in
    order."""

    rest: int
    above: int
    left: int
    operators: list[str]


def watched(run: Run, batch: Batch, steps: int = 2) -> Measured:
    """Two steps under the tracker; inside a fake mode when the run is simulated.

    The batch is cut before: `Batch.take` counts real labels on the host through numpy, which detaches them
    first."""
    tracker = Tracker(operators=True)
    parts = batch.split(run.exact.micro_rows)
    with tracker:
        rest = at_rest(tracker, run, batch)
        for _ in range(steps):
            with run.due():
                run.stepper.step(parts)
    return Measured(rest, tracker.peak.total - rest, tracker.live - rest, [*map(intern, tracker.operators or [])])


def simulated(technique: str, style: str | dict[str, Any], batch: Batch, **shape: Any) -> Measured:
    """`watched` on a simulated run of the same cell."""
    mode = FakeTensorMode()
    run = make_run(technique, style, simulate=mode, **shape)
    with mode:
        if run.layers is not None:  # a plan goes through all of the costliest sets; this run through the one it draws
            run.layers.sets = run.layers.sets[:1]
            if run.layers.draw is not None:
                run.layers.draw = Fixed(run.layers.sets)
                run.layers.begin(0)
        return watched(run, simulated_batch(mode, batch))


def witnessed(call: Callable[[], Any]) -> Witness:
    """c10's events of one call."""
    return witness(call)[1]


@dataclass(frozen=True)
class Cell:
    """One cell of the table as three independent counts of the same two steps."""

    simulated: Measured
    tracked: Measured
    witness: Witness


@cache
def measured(technique: str, style: str, count: int = 1, rows: int = ROWS, seq: int = SEQ) -> Cell:
    """Simulate, run under the tracker, and run bare under torch's profiler; once per cell and process."""
    with threads(count):
        batch = batch_of(technique, rows=rows, seq=seq)
        fake = simulated(technique, style, batch, rows=rows, seq=seq)
        real = watched(make_run(technique, style, rows=rows, seq=seq), batch)
        bare = make_run(technique, style, rows=rows, seq=seq)
        return Cell(fake, real, witnessed(lambda: [bare.step(batch) for _ in range(2)] and None))


def bfloat16_instructions() -> bool:
    """Such CPUs multiply bfloat16 without a float32 detour and allocate less than `aten_cpu` states."""
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Run inside with so many of torch's threads."""
    old = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(old)


def train(run: Run, technique: str | Technique, steps: int, first: int = 0, **shape: Any) -> list[float]:
    """Losses of so many steps, each on a batch of its own."""
    return [run.step(batch_of(technique, seed=first + i, **shape)).loss for i in range(steps)]


def weights(run: Run) -> dict[str, Tensor]:
    """Copies of all parameters, and of the parts of coded layers."""
    return {name: p.detach().clone() for name, p in stored(run.model)}
