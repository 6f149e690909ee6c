"""Llama 3 in one file: the configuration, the network, its loss, generation, and what it costs.

A Llama is a stack of blocks over a residual stream x [B, T, D]. Each block adds two things to it:

    x ── RMSNorm ── attention (looks at earlier tokens) ──(+)── RMSNorm ── feed-forward ──(+)── x
    └────────────────────────────────────────────────────┘ └─────────────────────────────┘

Nothing here knows of processes or devices: parallel.py splits this model without changing a line
of it. For that, the file keeps three habits. Layers are held by name, so that a part of them is
still a Llama. There are no buffers, so that a model built on the `meta` device lacks nothing but
its parameters. And the positions of tokens can be given, not only guessed from where they stand.

Letters in shape comments: B batch, T tokens, D model width, H query heads, K key/value heads,
E head width (D / H), F feed-forward width, V vocabulary, S tokens that can be looked at, N = B * T.
"""

import contextlib
import hashlib
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

IGNORE = -100  # a target with this value is not counted: padding, or a prompt in fine-tuning
LOSS_CHUNK = 512  # tokens whose logits exist at one time in the loss


class UserError(Exception):
    """Something was asked for that cannot be. Its message is one line that says what to do instead.

    Scripts print it without a traceback and exit with code 2 (parallel.py, `run`)."""


# ------------------------------------------------------------------------------- configuration


@dataclass(frozen=True)
class LlamaConfig:
    """The shape of a Llama. Every size is a count of numbers, not of bytes."""

    dim: int = 256  # D
    n_layers: int = 4
    n_heads: int = 4  # H
    n_kv_heads: int = 4  # K; each is shared by H / K query heads (grouped-query attention)
    ffn_dim: int = 768  # F
    vocab_size: int = 4096  # V
    max_seq_len: int = 2048
    norm_eps: float = 1e-5
    rope_theta: float = 500_000.0
    rope_scaling: float = 1.0  # stretch of long wavelengths: 8 in Llama 3.1, 32 in 3.2, 1 is none
    tie_embeddings: bool = False  # one matrix for the embedding and the output

    def __post_init__(self):
        if self.dim % self.n_heads or self.dim // self.n_heads % 2:
            raise UserError(
                f"dim {self.dim} over {self.n_heads} heads gives heads of width "
                f"{self.dim / self.n_heads:g}; choose --n-heads so that it is an even integer"
            )
        if self.n_heads % self.n_kv_heads:
            raise UserError(
                f"{self.n_heads} heads cannot share {self.n_kv_heads} key/value heads evenly; "
                f"choose --n-kv-heads that divides {self.n_heads}"
            )

    @property
    def head_dim(self) -> int:
        return self.dim // self.n_heads


def _llama(dim, n_layers, n_heads, ffn_dim, **rest) -> LlamaConfig:
    """A published Llama 3: what all of them share is said once."""
    shared = dict(n_kv_heads=8, vocab_size=128_256, max_seq_len=131_072)
    return LlamaConfig(dim, n_layers, n_heads, ffn_dim=ffn_dim, **(shared | rest))


PRESETS = {
    # For lessons. Training from scratch takes the vocabulary's size from the tokenizer.
    "tiny": LlamaConfig(96, 4, 4, 2, 288, vocab_size=2048, tie_embeddings=True),
    "small": LlamaConfig(384, 6, 6, 3, 1024),
    "medium": LlamaConfig(512, 8, 8, 4, 1536, vocab_size=8192),
    "base": LlamaConfig(768, 12, 12, 4, 2048, vocab_size=32_768, max_seq_len=4096),
    # As published by Meta.
    "llama3-8b": _llama(4096, 32, 32, 14_336, max_seq_len=8192),
    "llama3.2-1b": _llama(2048, 16, 32, 8192, rope_scaling=32.0, tie_embeddings=True),
    "llama3.2-3b": _llama(3072, 28, 24, 8192, rope_scaling=32.0, tie_embeddings=True),
    "llama3.1-8b": _llama(4096, 32, 32, 14_336, rope_scaling=8.0),
    "llama3.1-70b": _llama(8192, 80, 64, 28_672, rope_scaling=8.0),
    "llama3.1-405b": _llama(16_384, 126, 128, 53_248, rope_scaling=8.0),
}


# ------------------------------------------------------------------- positions, and who sees whom


