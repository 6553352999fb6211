"""The commands of a chat: lines that begin with a slash."""

from pathlib import Path

from dsv4.cli.chat.chat import Chat
from dsv4.command.streams import say
from dsv4.errors import UserError, shorten

HELP = """/reset        begins a new conversation under the same system message, with the same tools
/system TEXT  replaces the system message; the conversation goes on
/save FILE    writes the conversation and its state; --load-state and /load go on with it
/load FILE    goes on with such a file
/help         shows this
/quit         ends, as Ctrl-D does
Another line is a message, or the result of the tool that the line asks for; //TEXT is one that
begins with a slash. Alt-Enter breaks a line, and text of several lines can stand between lines of
three quotation marks. Ctrl-C ends an answer, which stays as far as it was shown."""
_WITH_ARGUMENT = {"/system": "TEXT", "/save": "FILE", "/load": "FILE"}
_COMMANDS = ("/reset", *_WITH_ARGUMENT, "/help", "/quit")


def is_command(entry: str) -> bool:
    """Whether the entry is no message."""
    return entry.startswith("/") and not entry.startswith("//")


def message_of(entry: str) -> str:
    """The text that an entry says, which is no command."""
    return entry.removeprefix("/")


def path_of(name: str, file: str) -> Path:
    """The path that a command names. Raises ``UserError`` for what no file can be called."""
    if "\0" in file:
        raise UserError(f"{name}: {shorten(file)}: found a zero byte, expected the name of a file")
    try:
        return Path(file).expanduser()
    except RuntimeError as error:  # ~ of a user who does not exist
        raise UserError(f"{name}: {shorten(file)}: {error}") from None


def run_command(chat: Chat, entry: str) -> bool:
    """Does what the entry says; False when the chat is to end. Raises ``UserError``."""
    name, *rest = entry.split(maxsplit=1)
    argument = "".join(rest).strip()
    if name not in _COMMANDS:
        raise UserError(f"{shorten(name)}: no such command, expected one of {', '.join(_COMMANDS)}")
    if bool(argument) != (name in _WITH_ARGUMENT):
        found = shorten(argument) if argument else "nothing"
        raise UserError(f"{name}: found {found}, expected {_WITH_ARGUMENT.get(name, 'nothing')}")
    match name:
        case "/reset":
            chat.reset()
        case "/system":
            chat.set_system(argument)
        case "/save":
            chat.save(path_of(name, argument))
        case "/load":
            chat.load(path_of(name, argument))
        case "/help":
            say(HELP)
    return name != "/quit"
