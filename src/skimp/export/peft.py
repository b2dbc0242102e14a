"""Adapters in the format of Hugging Face PEFT, written and read: a folder with `adapter_config.json` and
`adapter_model.safetensors`. What a method's tensors are called there is the method's own matter; the low-rank family's
names are in `adapters.lora_peft`.

Format: the checkpoint format page of the PEFT documentation, huggingface.co/docs/peft.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from skimp.adapters.handle import Handle
from skimp.adapters.lora import LoRA
from skimp.adapters.lora_peft import PREFIX
from skimp.adapters.merge import MAGNITUDE, A, B
from skimp.adapters.spec import Spec
from skimp.adapters.targets import is_transposed, linear_layers
from skimp.core.errors import CheckpointError, ModelError
from skimp.core.structure import Structure, read_structure

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
#: In the safetensors header: the fingerprint of the base the adapter was trained on, and the dtype it was taken in.
BASE_KEY = "skimp_base"
#: There too, where the base was kept in a codec while the adapter was trained: what rebuilds the codec, as JSON.
CODEC_KEY = "skimp_base_codec"
#: Initialisations that change the base: such an adapter is no addition to the original weights.
MOVED_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
#: Keys of adapter_config.json that make it something else than a plain low-rank addition.
OTHER_KINDS = (
    "use_qalora", "use_bdlora", "lora_bias", "layer_replication", "trainable_token_indices",
    "target_parameters", "alora_invocation_tokens", "velora_config", "kasa_config", "monteclora_config", "arrow_config",
)  # fmt: skip


def write_peft(folder: Path, adapter: Handle, *, base_name: str, base: str = "", codec: Any = None) -> dict[str, Any]:
    """Write an adapter for `PeftModel.from_pretrained(base, folder)`.

    Args:
        folder: made when missing; must not hold an adapter yet.
        adapter: attached, not merged.
        base_name: what PEFT shall load as the base: a Hub id or folder.
        base: the base's fingerprint (`run.base`), kept in the file's header; another base is refused on import.
        codec: what the base was kept in, kept there too.

    Returns:
        The content of adapter_config.json.

    Raises:
        CheckpointError: there is an adapter already, or it is merged.
        ConflictError: PEFT has no such adapter.
    """
    folder = Path(folder)
    if (folder / CONFIG).exists():
        raise CheckpointError(f"an adapter in {folder}", "one is there", "it would be overwritten", "another folder")
    if adapter.merged:
        raise CheckpointError(f"an adapter in {folder}", "it is merged into the base", instead="unmerge first")
    config, tensors = adapter.peft(base_name)
    dtype = str(adapter.module(adapter.structure.embedding).weight.dtype).removeprefix("torch.")
    folder.mkdir(parents=True, exist_ok=True)
    # The configuration last: it is what makes the folder an adapter.
    header = {"format": "pt", **({BASE_KEY: f"{base} {dtype}"} if base else {})}
    header |= {} if codec is None else {CODEC_KEY: json.dumps(codec.meta())}
    save_file(tensors, folder / TENSORS, header)
    (folder / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return config


# ---------------------------------------------------------------------- reading
def read_config(folder: Path) -> dict[str, Any]:
    """adapter_config.json of a plain LoRA adapter.

    Raises:
        ModelError: no such folder, no adapter in it, pickled tensors, or another kind of adapter.
    """
    folder = Path(folder)
    asked = f"adapter.from {folder}"
    if not (folder / CONFIG).is_file() or not (folder / TENSORS).is_file():
        missing = "no such folder" if not folder.is_dir() else f"no {CONFIG}"
        if (folder / CONFIG).is_file():
            pickled = (folder / "adapter_model.bin").is_file()
            missing = f"no {TENSORS}" + (", only adapter_model.bin" if pickled else "")
        raise ModelError(
            asked,
            missing,
            "an adapter is a folder with both files; pickled tensors are not read: they can run code",
            "save it with PEFT's save_pretrained, or skimp export RUN --to peft",
        )
    try:
        config: dict[str, Any] = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise ModelError(asked, f"{CONFIG}: {error}") from None
    kind, begun = config.get("peft_type"), config.get("init_lora_weights", True)
    others = [key for key in OTHER_KINDS if config.get(key)]
    others += ["bias"] if config.get("bias", "none") != "none" else []
    if kind != "LORA" or others:
        raise ModelError(
            asked,
            f"peft_type {kind}" + "".join(f", {key} {config[key]!r}" for key in others),
            "skimp reads low-rank additions, plain or DoRA's: any ranks and scales, with or without modules in full",
            "merge it with PEFT (merge_and_unload) and start from the merged model",
        )
    if isinstance(begun, str) and begun.lower().startswith(MOVED_BASE):
        raise ModelError(
            asked,
            f"init_lora_weights '{begun}'",
            "it was trained on a changed base, and on the original one it would give other logits",
            "save it as a plain addition: save_pretrained(…, path_initial_model_for_weight_conversion=…)",
        )
    return config


def read_spec(
    folder: Path, model: nn.Module, structure: Structure, *, dropout: float, seed: int, full: tuple[bool, bool]
) -> Spec:
    """The spec that puts a saved adapter on this model.

    Which modules and ranks is read from the tensors themselves, so patterns and exclusions of its configuration need no
    second interpreter.

    Args:
        folder: in PEFT's format. model, structure: the base, real or simulated.
        dropout, seed: of the training to come.
        full: train the embedding, the head, in full beyond what the adapter already does.

    Raises:
        ModelError: another kind of adapter, or one for another base.
    """
    config = read_config(folder)
    shapes = saved_shapes(folder)
    layers = linear_layers(model, structure)
    r, alpha = int(config.get("r", 8)), float(config.get("lora_alpha", 8))
    targets, ranks = [], {}
    whole = {f"{name}.weight": name for name in (structure.embedding, structure.head)}
    trained = set()
    for name, shape in shapes.items():
        module, _, part = name.rpartition(".")
        if name in whole:
            trained.add(whole[name])
            _same_shape(folder, name, shape, _weight_shape(model, whole[name]))
        elif part not in (A, B, MAGNITUDE) or module not in layers:
            raise _other_base(folder, f"a tensor for {name}", "this base has no such linear layer")
        else:
            outputs, inputs = _sizes(layers[module])
            wanted = {A: (shape[0], inputs), B: (outputs, *shape[1:]), MAGNITUDE: (outputs,)}[part]
            _same_shape(folder, name, shape, wanted)
            if part == A:
                targets.append(module)
                own = (shape[0], float(_pattern(config.get("alpha_pattern") or {}, module, alpha)))
                if own != (r, alpha):
                    ranks[module] = own
    return Spec(
        r,
        alpha,
        "rslora" if config.get("use_rslora") else "standard",
        tuple(name for name in layers if name in set(targets)),
        dropout,
        full[0] or structure.embedding in trained,
        full[1] or structure.head in trained,
        seed=seed,
        ranks=ranks,
        reparam="dora" if config.get("use_dora") else "plain",
    )


def read_peft(
    folder: Path | str, model: nn.Module, structure: Structure | None = None
) -> tuple[Spec, dict[str, Tensor]]:
    """A saved adapter as a spec and tensors by their names in the model: for `adapters.Shelf.add`.

    Raises:
        ModelError: as `read_spec`.
    """
    folder = Path(folder)
    spec = read_spec(folder, model, structure or read_structure(model), dropout=0.0, seed=0, full=(False, False))
    with safe_open(folder / TENSORS, framework="pt") as file:
        return spec, {name: file.get_tensor(written_name(name)) for name in saved_shapes(folder)}


def load_peft(folder: Path, lora: LoRA) -> None:
    """Fill an attached adapter from a folder. What it does not train in full keeps the base's weights.

    Raises:
        ModelError: a tensor is missing, or the two halves of a tied matrix differ.
    """
    shapes = saved_shapes(folder)
    with safe_open(Path(folder) / TENSORS, framework="pt") as file:

        def read(name: str) -> Tensor:
            if name in shapes:
                found: Tensor = file.get_tensor(written_name(name))
                return found
            part = name.rpartition(".")[2]
            if part in (A, B, MAGNITUDE):
                raise ModelError(f"adapter.from {folder}", f"no tensor for {name}", "its other half is there")
            kept: Tensor = lora.module(name.rpartition(".")[0]).weight.detach()
            return kept

        if lora.structure.tied and lora.full:
            both = [f"{n}.weight" for n in (lora.structure.embedding, lora.structure.head) if f"{n}.weight" in shapes]
            halves = [file.get_tensor(written_name(n)) for n in both]
            if len(halves) == 2 and _apart(*halves):
                raise ModelError(
                    f"adapter.from {folder}",
                    f"{both[0]} and {both[1]} differ",
                    "this base ties them to one matrix, and they were trained apart",
                    "merge with PEFT into a base with tie_word_embeddings=false",
                )
        lora.load(read)


def check_base(folder: Path, base: str, dtype: torch.dtype) -> None:
    """Hold the base against the fingerprint in the adapter's file, where there is one of this dtype.

    Raises:
        ModelError: it was trained on other weights.
    """
    with safe_open(Path(folder) / TENSORS, framework="pt") as file:
        noted = ((file.metadata() or {}).get(BASE_KEY) or "").split()
    if len(noted) == 2 and noted[1] == str(dtype).removeprefix("torch.") and noted[0] != base:
        raise _other_base(folder, f"trained on a base with fingerprint {noted[0]}", f"this one has {base}")


def saved_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Shapes by the name a tensor has in the model: '<module>.lora_A', '<module>.lora_B', '<module>.weight'.

    Raises:
        ModelError: a tensor that is none of these.
    """
    found: dict[str, tuple[int, ...]] = {}
    with safe_open(Path(folder) / TENSORS, framework="pt") as file:
        for written in file.keys():  # noqa: SIM118 (a safetensors file is no mapping)
            normed = written.endswith(f".{MAGNITUDE}")
            if not written.startswith(PREFIX) or not (written.endswith(".weight") or normed):
                raise ModelError(
                    f"adapter.from {folder}",
                    f"a tensor '{written}'",
                    "additions on linear layers end with lora_A.weight or lora_B.weight",
                    "for an addition on the embedding: adapter.embeddings=true trains it in full",
                )
            stem = written[len(PREFIX) :].removesuffix(".weight")
            name = stem if stem.endswith((f".{A}", f".{B}", f".{MAGNITUDE}")) else f"{stem}.weight"
            found[name] = tuple(file.get_slice(written).get_shape())
    return found