def rope_angles(config: LlamaConfig, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine of the angle by which each pair of a head's numbers is turned.

    Pair i turns by position * theta^(-2i/E) (Su et al. 2021, arXiv:2104.09864). Llama 3.1 slows
    the pairs whose wavelength is near or beyond the 8,192 tokens of its first training, so that a
    longer context meets no angle never seen: wavelengths over 8,192 are stretched by
    `rope_scaling`, those under 8,192 / 4 are kept, those between get a blend. Computed in float32,
    with the roundings of the published models' training.

    positions [B or 1, T] integers -> two tensors [B or 1, T, 1, E/2] float32.
    """
    E = config.head_dim
    steps = torch.arange(0, E, 2, device=positions.device, dtype=torch.float32)
    frequencies = 1.0 / config.rope_theta ** (steps / E)  # [E/2] radians per token
    if config.rope_scaling != 1.0:
        turns = 8192 / (2 * math.pi / frequencies)  # full turns within the first context
        keep = ((turns - 1) / (4 - 1)).clamp(0, 1)  # 1: fast pair, kept; 0: slow pair, stretched
        frequencies = (1 - keep) * frequencies / config.rope_scaling + keep * frequencies
    angles = positions[..., None, None].float() * frequencies  # [B, T, 1, E/2]
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each neighbouring pair of numbers (Meta's layout), in float32 or wider.

    x [B, T, heads, E] -> same shape and dtype."""
    even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)  # [B, T, heads, E/2]
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2).type_as(x)


def document_mask(positions: Tensor, queries: int) -> Tensor:
    """Who sees whom when a row holds several documents: only earlier tokens of the same one.

    A position of 0 starts a document, so positions alone say where the borders are.
    positions [B, S] of all tokens, of which the last `queries` = T ask -> bool [B, 1, T, S].
    """
    S = positions.shape[1]
    document = (positions == 0).cumsum(1)  # [B, S]
    same = document[:, -queries:, None] == document[:, None, :]  # [B, T, S]
    causal = torch.ones(queries, S, dtype=torch.bool, device=positions.device).tril(S - queries)
    return (same & causal)[:, None]


class KVCache:
    """Keys and values of the tokens seen so far, so that generating one token costs one token.

    Kept by concatenation: simple, and free to grow, at the price of a copy per token."""

    def __init__(self):
        self.positions: Tensor | None = None  # [B, S]
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}  # two of [B, K, S, E] a layer

    def add_positions(self, positions: Tensor) -> Tensor:
        """positions [B, T] of new tokens -> [B, S] of all."""
        if self.positions is not None:
            positions = torch.cat([self.positions, positions], 1)
        self.positions = positions
        return positions

    def add(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """New keys and values [B, K, T, E] of one layer -> those of all tokens [B, K, S, E]."""
        if layer in self.layers:
            old_k, old_v = self.layers[layer]
            k, v = torch.cat([old_k, k], 2), torch.cat([old_v, v], 2)
        self.layers[layer] = k, v
        return k, v


# ----------------------------------------------------------------------------------- the network


class Attention(nn.Module):
    def __init__(self, config: LlamaConfig, layer: int):
        super().__init__()
        self.layer = layer
        self.head_dim = config.head_dim
        kv_dim = config.n_kv_heads * config.head_dim
        self.wq = nn.Linear(config.dim, config.dim, bias=False)
        self.wk = nn.Linear(config.dim, kv_dim, bias=False)
        self.wv = nn.Linear(config.dim, kv_dim, bias=False)
        self.wo = nn.Linear(config.dim, config.dim, bias=False)

    def forward(self, x, cos, sin, mask=None, cache=None):
        B, T, _ = x.shape
        # Heads are counted from the result (-1): under tensor parallelism a rank holds a part.
        q = rotate(self.wq(x).view(B, T, -1, self.head_dim), cos, sin)  # [B, T, H, E]
        k = rotate(self.wk(x).view(B, T, -1, self.head_dim), cos, sin)  # [B, T, K, E]
        v = self.wv(x).view(B, T, -1, self.head_dim)  # [B, T, K, E]
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # [B, heads, T, E]
        if cache is not None:
            k, v = cache.add(self.layer, k, v)  # [B, K, S, E]
        if mask is not None:  # kernels that take a mask want a key head for each query head
            k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
        # Without a mask the fastest kernels apply: they skip the upper half and never hold T x T.
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=q.shape[1] != k.shape[1]
        )
        return self.wo(out.transpose(1, 2).reshape(B, T, -1))  # [B, T, D]


