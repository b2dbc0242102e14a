"""Checkpoints: bit-equal round trips, ties, names, refusals, keep-N, best, a full or failing disk."""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import shutil
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from checkpoint_cases import awkward_tensors, same
from torch import Tensor

from skimp.core.errors import CheckpointError
from skimp.run import checkpoint, faults
from skimp.run.checkpoint import best_checkpoint, clean_name, latest, load, mark_best, save
from skimp.run.tensor_bytes import Later, Spec

META = {
    "lr": 0.1,
    "best_loss": math.inf,
    "position": {"epoch": 2, "rows": [1, 2, 3]},
    "note": "größer",
    "none": None,
}


def put(root: Path, step: int, keep: int = 2, **kwargs) -> Path:
    return save(root, step, {"model": [("w", torch.full((3, 2), float(step)))]}, {"s": step}, keep=keep, **kwargs)


def steps(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def value(path: Path) -> float:
    return float(load(path).read("model", "w").numpy()[0, 0])


def test_two_round_trips_are_bit_equal_in_every_dtype(tmp_path: Path) -> None:
    first = {"model": awkward_tensors(0), "optimizer": awkward_tensors(1)}
    save(tmp_path / "one", 20, {g: t.items() for g, t in first.items()}, META, keep=1)
    with load(latest(tmp_path / "one")) as back:
        second = {group: {name: back.read(group, name) for name in back.names(group)} for group in back.groups}
        assert (back.step, back.meta) == (20, META)
        meta = back.meta
    save(tmp_path / "two", 20, {g: t.items() for g, t in second.items()}, meta, keep=1)
    with load(latest(tmp_path / "two")) as back:
        assert back.meta == META
        for group, tensors in first.items():
            targets = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
            back.read_all(group, targets.items())
            assert all(same(targets[name], tensors[name]) for name in tensors)
            assert all(second[group][name].data_ptr() % 64 == 0 for name in tensors)
    one, two = (tmp_path / n / "step-00000020" for n in ("one", "two"))
    assert (one / "COMPLETE").read_bytes() == (two / "COMPLETE").read_bytes()


def test_wrapper_prefixes_never_reach_the_file(tmp_path: Path) -> None:
    assert clean_name("module._orig_mod.layers.0._checkpoint_wrapped_module.weight") == "layers.0.weight"
    assert clean_name("_orig_mod.module.w") == "w"
    assert clean_name("encoder.module.w") == "encoder.module.w"
    assert clean_name("module") == "module"
    weight = torch.ones(2)
    path = save(tmp_path, 1, {"model": [("_orig_mod.w", weight)]}, {}, keep=1)
    with load(path) as back:
        assert back.names("model") == ["w"]
        for name in ("w", "module.w", "_orig_mod.w"):
            target = torch.zeros(2)
            back.read_all("model", [(name, target)])
            assert torch.equal(target, weight)


def test_a_compiled_module_resumes_uncompiled_and_back(tmp_path: Path) -> None:
    plain = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 3))
    compiled = torch.compile(plain, backend="eager")
    path = save(tmp_path / "c", 1, {"model": compiled.named_parameters()}, {}, keep=1)
    other = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 3))
    load(path).read_all("model", other.named_parameters())
    path = save(tmp_path / "p", 2, {"model": other.named_parameters()}, {}, keep=1)
    third = torch.compile(torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 3)), backend="eager")
    load(path).read_all("model", third.named_parameters())
    assert all(same(a, b) for a, b in zip(plain.parameters(), third.parameters(), strict=True))


def test_tied_weights_are_written_once_and_known_by_both_names(tmp_path: Path) -> None:
    table = torch.nn.Parameter(torch.randn(50, 4))
    path = save(tmp_path, 1, {"model": [("embed", table), ("head", table.data)]}, {}, keep=1)
    assert (path / "model.safetensors").stat().st_size < 50 * 4 * 4 + 400
    with load(path) as back:
        assert back.names("model") == ["embed"]
        assert back.spec("model", "head") == Spec(torch.float32, (50, 4))
        tied, a, b = torch.zeros(50, 4), torch.zeros(50, 4), torch.zeros(50, 4)
        back.read_all("model", [("embed", tied), ("head", tied)])
        back.read_all("model", [("embed", a), ("head", b)])
        assert same(tied, table)
        assert same(a, table)
        assert same(b, table)


