"""`attach`: refusals by name, effect of each technique held, everything out again, saving and resuming as before."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from trainer_cases import CASES, ROWS, Case, arguments_of, hf_trainer, model_of, pad, raw, rule_of

from skimp.adapters.lora import LoRA
from skimp.adapters.spec import Spec
from skimp.core.errors import ConflictError, EffectError, ModelError, NonFiniteError
from skimp.core.memory.tracker import Tracker
from skimp.core.position import position
from skimp.core.registry import load
from skimp.hf import Attached, attach
from skimp.hf.forward import Forward
from skimp.kernels.native import library

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate", reason="Trainer needs accelerate: pip install skimp[hf]")


def make(folder: Path, model: Any = None, rule: str = "adamw", **changes: Any) -> Any:
    """A trainer of the plain case with some arguments changed."""
    case = Case((), rule=rule, arguments=changes)
    return hf_trainer(case, model if model is not None else model_of(case), str(folder))


REFUSED: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("nothing", {}, {}, "no technique"),
    ("compile", {"torch_compile": True}, {"recompute": "all"}, "torch_compile=True"),
    ("twice recomputed", {"gradient_checkpointing": True}, {"recompute": "all"}, "run three times"),
    ("no such block", {}, {"recompute": (0, 3)}, "3 blocks, counted from 0"),
    ("accumulated", {"gradient_accumulation_steps": 2}, {"step_in_backward": True}, "freed before the next"),
    ("hidden declarations", {"gradient_checkpointing": True}, {"documents": True}, "attend across them"),
]


@pytest.mark.parametrize(("changes", "techniques", "message"), [r[1:] for r in REFUSED], ids=[r[0] for r in REFUSED])
def test_refused_by_name(tmp_path: Path, changes: dict[str, Any], techniques: dict[str, Any], message: str) -> None:
    trainer = make(tmp_path, **changes)
    with pytest.raises(ConflictError, match=re.escape(message)) as caught:
        attach(trainer, **techniques)
    assert caught.value.instead or message in ("3 blocks, counted from 0",)
    assert not hasattr(trainer, "skimp")
    assert "forward" not in trainer.model.__dict__


@pytest.mark.skipif(not library.available(), reason="no native kernels")
def test_what_the_fused_layers_cannot_take_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConflictError, match="float64 on cpu"):
        attach(make(tmp_path, model_of(CASES["plain"]).double()), fused=True)


def test_step_in_backward_needs_a_rule_that_can(tmp_path: Path) -> None:
    for optimizers, found in (
        ((None, None), "none"),
        ((rule_of("torch", model := model_of(CASES["plain"])), None), "AdamW"),
    ):
        trainer = transformers.Trainer(
            model=model, args=transformers.TrainingArguments(**arguments_of(CASES["plain"], str(tmp_path))),
            train_dataset=raw(CASES["plain"]), data_collator=pad, optimizers=optimizers,
        )  # fmt: skip
        with pytest.raises(ConflictError, match=f"optimizer: {found}") as caught:
            attach(trainer, step_in_backward=True)
        assert "skimp.optim.AdamW" in caught.value.instead[0]


def test_a_loss_of_its_own_is_not_replaced(tmp_path: Path) -> None:
    class Mine(transformers.Trainer):  # type: ignore[misc]
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            return super().compute_loss(*args, **kwargs)

    case = CASES["plain"]
    model = model_of(case)
    arguments = transformers.TrainingArguments(**arguments_of(case, str(tmp_path)))
    mine = Mine(model=model, args=arguments, train_dataset=raw(case), data_collator=pad)
    with pytest.raises(ConflictError, match=r"Mine\.compute_loss is its own"):
        attach(mine, chunked_loss=True)
    given = transformers.Trainer(
        model=model, args=arguments, train_dataset=raw(case), data_collator=pad, compute_loss_func=lambda *a, **k: None
    )
    with pytest.raises(ConflictError, match="compute_loss_func is set"):
        attach(given, chunked_loss=True)


def test_a_model_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    case = CASES["plain"]
    arguments = transformers.TrainingArguments(**arguments_of(case, str(tmp_path)))
    trainer = transformers.Trainer(model=nn.Linear(4, 4), args=arguments, train_dataset=raw(case), data_collator=pad)
    with pytest.raises(ModelError, match="no a token embedding"):
        attach(trainer, recompute="all")


def test_nothing_to_fuse_leaves_the_trainer_as_it_was(tmp_path: Path) -> None:
    if not library.available():
        pytest.skip("no native kernels")
    # Norms without gain and a ReLU gate: nothing that a kernel takes.
    config = transformers.OlmoConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, vocab_size=64,
        hidden_act="relu", pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    trainer = make(tmp_path, transformers.OlmoForCausalLM(config))
    with pytest.raises(ConflictError, match="no norm and no activation that is known"):
        attach(trainer, fused=True, recompute="all")
    assert not hasattr(trainer, "skimp")
    attach(trainer, recompute="all")
    with pytest.raises(ConflictError, match=r"trainer\.skimp\.remove"):
        attach(trainer, recompute="all")


EVERYTHING: dict[str, Any] = {"recompute": "all", "chunked_loss": True, "documents": True, "step_in_backward": True}


@pytest.mark.parametrize("half", [False, True], ids=["float32", "autocast"])
def test_remove_takes_everything_out(tmp_path: Path, half: bool) -> None:
    trainer = make(tmp_path, bf16=half)
    model, collator, attention = trainer.model, trainer.data_collator, trainer.model.config._attn_implementation
    methods = {n: getattr(trainer, n) for n in ("compute_loss", "prediction_step", "training_step", "log")}
    handle = attach(trainer, fused=library.available(), **EVERYTHING)
    assert isinstance(handle, Attached)
    assert trainer.skimp is handle
    trainer.train()
    handle.remove()
    handle.remove()
    assert not hasattr(trainer, "skimp")
    assert handle not in trainer.callback_handler.callbacks
    assert trainer.data_collator is collator
    assert model.config._attn_implementation == attention
    assert {n: getattr(trainer, n) for n in methods} == methods
    assert not [name for name, module in model.named_modules() if {"forward", "_original_forward"} & set(vars(module))]
    assert not [n for n, p in model.named_parameters() if p._post_accumulate_grad_hooks]
    model.zero_grad()
    before = [p.detach().clone() for p in model.parameters()]
    model(**pad(raw(CASES["plain"])[:2])).loss.backward()
    assert all(p.grad is not None for p in model.parameters())
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


# ---------------------------------------------------------------------- each effect is held
def test_an_idle_recompute_fails_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import skimp.activations.recompute as home

    def keep(run: Any, *args: Any, use_reentrant: bool, preserve_rng_state: bool, **kwargs: Any) -> Any:
        return run(*args, **kwargs)

    monkeypatch.setattr(home, "checkpoint", keep)
    trainer = make(tmp_path)
    attach(trainer, recompute="all")
    with pytest.raises(EffectError, match="not run again in backward"):
        trainer.train()


def test_an_idle_loss_fails_the_run(tmp_path: Path) -> None:
    trainer = make(tmp_path)
    plain = trainer.compute_loss
    attach(trainer, chunked_loss=True)
    trainer.compute_loss = plain
    with pytest.raises(EffectError, match="0 losses in chunks"):
        trainer.train()


def test_undeclared_documents_fail_the_run(tmp_path: Path) -> None:
    trainer = make(tmp_path)
    attach(trainer, documents=True)
    trainer.data_collator = pad
    with pytest.raises((EffectError, ModelError), match=r"no batch declared|mask"):
        trainer.train()


def test_another_attention_fails_the_run(tmp_path: Path) -> None:
    trainer = make(tmp_path)
    attach(trainer, documents=True)
    trainer.model.set_attn_implementation("eager")
    with pytest.raises(EffectError, match="attention 'eager'"):
        trainer.train()


def test_held_gradients_fail_the_run(tmp_path: Path) -> None:
    trainer = make(tmp_path)
    handle = attach(trainer, step_in_backward=True)
    assert handle.backward is not None
    handle.backward.delivery.close()
    parameter = next(trainer.model.parameters())
    parameter.grad = torch.zeros_like(parameter)
    with pytest.raises(EffectError, match="held after backward"):
        handle.on_pre_optimizer_step(None, None, None)
    parameter.grad = None
    for hook in handle.backward.delivery._hooks:
        hook.remove()
    with pytest.raises(EffectError, match=r"held after backward|never moved"):
        trainer.train()


def test_a_model_that_is_never_trained_fails_the_check(tmp_path: Path) -> None:
    handle = attach(make(tmp_path), recompute="all")
    with pytest.raises(EffectError, match="never called"):
        handle.assert_effect()


# ---------------------------------------------------------------------- what else a trainer does
def test_evaluation_makes_no_logits_and_prediction_gives_them(tmp_path: Path) -> None:
    trainer = make(tmp_path, per_device_eval_batch_size=ROWS)
    data = raw(CASES["whole"])
    with Tracker() as whole:
        expected = trainer.evaluate(data)["eval_loss"]
    attach(trainer, chunked_loss=True)
    with Tracker() as chunks:
        found = trainer.evaluate(data)["eval_loss"]
    assert found == pytest.approx(expected, rel=1e-6)
    assert chunks.peak.total < 0.7 * whole.peak.total
    assert trainer.predict(data[:3]).predictions.shape[-1] == trainer.model.config.vocab_size


def test_label_smoothing_is_kept(tmp_path: Path) -> None:
    losses = []
    for chunked in (False, True):
        trainer = make(tmp_path, label_smoothing_factor=0.2)
        if chunked:
            attach(trainer, chunked_loss=True)
        trainer.train()
        losses.append([line["loss"] for line in trainer.state.log_history if "loss" in line])
        losses[-1].append(trainer.evaluate(trainer.train_dataset)["eval_loss"])  # Trainer smooths there too
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)


def test_a_lora_that_drops_inputs_does_not_go_with_the_trainers_own_checkpointing(tmp_path: Path) -> None:
    trainer = make(tmp_path, gradient_checkpointing=True)
    LoRA(trainer.model, Spec(dropout=0.1))
    with pytest.raises(ConflictError, match="does not know its place"):
        attach(trainer, positions=True)
    other = make(tmp_path, gradient_checkpointing=True)
    LoRA(other.model, Spec())
    attach(other, positions=True)


def test_in_backward_without_its_hooks_is_no_step(tmp_path: Path) -> None:
    trainer = make(tmp_path)
    handle = attach(trainer, step_in_backward=True)
    backward: Any = handle.backward
    for hook in backward.delivery._hooks[1:]:
        hook.remove()
    backward.assert_freed = lambda: None  # it would find the gradients first
    with pytest.raises(EffectError, match="had no gradient in the last"):
        trainer.train()


def test_batches_of_several_widths_share_no_place() -> None:
    from types import SimpleNamespace

    model: Any = torch.nn.Linear(2, 2)
    forward = Forward(
        model, SimpleNamespace(state=SimpleNamespace(global_step=0), args=SimpleNamespace(process_index=0))
    )
    numbers = set()
    for rows, width in ((4, 10), (3, 8), (2, 10), (4, 7)):
        ids = torch.zeros(rows, width)
        with forward._position((ids,), {}):
            here = position()
        assert here is not None
        taken = set(range(here.row * width, (here.row + rows) * width))
        assert not numbers & taken
        numbers |= taken


def test_dropout_draws_the_same_masks(tmp_path: Path, make_tiny: Callable[..., Any]) -> None:
    """Recompute runs a block twice, and clipping in backward a batch twice: the numbers are those of one run."""
    results = []
    for techniques in ({}, {"recompute": "all"}, {"recompute": "all", "step_in_backward": True}):
        trainer = make(tmp_path, make_tiny("gpt2", resid_pdrop=0.3, embd_pdrop=0.3, attn_pdrop=0.3, vocab_size=1024))
        if techniques:
            attach(trainer, **techniques)
        trainer.train()
        results.append([line["loss"] for line in trainer.state.log_history if "loss" in line])
    assert results[0] == results[1]
    assert results[2] == pytest.approx(results[0], rel=1e-6)


def test_a_gradient_that_is_not_finite_stops_before_anything_moves(tmp_path: Path) -> None:
    trainer = make(tmp_path)
    attach(trainer, step_in_backward=True)
    with torch.no_grad():
        trainer.model.lm_head.weight[0] = float("nan")
    before = trainer.model.model.embed_tokens.weight.detach().clone()
    with pytest.raises(NonFiniteError, match="step 1"):
        trainer.train()
    assert torch.equal(trainer.model.model.embed_tokens.weight, before)


@pytest.mark.parametrize("rule", ["adamw", "adamw8bit", "adamw-bf16"])
def test_a_rule_in_trainer_is_the_rule_in_a_loop(tmp_path: Path, rule: str) -> None:
    """Accumulated, clipped and scheduled by Trainer; bit for bit what a plain loop does."""
    case = Case((), rule=rule, dtype=torch.bfloat16 if rule == "adamw-bf16" else torch.float32)
    model, data = model_of(case), raw(CASES["plain"])

    class InOrder(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(data)

    arguments = arguments_of(case, str(tmp_path)) | {"max_grad_norm": 0.5, "max_steps": 3}
    trainer = transformers.Trainer(
        model=model, args=transformers.TrainingArguments(**arguments), train_dataset=InOrder(), data_collator=pad,
        optimizers=(rule_of(rule, model), None),
    )  # fmt: skip
    trainer.train()
    other = model_of(case)
    optimizer: Any = load(rule, "update rule")(other.named_parameters(), lr=1e-3, weight_decay=0.01)
    schedule = transformers.get_scheduler("linear", optimizer, num_warmup_steps=0, num_training_steps=3)
    for step in range(3):
        other(**pad(data[step * ROWS : (step + 1) * ROWS])).loss.backward()
        nn.utils.clip_grad_norm_(other.parameters(), 0.5)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("techniques", [{}, EVERYTHING], ids=["rule only", "everything"])
def test_trainers_checkpoints_resume_bit_for_bit(tmp_path: Path, techniques: dict[str, Any]) -> None:
    def train(folder: str, resume: bool = False) -> list[torch.Tensor]:
        trainer = make(tmp_path / folder, rule="adamw8bit", save_strategy="steps", save_steps=2)
        if techniques:
            attach(trainer, **techniques)
        trainer.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2") if resume else None)
        return [p.detach().clone() for p in trainer.model.parameters()]

    whole = train("whole")
    saved = json.loads((tmp_path / "whole" / "checkpoint-2" / "config.json").read_text(encoding="utf-8"))
    assert "skimp" not in json.dumps(saved)
    resumed = train("resumed", resume=True)
    assert all(torch.equal(a, b) for a, b in zip(whole, resumed, strict=True))


# ---------------------------------------------------------------------- other families
SHAPE: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 104,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "vocab_size": 1024,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 48, "n_layer": 3, "n_head": 4, "n_positions": 64, "vocab_size": 1024},
    "qwen3": {**SHAPE, "head_dim": 16, "tie_word_embeddings": True},
    "mistral": {**SHAPE, "sliding_window": 7},
    "gemma2": {
        **SHAPE,
        "head_dim": 12,
        "query_pre_attn_scalar": 12,
        "sliding_window": 7,
        "attn_logit_softcapping": 20.0,
        "final_logit_softcapping": 15.0,
        "attn_implementation": "eager",  # the only one of HF's that caps
    },
    "granite": {**SHAPE, "logits_scaling": 4.0},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_losses_and_gradients_of_other_families(tmp_path: Path, family: str) -> None:
    """Windows, caps, scaled logits, tied heads: padded rows, with everything attached that does not move weights."""
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0} if family == "gpt2" else {}
    found = []
    for techniques in ({}, {"recompute": "all", "chunked_loss": True, "documents": True}):
        torch.manual_seed(0)
        shape = dict(FAMILIES[family])
        implementation = shape.pop("attn_implementation", "sdpa")
        config = transformers.AutoConfig.for_model(family, bos_token_id=1, eos_token_id=2, **shape, **no_dropout)
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=implementation).train()
        trainer = make(tmp_path, model)
        handle = attach(trainer, **techniques) if techniques else None
        batch = trainer.data_collator(raw(CASES["whole"])[:3])
        loss = trainer.compute_loss(model, batch, num_items_in_batch=torch.tensor(70))
        loss.backward()
        if handle is not None:
            handle.assert_effect()
        found.append((float(loss.detach()), {n: p.grad for n, p in model.named_parameters()}))
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-6)
    for name, grad in found[0][1].items():
        bound = 1e-5 * max(1e-3, float(grad.abs().max()))
        torch.testing.assert_close(found[1][1][name], grad, rtol=0, atol=bound)
