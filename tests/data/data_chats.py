"""Chat templates for the tests, each with a habit of its own, and rows that go with them."""

from __future__ import annotations

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{{ message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
#: A begin token and header tokens, content stripped; the end-of-turn token without a line break after it.
HEADERS = (
    "{{ bos_token }}{% for m in messages %}{{ '<|start|>' + m['role'] + '<|stop|>\n\n' }}"
    "{{ m['content'] | trim + '<|eot|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant<|stop|>\n\n' }}{% endif %}"
)
#: No special token at all: a blank after the header, a line break as the end.
BARE = (
    "{% for m in messages %}{{ m['role'] | capitalize }}: {{ m['content'] | trim }}\n{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
#: Puts a system turn first where the conversation has none.
DEFAULT_SYSTEM = (
    "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nBe good.<|im_end|>\n' }}{% endif %}" + CHATML
)
#: Drops the reasoning of every answer but the last; asks for an answer with more than its header.
DROPS_REASONING = (
    "{% for m in messages %}{% set text = m['content'] %}"
    "{% if m['role'] == 'assistant' and not loop.last and '</think>' in text %}"
    "{% set text = text.split('</think>')[-1] | trim %}{% endif %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + text + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
)
#: Marks answers with the tag that transformers knows, prints tools, stops a break in the order of roles itself.
TOOLS = (
    "{% if tools %}{{ '<|im_start|>system\n' + tools | tojson + '<|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' %}{% generation %}{% if m.tool_calls %}{% for c in m.tool_calls %}"
    "{{ '<call>' + c.function.name + ' ' + c.function.arguments | tojson + '</call>' }}{% endfor %}{% endif %}"
    "{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{% else %}{{ m['content'] + '<|im_end|>' }}{% endif %}"
    "{{ '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def turns(*contents: str, system: str | None = None) -> list[dict[str, str]]:
    """user, assistant, user, … with these contents."""
    first = [{"role": "system", "content": system}] if system is not None else []
    return first + [{"role": ("user", "assistant")[i % 2], "content": c} for i, c in enumerate(contents)]
