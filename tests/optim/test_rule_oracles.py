"""The same rules in other libraries, where they are installed: second oracles, and why they differ where they do.

`pip install --no-deps pytorch_optimizer torchao` brings two of them; without them these tests are skipped.
"""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from skimp.core.codecs.block4_map import codebook4
from skimp.optim import CAME, SPAM, Lion, StableSPAM

STEPS, SHAPE = 12, (37, 21)


def gradients() -> list[Tensor]:
    g = torch.Generator().manual_seed(5)
    return [torch.randn(SHAPE, generator=g, dtype=torch.float64) for _ in range(STEPS)]


def start() -> Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def compare(theirs: Any, ours: Any, tolerance: float = 1e-12) -> None:
    """Twelve steps in float64 from the same weights on the same gradients."""
    p, q = nn.Parameter(start()), nn.Parameter(start())
    library, rule = theirs([p]), ours([("w", q)])
    for step, g in enumerate(gradients()):
        g = g.clone()
        if step == 9:
            g[3, 4] = 1e4
        p.grad = g.clone()
        library.step()
        rule.step_parameter(q, g)
    assert not torch.equal(q, start())
    torch.testing.assert_close(q.detach(), p.detach(), rtol=tolerance, atol=tolerance)


def test_lion() -> None:
    library = pytest.importorskip("pytorch_optimizer")
    options = {"lr": 1e-3, "betas": (0.9, 0.99), "weight_decay": 0.1}
    compare(lambda ps: library.Lion(ps, weight_decouple=True, **options), lambda ps: Lion(ps, **options))


def test_lion_of_bitsandbytes_decays_first_too() -> None:
    library = pytest.importorskip("bitsandbytes")
    p, q = nn.Parameter(start().float()), nn.Parameter(start().float())
    options = {"lr": 1e-3, "betas": (0.9, 0.99), "weight_decay": 0.1}
    theirs, ours = library.optim.Lion(([p]), **options), Lion([("w", q)], **options)
    for g in gradients():
        p.grad = g.float()
        try:
            theirs.step()
        except (NotImplementedError, RuntimeError, ValueError) as error:
            pytest.skip(f"bitsandbytes has no such step on a CPU: {error}")
        ours.step_parameter(q, g.float())
    torch.testing.assert_close(q, p, rtol=1e-5, atol=1e-6)


def test_came() -> None:
    """Their estimate of the instability begins at 0 as ours, and neither corrects a bias."""
    library = pytest.importorskip("pytorch_optimizer")
    options = {"lr": 1e-3, "betas": (0.9, 0.99, 0.999), "weight_decay": 0.1}
    compare(lambda ps: library.CAME(ps, eps1=1e-30, eps2=1e-16, **options), lambda ps: CAME(ps, **options), 1e-9)


def test_spam() -> None:
    """Without resets, whose bias correction they leave running. They clip where v is 0 too, which it never is here."""
    library = pytest.importorskip("pytorch_optimizer")
    options = {"lr": 1e-3, "betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.1}
    compare(
        lambda ps: library.SPAM(
            ps, threshold=100, grad_accu_steps=3, update_proj_gap=1000, warmup_epoch=0, density=1.0, **options
        ),
        lambda ps: SPAM(ps, theta=100.0, after=3, every=0, warmup=0, **options),
    )


def test_stable_spam() -> None:
    library = pytest.importorskip("pytorch_optimizer")
    options = {"lr": 1e-3, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}
    compare(
        lambda ps: library.StableSPAM(
            ps, gamma1=0.7, gamma2=0.9, theta=0.999, t_max=None, update_proj_gap=1000, **options
        ),
        lambda ps: StableSPAM(ps, every=1000, **options),
        1e-9,
    )


def test_4bit_maps_of_torchao() -> None:
    """The entries are torchao's; it rounds both moments to nearest, where our first moment is rounded at random."""
    library = pytest.importorskip("torchao.optim.quant_utils")
    signed = library.create_dynamic_map(signed=True, max_exponent_bits=3, total_bits=4)
    numpy.testing.assert_allclose(codebook4(True), numpy.array(signed), rtol=1e-6)
    numpy.testing.assert_allclose(codebook4(False), torch.linspace(0, 1, 17)[1:].numpy(), rtol=1e-7)
