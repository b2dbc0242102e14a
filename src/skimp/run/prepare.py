"""What a session needs before any weight is loaded: the text, the length of the run, the sample's prompt.

Everything that can be refused from the data alone is refused here, so that a wrong row costs seconds and not
a loaded model.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from skimp.core.errors import DataError, ModelError
from skimp.core.schedule import Schedule
from skimp.data import MixedStream, PreparedText, StreamedText, TextData, prepare
from skimp.data.kinds import Fields
from skimp.data.textdata import TrainSource
from skimp.data.vocabulary import check_vocabulary
from skimp.run.sample import in_child
from skimp.run.voice import Voice


@dataclass(frozen=True)
class Text:
    """The text of a run, made ready.

    Attributes:
        prepared: rows of training and validation.
        schedule: the learning rate of every step, hence the number of steps.
        prompt: ids of the sample's prompt and the end token; None without a sample.
        tokenizer: where the tokenizer is.
    """

    prepared: PreparedText
    schedule: Schedule
    prompt: dict[str, Any] | None
    tokenizer: Path

    def bytes_on_disk(self) -> int:
        """Of the token files that the run reads; of a stream, what was cached of it."""
        report = self.prepared.report
        folders = {Path(one.folder) for one in (*report.trains, *report.validations) if one.folder}
        return sum(file.stat().st_size for folder in folders if folder.is_dir() for file in folder.iterdir())


def prepare_text(recipe: Any, config: dict[str, Any], tokenizer: Path, voice: Voice) -> Text:
    """Tokenise in a child process what is not in the cache, and settle how long the run is.

    Args:
        recipe: the run.
        config: content of the model's HF `config.json`.
        tokenizer: a folder, tokenizer.json or GGUF file.
        voice: told of progress, of what became of every row, and of adjustments.

    Raises:
        DataError: missing, empty or malformed text, or no held-out text to evaluate on.
        ModelError: the tokenizer does not go with the model, or the sample is longer than its positions.
    """
    _check_length_known(recipe)
    data = text_data(recipe)
    prompt = _prompt(recipe, config, tokenizer)
    prepared = prepare(data, tokenizer, vocabulary=config["vocab_size"], progress=voice.reading)
    for line in prepared.report.lines():
        voice.say(line)
    if recipe.eval is not None and not prepared.validations:
        raise DataError("eval: held-out text", "no validation set", instead=["data.validation=0.05", "eval=null"])
    schedule = make_schedule(recipe, prepared.rows_per_epoch, prepared.rows_in_all)
    if recipe.train.epochs is not None:
        rows = recipe.rows_per_step
        voice.say(f"{recipe.train.epochs:g} epochs are {schedule.steps} optimizer steps of {rows} rows")
    for line in _shares(recipe, prepared, schedule):
        voice.say(line)
    if isinstance(recipe.train.warmup, int) and schedule.warmup_steps < recipe.train.warmup:
        voice.say(f"train.warmup {recipe.train.warmup}: {schedule.warmup_steps}, so that the run reaches its lr")
    return Text(prepared, schedule, prompt, tokenizer)


def text_data(recipe: Any) -> TextData:
    """The data room's description of the recipe's text."""
    data = recipe.data
    if data.validation is None and data.validation_tokens is not None:
        raise DataError(
            f"data.validation_tokens={data.validation_tokens}",
            "data.validation=null",
            "null holds nothing out, so the value would be ignored",
            ["data.validation=0.05", "data.validation_tokens=null"],
        )
    return TextData(
        train=[e if isinstance(e, str) else TrainSource(**e.model_dump()) for e in data.train],
        when_out=data.when_out,
        seq_len=data.seq_len,
        validation=data.validation,
        validation_tokens=data.validation_tokens,
        packing=data.packing,
        too_long=data.too_long,
        field=data.field,
        format=data.format,
        fields=Fields(**data.fields.model_dump()),
        train_on=data.train_on,
        template=data.template,
        bad_rows=data.bad_rows,
        encoding=data.encoding,
        seed=data.seed,
        streaming=data.streaming,
    )


def make_schedule(recipe: Any, rows_per_epoch: int | None, rows_in_all: int | None = None) -> Schedule:
    """The learning-rate schedule over the run's optimizer steps.

    `epochs` are counted in whole steps: the rows of a last, smaller step are left out. A text that has `rows_in_all`
    and no more ends the run, so its last step is the schedule's.
    """
    train = recipe.train
    steps = train.steps
    if steps is None:
        if rows_per_epoch is None:
            raise _unknown_length()
        steps = max(1, int(train.epochs * rows_per_epoch // recipe.rows_per_step))
    if rows_in_all is not None:
        steps = min(steps, rows_in_all // recipe.rows_per_step)
        if steps == 0:
            raise DataError(
                "data.when_out=stop: rows for one optimizer step at least",
                f"{rows_in_all} rows until a source runs out, and {recipe.rows_per_step} in a step",
                instead=["data.when_out=repeat", f"train.batch_tokens={recipe.data.seq_len}"],
            )
    warmup = train.warmup
    if isinstance(warmup, int) and warmup >= steps:
        warmup = max(0, steps - 1)  # a shortened run (three steps of the quickstart) still reaches its rate
    return Schedule(
        train.lr,
        steps,
        train.schedule,
        warmup,
        train.min_lr,
        train.decay if train.decay is not None else 0.2,
    )


def _shares(recipe: Any, prepared: PreparedText, schedule: Schedule) -> list[str]:
    """How often each source of a mixture is gone through in this run."""
    rows = schedule.steps * recipe.rows_per_step
    lines = [
        f"mixture: {share:.1%} of the rows from {name}, {share * rows:,.0f} in {schedule.steps} steps: "
        f"its {has:,} rows {share * rows / has:.2f} times over"
        for name, share, has in prepared.shares
    ]
    if prepared.rows_in_all is not None and recipe.train.steps is not None and schedule.steps < recipe.train.steps:
        lines.append(f"data.when_out=stop: {schedule.steps} of {recipe.train.steps} steps, then a source runs out")
    return lines


def _check_length_known(recipe: Any) -> None:
    if recipe.train.steps is None and recipe.data.streaming:
        raise _unknown_length()


def _unknown_length() -> DataError:
    return DataError(
        "train.epochs of a streamed text",
        "its length is not known before it was read",
        "the learning-rate schedule needs the number of steps from the first one on",
        ["train.steps=…", "data.streaming=false"],
    )


def _prompt(recipe: Any, config: dict[str, Any], tokenizer: Path) -> dict[str, Any] | None:
    from skimp.recipe.families import max_positions

    if recipe.sample is None:
        return None
    found: dict[str, Any] = in_child(str(tokenizer), {"encode": recipe.sample.prompt})
    if not found["ids"]:
        raise ModelError(
            f"sample.prompt {recipe.sample.prompt!r}", "no tokens", "a model needs one token to go on from"
        )
    check_vocabulary(max(found["ids"]), found["size"], config["vocab_size"], "sample.prompt")
    limit, length = max_positions(config), len(found["ids"]) + recipe.sample.tokens
    if limit is not None and length > limit:
        raise ModelError(
            f"sample: {len(found['ids'])} tokens of prompt and {recipe.sample.tokens} more",
            f"the model has {limit} positions",
            instead=f"sample.tokens={limit - len(found['ids'])}"
            if limit > len(found["ids"])
            else "a shorter sample.prompt",
        )
    return found


def given(stream: Any) -> dict[str, Any]:
    """What the stream gave up to now: steps, trained tokens, rows by source of a mixture, counts of a streamed text."""
    found: dict[str, Any] = {"steps": stream.steps, "trained_tokens": stream.trained_tokens}
    if isinstance(stream, MixedStream):
        found["sources"] = stream.given()
    if isinstance(stream, (MixedStream, StreamedText)):
        found["read"] = asdict(stream.total())
    return found
