"""Convert text to token ids and back; load, save and train tokenizers.

All are byte-pair encodings. Text is first pre-tokenized: a regular expression divides it into
words. Each word is at first a sequence of bytes, the shortest tokens. Then neighbouring tokens are
merged into longer ones, in the order in which training found them. Ids follow that order: first
the 256 bytes, then the merged tokens, and last the special tokens, which no text is encoded to.
"""

import base64
import functools
import hashlib
import heapq
import itertools
import json
import os
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import regex  # comes with tiktoken, which needs it
import tiktoken

from plumbing.json_files import JsonFile
from plumbing.messages import Progress, UserError
from plumbing.new_files import hidden_until_complete
from text.corpora import Reading, find_files, read_pieces
from text.templates import SETTINGS, chat_template, default_template, read_settings, token_names

# What is made at first use, of which several nodes or users may want to share one.
CACHE = Path(os.environ.get("FLATLLAMA_CACHE") or Path(__file__).resolve().parent.parent / "cache")
DEFAULT_TOKENIZER = "python-2048"

# Llama 3's pre-tokenization: words with the space before them, numbers of at most three digits...
WORD_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BYTES_PATTERN = r"(?s:.{1,256})"  # nothing is merged, so any division gives the same tokens
# Llama 3's 256 special tokens in order of id. Smaller tokenizers have the first eleven, which
# include all that have a meaning, so that models with any tokenizer can be fine-tuned on chat.
SPECIAL = (
    "<|begin_of_text|> <|end_of_text|> <|reserved_special_token_0|> <|reserved_special_token_1|> "
    "<|finetune_right_pad_id|> <|reserved_special_token_2|> <|start_header_id|> <|end_header_id|> "
    "<|eom_id|> <|eot_id|> <|python_tag|>"
).split() + [f"<|reserved_special_token_{i}|>" for i in range(3, 248)]
RESERVED = {token for token in SPECIAL if "reserved" in token}
N_SMALL_SPECIAL = SPECIAL.index("<|python_tag|>") + 1
LLAMA3_VOCAB_SIZE = 128_000  # without special tokens


class OtherKind(UserError):
    """A tokenizer of a kind that is not read here. It may be whole."""


