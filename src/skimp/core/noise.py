"""Counter-based random numbers: Philox4x32-10 addressed by (seed, name, stream, offset).

A number is a pure function of its address, so it is the same on every device, for every chunking, thread
count and shard, and after every resume; torch's global generator is neither read nor moved. Philox4x32 with
ten rounds: Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011, section 3.3; the Random123
known answers are the test.

Address → words: the 64-bit key is a hash of (seed, name); number `e` of stream `s` is word `e % 4` of the
block with counter (e // 4, s), each 64 bits wide. A stream is, for example, the optimizer step.
"""

from __future__ import annotations

import hashlib
import math
from typing import Any

import torch
from torch import Tensor

from skimp.core.errors import SkimpError
from skimp.core.forms import native_form
from skimp.core.workspace import SCALAR_BYTES, declare_workspace

MASK32 = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10

#: Numbers made at a time by the reference. Its scratch is 12 bytes per number: 2**16 × 12 = 786 kB.
CHUNK = 2**16


def key64(seed: int, name: str) -> int:
    """The Philox key of (seed, name): 64 bits of BLAKE2b, as a signed integer (as schemas carry it)."""
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def philox_rounds_(words: Tensor, scratch: Tensor, key: int) -> None:
    """Ten rounds in place.

    Args:
        words: (blocks, 4) int64 of any strides, each in [0, 2**32): counters in, random words out. Fastest where each
            of the four columns is a run of neighbours.
        scratch: (2, blocks) int64, overwritten.
        key: 64 bits, signed or not.

    A product of two 32-bit words wraps modulo 2**64 in int64, which keeps all 64 bits; shifting right is
    arithmetic, so the high half is masked afterwards.
    """
    c0, c1, c2, c3 = (words[:, i] for i in range(4))
    low, high = scratch[0], scratch[1]
    k0, k1 = key & MASK32, (key >> 32) & MASK32
    for _ in range(ROUNDS):
        torch.mul(c0, MULTIPLIERS[0], out=low)
        torch.mul(c2, MULTIPLIERS[1], out=high)
        torch.bitwise_right_shift(high, 32, out=c0)
        c0.bitwise_and_(MASK32).bitwise_xor_(c1).bitwise_xor_(k0)
        torch.bitwise_and(high, MASK32, out=c1)
        torch.bitwise_right_shift(low, 32, out=c2)
        c2.bitwise_and_(MASK32).bitwise_xor_(c3).bitwise_xor_(k1)
        torch.bitwise_and(low, MASK32, out=c3)
        k0, k1 = (k0 + WEYL[0]) & MASK32, (k1 + WEYL[1]) & MASK32


def fill_words_(words: Tensor, scratch: Tensor, key: int, stream: int, first_block: int) -> None:
    """Random words of the blocks from `first_block` on, written to `words` (blocks, 4) int64.

    In row-major order entry i is number 4 · first_block + i of the stream.
    """
    index = scratch[0]
    torch.arange(first_block, first_block + words.shape[0], out=index)
    torch.bitwise_and(index, MASK32, out=words[:, 0])
    torch.bitwise_right_shift(index, 32, out=words[:, 1])
    words[:, 2].fill_(stream & MASK32)
    words[:, 3].fill_((stream >> 32) & MASK32)
    philox_rounds_(words, scratch, key)


