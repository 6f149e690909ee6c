"""Generate text from any checkpoint.

    python generate.py out/tiny --prompt "def"
    python generate.py out/tiny/step-00001000 --prompt "import " --prompt "class " --temperature 0
    python generate.py DIR --chat --prompt "What is a tensor?"      a question to a chat model
    python generate.py DIR --chat --system "Be brief."              a conversation with it
    python generate.py DIR --adapter out/tiny-lora --chat ...       with a LoRA adapter
    python generate.py DIR --base-bits 4 --chat ...                 a 70B on one GPU

DIR is a run, one of its checkpoints, or a model directory of Meta or Hugging Face.

One prompt is continued as you watch. Several prompts are continued as one batch, and printed when
all of them have ended. In a conversation, every line that you type is a message, and the model
reads all messages before it answers. Ctrl-C stops an answer, Ctrl-D ends the conversation.
"""

import plumbing.endings  # first, for Ctrl-C during the imports
import codecs
import contextlib
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from files.adapters import open_adapter
from files.directories import check_tokenizer, find_adapter, find_checkpoint, read_config
from files.loading import load_pretrained
from lora import LoRA, add_adapters
from model import KVCache, Llama, LlamaConfig, generator_for
from plumbing.devices import has_bfloat16, widest_float
from plumbing.flags import flag, values_of
from plumbing.joining import init_distributed
from plumbing.messages import UserError, print_rank_zero
from plumbing.parser import nonnegative_int, parse
from plumbing.processes import Process, run
from techniques.nf4 import why_no_blocks
from text.targets import drop_oldest, encode_prompt
from text.templates import Conversation
from text.tokenizer import Tokenizer, load_tokenizer

# fmt: off


@dataclass(frozen=True)
class ModelToLoad:
    """Which model a command loads, for find_model and load_model."""

    checkpoint: Path = flag(None, "a run, a checkpoint, or Meta's or Hugging Face's directory",
                            type=Path, is_positional=True)
    adapter: Path | None = flag(None, "a run of finetune_lora.py, or PEFT's files", type=Path,
                                metavar="DIR")
    base_bits: int = flag(16, "4: blocks in 4 bits, with a quarter of the memory, and slower",
                          type=int, choices=[16, 4])
    tokenizer: str | None = flag(None, "tokenizer name or file (default: the checkpoint's)")
    chat_template: str | None = flag(None, "one of the model's templates, or a file",
                                     metavar="NAME|FILE")


@dataclass(frozen=True)
class Generation(ModelToLoad):
    """Generate text from a checkpoint."""

    prompt: tuple[str, ...] = flag((), "text to continue; several form a batch", action="append")
    chat: bool = flag(False, "prompts are messages to a chat model; without one, a conversation")
    system: str | None = flag(None, "system prompt, the message with which a chat begins",
                              metavar="TEXT")
    max_new_tokens: int = flag(200, "tokens of an answer at most")
    temperature: float = flag(0.8, "sampling temperature; 0 takes the most likely token")
    top_k: int = flag(0, "number of most likely tokens to sample from; 0 for all",
                      type=nonnegative_int)
    top_p: float = flag(0.95, "total probability of the most likely tokens to sample from")
    seed: int = flag(0, "seed of the sampling", type=int)
    # fmt: on

    def check(self) -> None:
        if self.system is not None and not self.chat:
            raise UserError("--system is a message to a chat model: give --chat, too")


# ------------------------------------------------------------------------------------ sampling


