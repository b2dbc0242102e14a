"""Log-likelihoods of lm-evaluation-harness on an exported folder, held against skimp's own.

    python benchmarks/harness.py FOLDER     # an export: skimp export MODEL --to merged

No data set is needed: the requests are made up here. The harness runs in this process with transformers; skimp's
numbers come from its own head and attention; both in float32. Prints both columns and the largest difference; exit code
1 when they differ by more than float32 rounding allows. Needs the package lm-eval.
"""

from __future__ import annotations

import sys

#: Context, continuation: short and long, numbers, two scripts, and a continuation of several tokens.
REQUESTS = [
    ("The capital of France is", " Paris"),
    ("The capital of France is", " a small fish"),
    ("In Python, a list is written with", " square brackets"),
    ("1 2 3 4 5 6 7 8", " 9"),
    ("The with statement in Python 한국어", " 문장"),
    ("It is a truth universally acknowledged, that a single man in possession of a good fortune,", " must be in want"),
]
#: Sums of up to six log-probabilities near 100, each right to about 1e-5.
TOLERANCE = 1e-3


def main(folder: str) -> int:
    """Print the table; 0 when all are equal to rounding."""
    theirs, ours = harness(folder), own(folder)
    print(f"{'harness':>12} {'skimp':>12} {'greedy':>14}  request")
    worst = 0.0
    same = True
    for (context, continuation), a, b in zip(REQUESTS, theirs, ours, strict=True):
        worst, same = max(worst, abs(a[0] - b[0])), same and a[1] == b[1]
        print(f"{a[0]:12.5f} {b[0]:12.5f} {a[1]!s:>6} {b[1]!s:>6}  {context[-30:]!r} -> {continuation!r}")
    print(f"largest difference {worst:.2g}; greedy answers {'equal' if same else 'differ'}")
    return 0 if worst < TOLERANCE and same else 1


def harness(folder: str) -> list[tuple[float, bool]]:
    """(log-likelihood, is it the greedy continuation) by lm-evaluation-harness."""
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    model = HFLM(pretrained=folder, device="cpu", dtype="float32", batch_size=1)
    asked = [Instance("loglikelihood", {}, request, i) for i, request in enumerate(REQUESTS)]
    return [(float(value), bool(greedy)) for value, greedy in model.loglikelihood(asked)]


def own(folder: str) -> list[tuple[float, bool]]:
    """The same by skimp."""
    import torch

    from skimp.run.found import find
    from skimp.run.opened import open_model
    from skimp.run.words import Words

    with find(folder) as found:
        words = Words(found.tokenizer, found.config)
        opened = open_model(found, "fp32")
    results = []
    for context, continuation in REQUESTS:
        whole = words.encode(context + continuation)
        start = len(words.encode(context))
        at = torch.arange(len(whole)).unsqueeze(0)
        logits = opened.head.logits_of(torch.tensor([whole]), at)[0, start - 1 : -1]
        wanted = torch.tensor(whole[start:])
        chances = torch.log_softmax(logits, -1).gather(1, wanted[:, None])
        results.append((float(chances.sum()), bool((logits.argmax(-1) == wanted).all())))
    return results


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python benchmarks/harness.py FOLDER")
    sys.exit(main(sys.argv[1]))
