"""A simple, slow byte-level BPE to compare with. It uses no code of the tokenizers library."""

import itertools

import regex

_WORDS = regex.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")


def byte_names() -> list[str]:
    """Returns the character that represents each byte in the vocabulary of GPT-2."""
    names, hidden = [""] * 256, 0
    for byte in range(256):
        if 33 <= byte <= 126 or 161 <= byte <= 172 or 174 <= byte <= 255:
            names[byte] = chr(byte)
        else:
            names[byte] = chr(256 + hidden)
            hidden += 1
    return names


class SlowBpe:
    """A BPE that splits text at special tokens, digits and GPT-2's word boundaries, and merges by rank."""

    def __init__(self, tokens: list[str], merges: list[str], num_special: int):
        self.ids = {token: id for id, token in enumerate(tokens)}
        self.ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(merges)}
        self.special = regex.compile("|".join(regex.escape(token) for token in tokens[:num_special]))
        self.names = byte_names()

    def encode(self, text: str) -> list[int]:
        ids, end = [], 0
        for match in self.special.finditer(text):
            ids += [*self._plain(text[end : match.start()]), self.ids[match.group()]]
            end = match.end()
        return ids + self._plain(text[end:])

    def _plain(self, text: str) -> list[int]:
        ids = []
        for chunk in regex.findall(r"\p{N}|\P{N}+", text):
            for word in _WORDS.findall(chunk):
                ids += self._word(word)
        return ids

    def _word(self, word: str) -> list[int]:
        # Bytes that the vocabulary lacks are dropped, as in the original tokenizer. No assigned character has them.
        parts = [self.names[byte] for byte in word.encode() if self.names[byte] in self.ids]
        while len(parts) > 1:
            best = min(itertools.pairwise(parts), key=lambda pair: self.ranks.get(pair, 1 << 60))
            if best not in self.ranks:
                break
            merged, i = [], 0
            while i < len(parts):
                if tuple(parts[i : i + 2]) == best:
                    merged.append(parts[i] + parts[i + 1])
                    i += 2
                else:
                    merged.append(parts[i])
                    i += 1
            parts = merged
        return [self.ids[part] for part in parts]
