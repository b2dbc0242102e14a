"""Models that cannot be simulated: their next operator depends on a value, and simulated tensors have none.

A forward that branches on a tensor (`if mask.all()`), reads one (`.item()`) or makes a tensor whose shape is data
(`nonzero`) stops a simulation, and so does an operator whose simulated form takes fewer dtypes than its real one (the
grouped products of experts, in float32). The error names module and operator. A run on the CPU is then planned from
*measured* steps instead: the same few blocks, with random weights, on real tensors under the same tracker, in a process
of their own. Where planes are fitted and proved through small depths, only those are ever run.
"""

from __future__ import annotations

import contextlib
import json
import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any, ParamSpec

from torch import nn
from torch._subclasses import fake_tensor

from skimp.core.child import child_environment, last_words
from skimp.core.errors import ModelError, SkimpError
from skimp.core.memory.tracker import Tracker
from skimp.plan.profile import MemoryProfile

P = ParamSpec("P")
#: What torch raises when a simulated operator would need a value.
NEEDS_VALUES = (
    fake_tensor.DataDependentOutputException,
    fake_tensor.DynamicOutputShapeException,
    fake_tensor.UnsupportedOperatorException,
)
#: Options of a simulation that a measured one cannot give.
ONLY_SIMULATED = ("timeline", "trace")


class CannotSimulate(ModelError):
    """A module whose operators depend on values; names both."""


@contextlib.contextmanager
def told(model: nn.Module, tracker: Tracker) -> Iterator[None]:
    """Inside, an operator that needs values is reported with the module that called it.

    Raises:
        CannotSimulate: in place of torch's exception.
    """
    said = logging.getLogger(fake_tensor.__name__)  # it prints a traceback of its own before it raises
    was, said.disabled = said.disabled, True
    try:
        yield
    except (*NEEDS_VALUES, RuntimeError) as error:
        reads = isinstance(error, NEEDS_VALUES)
        operator = getattr(error, "func", error) if reads else _without_form(error)
        if operator is None:
            raise
        module = _innermost(model, error) or tracker.owner or "outside the model's modules"
        raise CannotSimulate(
            f"simulating a step of {type(model).__name__}",
            f"{operator} in {module} ({type(model.get_submodule(module)).__name__})"
            if module in dict(model.named_modules())
            else f"{operator} in {module}",
            "its result depends on values, and simulated tensors have shapes only"
            if reads
            else f"its simulated form refuses what it is given: {str(error).strip().splitlines()[0]}",
            ["device=cpu: there a few blocks are measured instead", "a model without control flow that reads tensors"],
        ) from error
    finally:
        said.disabled = was


def _without_form(error: BaseException) -> Any:
    """The operator whose simulated form raised this; None where the error came from elsewhere."""
    operator, inside, at = None, False, error.__traceback__
    while at is not None:
        code = at.tb_frame.f_code
        if code.co_filename == fake_tensor.__file__:
            operator = at.tb_frame.f_locals.get("func", operator)
        inside = inside or code.co_filename.endswith("_meta_registrations.py")
        at = at.tb_next
    return operator if inside else None


def _innermost(model: nn.Module, error: BaseException) -> str | None:
    """The module whose method the error came from, by the frames it went through."""
    names = {id(module): name for name, module in model.named_modules() if name}
    found, at = None, error.__traceback__
    while at is not None:
        found = names.get(id(at.tb_frame.f_locals.get("self")), found)
        at = at.tb_next
    return found


def or_measured(simulate: Callable[P, MemoryProfile]) -> Callable[P, MemoryProfile]:
    """`simulate`, which measures on the CPU what it cannot simulate."""

    @wraps(simulate)
    def either(*args: P.args, **kwargs: P.kwargs) -> MemoryProfile:
        options: dict[str, Any] = dict(kwargs)
        try:
            return simulate(*args, **kwargs)
        except CannotSimulate as error:
            asked_more = any(options.get(name) for name in ONLY_SIMULATED)
            if options.get("target", "cpu") != "cpu" or options.get("real") or asked_more:
                raise
            positional: tuple[Any, ...] = args
            recipe, exact, config, *_ = positional
            return measured(recipe, exact, config, options, error.found)

    return either


def measured(recipe: Any, exact: Any, config: dict[str, Any], options: dict[str, Any], why: str) -> MemoryProfile:
    """The profile of the same steps taken on real tensors in a child process.

    Args:
        recipe, exact, config: as `simulate`.
        options: its keyword arguments.
        why: what could not be simulated; the profile carries it.

    Raises:
        SkimpError: the child ended without an answer; says how.
    """
    from dataclasses import asdict, replace

    from skimp.plan import stored

    rates = options.get("rates")
    words = {
        "recipe": recipe.as_dict(), "exact": exact.as_dict(), "config": config,
        "rates": None if rates is None else asdict(rates),
        "options": {k: v for k, v in options.items() if k not in ("rates", *ONLY_SIMULATED)},
    }  # fmt: skip
    return replace(stored.decoded(json.loads(_child(json.dumps(words)))), measured=why)


def _child(words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "skimp.plan.unfakeable"],
        input=words,
        capture_output=True,
        text=True,
        check=False,
        env=child_environment(TRANSFORMERS_VERBOSITY="error"),
    )
    if done.returncode:
        raise SkimpError(
            "measuring a step of a model that cannot be simulated",
            f"exit code {done.returncode}: {last_words(done.stderr)}",
            "the system ends a process that takes more memory than there is" if done.returncode == -9 else "",
            "a smaller data.seq_len or train.batch_tokens",
        )
    return done.stdout


def take(words: str) -> str:
    """What the child does: the steps on real tensors, and their profile as JSON."""
    from skimp.core.exact import ExactChoices
    from skimp.plan import stored
    from skimp.plan.cost import Rates
    from skimp.plan.simulate import simulate
    from skimp.recipe import load_recipe

    asked = json.loads(words)
    options: dict[str, Any] = asked["options"]
    if asked["rates"] is not None:
        options["rates"] = Rates(**asked["rates"])
    exact = ExactChoices.from_dict(asked["exact"])
    profile = simulate(load_recipe(asked["recipe"], []), exact, asked["config"], **options, real=True)
    return json.dumps(stored.encoded(profile))


if __name__ == "__main__":
    # Whatever a library prints goes to stderr: the answer is the only line of stdout.
    answer, sys.stdout = sys.stdout, sys.stderr
    print(take(sys.stdin.read()), file=answer)
