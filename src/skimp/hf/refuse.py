"""What a trainer's own settings would break, or be broken by: refused by name before anything is changed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from skimp.core.errors import ConflictError
from skimp.core.structure import Structure
from skimp.kernels.native import library
from skimp.optim.base import UpdateRule


def check(
    trainer: Any,
    model: nn.Module,
    structure: Structure,
    blocks: Sequence[int],
    fused: bool,
    chunked_loss: bool,
    documents: bool,
    step_in_backward: bool,
    positions: bool,
) -> None:
    """Raise ConflictError for the first thing that cannot go together."""
    if not (blocks or fused or chunked_loss or documents or step_in_backward or positions):
        raise ConflictError("attach", "no technique", instead="name at least one, for example recompute='all'")
    _trainer(trainer)
    _checkpointed_dropout(trainer, model)
    if blocks:
        _recompute(trainer, structure, blocks)
    if fused:
        _fused(trainer, model)
    if chunked_loss:
        _chunked(trainer, model)
    if documents:
        _documents(trainer, model)
    if step_in_backward:
        _in_backward(trainer)


def _trainer(trainer: Any) -> None:
    if getattr(trainer, "skimp", None) is not None:
        raise ConflictError(
            "attach", "this trainer has techniques attached", "each would act twice", "trainer.skimp.remove() first"
        )
    if trainer.args.n_gpu > 1:
        raise ConflictError(
            "attach",
            f"{trainer.args.n_gpu} devices in one process",
            "nn.DataParallel copies the model for every batch, and what was put into it acts on the original",
            "torchrun --nproc-per-node, or CUDA_VISIBLE_DEVICES with one device",
        )
    if trainer.args.torch_compile:
        raise ConflictError(
            "attach",
            "torch_compile=True",
            "the compiler decides itself what is kept for backward, and does not see hooks or declarations",
            "torch_compile=False",
        )


def _checkpointed_dropout(trainer: Any, model: nn.Module) -> None:
    if trainer.args.gradient_checkpointing and any(getattr(m.forward, "dropout", 0.0) for m in model.modules()):
        raise ConflictError(
            "attach to a model with a LoRA of skimp's that drops inputs",
            "gradient_checkpointing=True",
            "its second run, in backward, does not know its place in the step, by which the masks are addressed",
            "gradient_checkpointing=False, and recompute='all' in its place",
        )


def _recompute(trainer: Any, structure: Structure, blocks: Sequence[int]) -> None:
    if trainer.args.gradient_checkpointing:
        raise ConflictError(
            "attach(recompute=…)",
            "gradient_checkpointing=True",
            "both run the blocks again: every block would run three times",
            "gradient_checkpointing=False",
        )
    wrong = [i for i in blocks if not 0 <= i < len(structure.blocks)]
    if wrong:
        raise ConflictError(f"recompute of block {wrong[0]}", f"{len(structure.blocks)} blocks, counted from 0")


def _fused(trainer: Any, model: nn.Module) -> None:
    if not library.available():
        raise ConflictError(
            "attach(fused=True)",
            f"native kernels: {library.why()}",
            "the fused layers are C",
            ["python -m skimp.kernels.native", "leave fused out"],
        )
    kinds = {(p.dtype, p.device.type) for p in model.parameters()}
    if not kinds <= {(torch.float32, "cpu"), (torch.bfloat16, "cpu")} or trainer.args.fp16:
        found = ", ".join(sorted(f"{str(d).removeprefix('torch.')} on {where}" for d, where in kinds))
        raise ConflictError(
            "attach(fused=True)",
            f"{found}{', fp16' if trainer.args.fp16 else ''}",
            "the fused layers take float32 and bfloat16 on a CPU; with anything else they would run plain, in silence",
            "leave fused out",
        )


def _chunked(trainer: Any, model: nn.Module) -> None:
    name, args = type(trainer).__name__, trainer.args
    home = type(trainer).compute_loss.__module__
    own = None
    if home not in ("transformers.trainer", "trl.trainer.sft_trainer"):
        own = f"{name}.compute_loss is its own ({home})"
    elif trainer.compute_loss_func is not None:
        own = "compute_loss_func is set"
    elif getattr(args, "loss_type", None) not in (None, "nll"):
        own = f"loss_type='{args.loss_type}'"
    elif getattr(getattr(model, "config", None), "output_router_logits", False):
        own = "the router's balance loss is added"
    elif getattr(trainer.model, "active_peft_config", None) is not None:
        own = "prompt learning lengthens every row" if trainer.model.active_peft_config.is_prompt_learning else None
    if own is not None:
        raise ConflictError(
            "attach(chunked_loss=True)",
            own,
            "that loss is not the plain mean cross-entropy, which the chunks would put in its place",
            "leave chunked_loss out; in a loss of your own call skimp.losses.linear_cross_entropy",
        )


def _documents(trainer: Any, model: nn.Module) -> None:
    if trainer.args.gradient_checkpointing:
        raise ConflictError(
            "attach(documents=True)",
            "gradient_checkpointing=True",
            "its second run would see no declared documents and attend across them",
            "recompute='all' in its place, gradient_checkpointing=False",
        )
    devices = sorted({p.device.type for p in model.parameters()})
    if devices != ["cpu"]:
        raise ConflictError(
            "attach(documents=True)",
            f"a model on {', '.join(devices)}",
            "its attention splits documents into CPU calls; on a card one variable-length call does that better",
            "attn_implementation='flash_attention_2' with a padding-free collator",
        )


def _in_backward(trainer: Any) -> None:
    args = trainer.args
    broken = None
    if not isinstance(trainer.optimizer, UpdateRule):
        found = "none" if trainer.optimizer is None else type(trainer.optimizer).__name__
        raise ConflictError(
            "attach(step_in_backward=True)",
            f"optimizer: {found}",
            "the rule must be there before backward and update one parameter at a time",
            "Trainer(…, optimizers=(skimp.optim.AdamW(model.named_parameters(), lr=…), None))",
        )
    if args.gradient_accumulation_steps > 1:
        broken = (
            f"gradient_accumulation_steps={args.gradient_accumulation_steps}",
            "the gradient of one micro-batch is not the step's gradient, and it is freed before the next",
            f"per_device_train_batch_size={args.per_device_train_batch_size * args.gradient_accumulation_steps} "
            "and no accumulation (recompute='all' makes room)",
        )
    elif args.world_size > 1 or trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
        broken = (
            f"{args.world_size} processes, or a sharded model",
            "a gradient is final only after it has been summed over processes, which happens after its hook",
            "one process, or leave step_in_backward out: a sharded model holds only its part of the gradients",
        )
    elif args.fp16:
        broken = (
            "fp16=True",
            "the loss scale is checked on all gradients together, when they are gone already",
            "bf16=True, or float32",
        )
    elif args.gradient_checkpointing and (args.gradient_checkpointing_kwargs or {}).get("use_reentrant"):
        broken = (
            "gradient_checkpointing with use_reentrant=True",
            "its inner backward delivers gradients before they are final",
            "recompute='all' in its place",
        )
    if broken is not None:
        raise ConflictError("attach(step_in_backward=True)", *broken)
