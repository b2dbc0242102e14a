"""What a GGUF file says of its model, read from its header alone.

The package `gguf` builds a Python object for each of the tokenizer's hundred thousand strings (2.7 s for
SmolLM2-135M on the build machine); a plan needs two dozen numbers. This walks the header once and keeps
only those: layout of the GGUF specification, version 2 and 3, little endian. Weights are read elsewhere, by
transformers with the package `gguf`.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skimp.core.errors import ModelError

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_F32 = 0
#: Longer arrays are the tokenizer's; only their length is kept.
KEEP = 1024


@dataclass(frozen=True)
class Header:
    """Metadata and tensor shapes of a GGUF file.

    Attributes:
        fields: key -> value; an array longer than `KEEP` is only its length, under "KEY#length".
        shapes: tensor name -> shape in PyTorch's order, rows first (GGUF writes the fastest dimension first).
        types: tensor name -> GGML type number; 0 is float32.
        offsets: tensor name -> byte offset in the file.
    """

    fields: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]
    types: dict[str, int]
    offsets: dict[str, int]


class _Cursor:
    def __init__(self, buffer: mmap.mmap) -> None:
        self.buffer, self.at = buffer, 0

    def take(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self.buffer, self.at)
        self.at += struct.calcsize("<" + code)
        return value

    def text(self) -> str:
        length = self.take("Q")
        start, self.at = self.at, self.at + length
        if self.at > len(self.buffer):
            raise struct.error("text beyond the end of the file")
        return self.buffer[start : self.at].decode("utf-8", errors="replace")

    def value(self, kind: int, key: str, fields: dict[str, Any]) -> None:
        if kind == _STRING:
            fields[key] = self.text()
        elif kind == _ARRAY:
            self._array(key, fields)
        elif kind in _SCALARS:
            fields[key] = self.take(_SCALARS[kind])
        else:
            raise struct.error(f"value type {kind} of '{key}'")

    def _array(self, key: str, fields: dict[str, Any]) -> None:
        kind, length = self.take("I"), self.take("Q")
        fields[f"{key}#length"] = length
        if kind == _STRING:
            for _ in range(length):
                self.at += 8 + struct.unpack_from("<Q", self.buffer, self.at)[0]
            return
        if kind not in _SCALARS:
            raise struct.error(f"array of type {kind} in '{key}'")
        code = f"<{length}{_SCALARS[kind]}" if length <= KEEP else ""
        if code:
            fields[key] = list(struct.unpack_from(code, self.buffer, self.at))
        self.at += length * struct.calcsize("<" + _SCALARS[kind])


def read_header(path: str | Path) -> Header:
    """Read the header of a GGUF file.

    Raises:
        ModelError: no such file, empty, not GGUF, an unknown version, big endian, or cut off.
    """
    path = Path(path)
    if not path.is_file():
        raise ModelError(f"model {path}", "no such file")
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as buffer:
            if buffer[:4] != b"GGUF":
                raise ModelError(f"model {path}", f"it starts with {buffer[:4]!r}", "a GGUF file starts with b'GGUF'")
            return _read(_Cursor(buffer), path)
    except (struct.error, ValueError) as error:  # ValueError: an empty file cannot be mapped
        raise ModelError(
            f"model {path}",
            f"a header that ends early or is damaged ({error})",
            "the download may be incomplete",
            "download the file again and compare its size",
        ) from None


def _read(cursor: _Cursor, path: Path) -> Header:
    cursor.at = 4
    version = cursor.take("I")
    if version not in (2, 3):
        raise ModelError(
            f"model {path}",
            f"GGUF version {version}",
            "versions 2 and 3, little endian, are read",
            "convert the file again with a present llama.cpp",
        )
    tensors, count = cursor.take("Q"), cursor.take("Q")
    fields: dict[str, Any] = {}
    for _ in range(count):
        key, kind = cursor.text(), cursor.take("I")
        cursor.value(kind, key, fields)
    shapes: dict[str, tuple[int, ...]] = {}
    types: dict[str, int] = {}
    offsets: dict[str, int] = {}
    for _ in range(tensors):
        name, rank = cursor.text(), cursor.take("I")
        dims = [cursor.take("Q") for _ in range(rank)]
        shapes[name], types[name], offsets[name] = tuple(reversed(dims)), cursor.take("I"), cursor.take("Q")
    align = int(fields.get("general.alignment", 32))
    start = -(-cursor.at // align) * align
    return Header(fields, shapes, types, {name: start + offset for name, offset in offsets.items()})


def read_floats(path: str | Path, header: Header, name: str) -> list[float]:
    """A small float32 vector of the file, such as the rotary factors.

    Raises:
        ModelError: the tensor is of another type or beyond the end of the file.
    """
    count = 1
    for extent in header.shapes[name]:
        count *= extent
    if header.types[name] != _F32:
        raise ModelError(f"model {path}", f"tensor '{name}' of GGML type {header.types[name]}", "float32 is read here")
    with Path(path).open("rb") as file:
        file.seek(header.offsets[name])
        data = file.read(4 * count)
    if len(data) != 4 * count:
        raise ModelError(f"model {path}", f"tensor '{name}' is cut off", instead="download the file again")
    return list(struct.unpack(f"<{count}f", data))
