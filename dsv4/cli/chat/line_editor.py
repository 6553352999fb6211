"""Typing into a chat at a terminal: prompt_toolkit with what a chat needs."""

from prompt_toolkit import PromptSession
from prompt_toolkit.history import InMemoryHistory
from prompt_toolkit.input import Input
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output import Output, create_output


class LineEditor:
    """Reads a line with editing, and history of this chat; Alt-Enter, and pasted text, put line
    breaks into it. Ctrl-D on an empty line raises ``EOFError``, Ctrl-C ``KeyboardInterrupt``.
    """

    def __init__(self, source: Input | None = None, out: Output | None = None) -> None:
        """``source`` and ``out``: the terminal, unless given."""
        keys = KeyBindings()
        keys.add("escape", "enter")(_break_line)
        # Where stdout is a file, the terminal still shows what is typed.
        self._session: PromptSession[str] = PromptSession(
            history=InMemoryHistory(),
            key_bindings=keys,
            reserve_space_for_menu=0,
            input=source,
            output=create_output(always_prefer_tty=True) if out is None else out,
        )

    def __call__(self, prompt: str) -> str:
        return self._session.prompt(prompt)


def _break_line(event: KeyPressEvent) -> None:
    event.current_buffer.insert_text("\n")
