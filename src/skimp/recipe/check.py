"""Keys that are each right and together wrong: found all at once, each with both values and the way out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from skimp.core.errors import SkimpError, did_you_mean
from skimp.core.registry import facts, methods
from skimp.recipe.attention import known as known_attention
from skimp.recipe.codebooks import calibration, codebooks
from skimp.recipe.devices import resolve_gpu
from skimp.recipe.layers import DEFAULTS as LAYERS
from skimp.recipe.problem import Problem

if TYPE_CHECKING:
    from collections.abc import Iterator

    from skimp.recipe.schema import Recipe


def contradictions(recipe: Recipe) -> list[Problem]:
    """Every contradiction in a recipe whose single keys are valid."""
    return [
        *_length(recipe),
        *_mixture(recipe),
        *_schedule(recipe),
        *_evaluation(recipe),
        *_places(recipe),
        *_pinned(recipe),
        *_offload(recipe),
        *_method(recipe),
        *_compact(recipe),
        *_points(recipe),
        *_adapter(recipe),
        *_weights(recipe),
        *codebooks(recipe),
        *calibration(recipe),
        *_layers(recipe),
        *_restart(recipe),
        *_attention(recipe),
    ]


def _length(recipe: Recipe) -> Iterator[Problem]:
    train, seq_len = recipe.train, recipe.data.seq_len
    if train.steps is not None and train.epochs is not None:
        yield Problem(
            "train.steps",
            "either train.steps or train.epochs",
            f"steps {train.steps} and epochs {train.epochs:g}",
            "both say how long the run is",
            ("set the other to null: train.epochs=null or train.steps=null",),
        )
    rest = train.batch_tokens % seq_len
    if rest:
        below = train.batch_tokens - rest
        near = f"{below} or {below + seq_len}" if below else f"{seq_len}"
        yield Problem(
            "train.batch_tokens",
            "a multiple of data.seq_len",
            f"train.batch_tokens {train.batch_tokens}, data.seq_len {seq_len}",
            "a step is a whole number of rows of seq_len tokens",
            (f"train.batch_tokens {near}",),
        )


def _mixture(recipe: Recipe) -> Iterator[Problem]:
    entries = recipe.data.train
    weights = [None if isinstance(e, str) else e.weight for e in entries]
    bare = [i for i, w in enumerate(weights) if w is None]
    if len(bare) not in (0, len(entries)):
        yield Problem(
            f"data.train[{bare[0]}].weight",
            "a weight for every source, or for none",
            "none here, one elsewhere",
            "the shares of a mixture are those of all its rows",
            ("give it a weight", "take the others away: then each row comes once an epoch"),
        )
    if len(bare) == len(entries) and recipe.data.when_out != "repeat":
        yield Problem(
            "data.when_out",
            "repeat, when the sources have no weights",
            recipe.data.when_out,
            "without shares every row comes once an epoch, and no source runs out before another",
            ("data.when_out=repeat", "a weight for each source"),
        )


def _schedule(recipe: Recipe) -> Iterator[Problem]:
    train = recipe.train
    if train.schedule != "wsd" and train.decay is not None:
        yield Problem(
            "train.decay",
            "null, unless train.schedule is wsd",
            f"decay {train.decay:g} with schedule {train.schedule}",
            f"a {train.schedule} schedule has no tail of its own, so the value would be ignored",
            ("train.schedule=wsd", "train.decay=null"),
        )
    if train.schedule == "constant" and train.min_lr:
        yield Problem(
            "train.min_lr",
            "0, when train.schedule is constant",
            f"min_lr {train.min_lr:g}",
            "a constant schedule never falls, so the value would be ignored",
            ("train.schedule=cosine", "train.min_lr=0"),
        )
    if train.steps is not None and train.warmup >= 1 and train.warmup > train.steps:
        yield Problem(
            "train.warmup",
            "at most train.steps",
            f"warmup {train.warmup}, steps {train.steps}",
            "the run would end before the learning rate reaches lr",
            (f"train.warmup={train.steps} or less",),
        )
    warm = train.warmup if train.warmup < 1 else train.warmup / train.steps if train.steps else 0.0
    if train.decay is not None and warm + train.decay > 1 + 1e-9:
        yield Problem(
            "train.decay",
            "warm-up and decay within the run",
            f"warmup {warm:g} and decay {train.decay:g} of the run",
            "together they are longer than the run",
            (f"train.decay={max(1 - warm, 0):g} or less",),
        )


def _evaluation(recipe: Recipe) -> Iterator[Problem]:
    ev = recipe.eval
    if ev is None:
        return
    if recipe.data.validation is None:
        yield Problem(
            "eval",
            "null, when data.validation is null",
            "data.validation null and an eval section",
            "there is no held-out text to evaluate on",
            ("data.validation=0.05", "eval=null"),
        )
    sets = recipe.data.validation
    if ev.watch is not None and not (isinstance(sets, dict) and ev.watch in sets):
        named = list(sets) if isinstance(sets, dict) else []
        yield Problem(
            "eval.watch",
            "the name of a validation set",
            f"'{ev.watch}'",
            f"the sets are {', '.join(named)}" if named else "data.validation names none",
            tuple(f"eval.watch={name}" for name in named) or ("eval.watch=null: the only set",),
        )
    for key, wanted in (("keep_best", ev.keep_best), ("early_stop", ev.early_stop is not None)):
        if wanted and ev.every is None:
            yield Problem(
                f"eval.{key}",
                "eval.every beside it",
                "eval.every null",
                "without evaluations during the run there is nothing to compare",
                ("eval.every=100",),
            )
    if ev.keep_best and recipe.checkpoint.every is None and not recipe.checkpoint.at_end:
        yield Problem(
            "eval.keep_best",
            "checkpoints",
            "checkpoint.every null and checkpoint.at_end false",
            "a run that never saves cannot keep its best state",
            ("checkpoint.at_end=true",),
        )


def _places(recipe: Recipe) -> Iterator[Problem]:
    on_cpu = recipe.device == "cpu"
    if on_cpu and recipe.budget.device is not None:
        yield Problem(
            "budget.device",
            "null, when device is cpu",
            f"{recipe.budget.device} bytes",
            "a run on the CPU has no device memory",
            (f"budget.host={recipe.budget.device}", "device=cuda"),
        )
    if not on_cpu and recipe.device != "cuda":
        try:
            resolve_gpu(recipe.device)
        except SkimpError as error:
            yield Problem("device", "cpu, cuda, or a card", f"'{recipe.device}'", error.why, tuple(error.instead))


def _pinned(recipe: Recipe) -> Iterator[Problem]:
    rows = recipe.rows_per_step
    micro = recipe.exact.micro_batch
    if micro is not None and rows and micro > rows:
        yield Problem(
            "exact.micro_batch",
            f"at most {rows} rows",
            f"{micro}",
            f"a step has train.batch_tokens {recipe.train.batch_tokens} / data.seq_len "
            f"{recipe.data.seq_len} = {rows} rows",
            (f"exact.micro_batch={rows}", f"train.batch_tokens={micro * recipe.data.seq_len}"),
        )

    keep, again = recipe.exact.keep, recipe.exact.recompute
    if isinstance(keep, tuple):
        count = len(again) if isinstance(again, tuple) else again if isinstance(again, int) else None
        if count != len(keep):
            found = "null" if again is None else again if isinstance(again, str) else f"{count} blocks"
            yield Problem(
                "exact.keep",
                "a word for each recomputed block",
                f"{len(keep)} words and exact.recompute {found}",
                "each word is of one block that exact.recompute names or counts",
                (f"exact.recompute={len(keep)}", "exact.keep=nothing, for all of them"),
            )


def _offload(recipe: Recipe) -> Iterator[Problem]:
    asked = recipe.exact.offload
    for key in ("activations", "optimizer"):
        if recipe.device == "cpu" and getattr(asked, key) == "host":
            yield Problem(
                f"exact.offload.{key}",
                "disk, when device is cpu",
                "host",
                "a run on the CPU computes in host memory: what waits there has gone nowhere",
                (f"exact.offload.{key}=disk", "device=cuda, to plan for a card"),
            )
    if asked.blocks is not None and asked.activations in (None, "none"):
        yield Problem(
            "exact.offload.blocks",
            "exact.offload.activations host or disk beside it",
            f"activations {asked.activations or 'null'}",
            "the blocks named have nowhere to put what they keep",
            ("exact.offload.activations=disk", "exact.offload.blocks=null"),
        )
    if asked.blocks in (0, "none", ()) and asked.activations in ("host", "disk"):
        yield Problem(
            "exact.offload.blocks",
            "at least one block",
            "none",
            f"activations are to wait on {asked.activations}, and no block's do",
            ("exact.offload.activations=none", "exact.offload.blocks=null: those that the plan needs"),
        )


def _method(recipe: Recipe) -> Iterator[Problem]:
    name = recipe.optimizer.name
    try:
        facts(name, "update rule")
    except SkimpError as error:
        yield Problem("optimizer.name", "an update rule", f"'{name}'", "", tuple(error.instead))


def _compact(recipe: Recipe) -> Iterator[Problem]:
    if not recipe.optimizer.options().get("compact"):
        return
    if recipe.train.clip is not None:
        yield Problem(
            "train.clip",
            "null, when optimizer.compact is true",
            f"{recipe.train.clip:g}",
            "the norm to clip by is that of whole gradients, which compact ones never form",
            ("train.clip=null", "optimizer.compact=false: gradients are formed, 4 bytes a parameter in fp32"),
        )
    if recipe.adapter is not None:
        yield Problem(
            "optimizer.compact",
            "false, with an adapter",
            f"true, and adapter {recipe.adapter.name}",
            "the gradients of an addition are its own two thin matrices, which no projection makes smaller",
            ("optimizer.compact=false", "adapter=null: the whole weights train, in the subspace of their gradients"),
        )


def _points(recipe: Recipe) -> Iterator[Problem]:
    asked = recipe.activations.pamm
    if asked is not None and recipe.exact.recompute == "all":
        yield Problem(
            "activations.pamm",
            "null, when every block is recomputed",
            f"{asked.one_of} and exact.recompute all",
            "a recomputed block keeps its own input and nothing of its layers': gradients would change and no byte "
            "less would be kept",
            ("activations.pamm=null", "exact.recompute=null: as many blocks as the plan needs"),
        )


def _adapter(recipe: Recipe) -> Iterator[Problem]:
    adapter = recipe.adapter
    if adapter is None:
        return
    try:
        facts(adapter.name, "adapter")
    except SkimpError as error:
        yield Problem("adapter.name", "an adapter", f"'{adapter.name}'", "", tuple(error.instead))
    if adapter.name == "loftq" and recipe.model.weights is None:
        yield Problem(
            "adapter.name",
            "model.weights beside loftq",
            "loftq and model.weights null",
            "codes and product are fitted to each other, and without codes nothing is lost that a product makes up for",
            ("model.weights=nf4: 4.13 bits a weight, 0.52 bytes instead of 4", "adapter=lora: on the dense base"),
        )
    full = "embeddings" if adapter.embeddings else "head" if adapter.head else None
    if full and recipe.precision == "bf16" and recipe.optimizer.name == "adamw":
        yield Problem(
            f"adapter.{full}",
            "false, with precision bf16 and optimizer adamw",
            "true",
            "A and B are float32 and this matrix is bfloat16: one of adamw's two forms takes the first, the other the "
            "second",
            ("optimizer=adamw8bit: it takes both", "precision=bf16-mixed"),
        )


def _weights(recipe: Recipe) -> Iterator[Problem]:
    kept, rule = recipe.model.weights, recipe.optimizer.name
    rules = {name: known.trains for name, known in methods().items() if known.trains}
    if kept is None or recipe.adapter is not None or kept.name in rules.get(rule, ()):
        return
    ways = [f"optimizer={name}: trains the codes themselves" for name, codecs in rules.items() if kept.name in codecs]
    ways += [f"model.weights={codec}, which {rule} trains" for codec in rules.get(rule, ())]
    yield Problem(
        "model.weights",
        "an adapter beside it, or a rule that trains the codes",
        f"{kept.name}, adapter null and optimizer {rule}",
        "a rule that writes weights where they lie cannot move packed ones, so nothing would train",
        (
            *ways,
            "adapter=lora: small additions train beside them",
            "model.weights=null: the model itself trains",
        ),
    )


def _layers(recipe: Recipe) -> Iterator[Problem]:
    asked = recipe.train.layers
    if asked is not None and asked.name not in LAYERS:
        yield Problem(
            "train.layers.name",
            "a way to sample blocks",
            f"'{asked.name}'",
            "",
            (did_you_mean(asked.name, LAYERS),),
        )


def _restart(recipe: Recipe) -> Iterator[Problem]:
    asked, steps = recipe.train.restart, recipe.train.steps
    if asked is None:
        return
    if asked.refactor and recipe.adapter is None:
        yield Problem(
            "train.restart.refactor",
            "false, without an adapter",
            "true, and adapter null",
            "a weight that trains as it is has no two factors to balance",
            ("train.restart.refactor=false", "adapter=lora"),
        )
    if steps is not None and asked.every >= steps:
        yield Problem(
            "train.restart.every",
            f"below train.steps ({steps})",
            f"{asked.every}",
            "the run would end before the first restart",
            (f"train.restart.every={max(1, steps // 4)}", "train.restart=null"),
        )


def _attention(recipe: Recipe) -> Iterator[Problem]:
    asked = recipe.attention
    if asked is None:
        return
    if known_attention(asked.name) is None:
        names = [name for name, facts in methods().items() if facts.kind == "attention"]
        near = did_you_mean(asked.name, names)
        yield Problem("attention.name", "an attention of `skimp methods`", f"'{asked.name}'", "", (near,))
        return
    options = asked.options()
    reach = options["local"] * options["block"]
    if recipe.data.seq_len <= reach:
        yield Problem(
            "attention.local",
            f"fewer blocks than data.seq_len ({recipe.data.seq_len}) holds",
            f"{options['local']} of {options['block']} tokens",
            "the window is the whole row: every block is visited and nothing is saved",
            (f"attention.local={max(1, recipe.data.seq_len // options['block'] // 4)}", "attention=null"),
        )