def test_a_tied_target_needs_one_of_its_names_and_one_saved_value(tmp_path: Path) -> None:
    target = torch.zeros(2)
    path = save(tmp_path / "once", 1, {"model": [("embed", torch.ones(2))]}, {}, keep=1)
    load(path).read_all("model", [("head", target), ("embed", target)])
    assert torch.equal(target, torch.ones(2))
    path = save(tmp_path / "apart", 1, {"model": [("embed", torch.ones(2)), ("head", torch.zeros(2))]}, {}, keep=1)
    with pytest.raises(CheckpointError, match="one tied tensor in the run, two tensors in the checkpoint"):
        load(path).read_all("model", [("head", target), ("embed", target)])


def test_missing_and_unexpected_names_are_listed_and_nothing_is_read(tmp_path: Path) -> None:
    path = save(tmp_path, 1, {"model": [("a", torch.ones(2)), ("b", torch.ones(2))]}, {}, keep=1)
    target = torch.zeros(2)
    with pytest.raises(CheckpointError, match="found:   1 missing: c; 1 unexpected: b\n"):
        load(path).read_all("model", [("a", target), ("c", torch.zeros(2))])
    assert torch.equal(target, torch.zeros(2))
    with pytest.raises(CheckpointError, match=r"group 'modle' .*\n.*\n  instead: did you mean 'model'"):
        load(path).names("modle")


def test_two_tensors_of_one_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="two tensors named 'w'"):
        save(tmp_path, 1, {"model": [("w", torch.ones(1)), ("module.w", torch.ones(1))]}, {}, keep=1)
    shared = torch.ones(1)  # the same tensor under both names is no conflict
    save(tmp_path, 1, {"model": [("w", shared), ("module.w", shared)]}, {}, keep=1)


@pytest.mark.parametrize(
    ("meta", "found"),
    [
        ({"a": {1: 2}}, r"saving meta.a\n  found:   a int key 1"),
        ({"a": [torch.ones(1)]}, r"saving meta.a\[0\]\n  found:   a Tensor"),
        ({"a": {"b": {1, 2}}}, r"saving meta.a.b\n  found:   a set"),
    ],
)
def test_meta_that_json_would_change_is_refused(tmp_path: Path, meta: dict, found: str) -> None:
    with pytest.raises(CheckpointError, match=found):
        save(tmp_path / "root", 1, {}, meta, keep=1)
    assert not (tmp_path / "root").exists()