class Tokenizer:
    """Converts text to token ids and back.

    name: what load_tokenizer was given
    files: content of the file it was read from, if any, and of the SETTINGS beside it, by name
    vocab, special: ids of the ordinary and of the special tokens
    added: ids of ordinary tokens that are found in a text before anything is merged
    spaces: of a token, whether it takes the spaces to its left, and to its right, with it
    pieces: bytes of all tokens by id
    word_pattern: regular expression of the pre-tokenization; None where it takes more than one
    bos, eos: ids of the tokens that begin and end a document
    beginning: ids that stand before a text
    template: chat template in Jinja
    names: bos_token, eos_token, ... as text, which a template may write
    stop: ids of the tokens that end generation"""

    def __init__(self, name: str, encoding: tiktoken.Encoding, file: Path | None = None):
        self.name, self.encoding = name, encoding
        self.vocab: dict[bytes, int] = encoding._mergeable_ranks
        self.special: dict[str, int] = encoding._special_tokens
        self.added: dict[str, int] = {}
        self.spaces: dict[str, tuple[bool, bool]] = {}
        self.pieces = {i: token for token, i in self.vocab.items()}
        self.pieces |= {i: token.encode() for token, i in self.special.items()}
        self.word_pattern = encoding._pat_str
        self.vocab_size = encoding.n_vocab  # ordinary and special tokens
        # GPT-2 and its relatives have one token that both ends a document and begins the next.
        bos, ends = "<|endoftext|>", ["<|endoftext|>"]
        if "<|begin_of_text|>" in self.special:
            bos, ends = "<|begin_of_text|>", ["<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"]
        # With small tokenizers, whose models are pretrained here, a document ends as an answer
        # does: fine-tuning cannot teach a model to end with a token that it has never seen.
        eos = ends[-1] if len(self.special) == N_SMALL_SPECIAL else ends[0]
        self.bos, self.eos = self.special[bos], self.special[eos]
        self.beginning = [self.bos]
        self.stop = [self.special[token] for token in ends]
        self.names = {"bos_token": bos, "eos_token": ends[-1]}  # a template ends answers
        self.read_files(file)

    def read_files(self, file: Path | None) -> None:
        """Keep the tokenizer's file and the SETTINGS beside it. Take from them the chat template,
        or a default one, names of tokens, and more tokens that end generation."""
        self.files, self.template, more = {}, "", None
        if file:
            folder = file.parent.parent if file.parent.name == "original" else file.parent
            kind = "json" if file.suffix == ".json" else "model"
            self.files[f"tokenizer.{kind}"] = file.read_bytes()
            found = (name for name in SETTINGS if (folder / name).is_file())
            self.files |= {name: (folder / name).read_bytes() for name in found}
            self.names |= token_names(folder)
            self.template = chat_template(folder)
            more = read_settings(folder, "generation_config.json").get("eos_token_id")
        ids = (i for i in (more if isinstance(more, list) else [more]) if isinstance(i, int))
        self.stop = tuple(dict.fromkeys([*self.stop, *(i for i in ids if i in self.pieces)]))
        if not self.template:
            self.template = default_template(self.special, bool(self.beginning))
            name_of = {i: token for token, i in self.special.items()}
            self.names.setdefault("bos_token", name_of.get(self.bos, ""))
            self.names.setdefault("eos_token", name_of[self.stop[0]])

    @functools.cached_property
    def special_pattern(self) -> re.Pattern:
        """Pattern of the special tokens' names, the longest first, with the spaces they take."""
        patterns = []
        for name in sorted(self.special, key=len, reverse=True):
            left, right = (r"\s*" if takes else "" for takes in self.spaces.get(name, (0, 0)))
            patterns.append(left + re.escape(name) + right)
        return re.compile(f"({'|'.join(patterns)})")

    def encode(self, text: str, bos: bool = False) -> list[int]:
        """Return the ids of a text. Names of special tokens in it are encoded as ordinary text."""
        return self.beginning * bos + self.encoding.encode_ordinary(text)

    def encode_array(self, text: str) -> np.ndarray:
        """Return the ids of a long text as uint32, faster than `encode`."""
        return self.encoding.encode_to_numpy(text, disallowed_special=())

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of ids; bytes that are not UTF-8 become U+FFFD."""
        return self.decode_bytes(tokens).decode(errors="replace")

    def decode_bytes(self, tokens: Iterable[int]) -> bytes:
        """Return the bytes of ids. Ids without a token are left out: a model may generate some if
        its vocabulary is larger than the tokenizer's."""
        return b"".join(self.pieces.get(token, b"") for token in tokens)

    @functools.cached_property
    def hash(self) -> str:
        """Fingerprint of all tokens and of the pre-tokenization. If two are equal, the tokenizers
        encode alike."""
        vocab = sorted(self.vocab.items(), key=lambda item: item[1])
        meaning = repr((vocab, sorted(self.special.items()), self.word_pattern))
        return hashlib.sha256(meaning.encode()).hexdigest()[:16]

    @functools.cached_property
    def token_bytes(self) -> np.ndarray:
        """Bytes of text in each token [V]: 0 for special tokens and for ids without a token."""
        lengths = np.zeros(self.vocab_size, dtype=np.int64)
        lengths[list(self.pieces)] = [len(piece) for piece in self.pieces.values()]
        lengths[list(self.special.values())] = 0
        return lengths

    def count_bytes(self, targets: np.ndarray) -> int:
        """Return the bytes of text in targets of any shape; what is no id counts as none."""
        is_id = (targets >= 0) & (targets < self.vocab_size)
        return int(self.token_bytes[targets[is_id]].sum())

    def in_printable_characters(self) -> tuple[dict[str, int], list[tuple[str, str]]]:
        """Return the ordinary tokens in GPT-2's alphabet with their ids, and all merges, the
        preferred ones first.

        Meta's format has no merges: any two tokens that make a third may be merged, and a merge
        with a lower resulting id is preferred."""
        vocab = {"".join(map(CHARACTER_OF_BYTE.get, token)): i for token, i in self.vocab.items()}
        merges = []
        for token in sorted(vocab, key=vocab.get):
            pairs = [(token[:i], token[i:]) for i in range(1, len(token))]
            pairs = [pair for pair in pairs if all(part in vocab for part in pair)]
            merges += sorted(pairs, key=lambda pair: [vocab[part] for part in pair])
        return vocab, merges

    def save(self, directory: Path) -> dict[str, str]:
        """Write the tokenizer's files, unless its name is enough to load it. Return what the
        directory's metadata are to say of it."""
        for name, content in self.files.items():
            (directory / name).write_bytes(content)
        name = next(iter(self.files), self.name)
        return {"tokenizer": name, "tokenizer_hash": self.hash}

    def save_published(self, directory: Path) -> None:
        """Write the tokenizer's files and, unless it has none, what transformers needs beside them;
        then what a chat needs: a template, and the tokens that end an answer."""
        self.save(directory)
        made = {}
        if self.files and "tokenizer.json" not in self.files:
            made["tokenizer.json"] = _published(self)
        if self.files and "tokenizer_config.json" not in self.files:
            kind = dict(
                tokenizer_class="PreTrainedTokenizerFast", clean_up_tokenization_spaces=False
            )
            made["tokenizer_config.json"] = kind | self.names
        if settings := read_settings(directory, "generation_config.json"):
            made["generation_config.json"] = settings | {"eos_token_id": list(self.stop)}
        for file, content in made.items():
            (directory / file).write_text(json.dumps(content, ensure_ascii=False), "utf-8")
        if not chat_template(directory):
            (directory / "chat_template.jinja").write_text(self.template, "utf-8")


