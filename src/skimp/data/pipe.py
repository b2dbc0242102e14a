"""Frames between the child that tokenises and the process that trains.

A frame is a 32-byte header (kind, file, flags, row, offset, length) and its payload: uint32 tokens, or JSON. The
highest bit of a token says that it is not trained, so tokens and what is trained of them are cut as one.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Any

import numpy as np

HEADER = struct.Struct("<BBHIqqq")
TOKENS, JSON, DROPPED = 1, 2, 3
FIRST, LAST = 1, 2
UNTRAINED = np.uint32(1 << 31)


@dataclass(frozen=True)
class Frame:
    """A document, or a block of one, as it left the child; `tokens` uint32, marked with `UNTRAINED`. A row that was
    left out has no tokens and its reason in `dropped`."""

    file: int
    row: int
    offset: int
    first: bool
    last: bool
    tokens: np.ndarray
    dropped: str = ""


def marked(tokens: np.ndarray, trained: np.ndarray | None) -> np.ndarray:
    """Tokens as they are sent."""
    return tokens if trained is None else np.where(trained, tokens, tokens | UNTRAINED).astype(np.uint32)


def unmarked(tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
    """(ids, trained), with None when all are."""
    trained = (tokens & UNTRAINED) == 0
    return tokens & ~UNTRAINED, None if trained.all() else trained


def send_tokens(out: IO[bytes], file: int, row: int, offset: int, first: bool, last: bool, tokens: np.ndarray) -> None:
    out.write(HEADER.pack(TOKENS, FIRST * first + LAST * last, 0, file, row, offset, len(tokens)))
    out.write(tokens.astype("<u4").tobytes())


def send_dropped(out: IO[bytes], file: int, row: int, offset: int, why: str) -> None:
    data = why.encode()
    out.write(HEADER.pack(DROPPED, FIRST + LAST, 0, file, row, offset, len(data)))
    out.write(data)


def send_json(out: IO[bytes], record: dict[str, Any]) -> None:
    data = json.dumps(record).encode()
    out.write(HEADER.pack(JSON, 0, 0, 0, 0, 0, len(data)))
    out.write(data)


def receive(stream: IO[bytes]) -> Iterator[Frame | dict[str, Any]]:
    """Frames until the stream ends. A stream cut in the middle of a frame ends too: the child's exit code
    says why.
    """
    while len(header := stream.read(HEADER.size)) == HEADER.size:
        kind, flags, _, file, row, offset, length = HEADER.unpack(header)
        size = length * 4 if kind == TOKENS else length
        data = stream.read(size)
        if len(data) < size:
            return
        if kind == JSON:
            yield json.loads(data)
        elif kind == DROPPED:
            yield Frame(file, row, offset, True, True, np.zeros(0, np.uint32), data.decode())
        else:
            yield Frame(file, row, offset, bool(flags & FIRST), bool(flags & LAST), np.frombuffer(data, "<u4"))
