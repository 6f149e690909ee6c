"""Decoding: prompts are continued token by token.

A prompt is read at once, which fills a cache of keys and values (kv_cache.py). Then each step
computes one token of every row, and draws the next one from its logits:

    prompt [B, T] ── model ── logits ── draw ── token [B, 1] ── model ── logits ── draw ── ...
                       └─ writes ─ cache ─ is read, and written by one token ─┘

A step of B rows reads all weights for B tokens. So few rows are limited by the memory's speed, on a
GPU also by the time to start kernels (cuda_graph.py), and many rows cost little more than one.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from model import generator_for
from plumbing.devices import widest_float
from plumbing.messages import UserError
from techniques.kv_cache import KVCache


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
LOOK_AFTER = {"cpu": 1}  # so many tokens are drawn before the host looks at them; elsewhere 8
ROOM = 128  # where each size is compiled or recorded anew, caches have a multiple of so many slots


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
    trace=None,
    cache: KVCache | None = None,
    compiled: bool = False,
    over_ranks: Callable[[int], int] = int,
) -> Iterator[list[int | None]]:
    """Continue every prompt, one token at a time: yield B tokens a step, None for finished rows.

    A row is finished after a token of `stop`, which is yielded too. Prompts of different lengths
    are left-padded. A prompt that several rows continue is read once. If the model is split over
    ranks, all ranks must call this with the same arguments.
    A row draws by random numbers of its own, a function of the seed and the row's number (by
    default 0, 1, ...). A `trace` is told what each step computes (Trace in runs/answers.py).
    A `cache` has the first tokens of a single prompt, which are not read again. If the model's
    blocks are `compiled`, finished rows stay in the batch: each other number of rows would be
    compiled.
    Under --ep every forward exchanges tokens with ranks that have other prompts, so that all must
    run it equally often: `over_ranks(n)` returns the largest n of these ranks; by default its own.
    """
    device = next(model.parameters()).device
    uniform = torch.empty(max_new_tokens, len(prompts), dtype=widest_float(device))  # on the CPU
    for row, number in enumerate(numbers or range(len(prompts))):
        uniform[:, row].uniform_(generator=generator_for(f"row {number}", seed, uniform.device))
    uniform = uniform.to(device)
    choose = partial(sample, temperature=temperature, top_k=top_k, top_p=top_p)
    length = over_ranks(max(map(len, prompts)))
    size = length + max_new_tokens
    if compiled or device.type != "cpu":
        size = math.ceil(size / ROOM) * ROOM
    cache = cache or KVCache()
    cache.make_room(size)
    batch = Continuation(model, cache, choose, uniform, trace)
    batch.read(prompts, length)
    step = batch.repeated_step()
    drawn = 1  # tokens of each row, the first of them by `read`
    looked_at = 0  # of these by the host
    is_running = [True] * len(prompts)
    while True:
        for tokens in batch.look(looked_at, drawn):
            if any(is_running):
                yield [token if runs else None for token, runs in zip(tokens, is_running)]
                is_running = [runs and token not in stop for token, runs in zip(tokens, is_running)]
        looked_at = drawn
        n_running = sum(is_running)
        to_draw = min(LOOK_AFTER.get(device.type, 8), max_new_tokens - drawn)
        if not to_draw or not over_ranks(n_running):
            return
        if 0 < n_running <= 0.75 * len(batch.remaining) and not compiled:
            batch.keep(is_running)
            step = batch.repeated_step()
        for _ in range(to_draw):
            step()
        drawn += to_draw


class Continuation:
    """The rows of a batch that are continued, each by one token in a step. The cache gives a row
    the keys and values of its earlier tokens, and hides the padding left of its prompt.

    What changes from one token to the next lies on the device, and is written in place. So a GPU
    can repeat a step (techniques/cuda_graph.py), and the host waits for no token before it starts
    the next step: it looks at several at once, and drops those after a row's end."""

    def __init__(self, model, cache: KVCache, choose: Callable, uniform: Tensor, trace):
        device = uniform.device
        self.model = model
        self.cache = cache
        self.choose = choose  # a token for each row, given logits [rows, V] and numbers [rows]
        self.uniform = uniform  # [steps, B]
        self.remaining = torch.arange(uniform.shape[1], device=device)  # numbers of rows
        self.count = torch.zeros(1, dtype=torch.int64, device=device)  # of steps taken
        self.tokens = torch.zeros_like(uniform, dtype=torch.int64)  # [steps, B], drawn
        self.are_finite = torch.tensor(True, device=device)  # all logits so far
        self.trace = trace

    def read(self, prompts: list[list[int]], length: int) -> None:
        """Read prompts, each distinct one once, and draw the first token of every row. All are
        padded to `length`."""
        distinct = list(dict.fromkeys(map(tuple, prompts)))
        tokens, positions = left_padded(distinct, length, self.remaining.device)
        unread = slice(self.cache.seen, None)  # in a conversation the cache has a beginning
        pieces = tokens[:, unread].split(AT_A_TIME, 1)
        their_positions = positions[:, unread].split(AT_A_TIME, 1)
        with torch.compiler.set_stance("force_eager"):  # prompts have all lengths
            for piece, at in zip(pieces, their_positions):
                logits = self.model(piece, positions=at, cache=self.cache)
                if self.trace:
                    self.trace.read(piece)
        prompt_of = [distinct.index(tuple(prompt)) for prompt in prompts]
        prompt_of = torch.tensor(prompt_of, device=self.remaining.device)
        if len(distinct) < len(prompts):
            self.cache.take(prompt_of)
        self.positions = positions[prompt_of, -1:]  # [rows, 1]
        self.newest = torch.zeros_like(self.positions)  # tokens [rows, 1]
        self.draw(logits[prompt_of])

    def step(self) -> None:
        """Compute the logits of every row's newest token, and draw the next one."""
        self.positions += 1
        logits = self.model(self.newest, positions=self.positions, cache=self.cache)
        if self.trace:
            self.trace.computed((self.count, self.remaining))
        self.draw(logits)

    def repeated_step(self) -> Callable[[], None]:
        """Return `step` or, on a GPU, what repeats it for the rows that are left now."""
        device = self.remaining.device
        if device.type != "cuda":
            return self.step
        from techniques.cuda_graph import Repeated  # here: no other device has graphs

        return Repeated(self.step, device)

    def draw(self, logits: Tensor) -> None:
        """Draw a token of each remaining row, from logits [rows, 1, V]."""
        logits = logits[:, -1].to(self.uniform.device)
        drawn_now = self.count, self.remaining
        tokens = self.choose(logits, uniform=self.uniform[drawn_now])  # [rows]
        self.tokens[drawn_now] = tokens
        if self.trace:
            self.trace.drawn(drawn_now, logits, tokens)
        self.are_finite &= logits.amax(1).isfinite().all()
        self.newest.copy_(tokens[:, None])
        self.count += 1

    def look(self, begin: int, end: int) -> list[list[int]]:
        """Return the tokens of steps `begin` to `end`, B each. Raise UserError if logits are not
        finite."""
        if not self.are_finite:
            raise UserError("the model gives no finite logits: use weights from before it diverged")
        return self.tokens[begin:end].tolist()

    def keep(self, is_running: list[bool]) -> None:
        """Compute those rows alone that are still running."""
        goes_on = torch.tensor(is_running, device=self.remaining.device)[self.remaining]
        kept = goes_on.nonzero().squeeze(1)
        self.cache.take(kept)
        self.remaining = self.remaining[kept]
        self.positions = self.positions[kept]
        self.newest = self.newest[kept]


def left_padded(
    prompts: Sequence[Sequence[int]], length: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return tokens and positions of prompts [B, length]. Each token of the padding has position 0:
    it is a document of its own, to which no other token attends."""
    tokens = torch.zeros(len(prompts), length, dtype=torch.int64)
    positions = tokens.clone()
    for row, prompt in enumerate(prompts):
        tokens[row, -len(prompt) :] = torch.tensor(prompt)
        positions[row, -len(prompt) :] = torch.arange(len(prompt))
    return tokens.to(device), positions.to(device)


def generate(model: nn.Module, prompts: list[list[int]], max_new_tokens: int, **options):
    """Return the new tokens of each prompt as a list; arguments as for `stream`."""
    rows = [[] for _ in prompts]
    for step in stream(model, prompts, max_new_tokens, **options):
        for row, token in zip(rows, step):
            if token is not None:
                row.append(token)
    return rows


def check_length(length: int, max_new_tokens: int, max_seq_len: int) -> None:
    """Raise UserError if the model has too few positions for a prompt and its continuation."""
    if length + max_new_tokens > max_seq_len:
        raise UserError(
            f"a prompt of {length} tokens and --max-new-tokens {max_new_tokens} are more than the "
            f"{max_seq_len} tokens of this model"
        )
