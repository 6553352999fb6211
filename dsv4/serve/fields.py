"""The fields of requests: which there are, their types and their ranges."""

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dsv4.cli.prompt import check_unicode
from dsv4.errors import shorten
from dsv4.serve.errors import ApiError, field_errors

MAX_TOP_LOGPROBS = 20
MAX_STOP_STRINGS = 64
# They change no answer.
IGNORED = frozenset(
    "user metadata store service_tier safety_identifier prompt_cache_key "
    "prompt_cache_retention".split()
)
# With any other value they would change it, and nothing here does what they ask for.
NEUTRAL: dict[str, Any] = {
    "n": 1,
    "best_of": 1,
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "repetition_penalty": 1,
    "logit_bias": {},
    "min_tokens": 0,
    "modalities": ["text"],
    "suffix": "",
}

_AnswerTokens = Annotated[int, Field(ge=1, lt=2**31)]
_Top = Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)]


class Fields(BaseModel):
    """An object of a request; other fields are refused, and so is a value of another type."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class StreamOptions(Fields):
    """How an answer is streamed."""

    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class CommonFields(Fields):
    """What both kinds of requests have. None, also given as null: not said."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, Field(ge=0)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    stop: Any = None
    ignore_eos: bool | None = None


class Thinking(Fields):
    """The switch of DeepSeek's API."""

    type: Literal["enabled", "disabled"]


class TemplateArguments(Fields):
    """The same by the names of chat templates."""

    thinking: bool | None = None
    enable_thinking: bool | None = None
    reasoning_effort: str | None = None


class ChatFields(CommonFields):
    """``/v1/chat/completions``. Messages, tools and formats are checked by their encoder."""

    messages: list[dict[str, Any]]
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    response_format: dict[str, Any] | None = None
    logprobs: bool | None = None
    top_logprobs: _Top | None = None
    max_tokens: _AnswerTokens | None = None
    max_completion_tokens: _AnswerTokens | None = None
    reasoning_effort: str | None = None
    thinking: Thinking | None = None
    chat_template_kwargs: TemplateArguments | None = None


class CompletionFields(CommonFields):
    """``/v1/completions``. A prompt is a text, or token ids; or there are several of either."""

    prompt: Any
    max_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None  # 0 with an echo
    echo: bool | None = None
    logprobs: _Top | None = None


_Kind = TypeVar("_Kind", bound=CommonFields)


def read_fields(kind: type[_Kind], raw: dict[str, Any]) -> _Kind:
    """The fields of a request. Raises ``ApiError`` that names the first one that is wrong."""
    for name, neutral in NEUTRAL.items():
        value = raw.get(name)
        same = value == neutral and isinstance(value, bool) == isinstance(neutral, bool)
        if value is not None and not same:
            message = f"{name}: found {shorten(value)}, expected {neutral!r}: it is not supported"
            raise ApiError(400, message, name, "unsupported_parameter")
    left = {key: raw[key] for key in raw if key not in IGNORED and key not in NEUTRAL}
    try:
        fields = kind.model_validate(left)
    except ValidationError as error:
        raise _wrong_field(error) from None
    if fields.stream_options is not None and not fields.stream:
        raise ApiError(400, "stream_options: found without stream, expected both", "stream_options")
    return fields


def stop_strings(stop: Any) -> tuple[str, ...]:
    """The strings of ``stop``: one, or a list of them. Raises ``ApiError``."""
    texts = [stop] if isinstance(stop, str) else [] if stop is None else stop
    fits = isinstance(texts, list) and len(texts) <= MAX_STOP_STRINGS
    if not fits or not all(isinstance(text, str) and text for text in texts):
        expected = f"a string, or a list of up to {MAX_STOP_STRINGS}, none of them empty"
        raise ApiError(400, f"stop: found {shorten(stop)}, expected {expected}", "stop")
    with field_errors("stop"):
        check_unicode(stop, "stop")
    return tuple(texts)


def _wrong_field(errors: ValidationError) -> ApiError:
    first = errors.errors(include_url=False)[0]
    # For a name that is not Unicode pydantic gives no place, only the name.
    named = bool(first["loc"])
    place = ".".join(map(_shown, first["loc"] if named else (first["input"],)))[:80]
    if first["type"] == "extra_forbidden" or not named:
        return ApiError(400, f"{place}: found an unknown field", place, "unknown_parameter")
    if first["type"] == "missing":
        return ApiError(400, f"{place}: found none, expected it", place, "missing_parameter")
    expected = first["msg"].replace("Input should be ", "")
    return ApiError(400, f"{place}: found {shorten(first['input'])}, expected {expected}", place)


def _shown(name: str | int) -> str:
    """The name, in quotes where a line cannot show it as it is."""
    text = str(name)
    return text if text and text.isprintable() else repr(text)
