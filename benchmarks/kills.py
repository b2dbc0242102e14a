"""One run, killed twenty times and resumed each time: its weights must be the bits of a run that was
left alone.

    python benchmarks/kills.py                     # about four minutes; mostly starting processes
    python benchmarks/kills.py --kills 4 --steps 20

Twelve deaths are injected inside saves, at least one at every point that `skimp.run.faults` names; the
others are SIGKILL from outside at seeded random moments, two of them while the process is still starting.
Halfway a save also meets a full disk. Exit code 1 when anything differs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import measure
from skimp.run.faults import POINTS

#: How often a save passes a point at least: two files, some sixty tensors. Others are passed once.
PASSES = {"mid_tensor": 60, "after_file": 2, "before_fsync": 2}
PATIENCE_SECONDS = 300
#: Two blocks and tied weights: what a save holds is in every larger model too.
TINY = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 128,
    "intermediate_size": 352, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 512, "max_position_embeddings": 512,
    "tie_word_embeddings": True, "bos_token_id": 0, "eos_token_id": 0,
    "rms_norm_eps": 1e-5,
}  # fmt: skip


@dataclass(frozen=True)
class Kill:
    """point: SKIMP_FAULT's value; or none, and then SIGKILL `delay` seconds after `steps` new steps
    (0: the start).
    """

    point: str = ""
    steps: int = 0
    delay: float = 0.0

    def __str__(self) -> str:
        if self.point:
            return f"inside a save: {self.point}"
        return f"{self.delay:.2f} s after " + (f"{self.steps} new steps" if self.steps else "its start")


def choose(number: int, seed: int) -> list[Kill]:
    """The kills in order: three fifths injected, at least one at every point where they suffice; the
    same for a seed.

    The first is in the second save, so that there is something to resume from. The others come in a
    process's first or second save: each process gets two to four steps further, and 60 steps see 20 deaths.
    """
    dice = random.Random(seed)
    injected = -(-number * 3 // 5)
    points = [p for p in POINTS if p != "before_rename"] + dice.choices(POINTS, k=max(0, injected - len(POINTS)))
    points = points[: injected - 1]
    rest = [Kill(f"{p}:{dice.randint(1, PASSES.get(p, 1) + (p in ('before_write', 'prune')))}") for p in points]
    outside = number - injected
    starting = min(2, outside // 2)
    rest += [Kill(delay=dice.uniform(0.5, 3.0)) for _ in range(starting)]
    rest += [Kill(steps=dice.randint(1, 2), delay=dice.uniform(0.0, 0.1)) for _ in range(outside - starting)]
    dice.shuffle(rest)
    return [Kill("before_rename:2"), *rest]


def write_model(folder: Path, config: Mapping[str, Any]) -> None:
    """A model folder without weights (the run draws them), a byte-level tokenizer trained here, and a
    text.
    """
    from pydoc_data.topics import topics

    from tokenizers import ByteLevelBPETokenizer

    folder.mkdir(parents=True, exist_ok=True)
    texts = [topics[name] for name in sorted(topics)][:30]
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(texts, vocab_size=512, special_tokens=["<end>"], show_progress=False)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))


class Subject:
    """The run that is killed, or left alone.

    Args:
        work: the benchmark's folder, with the model in `work/model`.
        name: the run's folder in it.
        steps, seq: of the recipe.
        optimizer: update rule.
    """

    def __init__(self, work: Path, name: str, steps: int, seq: int, optimizer: str) -> None:
        self.folder, self.steps, self.log = work / name, steps, work / f"{name}.log"
        recipe = {
            "model": {"name": str(work / "model"), "init": "scratch"},
            "data": {"train": str(work / "model" / "text.jsonl"), "validation": None, "seq_len": seq},
            "train": {"steps": steps, "batch_tokens": 8 * seq, "lr": 1e-3, "warmup": 2},
            "optimizer": optimizer, "eval": None, "sample": None,
            "checkpoint": {"every": 2, "keep": 2}, "output": str(self.folder),
            "exact": {"micro_batch": 4, "recompute": 1, "in_backward": False, "loss_chunk": 256},
        }  # fmt: skip
        self.recipe = work / f"{name}.yaml"
        self.recipe.write_text(json.dumps(recipe))

    def command(self) -> list[str]:
        """Start, or resume what there is."""
        if self.newest() is None:
            return measure.skimp("train", str(self.recipe), "--quiet")
        return measure.skimp("train", str(self.folder), "--resume", "--quiet")

    def run(self, kill: Kill | None = None, file_limit: int | None = None) -> int:
        """Run until it ends or is killed; its exit code, negative for a signal."""
        env: Mapping[str, str] = {**os.environ, "SKIMP_FAULT": kill.point} if kill and kill.point else os.environ
        limit = None if file_limit is None else lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (file_limit,) * 2)
        before = self.last_step()
        with self.log.open("wb") as out:
            process = subprocess.Popen(
                self.command(),
                stdout=out,
                stderr=subprocess.STDOUT,
                env=env,
                cwd=measure.ROOT,
                preexec_fn=limit,
            )
            try:
                if kill is not None and not kill.point:
                    self._strike(process, kill, before)
                return process.wait(PATIENCE_SECONDS)
            finally:
                process.kill()
                process.wait()

    def _strike(self, process: subprocess.Popen[bytes], kill: Kill, before: int) -> None:
        """SIGKILL at the chosen moment. A kill meant for the start comes at the first new step if
        that is sooner.
        """
        begin = time.monotonic()
        while process.poll() is None and time.monotonic() - begin < PATIENCE_SECONDS:
            gone = self.last_step() - before
            if (kill.steps and gone >= kill.steps) or (
                not kill.steps and (gone >= 1 or time.monotonic() - begin >= kill.delay)
            ):
                time.sleep(kill.delay if kill.steps else 0.0)
                process.send_signal(signal.SIGKILL)
                return
            time.sleep(0.002)

    def metrics(self) -> list[dict[str, Any]]:
        """Whole lines of metrics.jsonl; a death may leave half of one at the end."""
        path = self.folder / "metrics.jsonl"
        lines = path.read_text("utf-8").split("\n")[:-1] if path.is_file() else []
        return [json.loads(line) for line in lines]

    def last_step(self) -> int:
        lines = self.metrics()
        return int(lines[-1]["step"]) if lines else 0

    def newest(self) -> Path | None:
        """The newest complete checkpoint."""
        marked = sorted((self.folder / "checkpoints").glob("step-????????/COMPLETE"))
        return marked[-1].parent if marked else None

    def newest_step(self) -> int:
        found = self.newest()
        return int(found.name.removeprefix("step-")) if found else 0

    def bits(self) -> dict[str, str]:
        """Hash of every tensor file of the newest complete checkpoint."""
        found = self.newest()
        files = sorted(found.glob("*.safetensors")) if found else []
        return {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in files}


def full_disk(subject: Subject) -> tuple[list[str], bool]:
    """One resume in which no file may grow past half a checkpoint's weights; what it said, and
    whether all is right.
    """
    good = subject.newest()
    assert good is not None
    before = subject.bits()
    code = subject.run(file_limit=(good / "model.safetensors").stat().st_size // 2)
    said = subject.log.read_text("utf-8", "replace")
    checks = {
        f"exit code 2 (was {code})": code == 2,
        "a message without a traceback": "Traceback" not in said and "skimp: " in said,
        "that names the last good checkpoint": good.name in said,
        "which is still there, bit for bit": subject.newest() == good and subject.bits() == before,
    }
    lines = [f"  {'yes' if right else 'NO '} {what}" for what, right in checks.items()]
    message = " ".join(said[said.find("skimp: ") :].split()) if "skimp: " in said else said[-300:]
    return [f"disk full during a save: {message}", *lines], all(checks.values())


def compare(subject: Subject, alone: Subject) -> dict[str, bool]:
    """What must be equal after all deaths."""
    mine, other = subject.metrics(), alone.metrics()
    same = ("step", "loss", "grad_norm", "lr", "tokens")
    return {
        "both at the last step": subject.newest_step() == alone.newest_step() == subject.steps,
        "weights and optimizer state bit-equal": bool(alone.bits()) and subject.bits() == alone.bits(),
        "every step once in metrics.jsonl": [m["step"] for m in mine] == list(range(1, subject.steps + 1)),
        "its numbers equal": [[m[k] for k in same] for m in mine] == [[m[k] for k in same] for m in other],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps of the run, saved every second")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seq", type=int, default=128, help="tokens in a row, eight rows a step")
    parser.add_argument("--optimizer", default="adamw8bit", help="update rule, such as adamw")
    parser.add_argument("--seed", type=int, default=0, help="of the random moments")
    parser.add_argument("--work", default="runs/bench-kills", help="folder; what an earlier benchmark left is removed")
    parser.add_argument("--json", help="write the figures here as well")
    args = parser.parse_args()
    work = Path(args.work).resolve()
    shutil.rmtree(work, ignore_errors=True)
    write_model(work / "model", TINY)
    alone, subject = (Subject(work, n, args.steps, args.seq, args.optimizer) for n in ("alone", "killed"))
    begin, source = time.monotonic(), measure.source_digest()
    if code := alone.run():
        sys.exit(f"the unbroken run ended with exit code {code}:\n{alone.log.read_text()[-2000:]}")

    rows: list[list[Any]] = []
    disk, good = ["disk full: never reached"], False
    for index, kill in enumerate(choose(args.kills, args.seed)):
        from_step = subject.newest_step()
        code = subject.run(kill)
        rows.append([index + 1, str(kill), from_step, subject.last_step(), subject.newest_step(), code])
        print(f"kill {index + 1}: {kill}; exit code {code}", file=sys.stderr, flush=True)
        if code != -signal.SIGKILL:
            break
        if index == args.kills // 2:
            disk, good = full_disk(subject)
    last = subject.run()
    deaths = sum(r[-1] == -signal.SIGKILL for r in rows)
    inside = sum(r[-1] == -signal.SIGKILL and r[1].startswith("inside") for r in rows)
    checks = {
        f"{args.kills} deaths (were {deaths}), {inside} of them inside saves": deaths == args.kills,
        f"the last resume ended well (exit code {last})": last == 0,
        "skimp's source stayed as it was meanwhile": measure.source_digest() == source,
        **compare(subject, alone),
    }
    print(
        f"{args.steps} steps, {args.optimizer}, saved every 2; seed {args.seed}; "
        f"{time.monotonic() - begin:.0f} s in all\n{measure.machine()}\n"
    )
    print(measure.table(["kill", "when", "resumed from", "step reached", "newest complete", "exit code"], rows))
    print("\n" + "\n".join(disk) + "\n")
    print("\n".join(f"{'yes' if right else 'NO '} {what}" for what, right in checks.items()))
    good = good and all(checks.values())
    print("\nbit-equal after every death" if good else "\nFAILED")
    measure.write_json(args.json, {"kills": rows, "disk": disk, "checks": checks, "machine": measure.machine()})
    if not good:
        print(f"\nlast words of the run:\n{subject.log.read_text('utf-8', 'replace')[-1500:]}", file=sys.stderr)
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
