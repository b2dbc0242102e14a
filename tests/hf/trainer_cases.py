"""Every technique in two trainers of other people: one table, run in `transformers.Trainer` by the tests themselves
and in TRL's `SFTTrainer` by a child process (`python trainer_cases.py OUT`), so that no test holds TRL's imports.

A case names what goes in and what it is compared with: the same trainer, same data and same rule without it.
"""

from __future__ import annotations

import os
import sys
import tempfile
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from skimp.core.registry import methods

STEPS, ROWS, SEQ, VOCAB = 3, 4, 40, 1024


@dataclass(frozen=True)
class Case:
    """One line of the table.

    Attributes:
        methods: registered methods that this case runs.
        attach: keyword arguments of `skimp.hf.attach`.
        rule: the update rule; "torch" is torch's own AdamW.
        than: the case it is compared with.
        loss: largest relative difference of a loss or gradient norm from `than`; 0 is to the bit.
        weight: largest relative distance of a parameter from `than`: ‖difference‖ / ‖what `than` moved it‖; None where
            `than` does not move all of them (bfloat16 rounded to nearest).
        norms: whether gradient norms are compared too.
        lora: whose additions train in the model's place: "skimp", "peft", or nobody's.
        adapter: another adapter as a recipe writes it; weights: the codec of the frozen base beneath it.
        layers: how the blocks that train are drawn, one of three for two steps, then another; empty: all train.
        away: what waits on disk, "activations" or "states", or nothing.
        saves: bytes of the peak that `attach` must save, or None.
        data: "rows" of one length, "padded" on the right, or "packed".
    """

    methods: tuple[str, ...]
    attach: dict[str, Any] = field(default_factory=dict)
    rule: str = "adamw"
    than: str = "plain"
    loss: float = 0.0
    weight: float | None = 0.0
    saves: int | None = None
    data: str = "rows"
    arguments: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    lora: str = ""
    adapter: dict[str, Any] = field(default_factory=dict)
    weights: str = ""
    layers: str = ""
    norms: bool = True
    away: str = ""


ALL = {"recompute": "all", "fused": True, "chunked_loss": True, "documents": True, "step_in_backward": True}
LEAN = {"recompute": "all", "chunked_loss": True}
LOGITS = 4 * ROWS * SEQ * VOCAB

#: Sums of 160 terms in another order, in float32: losses agree to a few ulp. Adam divides a gradient by its own size,
#: so the rounding of those near 0 becomes a visible part of lr in a few numbers out of 10⁵.
ORDER = {"loss": 5e-7, "weight": 5e-4}

