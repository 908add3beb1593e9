"""The messages of a chat request to checked ones; knows no model. A refusal names its field, and never echoes input."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from router.fields import as_object, as_text
from slipstream.errors import InvalidRequestError
from slipstream.text.images import Still
from slipstream.text.videos import DEFAULT_FPS, Frames

_ROLES = ("system", "developer", "user", "assistant", "tool")
_IGNORED = ("role", "content", "name", "refusal", "annotations", "audio")
_OF_ROLE = {"assistant": ("tool_calls", "reasoning_content"), "tool": ("tool_call_id",)}
MIN_FPS, MAX_FPS = 0.01, 1000.0
MAX_SECONDS = 1e6


def checked_message(value: Any, where: str) -> dict[str, Any]:
    """A message as the template takes it, with every picture as a Still and every video as Frames; `where` names it."""
    message = as_object(value, where)
    role = message.get("role")
    if role not in _ROLES:
        raise InvalidRequestError(f"{where}.role must be one of {', '.join(_ROLES)}", field=f"{where}.role")
    for name, extra in message.items():
        if name not in _IGNORED and name not in _OF_ROLE.get(role, ()) and extra not in (None, [], {}):
            raise InvalidRequestError(f"{where}.{name[:64]} is not supported", field=f"{where}.{name[:64]}")
    checked: dict[str, Any] = {"role": "system" if role == "developer" else role}
    if calls := message.get("tool_calls"):
        if not isinstance(calls, list):
            raise InvalidRequestError(f"{where}.tool_calls must be a list", field=f"{where}.tool_calls")
        checked["tool_calls"] = [_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)]
    for name in ("reasoning_content", "tool_call_id"):
        if message.get(name) is not None:
            checked[name] = as_text(message[name], f"{where}.{name}")
    empty = role == "assistant" and message.get("content") in (None, []) and len(checked) > 1
    return {**checked, "content": "" if empty else _content(message.get("content"), where, role)}


def _call(value: Any, where: str) -> dict[str, Any]:
    """A call of an earlier turn, its arguments as an object."""
    call = as_object(value, where)
    function = as_object(call.get("function"), f"{where}.function")
    name, text = as_text(function.get("name"), f"{where}.function.name"), function.get("arguments")
    try:
        arguments = json.loads(as_text(text, f"{where}.function.arguments") or "{}")
        json.dumps(arguments, ensure_ascii=False).encode()  # half of a surrogate pair may hide in an escape
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"{where}.function.arguments is not valid JSON; send what the model said, or leave the "
                                  "call out", field=f"{where}.function.arguments") from error
    return {"id": as_text(call.get("id") or "", f"{where}.id"), "type": "function",
            "function": {"name": name, "arguments": as_object(arguments, f"{where}.function.arguments")}}


def _content(content: Any, where: str, role: str) -> str | list[dict[str, Any]]:
    field = f"{where}.content"
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise InvalidRequestError(f"{field} must be a string, or a non-empty list of parts", field=field)
    return [_part(part, f"{field}[{i}]", role) for i, part in enumerate(content)]


def _part(value: Any, where: str, role: str) -> dict[str, Any]:
    part = as_object(value, where)
    kind = part.get("type")
    if kind == "text":
        return {"type": "text", "text": as_text(part.get("text"), f"{where}.text")}
    if kind == "image_url":
        if role not in ("user", "tool"):
            raise InvalidRequestError(f"{where}: only a user message or a tool's may hold images", field=where)
        image = part.get("image_url")
        url = as_text(image.get("url") if isinstance(image, dict) else image, f"{where}.image_url.url")
        return {"type": "image", "image": Still(url=url, field=f"{where}.image_url")}
    if kind in ("video", "video_url"):
        if role != "user":
            raise InvalidRequestError(f"{where}: only a user message may hold videos", field=where)
        return {"type": "video", "video": _video(part, f"{where}.{kind}", part.get(kind))}
    raise InvalidRequestError(f"{where}.type must be text, image_url, video or video_url", field=f"{where}.type")


def _video(part: Mapping[str, Any], where: str, video: Any) -> Frames:
    """Frames with their times: `video` as a list of URLs of pictures, as Qwen's tools have it, or one URL of several, as vLLM
    has it: `data:video/jpeg;base64,` and the frames, with commas between."""
    options = {**(video if isinstance(video, dict) else {}), **part}
    url = video.get("url") if isinstance(video, dict) else video
    if isinstance(url, str) and url.lower().startswith("data:video/jpeg;base64,"):
        url = [f"data:image/jpeg;base64,{frame}" for frame in url.partition(",")[2].split(",")]
    if not isinstance(url, list) or not all(isinstance(frame, str) for frame in url):
        raise InvalidRequestError(f"{where} must be a list of frames, each the URL of a picture; video files are not decoded",
                                  field=where)
    if len(url) < 2:
        raise InvalidRequestError(f"{where} has {len(url)} frames; send two or more, or a picture as image_url", field=where)
    seconds = options.get("timestamps")
    if seconds is None:
        fps = _number(options.get("fps", DEFAULT_FPS), f"{where}.fps", MIN_FPS, MAX_FPS)
        seconds = [i / fps for i in range(len(url))]
    elif not isinstance(seconds, list) or len(seconds) != len(url):
        raise InvalidRequestError(f"{where}.timestamps must be a list of {len(url)} numbers, the seconds of each frame",
                                  field=f"{where}.timestamps")
    else:
        seconds = [_number(value, f"{where}.timestamps", 0, MAX_SECONDS) for value in seconds]
        if any(b <= a for a, b in pairwise(seconds)):
            raise InvalidRequestError(f"{where}.timestamps must ascend", field=f"{where}.timestamps")
    frames = tuple(Still(url=frame, field=f"{where}[{number}]") for number, frame in enumerate(url))
    return Frames(stills=frames, seconds=tuple(seconds), field=where)


def _number(value: Any, field: str, low: float, high: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise InvalidRequestError(f"{field} must be a number from {low:g} to {high:g}", field=field)
    return float(value)
