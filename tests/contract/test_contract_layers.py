"""Layer-sampled training over switches: what rests does not move, states stay flat, what returns begins anew, and a
resumed run goes on to the bit."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from contract_rows import BLOCKS, ROWS, SEQ, STYLES, Technique, batch_of, make_run, state_tensors, threads, weights
from torch._subclasses.fake_tensor import FakeTensorMode

from skimp.core.errors import ConflictError, EffectError, RecipeError
from skimp.core.memory.tracker import Tracker
from skimp.plan.simulate import simulate
from skimp.recipe import load_recipe
from skimp.run.build import Run
from skimp.run.effect import Effect
from skimp.run.loop import State
from skimp.run.saving import Saver, open_newest, restore_optimizer, restore_place, weights_from
from skimp.steps.draws import Fixed, Uniform
from skimp.steps.layers import LayerSampler

DEEP = {**STYLES["llama"], "num_hidden_layers": 5}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with threads(1):
        yield


def layers(text: str, *more: str, **exact: Any) -> Technique:
    return Technique(exact, (f"train.layers={{{text}}}", *more))


def resting(run: Run) -> set[str]:
    return {n for n, p in run.parameters() if not p.requires_grad}


@pytest.mark.parametrize(
    "text", ["name: lisa, active: 3, every: 2", "name: badam, active: 3, embeddings: true, head: true"]
)
def test_all_blocks_active_is_full_training_bit_for_bit(text: str) -> None:
    """Also with states dropped on a switch: a block that stays keeps its own."""
    plain, found = make_run("plain", "llama-tied"), make_run(layers(text), "llama-tied")
    for step in range(5):
        assert found.step(batch_of("plain", seed=step)) == plain.step(batch_of("plain", seed=step))
    expected = weights(plain)
    assert all(torch.equal(p, expected[n]) for n, p in weights(found).items())


@pytest.mark.parametrize("exact", [{}, {"in_backward": True}, {"micro_rows": 3}], ids=str)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_what_rests_is_bit_unchanged_and_states_are_flat(exact: dict[str, Any], precision: str) -> None:
    line = layers("name: lisa, active: 2, every: 2", f"precision={precision}", "train.weight_decay=0.5", **exact)
    run, seen, sizes = make_run(line, DEEP), set(), set()
    for step in range(10):
        before = weights(run)
        run.step(batch_of(line, seed=step))
        still, after = resting(run), weights(run)
        assert all(torch.equal(before[n], after[n]) for n in still)
        moved = {n for n in after if not torch.equal(before[n], after[n])}
        assert {run.structure.block_of(n) for n in moved} == {*run.layers.active, None}
        assert all(p.grad is None for _, p in run.parameters())
        sizes.add(sum(t.untyped_storage().nbytes() for t in state_tensors(run)))
        seen |= set(run.layers.active)
    trained = [(p.shape, p.dtype) for n, p in run.parameters() if n not in still]
    assert sizes == {sum(run.optimizer.state_bytes(*each) for each in trained)}
    assert len(seen) > 2


def test_a_block_that_is_drawn_late_moves_in_its_first_step_and_one_that_returns_begins_anew() -> None:
    line = layers("name: badam, active: 1, every: 3, order: ascending")
    run = make_run(line, "llama")
    for step in range(12):
        before = weights(run)
        run.step(batch_of(line, seed=step))
        index = step // 3 % BLOCKS
        own = [n for n, _ in run.parameters() if run.structure.block_of(n) == index]
        assert all(not torch.equal(before[n], dict(run.parameters())[n]) for n in own)
        counts = {value for _, key, value in run.optimizer.named_state() if key == "step"}
        assert counts == {step % 3 + 1}
        assert {n for n, _, _ in run.optimizer.named_state()} == set(own)


def test_kept_moments_go_on_where_they_were() -> None:
    line = layers("name: badam, active: 1, every: 2, order: ascending, on_switch: keep")
    run = make_run(line, "llama")
    full = sum(t.nbytes for t in state_tensors(run))
    for step in range(8):
        run.step(batch_of(line, seed=step))
        assert sum(t.nbytes for t in state_tensors(run)) == full
    counts = {run.structure.block_of(n): v for n, k, v in run.optimizer.named_state() if k == "step"}
    assert counts == {0: 4, 1: 2, 2: 2}


GALORE = "optimizer={name: galore, rank: 8}"


def test_all_blocks_active_is_plain_galore_bit_for_bit() -> None:
    plain = make_run(Technique(overrides=(GALORE,)), "llama-tied")
    found = make_run(layers("name: owlore, active: 3, every: 2", GALORE), "llama-tied")
    for step in range(5):
        assert found.step(batch_of("plain", seed=step)) == plain.step(batch_of("plain", seed=step))
    expected = weights(plain)
    assert all(torch.equal(p, expected[n]) for n, p in weights(found).items())


@pytest.mark.parametrize(
    ("exact", "more"), [({}, ()), ({"in_backward": True, "micro_rows": 1}, ("train.clip=null",))], ids=str
)
def test_owlore_with_galore_begins_anew_on_return_and_its_states_are_flat(exact: dict[str, Any], more: Any) -> None:
    """The published code's projector may be thousands of steps old then: its counter runs only while a block trains."""
    line = layers("name: badam, active: 1, every: 3, order: ascending", GALORE, *more, **exact)
    run, sizes = make_run(line, "llama"), set()
    bases = []
    for step in range(10):
        run.step(batch_of(line, seed=step))
        counts = {value for _, key, value in run.optimizer.named_state() if key == "step"}
        assert counts == {step % 3 + 1}
        sizes.add(sum(t.untyped_storage().nbytes() for t in state_tensors(run)))
        if step in (0, 9):
            parameter = dict(run.parameters())["model.layers.0.mlp.up_proj.weight"]
            state = run.optimizer.state[parameter]
            bases.append({k: v.clone() for k, v in state.items() if isinstance(v, torch.Tensor)})
    assert len(sizes) == 1
    assert any(not torch.equal(bases[0][k], bases[1][k]) for k in bases[0])


