"""The check of labs/bpe.

Tokens are compared with those of the project's own training, and ids with those of tiktoken. What
is done is counted in lines of the student's file that Python runs: that is the same on any machine.
"""

import inspect
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from random import Random
from types import FrameType

import tiktoken

from labs.machinery.compare import Property
from labs.machinery.student import Misuse, check_returned
from text.bpe import train_bpe

FUNCTION = "byte_pairs"
ABOUT = "a byte-pair encoding: its training, and a function that encodes"
NEEDS = "`Counter`, `pairwise`, sets"
POINT = "a merge changes counts where its pair is, and nowhere else"
LEADS_TO = "text/bpe.py", "train_bpe"
SIZES = (1,)
BARRED = "text.bpe.train_bpe", "tiktoken.Encoding"
HINTS = (
    "Write down the pairs of two short words with their counts. Merge one pair by hand: which "
    "counts change, and which words did you have to look at?",
    "Count how many words hold the pair that is merged, and how many there are. What would you "
    "have to remember of each pair to find these words at once?",
    "Ids of each word, counts of pairs, and for each pair the set of words that hold it. For each "
    "merge: take the counts of these words away, merge, and add their new counts. Encoding needs "
    "the id of each merged pair, and merges the lowest one until there is none.",
)
ERRORS = {
    "empty": "A corpus may have no pair, or none that is left: then training ends with fewer "
    "tokens. A word may have no byte.",
}
LETTERS = "abcdeé"  # the last of them has two bytes
WORDS, N_TOKENS = 150, 256 + 150
MISTAKES = {
    " again": "The first call is right, and the second with the same words is not: keep nothing "
    "between calls.",
    " runs": "b'aaa' has the same pair twice, and only one of them can be merged: from the left.",
    " large": "Counts are large integers, which a float or an integer of 32 bits does not hold.",
    " few": "Where no pair is left, training ends with fewer tokens.",
    " none": "A corpus may have no word, or words without a pair: the tokens are the bytes then.",
}
RARE = 100  # words with letters of their own, which are too rare to be merged
LINES = 100  # of the student's file for each of them, at most
SLOW = (
    "A word in which nothing is merged costs time for each merge: look only at words that hold the "
    "merged pair."
)


def words_of(seed: int, name: str = "") -> dict[bytes, int]:
    """Return the words of a case. Many pairs are equally frequent, and others much more."""
    draw = Random(seed)
    if name == " runs":
        return {b"a" * n: draw.randint(1, 9) for n in (2, 3, 5, 8)} | {b"b" + b"a" * 7: 4}
    if name == " large":  # which differ by one
        most = (1 << 60) + 1024 * draw.randint(1, 9)
        return {b"ab": most, b"cd": most + 1, b"xy": most - 1}
    if name == " few":
        return {b"": 3, b"a": 2, b"abab": draw.randint(1, 9)}
    if name == " none":
        return {b"": 3, b"a": 2}
    syllables = ["".join(draw.choices(LETTERS, k=draw.randint(1, 3))) for _ in range(30)]
    words = {}
    for rank in range(1, WORDS + 1):
        word = "".join(draw.choices(syllables, k=draw.randint(1, 4)))
        words[word.encode()] = WORDS // rank
    return words


# Name -> how many tokens to ask for. The first two calls have the same words.
CASES = {"": N_TOKENS, " again": N_TOKENS, " runs": 270, " large": 259, " few": 300, " none": 257,
         " bytes": 256}  # fmt: skip


def to_encode(seed: int, name: str) -> list[bytes]:
    """Return the words of a case, and some that it lacks."""
    draw = Random(seed)
    letters = "a" if name == " runs" else "abxycd" if name == " large" else f"{LETTERS}z"
    others = ["".join(draw.choices(letters, k=length)) for length in (1, 2, 5, 9, 20, 40)]
    characters = "".join(map(chr, range(256)))
    return [*words_of(seed, name), *(word.encode() for word in (*others, "", characters))]


class Lines:
    """A context that counts the lines of the student's file that Python runs."""

    def __init__(self, function: Callable):
        self.file, self.number = inspect.unwrap(function).__code__.co_filename, 0

    def note(self, frame: FrameType, event: str, _) -> Callable | None:
        if frame.f_code.co_filename != self.file:
            return None
        self.number += event == "line"
        return self.note

    def __enter__(self) -> "Lines":
        self.others = sys.gettrace()
        sys.settrace(self.note)
        return self

    def __exit__(self, *_) -> None:
        sys.settrace(self.others)


