"""Chat templates: a conversation as text, and where in it each assistant turn stands.

The template is the tokenizer's own (a Jinja program that came with the model, so it runs in Jinja's immutable
sandbox). A turn's place is found by rendering the conversation up to it: the text before the turn, with the
header that asks for an answer, is where the turn begins; the text up to and with the turn is where it ends. Both
must be beginnings of the whole text. A template for which they are not (one that drops the reasoning of earlier
turns) renders, at inference, other text than it would be trained on; it is refused with the turn named.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from skimp.core.errors import DataError, ModelError
from skimp.data.messages import RowError

#: Templates that print a date get this one, so that the same rows are the same tokens on every day.
DATE = datetime(2024, 7, 26)
#: An answer no row has.
PROBE = "\ue000"
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
#: Templates that can be named instead of a file.
BUILT_IN = {"chatml": CHATML}


def template_text(asked: str | None) -> str | None:
    """The text of `data.template`: a built-in name, or a file.

    Raises:
        DataError: neither.
    """
    if asked is None or asked in BUILT_IN:
        return BUILT_IN.get(asked or "")
    try:
        return Path(asked).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"data.template={asked}: a Jinja file, or {', '.join(BUILT_IN)}",
            getattr(error, "strerror", None) or str(error),
            instead="data.template=null takes the tokenizer's own",
        ) from None


def own_template(folder: str) -> str | None:
    """The chat template beside a tokenizer: `chat_template.jinja`, or the key in tokenizer_config.json."""
    alone = os.path.join(folder, "chat_template.jinja")
    if os.path.isfile(alone):
        return Path(alone).read_text(encoding="utf-8")
    config = os.path.join(folder, "tokenizer_config.json")
    if not os.path.isfile(config):
        return None
    found = json.loads(Path(config).read_text(encoding="utf-8")).get("chat_template")
    if isinstance(found, list):  # several, by name
        named = {t["name"]: t["template"] for t in found if isinstance(t, dict)}
        found = named.get("default")
    return found if isinstance(found, str) else None


class Chat:
    """Renders conversations.

    Args:
        template: the Jinja text; None when the tokenizer has none, which is refused at the first conversation.
        special: names templates use for tokens: {"bos_token": "<s>", …}.
        markers: texts of the tokenizer's special tokens; blank text after the one that ends a turn is not trained.
        location: the tokenizer, for messages.
    """

    def __init__(
        self,
        template: str | None,
        special: dict[str, str] | None = None,
        markers: Sequence[str] = (),
        location: str = "",
    ) -> None:
        self.source = template
        self.special = special or {}
        self.markers = tuple(m for m in markers if m.strip())
        self.location = location
        self._compiled: Any = None
        self._takes_tools = True

    def render(
        self, turns: list[dict[str, Any]], answers: Sequence[int], tools: list[Any] | None, where: str
    ) -> tuple[str, list[tuple[int, int]]]:
        """The whole text, and for each turn in `answers` (indices) its characters [start, end).

        Raises:
            RowError: the template refuses the conversation, leaves a turn out, or is not prefix-stable there.
            ModelError: there is no template, or it is no Jinja program.
        """
        whole = self.text(turns, tools, where)
        if tools is not None and not self._takes_tools:
            raise RowError(
                "template without tools",
                f"{where}: tools",
                "a chat template that has no place for tools",
                "the model would be trained as if there were none",
                ["data.template=FILE, one with tools", "data.fields.tools=none, if they are not meant to be read"],
            )
        spans = []
        for index in answers:
            asked = self.text(turns[:index], tools, where, ask=True)
            ended = whole if index == len(turns) - 1 else self.text(turns[: index + 1], tools, where)
            if not whole.startswith(ended):
                raise self._unstable(where, index, whole, ended)
            begin = _common(asked, ended)
            if begin < len(asked):
                # Some templates ask for an answer with more than its header ("<think>"). Then the header ends where
                # another answer would differ; what lies before it must be the same all the same.
                other = [*turns[:index], {**turns[index], "content": PROBE}]
                begin = min(begin, _common(self.text(other, tools, where), ended))
                if begin < _common(self.text(turns[:index], tools, where), asked):
                    raise self._unstable(where, index, whole, asked)
            end = begin + self._length(ended[begin:])
            if end == begin:
                raise RowError(
                    "turn left out by the template",
                    f"{where}, turn {index + 1}: the answer in the rendered text",
                    "nothing: the template leaves it out",
                    instead=["data.template=FILE, another template", "leave the row out"],
                )
            spans.append((begin, end))
        return whole, spans

    def text(self, turns: list[dict[str, Any]], tools: list[Any] | None, where: str, ask: bool = False) -> str:
        """The turns as text; with `ask` the header of an answer after them."""
        from jinja2 import TemplateError

        template = self._template(where)
        given = [{k: v for k, v in turn.items() if k != "weight"} for turn in turns]
        try:
            return str(template.render(messages=given, tools=tools, add_generation_prompt=ask, **self.special))
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError, RecursionError) as error:
            raise RowError(
                "refused by the template",
                f"{where}: a conversation the chat template can render",
                f"{len(turns)} turns ({', '.join(t['role'] for t in turns)[:80]}): {type(error).__name__}: {error}",
                instead=["mend the row, or leave it out (data.bad_rows=drop)", "data.template=FILE, another template"],
            ) from None

    def _length(self, answer: str) -> int:
        """Of an answer, without the blank text between its end token and the next turn."""
        bare = answer.rstrip()
        return len(bare) if bare.endswith(self.markers) and bare else len(answer)

    def _template(self, where: str) -> Any:
        if self._compiled is None:
            if not self.source:
                raise ModelError(
                    f"{where}: a conversation, to be rendered by the tokenizer's chat template",
                    f"the tokenizer {self.location} has none",
                    "how turns are marked is the model's own choice; a base model has made none",
                    ["data.template=FILE, the Jinja template of the model's chat version",
                     "data.template=chatml, for a model that is to learn it",
                     "rows of prompt and completion"],
                )  # fmt: skip
            self._compiled, self._takes_tools = _compile(self.source, self.location)
        return self._compiled

    def _unstable(self, where: str, index: int, whole: str, part: str) -> RowError:
        at = _common(whole, part)
        return RowError(
            "template not prefix-stable",
            f"{where}, turn {index + 1}: an answer whose text does not depend on what comes after it",
            f"rendered up to it, the conversation reads {part[at:at + 40]!r} after {at} characters; the whole one "
            f"{whole[at:at + 40]!r}",
            "the template changes earlier turns when later ones come (as those that drop reasoning do): trained on "
            "the whole, the model would see text it never sees when it answers",
            ["data.train_on=last trains the last answer alone, in just the text it is given at inference",
             "data.template=FILE, a template that keeps turns as they are"],
        )  # fmt: skip


def _compile(source: str, location: str) -> tuple[Any, bool]:
    """(template, whether it has a place for tools)."""
    from jinja2 import TemplateError, meta, nodes
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}…{% endgeneration %}`, with which some templates mark answers: its content, as it is."""

        tags = {"generation"}  # noqa: RUF012 - the name and form Jinja asks for

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)

    def refuse(message: str) -> None:
        raise TemplateError(message)

    def to_json(value: Any, indent: int | None = None, **more: Any) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent, **more)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation]
    )
    environment.filters["tojson"] = to_json
    environment.globals |= {"raise_exception": refuse, "strftime_now": lambda form: DATE.strftime(form)}
    try:
        tools = "tools" in meta.find_undeclared_variables(environment.parse(source))
        return environment.from_string(source), tools
    except TemplateError as error:
        raise ModelError(
            f"the chat template of {location}",
            f"line {getattr(error, 'lineno', '?')}: {error}",
            "it is no Jinja template",
            "data.template=FILE, another one",
        ) from None


def _common(one: str, other: str) -> int:
    """Characters both begin with."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