def written_name(name: str) -> str:
    """What the tensor `name` of a model is called in the file."""
    return f"{PREFIX}{name}" if name.endswith((".weight", f".{MAGNITUDE}")) else f"{PREFIX}{name}.weight"


def _weight_shape(model: nn.Module, name: str) -> tuple[int, ...]:
    module: Any = model.get_submodule(name)
    return tuple(module.weight.shape)


def _sizes(module: Any) -> tuple[int, int]:
    first, second = module.weight.shape
    return (second, first) if is_transposed(module) else (first, second)


def _pattern(patterns: dict[str, Any], module: str, default: float) -> Any:
    """PEFT's rule: the first expression that matches the end of the name."""
    return next((value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", module)), default)


def _same_shape(folder: Path, name: str, found: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    if found != wanted:
        raise _other_base(folder, f"{name} of shape {found}", f"this base needs {wanted}")


def _other_base(folder: Path, found: str, why: str) -> ModelError:
    named = json.loads((Path(folder) / CONFIG).read_text(encoding="utf-8")).get("base_model_name_or_path")
    return ModelError(
        f"adapter.from {folder}",
        found,
        f"an adapter for another base: {why}",
        f"model: {named}, which it was made for" if named else "the base it was made for",
    )


def _apart(a: Tensor, b: Tensor) -> bool:
    from skimp.core.read import read

    return a.shape != b.shape or read((a != b).any(), expect=0.0) != 0.0