# -------------------------------------------------------------------------------------- loading


def load_tokenizer(name: str) -> Tokenizer:
    """Return a tokenizer by name or path. Raise UserError where there is none.

    bytes             every byte is a token
    python-2048       a tokenizer of 2048 tokens (or any other number), trained on the default
                      corpus when it is first used
    a path            a `tokenizer.model` in Meta's format, a `tokenizer.json` of Hugging Face's,
                      or a directory with one of them
    gpt2, ...         tiktoken's encodings, which tiktoken downloads"""
    if name == "bytes":
        vocab = {bytes([i]): i for i in range(256)}
        return Tokenizer(name, _encoding(name, vocab, BYTES_PATTERN))
    path = find_tokenizer(Path(name)) or Path(name)
    python_size = regex.fullmatch(r"python-(\d{1,6})", name)
    if not path.is_file() and python_size:
        path = CACHE / f"{name}-{sys.version_info[0]}.{sys.version_info[1]}.model"
        if not path.exists():
            print(f"training tokenizer {name}, once, in {path}", file=sys.stderr)
            train_tokenizer(["python"], int(python_size[1]), path)
    if path.is_file() and path.suffix == ".json":
        from text.published import PublishedTokenizer

        return _read_tokenizer_json(name, path) or PublishedTokenizer(name, path)
    if path.is_file():
        vocab = _read_model_file(path)
        if not _has_all_ids(vocab):
            raise UserError(
                f"{path} is no tokenizer: expected ids 0, 1, 2, ... of 256 tokens or more"
            )
        return Tokenizer(name, _encoding(name, vocab, WORD_PATTERN), path)
    if name not in tiktoken.list_encoding_names():
        known = ", ".join(["bytes", DEFAULT_TOKENIZER, *tiktoken.list_encoding_names()])
        raise UserError(f"no tokenizer '{name}': give a tokenizer.model file or one of {known}")
    try:
        return Tokenizer(name, tiktoken.get_encoding(name))
    except OSError as error:  # the errors of requests, which downloads, are OSErrors
        reason = type(error).__name__
        raise OtherKind(f"tiktoken cannot download '{name}' ({reason}): give --tokenizer bytes")


