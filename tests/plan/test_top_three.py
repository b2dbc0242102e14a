"""The three fastest points of a small lattice, run: bytes of each are the allocator's, and losses are one run's."""

from __future__ import annotations

import pytest
import torch
from test_frontier import CONFIG, RATES, recipe

from skimp.core.exact import ExactChoices
from skimp.core.memory.oracle import witness
from skimp.core.memory.tracker import Tracker
from skimp.data.synthetic import synthetic_batch
from skimp.plan.mixed import MixedSearch
from skimp.plan.simulate import simulate
from skimp.run.build import build
from skimp.run.weights import init_scratch

BLOCKS = 4


def ran(described: object, exact: ExactChoices) -> tuple[int, list[float], list[torch.Tensor]]:
    """(highest bytes by c10's events over two steps, what rested before included; losses; weights afterwards)."""
    run = build(described, exact, CONFIG, fill=lambda model: init_scratch(model, 0))
    batches = [synthetic_batch(320, 2, 301, (0, 319, 320), seed=n) for n in range(2)]
    tracker = Tracker()
    run.show_to(tracker, batches[0])
    rest = tracker.live
    losses, seen = witness(lambda: [run.step(batch).loss for batch in batches])
    weights = [p.detach().clone() for _, p in run.parameters()]
    run.close()
    return rest + seen.peak, losses, weights


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.1, 0.4, 1.0])
def test_the_three_fastest_within_a_budget_take_their_bytes_and_one_loss(share: float) -> None:
    """Loss chunk and micro-batch are pinned, which order sums otherwise (a second micro-batch adds its gradients inside
    products, but in recomputed blocks); a chunked MLP so orders only its weights' gradients."""
    described = recipe("exact.micro_batch=2", "exact.loss_chunk=64", "exact.malloc=return")
    search = MixedSearch(described, CONFIG, BLOCKS, {"return": (10**12, 1.0)}, RATES, "cpu")
    points = {}
    for row in search.lattice.everywhere():
        for count in range(BLOCKS + 1):
            if count or row.keep == "nothing":
                exact = search.exact(row, count)
                points[exact] = search.full(exact, short=True)
    sizes = sorted(p.peak_bytes for p in points.values())
    budget = sizes[0] + int(share * (sizes[-1] - sizes[0]))
    fitting = sorted((e for e in points if points[e].peak_bytes <= budget), key=lambda e: points[e].seconds)
    best = fitting[:3]
    assert len(set(best)) == 3
    limited = MixedSearch(described, CONFIG, BLOCKS, {"return": (budget, 1.0)}, RATES, "cpu")
    limited._profiles = search._profiles
    assert limited.best()[2] <= points[best[0]].seconds * (1 + 1e-6)
    found = [ran(described, exact) for exact in best]
    for exact, (taken, losses, weights) in zip(best, found, strict=True):
        assert simulate(described, exact, CONFIG).phases["train"] == taken, exact
        assert losses == found[0][1], exact
        for a, b in zip(weights, found[0][2], strict=True):
            if exact.mlp_chunk == best[0].mlp_chunk:
                assert torch.equal(a, b), exact
            else:
                torch.testing.assert_close(a, b, rtol=0, atol=1e-8)
    assert len(set(found[0][1])) == 2
