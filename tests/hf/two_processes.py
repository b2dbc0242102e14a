"""One of two gloo processes: `RANK=… WORLD_SIZE=2 MASTER_ADDR=… MASTER_PORT=… python two_processes.py OUT`.

Trainer under data parallelism, plain and with techniques attached; then the same techniques on a model sharded by
FSDP2, which Trainer itself sets up on cards only: there their loss and gradients are held against the plain forward's.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import trainer_cases as cases

TECHNIQUES: dict[str, Any] = {"recompute": "all", "chunked_loss": True, "documents": True}


def losses(techniques: dict[str, Any], rule: str = "adamw") -> dict[str, Any]:
    """Trainer on this process's half of every batch."""
    import transformers

    from skimp.hf import attach

    case = cases.CASES["whole"]
    model = cases.model_of(case)
    arguments = cases.arguments_of(case, tempfile.mkdtemp()) | {"per_device_train_batch_size": 2, "ddp_backend": "gloo"}
    trainer = transformers.Trainer(
        model=model,
        args=transformers.TrainingArguments(**arguments),
        train_dataset=cases.raw(case),
        data_collator=cases.pad,
        optimizers=(cases.rule_of(rule, model), None),
    )
    if techniques:
        attach(trainer, **techniques)
    trainer.train()
    assert trainer.args.world_size == 2
    logs = [line for line in trainer.state.log_history if "loss" in line]
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    return {
        "losses": [line["loss"] for line in logs],
        "norms": [line["grad_norm"] for line in logs],
        "weights": weights,
    }


def sharded_gradients(techniques: bool) -> dict[str, Any]:
    """Loss and whole gradients of one backward through an FSDP2 model."""
    from torch.distributed.fsdp import fully_shard

    from skimp.activations import Recompute
    from skimp.core.structure import read_structure
    from skimp.hf.forward import Forward
    from skimp.hf.loss import ChunkedLoss

    model = cases.model_of(cases.CASES["plain"])
    structure = read_structure(model)
    arguments = SimpleNamespace(label_smoothing_factor=0.0, average_tokens_across_devices=False)
    trainer: Any = SimpleNamespace(
        args=arguments,
        prediction_step=None,
        compute_loss=lambda model, inputs: model(**inputs).loss,
    )
    if techniques:
        Recompute(model, structure.blocks)
        ChunkedLoss(trainer, model, structure, Forward(model))
    for block in structure.blocks:
        fully_shard(model.get_submodule(block))
    fully_shard(model)
    ids = torch.randint(3, cases.VOCAB, (2, 30), generator=torch.Generator().manual_seed(dist.get_rank()))
    loss = trainer.compute_loss(model, {"input_ids": ids, "labels": ids})
    loss.backward()
    return {"loss": loss.detach(), "grads": {n: p.grad.full_tensor().clone() for n, p in model.named_parameters()}}


if __name__ == "__main__":
    torch.set_num_threads(1)
    found = {
        "plain": losses({}),
        "attached": losses(TECHNIQUES),
        "8-bit": losses(TECHNIQUES, "adamw8bit"),
        "sharded": sharded_gradients(False),
        "sharded attached": sharded_gradients(True),
    }
    if os.environ["RANK"] == "0":
        torch.save(found, Path(sys.argv[1]))