CASES: dict[str, Case] = {
    "torch": Case((), rule="torch", than=""),
    "plain": Case(("adamw",), than="torch"),
    "8-bit": Case(("adamw8bit", "dynamic8"), rule="adamw8bit", loss=2e-5, weight=3e-2, saves=1_000_000),
    "4-bit": Case(("adamw4bit", "block4"), rule="adamw4bit", loss=5e-2, weight=None, norms=False, saves=1_000_000),
    "torch-bf16": Case((), rule="torch", than="", dtype=torch.bfloat16),
    "bf16": Case(("adamw-bf16", "bf16"), rule="adamw-bf16", than="torch-bf16", loss=2e-4,
                 weight=None, dtype=torch.bfloat16),
    "accumulation": Case(
        ("first-order",),
        {"chunked_loss": True},
        than="whole",
        arguments={"per_device_train_batch_size": 1, "gradient_accumulation_steps": ROWS},
        data="padded",
        **ORDER,
    ),
    "whole": Case((), than="", data="padded"),
    "recompute": Case(("recompute",), {"recompute": "all"}, saves=1_000_000),
    "recompute-but-attention": Case(
        ("selective-recompute",), {"recompute": "all", "keep": "attention"}, saves=500_000
    ),
    "recompute-some": Case(("recompute",), {"recompute": (0, 2)}, saves=500_000),
    "activation-offload": Case(("activation-offload",), away="activations", saves=300_000),
    "state-offload": Case(("state-offload",), away="states", saves=1_000_000),
    "fused": Case(("fused-rmsnorm", "fused-swiglu", "fused-rotary"), {"fused": True}, saves=400_000, **ORDER),
    "autocast": Case((), than="", arguments={"bf16": True}),
    # The plain norm rounds to bfloat16 before its weight and after, the fused one after only.
    "autocast-fused": Case((), {"fused": True}, than="autocast", arguments={"bf16": True}, loss=2e-4, weight=None),
    "chunked": Case(("chunked-cross-entropy",), {"chunked_loss": True}, saves=900_000, **ORDER),
    "in-backward": Case(("step-in-backward",), {"step_in_backward": True}, loss=1e-6, weight=1e-3),
    "no-clip": Case((), than="", arguments={"max_grad_norm": 0.0}),
    "in-backward-no-clip": Case(
        ("step-in-backward",), {"step_in_backward": True}, than="no-clip", arguments={"max_grad_norm": 0.0}
    ),
    "lean": Case((), LEAN, saves=2_000_000, **ORDER),
    "lean-in-backward": Case(("step-in-backward",), {**LEAN, "step_in_backward": True}, than="lean", saves=400_000,
                             loss=1e-6, weight=1e-3),
    "padded": Case(("packing",), {"documents": True}, than="whole", data="padded", **ORDER),
    "masked": Case((), than="", data="packed"),
    "packed": Case(("packing",), {"documents": True}, than="masked", data="packed", **ORDER),
    "all": Case((), ALL, than="masked", data="packed", saves=2_000_000, **ORDER),
    "all-8-bit": Case((), ALL, rule="adamw8bit", than="masked", data="packed", loss=2e-5, weight=3e-2,
                      saves=4_000_000),
    # Fewer numbers are trained: the first loss is the same, then they part.
    **{
        name: Case((name,), layers=name, loss=5e-2, weight=None, norms=False, saves=500_000)
        for name in ("lisa", "owlore", "badam")
    },
    # Another model is trained: the first loss is the same, then they part.
    "lora": Case(("lora",), {"positions": True}, lora="skimp", loss=2e-2, weight=None, norms=False, saves=1_000_000),
    "lora-lean": Case(("lora",), {**LEAN, "fused": True, "step_in_backward": True}, than="lora", lora="skimp",
                      saves=1_000_000, **ORDER),
    "lora-8-bit": Case(("lora",), LEAN, rule="adamw8bit", than="lora", lora="skimp", saves=1_000_000, **ORDER),
    "lora-accumulation": Case(
        ("lora",), {"positions": True}, than="lora", lora="skimp",
        arguments={"per_device_train_batch_size": 1, "gradient_accumulation_steps": ROWS}, **ORDER),
    **{
        adapter["name"]: Case((adapter["name"],), adapter=adapter, loss=5e-2, weight=None, norms=False)
        for adapter in (
            *({"name": name, "r": 4} for name in ("rslora", "lora-plus", "dora", "olora", "pissa", "gradnormlorp")),
            {"name": "relora", "r": 4, "every": 100},
            {"name": "s2ft", "v": 0.5, "o": 0.5, "d": 0.2},
            {"name": "sst", "r": 8},
            {"name": "qst", "reduce": 2, "gate": "paper"},
            {"name": "s2a", "bias": True},
        )
    },
    **{
        codec: Case(
            (codec, "lora"), adapter={"name": "lora", "r": 4}, weights=codec, loss=5e-2, weight=None, norms=False
        )
        for codec in ("nf4", "int8", "int4", "sketch")
    },
    "sketchtune": Case(
        ("sketchtune", "sketch"), adapter={"name": "sketchtune"}, weights="sketch", loss=5e-2, weight=None, norms=False
    ),
    "peft": Case((), than="", lora="peft"),
    "peft-lean": Case((), {**LEAN, "fused": True, "step_in_backward": True}, than="peft", lora="peft", saves=1_000_000,
                      **ORDER),
}  # fmt: skip

#: Rules other than AdamW are compared with it: other moves, so near losses, and every parameter moved.
RULES = [
    name
    for name, facts in methods().items()
    if facts.kind == "update rule" and not any(name in case.methods for case in CASES.values())
]
CASES |= {name: Case((name,), rule=name, loss=5e-2, weight=None, norms=False) for name in RULES}

#: What the child runs: every technique, without the variants that differ from another case in a number only.
VARIANTS = {
    "recompute-some",
    "no-clip",
    "in-backward-no-clip",
    "all-8-bit",
    "autocast",
    "autocast-fused",
    "lora-8-bit",
    "4-bit",
    "rslora",
    "lora-plus",
    "int8",
    "int4",
    "sketch",
    *RULES,
}
IN_TRL = [name for name in CASES if name not in VARIANTS]


