"""Sparse spectral training on a model: linear layers live as U diag(sigma) V', and train so.

Every linear layer gives up its weight for sigma (k), U and V (k rows each, k = min(outputs, inputs)). All singular
values train at every step; of the vectors r at a time, drawn anew every so many steps, with their moments begun anew
and the rate climbing back. After each step the trained vectors are brought back to length 1 and negative singular
values to 0. A round of about k / r draws ends with a new decomposition, which makes the vectors orthogonal again.
Everything else in the model (embeddings, norms, biases, head) trains as always, so a model can be trained from scratch.

Memory per layer (m outputs, n inputs): weights k (m + n) + k numbers where a dense layer has m n (twice as many when
m = n), gradients r (m + n) + k, AdamW's moments twice that. In float32 with m = n that is 8 m^2 + 24 r m bytes + 16 m
against 16 m^2: less while r < m / 3. What counts is all of it, not the trained share.

Paper: "Sparse Spectral Training and Inference on Euclidean and Hyperbolic Neural Networks", Zhao et al., 2024,
arXiv 2405.15481, section 3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from skimp.adapters.handle import Handle, Row
from skimp.adapters.lora import few_blocks
from skimp.adapters.merge import Merged, largest_gap
from skimp.adapters.spec import ALL_LINEAR, Spec
from skimp.adapters.spectral_linear import spectral_linear
from skimp.adapters.sst_merge import Spectra
from skimp.adapters.sst_sample import bring_forward, decompose, decompose_bytes, dense, sampled
from skimp.adapters.sst_spec import SSTSpec, begin_anew
from skimp.adapters.targets import is_transposed, match
from skimp.core.errors import ConflictError, EffectError, SkimpError
from skimp.core.events import Event, Firing, every
from skimp.core.memory.tracker import scope
from skimp.core.read import is_simulated, read
from skimp.core.structure import Structure, read_structure

SIGMA, U, V = "sst_sigma", "sst_u", "sst_v"
LEFT, RIGHT, ORDER = "sst_left", "sst_right", "sst_order"
#: A vector of length 1 in float32 is that to a few ulp.
LENGTH = 1e-5


class SST(Handle):
    """The spectral layers of one model.

    Args:
        model: an HF causal language model, float32, its weights in place (real or simulated); it goes on training all
            that it trained.
        spec, structure: as said there; the structure is read from the model when None.

    Raises:
        ConflictError: weights that are not float32 or wider, or an adapter that is there already.
        SkimpError: a rank above a layer's, a warm-up as long as a draw.

    Example:
        >>> sst = SST(model, SSTSpec(r=64))
        >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        >>> events = Events(*sst.events(optimizer))
        >>> for step, batch in enumerate(batches):
        ...     events.run(step)
        ...     model(**batch).loss.backward()
        ...     optimizer.step()
        ...     sst.after_step()
    """

    name = "sst"
    whole = True

    def __init__(self, model: nn.Module, spec: SSTSpec | None = None, structure: Structure | None = None) -> None:
        self.model, self.spec = model, spec or SSTSpec()
        self.structure = structure or read_structure(model)
        self.modules = match(model, self.structure, self.spec.targets)
        self._kept: dict[str, dict[str, Tensor]] | None = None
        self._check()
        self.shapes: dict[str, tuple[int, int]] = {}
        for name in self.modules:
            self._attach(name)

    @classmethod
    def attach(cls, model: nn.Module, structure: Structure, asked: Mapping[str, Any], seed: int) -> SST:
        keys = ("r", "targets", "every", "warmup", "mix", "draws")
        return cls(model, SSTSpec(**{k: asked[k] for k in keys}, seed=seed), structure)

    @classmethod
    def few(cls, asked: Mapping[str, Any], model: nn.Module, structure: Structure) -> dict[str, Any]:
        """Targets that any block has, in all of them."""
        if asked["targets"] == ALL_LINEAR:
            return {}
        changes = few_blocks(Spec(r=asked["r"], targets=asked["targets"]), model, structure)
        return {key: changes[key] for key in ("targets",) if key in changes}

    @classmethod
    def rebuild(cls, model: nn.Module, structure: Structure, meta: Mapping[str, Any]) -> SST:
        return cls(model, SSTSpec.from_dict({k: v for k, v in meta.items() if k != "name"}), structure)

    @classmethod
    def merging(
        cls, meta: Mapping[str, Any], names: frozenset[str], get: Callable[[str], Tensor], device: str = "cpu"
    ) -> Spectra:
        return Spectra([n.removesuffix(f".{SIGMA}") for n in names if n.endswith(f".{SIGMA}")], get)

    def _check(self) -> None:
        for name in self.modules:
            module = self.module(name)
            taken = [n for n in module._parameters if n not in ("weight", "bias")]
            weight = module._parameters.get("weight")
            if taken or weight is None or weight.dtype not in (torch.float32, torch.float64):
                raise ConflictError(
                    f"spectral training of {name}",
                    f"{', '.join(taken)} in it" if taken else "coded weights" if weight is None else f"{weight.dtype}",
                    "vectors of length 1 have entries near 1 / sqrt(outputs); bfloat16's steps there are larger than a "
                    "training step, and coded ones cannot move at all"
                    if not taken
                    else "an addition and a spectrum would train the same weight",
                    ["precision=bf16-mixed: float32 factors, bfloat16 products", "adapter=lora on such a base"],
                )
            k = min(weight.shape)
            if self.spec.r > k:
                raise SkimpError(
                    f"adapter.r={self.spec.r}",
                    f"{k} singular vectors in {name} of {weight.shape[0]} x {weight.shape[1]}",
                    "so many cannot be drawn from it",
                    f"r={max(1, k // 8)}: an eighth; it saves memory below a third",
                )

    @torch.no_grad()
    def _attach(self, name: str) -> None:
        module = self.module(name)
        weight = module.weight.t() if is_transposed(module) else module.weight
        (outputs, inputs), like = weight.shape, module.weight
        k = min(outputs, inputs)
        self.shapes[name] = (outputs, inputs)
        left, right = like.new_empty(k, outputs), like.new_empty(k, inputs)
        sigma, order = like.new_empty(k), torch.arange(k, device=like.device)
        if not is_simulated(like):
            decompose(weight, left, right, sigma)
        module._parameters.pop("weight")
        del weight, like
        module.register_parameter(SIGMA, nn.Parameter(sigma))
        for key, value in ((LEFT, left), (RIGHT, right), (ORDER, order)):
            module.register_buffer(key, value)
        self._views(module)
        module.forward = self._forward(module)
        if not is_simulated(sigma):
            self._draw(name, 0)

    def _views(self, module: Any) -> None:
        """The parameters of the active vectors: the first rows, in the same storage."""
        module.register_parameter(U, nn.Parameter(module.sst_left[: self.spec.r]))
        module.register_parameter(V, nn.Parameter(module.sst_right[: self.spec.r]))

    def _forward(self, module: Any) -> Callable[[Tensor], Tensor]:
        enhanced = self.spec.enhanced

        def forward(x: Tensor) -> Tensor:
            return spectral_linear(
                x,
                module.sst_left,
                module.sst_right,
                module.sst_sigma,
                module.sst_order,
                module.sst_u,
                module.sst_v,
                module.bias,
                enhanced=enhanced,
            )

        return forward

    # ---- how it trains

    def _draw(self, name: str, iteration: int) -> None:
        module, spec = self.module(name), self.spec
        chosen = sampled(module.sst_sigma, spec.r, spec.mix, spec.seed, f"{name}.sst", iteration)
        bring_forward(module.sst_left, module.sst_right, module.sst_order, chosen)

    @torch.no_grad()
    def redraw(self, optimizer: Any, iteration: int) -> None:
        """Other vectors train from now on; their moments begin anew."""
        with scope("workspace", "sst"):
            for name in self.modules:
                self._draw(name, iteration)
            begin_anew(optimizer, [p for n, p in self.named_parameters() if n.endswith((f".{U}", f".{V}"))])

    @torch.no_grad()
    def redecompose(self, optimizer: Any) -> None:
        """Singular values and vectors of every layer's weight anew, one layer at a time; all their moments with them.

        Vectors are orthogonal again and the outputs stay, to rounding.
        """
        with scope("workspace", "sst"):
            for name in self.modules:
                module = self.module(name)
                decompose(self.dense(name), module.sst_left, module.sst_right, module.sst_sigma)
                torch.arange(module.sst_order.numel(), out=module.sst_order)
            begin_anew(
                optimizer, [p for n, p in self.named_parameters() if n.endswith((f".{U}", f".{V}", f".{SIGMA}"))]
            )

    def events(self, optimizer: Any) -> list[Event]:
        spec = self.spec
        most = max(min(shape) for shape in self.shapes.values())
        draws = spec.draws or -(-most // spec.r)

        def round_ends(firing: Firing) -> None:
            self.redecompose(optimizer)

        def draw(firing: Firing) -> None:
            self.redraw(optimizer, firing.count + 1)

        return [
            every(spec.every * draws, round_ends, name="sst-round", moments="reset"),
            every(spec.every, draw, name="sst-draw", moments="reset", warmup=spec.warmup),
        ]

    @torch.no_grad()
    def after_step(self) -> None:
        """Trained vectors back to length 1, singular values to 0 and above."""
        if self.merged:
            return
        for name in self.modules:
            module = self.module(name)
            module.sst_sigma.clamp_(min=0.0)
            for vectors in (module.sst_u, module.sst_v) if self.spec.unit else ():
                vectors.div_(torch.linalg.vector_norm(vectors, dim=1, keepdim=True).clamp_min_(1e-30))

    def peaks(self) -> dict[str, int]:
        """A new decomposition, between two steps: one layer's."""
        return {"decompose": max(sum(decompose_bytes(*shape)) for shape in self.shapes.values())}

    # ---- what there is

    def meta(self) -> dict[str, Any]:
        return {"name": self.name, **self.spec.as_dict()}

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """All that the model trains."""
        return ((n, p) for n, p in self.model.named_parameters() if p.requires_grad)

    def additions(self) -> Iterator[Tensor]:
        """Nothing: spectra are the weights."""
        return iter(())

    def named_state(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter once, vectors as the whole that the active ones are rows of."""
        for name, p in self.model.named_parameters():
            if not name.endswith((f".{U}", f".{V}")):
                yield name, p
        for name in self.modules:
            for key in (LEFT, RIGHT, ORDER):
                yield f"{name}.{key}", self.module(name)._buffers[key]

    def table(self) -> list[Row]:
        rows = []
        for name, target in self.modules.items():
            module = self.module(name)
            outputs, inputs = self.shapes[name]
            numbers = self.spec.r * (outputs + inputs) + module.sst_sigma.numel()
            size = sum(t.nbytes for t in (module.sst_left, module.sst_right, module.sst_sigma, module.sst_order))
            rows.append(Row(name, target, (outputs, inputs), self.spec.r, numbers, size))
        return rows

    def assert_effect(self, before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> None:
        what = f"spectral training of {len(self.modules)} layers"
        if self.merged:
            raise EffectError(what, "they are merged: dense weights run")
        dense_left = [name for name in self.modules if "weight" in self.module(name)._parameters]
        if dense_left:
            raise EffectError(what, f"{dense_left[0]} still has its weight", "no gradient or moment was saved")
        keys = [f"{name}.{key}" for name in self.modules for key in (SIGMA, U, V)]
        still = [key for key in keys if read((before[key] != after[key]).any(), expect=1.0) == 0.0]
        if still:
            raise EffectError(what, f"{len(still)} parts did not move, first {still[0]}", "no gradient reached them")
        for name in self.modules if self.spec.unit else ():
            module = self.module(name)
            for vectors in (module.sst_left, module.sst_right):
                off = (torch.linalg.vector_norm(vectors, dim=1) - 1.0).abs().amax()
                if read(off, expect=0.0) > LENGTH:
                    raise EffectError(
                        what,
                        f"vectors of {name} are not of length 1",
                        "their length would train in place of the singular values",
                        "call after_step() after each optimizer step",
                    )

    # ---- dense again

    def dense(self, name: str, keep: float = 1.0) -> Tensor:
        """(outputs, inputs) the weight of one layer; with `keep` that share of its singular values, the largest."""
        module = self.module(name)
        return dense(module.sst_left, module.sst_right, module.sst_sigma, module.sst_order, keep)

    @torch.no_grad()
    def merge(self, keep: bool = False, probe: Callable[[], Tensor] | None = None, values: float = 1.0) -> Merged:
        """Plain weights in place of the spectra, one layer at a time; `keep` holds these for `unmerge`.

        Args:
            values: share of each layer's singular values, the largest, that is multiplied out.
        """
        if self.merged:
            raise ConflictError("merge", "merged already", instead="unmerge first")
        before = None if probe is None else probe().float()
        self._kept = {} if keep else None
        for name in self.modules:
            module = self.module(name)
            weight = self.dense(name, values)
            factors = {key: module._parameters.pop(key) for key in (SIGMA, U, V)}
            factors |= {key: module._buffers.pop(key) for key in (LEFT, RIGHT, ORDER)}
            if self._kept is not None:
                self._kept[name] = factors
            whole = weight.t().contiguous() if is_transposed(module) else weight
            module.register_parameter("weight", nn.Parameter(whole))
            del module.forward, factors
        self.merged = True
        return Merged(len(self.modules), 0.0, 0.0, None if before is None else largest_gap(before, probe))

    @torch.no_grad()
    def unmerge(self) -> None:
        if not self.merged or self._kept is None:
            raise ConflictError(
                "unmerge",
                "nothing is merged" if not self.merged else "merged without keeping the spectra",
                "" if not self.merged else "a decomposition of the sum would be another starting point",
                "merge(keep=True)",
            )
        for name in self.modules:
            module, factors = self.module(name), self._kept.pop(name)
            module._parameters.pop("weight")
            module._parameters |= {key: factors[key] for key in (SIGMA, U, V)}
            module._buffers |= {key: factors[key] for key in (LEFT, RIGHT, ORDER)}
            module.forward = self._forward(module)
        self._kept, self.merged = None, False

    @torch.no_grad()
    def detach(self, base: Mapping[str, Tensor] | None = None) -> None:
        """Plain layers with the weights they had, `base` giving every parameter the run trained."""
        wanted = [f"{name}.weight" for name in self.modules]
        wanted += [n for n, _ in self.named_parameters() if n.rpartition(".")[2] not in (SIGMA, U, V)]
        missing = [n for n in dict.fromkeys(wanted) if n not in (base or {})]
        if missing:
            raise ConflictError(
                "detach, which restores the base to the bit",
                f"{len(missing)} originals are not given, first {missing[0]}",
                "spectra take the place of the weights, which are not kept: they would take their bytes once more",
                ["detach(base={name: original weight})", "merge(): plain weights that hold what was trained"],
            )
        if not self.merged:
            self.merge()
        for name in dict.fromkeys(wanted):
            self.model.get_parameter(name).copy_((base or {})[name])
        self.modules = {}
