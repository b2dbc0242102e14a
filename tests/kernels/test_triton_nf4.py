"""NF4 products in Triton against the torch products, through Triton's interpreter in a process of its own."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys

import pytest

ROWS = """
import json, sys
import torch
from skimp.core.coded import product, product_back
from skimp.core.coded_linear import CodedLinear
from skimp.core.codecs import NF4
from skimp.kernels.triton import nf4

found = {}
g = torch.Generator().manual_seed(0)
for shape, tokens in (((37, 70), 5), ((64, 128), 33), ((1, 64), 1), ((130, 31), 40)):
    for codec in (NF4(), NF4(128, False)):
        for dtype in (torch.float32, torch.bfloat16):
            layer = CodedLinear(shape[1], shape[0], codec)
            layer.take(torch.randn(shape, generator=g))
            weight = layer.weight
            sides = codec._sides(weight.parts)
            x, up = (torch.randn(tokens, n, generator=g).to(dtype) for n in (shape[1], shape[0]))
            bias = torch.randn(shape[0], generator=g).to(dtype)
            parts = (weight.parts["codes"], sides, codec.block, shape)
            pairs = {
                "y": (nf4.product(x, *parts), product(weight, x.float())),
                "biased": (nf4.product(x, *parts, bias), product(weight, x.float(), bias.float())),
                "dx": (nf4.product_back(up, *parts), product_back(weight, up.float())),
            }
            for name, (a, b) in pairs.items():
                assert a.dtype == dtype and a.shape == b.shape
                found[f"{name} {shape} {tokens} {codec} {dtype}"] = float((a.float() - b).norm() / b.norm())
json.dump(found, sys.stdout)
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_products_equal_those_of_the_decoded_matrix_at_odd_sizes() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", ROWS], capture_output=True, text=True, check=False, env=environment, timeout=280
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert len(found) == 48
    for name, error in found.items():
        # One rounding of the result; the interpreter cuts to bfloat16 where a card rounds to nearest.
        assert error < (2e-6 if "float32" in name else 2**-7), name
