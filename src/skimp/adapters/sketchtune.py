"""SketchTune on a model: the codebooks of a sketched base train, its codes never change.

Every linear layer below the head is kept in codec `sketch`: g groups a row, a grid of K = 2^b values each, b bits a
weight. Beside each frozen grid lies its shift (`sketch_linear`), outputs x g K numbers, and that is all that trains: as
every weight of a row's group that has one code moves together, a change has full rank, where a product of two thin
matrices has theirs. Nothing is added to the layer's products at inference: a merged layer is a sketch as before.

Trained numbers: outputs x g x 2^b a layer, whatever its inputs, with AdamW in float32 16 bytes each; the base takes
b + 16 g K / inputs bits a weight.

Source: "Sketch to Adapt: Fine-Tunable Sketches for Efficient LLM Adaptation", Zhang et al., 2025, arXiv 2410.06364.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from skimp.adapters.handle import Handle, Row
from skimp.adapters.lora import few_blocks
from skimp.adapters.merge import Merged, largest_gap
from skimp.adapters.sketch_linear import moved, sketched_linear
from skimp.adapters.sketch_saved import LEARNED, SHIFT, Grids, check_codes, sum_of
from skimp.adapters.spec import ALL_LINEAR, Spec
from skimp.adapters.targets import adapted, match
from skimp.core.coded_linear import PREFIX, CodedLinear
from skimp.core.errors import ConflictError, EffectError
from skimp.core.read import is_simulated, read
from skimp.core.structure import Structure, read_structure

GRID = f"{PREFIX}grid"


class SketchTune(Handle):
    """The trained codebooks of one model.

    Args:
        model: an HF causal language model whose linear layers are in codec `sketch` (`core.coded_model.encode_model`),
            real or simulated; everything in it is frozen.
        structure: its roles, read from the model when None.
        targets: which layers, as LoRA's: all of them, names, or an expression.
        own_codes: codes and grids are not what the base's codec makes of its weights (`sketch_calibrate`): what is
            saved holds them.

    Raises:
        ConflictError: a layer that is no sketch, or an adapter that is there already.
        TargetError: targets that match nothing.

    Example:
        >>> encode_model(model, structure, Sketch(bits=4, groups=4))
        >>> tuned = SketchTune(model, structure)
        >>> optimizer = torch.optim.AdamW(tuned.parameters(), lr=5e-5)
    """

    name = "sketchtune"

    def __init__(
        self,
        model: nn.Module,
        structure: Structure | None = None,
        targets: str | tuple[str, ...] = ALL_LINEAR,
        own_codes: bool = False,
    ) -> None:
        self.model, self.structure = model, structure or read_structure(model)
        taken = adapted(model, self.structure)
        if taken is not None:
            raise ConflictError(
                "trained codebooks on this model",
                f"{taken} has an adapter",
                "two additions to one layer: the second would be exported without the first",
                "merge or detach the first",
            )
        self.targets, self.own_codes = targets, own_codes
        self.modules = match(model, self.structure, targets)
        self._check()
        self._kept: dict[str, Tensor] | None = None
        self._sums: dict[str, int] = {}
        self._trained_on: Mapping[str, int] = {}  # of a rebuilt one
        self._brought = False  # its own codes have taken the place of the base's
        self._freeze_base()
        for name in self.modules:
            self._attach(self.module(name))

    def _check(self) -> None:
        for name in self.modules:
            module = self.module(name)
            kept = module.codec.name if isinstance(module, CodedLinear) else "no codec"
            if kept != "sketch":
                raise ConflictError(
                    f"adapter 'sketchtune' on {name}",
                    f"it is kept in {kept}",
                    "what trains are the values of a learned codebook, and it has none",
                    ["model.weights=sketch", "adapter=lora: it goes on any base"],
                )

    def _attach(self, module: Any) -> None:
        grid = module._buffers[GRID]
        # Wider than what the layer computes in only where that is narrower: updates would vanish there.
        kind = torch.promote_types(module.dtype, torch.float32)
        shape = grid.shape[0], grid.shape[1] * grid.shape[2]
        module.register_parameter(SHIFT, nn.Parameter(torch.zeros(shape, dtype=kind, device=grid.device)))

        def forward(x: Tensor) -> Tensor:
            if self.merged:
                y: Tensor = type(module).forward(module, x)
                return y
            return sketched_linear(x, module.weight, getattr(module, SHIFT), module.bias)

        module.forward = forward

    # ---- the protocol

    @classmethod
    def attach(cls, model: nn.Module, structure: Structure, asked: Mapping[str, Any], seed: int) -> SketchTune:
        return cls(model, structure, asked["targets"], bool(asked["calibrate"]))

    @classmethod
    def rebuild(cls, model: nn.Module, structure: Structure, meta: Mapping[str, Any]) -> SketchTune:
        targets = meta["targets"]
        own = bool(meta["own_codes"])
        made = cls(model, structure, targets if isinstance(targets, str) else tuple(targets), own)
        made._trained_on = meta["codes"]
        return made

    @classmethod
    def merging(
        cls, meta: Mapping[str, Any], names: frozenset[str], get: Callable[[str], Tensor], device: str = "cpu"
    ) -> Grids:
        return Grids([n.removesuffix(f".{SHIFT}") for n in names if n.endswith(f".{SHIFT}")], get, meta)

    @classmethod
    def few(cls, asked: Mapping[str, Any], model: nn.Module, structure: Structure) -> dict[str, Any]:
        """Targets that any block has, in all of them."""
        if asked["targets"] == ALL_LINEAR:
            return {}
        changes = few_blocks(Spec(r=1, targets=asked["targets"]), model, structure)
        return {key: changes[key] for key in ("targets",) if key in changes}

    def meta(self) -> dict[str, Any]:
        targets = self.targets if isinstance(self.targets, str) else list(self.targets)
        return {"name": self.name, "targets": targets, "own_codes": self.own_codes, "codes": self.codes()}

    def codes(self) -> dict[str, int]:
        """crc32 of every layer's codes: shifts mean something on these alone. Nothing where they are simulated."""
        if not self._sums:
            parts = {name: self.module(name).parts() for name in self.modules}
            self._sums = {n: sum_of(p) for n, p in parts.items() if not is_simulated(p["codes"])}
        return dict(self._sums)

    def values(self) -> dict[str, Any]:
        """The codes' checksums."""
        return {"codes": self.codes()}

    def load_values(self, values: Mapping[str, Any]) -> None:
        """Hold the codes against those that were trained on: the base's, or those that `load` has put in their place.

        Raises:
            CheckpointError: names the first layer whose codes are others.
        """
        self._sums, self._brought = {}, self.own_codes
        for name, found in self.codes().items():
            check_codes(name, found, values.get("codes"))

    @torch.no_grad()
    def load(self, tensors: Callable[[str], Tensor]) -> None:
        """As any adapter's; a rebuilt one is then held against the codes it was trained on.

        Raises:
            SkimpError: a shape that differs. CheckpointError: other codes.
        """
        super().load(tensors)
        if self._trained_on:
            self.load_values({"codes": self._trained_on})

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return ((f"{name}.{SHIFT}", getattr(self.module(name), SHIFT)) for name in self.modules)

    def named_state(self) -> Iterator[tuple[str, Tensor]]:
        """The shifts, and the codes and grids they are of where the base alone does not give these."""
        yield from self.named_parameters()
        for name in self.modules if self.own_codes else ():
            for key, part in self.module(name).parts().items():
                yield f"{name}.{PREFIX}{key}", part

    def additions(self) -> Iterator[Tensor]:
        yield from self.parameters()

    def table(self) -> list[Row]:
        rows = []
        for name, target in self.modules.items():
            shift = getattr(self.module(name), SHIFT)
            rows.append(Row(name, target, tuple(self.module(name).weight.shape), 0, shift.numel(), shift.nbytes))
        return rows

    def assert_effect(self, before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> None:
        """Every codebook moved, and codes that were to be learned from text were.

        Raises:
            EffectError: names those that did not, or the base trains.
        """
        self.check_frozen()
        plain = [n for n in self.modules if not getattr(self.module(n), LEARNED, False)]
        if self.own_codes and not self._brought and plain:
            raise EffectError(
                "sketches learned from text (adapter.calibrate)",
                f"{len(plain)} are plain k-means, first {plain[0]}",
                "nothing learned them before the adapter was attached",
                "skimp.adapters.sketch_calibrate.calibrate, or skimp train",
            )
        still = [n for n, _ in self.named_parameters() if read((before[n] != after[n]).any(), expect=1.0) == 0.0]
        if still:
            raise EffectError(
                f"trained codebooks of {len(self.modules)} layers",
                f"{len(still)} did not move, first {still[0]}",
                "no gradient reached them: their layers do not run, or their forward was replaced",
            )

    # ---- into the sketch and out again

    @torch.no_grad()
    def merge(self, keep: bool = False, probe: Callable[[], Tensor] | None = None) -> Merged:
        """Put the shifted grids in the place of the frozen ones: the layers are sketches as before, as large as before.

        Grids are float16, so a shift below half a unit there is lost: `rounding` says how much, a few 1e-5 for
        weights below 0.1. A dense export (`--to merged`) rounds nothing.

        Args:
            keep: hold the frozen grids for `unmerge` and `detach`, 2 g K bytes a row.
            probe: gives logits of a few tokens; run before and after for the largest difference.

        Raises:
            ConflictError: merged already.
        """
        if self.merged:
            raise ConflictError("merge", "merged already", instead="unmerge first")
        logits = None if probe is None else probe().float()
        self.codes()  # as they were trained on
        self._kept = {} if keep else None
        change = lost = 0.0
        for name in self.modules:
            module = self.module(name)
            shift, grid = getattr(module, SHIFT), module._buffers[GRID]
            if self._kept is not None:
                self._kept[name] = grid.clone()
            exact = moved(module.weight, shift).parts["grid"]
            grid.copy_(exact)
            change = max(change, read(shift.abs().amax(), expect=0.0))
            lost = max(lost, read(exact.sub_(grid).abs().amax(), expect=0.0))
        self.merged = True
        return Merged(len(self.modules), change, lost, None if logits is None else largest_gap(logits, probe))

    @torch.no_grad()
    def unmerge(self) -> None:
        """Put the frozen grids back, to the bit.

        Raises:
            ConflictError: not merged, or merged without `keep`.
        """
        if not self.merged or self._kept is None:
            raise ConflictError(
                "unmerge",
                "nothing is merged" if not self.merged else "merged without keeping the grids",
                "" if not self.merged else "float16 less the shift is not the grid that was",
                "merge(keep=True)",
            )
        for name, grid in self._kept.items():
            self.module(name)._buffers[GRID].copy_(grid)
        self._kept, self.merged = None, False

    @torch.no_grad()
    def detach(self, base: Mapping[str, Tensor] | None = None) -> None:
        """The sketched base as it was, to the bit, training what it trained before.

        Args:
            base: codes and grids by their names in the state dict; needed where the adapter has brought its own.

        Raises:
            ConflictError: merged without `keep`, or the base's codes are not given.
        """
        own = [n for n, _ in self.named_state() if not n.endswith(f".{SHIFT}")] if self._brought else []
        missing = [n for n in own if n not in (base or {})]
        if missing:
            raise ConflictError(
                "detach, which restores the base to the bit",
                f"{len(missing)} of its codes and grids are not given, first {missing[0]}",
                "the adapter came with its own, which have taken their place",
                "detach(base=state_dict of the base), or load the base again",
            )
        if self.merged:
            self.unmerge()
        for name in own:
            self.model.get_buffer(name).copy_((base or {})[name])
        for name in self.modules:
            del self.module(name).forward
            self.module(name)._parameters.pop(SHIFT)
        self._thaw_base()
        self.modules = {}