class FeedForward(nn.Module):
    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.w1 = nn.Linear(config.dim, config.ffn_dim, bias=False)
        self.w2 = nn.Linear(config.ffn_dim, config.dim, bias=False)
        self.w3 = nn.Linear(config.dim, config.ffn_dim, bias=False)

    def forward(self, x):
        return self.w2(SwiGLU.apply(self.w1(x), self.w3(x)))  # [B, T, D] -> [B, T, F] -> [B, T, D]


class SwiGLU(torch.autograd.Function):
    """silu(gate) * up, [B, T, F] each, keeping these two for backward. Plain autograd would keep
    silu(gate) as well; on the widest activations of the model, computing it again costs less."""

    @staticmethod
    def forward(ctx, gate, up):
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx, grad):
        gate, up = ctx.saved_tensors
        return torch.ops.aten.silu_backward(grad * up, gate), F.silu(gate).mul_(grad)


class Block(nn.Module):
    def __init__(self, config: LlamaConfig, layer: int):
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, config.norm_eps)
        self.attention = Attention(config, layer)
        self.ffn_norm = nn.RMSNorm(config.dim, config.norm_eps)
        self.feed_forward = FeedForward(config)

    def forward(self, x, cos, sin, mask=None, cache=None):
        x = x + self.attention(self.attention_norm(x), cos, sin, mask, cache)
        return x + self.feed_forward(self.ffn_norm(x))


class Llama(nn.Module):
    """Parameters bear the names of Meta's files; call `init_weights` or load a checkpoint.

    `compute_dtype`, where set, is what matrix products are computed in, by autocast. `loss` is what
    forward makes of the last hidden states and targets; a split over the vocabulary brings its own.
    """

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.config = config
        self.compute_dtype: torch.dtype | None = None
        self.loss: Callable[[Tensor, Tensor, Tensor], Tensor] = cross_entropy_sum
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleDict({str(i): Block(config, i) for i in range(config.n_layers)})
        self.norm = nn.RMSNorm(config.dim, config.norm_eps)
        self.output = nn.Linear(config.dim, config.vocab_size, bias=False)
        self.tie_weights()

    def tie_weights(self) -> None:
        """Make one parameter of the embedding and the output, where the configuration says so."""
        if self.config.tie_embeddings:
            self.output.weight = self.tok_embeddings.weight

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        positions: Tensor | None = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        """Logits of the next token, or, given targets, the sum of their cross entropy.

        tokens [B, T] -> logits [B, T, V]; with a cache only the last token's, [B, 1, V].
        targets [B, T], IGNORE where nothing is to be learnt -> a float32 scalar, in nats (float64
        in a float64 model). It is a sum, so that microbatches and ranks can simply be added up.
        positions [B, T]: place of each token in its document; each 0 starts one, and attention does
        not cross into it. Without it every row is one document from its start. A cache needs it.
        """
        if positions is None:
            positions, mask = torch.arange(tokens.shape[1], device=tokens.device)[None], None
        else:
            seen = positions if cache is None else cache.add_positions(positions)
            mask = document_mask(seen, queries=tokens.shape[1])
        cos, sin = rope_angles(self.config, positions)

        device, dtype = tokens.device.type, self.compute_dtype
        with torch.autocast(device, dtype) if dtype else contextlib.nullcontext():
            x = self.tok_embeddings(tokens)  # [B, T, D]
            for block in self.layers.values():
                x = block(x, cos, sin, mask, cache)
            x = self.norm(x if cache is None else x[:, -1:])
            if targets is None:
                return self.output(x)
            return self.loss(x, self.output.weight, targets)

    @torch.no_grad()
    def init_weights(self, seed: int = 0, put: Callable = Tensor.copy_, device=None) -> None:
        """Fill every parameter by put(parameter, its first value in full), drawn on `device`;
        adapters beside them (lora.py) have first values of their own."""
        for name, parameter in self.named_parameters():
            if ".lora_" not in name:
                put(parameter, initial_weight(name, parameter, self.config, seed, device))


