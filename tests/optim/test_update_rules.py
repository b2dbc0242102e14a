"""What every update rule owes: steps, names, saving, loading, sizes, refusals, effect."""

from __future__ import annotations

import copy
import inspect
import io
import re

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from skimp.core.errors import CheckpointError, EffectError, SkimpError
from skimp.core.registry import facts, load
from skimp.optim import (
    CAME,
    SPAM,
    Adafactor,
    AdamMini,
    AdamW,
    AdamW4bit,
    AdamW8bit,
    AdamWBF16,
    Dion,
    Lion,
    Muon,
    StableSPAM,
    decay_groups,
    role_groups,
    roles,
)
from skimp.optim.state import state_key

RULES = {
    "adamw": (AdamW, torch.float32, {}),
    "adamw8bit": (AdamW8bit, torch.float32, {}),
    "adamw8bit on bf16": (AdamW8bit, torch.bfloat16, {"seed": 3}),
    "adamw-bf16": (AdamWBF16, torch.bfloat16, {"seed": 3}),
    "adamw-bf16 fp32 states": (AdamWBF16, torch.bfloat16, {"states": "fp32"}),
    "lion": (Lion, torch.float32, {}),
    "lion on bf16": (Lion, torch.bfloat16, {"states": "bf16"}),
    "adafactor": (Adafactor, torch.float32, {}),
    "adafactor on bf16": (Adafactor, torch.bfloat16, {"momentum": 0.9, "relative": True}),
    "came": (CAME, torch.float32, {}),
    "came on bf16": (CAME, torch.bfloat16, {}),
    "adamw4bit": (AdamW4bit, torch.float32, {}),
    "adamw4bit on bf16": (AdamW4bit, torch.bfloat16, {"seed": 3}),
    "muon": (Muon, torch.float32, {}),
    "muon on bf16": (Muon, torch.bfloat16, {"nesterov": False, "scale": "spectral"}),
    "spam": (SPAM, torch.float32, {"every": 4, "warmup": 2, "after": 1}),
    "spam on bf16, sparse": (SPAM, torch.bfloat16, {"density": 0.25, "every": 4, "warmup": 2}),
    "stable-spam": (StableSPAM, torch.float32, {"every": 4}),
    "stable-spam on bf16": (StableSPAM, torch.bfloat16, {}),
    "dion": (Dion, torch.float32, {}),
    "dion on bf16": (Dion, torch.bfloat16, {"rank": 0.5}),
    "adam-mini": (AdamMini, torch.float32, {}),
    "adam-mini on bf16": (AdamMini, torch.bfloat16, {"vectors": "element"}),
}
EVERY = pytest.mark.parametrize("rule", RULES)


def make(rule, seed=0, lr=1e-2, **more):
    """A tiny model, of which 5,151 elements (a short last block) get coded state, and its optimizer."""
    cls, dtype, options = RULES[rule]
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(101, 51, dtype=dtype), nn.LayerNorm(51, dtype=dtype), nn.Linear(51, 3, dtype=dtype))
    named = model.named_parameters()
    groups = role_groups(named, 0.1, roles(model)) if cls.by_role else decay_groups(named, 0.1)
    return model, cls(groups, lr=lr, **options, **more)


def gradients(model, step):
    g = torch.Generator().manual_seed(step)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=g).to(p.dtype)


def steps(model, optimizer, first, last):
    for step in range(first, last):
        gradients(model, step)
        optimizer.step()


def same(a, b):
    weights = zip(a[0].parameters(), b[0].parameters(), strict=True)
    states = zip(a[1].named_state(), b[1].named_state(), strict=True)
    return all(torch.equal(p, q) for p, q in weights) and all(
        x[:2] == y[:2] and (torch.equal(x[2], y[2]) if isinstance(x[2], torch.Tensor) else x[2] == y[2])
        for x, y in states
    )


