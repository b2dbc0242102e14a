"""Import transformers' models without torch's compiler and scipy's optimisers, which none of them uses in a run.

`transformers.masking_utils` and its neighbours import `torch._dynamo` for decorators that only matter to
`torch.compile`, and a loss for object detection imports `scipy.optimize`: together 63 MB and over a second of every
process. While `lean_imports` is active, small stand-ins answer for these modules: decorators that would tell the
compiler something return the function as it is, and functions load the real module when they are called. Anything else
asked of a stand-in loads the real module at once. Afterwards the stand-ins are gone, and an import gets the real ones.
The command line, whose process is skimp's own, keeps them (`stay_lean`). There transformers is told as well that there
is no torch.distributed: it would load tensors sharded over machines, 14 MB and a third of a second, for none.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

#: Decorators of `torch._dynamo` that change nothing outside `torch.compile`.
_DECORATORS = frozenset({"disable", "allow_in_graph", "assume_constant_result"})
#: module -> names that are only called later.
_CALLED_LATER = {
    "torch._dynamo._trace_wrapped_higher_order_op": ("TransformGetItemToIndex",),
    "scipy.optimize": ("linear_sum_assignment",),
}
_STAND_INS = ("torch._dynamo", *_CALLED_LATER)
#: A submodule that is loaded for real beside the stand-in: simulated tensors ask it for two settings.
_REAL_BESIDE = "torch._dynamo.config"


class _StandIn(ModuleType):
    """A module that is not loaded yet."""

    def __init__(self, name: str, path: list[str] | None) -> None:
        super().__init__(name)
        if path is not None:
            self.__path__ = path

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if self.__name__ == "torch._dynamo" and name in _DECORATORS:
            return _as_it_is
        if self.__name__ == "torch._dynamo" and name == "graph_break":
            return _as_it_is  # called without a function, for nothing, around every step of torch's optimizers
        if name in _CALLED_LATER.get(self.__name__, ()):
            return _later(self.__name__, name)
        return getattr(_real(self.__name__), name)


def _as_it_is(function: Callable[..., Any] | None = None, *_: Any, **__: Any) -> Any:
    """The decorator, bare or with arguments, that leaves its function alone."""
    return function if function is not None else _as_it_is


def _later(module: str, name: str) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return getattr(_real(module), name)(*args, **kwargs)

    return call


def _real(name: str) -> ModuleType:
    """The real module, all stand-ins withdrawn so that what it imports is real as well."""
    withdraw()
    return importlib.import_module(name)


class _Submodules(MetaPathFinder):
    """Any other submodule of a stand-in means that its package is wanted: load that first, whole."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        parent = fullname.rpartition(".")[0]
        if parent != "torch._dynamo" or fullname in (_REAL_BESIDE, *_CALLED_LATER):
            return None
        if not isinstance(sys.modules.get(parent), _StandIn):
            return None
        _real(parent)
        loaded = sys.modules.get(fullname)
        return None if loaded is None else ModuleSpec(fullname, _Loaded(loaded))


class _Loaded(Loader):
    """Gives the import machinery a module that its package has loaded meanwhile."""

    def __init__(self, module: ModuleType) -> None:
        self.module, self.spec = module, module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self.module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self.spec


_submodules = _Submodules()
#: Not empty once `stay_lean` was called.
_stays: list[bool] = []


def withdraw() -> None:
    """Take all stand-ins out of `sys.modules`; the next import gets the real modules."""
    if _submodules in sys.meta_path:
        sys.meta_path.remove(_submodules)
    for name in _STAND_INS:
        if isinstance(sys.modules.get(name), _StandIn):
            del sys.modules[name]


def stay_lean() -> None:
    """Stand-ins for the rest of this process: for a process that is skimp's own, where nothing is compiled.

    torch asks for its compiler at the first call of many functions (every optimizer's `step`), only to switch it off.
    """
    _stand_in()
    _stays.append(True)


def _stand_in() -> None:
    if _submodules not in sys.meta_path:
        sys.meta_path.insert(0, _submodules)
    for name in _STAND_INS:
        # Nothing stands in for a package that is not installed: who tries to import it must be told so.
        if name not in sys.modules and importlib.util.find_spec(name.partition(".")[0]) is not None:
            sys.modules[name] = _StandIn(name, _folder(name))


@contextmanager
def lean_imports() -> Iterator[None]:
    """Stand-ins for what is not loaded yet, for the imports inside. Nothing changes where `stay_lean` was called."""
    if any(isinstance(sys.modules.get(name), _StandIn) for name in _STAND_INS):
        if _stays:
            _alone()
        yield
        return
    _stand_in()
    try:
        yield
    finally:
        withdraw()


def _alone() -> None:
    """Let transformers believe that there is no torch.distributed, before it loads what needs it.

    Not in one of several processes (`torchrun`), and not where somebody has loaded sharded tensors already.
    """
    if "WORLD_SIZE" not in os.environ and "torch.distributed.tensor" not in sys.modules:
        distributed = importlib.import_module("torch.distributed")
        distributed.is_available = lambda: False  # type: ignore[attr-defined]


def _folder(name: str) -> list[str] | None:
    """Where a package's submodules are, so that they can be imported past its stand-in; None for a plain module."""
    if name != "torch._dynamo":
        return None
    found = importlib.util.find_spec("torch")
    return [f"{path}/_dynamo" for path in found.submodule_search_locations or ()] if found is not None else None