def initial_weight(
    name: str, like: Tensor, config: LlamaConfig, seed: int, device: torch.device | None = None
) -> Tensor:
    """The first value of one parameter: a function of seed, name and full shape, of nothing else.

    So, on one kind of device, a weight is the same however the model is split or filled. Norms
    start at 1, matrices at normal(0, 0.02), and the two matrices of a block that write to the
    residual stream smaller by sqrt(2 * layers), so that the sum of all blocks starts at the scale
    of one (Radford et al. 2019). Drawn in float32, then cast: float64 starts from the same weights.
    """
    weight = torch.ones(like.shape, device=device or like.device)
    if "norm" not in name:
        writes_to_stream = name.endswith(("attention.wo.weight", "feed_forward.w2.weight"))
        std = 0.02 / math.sqrt(2 * config.n_layers) if writes_to_stream else 0.02
        weight.normal_(0, std, generator=generator_of(name, seed, weight.device))
    return weight.to(like.dtype)


def generator_of(name: str, seed: int, device: torch.device) -> torch.Generator:
    """Random numbers for one parameter, which depend on seed and name alone."""
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest[:8], "little"))


# -------------------------------------------------------------------------------------- the loss


def cross_entropy_sum(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    first: int = 0,
    log_share: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Sum over targets of -log softmax(hidden @ weight.T)[target], LOSS_CHUNK tokens at a time.

    All logits of 4,096 tokens of Llama 3 take 2.1 GB in float32, and a plain cross entropy holds
    them three times. Here one chunk's worth exists at any time.
    hidden [..., D], weight [V, D], targets [...] -> scalar.

    `weight` may be a part of the vocabulary, its rows from `first` on. Then `log_share` must make
    of the part's logits [n, V] the log of the part's probability in the whole [n, 1]; and the
    result, like the gradient of `hidden`, is a part of a sum, to be added up over the vocabulary.
    """
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        compute = torch.get_autocast_dtype(device)
        hidden, weight = hidden.to(compute), weight.to(compute)
    hidden, targets = hidden.flatten(0, -2), targets.flatten()  # [N, D], [N]
    return _ChunkedCrossEntropy.apply(hidden, weight, targets, first, log_share)


class _ChunkedCrossEntropy(torch.autograd.Function):
    """The gradient of the logits, softmax - onehot, needs only the logits themselves. So forward
    computes all gradients while it holds them, and backward has only to scale the results."""

    @staticmethod
    def forward(ctx, hidden, weight, targets, first, log_share):
        wide = torch.promote_types(hidden.dtype, torch.float32)  # sums are kept in float32 at least
        loss = torch.zeros((), dtype=wide, device=hidden.device)
        wants_hidden, wants_weight, *_ = ctx.needs_input_grad
        hidden_grad = torch.empty_like(hidden) if wants_hidden else None
        weight_grad = torch.zeros_like(weight, dtype=wide) if wants_weight else None
        for start in range(0, len(targets), LOSS_CHUNK):
            rows = slice(start, start + LOSS_CHUNK)
            h, t = hidden[rows], targets[rows, None]  # [n, D], [n, 1]
            counted, row = t != IGNORE, t - first  # a target's row in this weight...
            here = counted & (row >= 0) & (row < len(weight))  # ...if it has one
            row = torch.where(here, row, 0)
            logits = h @ weight.T  # [n, V]
            log_p = F.log_softmax(logits, dim=-1, dtype=wide)
            if log_share:
                log_p += log_share(logits)
            loss -= torch.where(here, log_p.gather(1, row), 0).sum()
            if wants_hidden or wants_weight:
                one = here.to(wide)
                grad = log_p.exp_().scatter_add_(1, row, -one).to(h.dtype)  # softmax - onehot
                if wants_hidden:
                    hidden_grad[rows] = (grad @ weight) * counted
                if wants_weight:
                    weight_grad += grad.T @ (h * counted)
        ctx.save_for_backward(hidden_grad, weight_grad)
        ctx.dtype = weight.dtype
        return loss

    @staticmethod
    def backward(ctx, scale):
        gradients = [None if g is None else (g * scale).to(ctx.dtype) for g in ctx.saved_tensors]
        return *gradients, None, None, None


# ------------------------------------------------------------------------------------ generation


def sample(
    logits: Tensor, temperature: float, top_k: int, top_p: float, generator: torch.Generator
) -> Tensor:
    """Draw a token from each row of logits [B, V] -> [B].

    temperature 0 takes the likeliest; top_k > 0 keeps the k likeliest; top_p < 1 keeps the
    likeliest whose probabilities together first reach top_p (Holtzman et al. 2020, "nucleus").
    """
    if temperature == 0:
        return logits.argmax(-1)
    logits, order = (logits.float() / temperature).sort(-1, descending=True)  # [B, V] both
    if top_k > 0:
        logits[:, top_k:] = -math.inf
    p = logits.softmax(-1)
    before = p.cumsum(-1) - p  # probability of all likelier tokens
    p[before >= top_p] = 0
    choice = torch.multinomial(p, 1, generator=generator)  # [B, 1]
    return order.gather(1, choice).squeeze(1)


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
) -> Iterator[list[int | None]]:
    """Continue every prompt, one token at a time: yields B tokens a turn, None for a finished row.

    A row is finished after a token of `stop`, which is yielded too. Prompts of different lengths
    stand flush right; the padding before them is a document of its own, which no prompt can see.
    Where the model is split over ranks, all of them must call this with the same arguments.
    """
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    T = max(len(prompt) for prompt in prompts)
    tokens = torch.tensor([[0] * (T - len(p)) + p for p in prompts], device=device)  # [B, T]
    positions = torch.tensor(
        [[*range(T - len(p)), *range(len(p))] for p in prompts], device=device
    )  # [B, T]
    cache, running = KVCache(), [True] * len(prompts)
    for _ in range(max_new_tokens):
        logits = model(tokens, positions=positions, cache=cache)[:, -1].to(device)  # [B, V]
        tokens = sample(logits, temperature, top_k, top_p, generator)[:, None]  # [B, 1]
        positions = positions[:, -1:] + 1  # [B, 1]
        new = tokens.squeeze(1).tolist()
        yield [token if alive else None for token, alive in zip(new, running)]
        running = [alive and token not in stop for token, alive in zip(new, running)]
        if not any(running):
            return


def generate(model: nn.Module, prompts: list[list[int]], max_new_tokens: int, **options):
    """The new tokens of each prompt, as lists; arguments as for `stream`."""
    turns = stream(model, prompts, max_new_tokens, **options)
    return [[token for token in row if token is not None] for row in zip(*turns)]


# ------------------------------------------------------------------------------- what it costs


def flops_per_token(config: LlamaConfig, seq_len: int, adapters: int | None = None) -> int:
    """Floating-point operations to train on one token: forward once, backward twice that.

    Of a model whose weights are frozen and which has so many numbers in `adapters` instead,
    backward needs no gradient of the weights: it takes as long as forward.

    Each weight of a matrix multiplies and adds once per token, and each head's scores and weighted
    sum do so for E numbers per token looked at. Causal attention is counted as if it saw the whole
    row, as usual (Chowdhery et al. 2022, arXiv:2204.02311, appendix B), and recomputation is not
    counted: so figures compare with those that others publish.
    """
    c, kv_dim = config, config.n_kv_heads * config.head_dim
    weights = c.n_layers * (2 * c.dim * (c.dim + kv_dim) + 3 * c.dim * c.ffn_dim)
    weights += c.dim * c.vocab_size  # the output; the embedding is a look-up
    attention = 2 * c.n_layers * c.dim * seq_len
    if adapters is None:
        return 3 * 2 * (weights + attention)
    return 2 * 2 * weights + 3 * 2 * (adapters + attention)


# Dense bf16 peaks in FLOP/s, from the makers' data sheets; the first that a device's name has wins.
PEAK_FLOPS = {
    "GB200": 2.5e15,
    "B200": 2.25e15,
    "GH200": 989.4e12,
    "H200 NVL": 835e12,
    "H200": 989.4e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989.4e12,
    "H20": 148e12,
    "A100": 312e12,
    "A10G": 70e12,
    "A10": 125e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "RTX 4090": 165.2e12,
    "RTX 3090": 71e12,
    "MI325X": 1307.4e12,
    "MI300X": 1307.4e12,
    "MI250X": 383e12,
}


def peak_flops(device_name: str) -> float | None:
    """Peak of one device by its name; None where it is not known: MFU is then never guessed."""
    for name, peak in PEAK_FLOPS.items():
        if re.search(rf"\b{name}\b(?! (Laptop|D\b))", device_name):
            return peak
    return None