@EVERY
def test_one_parameter_at_a_time_is_the_same_step(rule):
    whole, single = make(rule), make(rule)
    for step in range(3):
        gradients(whole[0], step)
        gradients(single[0], step)
        whole[1].step()
        for p in reversed(list(single[0].parameters())):
            grad, p.grad = p.grad, None
            single[1].step_parameter(p, grad)
    assert same(whole, single)


@EVERY
def test_resume_twice_through_torch_save_is_bit_equal(rule):
    straight = make(rule)
    steps(*straight, 0, 9)
    model, optimizer = make(rule)
    for first in (0, 3, 6):
        steps(model, optimizer, first, first + 3)
        file = io.BytesIO()
        torch.save([model.state_dict(), optimizer.state_dict()], file)
        file.seek(0)
        weights, state = torch.load(file, weights_only=True)
        model, optimizer = make(rule, seed=first + 50)
        model.load_state_dict(weights)
        optimizer.load_state_dict(state)
    assert same(straight, (model, optimizer))


@EVERY
def test_resume_twice_through_named_state_is_bit_equal(rule):
    straight = make(rule)
    steps(*straight, 0, 9)
    model, optimizer = make(rule)
    for first in (0, 3, 6):
        steps(model, optimizer, first, first + 3)
        saved = {state_key(name, key): copy.deepcopy(value) for name, key, value in optimizer.named_state()}
        weights = copy.deepcopy(model.state_dict())
        model, optimizer = make(rule, seed=first + 50)
        model.load_state_dict(weights)
        optimizer.init_states()
        held = {key: value.data_ptr() for _, key, value in optimizer.named_state() if key != "step"}
        optimizer.load_named_state(saved)
        assert held == {key: value.data_ptr() for _, key, value in optimizer.named_state() if key != "step"}
    assert same(straight, (model, optimizer))


@EVERY
def test_state_bytes_are_what_is_allocated_and_what_is_simulated(rule):
    model, optimizer = make(rule)
    optimizer.init_states()
    rows = {row.parameter: row for row in optimizer.table()}
    assert list(rows) == [n for n, p in model.named_parameters() if p.ndim > 1] + [
        n for n, p in model.named_parameters() if p.ndim < 2
    ]
    for name, p in model.named_parameters():
        held = sum(t.untyped_storage().nbytes() for t in optimizer.state[p].values() if isinstance(t, torch.Tensor))
        assert held == optimizer.bytes_of(p) == rows[name].state_bytes
        assert rows[name].weight_decay == (0.1 if p.ndim > 1 else 0.0)
        assert rows[name].lr == 1e-2


