"""hf: skimp's techniques inside Hugging Face `Trainer` and TRL's `SFTTrainer`.

Update rules need nothing from here: `Trainer(model, optimizers=(skimp.optim.AdamW8bit(...), None))`. What changes the
model or the step is put into a finished trainer by one call, `attach`, before
`trainer.train()`. Blocks that train in turn are a callback, `SampledLayers`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from skimp.hf.attached import Attached as Attached
    from skimp.hf.attached import attach as attach
    from skimp.hf.documents import Declared as Declared
    from skimp.hf.layers import SampledLayers as SampledLayers
    from skimp.hf.packed import pack as pack

_HOMES = {
    "Attached": "attached",
    "attach": "attached",
    "Declared": "documents",
    "SampledLayers": "layers",
    "pack": "packed",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"skimp.hf.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'skimp.hf' has no attribute '{name}'")
