"""What every request needs: the model by name, its small files, its limits, the worker."""

from dataclasses import dataclass, field
from pathlib import Path

from dsv4.cli.job import ModelFiles
from dsv4.serve.answering import Answering
from dsv4.serve.worker import Worker


@dataclass
class Tally:
    """What the server has done so far."""

    answered: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    tokens: int = 0

    def line(self) -> str:
        """The summary, at the end."""
        parts = [f"answered {self.answered}", f"not answered {self.failed}"]
        parts.append(f"prompts {self.prompt_tokens} tokens ({self.reused_tokens} reused)")
        return " · ".join([*parts, f"answers {self.tokens} tokens"])


@dataclass
class Service:
    """``thinks``: what a conversation that does not say gets. ``fault``: what has made the engine
    useless.
    """

    model_name: str
    folder: Path
    files: ModelFiles
    max_context: int
    thinks: bool
    most_body_bytes: int
    worker: Worker
    answering: Answering
    created: int
    tally: Tally = field(default_factory=Tally)
    fault: BaseException | None = None