def find_tokenizer(directory: Path) -> Path | None:
    """Return the tokenizer file in a model directory. A tokenizer.json may have more tokens than a
    tokenizer.model, which Meta's models on Hugging Face have in the subdirectory `original`."""
    names = ("tokenizer.json", "tokenizer.model", "original/tokenizer.model")
    return next((directory / name for name in names if (directory / name).is_file()), None)


def _has_all_ids(vocab: dict[bytes, int]) -> bool:
    has_bytes = all(bytes([byte]) in vocab for byte in range(256))  # tiktoken dies without one
    return has_bytes and sorted(vocab.values()) == list(range(len(vocab)))


def _encoding(name: str, vocab: dict[bytes, int], word_pattern: str) -> tiktoken.Encoding:
    """Return the encoding of ordinary tokens, with special tokens of Llama 3 after them."""
    n_special = len(SPECIAL) if len(vocab) == LLAMA3_VOCAB_SIZE else N_SMALL_SPECIAL
    special = {token: len(vocab) + i for i, token in enumerate(SPECIAL[:n_special])}
    return tiktoken.Encoding(
        name, pat_str=word_pattern, mergeable_ranks=vocab, special_tokens=special
    )


# ----------------------------------------------------------------- Meta's file: tokenizer.model
# A line for each ordinary token: base64 of its bytes, a space, its id.


def _read_model_file(path: Path) -> dict[bytes, int]:
    """Return the ordinary tokens of a `tokenizer.model` with their ids.

    tiktoken can read such files too, but does not notice when the file at a path has changed."""
    vocab: dict[bytes, int] = {}
    content = path.read_bytes()
    if content.startswith(b"\n"):
        raise OtherKind(f"{path} is SentencePiece's: only a tokenizer.json beside it is read")
    try:
        for line in content.splitlines():
            token, i = line.split()
            vocab[base64.b64decode(token, validate=True)] = int(i)
    except ValueError:
        where = f"{path}, line {len(vocab) + 1}"
        raise UserError(f"{where}: expected a token in base64 and its id, as in a tokenizer.model")
    if not _has_all_ids(vocab):
        raise UserError(f"{path} is no tokenizer: expected ids 0, 1, 2, ... of 256 tokens or more")
    return vocab


# ---------------------------------------------------- Hugging Face's files: tokenizer.json, ...
# JSON cannot hold bytes, so a token is written in GPT-2's alphabet, which has a character for each
# byte: a printable character of Latin-1 for itself, U+0100 and the following for the 68 others.

_PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
CHARACTER_OF_BYTE = {byte: chr(byte) for byte in _PRINTABLE}
CHARACTER_OF_BYTE |= {byte: chr(256 + i) for i, byte in enumerate(_OTHERS)}
BYTE_OF_CHARACTER = {character: byte for byte, character in CHARACTER_OF_BYTE.items()}


def _published(tokenizer: Tokenizer) -> dict:
    """Return the content of a tokenizer.json."""
    vocab, merges = tokenizer.in_printable_characters()
    flags = dict(single_word=False, lstrip=False, rstrip=False, normalized=False, special=True)
    special = [{"id": i, "content": token, **flags} for token, i in tokenizer.special.items()]
    pattern = {"Regex": tokenizer.word_pattern}
    split = dict(type="Split", pattern=pattern, behavior="Isolated", invert=False)
    byte_level = dict(type="ByteLevel", add_prefix_space=False, trim_offsets=True, use_regex=False)
    bos = next(token for token, i in tokenizer.special.items() if i == tokenizer.bos)
    begin = {"SpecialToken": {"id": bos, "type_id": 0}}  # as in training; Meta's file has it, too
    text, second = ({"Sequence": {"id": name, "type_id": i}} for i, name in enumerate("AB"))
    merges = [" ".join(pair) for pair in merges]
    return {
        "version": "1.0",
        "normalizer": None,
        "added_tokens": special,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [begin, text],
            "pair": [begin, text, begin, second],
            "special_tokens": {bos: {"id": bos, "ids": [tokenizer.bos], "tokens": [bos]}},
        },
        "decoder": byte_level,
        # With ignore_merges, a word that is a token is not merged from its bytes.
        "model": dict(type="BPE", ignore_merges=True, vocab=vocab, merges=merges),
    }


