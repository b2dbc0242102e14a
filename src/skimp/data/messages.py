"""Conversations as people write them (OpenAI roles; `from`/`value` too) in one form, with their order checked."""

from __future__ import annotations

import json
from typing import Any

from skimp.core.errors import DataError

ROLES = ("system", "developer", "user", "assistant", "tool")
ALIASES = {"human": "user", "gpt": "assistant", "model": "assistant", "chatgpt": "assistant", "observation": "tool"}


class RowError(DataError):
    """One row is not as its kind must be; `reason` is its name in the counts of dropped rows."""

    def __init__(self, reason: str, asked: str, found: str = "", why: str = "", instead: Any = ()) -> None:
        super().__init__(asked, found, why, instead)
        self.reason = reason


def conversation(value: Any, where: str, complete: bool = True, answer: bool = False) -> list[dict[str, Any]]:
    """Turns as dicts with `role` and `content`, plus what else the row gives (`tool_calls`, `name`, …).

    Args:
        value: a list of turns, or its JSON.
        where: file and row, for messages.
        complete: False when the answer is given apart: turns up to it, in order.
        answer: True for that answer: assistant and tool turns alone.

    Raises:
        RowError: no list, a role that is not known or out of order, or content that is not text.
    """
    if isinstance(value, str):
        value = _from_json(value, where, "the conversation")
    if not isinstance(value, list) or not value:
        raise RowError(
            "not a conversation",
            f"{where}: a conversation, a list of {{role, content}}",
            "an empty list" if value == [] else f"{type(value).__name__}: {repr(value)[:60]}",
            instead='[{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}]',
        )
    turns = [_turn(turn, number, where) for number, turn in enumerate(value, 1)]
    _check_order(turns, where, begins="assistant" if answer else "user")
    if not complete and turns[-1]["role"] == "assistant":
        raise _disorder(where, len(turns), "assistant", "the prompt ends with the turn that is to be answered")
    return turns


def tools_of(value: Any, where: str) -> list[Any] | None:
    """The tools of a row: a list of function descriptions, or its JSON; None without any."""
    if value is None or value in ("", [], "[]"):
        return None
    tools = _from_json(value, where, "the tools") if isinstance(value, str) else value
    if not isinstance(tools, list):
        raise RowError("tools malformed", f"{where}: a list of tools", f"{type(tools).__name__}: {repr(tools)[:60]}")
    return tools


def _turn(turn: Any, number: int, where: str) -> dict[str, Any]:
    place = f"{where}, turn {number}"
    if not isinstance(turn, dict):
        raise RowError("not a conversation", f"{place}: {{role, content}}", f"{type(turn).__name__}: {repr(turn)[:60]}")
    turn = {k: v for k, v in turn.items() if v is not None}  # parquet gives every turn the keys of all
    if "role" not in turn and "from" in turn:
        turn["role"] = turn.pop("from")
        turn["content"] = turn.pop("value", None)
    role = turn.get("role")
    role = ALIASES.get(role, role) if isinstance(role, str) else role
    if role not in ROLES:
        raise RowError(
            "role unknown",
            f"{place}: a role",
            repr(role) if role is not None else f"keys {', '.join(turn)}",
            instead=f"one of {', '.join(ROLES)}",
        )
    out = {**turn, "role": role, "content": _content(turn.get("content"), place, "tool_calls" in turn)}
    if "tool_calls" in turn:
        out["tool_calls"] = [_call(call, place) for call in _list(turn["tool_calls"], place)]
    if "weight" in turn and turn["weight"] not in (0, 1):
        raise RowError("weight not 0 or 1", f"{place}: weight 0 or 1", repr(turn["weight"]), "a turn is trained or not")
    return out


def _content(value: Any, place: str, has_calls: bool) -> str:
    if isinstance(value, str):
        return value
    if value is None and has_calls:
        return ""
    if isinstance(value, list) and all(isinstance(p, dict) and isinstance(p.get("text"), str) for p in value):
        return "".join(p["text"] for p in value)
    raise RowError(
        "content not text",
        f"{place}: content that is text",
        "null" if value is None else f"{type(value).__name__}: {repr(value)[:60]}",
        "a language model reads text only" if isinstance(value, list) else "",
        'text, or parts of text [{"type": "text", "text": "…"}]',
    )


def _call(call: Any, place: str) -> Any:
    """Arguments that came as JSON text become the object they stand for, which is what templates print."""
    if isinstance(call, dict) and isinstance(call.get("function"), dict):
        return {**call, "function": _call(call["function"], place)}
    if isinstance(call, dict) and isinstance(call.get("arguments"), str):
        return {**call, "arguments": _from_json(call["arguments"] or "{}", place, "the arguments of a tool call")}
    return call


def _list(value: Any, place: str) -> list[Any]:
    if isinstance(value, list):
        return value
    raise RowError("tools malformed", f"{place}: a list of tool calls", f"{type(value).__name__}: {repr(value)[:60]}")


def _from_json(text: str, where: str, what: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RowError("not JSON", f"{where}: {what} as JSON", f"{str(error)[:80]}; it begins {text[:60]!r}") from None


#: Who may follow whom. A tool's result answers an assistant's call; several results may come in a row.
_AFTER = {
    "start": ("system", "developer", "user"),
    "system": ("user",),
    "developer": ("user",),
    "user": ("assistant",),
    "assistant": ("user", "tool"),
    "tool": ("tool", "assistant"),
}


def _check_order(turns: list[dict[str, Any]], where: str, begins: str) -> None:
    before = "start"
    for number, turn in enumerate(turns, 1):
        role = turn["role"]
        may = _AFTER[before] if before != "start" or begins == "user" else (begins,)
        if before == "assistant" and role == "tool" and "tool_calls" not in turns[number - 2]:
            raise _disorder(where, number, role, "no assistant turn before it calls a tool")
        if role not in may:
            wanted = " or ".join(may)
            raise _disorder(
                where, number, role, f"{'first' if before == 'start' else f'after {before}'} comes {wanted}"
            )
        before = role


def _disorder(where: str, number: int, role: str, why: str) -> RowError:
    return RowError(
        "roles out of order",
        f"{where}, turn {number}: roles in order",
        f"role {role}",
        why,
        ["mend the row: system, then user and assistant in turn, tool after an assistant's call",
         "data.bad_rows=drop leaves such rows out and counts them"],
    )  # fmt: skip
