"""Tokens as text and bytes, for lists of log-probabilities."""

from typing import Any

from dsv4.encoding import Tokenizer
from dsv4.logprobs import TokenLogprobs


def token_bytes(tokenizer: Tokenizer, token_id: int) -> bytes | None:
    """What the token stands for, None for an id that the tokenizer lacks."""
    try:
        return tokenizer.token_bytes(token_id)
    except ValueError:
        return None


def token_name(tokenizer: Tokenizer, token_id: int) -> str:
    """The token's text; ``bytes:\\\\xe2\\\\x80`` for a part of a character, so that no two tokens
    have the same name, and ``token_id:7`` for one that has no text.
    """
    data = token_bytes(tokenizer, token_id)
    if data is None:
        return f"token_id:{token_id}"
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def chat_logprob(tokenizer: Tokenizer, found: TokenLogprobs) -> dict[str, Any]:
    """An entry of ``logprobs.content`` of a chat."""

    def described(token_id: int, logprob: float) -> dict[str, Any]:
        data = token_bytes(tokenizer, token_id)
        name = token_name(tokenizer, token_id) if data is None else data.decode("utf-8", "replace")
        return {"token": name, "bytes": list(data or b""), "logprob": logprob}

    top = [described(*one) for one in found.top]
    return {**described(found.token_id, found.logprob), "top_logprobs": top}
