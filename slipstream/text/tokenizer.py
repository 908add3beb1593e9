"""Text to token ids and back, from a checkpoint's tokenizer.json; knows no template and no request.

Text of a user can hold the words of a special token (`<|im_end|>`, `<|image_pad|>`). `quote` breaks them with a marker that no
text uses, templates carry the marker along, and `encode` takes it out again without ever seeing a special token there. A text
that ends with the beginning of such a word gets a marker too, so that two texts side by side cannot make one up.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer as FastTokenizer

from slipstream.errors import CheckpointError

REPLACEMENT = "\ufffd"
_LONGEST_OPEN = 64  # tokens without a complete character at their end; more are broken bytes, not a long character
_CHARACTER_TOKENS = 4  # a cut character has at most three bytes, so at most three tokens
_MARK = "\ufdd0"  # a noncharacter: never part of a text


class Tokenizer:
    """Thread-safe."""

    def __init__(self, folder: Path) -> None:
        """Raises CheckpointError if the folder has no usable tokenizer.json."""
        path = folder / "tokenizer.json"
        try:
            self._fast = FastTokenizer.from_file(str(path))
            self._plain = FastTokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception
            raise CheckpointError(f"cannot read {path}: {error}") from error
        self._plain.encode_special_tokens = True
        self._specials = {token.content: id for id, token in self._fast.get_added_tokens_decoder().items() if token.special}
        self._added = frozenset(self._fast.get_added_tokens_decoder())
        self._bytes = _byte_letters()
        longest_first = sorted(self._specials, key=len, reverse=True)
        self._beginnings = tuple({word[:end] for word in self._specials for end in range(1, len(word))})
        self._pattern = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None

    def quote(self, text: str) -> str:
        """Text in which no special token will be recognised by `encode`."""
        text = text.replace(_MARK, "")
        if self._pattern is None:
            return text
        text = self._pattern.sub(lambda found: found[0][0] + _MARK + found[0][1:], text)
        return text + _MARK if text.endswith(self._beginnings) else text

    def encode(self, text: str) -> list[int]:
        """Ids; words of a special token become that token, unless they were quoted."""
        if _MARK not in text or self._pattern is None:
            return _ids(self._fast, text)
        result: list[int] = []
        position = 0
        for special in self._pattern.finditer(text):
            result += self._encode_plain(text[position : special.start()])
            result.append(self._specials[special[0]])
            position = special.end()
        return result + self._encode_plain(text[position:])

    def _encode_plain(self, text: str) -> list[int]:
        return _ids(self._plain, text.replace(_MARK, ""))

    def token_bytes(self, token: int) -> bytes:
        """What one token adds to a text, special tokens by their names; empty for an id that is no token."""
        word = self._fast.id_to_token(token)
        if word is None:
            return b""
        if token in self._added or not all(letter in self._bytes for letter in word):
            return word.encode()
        return bytes(self._bytes[letter] for letter in word)

    def token_id(self, word: str) -> int | None:
        """The token that is exactly this word; None if there is none."""
        found: int | None = self._fast.token_to_id(word)
        return found

    def word(self, token: int) -> str:
        """`token_bytes` as text; of part of a character, what stands for its bytes."""
        raw = self.token_bytes(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def words(self, tokens: Sequence[int]) -> str:
        """Text with the names of special tokens."""
        return b"".join(map(self.token_bytes, tokens)).decode(errors="replace")

    def decode(self, tokens: Sequence[int]) -> str:
        """Text without special tokens; bytes that are no UTF-8 become U+FFFD."""
        text: str = self._fast.decode(list(tokens), skip_special_tokens=True)
        return text


def _ids(fast: FastTokenizer, text: str) -> list[int]:
    """As a batch of one: only a batch lets other threads run meanwhile, and a long text takes seconds."""
    ids: list[int] = fast.encode_batch_fast([text], add_special_tokens=False)[0].ids
    return ids


def _byte_letters() -> dict[str, int]:
    """The letters by which a byte-level vocabulary writes bytes: a printable byte as itself, the others from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


class Detokenizer:
    """One choice's text as its tokens come. Never shows part of a character, never takes text back.

    Bytes that are not (yet) a character decode to U+FFFD, and only the last U+FFFD of a text can still become one: so all but
    it is shown at once.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []  # the first `_context` of them, shown, give the rest its left neighbour
        self._context = 0
        self._shown = 0  # characters of their text

    def add(self, tokens: Sequence[int]) -> str:
        """The text that the tokens complete; empty while a character is cut."""
        self._tokens.extend(tokens)
        return self._take(final=False)

    def finish(self) -> str:
        """What is left: bytes that never became a character are shown as U+FFFD."""
        return self._take(final=True)

    def _take(self, final: bool) -> str:
        text = self._tokenizer.decode(self._tokens)
        open_end = text.endswith(REPLACEMENT) and not final
        end = max(self._shown, len(text) - open_end)
        piece = text[self._shown : end]
        self._shown = end
        if not open_end:
            self._forget(self._context)
        elif len(self._tokens) > _LONGEST_OPEN:
            self._forget(len(self._tokens) - _CHARACTER_TOKENS)
        return piece

    def _forget(self, count: int) -> None:
        """Drop the first tokens; at most the last U+FFFD of what stays is not shown yet."""
        hidden = len(self._tokenizer.decode(self._tokens)) - self._shown
        del self._tokens[:count]
        self._context = len(self._tokens)
        self._shown = len(self._tokenizer.decode(self._tokens)) - hidden
