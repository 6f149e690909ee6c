"""Which two tokens become one?

A model reads tokens and not bytes, since a sequence of whole words is shorter. A byte-pair encoding
finds them in a corpus: the two neighbours that occur most often become a token, again and again.
Encoding repeats these merges in their order. So nothing is stored but a list of tokens.

Read: Sennrich et al. 2016 (arXiv:1508.07909), algorithm 1, and the documentation of
itertools.pairwise and collections.Counter.
"""

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable


def byte_pairs(
    words: dict[bytes, int], n_tokens: int
) -> tuple[list[bytes], Callable[[bytes], list[int]]]:
    """Train a byte-pair encoding. Return its tokens in order of id, and a function that encodes.

    words: how often each word occurs in a corpus, once at least. A word may have no byte
    n_tokens: 256 or more. The first tokens are the bytes; then the most frequent pair of
        neighbours within words becomes a token, until there are n_tokens or no pair is left.
        b"aaa" has the pair of two a twice, and they are merged from the left: b"aa", b"a".
        Of equally frequent pairs the one with the lowest ids comes first, the left id before the
        right one
    encode(word) -> ids: of any word, also one that the corpus lacks. Of all neighbours that make a
        token, those with the lowest id are merged first
    A merge costs no time for words that lack its pair, and a word none for merges that it lacks.
    """
    # >>>
    tokens = [bytes([byte]) for byte in range(256)]
    in_ids = [list(word) for word in words]
    times = list(words.values())
    counts, words_with = Counter(), defaultdict(set)  # of a pair
    made = {}  # pair -> the id of its token

    def count(w: int, n: int) -> None:
        for pair in itertools.pairwise(in_ids[w]):
            counts[pair] += n
            words_with[pair].add(w)

    def merged(ids: list[int], pair: tuple[int, int]) -> list[int]:
        new = []
        for i in ids:
            if new and (new[-1], i) == pair:
                new[-1] = made[pair]
            else:
                new.append(i)
        return new

    for w, n in enumerate(times):
        count(w, n)
    while len(tokens) < n_tokens and any(counts.values()):
        pair = min(counts, key=lambda pair: (-counts[pair], pair))
        made[pair] = len(tokens)
        tokens.append(tokens[pair[0]] + tokens[pair[1]])
        for w in sorted(words_with[pair]):
            count(w, -times[w])
            in_ids[w] = merged(in_ids[w], pair)
            count(w, times[w])

    def encode(word: bytes) -> list[int]:
        ids = list(word)
        while pairs := [pair for pair in itertools.pairwise(ids) if pair in made]:
            ids = merged(ids, min(pairs, key=made.get))
        return ids

    return tokens, encode
    # <<<


# Why: a merge changes counts near the places of its pair alone. So of each pair is remembered how
# often it occurs and in which words, and the words that lack it are not looked at: with 100,000
# merges and a million words, nothing else would end. What is still slow here is to look for the
# most frequent pair among all of them; text/bpe.py has a heap for it. Encoding takes the lowest id
# first, because training did: then a word of the corpus gets the tokens that it had there. The
# longest token that fits, from the left, gives fewer tokens sometimes, and others than the model
# has been trained on.
#
# Questions: 1. How much each pair's count has changed by the last merge, added up over ranks; all
# of the counts once at the start. Then all take the same pair, by the same rule for ties.
# 2. Hardly anything: its row of the embedding has had few gradients. Where a prompt has it alone,
# answers can be odd.
