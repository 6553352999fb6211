"""Requests to questions: sampling, limits, and prompts of ``/v1/completions``."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from dsv4.cli.generation_defaults import choose, temperature
from dsv4.cli.prompt import check_unicode, encode_text
from dsv4.cli.stream import text_of
from dsv4.errors import UserError, shorten
from dsv4.sampling import SamplingParams
from dsv4.serve.answering import Question
from dsv4.serve.errors import TOO_LONG, ApiError, field_errors
from dsv4.serve.fields import CommonFields, CompletionFields, stop_strings
from dsv4.serve.service import Service
from dsv4.token_ids import check_ids

DEFAULT_COMPLETION_TOKENS = 16
# OpenAI's; a body has room for millions, and each takes far more memory than its bytes.
MAX_PROMPTS = 2048


@dataclass(frozen=True)
class EchoedPrompt:
    """A prompt as the client gave it: ``text``, and its ``token_ids`` without the
    beginning-of-sequence token that was put in front.
    """

    text: str
    token_ids: list[int]


def check_model(service: Service, name: str | None) -> None:
    """Raises ``ApiError`` for another model than the one that is served."""
    if name is not None and name != service.model_name:
        message = f"model: found {shorten(name)}, expected {service.model_name!r}"
        raise ApiError(404, message, "model", "model_not_found")


def sampling_of(service: Service, fields: CommonFields, logprobs: int | None) -> SamplingParams:
    """Each value from its field, else from generation_config.json, else the default."""
    defaults = service.files.generation
    asked_top_k = None if fields.top_k is None else max(fields.top_k, 0)
    return SamplingParams(
        temperature=temperature(fields.temperature, defaults),
        top_p=choose(fields.top_p, defaults, "top_p", 1.0),
        min_p=choose(fields.min_p, defaults, "min_p", 0.0),
        seed=fields.seed,
        top_k=choose(asked_top_k, defaults, "top_k", 0),
        logprobs=logprobs,
    )


def question_of(
    service: Service,
    fields: CommonFields,
    token_ids: list[int],
    max_tokens: int,
    logprobs: int | None,
    scores_prompt: bool = False,
) -> Question:
    """The question of a prompt. Raises ``ApiError`` for one that the context cannot hold."""
    param = "prompt" if isinstance(fields, CompletionFields) else "messages"
    _check_length(service, token_ids, param)
    files = service.files
    stops = frozenset() if fields.ignore_eos else files.eos_token_ids
    return Question(
        token_ids,
        max_tokens,
        sampling_of(service, fields, logprobs),
        stop_strings(fields.stop),
        stops,
        scores_prompt,
    )


def _check_length(service: Service, token_ids: list[int], param: str) -> None:
    """Raises ``ApiError`` for a prompt that the context cannot hold."""
    if len(token_ids) > service.max_context:
        message = f"{param}: found a prompt of {len(token_ids)} tokens, expected at most"
        raise ApiError(400, f"{message} {service.max_context}", param, TOO_LONG)


def completion_questions(
    service: Service, fields: CompletionFields
) -> tuple[list[Question], list[EchoedPrompt]]:
    """The questions of ``/v1/completions``, one for each prompt. Raises ``ApiError``."""
    check_model(service, fields.model)
    tokens = DEFAULT_COMPLETION_TOKENS if fields.max_tokens is None else fields.max_tokens
    if tokens == 0 and not fields.echo:
        raise ApiError(400, "max_tokens: found 0 without echo, expected 1 or more", "max_tokens")
    scores = bool(fields.echo) and fields.logprobs is not None
    questions = []
    echoed = []
    prompts = _prompts(fields.prompt)
    for index, prompt in enumerate(prompts):
        with _which_prompt(index, len(prompts)):
            with field_errors("prompt"):
                token_ids, shown = _encoded(service, prompt)
            question = question_of(service, fields, token_ids, tokens, fields.logprobs, scores)
        questions.append(question)
        echoed.append(shown)
    return questions, echoed


@contextmanager
def _which_prompt(index: int, count: int) -> Iterator[None]:
    """What is wrong with one of several prompts names which."""
    try:
        yield
    except ApiError as error:
        if count == 1 or error.param != "prompt":
            raise
        message = f"prompt[{index}]: {str(error).removeprefix('prompt: ')}"
        raise ApiError(error.status, message, error.param, error.code) from None


def _prompts(prompt: Any) -> list[str | list[int]]:
    """One or several prompts as a list of them."""
    several = isinstance(prompt, list) and (not prompt or isinstance(prompt[0], str | list))
    prompts = prompt if several else [prompt]
    kinds = {type(one) for one in prompts}
    if len(kinds) != 1 or not kinds <= {str, list}:
        expected = "a text, token ids, or a list of either"
        raise ApiError(400, f"prompt: found {shorten(prompt)}, expected {expected}", "prompt")
    if len(prompts) > MAX_PROMPTS:
        found = f"found {len(prompts)} prompts, expected at most {MAX_PROMPTS}"
        raise ApiError(400, f"prompt: {found}", "prompt")
    return prompts


def _encoded(service: Service, prompt: str | list[int]) -> tuple[list[int], EchoedPrompt]:
    """Token ids are taken as they are, a text gets the beginning-of-sequence token in front."""
    tokenizer = service.files.tokenizer
    if isinstance(prompt, list):
        token_ids = check_ids(prompt, service.files.config.vocab_size, "prompt")
        _check_length(service, token_ids, "prompt")  # The text of millions takes long.
        return token_ids, EchoedPrompt(text_of(tokenizer, token_ids), token_ids)
    if not prompt:
        raise UserError("found an empty text, expected some characters")
    check_unicode(prompt, "prompt")
    token_ids = encode_text(tokenizer, prompt, service.max_context)
    given = token_ids[:1] == [tokenizer.bos_id]
    return [*([] if given else [tokenizer.bos_id]), *token_ids], EchoedPrompt(prompt, token_ids)