def test_the_newest_n_and_the_best_stay(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        put(tmp_path, step, best=step == 2)
    assert steps(tmp_path) == ["step-00000002", "step-00000003"]
    put(tmp_path, 4)
    put(tmp_path, 5)
    assert steps(tmp_path) == ["step-00000002", "step-00000004", "step-00000005"]
    assert best_checkpoint(tmp_path) == tmp_path / "step-00000002"
    put(tmp_path, 6, best=True)
    assert steps(tmp_path) == ["step-00000005", "step-00000006"]
    mark_best(tmp_path / "step-00000005")
    assert best_checkpoint(tmp_path) == tmp_path / "step-00000005"
    put(tmp_path, 7, keep=1)
    assert steps(tmp_path) == ["step-00000005", "step-00000007"]
    put(tmp_path, 123456789, keep=1)
    assert latest(tmp_path) == tmp_path / "step-123456789"
    with pytest.raises(CheckpointError, match="keep=0"):
        put(tmp_path, 8, keep=0)


def test_saving_a_step_again_replaces_it_and_keeps_it_best(tmp_path: Path) -> None:
    put(tmp_path, 1, best=True)
    save(tmp_path, 1, {"model": [("w", torch.full((3, 2), 9.0))]}, {}, keep=1)
    assert value(latest(tmp_path)) == 9.0
    assert best_checkpoint(tmp_path) == tmp_path / "step-00000001"
    assert steps(tmp_path) == ["step-00000001"]


def test_latest_passes_over_what_is_damaged_and_names_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert latest(tmp_path / "absent") is None
    assert latest(tmp_path) is None
    for step in (1, 2, 3):
        put(tmp_path, step, keep=3)
    newest = tmp_path / "step-00000003"
    with open(newest / "model.safetensors", "r+b") as file:
        file.truncate(40)
    with caplog.at_level(logging.WARNING):
        assert latest(tmp_path) == tmp_path / "step-00000002"
    assert f"{newest}: model.safetensors has 40 bytes where" in caplog.text
    with pytest.raises(CheckpointError, match=r"model.safetensors has 40 bytes"):
        load(newest)
    (tmp_path / "step-00000002" / "state.json").unlink()
    (tmp_path / "step-00000001" / "COMPLETE").write_text("{")
    caplog.clear()
    assert latest(tmp_path) is None
    assert "state.json is missing" in caplog.text
    assert "mark that cannot be read" in caplog.text
    put(tmp_path, 3, keep=1)  # the run goes on, saves the step again, and the wrecks go
    assert value(latest(tmp_path)) == 3.0
    assert steps(tmp_path) == ["step-00000003"]


def test_bytes_that_changed_on_disk_are_found_by_tensor(tmp_path: Path) -> None:
    path = put(tmp_path, 1)
    file = path / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + b"\x01")
    assert latest(tmp_path) == path  # sizes agree; reading tells
    with pytest.raises(CheckpointError, match=r"reading 'w' from .*model.safetensors\n  found:   crc32"):
        load(path).read("model", "w")
    file.write_bytes(whole.replace(b"[3,2]", b"[2,3]"))
    with pytest.raises(CheckpointError, match="its header changed on disk"):
        load(path).names("model")
    (path / "state.json").write_bytes((path / "state.json").read_bytes().replace(b'"s": 1', b'"s": 2'))
    with pytest.raises(CheckpointError, match=r"state\.json changed on disk"):
        load(path)


def test_a_newer_schema_is_refused(tmp_path: Path) -> None:
    path = put(tmp_path, 1)
    mark = json.loads((path / "COMPLETE").read_text())
    (path / "COMPLETE").write_text(json.dumps({**mark, "schema_version": 2}))
    for read in (load, lambda p: latest(p.parent)):
        with pytest.raises(CheckpointError, match=r"checkpoint schema 2\n  because: .* up to 1\n  instead: "):
            read(path)


def test_too_little_room_is_said_before_anything_is_written(tmp_path: Path, monkeypatch) -> None:
    put(tmp_path, 1)
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 10**9 - 4000, 4000))
    reached: list[str] = []
    monkeypatch.setattr(faults, "fault_points", reached.append)
    with pytest.raises(CheckpointError) as caught:
        save(tmp_path, 2, {"model": [("w", torch.zeros(10**6))]}, {}, keep=1)
    text = str(caught.value)
    assert "saving step 2" in text
    assert "4.02 MB" in text
    assert "No space left on device (4.00 kB free)" in text
    assert f"the last good checkpoint is intact: {tmp_path / 'step-00000001'}" in text
    assert "free 4.01 MB there" in text
    assert reached == []
    assert value(latest(tmp_path)) == 1.0


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("again", [False, True], ids=["new", "again"])
@pytest.mark.parametrize("point", [p for p in faults.POINTS if p not in ("after_mark", "prune")])
def test_a_disk_that_fails_at_any_point_leaves_the_last_good_one(
    tmp_path: Path, monkeypatch, point: str, again: bool, code: int
) -> None:
    put(tmp_path, 1)
    put(tmp_path, 2)

    def fail(reached: str) -> None:
        if reached == point:
            raise OSError(code, os.strerror(code))

    monkeypatch.setattr(faults, "fault_points", fail)
    with pytest.raises(CheckpointError, match=f"{os.strerror(code)}.*intact: .*step-00000002"):
        save(tmp_path, 2 if again else 3, {"model": [("w", torch.zeros(3, 2))]}, {}, keep=1)
    assert steps(tmp_path) == ["step-00000001", "step-00000002"]
    assert value(latest(tmp_path)) == 2.0
    monkeypatch.setattr(faults, "fault_points", None)
    put(tmp_path, 3)
    assert value(latest(tmp_path)) == 3.0


