"""Counts of tokens, as a response has them."""

from typing import Any

from dsv4.serve.answering import PromptRead, Said, TokenSaid


class Usage:
    """Of all prompts of a request and of their answers."""

    def __init__(self, prompt_tokens: int) -> None:
        self.prompt_tokens = prompt_tokens
        self.reused_tokens = 0
        self.tokens = 0

    def add(self, said: Said) -> None:
        """Counts it."""
        match said:
            case PromptRead(reused):
                self.reused_tokens += reused
            case TokenSaid():
                self.tokens += 1

    def record(self) -> dict[str, Any]:
        """The object ``usage``."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.tokens,
            "total_tokens": self.prompt_tokens + self.tokens,
            "prompt_tokens_details": {"cached_tokens": self.reused_tokens},
        }