def on_rank(load: Callable, size: int, seed: int, rank: int) -> dict:
    """Return the tokens and ids of each case, and what was run."""
    byte_pairs = load()
    found = {}
    for name, n_tokens in CASES.items():
        words = words_of(seed, name)
        encoded = []
        before = dict(words)
        tokens, encode = trained(byte_pairs, words, n_tokens)
        if words != before:
            raise Misuse("`words` is changed. It belongs to the caller: work on a copy.")
        for word in to_encode(seed, name):
            ids = check_returned(encode(word), list, "from encode, a list of integers")
            encoded.append([int(i) for i in ids])
        found[name] = {"tokens": [token.hex() for token in tokens], "ids": encoded}
    few, many = (lines_of_training(byte_pairs, seed, n) for n in (0, RARE))
    _, encode = trained(byte_pairs, words_of(seed), N_TOKENS)
    with Lines(encode) as lines:
        encode(b"zz")
    return found | {"training": (many - few) / RARE, "encoding": lines.number}


def trained(byte_pairs: Callable, words: dict[bytes, int], n_tokens: int) -> tuple:
    """Return what the student's function returns, if it is of the right kinds."""
    returned = check_returned(byte_pairs(words, n_tokens), tuple, "the tokens and a function")
    check_returned(returned, (list, Callable), "a list of tokens and a function")
    tokens, encode = returned
    check_returned(tuple(tokens), (bytes,) * len(tokens), "tokens, each of them bytes")
    return tokens, encode


def lines_of_training(byte_pairs: Callable, seed: int, n_rare: int) -> int:
    """Return how many lines training runs, with so many words more that are not merged."""
    words = {word: 1000 * times for word, times in words_of(seed).items()}
    draw = Random(seed)
    while len(words) < len(words_of(seed)) + n_rare:
        words["".join(draw.choices("xy", k=8)).encode()] = 1
    with Lines(byte_pairs) as lines:
        byte_pairs(words, N_TOKENS)
    return lines.number


def properties(results: dict[str, list], size: int, seed: int) -> Iterator[Property]:
    for name, n_tokens in CASES.items():
        (found,) = results[name]
        words = Counter({word.decode(): n for word, n in words_of(seed, name).items()})
        tokens = train_bpe(words, n_tokens)
        vocab = {token: i for i, token in enumerate(tokens)}
        yield compared_tokens(name, [bytes.fromhex(token) for token in found["tokens"]], tokens)
        reference = tiktoken.Encoding(
            "lab", pat_str="(?s:.+)", mergeable_ranks=vocab, special_tokens={}
        )
        yield compared_ids(name, found["ids"], reference, to_encode(seed, name))
    (training,), (encoding,) = results["training"], results["encoding"]
    text = f"{training:.1f} lines for each word that is not merged, of 8 bytes; {LINES} allowed"
    yield Property("training", text, training <= LINES, SLOW)
    text = f"{encoding} lines for a word of two bytes; {LINES} allowed"
    mistake = "Encoding goes through all merges: look only at those of the word's own pairs."
    yield Property("encoding", text, encoding <= LINES, mistake)


def compared_tokens(name: str, found: list[bytes], wanted: list[bytes]) -> Property:
    """Return whether tokens are those of the project."""
    text = f"the {len(wanted)} of text/bpe.py"
    if found != wanted:
        text = f"{len(found)}, and should be {len(wanted)}"
        for i, (one, other) in enumerate(zip(found, wanted)):
            if one != other:
                text = f"token {i} is {one}, and should be {other}"
                break
    numbers = [zlib.crc32(token) for token in found]
    return Property(f"tokens{name}", text, found == wanted, MISTAKES.get(name, ""), numbers)


def compared_ids(
    name: str, found: list[list[int]], reference: tiktoken.Encoding, words: list[bytes]
) -> Property:
    """Return whether words are encoded as by tiktoken."""
    text = f"those of tiktoken, of {len(words)} words"
    wanted = [reference.encode_ordinary(word.decode()) for word in words]
    differing = [row for row in zip(words, found, wanted) if row[1] != row[2]]
    if differing:
        word, one, other = min(differing, key=lambda row: len(row[0]))
        text = f"{word} is {one}, and should be {other}"
    return Property(f"ids{name}", text, found == wanted, MISTAKES.get(name, ""), found)