def test_a_disk_that_fills_up_midway_through_a_write(tmp_path: Path, monkeypatch) -> None:
    """os.write itself takes a part, then none: the real order of events on a full disk."""
    put(tmp_path, 1)
    room, write = 1000, os.write

    def limited(descriptor: int, data) -> int:
        nonlocal room
        if room == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        taken = write(descriptor, data[:room])
        room -= taken
        return taken

    monkeypatch.setattr(os, "write", limited)
    with pytest.raises(CheckpointError, match="No space left on device"):
        save(tmp_path, 2, {"model": [("w", torch.zeros(1000))]}, {}, keep=1)
    assert steps(tmp_path) == ["step-00000001"]


def test_ctrl_c_in_the_middle_of_a_save_tidies_up(tmp_path: Path, monkeypatch) -> None:
    put(tmp_path, 1)

    def interrupt(point: str) -> None:
        if point == "mid_tensor":
            raise KeyboardInterrupt

    monkeypatch.setattr(faults, "fault_points", interrupt)
    with pytest.raises(KeyboardInterrupt):
        put(tmp_path, 2)
    assert steps(tmp_path) == ["step-00000001"]


def test_a_root_that_is_a_file_is_said(tmp_path: Path) -> None:
    (tmp_path / "root").write_text("mine")
    with pytest.raises(CheckpointError, match="File exists"):
        put(tmp_path / "root", 1)
    assert (tmp_path / "root").read_text() == "mine"


def test_other_folders_are_left_alone(tmp_path: Path) -> None:
    for name in ("notes", "step-3", "step-00000001.bak"):
        (tmp_path / name).mkdir()
    put(tmp_path, 1, keep=1)
    put(tmp_path, 2, keep=1)
    assert steps(tmp_path) == ["notes", "step-00000001.bak", "step-00000002", "step-3"]


def test_the_room_asked_for_covers_what_is_written(tmp_path: Path) -> None:
    tensors, meta = awkward_tensors(), {"text": "x" * 5000}
    path = save(tmp_path, 1, {"model": tensors.items(), "optimizer": tensors.items()}, meta, keep=1)
    written = sum(file.stat().st_size for file in path.iterdir())
    gathered, aliases = checkpoint._gather({"model": tensors.items(), "optimizer": tensors.items()})
    needed = checkpoint._bytes_needed(gathered, checkpoint._state(1, meta, aliases))
    assert written <= needed <= written + 8 * 4096 + 2 * 120 * len(tensors)


def test_iterables_are_walked_once_and_late_tensors_made_late(tmp_path: Path) -> None:
    alive = 0

    def fetch() -> Tensor:
        nonlocal alive
        alive += 1
        return torch.full((4,), float(alive))

    entries = ((f"w{i}", Later(Spec(torch.float32, (4,)), fetch)) for i in range(3))
    with load(save(tmp_path, 1, {"optimizer": entries}, {}, keep=1)) as back:
        assert [float(back.read("optimizer", f"w{i}").numpy()[0]) for i in range(3)] == [1.0, 2.0, 3.0]


def test_an_older_one_that_cannot_be_removed_is_told_and_the_run_goes_on(tmp_path: Path, monkeypatch, caplog) -> None:
    """Halfway through a removal the folder is already unmarked: seen as incomplete, not as damaged."""
    old, remove_tree = put(tmp_path, 1), shutil.rmtree

    def stuck(path: Path, **kwargs) -> None:
        (path / "model.safetensors").unlink()
        raise OSError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(shutil, "rmtree", stuck)
    with caplog.at_level(logging.WARNING):
        assert put(tmp_path, 2, keep=1) == tmp_path / "step-00000002"
    assert "step 2 is saved, but an older checkpoint could not be removed" in caplog.text
    caplog.clear()
    assert latest(tmp_path) == tmp_path / "step-00000002"
    assert f"{old}: no COMPLETE mark" in caplog.text
    monkeypatch.setattr(shutil, "rmtree", remove_tree)
    put(tmp_path, 3, keep=1)
    assert steps(tmp_path) == ["step-00000003"]
