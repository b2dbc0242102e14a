"""The one place that may reach for the Hub: pinned downloads, and errors that say what to do offline."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from skimp.core.errors import ModelError

Result = TypeVar("Result")

#: Weights as safetensors only (a pickle can run code), and all a tokenizer may be made of.
MODEL_FILES = ["*.safetensors", "*.safetensors.index.json", "config.json", "generation_config.json"]
TOKENIZER_FILES = [
    "tokenizer*.json",
    "tokenizer.model",
    "spiece.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
]


def hub_file(repo: str, name: str, revision: str | None) -> Path:
    """One file of a repository, from the local cache or the network.

    Raises:
        ModelError: offline and not cached, no such repository, revision or file, or access not granted.
    """
    from huggingface_hub import hf_hub_download

    return Path(_ask(repo, revision, lambda: hf_hub_download(repo, name, revision=revision)))


def hub_folder(repo: str, revision: str | None, patterns: list[str]) -> Path:
    """A snapshot of a repository with the files that match; raises as `hub_file`."""
    from huggingface_hub import snapshot_download

    return Path(_ask(repo, revision, lambda: snapshot_download(repo, revision=revision, allow_patterns=patterns)))


def cached_config(repo: str, revision: str | None) -> Path | None:
    """config.json of a repository where an earlier download left it; never the network."""
    from huggingface_hub import try_to_load_from_cache

    found: Any = try_to_load_from_cache(repo, "config.json", revision=revision)
    return Path(found) if isinstance(found, str) else None


def commit_of(path: Path) -> str | None:
    """The commit a cached file belongs to: the cache keeps it as .../snapshots/COMMIT/file."""
    parts = path.parts
    return parts[parts.index("snapshots") + 1] if "snapshots" in parts[:-1] else None


def _ask(repo: str, revision: str | None, download: Callable[[], Result]) -> Result:
    from huggingface_hub import errors

    asked = f"model '{repo}'" + (f" at revision '{revision}'" if revision else "")
    try:
        return download()
    except errors.GatedRepoError:
        raise ModelError(
            asked,
            "access not granted",
            "its owner asks for a licence to be accepted",
            [f"accept it at https://huggingface.co/{repo} and log in with `hf auth login`"],
        ) from None
    except errors.RepositoryNotFoundError:
        raise ModelError(
            asked,
            "no such repository on the Hub, or a private one",
            instead=["check the spelling", "`hf auth login`"],
        ) from None
    except errors.RevisionNotFoundError:
        raise ModelError(asked, "no such revision", instead="leave model.revision out for the main branch") from None
    except errors.RemoteEntryNotFoundError as error:
        raise ModelError(asked, str(error).splitlines()[0], "it is no transformers model repository") from None
    except errors.HFValidationError as error:
        raise ModelError(asked, str(error).splitlines()[0]) from None
    except (
        errors.LocalEntryNotFoundError,
        errors.OfflineModeIsEnabled,
        errors.HfHubHTTPError,
        OSError,
    ) as error:
        off = os.environ.get("HF_HUB_OFFLINE") or os.environ.get("TRANSFORMERS_OFFLINE")
        raise ModelError(
            asked,
            "not in the local cache, and the Hub cannot be reached" + (" (offline mode is set)" if off else ""),
            str(error).splitlines()[0] if str(error) else type(error).__name__,
            [
                f"where there is a network: `hf download {repo}`, then copy the cache (HF_HOME) here",
                "give a folder with config.json and weights, a .gguf file, or a preset (`model: smollm2-135m`)",
            ],
        ) from None