def _read_tokenizer_json(name: str, path: Path) -> Tokenizer | None:
    """Return the tokenizer in a tokenizer.json if it says just what is written here: if it is
    Meta's, or one that was trained here. Only then can tiktoken read it; else return None."""
    theirs = dict(JsonFile(path))
    try:
        model, processor = theirs["model"], theirs["post_processor"]
        vocab = {bytes(map(BYTE_OF_CHARACTER.get, t)): i for t, i in model["vocab"].items()}
        if not _has_all_ids(vocab):
            return None
        tokenizer = Tokenizer(name, _encoding(name, vocab, WORD_PATTERN), path)
        ours = _published(tokenizer)
        model["merges"] = [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]
        model = {k: value for k, value in model.items() if value or k in ours["model"]}
        # Llama 3.0 had reserved tokens that Llama 3.1 named.
        added = [
            token | {"content": named} if token["content"] in RESERVED else token
            for token, named in zip(theirs["added_tokens"], tokenizer.special, strict=True)
        ]
        parts = processor.get("processors") or [processor]
        is_same = (
            model == ours["model"]
            and added == ours["added_tokens"]
            and theirs.get("normalizer") is None
            and theirs["pre_tokenizer"] == ours["pre_tokenizer"]
            and [part["single"] for part in parts if "single" in part]
            == [ours["post_processor"]["single"]]
        )
    except (AttributeError, KeyError, TypeError, ValueError):
        return None
    return tokenizer if is_same else None


# ------------------------------------------------------------------------------------- training


def train_tokenizer(
    sources: list[str], vocab_size: int, out: Path, reading: Reading | None = None
) -> None:
    """Train a tokenizer of `vocab_size` tokens, special ones included, on a corpus and write it as
    a `tokenizer.model`. Raise UserError if these are too few for the bytes and special tokens."""
    if vocab_size < (smallest := 256 + N_SMALL_SPECIAL):
        raise UserError(f"a tokenizer of {vocab_size} tokens is too small: ask for {smallest}")
    files = find_files(sources)
    # 8 MiB are enough, taken evenly from the corpus.
    stride = max(1, sum(path.stat().st_size for path in files) // (8 << 20))
    words, documents = Counter(), Counter()
    for i, piece in enumerate(read_pieces(files, reading or Reading())):
        documents[piece.split] += piece.starts_document
        if piece.split == "train" and i % stride == 0:
            words.update(regex.findall(WORD_PATTERN, piece.text))
    tokens = train_bpe(words, vocab_size - N_SMALL_SPECIAL)
    lines = (b"%s %d\n" % (base64.b64encode(token), i) for i, token in enumerate(tokens))
    with hidden_until_complete(out) as hidden:
        hidden.write_bytes(b"".join(lines))
    trained = _encoding(out.name, {token: i for i, token in enumerate(tokens)}, WORD_PATTERN)
    n_bytes = sum(n * len(word.encode()) for word, n in words.items())
    n_tokens = sum(n * len(trained.encode_ordinary(word)) for word, n in words.items())
    per_token = n_bytes / max(n_tokens, 1)
    print(
        f"{trained.n_vocab:,} of {vocab_size:,} tokens, {per_token:.2f} bytes a token; "
        f"{documents['train']:,} documents, and {documents['val']:,} held out",
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
    when it is popped, it is compared with the count and, if out of date, pushed again."""
    tokens = [bytes([i]) for i in range(256)]
    # A word is a string with a character for each token, whose code is the token's id.
    in_tokens = [word.encode().decode("latin-1") for word in words]
    frequencies = list(words.values())
    pair_counts: Counter[tuple[str, str]] = Counter()
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
        left, right = map(ord, pair)
        tokens.append(tokens[left] + tokens[right])
        progress.add()
        grown = set()  # pairs whose count may have risen
        for w in words_with.pop(pair):
            merged = in_tokens[w].replace("".join(pair), chr(len(tokens) - 1))
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