def model_of(case: Case, layers: int = 3) -> Any:
    import transformers

    torch.manual_seed(20240607)
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        vocab_size=VOCAB,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        tie_word_embeddings=False,
    )
    model: Any = transformers.LlamaForCausalLM(config).to(case.dtype).train()
    if case.lora == "peft":
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(5)
        model = get_peft_model(model, LoraConfig(r=4, lora_dropout=0.1, target_modules="all-linear"))
    if case.lora == "skimp":
        from skimp.adapters import LoRA, Spec

        LoRA(model, Spec(r=4, dropout=0.1))
    if case.adapter:
        adapt(model, case)
    return model


def adapt(model: Any, case: Case) -> None:
    """The adapter of a recipe on a model in anybody's loop, on a coded base where one is asked for."""
    from skimp.core.attention import register
    from skimp.core.coded_model import encode_model
    from skimp.core.registry import load
    from skimp.core.structure import read_structure
    from skimp.recipe.adapter import Adapter

    structure, asked = read_structure(model), Adapter.model_validate(case.adapter)
    if asked.name == "s2a":  # its prompts are keys and values of skimp's attention
        model.set_attn_implementation(register())
    if case.weights:
        encode_model(model, structure, load(case.weights, "codec")())
    load(asked.name, "adapter").attach(model, structure, asked.asked(), 0)


def examples(lengths: list[int]) -> list[dict[str, list[int]]]:
    """Seeded tokens; 0 is kept for padding."""
    made = []
    for index, n in enumerate(lengths):
        ids = torch.randint(3, VOCAB, (n,), generator=torch.Generator().manual_seed(index))
        made.append({"input_ids": [int(i) for i in ids]})
    return made


def raw(case: Case) -> list[dict[str, list[int]]]:
    """Enough for all steps; the trainer's order is the same for every case."""
    if case.data == "rows":
        return examples([SEQ] * 16)
    return examples([SEQ - 3 * (i % 7) for i in range(16)])


def rule_of(name: str, model: Any) -> torch.optim.Optimizer:
    from skimp.core.registry import load

    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    if name == "torch":
        return torch.optim.AdamW([p for _, p in named], lr=1e-3, weight_decay=0.01, fused=True)
    from skimp.optim import role_groups, roles

    make = load(name, "update rule")
    groups = role_groups(named, 0.01, roles(model)) if make.by_role else named
    rule: torch.optim.Optimizer = make(groups, lr=1e-3, weight_decay=0.01)
    return rule


def arguments_of(case: Case, folder: str) -> dict[str, Any]:
    return {
        "output_dir": folder,
        "max_steps": STEPS,
        "per_device_train_batch_size": ROWS,
        "learning_rate": 1e-3,
        "report_to": [],
        "use_cpu": True,
        "save_strategy": "no",
        "seed": 3,
        "disable_tqdm": True,
        "logging_steps": 1,
        "bf16": False,
        "gradient_checkpointing": False,
        **case.arguments,
    }


