"""Stand-ins for torch's compiler and scipy's optimisers: a run loads nothing of them, and all when asked for."""

from __future__ import annotations

import subprocess
import sys

CONFIG = (
    "{'model_type': 'llama', 'hidden_size': 32, 'intermediate_size': 48, 'num_hidden_layers': 1, "
    "'num_attention_heads': 2, 'num_key_value_heads': 1, 'vocab_size': 64, 'max_position_embeddings': 64}"
)
HEAD = f"""
import importlib.util, sys, torch
from skimp.core import lean
scipy_here = importlib.util.find_spec("scipy") is not None
from skimp.run.skeleton import skeleton
config = {CONFIG}
def loaded():
    return sorted(m for m in ("torch._dynamo.convert_frame", "torch._inductor", "scipy") if m in sys.modules)
"""


def child(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", HEAD + code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_model_and_an_optimizer_step_load_neither() -> None:
    child("""
lean.stay_lean()
model = skeleton(config, torch.float32)
p = torch.nn.Parameter(torch.ones(3))
p.sum().backward()
torch.optim.AdamW([p]).step()
assert loaded() == [], loaded()
""")


def test_a_block_of_lean_imports_leaves_the_real_modules_to_the_next_one() -> None:
    child("""
skeleton(config, torch.float32)
assert loaded() == [], loaded()
assert "torch._dynamo" not in sys.modules and "scipy.optimize" not in sys.modules
import torch._dynamo
assert torch._dynamo.config.cache_size_limit > 0
if scipy_here:
    from scipy.optimize import linear_sum_assignment
    assert linear_sum_assignment([[0.0, 1.0], [1.0, 0.0]])[1].tolist() == [0, 1]
""")


def test_the_compiler_still_works_behind_its_stand_in() -> None:
    child("""
lean.stay_lean()
skeleton(config, torch.float32)
counted = []
def backend(graph, inputs):
    counted.append(len(inputs))
    return graph.forward
twice = torch.compile(lambda x: x * 2, backend=backend)
assert twice(torch.ones(2)).tolist() == [2.0, 2.0]
assert counted == [1]
assert "torch._dynamo.convert_frame" in loaded()
""")


def test_what_is_called_later_loads_the_real_thing() -> None:
    child("""
with lean.lean_imports():
    from transformers import masking_utils
    try:
        from scipy.optimize import linear_sum_assignment
    except ImportError:  # nothing stands in for a package that is not installed
        assert not scipy_here
assert loaded() == [], loaded()
if scipy_here:
    assert linear_sum_assignment([[1.0, 0.0], [0.0, 1.0]])[1].tolist() == [1, 0]
    assert "scipy" in loaded()
with masking_utils.TransformGetItemToIndex():
    pass
""")


def test_a_process_of_its_own_loads_no_sharded_tensors_and_a_library_leaves_them_to_its_user() -> None:
    child("""
lean.stay_lean()
skeleton(config, torch.float32)
assert "torch.distributed.tensor" not in sys.modules
assert not torch.distributed.is_available()
""")
    child("""
skeleton(config, torch.float32)
assert torch.distributed.is_available()
from transformers.distributed import sharding_utils
assert sharding_utils.DTensor is sys.modules["torch.distributed.tensor"].DTensor
""")


def test_one_of_several_processes_keeps_torch_distributed() -> None:
    child("""
import os
os.environ["WORLD_SIZE"] = "2"
lean.stay_lean()
skeleton(config, torch.float32)
assert torch.distributed.is_available()
""")


def test_a_step_simulated_for_a_card_loads_no_compiler_and_is_the_same_again() -> None:
    """A compiler loaded amid a simulation left frames that held tensors: the first profile was above the second."""
    child("""
lean.stay_lean()
from skimp.core.exact import ExactChoices
from skimp.plan.simulate import simulate
from skimp.recipe import load_recipe
recipe = load_recipe({"model": "tiny", "data": {"train": "pydoc", "seq_len": 16}, "output": "runs/none",
                      "train": {"steps": 1, "batch_tokens": 32}}, [])
config["num_hidden_layers"] = 3
first, second = (simulate(recipe, ExactChoices(1, (0,)), config, target="cuda") for _ in range(2))
assert loaded() == [], loaded()
assert (first.peak, first.shares, first.phases) == (second.peak, second.shares, second.phases)
""")