def test_a_block_that_enters_warms_up_and_the_first_ones_do_not() -> None:
    """Adam's first step moves a weight by lr whatever its gradient: so the move is lr x (age + 1) / (warmup + 1)."""
    line = layers(
        "name: badam, active: 1, every: 4, warmup: 3, order: ascending", "train.weight_decay=0", "train.clip=null"
    )
    run, name = make_run(line, "llama"), "model.layers.{}.mlp.up_proj.weight"
    moves = []
    for step in range(8):
        run.set_lr(1e-3)
        before = weights(run)
        run.step(batch_of(line, seed=step))
        parameter = name.format(step // 4)
        moves.append(float((weights(run)[parameter] - before[parameter]).abs().median()))
    assert moves[0] == pytest.approx(1e-3, rel=1e-3)
    assert moves[4] == pytest.approx(1e-3 / 4, rel=1e-3)
    assert moves[4] < moves[5] < moves[6]
    assert all(group["lr"] == 1e-3 for group in run.optimizer.param_groups)


def test_the_norm_that_clips_is_of_the_active_blocks_alone() -> None:
    line = layers("name: badam, active: 1, every: 1, order: ascending", "train.clip=0.01")
    run, plain = make_run(line, "llama"), make_run("plain", "llama")
    seen: dict[str, torch.Tensor] = {}
    plain.optimizer.step_parameter = lambda p, grad=None: seen.update({plain.optimizer.name_of(p): grad.clone()})
    whole = plain.step(batch_of("plain"))
    block = (
        torch.stack([g.norm() for n, g in seen.items() if plain.structure.block_of(n) == 0]).norm() / whole.clip_scale
    )
    assert run.step(batch_of("plain")).grad_norm == pytest.approx(float(block), rel=1e-5)


@pytest.mark.parametrize("exact", [{}, {"recompute": (0, 1, 2)}], ids=str)
def test_backward_ends_at_the_lowest_active_block(exact: dict[str, Any]) -> None:
    """Activations that are alive when the loss begins, by tracked bytes: each block below the active one, of which
    nothing is kept, spares what a block keeps."""
    line = layers("name: badam, active: 1", **exact)

    def kept(index: int) -> int:
        run = make_run(line, "llama")
        run.layers.draw = Fixed(((index,),))
        run.layers.begin(0)
        tracker, found = Tracker(), []
        inner = run.head.hidden

        def hidden(*args: Any) -> Any:
            out = inner(*args)
            found.append(tracker.by_category["activations"])
            return out

        run.head.hidden = hidden
        effect, batch = Effect(run), batch_of(line)
        parts = batch.split(run.exact.micro_rows)
        with tracker:
            run.show_to(tracker, batch)
            run.stepper.step(parts)
        effect.check(run, 1e-3)
        return int(found[0])

    sizes = [kept(index) for index in range(BLOCKS)]
    a_block = sizes[0] - sizes[1]
    assert sizes[1] - sizes[2] == a_block > 0
    entry = ROWS * SEQ * 48 * 4  # float32 hidden states
    assert a_block == entry if exact else a_block > 5 * entry


def go_on(run: Run, line: Technique, state: State, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        run.set_lr(1e-3 / (1 + state.step))
        losses.append(run.step(batch_of(line, seed=state.step)).loss)
        state.step += 1
    return losses


class Place:
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state == {}


#: Saved after 3 and 6 steps: in the middle of a period and at its end, where the next step draws others.
RESUMED = [
    layers("name: lisa, active: 2, every: 2, warmup: 1"),
    layers("name: lisa, active: 2, every: 2", "precision=bf16", in_backward=True),
    layers("name: lisa, active: 1, every: 2, on_switch: keep, embeddings: false, head: false", "optimizer=adamw8bit"),
    layers("name: owlore, active: 2, every: 3, threshold: 4", in_backward=True),
    layers("name: badam, active: 2, every: 1", "precision=bf16"),
    layers("name: owlore, active: 2, every: 2, threshold: 4", "optimizer={name: galore, rank: 8}"),
]


@pytest.mark.parametrize("line", RESUMED, ids=lambda line: " ".join([*line.overrides, *line.exact]))
def test_resumed_twice_over_switches_is_bit_equal(tmp_path: Path, line: Technique) -> None:
    run, state = make_run(line, DEEP), State()
    whole = go_on(run, line, state, 9)
    expected = weights(run) | {f"{n}.{k}": v for n, k, v in run.optimizer.named_state()}
    run, state, losses = make_run(line, DEEP), State(), []
    for part in range(3):
        losses += go_on(run, line, state, 3)
        if part == 2:
            break
        saver = Saver(tmp_path / "run" / "checkpoints", keep=1, facts={})
        saver.save(SimpleNamespace(run=run, stream=Place(), state=state))  # type: ignore[arg-type]
        run.close()
        run, state = make_run(line, DEEP, seed=99), State()
        with open_newest(saver.root) as saved:
            restore_place(saved, run.recipe, Place(), state)
            weights_from(saved)(run.model)
            restore_optimizer(saved, run)
    assert losses == whole
    found = weights(run) | {f"{n}.{k}": v for n, k, v in run.optimizer.named_state()}
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(torch.as_tensor(found[name]), torch.as_tensor(value)), name


def test_a_living_run_goes_back_to_an_earlier_period(tmp_path: Path) -> None:
    """As the loop does after a failed step: states of blocks that are active now and rested then are gone."""
    line = layers("name: badam, active: 1, every: 2")
    run, state = make_run(line, DEEP), State()
    go_on(run, line, state, 1)
    saver = Saver(tmp_path / "run" / "checkpoints", keep=1, facts={})
    saver.save(SimpleNamespace(run=run, stream=Place(), state=state))  # type: ignore[arg-type]
    whole = go_on(run, line, state, 5)
    with open_newest(saver.root) as saved:
        weights_from(saved)(run.model)
        restore_place(saved, run.recipe, Place(), state)
        restore_optimizer(saved, run)
    assert go_on(run, line, state, 5) == whole


def test_other_exact_choices_between_two_steps_change_nothing() -> None:
    line = layers("name: lisa, active: 2, every: 2")
    plain, other = make_run(line, DEEP), make_run(line, DEEP)
    for step in range(6):
        if step == 3:
            other.rebuild(make_run(layers("name: lisa", in_backward=True, recompute=(0, 1)), DEEP).exact)
        assert other.step(batch_of(line, seed=step)).loss == plain.step(batch_of(line, seed=step)).loss
    assert all(torch.equal(a, dict(other.parameters())[n]) for n, a in plain.parameters())


#: (exact choices, are the embeddings trained)
CHOICES: list[tuple[dict[str, Any], bool]] = [
    ({}, True),
    ({"recompute": (0, 1)}, False),
    ({"in_backward": True}, False),
    ({"recompute": (0, 1, 2, 3)}, True),
    ({"recompute": (0, 1)}, True),
    ({}, False),
    ({"micro_rows": 2}, False),
    ({"in_backward": True, "recompute": (0, 1)}, True),
]


def _no_draw_is_costlier(exact: dict[str, Any], trained: bool) -> None:
    config = {**STYLES["llama"], "num_hidden_layers": 4}
    flag = str(trained).lower()
    line = layers(f"name: lisa, active: 2, embeddings: {flag}, head: {flag}", **exact)
    plain = make_run(line, config, simulate=FakeTensorMode())
    planned = simulate(plain.recipe, plain.exact, config, documents=(0, SEQ)).peak.total
    worst = 0
    for blocks in combinations(range(4), 2):
        run = make_run(line, config)
        run.layers.draw = Fixed((blocks,))
        run.layers.begin(0)
        batch = batch_of(line)
        parts, tracker = batch.split(run.exact.micro_rows), Tracker()
        with tracker:
            run.show_to(tracker, batch)
            tracker.reset_peak()
            for _ in range(2):
                run.stepper.step(parts)
        worst = max(worst, tracker.peak.total)
    assert worst <= planned <= 1.05 * worst


@pytest.mark.parametrize(("exact", "trained"), CHOICES[:3], ids=str)
def test_no_draw_takes_more_than_the_one_that_is_planned(exact: dict[str, Any], trained: bool) -> None:
    _no_draw_is_costlier(exact, trained)


@pytest.mark.slow
@pytest.mark.parametrize(("exact", "trained"), CHOICES[3:], ids=str)
def test_no_draw_takes_more_than_planned_with_other_choices(exact: dict[str, Any], trained: bool) -> None:
    _no_draw_is_costlier(exact, trained)


def test_lisa_learns_more_than_small_additions_in_as_many_steps() -> None:
    """The same rows again and again, rates by the usual rule: an adapter's ten times that of full training."""

    def last(line: Technique, lr: float) -> float:
        run = make_run(line, "llama")
        run.set_lr(lr)
        return [run.step(batch_of("plain")).loss for _ in range(25)][-1]

    clip = "train.clip=null"
    lisa, lora = (
        last(layers("name: lisa, active: 1, every: 5", clip), 2e-3),
        last(Technique(overrides=("adapter={r: 4}", clip)), 2e-2),
    )
    assert lisa < lora


def test_memory_falls_with_the_blocks_that_train() -> None:
    def resting_bytes(text: str) -> int:
        line = layers(text)
        plain = make_run(line, DEEP, simulate=FakeTensorMode())
        return simulate(plain.recipe, plain.exact, DEEP).resting["optimizer"]

    one, two, all_ = (resting_bytes(f"name: badam, active: {k}") for k in (1, 2, 5))
    assert two == 2 * one
    assert all_ == 5 * one


def test_it_works_around_any_optimizer_in_a_plain_loop() -> None:
    run = make_run("plain", DEEP)
    run.delivery.close()
    named = list(run.model.named_parameters())
    optimizer = torch.optim.AdamW([p for _, p in named], lr=1e-3)
    sampler = LayerSampler(named, run.structure, optimizer, Uniform(0, 5, 2), every=2)
    sizes, active = set(), set()
    for step in range(8):
        sampler.begin(step)
        batch = batch_of("plain", seed=step)
        logits = run.model(input_ids=batch.ids).logits
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.labels.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
        active |= set(sampler.active or ())
        sizes.add(sum(v.nbytes for s in optimizer.state.values() for v in s.values()))
    assert len(sizes) == 1
    assert len(active) > 2
    sampler.release()
    assert all(p.requires_grad for _, p in named)


def test_mutation_a_sampler_that_freezes_nothing() -> None:
    run = make_run("lisa", "llama")
    effect = Effect(run)
    run.layers.begin = lambda step, batches=(): None
    for _, parameter in run.parameters():
        parameter.requires_grad_(True)
        run.optimizer.init_state(parameter)
    run.layers.step_parameter = run.optimizer.step_parameter
    run.step(batch_of("lisa"))
    with pytest.raises(EffectError, match=r"'lisa' trains blocks .* still asks for a gradient|still asks"):
        effect.check(run, 1e-3)


def test_mutation_states_that_are_never_dropped() -> None:
    """The released code's own fault: memory creeps up to that of full training."""
    run = make_run("lisa", "llama")
    effect = Effect(run)
    for _, parameter in run.parameters():
        run.optimizer.init_state(parameter)
    run.step(batch_of("lisa"))
    with pytest.raises(EffectError, match=r"moments of .* which rests"):
        effect.check(run, 1e-3)


def test_mutation_a_resting_block_that_moves() -> None:
    run = make_run("lisa", "llama")
    effect = Effect(run)
    run.step(batch_of("lisa"))
    with torch.no_grad():
        dict(run.parameters())["model.layers.0.mlp.up_proj.weight"].add_(1.0)
    with pytest.raises(EffectError, match="moved while its block rests"):
        effect.check(run, 1e-3)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{name: lisa, order: random}", "badam's"),
        ("{name: lisa, threshold: 5}", "owlore's"),
        ("{name: lisa, every: 4, warmup: 4}", "never reach"),
        ("{name: lise}", "lisa"),
        ("{name: first-order}", "a way to sample blocks"),
        ("{active: 0}", "active"),
        ("{every: 0}", "every"),
        ("{on_switch: forget}", "on_switch"),
    ],
)
def test_a_wrong_key_is_refused_by_name(text: str, words: str) -> None:
    base = {"model": "tiny", "data": {"train": "pydoc", "seq_len": 8}, "output": "runs/x"}
    with pytest.raises(RecipeError, match=words):
        load_recipe(base, [f"train.layers={text}"])


def test_more_blocks_than_there_are_and_half_a_tied_matrix_are_refused() -> None:
    with pytest.raises(ConflictError, match="a model of 3 blocks"):
        make_run(layers("active: 4"), "llama")
    with pytest.raises(ConflictError, match="both train and rest"):
        make_run(layers("embeddings: false"), "llama-tied", simulate=FakeTensorMode())
    with pytest.raises(ConflictError, match=r"'(lora|lisa)' together with '(lora|lisa)'"):
        make_run(layers("active: 1", "adapter=lora"), "llama")


def test_layers_alone_is_short_for_the_published_defaults() -> None:
    base = {"model": "tiny", "data": {"train": "pydoc", "seq_len": 8}, "output": "runs/x"}
    short = load_recipe(base, ["train.layers=owlore"]).train.layers
    assert (short.active, short.every, short.threshold, short.embeddings) == (5, 50, 13.0, True)
    assert load_recipe(base).train.layers is None
    recipe = load_recipe(base, ["train.layers=badam"])
    assert load_recipe(recipe.as_dict()) == recipe
