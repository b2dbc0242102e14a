"""PEFT itself, in a process of its own: `python peft_child.py load|make BASE FOLDER OUT`.

load: logits of the base with the adapter in FOLDER, and of the merged model. make: an adapter of PEFT's own, saved
to FOLDER, with its logits.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from transformers import AutoModelForCausalLM

IDS = torch.arange(1, 41).view(2, 20)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model.eval()(input_ids=IDS, use_cache=False).logits
    return found


def main(what: str, base: str, folder: str, out: str, options: str = "{}") -> None:
    from peft import LoraConfig, PeftModel, get_peft_model

    torch.set_num_threads(1)
    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    if what == "make":
        torch.manual_seed(3)
        model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **json.loads(options)))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.requires_grad and "lora_A" not in name:
                    parameter.add_(0.05 * torch.randn(parameter.shape))
        model.save_pretrained(folder)
        torch.save({"adapter": logits(model)}, out)
        return
    before = logits(model)
    model = PeftModel.from_pretrained(model, folder)
    found = {"base": before, "adapter": logits(model)}
    found["merged"] = logits(model.merge_and_unload())
    torch.save(found, out)


if __name__ == "__main__":
    main(*sys.argv[1:])
