"""What a method's source file says of itself, read as text: pages about methods import none of them."""

from __future__ import annotations

import ast
from importlib.util import find_spec
from pathlib import Path


def docstring(where: str) -> str:
    """The docstring of the module in "module:object"; empty where there is none."""
    path = source_file(where)
    return ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "" if path else ""


def line_of(where: str) -> int | None:
    """The line on which the object of "module:object" is defined; None for one that is made otherwise."""
    path, name = source_file(where), where.partition(":")[2]
    for node in ast.parse(path.read_text(encoding="utf-8")).body if path else ():
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name == name:
            return node.lineno
    return None


def source_file(where: str) -> Path | None:
    """The file of the module in "module:object"; its packages are imported, the module is not."""
    spec = find_spec(where.partition(":")[0])
    return Path(spec.origin) if spec is not None and spec.origin is not None else None