@EVERY
def test_a_fake_step_runs_the_same_operators_as_a_real_one(rule):
    from torch.utils._python_dispatch import TorchDispatchMode

    class Names(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.seen = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.namespace != "profiler":
                self.seen.append(str(func))
            return func(*args, **(kwargs or {}))

    def recorded():
        model, optimizer = make(rule)
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        optimizer.init_states()
        with Names() as names:
            optimizer.step()
        return names.seen

    with FakeTensorMode():
        simulated = recorded()
    assert simulated == recorded()
    assert len(simulated) <= 2 * 6  # one operator per parameter, and the step tensor of the fused kernel


@EVERY
def test_effect(rule):
    model, optimizer = make(rule)
    with pytest.raises(EffectError, match="no parameter has taken a step"):
        optimizer.assert_effect({}, {})
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    steps(model, optimizer, 0, 1)
    after = {n: p.detach() for n, p in model.named_parameters()}
    optimizer.assert_effect(before, after)
    with pytest.raises(EffectError, match=r"did not change in any bit: 0\.weight"):
        optimizer.assert_effect(before, before)
    key, value = next((k, v) for k, v in optimizer.state[model[0].weight].items() if torch.is_tensor(v))
    optimizer.state[model[0].weight][key] = value.double()
    with pytest.raises(EffectError, match=rf"keeps {key} of '0\.weight'"):
        optimizer.assert_effect(before, after)


@EVERY
def test_no_gradient_or_no_rate_is_not_blamed(rule):
    model, optimizer = make(rule, lr=0.0)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    steps(model, optimizer, 0, 1)
    assert all(torch.equal(before[n], p) for n, p in model.named_parameters())
    optimizer.assert_effect(before, before)


@EVERY
def test_lr_as_a_tensor_and_schedulers(rule):
    number, tensor = make(rule), make(rule, lr=torch.tensor(1e-2, dtype=torch.float64))
    schedules = [torch.optim.lr_scheduler.LambdaLR(o, lambda t: 1 / (1 + t)) for _, o in (number, tensor)]
    for step in range(3):
        steps(*number, step, step + 1)
        steps(*tensor, step, step + 1)
        for schedule in schedules:
            schedule.step()
    assert same(number, tensor)


@EVERY
def test_closure_and_unnamed_parameters(rule):
    cls, dtype, options = RULES[rule]
    torch.manual_seed(0)
    p = nn.Parameter(torch.randn(70, 61).to(dtype))
    role = {"role": "matrix", "columns": False, "head_dim": 0} if cls.by_role else {}
    optimizer = cls([{"params": [p], **role}], lr=1e-2, **options)

    def closure():
        optimizer.zero_grad()
        loss = p.float().square().sum()
        loss.backward()
        return loss

    first = optimizer.step(closure)
    assert optimizer.step(closure) < first
    assert next(name for name, _, _ in optimizer.named_state()) == "0.0"


@EVERY
def test_what_was_saved_by_another_rule_or_dtype_is_refused_and_never_cast(rule):
    model, optimizer = make(rule)
    steps(model, optimizer, 0, 1)
    saved = {state_key(name, key): value for name, key, value in optimizer.named_state()}
    gone = next(k for k, v in saved.items() if torch.is_tensor(v))
    missing = {k: v for k, v in saved.items() if k != gone}
    with pytest.raises(CheckpointError, match=re.escape(gone)):
        optimizer.load_named_state(missing)
    cast = {k: v.half() if isinstance(v, torch.Tensor) else v for k, v in saved.items()}
    with pytest.raises(CheckpointError, match="never cast"):
        optimizer.load_named_state(cast)
    state = optimizer.state_dict()
    state["state"][0] = {"step": 1, "exp_avg": torch.zeros(51, 101), "exp_avg_sq": torch.zeros(51, 101)}
    with pytest.raises(CheckpointError, match="another rule"):
        make(rule)[1].load_state_dict(state)


@EVERY
def test_decay_of_the_recipe_survives_a_resume(rule):
    """Named state carries no options: a changed decay is the one that is used (TRAPS B50)."""
    model, optimizer = make(rule)
    steps(model, optimizer, 0, 2)
    saved = {state_key(name, key): value for name, key, value in optimizer.named_state()}
    _, other = make(rule)
    for group in other.param_groups:
        group["weight_decay"] = 0.25
    other.load_named_state(saved)
    assert {row.weight_decay for row in other.table()} == {0.25}


@EVERY
def test_bad_options_and_gradients_are_refused(rule):
    rule_class, dtype, options = RULES[rule]
    p = nn.Parameter(torch.zeros(80, 64).to(dtype))
    takes = inspect.signature(rule_class).parameters

    def cls(params, **more):
        role = {"role": "matrix", "columns": False, "head_dim": 0} if rule_class.by_role else {}
        return rule_class([{"params": params, **role}], **more)

    betas = (0.9, 1.0, 0.9) if rule_class is CAME else (0.9, 1.0)
    for wrong in ({"lr": -1.0}, {"betas": betas}, {"eps": -1e-8}, {"weight_decay": -0.1}):
        if next(iter(wrong)) not in takes:
            continue
        with pytest.raises(SkimpError, match=next(iter(wrong))):
            cls([p], **options, **wrong)
    optimizer = cls([("w", p)], **options)
    with pytest.raises(SkimpError, match="no gradient"):
        optimizer.step_parameter(p)
    with pytest.raises(SkimpError, match="in none of its 1 groups"):
        optimizer.step_parameter(nn.Parameter(torch.zeros(3)), torch.zeros(3))
    with pytest.raises(SkimpError, match=r"shape \(80, 64\)"):
        optimizer.step_parameter(p, torch.zeros(64, 80, dtype=dtype))
    with pytest.raises(SkimpError, match="float16"):
        optimizer.step_parameter(p, torch.zeros(80, 64, dtype=torch.float16))
    with pytest.raises(SkimpError, match="strides"):
        cls([("w", nn.Parameter(torch.zeros(64, 80).to(dtype).t()))], **options)
    half = nn.Parameter(torch.zeros(80, 64, dtype=torch.float16))
    with pytest.raises(SkimpError, match="'w'"):
        cls([("w", half)], **options)


@pytest.mark.parametrize("rule", [r for r in RULES if r != "adamw"])  # torch's kernel lets the one number be NaN
def test_zero_and_non_finite_gradients_leave_finite_weights_and_states(rule):
    """A run stops on such a gradient by its norm; in a plain loop one bad number must not spread to a row or block."""
    model, optimizer = make(rule)
    steps(model, optimizer, 0, 2)
    gradients(model, 2)
    weight, gain = model[0].weight, model[1].weight
    weight.grad[3, 5], weight.grad[7, 100] = float("nan"), float("inf")
    if gain.dtype == torch.bfloat16 or rule in ("lion", "adafactor", "came", "adam-mini", "spam"):
        gain.grad[2] = -float("inf")  # elsewhere torch steps small tensors: the number becomes NaN
    given = weight.grad.clone()
    held = weight.detach().clone()
    optimizer.step()
    assert torch.equal(weight.grad.nan_to_num(7.0), given.nan_to_num(7.0))  # the gradient is as it came
    if not rule.startswith(("muon", "dion")):  # an orthogonal update of the finite numbers moves all
        assert torch.equal(weight[3, 5], held[3, 5])
        assert torch.equal(weight[7, 100], held[7, 100])
    for p in model.parameters():
        p.grad.zero_()
    optimizer.step()
    tensors = [t for _, _, t in optimizer.named_state() if torch.is_tensor(t) and t.is_floating_point()]
    assert all(t.isfinite().all() for t in [*model.parameters(), *tensors])


@EVERY
def test_gradients_of_any_layout(rule):
    one, two = make(rule), make(rule)
    gradients(one[0], 0)
    gradients(two[0], 0)
    for p in two[0].parameters():
        if p.ndim == 2:
            p.grad = p.grad.t().contiguous().t()
    one[1].step()
    two[1].step()
    assert same(one, two)


def test_facts_load_and_groups():
    for cls in {cls for cls, _, _ in RULES.values()}:
        name = cls.rule
        assert load(name, "update rule") is cls
        assert cls.rule == name
        assert facts(name).kind == "update rule"
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    model[0].bias.requires_grad_(False)
    model.register_parameter("odd_bias", nn.Parameter(torch.zeros(2, 2)))
    decayed, plain = decay_groups(model.named_parameters(), 0.1)
    assert [n for n, _ in decayed["params"]] == ["0.weight"]
    assert [n for n, _ in plain["params"]] == ["odd_bias", "1.weight", "1.bias"]
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.1, 0.0)
    assert len(decay_groups(nn.Linear(3, 3, bias=False).named_parameters(), 0.1)) == 1


def test_listing_imports_no_torch():
    import subprocess
    import sys

    code = (
        "import sys, skimp.optim, skimp.core.codecs, skimp.kernels.native; "
        "sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
