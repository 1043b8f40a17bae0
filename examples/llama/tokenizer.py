"""Byte-pair encoding as GPT-2's, with single digits, as SmolLM2's."""

import codecs
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

# Contractions, words, single digits, other signs, blanks; the last blank belongs to the next word.
_PIECES = re.compile(r"'(?:[sdmt]|ll|ve|re)| ?[^\W\d_]+|\d| ?(?:[^\s\w]|_)+|\s+(?!\S)|\s+")


def _byte_signs() -> dict[int, str]:
    """GPT-2's letter for each byte: printable ones stand for themselves."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {**{b: chr(b) for b in plain}, **{b: chr(256 + i) for i, b in enumerate(others)}}


class Tokenizer:
    """Text to tokens and back."""

    def __init__(
        self, words: Sequence[str], merges: Sequence[str], special: Sequence[str], end: int
    ) -> None:
        self.end = end
        self._words = words
        self._numbers = {word: number for number, word in enumerate(words)}
        self._ranks = {tuple(pair.split(" ")): rank for rank, pair in enumerate(merges)}
        self._signs = _byte_signs()
        self._bytes = {sign: byte for byte, sign in self._signs.items()}
        self._special = set(special)
        self._split = re.compile("(" + "|".join(map(re.escape, special)) + ")")

    def encode(self, text: str) -> list[int]:
        """Tokens of a text; names of special tokens in it stand for these."""
        return [token for part in self._split.split(text) if part for token in self._part(part)]

    def _part(self, part: str) -> Iterator[int]:
        if part in self._special:
            yield self._numbers[part]
            return
        for piece in _PIECES.findall(part):
            signs = [self._signs[byte] for byte in piece.encode()]
            yield from (self._numbers[word] for word in self._merged(signs))

    def _merged(self, word: list[str]) -> list[str]:
        """Joins the pair that was learnt first, until there is none."""
        while len(word) > 1:
            pairs = list(pairwise(word))
            best = min(pairs, key=lambda pair: self._ranks.get(pair, len(self._ranks)))
            if best not in self._ranks:
                break
            at = pairs.index(best)
            word = [*word[:at], "".join(best), *word[at + 2 :]]
        return word

    def stream(self, tokens: Iterable[int]) -> Iterator[str]:
        """Yields text as tokens come, up to the end token; characters may need several tokens."""
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        for token in tokens:
            if token == self.end:
                return
            yield decoder.decode(bytes(self._bytes[sign] for sign in self._words[token]))

    def chat(self, question: str) -> list[int]:
        """The question as SmolLM2 was taught to be asked."""
        system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
        return self.encode(
            f"<|im_start|>system\n{system}<|im_end|>\n"
            f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        )
