"""tokenizer.json → token ids and back, and text that streams without broken characters
(model.md#tokenizer).
"""

import codecs
import json
import operator
from collections.abc import Iterable
from contextlib import suppress
from itertools import zip_longest
from pathlib import Path
from typing import Any

import tokenizers

from .control_tokens import BOS, EOS, WRITTEN_TOKENS
from .json_text import parse_integer
from .messages import check_string

# What tokenizers lose or change that are not byte-level BPE without a normalizer. It begins with a
# letter and has spaces between and behind the control tokens, since a tokenizer may write a space
# in front and cut off others.
_ANY_TEXT = (
    "What is 3 + 4? Éte\u0301\r\n\n\tif x_1 != 2026:  # ﬁn\u00a0你好，한국어 🧑\u200d🚀\x00 \n"
    + " ".join(WRITTEN_TOKENS)
    + " "
)


class Tokenizer:
    """The tokenizer of a checkpoint folder.

    Control tokens in the text become their ids; no token is added, since the encoder writes BOS
    itself. `bos_id` and `eos_id` are found by their names; `vocab_size` is one more than the
    highest token id.
    """

    def __init__(self, path: str | Path) -> None:
        """`path` is a tokenizer.json or the folder that holds it. FileNotFoundError or ValueError
        names the file.
        """
        file = Path(path)
        if file.is_dir():
            file = file / "tokenizer.json"
        if not file.is_file():
            raise FileNotFoundError(f"{file}: no such tokenizer file")
        declared, self._tokenizer = _read(file)
        # A tokenizer.json may ask for truncation, padding or dropout; a prompt must never be cut or
        # filled, and is the same every time.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        model = self._tokenizer.model
        if isinstance(model, tokenizers.models.BPE):
            model.dropout = None
        ids = {token: self._required_id(token, file) for token in WRITTEN_TOKENS}
        self.bos_id = ids[BOS]
        self.eos_id = ids[EOS]
        self._check_added_tokens(declared.get("added_tokens") or [], file)
        self._check_byte_symbols(file)
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values()) + 1
        added = self._tokenizer.get_added_tokens_decoder()
        self._added_tokens = {token_id: token.content for token_id, token in added.items()}
        # In bytes: a symbol of the vocabulary stands for one, an added token is text.
        longest_added = max(len(token.encode("utf-8")) for token in self._added_tokens.values())
        self._longest_token = max(longest_added, max(map(len, vocabulary)))
        self._check_round_trip(file)

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, nothing added. ValueError if it is no text or holds a lone
        surrogate.
        """
        check_string(text, "text")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError(
                f"text is not valid Unicode: lone surrogate at character {error.start}"
            ) from error
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def fewest_tokens(self, text: str) -> int:
        """At least so many tokens `text` has, found without encoding it: no token stands for more
        bytes than the longest one. ValueError if it is no text.
        """
        check_string(text, "text")
        return -(-len(text.encode("utf-8", "replace")) // self._longest_token)

    def decode(self, token_ids: Iterable[int]) -> str:
        """Text of `token_ids`, control tokens included; bytes that are not UTF-8 become U+FFFD.
        ValueError for an id that the vocabulary lacks, and for what is no list of ids.
        """
        if not isinstance(token_ids, Iterable):
            found = type(token_ids).__name__
            raise ValueError(f"token_ids is {found}, expected a list of token ids")
        decoder = IncrementalDecoder(self)
        return "".join(map(decoder.push, token_ids)) + decoder.flush()

    def token_to_id(self, token: str) -> int | None:
        """Id of a whole token such as "<think>", None if the vocabulary lacks it. ValueError if it
        is no text.
        """
        check_string(token, "token")
        return self._tokenizer.token_to_id(token)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that the token stands for. ValueError if the vocabulary has no such id, and for
        what is no integer; those of numpy and torch are some.
        """
        number = _integer(token_id)
        added = self._added_tokens.get(number)
        if added is not None:
            return added.encode("utf-8")
        token = self._tokenizer.id_to_token(number) if 0 <= number < 2**32 else None
        if token is None:
            raise ValueError(f"token id {number} is not in the vocabulary")
        return b"".join(_BYTE_OF_SYMBOL.get(symbol) or symbol.encode("utf-8") for symbol in token)

    def _required_id(self, token: str, file: Path) -> int:
        token_id = self._tokenizer.token_to_id(token)
        if token_id is None:
            raise ValueError(f"{file}: the vocabulary lacks {token}, not a DeepSeek-V4 tokenizer")
        found = self.encode(token)
        if found != [token_id]:
            raise ValueError(
                f"{file}: {token} becomes {len(found)} tokens, expected the control token "
                f"{token_id}: it is missing from added_tokens"
            )
        return token_id

    def _check_added_tokens(self, declared: list[dict[str, Any]], file: Path) -> None:
        """The library numbers an added token anew where its id does not follow the vocabulary."""
        for token in declared:
            found = self._tokenizer.token_to_id(token["content"])
            if found != token["id"]:
                raise ValueError(
                    f"{file}: added_tokens: {token['content']!r}: found token id {found}, "
                    f"expected the declared {token['id']}: the vocabulary has another size"
                )

    def _check_byte_symbols(self, file: Path) -> None:
        """Without its symbol a byte of the text would be left out."""
        lacking = [
            symbol
            for symbol in _BYTE_OF_SYMBOL
            if self._tokenizer.model.token_to_id(symbol) is None
        ]
        if lacking:
            raise ValueError(
                f"{file}: vocab: found no {lacking[0]!r}, expected the symbols of all 256 bytes "
                f"(lacks {len(lacking)})"
            )

    def _check_round_trip(self, file: Path) -> None:
        """Raises ValueError for a tokenizer that changes `_ANY_TEXT`, as one does that lacks its
        pre-tokenizer or has a normalizer: prompts would silently be others.
        """
        found = self.decode(self.encode(_ANY_TEXT))
        if found != _ANY_TEXT:
            pairs = enumerate(zip_longest(found, _ANY_TEXT))
            first = next(at for at, (one, other) in pairs if one != other)
            place = slice(max(0, first - 8), first + 8)
            raise ValueError(
                f"{file}: pre_tokenizer, normalizer or added_tokens change text: "
                f"found {found[place]!r}, expected {_ANY_TEXT[place]!r}"
            )