def pad(features: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Padded on the right to the longest, masked."""
    longest = max(len(f["input_ids"]) for f in features)
    ids = torch.tensor([list(f["input_ids"]) + [0] * (longest - len(f["input_ids"])) for f in features])
    mask = torch.tensor([[1] * len(f["input_ids"]) + [0] * (longest - len(f["input_ids"])) for f in features])
    return {"input_ids": ids, "labels": ids.masked_fill(mask == 0, -100), "attention_mask": mask}


def hf_trainer(case: Case, model: Any, folder: str) -> Any:
    import transformers

    data, collator = raw(case), pad
    if case.data == "packed":
        from skimp.hf import pack

        data, _ = pack(data * 2, SEQ, too_long="truncate")
        collator = transformers.default_data_collator
    return transformers.Trainer(
        model=model,
        args=transformers.TrainingArguments(**arguments_of(case, folder)),
        train_dataset=data,
        data_collator=collator,
        optimizers=(rule_of(case.rule, model), None),
    )


def trl_trainer(case: Case, model: Any, folder: str) -> Any:
    import datasets
    import transformers
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from trl import SFTConfig, SFTTrainer

    words = {"<pad>": 0, "<s>": 1, "</s>": 2, **{f"w{i}": i for i in range(3, VOCAB)}}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="<pad>")),
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
    )
    extra: dict[str, Any] = {"packing": True, "per_device_train_batch_size": 2} if case.data == "packed" else {}
    return SFTTrainer(
        model=model,
        args=SFTConfig(**arguments_of(case, folder) | {"max_length": SEQ, **extra}),
        train_dataset=datasets.Dataset.from_list(raw(case)),
        processing_class=tokenizer,
        optimizers=(rule_of(case.rule, model), None),
    )


def sampled(name: str, model: Any, batch: dict[str, torch.Tensor]) -> Any:
    """The callback of a way to draw blocks."""
    from skimp.hf import SampledLayers
    from skimp.steps import Ordered, Systematic, Uniform, outlier_scores

    if name == "badam":
        return SampledLayers(Ordered(0, 3, 1), every=2)
    if name == "lisa":
        return SampledLayers(Uniform(0, 3, 1), every=2)
    blocks = [f"model.layers.{i}" for i in range(3)]
    scores = outlier_scores(model, blocks, lambda b: model(input_ids=b["input_ids"]), [batch], threshold=3.0)
    return SampledLayers(Systematic(0, tuple(scores), 1), every=2)


def put_away(case: Case, model: Any, trainer: Any, folder: str) -> None:
    """What waits on disk, as in any loop: the blocks wrapped, or the rule told where its states live."""
    from skimp.activations import Offload
    from skimp.core.disk import DiskTier
    from skimp.core.state_file import StateFile

    if case.away == "activations":
        Offload(model, [f"model.layers.{i}" for i in range(3)], range(3), DiskTier(Path(folder) / "away"))
    if case.away == "states":
        trainer.optimizer.keep_states(StateFile(Path(folder) / "away"))


def measured(name: str) -> bool:
    """Whether a case's peak is asked for: tracking costs time."""
    return CASES[name].saves is not None or any(c.than == name and c.saves is not None for c in CASES.values())


def run(name: str, make: Any) -> dict[str, Any]:
    """One case: losses, norms, the tracked peak, and trained weights before and after."""
    from skimp.core.memory.tracker import Tracker
    from skimp.hf import attach

    case = CASES[name]
    model = model_of(case)
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    before = {n: p.detach().clone() for n, p in trained.items()}
    with tempfile.TemporaryDirectory() as folder:
        trainer = make(case, model, folder)
        if case.layers:
            trainer.add_callback(sampled(case.layers, model, pad(raw(case)[:2])))
        put_away(case, model, trainer, folder)
        if case.attach:
            attach(trainer, **case.attach)
        tracker = Tracker()
        with tracker if measured(name) else nullcontext():
            trainer.train()
    logs = [line for line in trainer.state.log_history if "loss" in line]
    return {
        "losses": [line["loss"] for line in logs],
        "norms": [float(line["grad_norm"]) for line in logs],
        "peak": tracker.peak.total,
        "before": before,
        "after": {n: p.detach().clone() for n, p in trained.items()},
        "tokens": [line["num_tokens"] for line in logs if "num_tokens" in line],
    }


def check(name: str, found: dict[str, Any], base: dict[str, Any]) -> None:
    """Hold a case to its line of the table."""
    case = CASES[name]
    assert len(found["losses"]) == STEPS
    for key in ("losses", "norms") if case.norms else ("losses",):
        for a, b in zip(found[key], base[key], strict=True):
            # A norm feels every rounding of every gradient: 1,000 times as much as the mean loss.
            bound = case.loss if key == "losses" else min(1e-1, 1e3 * case.loss)
            assert abs(a - b) <= bound * abs(b), (key, a, b)
    if case.layers:
        still = {key for key, after in found["after"].items() if torch.equal(after, found["before"][key])}
        assert 0 < len(still) < len(found["after"])
        assert all(".layers." in key for key in still)
    for key, after in found["after"].items():
        if case.layers:
            continue
        if case.weight is None:
            assert not torch.equal(after, found["before"][key]), key
            continue
        moved = (base["after"][key].float() - base["before"][key].float()).norm()
        assert moved > 0, key
        gap = (after.float() - base["after"][key].float()).norm()
        assert gap <= case.weight * moved, (key, float(gap / moved))
    if case.saves is not None:
        assert base["peak"] - found["peak"] >= case.saves, (base["peak"], found["peak"])


if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"
    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    for case_name in IN_TRL:
        try:
            results[case_name] = run(case_name, trl_trainer)
        except Exception as error:
            results[case_name] = {"error": f"{type(error).__name__}: {error}"}
    torch.save(results, Path(sys.argv[1]))