def sample(logits: Tensor, temperature: float, top_k: int, top_p: float, uniform: Tensor) -> Tensor:
    """Draw one token from each row of logits [B, V] -> [B], by `uniform` numbers [B] below 1.

    temperature 0 takes the most likely token; top_k > 0 keeps the k most likely; top_p < 1 keeps
    the fewest most likely ones whose total probability reaches top_p (nucleus sampling, Holtzman et
    al. 2020, arXiv:1904.09751). labs/speculative draws from the same distribution in fewer calls of
    the model."""
    if temperature < 1e-30:  # too small to divide by
        return logits.argmax(-1)
    scaled = logits.float() / temperature
    if top_k == 0 and top_p >= 1:
        return draw(scaled.softmax(-1), uniform)
    ranked, order = scaled.sort(-1, descending=True)  # [B, V] both
    if top_k > 0:
        ranked[:, top_k:] = -math.inf
    p = ranked.softmax(-1)
    before = p.cumsum(-1) - p  # total probability of all more likely tokens
    p[:, 1:][before[:, 1:] >= top_p] = 0  # the most likely token always stays
    return order.gather(1, draw(p, uniform)[:, None]).squeeze(1)


def draw(p: Tensor, uniform: Tensor) -> Tensor:
    """Draw an index from each row of p [B, V], whose sum need not be 1, by numbers [B] -> [B]."""
    ends = p.to(uniform.dtype).cumsum(-1)  # where each index's share of [0, sum of p) ends
    drawn = uniform[:, None] * ends[:, -1:]  # [B, 1]
    return torch.searchsorted(ends, drawn).squeeze(1)


AT_A_TIME = 2048  # tokens of a prompt: the mask of a longer piece would not fit


@torch.no_grad()
def stream(
    model: nn.Module,
    prompts: list[list[int]],
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    stop: tuple[int, ...] = (),
    seed: int = 0,
    numbers: Sequence[int] | None = None,
    log_p: list[Tensor] | None = None,
) -> Iterator[list[int | None]]:
    """Continue every prompt, one token at a time: yield B tokens a step, None for finished rows.

    A row is finished after a token of `stop`, which is yielded too. Prompts of different lengths
    are left-padded; the padding is a document of its own, which no prompt attends to. A prompt that
    several rows continue is read once, and a finished row is computed no more. If the model is
    split over ranks, all ranks must call this with the same arguments.
    A row draws by random numbers of its own, a function of the seed and the row's number (by
    default 0, 1, ...). If `log_p` is a list, it gets [B] for each step: log p of the tokens by the
    model itself, without temperature, top_k and top_p."""
    device = next(model.parameters()).device
    draws = []
    for number in numbers or range(len(prompts)):
        generator = generator_for(f"row {number}", seed, torch.device("cpu"))
        draws.append(torch.rand(max_new_tokens, dtype=widest_float(device), generator=generator))
    uniform = torch.stack(draws, 1).to(device)  # [max_new_tokens, B]
    distinct = list(dict.fromkeys(map(tuple, prompts)))  # each is read once
    tokens, positions = left_padded(distinct, device)
    cache = KVCache()
    for part, at in zip(tokens.split(AT_A_TIME, 1), positions.split(AT_A_TIME, 1)):
        last = model(part, positions=at, cache=cache)
    rows = torch.tensor([distinct.index(tuple(prompt)) for prompt in prompts], device=device)
    take_rows(cache, rows)
    last = last[rows]
    positions = positions[rows, -1:]  # [B, 1]
    running = torch.arange(len(prompts), device=device)  # the prompts whose rows are left,
    alive = running.tolist()  # and the same on the host
    for step, drawn in enumerate(uniform):
        if step > 0:
            positions = positions + 1
            last = model(tokens[:, None], positions=positions, cache=cache)
        logits = last[:, -1].to(device)  # [rows, V]
        if not logits.amax(1).isfinite().all():
            raise UserError("the model gives no finite logits: use weights from before it diverged")
        tokens = sample(logits, temperature, top_k, top_p, drawn[running])
        if log_p is not None:
            wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
            log_p_of_all = wide.log_softmax(-1)  # [rows, V]
            of_step = wide.new_zeros(len(prompts))
            of_step[running] = log_p_of_all.gather(1, tokens[:, None]).squeeze(1)
            log_p.append(of_step)
        new = dict(zip(alive, tokens.tolist()))
        yield [new.get(prompt) for prompt in range(len(prompts))]
        left = [row for row, token in enumerate(new.values()) if token not in stop]
        if not left:
            return
        if len(left) < len(alive):  # finished rows leave the batch
            rows = torch.tensor(left, device=device)
            take_rows(cache, rows)
            tokens = tokens[rows]
            positions = positions[rows]
            running = running[rows]
            alive = running.tolist()