class IncrementalDecoder:
    """Text of a growing list of tokens. A character that is split over tokens appears when its last
    byte is there.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """The new complete characters; U+FFFD only for bytes that no further token can complete.
        ValueError for an id that the vocabulary lacks.
        """
        return self._utf8.decode(self._tokenizer.token_bytes(token_id))

    def flush(self) -> str:
        """The rest at the end: U+FFFD for an unfinished character, else nothing. Resets the
        decoder.
        """
        return self._utf8.decode(b"", final=True)


def _integer(token_id: object) -> int:
    """ValueError for anything but an integer; a boolean is none."""
    if not isinstance(token_id, bool):
        with suppress(TypeError):
            return operator.index(token_id)  # type: ignore[arg-type]
    raise ValueError(f"token id is {type(token_id).__name__}, expected an integer")


def _byte_symbols() -> dict[str, bytes]:
    """Byte-level BPE writes every byte as a printable character: itself if it is one, else from
    U+0100 upwards.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    symbols = {chr(byte): bytes([byte]) for byte in printable}
    return symbols | {chr(0x100 + index): bytes([byte]) for index, byte in enumerate(others)}


_BYTE_OF_SYMBOL = _byte_symbols()


def _read(file: Path) -> tuple[dict[str, Any], tokenizers.Tokenizer]:
    """What a tokenizer.json says, and the library's tokenizer of it. ValueError names the file."""
    content = file.read_bytes()
    try:
        if content.startswith(codecs.BOM_UTF8):
            raise ValueError("found a byte order mark, expected none")
        declared = json.loads(content, parse_int=parse_integer)
        _refuse_affixes(declared)
        return declared, tokenizers.Tokenizer.from_buffer(content)
    except (ValueError, RecursionError, *_panics()) as error:
        reason = _first_line(error)
        raise ValueError(f"{file}: not a usable tokenizer.json ({reason})") from error


def _panics() -> list[type[BaseException]]:
    """What a panic of Rust code is raised as: a type that exists from the first panic on and cannot
    be imported.
    """
    return [kind for kind in BaseException.__subclasses__() if kind.__name__ == "PanicException"]


def _refuse_affixes(declared: Any) -> None:
    """Byte-level BPE has none: the library panics over a prefix, whose backtrace is then on stderr,
    and loses text over a suffix.
    """
    model = declared.get("model") if isinstance(declared, dict) else None
    for key in ("continuing_subword_prefix", "end_of_word_suffix"):
        if isinstance(model, dict) and model.get(key):
            raise ValueError(f"model: {key}: found {str(model[key])[:80]!r}, expected none")


def _first_line(error: BaseException) -> str:
    return str(error).split("\n", 1)[0]
