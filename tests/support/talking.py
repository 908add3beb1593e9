"""A checkpoint whose template knows tools and thinking, as Qwen's do; the demo model's in everything else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from slipstream.checkpoint import DEMO
from tests.support.scripted_router import picture

TEMPLATE = """
{%- if reasoning_effort is defined and reasoning_effort not in ('low', 'high') -%}
{{- raise_exception('no such effort: ' ~ reasoning_effort) -}}
{%- endif -%}
{%- if tools -%}
{{- '<|im_start|>system\\n# Tools\\n' -}}
{%- for tool in tools -%}{{- tool | tojson ~ '\\n' -}}{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
{{- '<|im_start|>' ~ message.role ~ '\\n' -}}
{%- if message.reasoning_content -%}{{- '<think>\\n' ~ message.reasoning_content ~ '\\n</think>\\n\\n' -}}{%- endif -%}
{%- if message.content is string -%}{{- message.content -}}
{%- else -%}
{%- for part in message.content -%}
{{- part.text if part.type == 'text' else '<|vision_start|><|' ~ part.type ~ '_pad|><|vision_end|>' -}}
{%- endfor -%}
{%- endif -%}
{%- for call in message.tool_calls or [] -%}
{{- '<tool_call>\\n<function=' ~ call.function.name ~ '>\\n' -}}
{%- for name, value in call.function.arguments | items -%}
{{- '<parameter=' ~ name ~ '>\\n' ~ (value if value is string else value | tojson) ~ '\\n</parameter>\\n' -}}
{%- endfor -%}
{{- '</function>\\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{{- '<|im_start|>assistant\\n' -}}
{%- if enable_thinking is defined -%}{{- '<think>\\n' if enable_thinking else '<think>\\n\\n</think>\\n\\n' -}}{%- endif -%}
"""

WEATHER: Any = {"type": "function", "function": {
    "name": "get_weather", "description": "Say the weather.", "parameters": {
        "type": "object", "required": ["city"], "properties": {
            "city": {"type": "string"}, "days": {"type": "integer"}, "units": {"type": ["string", "null"]}}}}}
CALLS = {
    "json": '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Žďár 🙂 北京", "days": 30}}\n</tool_call>',
    "xml": "<tool_call>\n<function=get_weather>\n<parameter=city>\nŽďár 🙂 北京\n</parameter>\n<parameter=days>\n30\n"
           "</parameter>\n</function>\n</tool_call>"}
"""One call, in both forms."""
ARGUMENTS = {"city": "Žďár 🙂 北京", "days": 30}


PIXELS = picture(32, 32)["image_url"]["url"]
CALL: Any = {"id": "1", "type": "function", "function": {"name": "get_weather", "arguments": '{"a": 1}'}}
TALK: Any = {"model": "demo_model", "tools": [WEATHER], "tool_choice": "auto", "messages": [
    {"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "image_url", "image_url": {"url": PIXELS}}]},
    {"role": "assistant", "content": None, "reasoning_content": "r", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "1", "content": "y"}]}
ITEMS: Any = {"model": "demo_model", "text": {"format": {"type": "text"}},
                         "tools": [{"type": "function", **WEATHER["function"]}], "input": [
    {"role": "user", "content": [{"type": "input_text", "text": "x"}, {"type": "input_image", "image_url": PIXELS}]},
    {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "r"}]},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "t"}]},
    {"type": "function_call", "call_id": "1", "name": "get_weather", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "1", "output": "y"}]}
"""Conversations with a bit of everything, for chat completions and for responses."""


def replaced(node: Any, path: list[int], value: Any) -> Any:
    """`node` with one value inside replaced; `path` says which, by numbers of any size."""
    if not path or not isinstance(node, dict | list) or not node:
        return value
    keys = list(node) if isinstance(node, dict) else list(range(len(node)))
    key = keys[path[0] % len(keys)]
    whole = dict(node) if isinstance(node, dict) else list(node)
    whole[key] = replaced(node[key], path[1:], value)
    return whole


def checkpoint(folder: Path) -> Path:
    """Without weights, which no router reads."""
    path = folder / "talking"
    path.mkdir()
    for file in DEMO.iterdir():
        if file.name not in ("chat_template.jinja", "model.safetensors"):
            (path / file.name).symlink_to(file)
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return path