def left_padded(prompts: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return tokens and positions of prompts [B, T]; those of the padding count from 0, too."""
    T = max(map(len, prompts))
    padded, places = [], []
    for prompt in prompts:
        padding = T - len(prompt)
        padded.append([0] * padding + [*prompt])
        places.append([*range(padding), *range(len(prompt))])
    return torch.tensor(padded, device=device), torch.tensor(places, device=device)


def take_rows(cache: KVCache, rows: Tensor) -> None:
    """Keep these rows of a cache, in this order; a row may be taken several times."""
    for part in cache.parts or [cache]:
        part.positions = part.positions[rows]
        for layer, (k, v) in part.layers.items():
            part.layers[layer] = k[rows], v[rows]


def generate(model: nn.Module, prompts: list[list[int]], max_new_tokens: int, **options):
    """Return the new tokens of each prompt as a list; arguments as for `stream`."""
    rows = [[] for _ in prompts]
    for step in stream(model, prompts, max_new_tokens, **options):
        for row, token in zip(rows, step):
            if token is not None:
                row.append(token)
    return rows


# --------------------------------------------------------------------------------- the command


def check_length(length: int, max_new_tokens: int, max_seq_len: int) -> None:
    """Raise UserError if the model has too few positions for a prompt and its continuation."""
    if length + max_new_tokens > max_seq_len:
        raise UserError(
            f"a prompt of {length} tokens and --max-new-tokens {max_new_tokens} are more than the "
            f"{max_seq_len} tokens of this model"
        )


def find_model(
    directory: Path, tokenizer: str | None, process: Process, template: str | None = None
) -> tuple[dict, Tokenizer]:
    """Return what read_config says of the model that is found in a directory, and the
    `tokenizer`, by default the model's own, with a chat template: see load_tokenizer."""
    directory = process.broadcast_from_rank_zero(partial(find_checkpoint, directory))
    metadata = read_config(directory)
    if not (name := tokenizer or metadata["tokenizer"]):
        raise UserError(f"{directory} has no tokenizer.model: give its --tokenizer")
    loaded = process.local_rank_zero_first(partial(load_tokenizer, name, template))
    check_tokenizer(metadata, loaded)
    return metadata, loaded


def load_model(
    directory: Path, config: LlamaConfig, adapter: Path | None, base_bits: int, device: torch.device
) -> Llama:
    """Return a model with the adapter, if any: merged, unless the base is in 4 bits."""
    dtype = torch.bfloat16 if has_bfloat16(device) else torch.float32
    if base_bits == 16:
        return load_pretrained(directory, dtype, device, adapter=adapter)
    if reason := why_no_blocks(config):
        raise UserError(reason)
    lora = open_adapter(adapter, config)[0] if adapter else LoRA(targets=())
    in_4_bits = partial(add_adapters, lora=lora, base_bits=4)  # without targets, it adds none
    return load_pretrained(directory, dtype, device, in_4_bits, adapter)


def stream_text(model: Llama, prompt: list[int], tokenizer: Tokenizer, **options) -> Iterator[str]:
    """Yield the text that continues a prompt, piece by piece; `options` as for stream."""
    # A character may consist of several tokens: the decoder waits for the last of its bytes.
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    for (token,) in stream(model, [prompt], **options):
        if token not in tokenizer.stop:
            yield decoder.decode(tokenizer.decode_bytes([token]))
    yield decoder.decode(b"", final=True)


def converse(model: Llama, tokenizer: Tokenizer, messages: Conversation, **options) -> None:
    """Answer the lines of standard input until it ends; `messages` is empty or a system prompt.

    In a terminal, Ctrl-C stops an answer or clears the line that is being typed. Otherwise, as in
    every other script, it ends the program."""
    in_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    sys.stdin.reconfigure(errors="replace")
    if in_terminal:
        with contextlib.suppress(ImportError):  # some builds of Python lack it
            import readline  # noqa: F401 (gives `input` a line editor and a history)
        print("Ctrl-C stops an answer, Ctrl-D ends the conversation", file=sys.stderr)
    is_stopped = False
    with plumbing.endings.ctrl_c_raises() if in_terminal else contextlib.nullcontext():
        while True:
            try:  # a second Ctrl-C may come in print, too
                if is_stopped:
                    print()
                is_stopped = False
                text = input("> " if in_terminal else "")
                if text.strip():
                    messages = answer(model, tokenizer, messages, text, **options)
                    options["seed"] += 1  # every answer is sampled with random numbers of its own
            except KeyboardInterrupt:
                is_stopped = True
            except EOFError:
                break
    print("\n" if in_terminal else "", end="")


def answer(
    model: Llama, tokenizer: Tokenizer, messages: Conversation, text: str, **options
) -> Conversation:
    """Print the answer to a message. Return the conversation with both, or as it was if the answer
    is empty, or the message too long even without the exchanges before it."""
    new = options["max_new_tokens"]
    longest = model.config.max_seq_len
    asked = [*messages, {"role": "user", "content": text}]
    kept = drop_oldest(asked, tokenizer, longest - new)
    prompt = encode_prompt(kept, tokenizer)
    try:
        check_length(len(prompt), new, longest)
    except UserError as error:
        print(f"{error}: type a shorter message", file=sys.stderr)
        return messages
    if len(kept) < len(asked):
        print(
            f"the conversation and --max-new-tokens {new} are more than the {longest} tokens of "
            f"this model: its {len(asked) - len(kept)} oldest messages are dropped",
            file=sys.stderr,
        )
    said = ""
    with contextlib.suppress(KeyboardInterrupt):  # what has been said until then is the answer
        for piece in stream_text(model, prompt, tokenizer, **options):
            said += piece
            print(piece, end="", flush=True)
    print()
    if not said.strip():
        return messages
    return [*kept, {"role": "assistant", "content": said}]


def main() -> None:
    args = parse(Generation)
    args.check()
    process = init_distributed()  # under torchrun all ranks do the same work, and rank 0 prints
    process.check_same_flags(values_of(args))  # all have joined: now an error ends them all
    has_conversation = args.chat and not args.prompt
    if has_conversation and process.size > 1:
        raise UserError("a conversation needs one process: run python generate.py, not torchrun")
    metadata, tokenizer = find_model(args.checkpoint, args.tokenizer, process, args.chat_template)
    adapter = args.adapter and find_adapter(args.adapter, metadata["directory"])
    texts = args.prompt or [""]  # for a conversation, only to check the length
    system = [{"role": "system", "content": args.system}] if args.system else []
    prompts = []
    for text in texts:
        if args.chat:
            asked = [*system, {"role": "user", "content": text}]
            prompts.append(encode_prompt(asked, tokenizer))
        else:
            prompts.append(tokenizer.encode(text, bos=True))
    check_length(max(map(len, prompts)), args.max_new_tokens, metadata["model"].max_seq_len)
    directory, config = metadata["directory"], metadata["model"]
    model = load_model(directory, config, adapter, args.base_bits, process.device)

    options = dict(
        max_new_tokens=args.max_new_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        seed=args.seed,
        stop=tokenizer.stop,
    )
    if has_conversation:
        converse(model, tokenizer, system, **options)
        return
    if len(prompts) > 1:
        for text, tokens in zip(texts, generate(model, prompts, **options)):
            tokens = [token for token in tokens if token not in tokenizer.stop]
            print_rank_zero(f"--- {text}{tokenizer.decode(tokens)}")
        return
    print_rank_zero("" if args.chat else texts[0], end="")
    for piece in stream_text(model, prompts[0], tokenizer, **options):
        print_rank_zero(piece, end="")
    print_rank_zero("\n", end="")


if __name__ == "__main__":
    run(main)
