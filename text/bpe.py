"""Train a byte-pair encoding on a corpus."""

import base64
import heapq
import itertools
import sys
from collections import Counter, defaultdict
from pathlib import Path

import regex  # comes with tiktoken, which needs it

from plumbing.messages import Progress, UserError
from plumbing.new_files import hidden_until_complete
from text.corpora import Reading, find_files, read_pieces
from text.vocabulary import N_SMALL_SPECIAL, WORD_PATTERN, with_special_tokens

SAMPLE_BYTES = 8 << 20  # of the corpus, taken evenly: these are enough


def train_tokenizer(
    sources: list[str], vocab_size: int, out: Path, reading: Reading | None = None
) -> None:
    """Train a tokenizer of `vocab_size` tokens, special ones included, on a corpus and write it as
    a `tokenizer.model`. Raise UserError if these are too few for the bytes and special tokens, or
    if the corpus has no text that is not held out."""
    smallest = 256 + N_SMALL_SPECIAL
    if vocab_size < smallest:
        raise UserError(f"a tokenizer of {vocab_size} tokens is too small: ask for {smallest}")
    files = find_files(sources)
    stride = max(1, sum(path.stat().st_size for path in files) // SAMPLE_BYTES)
    words = Counter()
    documents = Counter()
    for i, piece in enumerate(read_pieces(files, reading or Reading())):
        documents[piece.split] += piece.starts_document
        if piece.split == "train" and i % stride == 0:
            words.update(regex.findall(WORD_PATTERN, piece.text))
    if not words:
        raise UserError("there is no text, or all of it is held out: give more text")
    tokens = train_bpe(words, vocab_size - N_SMALL_SPECIAL)
    with hidden_until_complete(out) as hidden, open(hidden, "wb") as file:
        for i, token in enumerate(tokens):
            file.write(b"%s %d\n" % (base64.b64encode(token), i))
    vocab = {token: i for i, token in enumerate(tokens)}
    trained = with_special_tokens(out.name, vocab, WORD_PATTERN)
    n_bytes = sum(n * len(word.encode()) for word, n in words.items())
    n_tokens = sum(n * len(trained.encode_ordinary(word)) for word, n in words.items())
    print(
        f"{trained.n_vocab:,} of {vocab_size:,} tokens, {n_bytes / n_tokens:.2f} bytes a "
        f"token; {documents['train']:,} documents, and {documents['val']:,} held out",
        file=sys.stderr,
    )


def train_bpe(words: Counter[str], n_tokens: int) -> list[bytes]:
    """Train a byte-pair encoding (Sennrich et al. 2016); return its tokens in order of id.

    words: how often each word occurs.

    The first tokens are the 256 bytes. Then the most frequent pair of neighbouring tokens within
    words becomes a new token, until there are n_tokens or no pair is left. Of equally frequent
    pairs the one with the lowest ids is taken, so the result does not depend on the order of words.

    Counting all pairs again after each merge would be slow. Instead, counts are updated only for
    words that contain the merged pair, and the most frequent pair is taken from a heap. A pair
    whose count rises gets a new entry in the heap. If its count falls, the entry stays as it is;
    when it is popped, it is compared with the count and, if out of date, pushed again. The exercise
    labs/bpe has it without a heap."""
    tokens = [bytes([i]) for i in range(256)]
    # A word is a string with a character for each token, whose code is the token's id.
    in_tokens = [word.encode().decode("latin-1") for word in words]
    frequencies = list(words.values())
    pair_counts = Counter()
    words_with = defaultdict(set)  # pair -> indices of the words that contain it
    for w, word in enumerate(in_tokens):
        for pair in itertools.pairwise(word):
            pair_counts[pair] += frequencies[w]
            words_with[pair].add(w)
    heap = [(-count, pair) for pair, count in pair_counts.items()]  # heapq pops the smallest
    heapq.heapify(heap)
    progress = Progress("training the tokenizer: token", n_tokens - len(tokens))
    while len(tokens) < n_tokens and heap:
        negative_count, pair = heapq.heappop(heap)
        if -negative_count != pair_counts[pair]:
            if pair_counts[pair] > 0:
                heapq.heappush(heap, (-pair_counts[pair], pair))
            continue
        left, right = pair
        tokens.append(tokens[ord(left)] + tokens[ord(right)])
        new_token = chr(len(tokens) - 1)
        progress.add()
        grown = set()  # pairs whose count may have risen
        for w in words_with.pop(pair):
            merged = in_tokens[w].replace(left + right, new_token)
            for old in itertools.pairwise(in_tokens[w]):
                pair_counts[old] -= frequencies[w]
            for new in itertools.pairwise(merged):
                pair_counts[new] += frequencies[w]
                words_with[new].add(w)
                grown.add(new)
            in_tokens[w] = merged
        for new in grown:
            heapq.heappush(heap, (-pair_counts[new], new))
    return tokens
