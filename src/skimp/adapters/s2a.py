"""S2A's modules on a model: biases and deep prompts, whose gradients need no layer's input.

Of y = x W' + b the gradient of b is the sum of y's, and that of x needs W alone; so with W frozen nothing of a linear
layer is kept for backward. What is left are activations, products and norms, which `activations.derivative` codes.

bias: a shift (outputs,) of every linear layer below the head, 0 at first, so that step 0 is the model to the bit.
prompt: p vectors a block, P = B A of rank k, before the text. They go through the block's own frozen key and value
layers, unturned as at position 0, and every position sees them, each document in a packed row too; the text keeps its
positions and the cache holds none of them. A window counts them as positions before the text. Prompts change the model
at step 0: attention is shared with them.

Trained numbers: the outputs of all linear layers, and k (p + d) a block.

A shift merges into a layer that has a bias (GPT-2's all do; Qwen2's q, k and v do, and its others do not). Llama's have
none, and the model would be another architecture; a prompt is no weight at all. Both are used attached, and exported as
skimp's own folder (`folder`). The third module of the paper, a side network, is `qst` with `down: avgpool`.

Source: "S2A: A Unified Framework for Parameter and Memory Efficient Transfer Learning", Jin et al., 2025,
arXiv 2503.08154, of which abstracts alone were at hand: that modules are chosen by what their gradients keep is theirs,
their form for a language model is worked out here. Shifts of norms are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from skimp.adapters.handle import Handle, Row
from skimp.adapters.layer import sizes
from skimp.adapters.merge import Merged, largest_gap
from skimp.adapters.targets import linear_layers
from skimp.core import noise
from skimp.core.attention import NAME
from skimp.core.errors import ConflictError, EffectError
from skimp.core.read import is_simulated, read
from skimp.core.structure import Structure

SHIFT, PROMPT_A, PROMPT_B = "s2a_shift", "s2a_prompt_A", "s2a_prompt_B"


class S2A(Handle):
    """Shifts and prompts of one model; the handle that undoes them.

    Args:
        model: an HF causal language model, real or simulated; everything in it is frozen.
        structure: its roles.
        bias: train a shift of every linear layer below the head.
        prompt: vectors before the text in every block; 0 for none. rank: of their product form.
        seed: address of the prompts' first numbers.

    Raises:
        ConflictError: nothing would train, the model has these already, or its key and value layers are not known.

    Example:
        >>> s2a = S2A(model, read_structure(model), bias=True, prompt=8)
        >>> optimizer = torch.optim.AdamW(s2a.parameters(), lr=1e-3)
    """

    merges = False
    name = "s2a"

    def __init__(
        self,
        model: nn.Module,
        structure: Structure,
        bias: bool = True,
        prompt: int = 8,
        rank: int = 4,
        seed: int = 0,
    ) -> None:
        if not bias and not prompt:
            raise ConflictError(
                "adapter.bias=false with adapter.prompt=0", "nothing that trains", instead=["bias: true", "prompt: 8"]
            )
        call = getattr(getattr(model, "config", None), "_attn_implementation", NAME)
        if prompt and call != NAME:
            raise ConflictError(
                f"adapter.prompt={prompt} on this model",
                f"attention '{call}'",
                "prompts are keys and values before the text, which its call would never see",
                ["model.set_attn_implementation(skimp.core.attention.register())", "prompt: 0"],
            )
        if any(SHIFT in m._parameters or PROMPT_A in m._parameters for m in model.modules()):
            raise ConflictError("S2A's modules on this model", "it has them", instead="detach the first")
        self.model, self.structure = model, structure
        self.asked = {"name": self.name, "bias": bias, "prompt": prompt, "rank": rank}
        self.linears = list(linear_layers(model, structure)) if bias else []
        self.attentions = attentions(model, structure) if prompt else []
        self._kept: dict[str, Tensor] | None = None
        self._freeze_base()
        for name in self.linears:
            self._shift(self.module(name))
        for name in self.attentions:
            self._prompt(name, self.module(name), prompt, rank, seed)

    @classmethod
    def merges_into(cls, meta: Mapping[str, Any], model: nn.Module, structure: Structure) -> bool:
        """Shifts alone, of layers that all have a bias."""
        layers = linear_layers(model, structure).values()
        return not meta["prompt"] and all(getattr(layer, "bias", None) is not None for layer in layers)

    @classmethod
    def merging(
        cls, meta: Mapping[str, Any], names: frozenset[str], get: Callable[[str], Tensor], device: str = "cpu"
    ) -> Shifts:
        return Shifts(names, get)

    @classmethod
    def no_weights(cls, asked: str) -> ConflictError:
        return ConflictError(
            f"{asked} of S2A",
            "prompts, or shifts of layers that have no bias",
            "a shift goes into a bias that is there; a prompt is keys and values before the text, and no weight",
            [
                "--to adapter: a folder that skimp loads on the base",
                "adapter={name: s2a, prompt: 0} on a model whose linear layers have biases, such as GPT-2",
            ],
        )

    def _empty(self, *shape: int) -> nn.Parameter:
        """float32 beside a narrower base: its updates would vanish there."""
        like = self.module(self.structure.embedding).weight
        kind = torch.promote_types(like.dtype, torch.float32)
        return nn.Parameter(torch.zeros(shape, dtype=kind, device=like.device))

    def _shift(self, module: Any) -> None:
        module.register_parameter(SHIFT, self._empty(sizes(module)[0]))
        plain = module.forward

        def forward(x: Tensor) -> Tensor:
            y: Tensor = plain(x)
            return y if self.merged else y + getattr(module, SHIFT).to(y.dtype)

        module.forward = forward

    def _prompt(self, name: str, module: Any, length: int, rank: int, seed: int) -> None:
        hidden = self.structure.hidden
        module.register_parameter(PROMPT_A, self._empty(rank, hidden))
        module.register_parameter(PROMPT_B, self._empty(length, rank))
        if not is_simulated(module._parameters[PROMPT_A]):
            with torch.no_grad():  # P's numbers have deviation 1/2, as of a normalised state
                for part, spread in ((PROMPT_A, 0.5), (PROMPT_B, rank**-0.5)):
                    p = module._parameters[part]
                    drawn = noise.normal(seed, f"{name}.{part}", 0, p.numel(), device=p.device)
                    p.copy_(drawn.mul_(spread).view(p.shape))
        module.skimp_prefix = lambda: self.keys_and_values(module)

    def keys_and_values(self, module: Any) -> tuple[Tensor, Tensor]:
        """Of one block's prompts, each (1, key heads, length, head width)."""
        made = getattr(module, PROMPT_B) @ getattr(module, PROMPT_A)
        x = made.to(self.module(self.structure.embedding).weight.dtype).unsqueeze(0)
        if hasattr(module, "c_attn"):
            _, k, v = module.c_attn(x).chunk(3, -1)
        else:
            k, v = module.k_proj(x), module.v_proj(x)
        k, v = (t.view(1, t.shape[1], self.structure.kv_heads, -1) for t in (k, v))
        k = module.k_norm(k) if hasattr(module, "k_norm") else k
        return k.transpose(1, 2), v.transpose(1, 2)

    # ---- the protocol

    @classmethod
    def attach(cls, model: nn.Module, structure: Structure, asked: Mapping[str, Any], seed: int) -> S2A:
        return cls(model, structure, **{k: v for k, v in asked.items() if k != "name"}, seed=seed)

    @classmethod
    def rebuild(cls, model: nn.Module, structure: Structure, meta: Mapping[str, Any]) -> S2A:
        return cls(model, structure, **{k: v for k, v in meta.items() if k != "name"})

    def meta(self) -> dict[str, Any]:
        return dict(self.asked)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for name in self.linears:
            yield f"{name}.{SHIFT}", getattr(self.module(name), SHIFT)
        for name in self.attentions:
            for part in (PROMPT_A, PROMPT_B):
                yield f"{name}.{part}", getattr(self.module(name), part)

    def additions(self) -> Iterator[Tensor]:
        yield from self.parameters()

    def table(self) -> list[Row]:
        rows = [Row(name, "shift", (p.numel(), 1), 0, p.numel(), p.nbytes) for name, p in self._shifts()]
        for name in self.attentions:
            a, b = getattr(self.module(name), PROMPT_A), getattr(self.module(name), PROMPT_B)
            shape, count = (b.shape[0], a.shape[1]), a.numel() + b.numel()
            rows.append(Row(name, "prompt", shape, a.shape[0], count, a.nbytes + b.nbytes))
        return rows

    def _shifts(self) -> Iterator[tuple[str, nn.Parameter]]:
        return ((name, getattr(self.module(name), SHIFT)) for name in self.linears)

    def asleep(self) -> frozenset[str]:
        """Shifts of keys: where positions are not turned into them they move every score of a query alike."""
        keys = self.structure.roles.get("k", ())
        return frozenset(f"{name}.{SHIFT}" for name in self.linears if name.endswith(keys))

    def assert_effect(self, before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> None:
        """Every shift but the keys', and every prompt, moved.

        Raises:
            EffectError: names those that did not, or the base trains.
        """
        self.check_frozen()
        asleep = self.asleep()
        names = [n for n, _ in self.named_parameters() if n not in asleep]
        still = [n for n in names if read((before[n] != after[n]).any(), expect=1.0) == 0.0]
        if still:
            raise EffectError(
                f"shifts of {len(self.linears)} layers and prompts of {len(self.attentions)} blocks",
                f"{len(still)} did not move, first {still[0]}",
                "no gradient reached them: their layers do not run, or their forward was replaced",
            )

    @torch.no_grad()
    def merge(self, keep: bool = False, probe: Callable[[], Tensor] | None = None) -> Merged:
        """Add every shift to its layer's own bias.

        Raises:
            ConflictError: prompts, or layers without a bias: no weights of this architecture do what they do.
        """
        bare = [n for n in self.linears if getattr(self.module(n), "bias", None) is None]
        if self.merged or self.attentions or bare:
            found = "merged already" if self.merged else "prompts" if self.attentions else f"no bias in {bare[0]}"
            raise ConflictError(
                "S2A merged into the model",
                found,
                "a shift goes into a bias that is there, and a prompt into none",
                "use it attached: eval, generate and resume do",
            )
        before = None if probe is None else probe().float()
        self._kept = {n: self.module(n).bias.detach().clone() for n in self.linears} if keep else None
        change = 0.0
        for name, shift in self._shifts():
            self.module(name).bias.add_(shift)
            change = max(change, read(shift.abs().max(), expect=0.0))
        self.merged = True
        return Merged(len(self.linears), change, 0.0, None if before is None else largest_gap(before, probe))

    @torch.no_grad()
    def unmerge(self) -> None:
        """Take the shifts out again: to the bit after `merge(keep=True)`, else by subtraction.

        Raises:
            ConflictError: not merged.
        """
        if not self.merged:
            raise ConflictError("unmerge", "nothing is merged", instead="merge first")
        for name, shift in self._shifts():
            bias = self.module(name).bias
            bias.sub_(shift) if self._kept is None else bias.copy_(self._kept[name])
        self._kept, self.merged = None, False

    @torch.no_grad()
    def detach(self, base: Mapping[str, Tensor] | None = None) -> None:
        """The model as it was, to the bit, training what it trained before.

        Raises:
            ConflictError: merged without `keep`.
        """
        if self.merged and self._kept is None:
            raise ConflictError("detach", "merged without a copy of the biases", instead="merge(keep=True)")
        if self.merged:
            self.unmerge()
        for name in self.linears:
            del self.module(name).forward
            self.module(name)._parameters.pop(SHIFT)
        for name in self.attentions:
            module = self.module(name)
            del module.skimp_prefix
            for part in (PROMPT_A, PROMPT_B):
                module._parameters.pop(part)
        self._thaw_base()
        self.linears, self.attentions = [], []


class Shifts:
    """Saved shifts as changes of biases (`handle.Merging`).

    Args:
        names, get: the saved tensors.
    """

    def __init__(self, names: frozenset[str], get: Callable[[str], Tensor]) -> None:
        self.get = get
        self.changed = frozenset(n.removesuffix(SHIFT) + "bias" for n in names if n.endswith(f".{SHIFT}"))

    def apply(self, name: str, value: Tensor, transposed: bool) -> Tensor:
        """b + shift."""
        return value.add_(self.get(name.removesuffix("bias") + SHIFT).to(value.device))


def attentions(model: nn.Module, structure: Structure) -> list[str]:
    """Every block's attention module: the one around its key layer.

    Raises:
        ConflictError: keys and values come from a fused layer that is not GPT-2's.
    """
    keys = structure.roles.get("k", ()) or structure.roles.get("qkv", ())
    found = [f"{block}.{name.rpartition('.')[0]}" for block in structure.blocks for name in keys]
    wrong = [n for n in found if not any(hasattr(model.get_submodule(n), leaf) for leaf in ("k_proj", "c_attn"))]
    if not found or wrong:
        raise ConflictError(
            "adapter.prompt",
            f"a model of type '{structure.family}' whose key layers are " + (", ".join(keys) or "not known"),
            "prompts go through a block's key and value layers",
            "adapter.prompt=0: shifts alone",
        )
    return found
