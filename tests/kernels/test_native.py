"""The native kernels: built, loaded only when they match, and the same bits as the references."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from skimp.core.codecs import Dynamic8
from skimp.core.errors import SkimpError
from skimp.core.forms import reference_only
from skimp.core.noise import random_uint32
from skimp.kernels import native
from skimp.kernels.native import build as builder
from skimp.kernels.native import library

needs_compiler = pytest.mark.skipif(builder.compiler() is None, reason="no C compiler")


@needs_compiler
def test_build_is_atomic_and_stamped(tmp_path):
    target = tmp_path / "kernels.so"
    target.write_bytes(b"an older one")
    assert builder.build(target) == target
    assert [p.name for p in tmp_path.iterdir()] == ["kernels.so"]
    loaded, reason = library.open_library(target)
    assert loaded is not None
    assert reason == ""


@needs_compiler
def test_another_stamp_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(builder, "stamp", lambda: "0123")
    target = builder.build(tmp_path / "kernels.so")
    loaded, reason = library.open_library(target)
    assert loaded is None
    assert "another source" in reason


@needs_compiler
def test_a_compiler_error_is_shown_and_leaves_nothing(tmp_path, monkeypatch):
    source = tmp_path / "broken.c"
    source.write_text("int broken(")
    monkeypatch.setattr(builder, "SOURCE", source)
    with pytest.raises(SkimpError, match=r"broken\.c"):
        builder.build(tmp_path / "kernels.so")
    assert [p.name for p in tmp_path.iterdir()] == ["broken.c"]


def test_without_a_compiler(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(SkimpError, match="C compiler"):
        builder.build(tmp_path / "kernels.so")
    from skimp.kernels.native.__main__ import main

    assert main() == 0
    assert "references run" in capsys.readouterr().out


def test_what_cannot_be_loaded_says_why(tmp_path):
    assert "not built" in library.open_library(tmp_path / "none.so")[1]
    bad = tmp_path / "bad.so"
    bad.write_bytes(b"not an object")
    assert "cannot be loaded" in library.open_library(bad)[1]
    assert native.available() == (native.why() == "")


@pytest.mark.skipif(not native.load(), reason="native kernels are not built")
def test_any_number_of_threads_and_any_size():
    before = torch.get_num_threads()
    try:
        for n in (1, 255, 257, 65_537, 300_001):
            with reference_only():
                expected = random_uint32(1, "n", 3, n)
            for threads in (1, 2, 5):
                torch.set_num_threads(threads)
                assert torch.equal(random_uint32(1, "n", 3, n), expected)
    finally:
        torch.set_num_threads(before)


@pytest.mark.skipif(not native.load(), reason="native kernels are not built")
def test_nothing_is_written_beyond_the_end():
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    guard = torch.full((1000 + 64,), 77, dtype=torch.uint8)
    absmax = torch.full((4 + 8,), 77.0)
    library.dynamic8_encode(x, guard[:1000], absmax[:4], True, False)
    assert (guard[1000:] == 77).all()
    assert (absmax[4:] == 77).all()
    assert torch.equal(guard[:1000], Dynamic8().encode(x)["codes"])
    out = torch.full((1064,), 77.0)
    library.dynamic8_decode(guard[:1000], absmax[:4], out[:1000], True)
    assert (out[1000:] == 77).all()


def test_a_kernel_beside_is_refused_when_a_source_changes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its stamp covers both sources: the one it includes, and its own."""
    from skimp.kernels.native.four_bit import FOUR_BIT
    from skimp.kernels.native.layers import LAYERS
    from skimp.kernels.native.sparse import SPARSE

    for beside in (FOUR_BIT, LAYERS, SPARSE):
        before = beside.stamp()
        assert before == beside.stamp()
        (tmp_path / "skimp_native.c").write_text(builder.SOURCE.read_text())
        (tmp_path / beside.source.name).write_text("/* another */")
        with monkeypatch.context() as patch:
            patch.setattr(builder, "SOURCE", tmp_path / "skimp_native.c")
            assert beside.stamp() != before
            (tmp_path / beside.source.name).write_text(builder.SOURCE.read_text())
            (tmp_path / "skimp_native.c").write_text("/* another */")
            assert beside.stamp() != before
