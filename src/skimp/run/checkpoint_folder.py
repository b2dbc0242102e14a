"""Which checkpoint folders there are, which of them are complete, and which may go.

Names inside a run's checkpoint folder:
    step-00000020             a checkpoint; complete if and only if it holds a `COMPLETE` that agrees with
    its files step-00000020.tmp-PID     being written, or left by a death while writing
    damaged-step-00000020-1   set aside by a resume because its bytes had changed; nothing here looks at it again
    step-00000020.old-PID     the earlier version of a step that is being saved again; it counts until the
    new is marked
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from pathlib import Path
from typing import Any

from skimp.core.errors import CheckpointError
from skimp.run.durable import fsync_folder, write_json
from skimp.run.faults import reach

SCHEMA_VERSION = 1
MARK = "COMPLETE"
STATE = "state.json"

log = logging.getLogger(__name__)

_NAME = re.compile(r"step-(\d{8,})(?:\.(tmp|old)-(\d+))?")


def step_name(step: int) -> str:
    return f"step-{step:08d}"


def step_of(path: Path) -> int:
    match = _NAME.fullmatch(path.name)
    if not match:
        raise CheckpointError(f"{path}", "not a checkpoint's name", instead="a folder like step-00000020")
    return int(match.group(1))


def _folders(root: Path, kind: str | None) -> list[Path]:
    """Folders of one kind (None, "tmp" or "old"), by step."""
    found = []
    for path in root.iterdir():
        match = _NAME.fullmatch(path.name)
        if match and match.group(2) == kind and path.is_dir():
            found.append(path)
    return sorted(found, key=lambda path: (step_of(path), path.name))


def read_mark(path: Path) -> dict[str, Any]:
    """The completeness mark.

    Raises:
        CheckpointError: written by a newer skimp than this one.
        OSError, ValueError, KeyError: missing or not a mark.
    """
    mark: dict[str, Any] = json.loads((path / MARK).read_bytes())
    if mark["schema_version"] > SCHEMA_VERSION:
        raise CheckpointError(
            f"loading {path}",
            f"checkpoint schema {mark['schema_version']}",
            f"this skimp knows schemas up to {SCHEMA_VERSION}",
            "continue with the skimp that wrote it, or a newer one",
        )
    return mark


def problem(path: Path) -> str:
    """Why a checkpoint folder is not complete; empty when it is. Looks at the mark and the sizes, not the
    bytes.

    Raises:
        CheckpointError: written by a newer skimp; it is complete, but not for us.
    """
    if not path.is_dir():
        return "no such folder"
    try:
        files = read_mark(path)["files"]
        wanted = {name: entry["bytes"] for name, entry in files.items()}
        wanted[STATE]
    except FileNotFoundError:
        return f"no {MARK} mark: the save did not finish"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"a {MARK} mark that cannot be read ({type(error).__name__}: {error})"
    for name, size in wanted.items():
        try:
            found = (path / name).stat().st_size
        except OSError:
            return f"{name} is missing"
        if found != size:
            return f"{name} has {found} bytes where {size} were written"
    return ""


def complete_steps(root: Path) -> tuple[list[Path], list[str]]:
    """Complete checkpoints by rising step, and a sentence on each folder that is not complete."""
    good: dict[int, Path] = {}
    bad = []
    for path in [
        *_folders(root, "old"),
        *_folders(root, None),
    ]:  # a plain name wins over .old of the same step
        trouble = problem(path)
        if not trouble:
            good[step_of(path)] = path
        else:
            bad.append(f"{path}: {trouble}")
    bad += [f"{path}: the save did not finish" for path in _folders(root, "tmp")]
    return [good[step] for step in sorted(good)], bad


def latest(root: Path) -> Path | None:
    """The newest complete checkpoint, or None. Incomplete and damaged ones are named in the log."""
    root = Path(root)
    if not root.is_dir():
        return None
    good, bad = complete_steps(root)
    for sentence in bad:
        log.warning("passed over a checkpoint that is not complete: %s", sentence)
    return good[-1] if good else None


def best_checkpoint(root: Path) -> Path | None:
    """The newest complete checkpoint that was marked best, or None."""
    if not Path(root).is_dir():
        return None
    marked = [path for path in complete_steps(Path(root))[0] if is_best(path)]
    return marked[-1] if marked else None


def is_best(path: Path) -> bool:
    """Whether a complete checkpoint carries the mark of the best; False for any other folder."""
    return not problem(path) and bool(read_mark(path).get("best"))


def mark_best(path: Path) -> None:
    """Mark a complete checkpoint, and no other, as the best so far: it is kept besides the newest ones."""
    trouble = problem(path)
    if trouble:
        raise CheckpointError(f"marking {path} as best", trouble)
    write_json(path / MARK, {**read_mark(path), "best": True})
    for other in complete_steps(path.parent)[0]:
        mark = read_mark(other)
        if other != path and mark.get("best"):
            write_json(other / MARK, {**mark, "best": False})


def recover(root: Path) -> None:
    """Clean up after dead saves.

    A displaced checkpoint whose successor was never marked comes back; what else they left is removed.

    Folders that are marked but damaged stay: a person may want to look at them, until they are pruned by age.
    """
    for path in _folders(root, "old"):
        current = root / step_name(step_of(path))
        if not problem(path) and problem(current):
            shutil.rmtree(current, ignore_errors=True)
            os.replace(path, current)
            log.warning("%s was being replaced when its process died; the earlier version is back", current)
        else:
            remove(path)
    for path in _folders(root, "tmp"):
        if not _alive(path):
            shutil.rmtree(path)
    for path in _folders(root, None):
        if not (path / MARK).exists():
            shutil.rmtree(path)


def _alive(path: Path) -> bool:
    """Whether another living process owns a folder; in this process no other save is going on."""
    owner = int(path.name.rpartition("-")[2])
    if owner == os.getpid():
        return False
    try:
        os.kill(owner, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def set_aside(path: Path) -> Path:
    """Rename a damaged checkpoint so that no resume, save or pruning takes it for one; a person may look at it.

    Its place is free for the same step, which will be saved again.
    """
    number = 1
    while (aside := path.with_name(f"damaged-{path.name}-{number}")).exists():
        number += 1
    os.replace(path, aside)
    fsync_folder(path.parent)
    return aside


def prune(root: Path, keep: int) -> None:
    """Remove all but the newest `keep` complete checkpoints and the best; nothing newer."""
    good, _ = complete_steps(root)
    if not good:
        return
    kept = set(good[-keep:])
    marked = [path for path in good if is_best(path)]
    kept.update(marked[-1:])
    newest = step_of(good[-1])
    for path in _folders(root, None):
        if path not in kept and step_of(path) < newest:
            remove(path)


def remove(path: Path) -> None:
    """Unmark first: a death halfway leaves a folder seen to be incomplete, not one that looks damaged."""
    mark = path / MARK
    if mark.exists():
        mark.unlink()
        fsync_folder(path)
    reach("prune")
    shutil.rmtree(path)
