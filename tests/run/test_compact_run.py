"""Gradients that arrive projected, in a run: what is refused, and a step that breaks off leaves nothing behind."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from skimp.core.batch import Batch
from skimp.core.errors import ConflictError, NonFiniteError
from skimp.core.exact import ExactChoices
from skimp.data.synthetic import synthetic_batch
from skimp.plan.lattice import Lattice, Space
from skimp.plan.make import _moot
from skimp.recipe import load_recipe
from skimp.run.build import Run, build
from skimp.run.weights import init_scratch

CONFIG = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "vocab_size": 61,
    "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": True,
}  # fmt: skip


def recipe(*overrides: str) -> Any:
    values = {
        "model": "tiny", "data": {"train": "pydoc", "seq_len": 12, "validation": None}, "output": "runs/x",
        "train": {"steps": 20, "batch_tokens": 48, "lr": 1e-2, "clip": None}, "eval": None,
        "optimizer": {"name": "grass", "rank": 4, "refresh": 50, "compact": True},
    }  # fmt: skip
    return load_recipe(values, overrides)


def made(exact: ExactChoices, *overrides: str) -> Run:
    return build(recipe(*overrides), exact, CONFIG, fill=lambda model: init_scratch(model, 0))


def batch(step: int) -> Batch:
    return synthetic_batch(12, 4, 61, None, step)


def weights(run: Run) -> list[Tensor]:
    return [p.detach().clone() for _, p in run.parameters()]


def test_an_infinite_gradient_moves_nothing_and_the_step_can_be_taken_again() -> None:
    """Held sums are dropped with the step; taken again it is that of a run in which nothing happened, to the bit."""
    one, two = made(ExactChoices(4)), made(ExactChoices(4))
    for run in (one, two):
        run.step(batch(0))
    before = weights(one)

    def poisoned(module: Any, given: Any, output: Any) -> None:
        hidden = output if isinstance(output, Tensor) else output[0]
        hidden.register_hook(lambda g: g * float("inf"))

    hook = one.model.get_submodule("model.layers.1").register_forward_hook(poisoned)
    with pytest.raises(NonFiniteError, match="finite gradients in optimizer step 2"):
        one.step(batch(1))
    assert all(torch.equal(a, b) for a, b in zip(weights(one), before, strict=True))
    assert one.optimizer._added
    one.delivery.discard()
    assert not one.optimizer._added
    hook.remove()
    for run in (one, two):
        run.step(batch(1))
    assert all(torch.equal(a, b) for a, b in zip(weights(one), weights(two), strict=True))


def test_rebuilt_in_backward_it_goes_on_to_the_bit() -> None:
    one, two = made(ExactChoices(4)), made(ExactChoices(4))
    one.step(batch(0))
    two.step(batch(0))
    one.rebuild(ExactChoices(4, in_backward=True))
    for run in (one, two):
        run.step(batch(1))
    assert all(torch.equal(a, b) for a, b in zip(weights(one), weights(two), strict=True))
    one.close()
    assert all("forward" not in vars(m) for m in one.model.modules() if type(m) is torch.nn.Linear)


def kept(run: Run) -> int:
    """Bytes of distinct storages that one step keeps for backward and that are no parameter's."""
    own = {p.untyped_storage().data_ptr() for _, p in run.parameters()}
    held: dict[int, Tensor] = {}

    def pack(t: Tensor) -> Tensor:
        held[t.untyped_storage().data_ptr()] = t  # held, so that no address is used again
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        run.step(batch(0))
    return sum(t.untyped_storage().nbytes() for at, t in held.items() if at not in own)


@pytest.mark.parametrize("model", [{}, {"model_type": "gpt2", "n_embd": 32, "n_inner": 56, "n_layer": 2, "n_head": 4}])
def test_projected_inputs_keep_the_papers_bytes(model: dict[str, Any]) -> None:
    """A block of plain kernels keeps T·(2n + m_ff − 2ρn − ρm_ff) numbers less, layers that read one tensor keeping one
    projection of it; unshared it is 5ρn. Fused kernels make those inputs again, and keep nothing more with CompAct."""
    rank = "optimizer={name: compact, rank: 0.25%s}"
    bytes_of = {
        what: kept(build(recipe(*keys), ExactChoices(4), CONFIG | model, fill=lambda model: init_scratch(model, 0)))
        for what, keys in {
            "plain": ("optimizer=adamw", "exact.kernels=plain"),
            "shared": (rank % "", "exact.kernels=plain"),
            "unshared": (rank % ", share: false", "exact.kernels=plain"),
            "fused": ("optimizer=adamw",),
            "fused compact": (rank % "",),
        }.items()
    }
    blocks, tokens, n, wide = 2, 48, 32, 56
    assert bytes_of["plain"] - bytes_of["shared"] == 4 * blocks * tokens * (2 * n + wide - 2 * n // 4 - wide // 4)
    more = 0 if model else 3 * n // 4  # GPT-2's queries, keys and values are one layer, and it has no gate
    assert bytes_of["unshared"] - bytes_of["shared"] == 4 * blocks * tokens * more
    assert bytes_of["fused compact"] <= bytes_of["fused"] < bytes_of["plain"]


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        (("optimizer=compact",), "gradients and states in the 2 recomputed blocks"),
        (("optimizer=adamw", "activations.pamm=16"), "saves nothing in the 2 recomputed blocks"),
        (("optimizer=adamw",), ""),
    ],
)
def test_a_plan_says_where_recompute_makes_them_pointless(keys: tuple[str, ...], says: str) -> None:
    for recompute in ((0, 1), ()):
        notes = _moot(recipe(*keys), SimpleNamespace(exact=ExactChoices(4, recompute=recompute)))
        assert (says in "".join(notes)) if recompute and says else not notes


def test_random_projections_leave_micro_batches_free() -> None:
    """They are no function of a gradient: cut in two, a step is the same to rounding, also moved in backward."""
    rank = "optimizer={name: compact, rank: 0.25, refresh: 2}"
    assert Lattice(Space(recipe(rank), CONFIG, 2, "cpu")).sizes() == [1, 2, 4]
    whole = made(ExactChoices(4), rank)
    others = [made(ExactChoices(1), rank), made(ExactChoices(1, in_backward=True), rank, "exact.micro_batch=1")]
    others += [made(ExactChoices(4, mlp_chunk=5), rank), made(ExactChoices(2, recompute=(0, 1)), rank)]
    losses = [[run.step(batch(i)).loss for i in range(4)] for run in (whole, *others)]
    for found in losses[1:]:
        assert found == pytest.approx(losses[0], rel=2e-5)
    with pytest.raises(ConflictError, match=r"first chunk's would move the weight before the second"):
        made(ExactChoices(4, mlp_chunk=5, in_backward=True), rank)


def test_smaller_micro_batches_are_the_users_to_choose() -> None:
    """They change the mathematics: a basis is of the first one."""
    with pytest.raises(ConflictError, match=r"micro-batches of 2 of 4 rows[\s\S]*exact\.micro_batch=2, knowingly"):
        made(ExactChoices(2))
    assert made(ExactChoices(2), "exact.micro_batch=2").compact is not None
    for overrides, sizes in (((), [4]), (("exact.micro_batch=2",), [2]), (("optimizer.compact=false",), [1, 2, 4])):
        assert Lattice(Space(recipe(*overrides), CONFIG, 2, "cpu")).sizes() == sizes
