"""`python -m skimp.run.doctor.probe`: import what a run imports and print what was found, as one line of JSON."""

from __future__ import annotations

import importlib
import json
from typing import Any

#: Distribution -> module. Imported one by one: the first that fails must not hide the others.
MODULES = {
    "numpy": "numpy",
    "pydantic": "pydantic",
    "pyyaml": "yaml",
    "safetensors": "safetensors.torch",
    "tokenizers": "tokenizers",
    "torch": "torch",
    "transformers": "transformers.models.llama.modeling_llama",
    "pyarrow": "pyarrow",
}


def look() -> dict[str, Any]:
    """`broken`: distribution -> why it cannot be imported; the rest is torch's account of this machine."""
    found: dict[str, Any] = {"broken": {}}
    for name, module in MODULES.items():
        try:
            importlib.import_module(module)
        except Exception as error:
            found["broken"][name] = f"{type(error).__name__}: {error}"
    if "torch" in found["broken"]:
        return found
    import torch

    from skimp.core.memory.process import set_malloc_policy
    from skimp.kernels.native import pool, why
    from skimp.plan.places import earlier

    set_malloc_policy()  # the rule that runs are held against is the one under this policy
    seen = earlier()
    cuda = torch.cuda.is_available()
    found |= {
        "torch": str(torch.__version__),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "native": why(),
        "pool": pool.why(),
        "plans": {**seen.as_dict(), "said": seen.sentences()},
        "cpu": {
            "mkl": "mkl" in torch.__config__.show().lower(),
            "openmp": "OpenMP" in torch.__config__.parallel_info(),
        },
        "cards": [
            {"name": torch.cuda.get_device_name(i), "bytes": torch.cuda.get_device_properties(i).total_memory}
            for i in range(torch.cuda.device_count() if cuda else 0)
        ],
    }
    return found


if __name__ == "__main__":
    print(json.dumps(look()))
