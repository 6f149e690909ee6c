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
import argparse
import codecs
import contextlib
import math
import sys
from collections.abc import Iterator, Sequence
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
from plumbing.messages import UserError, print_rank_zero
from plumbing.parser import Parser, nonnegative_float, nonnegative_int, positive_int
from plumbing.processes import Process, init_distributed, run
from techniques.nf4 import why_no_blocks
from text.chat import Conversation, drop_oldest, encode_prompt
from text.tokenizer import Tokenizer, load_tokenizer


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that say which model, for find_model and load_model."""
    # fmt: off
    add = parser.add_argument
    add("checkpoint", type=Path, help="a run, a checkpoint, or Meta's or Hugging Face's directory")
    add("--adapter", type=Path, metavar="DIR", help="a run of finetune_lora.py, or PEFT's files")
    add("--base-bits", type=int, choices=[16, 4], default=16,
        help="4: blocks in 4 bits, with a quarter of the memory, and slower")
    add("--tokenizer", help="tokenizer name or file (default: the checkpoint's)")
    # fmt: on


def parse_args() -> argparse.Namespace:
    parser = Parser(description="Generate text from a checkpoint.")
    # fmt: off
    add_model_flags(parser)
    add = parser.add_argument
    add("--prompt", action="append", default=[], help="text to continue; several form a batch")
    add("--chat", action="store_true",
        help="prompts are messages to a chat model; without one, a conversation")
    add("--system", metavar="TEXT", help="system prompt, the message with which a chat begins")
    add("--max-new-tokens", type=positive_int, default=200, help="tokens of an answer at most")
    add("--temperature", type=nonnegative_float, default=0.8,
        help="sampling temperature; 0 takes the most likely token")
    add("--top-k", type=nonnegative_int, default=0,
        help="number of most likely tokens to sample from; 0 for all")
    add("--top-p", type=nonnegative_float, default=0.95,
        help="total probability of the most likely tokens to sample from")
    add("--seed", type=int, default=0, help="seed of the sampling")
    # fmt: on
    args = parser.parse_args()
    if args.system is not None and not args.chat:
        raise UserError("--system is a message to a chat model: give --chat, too")
    return args


# ------------------------------------------------------------------------------------ sampling


def sample(logits: Tensor, temperature: float, top_k: int, top_p: float, uniform: Tensor) -> Tensor:
    """Draw one token from each row of logits [B, V] -> [B], by `uniform` numbers [B] below 1.

    temperature 0 takes the most likely token; top_k > 0 keeps the k most likely; top_p < 1 keeps
    the fewest most likely ones whose total probability reaches top_p (nucleus sampling, Holtzman et
    al. 2020, arXiv:1904.09751). labs/speculative draws from the same distribution in fewer calls of
    the model."""
    if temperature < 1e-30:  # too small to divide by
        return logits.argmax(-1)
    logits, order = (logits.float() / temperature).sort(-1, descending=True)  # [B, V] both
    if top_k > 0:
        logits[:, top_k:] = -math.inf
    p = logits.softmax(-1)
    before = p.cumsum(-1) - p  # total probability of all more likely tokens
    p[:, 1:][before[:, 1:] >= top_p] = 0  # the most likely token always stays
    ends = p.to(uniform.dtype).cumsum(-1)  # where each token's share of [0, sum of p) ends
    choice = torch.searchsorted(ends, uniform[:, None] * ends[:, -1:])  # [B, 1]
    return order.gather(1, choice).squeeze(1)


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
    are left-padded; the padding is a document of its own, which no prompt attends to. If the model
    is split over ranks, all ranks must call this with the same arguments.
    A row draws by random numbers of its own, a function of the seed and the row's number (by
    default 0, 1, ...). If `log_p` is a list, it gets [B] for each step: log p of the tokens by the
    model itself, without temperature, top_k and top_p."""
    device, cpu = next(model.parameters()).device, torch.device("cpu")
    numbers = range(len(prompts)) if numbers is None else numbers
    draw = partial(torch.rand, max_new_tokens, dtype=widest_float(device))
    of_rows = [draw(generator=generator_for(f"row {number}", seed, cpu)) for number in numbers]
    uniform = torch.stack(of_rows, 1).to(device)  # [max_new_tokens, B]
    T = max(len(prompt) for prompt in prompts)
    tokens = torch.tensor([[0] * (T - len(p)) + p for p in prompts], device=device)  # [B, T]
    rows = [[*range(T - len(p)), *range(len(p))] for p in prompts]
    positions = torch.tensor(rows, device=device)  # [B, T]
    cache, running = KVCache(), [True] * len(prompts)
    for drawn in uniform:  # `tokens` are first the prompts, then a new one of each row
        parts = zip(tokens.split(AT_A_TIME, 1), positions.split(AT_A_TIME, 1))
        *_, last = (model(part, positions=at, cache=cache) for part, at in parts)
        logits = last[:, -1].to(device)  # [B, V]
        if not logits.amax(1).isfinite().all():
            raise UserError("the model gives no finite logits: use weights from before it diverged")
        tokens = sample(logits, temperature, top_k, top_p, drawn)[:, None]  # [B, 1]
        if log_p is not None:
            wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
            log_p.append(wide.log_softmax(-1).gather(1, tokens).squeeze(1))
        positions = positions[:, -1:] + 1  # [B, 1]
        new = tokens.squeeze(1).tolist()
        yield [token if alive else None for token, alive in zip(new, running)]
        running = [alive and token not in stop for token, alive in zip(new, running)]
        if not any(running):
            return