def _chunk_numbers(offset: int, count: int) -> int:
    """Numbers the reference makes per chunk: whole blocks that cover the range, at most CHUNK."""
    head = offset % 4
    return min(CHUNK, (head + count + 3) // 4 * 4)


@torch.library.custom_op(
    "skimp::philox",
    mutates_args=(),
    schema="(int key, int stream, int offset, int count, *, Device device) -> Tensor",
)
def _philox(key: int, stream: int, offset: int, count: int, *, device: torch.device) -> Tensor:
    out = torch.empty(count, dtype=torch.int64, device=device)
    form = native_form("philox", device)
    if form is not None:
        form(out, key, stream, offset)
        return out
    chunk = _chunk_numbers(offset, count)
    words = torch.empty(chunk // 4, 4, dtype=torch.int64, device=device)
    scratch = torch.empty(2, chunk // 4, dtype=torch.int64, device=device)
    done = 0
    while done < count:
        at = offset + done
        head = at % 4
        take = min(chunk - head, count - done)
        blocks = (head + take + 3) // 4
        fill_words_(words[:blocks], scratch[:, :blocks], key, stream, at // 4)
        numbers = words.view(-1)
        out[done : done + take].copy_(numbers[head : head + take])
        done += take
    return out


@_philox.register_fake
def _philox_fake(key: int, stream: int, offset: int, count: int, *, device: torch.device) -> Tensor:
    return torch.empty(count, dtype=torch.int64, device=device)


@declare_workspace("skimp::philox")
def _philox_workspace(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    _, _, offset, count = args
    if count == 0 or native_form("philox", kwargs["device"]) is not None:
        return 0
    return 12 * _chunk_numbers(offset, count) + SCALAR_BYTES


def _check(offset: int, count: int) -> None:
    if offset < 0 or count < 0:
        raise SkimpError("random numbers at offset ≥ 0, count ≥ 0", f"offset {offset}, count {count}")


def random_uint32(
    seed: int, name: str, offset: int, count: int, *, stream: int = 0, device: torch.device | str = "cpu"
) -> Tensor:
    """Numbers offset … offset + count of a stream: (count,) int64 with values in [0, 2**32).

    Chunkable: `random_uint32(s, n, a + b, c)` equals `random_uint32(s, n, a, b + c)[b:]`.

    Raises:
        SkimpError: negative offset or count.
    """
    _check(offset, count)
    return _philox(key64(seed, name), stream, offset, count, device=torch.device(device))


def uniform(
    seed: int, name: str, offset: int, count: int, *, stream: int = 0, device: torch.device | str = "cpu"
) -> Tensor:
    """(count,) float32, uniform on the multiples of 2**-24 in [0, 1): exact on every device."""
    _check(offset, count)
    key, where = key64(seed, name), torch.device(device)
    out = torch.empty(count, dtype=torch.float32, device=where)
    for start in range(0, count, CHUNK):
        size = min(CHUNK, count - start)
        words = _philox(key, stream, offset + start, size, device=where)
        out[start : start + size].copy_(words.bitwise_right_shift_(8)).mul_(2.0**-24)
    return out


def normal(
    seed: int, name: str, offset: int, count: int, *, stream: int = 0, device: torch.device | str = "cpu"
) -> Tensor:
    """(count,) float32 standard normals by Box–Muller, computed in float64 from integers and rounded once.

    Numbers 2j and 2j + 1 are r·cos θ and r·sin θ with r = √(−2 ln u), u = (w₂ⱼ + 1)·2**-32 in (0, 1] and
    θ = 2π·w₂ⱼ₊₁·2**-32. Library functions differ by an ulp of float64 between devices, so float32 results
    agree to 1 ulp (and are equal but for about one in 10**8). The largest possible value is √(64 ln 2) =
    6.66.
    """
    _check(offset, count)
    key, where = key64(seed, name), torch.device(device)
    out = torch.empty(count, dtype=torch.float32, device=where)
    for start in range(0, count, CHUNK):
        size = min(CHUNK, count - start)
        at = offset + start
        head = at % 2
        pairs = (head + size + 1) // 2
        words = _philox(key, stream, at - head, 2 * pairs, device=where).view(pairs, 2).double()
        radius = words[:, 0].add(1.0).mul_(2.0**-32).log_().mul_(-2.0).sqrt_()
        angle = words[:, 1].mul(2.0**-31 * math.pi)
        words[:, 0].copy_(angle.cos()).mul_(radius)
        words[:, 1].copy_(angle.sin_()).mul_(radius)
        out[start : start + size].copy_(words.view(-1)[head : head + size])
    return out
