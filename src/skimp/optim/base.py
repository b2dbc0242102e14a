"""What every update rule is: a `torch.optim.Optimizer` with plain state, keyed by name, and one update per
parameter.

A rule says what state a parameter of some shape and dtype needs (`state_spec`) and how one parameter is
updated (`update`). Everything else follows from those two: allocation, size, saving, loading, the table and
the effect check.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from skimp.core.away import Away
from skimp.core.errors import SkimpError
from skimp.core.sharded import Part, alike, beside, is_sharded, largest_part, local, part_of, zeros_beside
from skimp.optim import elsewhere
from skimp.optim.codes import check_written
from skimp.optim.effect import assert_effect
from skimp.optim.options import lr_of
from skimp.optim.state import Spec, check_saved, entry, state_key, state_nbytes


@dataclass(frozen=True)
class Row:
    """One line of `UpdateRule.table`: which rule updates a parameter, and with what."""

    parameter: str
    shape: tuple[int, ...]
    rule: str
    lr: float
    weight_decay: float
    state_bytes: int


class UpdateRule(torch.optim.Optimizer):
    """Base of all update rules.

    Args:
        params: parameters, groups, or `model.named_parameters()`. With names, state and noise are addressed
            by them; without, by position ("0.3" is parameter 3 of group 0).
        defaults: the options of a group; `lr` (float or tensor) and `weight_decay` among them.

    Attributes:
        rule: name in the registry.
        locality: what an update of one element depends on: "element", "row" or "matrix".
        state_placement: where state lives, given where the parameter lives.
        block: neighbouring numbers that share an entry of a state which is not shaped like the parameter.
        by_role: it treats roles unlike (hidden matrices, embeddings, head, vectors); its groups then carry "role",
            as `skimp.optim.role_groups` makes them.
        trains_codes: it takes stand-ins of weights kept in a codec (`core.coded_trained`).
        kept_on_reset: keys of the state that are no moments and outlive a reset.
        away: where states live between updates; None keeps them beside their parameters.
    """

    rule: ClassVar[str]
    locality: ClassVar[Literal["element", "row", "matrix"]] = "element"
    state_placement: ClassVar[str] = "like parameter"
    block: ClassVar[int] = 1
    by_role: ClassVar[bool] = False
    trains_codes: ClassVar[bool] = False
    kept_on_reset: ClassVar[tuple[str, ...]] = ()
    away: Away | None = None

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        self._where: dict[Tensor, tuple[int, int]] = {}
        super().__init__(params, defaults)

    # ---- what a rule gives

    def state_spec(self, shape: Sequence[int], dtype: torch.dtype, whole: int | None = None) -> Spec:
        """Shape and dtype of every state tensor of a parameter: the one source of allocation and size.

        Args:
            shape, dtype: of the parameter, or of the part of it that a process holds.
            whole: numbers of the whole parameter where `shape` is a part. A rule that decides by size decides by
                this one, so that all processes agree and a checkpoint does not depend on their number.
        """
        raise NotImplementedError

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any], part: Part) -> None:
        """Update `p` in place from `grad`, both plain and contiguous; `state["step"]` counts from 1.

        Of a sharded parameter `p`, `grad` and the state are this process's part, which `part` describes.
        """
        raise NotImplementedError

    def check_parameter(self, name: str, p: Tensor) -> None:
        """Refuse, when the optimizer is made, a parameter this rule cannot update."""
        check_written(self, name, p)

    def numbers_of(self, p: Tensor) -> tuple[str, ...]:
        """Keys of the state that are Python numbers, 0 at first; `step` is always one."""
        return ("step",)

    def part_spec(self, p: Tensor) -> Spec:
        """`state_spec` of the part of `p` that the fullest process holds; rules that go by name or role say it here."""
        return self.state_spec(largest_part(p), p.dtype, p.numel())

    def block_of(self, p: Tensor) -> int:
        """Neighbouring numbers of `p` that share an entry of a state which is not shaped like it."""
        return self.block

    def locality_of(self, p: Tensor) -> str:
        """What an update of one element of `p` depends on."""
        return self.locality

    # ---- one step

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; returns the closure's loss, if one is given."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        due = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        for batch in self.together(due):
            self.step_parameters([(p, p.grad) for p in batch if p.grad is not None])
        return loss

    def together(self, parameters: Sequence[Tensor]) -> list[list[Tensor]]:
        """`parameters` in the batches in which they are best updated: one by one, unless a rule gains by stacking.

        The numbers must not depend on it: a step in backward updates one at a time.
        """
        return [[p] for p in parameters]

    @torch.no_grad()
    def step_parameters(self, items: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Update one batch of `together`, each with its gradient."""
        for p, grad in items:
            self._update(p, grad, self.group_of(p))

    @torch.no_grad()
    def step_parameter(self, p: Tensor, grad: Tensor | None = None) -> None:
        """Update one parameter: the same arithmetic as `step`, which it replaces when stepping in backward.

        Raises:
            SkimpError: `p` is not of this optimizer, or there is no gradient.
        """
        group = self.group_of(p)
        grad = p.grad if grad is None else grad
        if grad is None:
            raise SkimpError(f"one update of '{self.name_of(p)}'", "it has no gradient", instead="pass grad=…")
        self._update(p, grad, group)

    def begin_update(self, p: Tensor, grad: Tensor) -> dict[str, Any]:
        """Check the gradient of `p`, and count the step in its state, which is made if it does not exist yet.

        Raises:
            SkimpError: a gradient of another shape, a sparse one, a shard of what is updated as a whole.
        """
        if grad.shape != p.shape or grad.layout != torch.strided:
            raise SkimpError(
                f"{self.rule}: a dense gradient of shape {tuple(p.shape)} for '{self.name_of(p)}'",
                f"{grad.layout} of shape {tuple(grad.shape)}",
                instead="for an embedding with sparse=True, switch that off",
            )
        if is_sharded(p):
            self._check_shard(p)
        state = self.init_state(p)
        state["step"] += 1
        return state

    def _update(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        state = self.begin_update(p, grad)
        if not is_sharded(p):
            for own, given, here, part in elsewhere.parts(self, p, grad, state):
                self.update(own, given, here, group, part)
        elif local(p).numel():  # more processes than rows leave some without any
            part = part_of(self.name_of(p), p)
            self.update(local(p), self._local_gradient(p, grad), self._local_state(p, state), group, part)

    def _check_shard(self, p: Tensor) -> None:
        """Refuse a shard of what is updated as a whole.

        Raises:
            SkimpError: with what it would cost elsewhere.
        """
        if self.locality_of(p) == "matrix" and largest_part(p) != tuple(p.shape):
            raise SkimpError(
                f"{self.rule} on the sharded parameter '{self.name_of(p)}'",
                f"{largest_part(p)} of {tuple(p.shape)} here",
                "its update is a function of the whole tensor; on a part it would be another rule",
                ("replicate it (no sharding)", f"adamw8bit: {2 * p.numel():,} bytes of state, element by element"),
            )

    def _local_state(self, p: Tensor, state: dict[str, Any]) -> dict[str, Any]:
        part = largest_part(p)
        here: dict[str, Any] = {key: state[key] for key in self.numbers_of(p)}
        for key, (shape, _) in self.part_spec(p).items():
            here[key] = local(state[key]) if shape == part else local(state[key]).view(shape)
        return here

    def _local_gradient(self, p: Tensor, grad: Tensor) -> Tensor:
        if not is_sharded(grad):
            raise SkimpError(
                f"{self.rule}: a sharded gradient for the sharded parameter '{self.name_of(p)}'",
                f"a plain tensor of shape {tuple(grad.shape)}",
                "its numbers on the other processes are not known to be the same",
                "leave the gradient as FSDP2 or DTensor made it",
            )
        return local(alike(grad, p)).contiguous()

    # ---- state

    def init_state(self, p: Tensor) -> dict[str, Any]:
        """The state of `p`, made of zeros if it does not exist yet. Calling it early keeps memory flat."""
        state: dict[str, Any] = self.state[p]
        if "step" not in state:
            state.update(dict.fromkeys(self.numbers_of(p), 0))
            part = largest_part(p)
            moved = elsewhere.made(self, p)
            if moved is not None:
                state.update(moved)
                return state
            for key, (shape, dtype) in self.part_spec(p).items():
                # Like the parameter, so that the state of a sharded parameter is sharded as it is. Anything else
                # (block maxima) belongs to a part, and is as long on every process as on the fullest.
                state[key] = (
                    torch.zeros_like(p, dtype=dtype, requires_grad=False)
                    if tuple(shape) == part
                    else zeros_beside(shape, p, self.block_of(p), dtype)
                )
        return state

    def keep_states(self, away: Away | None) -> None:
        """States live in `away` between updates from now on, None: beside their parameters (`optim.elsewhere`)."""
        elsewhere.keep_states(self, away)

    def spec_of(self, p: Tensor) -> Spec:
        """Shape and dtype of every state tensor of `p`; of a sharded parameter the global shapes."""
        part = largest_part(p)
        return {
            key: (tuple(p.shape) if shape == part else beside(shape, p, self.block_of(p)), dtype)
            for key, (shape, dtype) in self.part_spec(p).items()
        }

    def bytes_of(self, p: Tensor) -> int:
        """Bytes of state of `p` on this process, at most: of a sharded parameter those of the fullest process."""
        return sum(state_nbytes(size, kind) for size, kind in self.part_spec(p).values())

    def init_states(self) -> None:
        """Allocate the state of all parameters now instead of in the first step."""
        for p in self.parameters():
            self.init_state(p)

    def state_bytes(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        """Bytes of state of one parameter: exactly what `init_state` allocates."""
        return sum(state_nbytes(size, kind) for size, kind in self.state_spec(shape, dtype).values())

    def named_state(self) -> Iterator[tuple[str, str, Tensor | int]]:
        """(parameter name, key, tensor or number) of all existing state, in the order of the groups."""
        for p in self.parameters():
            if p in self.state:
                for key, value in self.state[p].items():
                    yield self.name_of(p), key, value

    @torch.no_grad()
    def load_named_state(self, saved: Mapping[str, Any], only: Collection[str] | None = None) -> None:
        """Load what `named_state` gave, tensor by tensor into the state that exists; out of a file straight into its
        place (so that memory stays flat).

        Options of groups (lr, decay, …) are *not* part of it: those of this optimizer, hence of the recipe,
        stay.

        Args:
            saved: maps `state_key(parameter, key)` to a tensor or number. With a method `fill(key, tensor, passed)`,
                which reads a tensor in place and tells `passed`, if there is one, of every piece, it is a file.
            only: parameters that have state in it; what others have here goes. None: all do.

        Raises:
            CheckpointError: an entry is missing, or has another shape or dtype than this rule's. Nothing is
                cast.
        """
        for p in self.parameters():
            name = self.name_of(p)
            if only is not None and name not in only:
                self.state.pop(p, None)
                continue
            if elsewhere.filled(self, p, saved):
                continue
            keys = [*self.numbers_of(p), *self.spec_of(p)]
            self._restore(p, {key: entry(saved, state_key(name, key), self.rule) for key in keys})

    def _restore(self, p: Tensor, saved: Mapping[str, Any]) -> None:
        spec = self.spec_of(p)
        numbers = self.numbers_of(p)
        check_saved(self.rule, self.name_of(p), spec, saved, numbers)
        state = self.init_state(p)
        state.update({key: int(saved[key]) for key in numbers})
        with elsewhere.at_hand(self, p):
            for key in spec:
                state[key].copy_(saved[key])

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """torch's own format, bit for bit: unlike torch's loader, no state is cast to the parameter's dtype.

        As in torch the saved groups, with their lr and decay, replace this optimizer's, and parameters are
        matched by position. Pre-hooks see and may change the groups, not the state.

        Raises:
            CheckpointError: the state is of another rule, shape or dtype.
        """
        held, saved = self.state, state_dict["state"]
        super().load_state_dict({**state_dict, "state": {}})
        self.state = held
        ids = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        for p, index in zip(self.parameters(), ids, strict=True):
            if index in saved:
                self._restore(p, saved[index])
            else:
                self.state.pop(p, None)

    def reset_moments(self, parameters: Iterable[Tensor] | None = None) -> int:
        """`optim.refactor.reset_moments` of these parameters, or of all."""
        from skimp.optim.refactor import reset_moments

        return reset_moments(self, parameters)

    # ---- groups and names

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch; every parameter is checked first by `check_parameter`."""
        super().add_param_group(param_group)
        self._index()
        for p in self.param_groups[-1]["params"]:
            self.check_parameter(self.name_of(p), p)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._index()

    def _index(self) -> None:
        groups = enumerate(self.param_groups)
        self._where = {p: (i, j) for i, group in groups for j, p in enumerate(group["params"])}

    def parameters(self) -> list[Tensor]:
        """All parameters, in the order of the groups."""
        self._index()
        return list(self._where)

    def group_of(self, p: Tensor) -> dict[str, Any]:
        """The group, hence the options, of one parameter."""
        return self.param_groups[self._place(p)[0]]

    def _place(self, p: Tensor) -> tuple[int, int]:
        if p not in self._where:
            # Accelerate puts sharded parameters into the groups in place of those the optimizer was made with.
            self._index()
        if p not in self._where:
            raise SkimpError(
                f"{self.rule}: a parameter of this optimizer",
                f"a tensor of shape {tuple(p.shape)} that is in none of its {len(self.param_groups)} groups",
                instead="add it with add_param_group, or make the optimizer after the model is complete",
            )
        return self._where[p]

    def name_of(self, p: Tensor) -> str:
        """The parameter's name, or "group.position" where the optimizer was given no names."""
        i, j = self._place(p)
        names = self.param_groups[i].get("param_names")
        return names[j] if names else f"{i}.{j}"

    def table(self) -> list[Row]:
        """One row for every parameter, so that none falls between groups."""
        rows = []
        for p in self.parameters():
            group = self.group_of(p)
            rows.append(
                Row(
                    self.name_of(p),
                    tuple(p.shape),
                    self.rule_for(p),
                    lr_of(group),
                    float(group["weight_decay"]),
                    self.bytes_of(p),
                )
            )
        return rows

    def rule_for(self, p: Tensor) -> str:
        """What `table` says of this parameter's rule."""
        return self.rule

    # ---- did it do anything

    def assert_effect(self, before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> None:
        """Hold the first optimizer step to its promise; see `skimp.optim.effect`."""
        assert_effect(self, before, after)
