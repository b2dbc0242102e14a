"""Philox against the published known answers; addressing; the operator's stated workspace."""

from __future__ import annotations

import math

import pytest
import torch

from skimp.core.errors import SkimpError
from skimp.core.forms import reference_only
from skimp.core.noise import CHUNK, key64, normal, philox_rounds_, random_uint32, uniform

# Random123 1.14, examples/kat_vectors, philox4x32 with 10 rounds: counter, key, result.
KNOWN = [
    ((0, 0, 0, 0), 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, 0xFFFFFFFFFFFFFFFF, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        0x299F31D0A4093822,
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_published_known_answers(counter, key, expected):
    words = torch.tensor([counter], dtype=torch.int64)
    philox_rounds_(words, torch.empty(2, 1, dtype=torch.int64), key)
    assert tuple(words[0].tolist()) == expected


def test_addresses_map_to_counters():
    key = key64(3, "layer.weight")
    stream, offset = (5 << 32) + 9, (2 << 34) + 4  # both halves of both counters in use
    block = offset // 4
    words = torch.tensor([[block & 0xFFFFFFFF, block >> 32, 9, 5]], dtype=torch.int64)
    philox_rounds_(words, torch.empty(2, 1, dtype=torch.int64), key)
    assert torch.equal(random_uint32(3, "layer.weight", offset, 4, stream=stream), words[0])
    with reference_only():
        assert torch.equal(random_uint32(3, "layer.weight", offset, 4, stream=stream), words[0])


@pytest.mark.parametrize("make", [random_uint32, uniform, normal])
@pytest.mark.parametrize("cut", [1, 2, 3, 4099, CHUNK - 1, CHUNK + 6])
def test_chunks_are_slices(make, cut):
    whole = make(7, "w", 5, CHUNK + 2011, stream=2)
    assert torch.equal(make(7, "w", 5 + cut, 999, stream=2), whole[cut : cut + 999])


def test_seed_name_and_stream_all_matter_and_the_global_generator_does_not():
    base = random_uint32(0, "a", 0, 64)
    for other in (
        random_uint32(1, "a", 0, 64),
        random_uint32(0, "b", 0, 64),
        random_uint32(0, "a", 0, 64, stream=1),
    ):
        assert (other == base).sum() == 0
    state = torch.get_rng_state()
    normal(0, "a", 0, 100)
    torch.manual_seed(99)
    assert torch.equal(random_uint32(0, "a", 0, 64), base)
    torch.set_rng_state(state)


def test_distributions():
    n = 200_000  # standard error of the mean 1/√n = 0.0022; limits are four of them
    u, z = uniform(0, "u", 0, n), normal(0, "z", 0, n)
    assert u.min() >= 0
    assert u.max() < 1
    assert abs(u.mean() - 0.5) < 4 * math.sqrt(1 / 12 / n)
    assert abs(z.mean()) < 4 / math.sqrt(n)
    assert abs(z.var() - 1) < 4 * math.sqrt(2 / n)
    assert abs((z[::2] * z[1::2]).mean()) < 4 / math.sqrt(n / 2)
    assert abs((z.abs() < 1).float().mean() - math.erf(1 / math.sqrt(2))) < 4 * 0.47 / math.sqrt(n)


def test_normals_are_box_muller_of_the_integers():
    words = random_uint32(4, "z", 0, 2000).double().view(-1, 2)
    r = (-2 * ((words[:, 0] + 1) / 2**32).log()).sqrt()
    theta = 2 * math.pi * words[:, 1] / 2**32
    expected = torch.stack([r * theta.cos(), r * theta.sin()], 1).view(-1)
    # one rounding to float32: half an ulp, 2**-24 relative
    torch.testing.assert_close(normal(4, "z", 0, 2000).double(), expected, rtol=2**-24, atol=1e-12)


def test_bad_addresses_are_refused():
    with pytest.raises(SkimpError, match="offset ≥ 0"):
        random_uint32(0, "a", -1, 4)
    assert random_uint32(0, "a", 3, 0).shape == (0,)