def generate(model: nn.Module, prompts: list[list[int]], max_new_tokens: int, **options):
    """Return the new tokens of each prompt as a list; arguments as for `stream`."""
    steps = stream(model, prompts, max_new_tokens, **options)
    return [[token for token in row if token is not None] for row in zip(*steps)]


# --------------------------------------------------------------------------------- the command


def check_length(length: int, max_new_tokens: int, max_seq_len: int) -> None:
    """Raise UserError if the model has too few positions for a prompt and its continuation."""
    if length + max_new_tokens > max_seq_len:
        raise UserError(
            f"a prompt of {length} tokens and --max-new-tokens {max_new_tokens} are more than the "
            f"{max_seq_len} tokens of this model"
        )


def find_model(directory: Path, tokenizer: str | None, process: Process) -> tuple[dict, Tokenizer]:
    """Return what read_config says of the model that is found in a directory, and the
    `tokenizer`, by default the model's own."""
    directory = process.broadcast_from_rank_zero(partial(find_checkpoint, directory))
    metadata = read_config(directory)
    if not (name := tokenizer or metadata["tokenizer"]):
        raise UserError(f"{directory} has no tokenizer.model: give its --tokenizer")
    loaded = process.local_rank_zero_first(partial(load_tokenizer, name))
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
    new, longest = options["max_new_tokens"], model.config.max_seq_len
    asked = [*messages, {"role": "user", "content": text}]
    kept = drop_oldest(asked, tokenizer, longest - new)
    prompt = encode_prompt(kept, tokenizer)
    try:
        check_length(len(prompt), new, longest)
    except UserError as error:
        print(f"{error}: type a shorter message", file=sys.stderr)
        return messages
    if dropped := len(asked) - len(kept):
        note = f"the conversation and --max-new-tokens {new} are more than the {longest} tokens of"
        print(f"{note} this model: its {dropped} oldest messages are dropped", file=sys.stderr)
    said = ""
    with contextlib.suppress(KeyboardInterrupt):  # what has been said until then is the answer
        for piece in stream_text(model, prompt, tokenizer, **options):
            said += piece
            print(piece, end="", flush=True)
    print()
    return [*kept, {"role": "assistant", "content": said}] if said.strip() else messages


def main() -> None:
    args = parse_args()
    process = init_distributed()  # under torchrun all ranks do the same work, and rank 0 prints
    process.check_same_flags(vars(args))  # all ranks have joined: now an error ends them all
    has_conversation = args.chat and not args.prompt
    if has_conversation and process.size > 1:
        raise UserError("a conversation needs one process: run python generate.py, not torchrun")
    metadata, tokenizer = find_model(args.checkpoint, args.tokenizer, process)
    args.adapter = args.adapter and find_adapter(args.adapter, metadata["directory"])
    texts = args.prompt or [""]  # for a conversation, only to check the length
    system = [{"role": "system", "content": args.system}] if args.system else []
    if args.chat:
        chats = [[*system, {"role": "user", "content": text}] for text in texts]
        prompts = [encode_prompt(messages, tokenizer) for messages in chats]
    else:
        prompts = [tokenizer.encode(text, bos=True) for text in texts]
    check_length(max(map(len, prompts)), args.max_new_tokens, metadata["model"].max_seq_len)
    directory, config = metadata["directory"], metadata["model"]
    model = load_model(directory, config, args.adapter, args.base_bits, process.device)

    names = ("max_new_tokens", "temperature", "top_k", "top_p", "seed")
    options = {name: getattr(args, name) for name in names} | {"stop": tokenizer.stop}
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
