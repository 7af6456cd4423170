"""Text to tokens without adding any: which tokens a piece of a rendered text became."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LONGEST_CACHED_TEXT = 200
MOST_CACHED_TEXTS = 4096
ANCHORS = ("", "\n", "a", ".")


@dataclass(frozen=True, slots=True)
class Encoded:
    """A text and its tokens."""

    text: str
    ids: list[int]
    breaks: list[tuple[int, int]]
    """(token, character) where an added token starts: nothing merges across such a place."""


class Codec:
    """The token side of a tokenizer: never adds a special token, never truncates."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder
        special = {token.content for token in added.values() if token.special}
        special.update(str(token) for token in tokenizer.all_special_tokens)
        self.special_texts = tuple(sorted(special, key=len, reverse=True))
        self._special = re.compile("|".join(map(re.escape, self.special_texts)) or r"(?!)")
        self.uses_breaks = bool(tokenizer.is_fast)
        self._is_break = np.zeros(max([len(tokenizer), *added]) + 1, dtype=bool)
        for token_id, token in added.items():
            self._is_break[token_id] = not token.normalized
        self._cached_ids: dict[str, list[int]] = {}

    def special_texts_in(self, text: str) -> set[str]:
        """The special tokens that a text would become real ones of."""
        return set(self._special.findall(text))

    def ids(self, text: str) -> list[int]:
        """The tokens of a text as it stands, `[N]`."""
        if len(text) > LONGEST_CACHED_TEXT:
            return self._encode(text).ids
        if text not in self._cached_ids:
            if len(self._cached_ids) >= MOST_CACHED_TEXTS:
                self._cached_ids.clear()
            self._cached_ids[text] = self._encode(text).ids
        return self._cached_ids[text]

    def encode(self, text: str) -> Encoded:
        """The tokens of a text and the places where nothing merges."""
        return self._encode(text)

    def decode(self, ids: list[int]) -> str:
        """The text of tokens, special ones included, nothing tidied."""
        text = self.tokenizer.decode(
            ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        assert isinstance(text, str)
        return text

    def num_tokens_before(self, encoded: Encoded, char: int) -> int | None:
        """How many tokens `text[:char]` is, if alone it has the ids that the whole begins with.

        An added token splits the text before anything merges, so only what follows the last one
        needs to be encoded again. None when a token spans the place.
        """
        if char >= len(encoded.text):
            return len(encoded.ids)
        token, start = 0, 0
        for token_at, char_at in reversed(encoded.breaks):
            if char_at < char:
                token, start = token_at, char_at
                break
        tail = self.ids(encoded.text[start:char])
        stop = token + len(tail)
        return stop if encoded.ids[token:stop] == tail else None

    def continuation(self, prompt: str, prompt_ids: list[int], text: str) -> list[int] | None:
        """The tokens of `text` where it goes on from a prompt, without a merge across.

        A tokenizer may put a space before what it takes for the start of a text, so the text is
        encoded behind an anchor, and the first anchor whose tokens decode to the prompt and the
        text, exactly, is taken. None when none does.
        """
        whole = self.decode(self.ids(prompt + text))
        anchors = [*ANCHORS, *self.special_texts]
        for anchor in anchors:
            anchor_ids = self.ids(anchor)
            anchored = self.ids(anchor + text)
            if anchored[: len(anchor_ids)] != anchor_ids:
                continue
            tokens = anchored[len(anchor_ids) :]
            if self.decode([*prompt_ids, *tokens]) == whole:
                return tokens
        return None

    def trust_breaks(self, text: str) -> bool:
        """Whether tokens do split where added tokens stand in this text; if not, never relied on.

        Checked once on a rendered conversation for each added token in it.
        """
        encoded = self.encode(text)
        for token, char in encoded.breaks:
            if char and self._encode(text[:char]).ids != encoded.ids[:token]:
                self.uses_breaks = False
        return self.uses_breaks

    def _encode(self, text: str) -> Encoded:
        batch = self.tokenizer(
            text, add_special_tokens=False, return_attention_mask=False, verbose=False
        )
        ids = batch["input_ids"]
        assert isinstance(ids, list)
        breaks: list[tuple[int, int]] = []
        if self.uses_breaks and batch.encodings is not None:
            encoding = batch.encodings[0]
            for token in np.flatnonzero(self._is_break[np.asarray(ids, dtype=np.int64)]):
                chars = encoding.token_to_chars(int(token))
                if chars is not None:
                    breaks.append((int(token), chars[0]))
        return Encoded(text, ids, breaks)
