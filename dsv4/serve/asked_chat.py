"""Requests to ``/v1/chat/completions``: a conversation as a prompt, and how its answer is read."""

import argparse
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dsv4.cli.prompt import build_chat_prompt, check_unicode
from dsv4.cli.tag_names import check_tag_names
from dsv4.encoding import detect_profile, fold_reasoning_effort, tool_calls_opening
from dsv4.errors import shorten
from dsv4.serve.answering import Question
from dsv4.serve.asked import check_model, question_of
from dsv4.serve.errors import ApiError, field_errors
from dsv4.serve.fields import ChatFields
from dsv4.serve.service import Service


@dataclass(frozen=True)
class ChatAsked:
    """A question, and how the answer to it is read: ``mode`` "chat" or "thinking", with ``tools``,
    behind an ``opening`` that the model was given. ``one_call``: the first of several is given;
    ``no_call``: a call is text.
    """

    question: Question
    mode: str
    tools: list[dict]
    opening: str
    one_call: bool
    no_call: bool


def chat_question(service: Service, fields: ChatFields) -> ChatAsked:
    """The question of a conversation. Raises ``ApiError``."""
    check_model(service, fields.model)
    effort = _effort(fields, service.folder)
    thinks = _thinks(fields, effort, service.thinks)
    opening = _opening(fields, thinks)
    no_call = fields.tool_choice == "none"
    request = {
        "messages": [_message(message, no_call) for message in fields.messages],
        "tools": None if no_call else fields.tools,
        "response_format": fields.response_format,
    }
    # The encoder would name the first message, which it moves them into.
    with field_errors("tools"):
        check_unicode(request["tools"], "tools")
        check_tag_names(request["tools"], "tools")
    with field_errors("response_format"):
        check_unicode(request["response_format"], "response_format")
    arguments = argparse.Namespace(
        messages=request,
        model=service.folder,
        thinking="on" if thinks else "off",
        reasoning_effort=effort if thinks else None,
        allow_control_tokens=False,
    )
    tokenizer = service.files.tokenizer
    with field_errors("messages"):
        prompt = build_chat_prompt(arguments, tokenizer, service.max_context, [])
    token_ids = tokenizer.encode(prompt.text + opening) if opening else prompt.token_ids
    question = question_of(service, fields, token_ids, _most_tokens(service, fields), _top(fields))
    mode = prompt.thinking_mode or "chat"
    question = replace(
        question,
        # The encoder drops the reasoning of earlier turns unless there are tools.
        forgets=mode == "thinking" and not prompt.tools,
        # The parser would take one that is ignored for the end.
        silent_token_ids=service.files.eos_token_ids,
    )
    one_call = fields.parallel_tool_calls is False
    return ChatAsked(question, mode, prompt.tools, opening, one_call, no_call)


def _message(message: dict[str, Any], hides_tools: bool) -> dict[str, Any]:
    """A message as the encoder reads it: OpenAI's developer is the system of earlier models."""
    if message.get("role") not in ("system", "developer"):
        return message
    system = {**message, "role": "system"}
    return {**system, "tools": None} if hides_tools else system


def _effort(fields: ChatFields, folder: Path) -> str | None:
    """The effort that is asked for, by either of its names; "none" is no reasoning. Raises
    ``ApiError`` for another effort than the checkpoint has, and for two that disagree.
    """
    inner = fields.chat_template_kwargs
    efforts = (fields.reasoning_effort, None if inner is None else inner.reasoning_effort)
    given = {effort for effort in efforts if effort is not None}
    for effort in given - {"none"}:
        with field_errors("reasoning_effort"):
            fold_reasoning_effort(effort, detect_profile(folder))
    if len(given) > 1:
        message = "reasoning_effort: found another than in chat_template_kwargs, expected one"
        raise ApiError(400, message, "reasoning_effort")
    return next(iter(given), None)


def _thinks(fields: ChatFields, effort: str | None, default: bool) -> bool:
    """Whether the model reasons first: by any of the fields that say so, which must agree."""
    inner = fields.chat_template_kwargs
    said = {
        "thinking": None if fields.thinking is None else fields.thinking.type == "enabled",
        "chat_template_kwargs.thinking": None if inner is None else inner.thinking,
        "chat_template_kwargs.enable_thinking": None if inner is None else inner.enable_thinking,
        "reasoning_effort": None if effort is None else effort != "none",
    }
    by_on = [name for name, value in said.items() if value is True]
    by_off = [name for name, value in said.items() if value is False]
    if by_on and by_off:
        message = f"{by_on[0]}: found thinking on, and off by {by_off[0]}, expected one of them"
        raise ApiError(400, message, by_on[0])
    return bool(by_on) or (default and not by_off)


def _opening(fields: ChatFields, thinks: bool) -> str:
    """The beginning of the answer that ``tool_choice`` asks for; nothing where the model is free to
    choose.
    """
    choice = fields.tool_choice
    if choice is None or choice in ("auto", "none"):
        return ""
    given = (fields.tools, *(message.get("tools") for message in fields.messages))
    names = [_name(tool) for tools in given if isinstance(tools, list) for tool in tools]
    name = _name(choice)
    if choice != "required" and (name is None or name not in names):
        expected = "auto, none, required or a function of tools"
        message = f"tool_choice: found {shorten(choice)}, expected {expected}"
        raise ApiError(400, message, "tool_choice")
    if not names:
        raise ApiError(400, "tool_choice: found required without tools", "tool_choice")
    if thinks:
        message = "found with thinking, in which a call cannot be forced, expected auto or none"
        raise ApiError(400, f"tool_choice: {message}", "tool_choice")
    return tool_calls_opening(name)


def _name(tool: object) -> str | None:
    """The name of a function in the OpenAI format."""
    function = tool.get("function") if isinstance(tool, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else None


def _most_tokens(service: Service, fields: ChatFields) -> int:
    """The limit by either of its names; without one the context's end."""
    limits = (fields.max_tokens, fields.max_completion_tokens)
    given = {limit for limit in limits if limit is not None}
    if len(given) > 1:
        message = "max_tokens: found another number than in max_completion_tokens, expected one"
        raise ApiError(400, message, "max_tokens")
    return next(iter(given), service.max_context)


def _top(fields: ChatFields) -> int | None:
    if fields.top_logprobs is not None and not fields.logprobs:
        message = "top_logprobs: found without logprobs, expected both"
        raise ApiError(400, message, "top_logprobs")
    return (fields.top_logprobs or 0) if fields.logprobs else None
