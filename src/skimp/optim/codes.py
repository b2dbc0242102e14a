"""An update of a weight that is kept in codes: decoded, moved as any weight is, rounded back at random."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor

from skimp.core.coded_trained import codes_of, decoded, put
from skimp.core.errors import SkimpError
from skimp.optim.options import check_layout

if TYPE_CHECKING:
    from skimp.optim.base import UpdateRule


@contextmanager
def numbers(rule: UpdateRule, p: Tensor, state: Mapping[str, Any]) -> Iterator[Tensor]:
    """What an update moves in place: `p` itself; of a stand-in the decoded weight, where its state is.

    The codes take it when the block ends well, with the noise of the rule's seed, the weight's name and its step; an
    update that breaks off leaves them as they were.
    """
    module = codes_of(p)
    if module is None:
        yield p
        return
    # States on the host of a card are updated there, and the weight beside them.
    where = next((v.device for v in state.values() if isinstance(v, Tensor)), p.device)
    w = decoded(module).to(where)
    yield w
    seed, step = int(rule.group_of(p).get("seed", 0)), int(state["step"])
    put(module, w.to(p.device), seed, rule.name_of(p), step)


def check_written(rule: UpdateRule, name: str, p: Tensor) -> None:
    """Refuse a parameter that the rule cannot write: a stand-in, where it moves weights as they lie, or one that does
    not lie in row-major order.

    Raises:
        SkimpError: with the nearest rule that trains codes, or the strides.
    """
    module = codes_of(p)
    if module is None:
        check_layout(rule.rule, name, p)
    elif not rule.trains_codes:
        raise SkimpError(
            f"{rule.rule} on '{name}' in codec '{module.codec.name}'",
            "codes that a rule must decode and round back at random",
            "written in place of them, every move smaller than a step between levels would be lost",
            "q-galore, which trains int8 weights",
        )
