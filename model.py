"""Llama 3 in one file: the configuration, the network and its loss.

A Llama is a stack of blocks over a residual stream x [B, T, D]. Each block adds two things to it:

    x ── RMSNorm ── attention (mixes earlier tokens) ──(+)── RMSNorm ── feed-forward ──(+)── x
    └───────────────────────────────────────────────────┘ └─────────────────────────────┘

Nothing here communicates: parallel.py splits this model without changing a line of it. Three
conventions make that possible. Modules find their parts by name, so that a layer can be replaced or
sharded. Nothing is kept in buffers, so that a model can be built without memory (on `meta`) and be
filled later. And token positions may be passed in, so that a rank can compute a part of a sequence.

Letters in shape comments: B batch, T tokens, D model width, H query heads, KV key/value heads,
E head width, F feed-forward width (in code torch.nn.functional), V vocabulary, N = B * T,
S tokens that queries may attend to: T, or more with a cache.
"""

import contextlib
import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

IGNORE = -100  # targets with this value do not count in the loss: padding, prompts in fine-tuning


# ------------------------------------------------------------------------------- configuration


@dataclass(frozen=True)
class LlamaConfig:
    """The shape of a Llama. Raises ValueError where the sizes do not fit together."""

    dim: int = 256  # D
    n_layers: int = 4
    n_heads: int = 4  # H
    n_kv_heads: int = 4  # KV; each serves H / KV query heads (grouped-query attention)
    ffn_dim: int = 768  # F
    vocab_size: int = 4096  # V
    max_seq_len: int = 2048
    norm_eps: float = 1e-5
    rope_theta: float = 500_000.0
    rope_scaling: float = 1.0  # see rope_frequencies: 8 in Llama 3.1, 32 in 3.2, 1 changes nothing
    tie_embeddings: bool = False  # one matrix for the embedding and the output
    head_dim: int = 0  # E; 0 means D / H. In dataclasses.replace(config, dim=...) add head_dim=0
    # Skip these at first: predictions and refusals ask for them. Here they are constants, neither
    # flags nor in checkpoints; files of models/ make them properties or fields.
    n_experts = 0  # feed-forwards that a router chooses from
    ffn_uses = 1  # feed-forwards of width F that a token uses; above 1: of experts
    normed_dim = 0  # features that a block normalizes beside those of two norms of x
    attention_weights = 0  # elements of all matrices of attention; 0: of wq, wk, wv and wo
    gathered_dims = ()  # under --tp: widths of what ranks gather for attention; (): D, of x
    dense_dim = 0  # where some layers have experts: the width of the feed-forwards of others
    windows = ()  # of each layer, tokens that one attends to (0: all), as a WindowAttention does

    def __post_init__(self):
        width = self.head_dim or self.dim / self.n_heads
        if width % 2:
            raise ValueError(
                f"heads of width {width:g} (head_dim, or dim {self.dim} over n_heads "
                f"{self.n_heads}): choose an even integer"
            )
        object.__setattr__(self, "head_dim", int(width))  # frozen: plain assignment would raise
        if self.n_heads % self.n_kv_heads:
            raise ValueError(
                f"n_heads {self.n_heads} is no multiple of n_kv_heads {self.n_kv_heads}: "
                "choose n_kv_heads that divides it"
            )

    def build(self) -> "Llama":
        """Return the model of this configuration, without values."""
        return Llama(self)

    @property
    def q_dim(self) -> int:
        return self.n_heads * self.head_dim  # the width of all queries of a token

    @property
    def kv_dim(self) -> int:
        return self.n_kv_heads * self.head_dim


def _llama(dim, n_layers, n_heads, ffn_dim, **rest) -> LlamaConfig:
    """Return the configuration of a published Llama 3."""
    shared = dict(n_kv_heads=8, vocab_size=128_256, max_seq_len=131_072)
    return LlamaConfig(dim, n_layers, n_heads, ffn_dim=ffn_dim, **(shared | rest))


PRESETS = {
    # For lessons: D, layers, H, KV, F. Training from scratch takes V from the tokenizer.
    "tiny": LlamaConfig(96, 4, 4, 2, 288, vocab_size=2048, tie_embeddings=True),
    "small": LlamaConfig(384, 6, 6, 3, 1024),
    "medium": LlamaConfig(512, 8, 8, 4, 1536, vocab_size=8192),
    "base": LlamaConfig(768, 12, 12, 4, 2048, vocab_size=32_768, max_seq_len=4096),
    "llama3-8b": _llama(4096, 32, 32, 14_336, max_seq_len=8192),  # Meta's: D, layers, H, F
    "llama3.2-1b": _llama(2048, 16, 32, 8192, rope_scaling=32.0, tie_embeddings=True),
    "llama3.2-3b": _llama(3072, 28, 24, 8192, rope_scaling=32.0, tie_embeddings=True),
    "llama3.1-8b": _llama(4096, 32, 32, 14_336, rope_scaling=8.0),
    "llama3.1-70b": _llama(8192, 80, 64, 28_672, rope_scaling=8.0),
    "llama3.1-405b": _llama(16_384, 126, 128, 53_248, rope_scaling=8.0),
}


# ------------------------------------------------------------------------ RoPE and attention masks


def rope_frequencies(config: LlamaConfig, device: torch.device) -> Tensor:
    """Return the radians per token by which the rotary position embedding (Su et al. 2021,
    arXiv:2104.09864) rotates pair i of a head's features, theta^(-2i/E): [E/2] float32.

    Llama 3.1 and 3.2 were first trained on 8,192 tokens, and for longer contexts slow down the
    slowest pairs: they multiply wavelengths above 8,192 tokens by `rope_scaling`, keep those below
    8,192 / 4, and in between take a weighted mean of both frequencies."""
    E = config.head_dim
    exponents = torch.arange(0, E, 2, device=device, dtype=torch.float32) / E
    frequencies = 1.0 / config.rope_theta**exponents
    if config.rope_scaling != 1.0:
        turns = 8192 / (2 * math.pi / frequencies)  # full turns within 8,192 tokens
        old_share = ((turns - 1) / (4 - 1)).clamp(0, 1)  # 0 up to one turn, 1 from 4 turns on
        frequencies = (1 - old_share) * frequencies / config.rope_scaling + old_share * frequencies
    return frequencies


def rotation_by(frequencies: Tensor, positions: Tensor) -> Tensor:
    """Return cosine and sine of each pair's angle, which is position * frequency. In float32, as in
    Meta's code. positions [B or 1, T] -> [B or 1, T, 1, E/2, 2]."""
    angles = positions[..., None, None].float() * frequencies
    return torch.stack([angles.cos(), angles.sin()], -1)


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Rotate each pair of neighbouring features of x [B, T, heads, E] (Meta's layout), computing in
    float32 or float64: a product of complex numbers, (even + i odd) (cos + i sin)."""
    pairs = x.unflatten(-1, (-1, 2)).to(torch.promote_types(x.dtype, rotation.dtype))
    if torch.compiler.is_compiling():  # the compiler fuses products of real numbers alone
        even, odd = pairs.unbind(-1)  # [B, T, heads, E/2]
        cos, sin = rotation.unbind(-1)
        rotated = torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1)
    else:
        rotated = torch.view_as_real(torch.view_as_complex(pairs) * torch.view_as_complex(rotation))
    return rotated.flatten(-2).type_as(x)


def document_mask(positions: Tensor, slots: Tensor, S: int) -> Tensor:
    """Return a mask for rows that hold several documents: a token attends only to itself and to
    earlier tokens of its own document.

    Its position is counted from the start of its document. positions [B, T] of the tokens with
    queries, slots [T]: the column of each among the S keys -> bool [B, 1, T, S], True where
    attention is allowed."""
    first = slots - positions  # [B, T]: the slot where its document starts
    keys = torch.arange(S, device=positions.device)
    visible = (first[..., None] <= keys) & (keys <= slots[:, None])  # [B, T, S]
    return visible[:, None]


def attend(q: Tensor, k: Tensor, v: Tensor, mask) -> Tensor:
    """Return softmax(q kᵀ / sqrt(E)) v for each head, causal where mask is None (labs/flash).

    q [B, T, H, E], k, v [B, S, KV, E] -> same shape as q. `mask` [.., T, S] may also be an object
    that computes attention itself: Documents (text/batch.py) or SharedSequences (--cp)."""
    if hasattr(mask, "attention"):
        return mask.attention(q, k, v)
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # [B, heads, T, E]
    if mask is not None and mask.shape[-3:-1] == (1, 1):  # one token: a group's heads replace T
        queries = q.unflatten(1, (k.shape[1], -1)).squeeze(3)  # [B, KV, H / KV, E]
        out = F.scaled_dot_product_attention(queries, k, v, attn_mask=mask)
        return out.flatten(1, 2)[:, None]  # [B, 1, H, E]
    # On a GPU kernels with a mask, or for float32, need a key/value head for each query head.
    if q.device.type != "cpu" and (mask is not None or q.dtype.itemsize > 2):
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    # Kernels are fastest without a mask: they skip later tokens and never store T x T scores.
    options = dict(attn_mask=mask, is_causal=mask is None, enable_gqa=q.shape[1] != k.shape[1])
    # Flash takes no mask, and cuDNN would plan its kernel again for each T and S of many prompts.
    without_cudnn = sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])
    with without_cudnn if mask is not None and q.is_cuda else contextlib.nullcontext():
        return F.scaled_dot_product_attention(q, k, v, **options).transpose(1, 2)


# ----------------------------------------------------------------------------------- the network


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x / sqrt(mean(x²) + eps) * weight, with the mean over the last dimension (Zhang and
    Sennrich 2019, arXiv:1910.07467). The kernel computes in float32 or float64.

    x [..., D], weight [D] -> same shape and dtype as x."""
    with torch.autocast(x.device.type, enabled=False):  # autocast would return float32
        return F.rms_norm(x, x.shape[-1:], weight.type_as(x), eps)


class RMSNorm(nn.Module):
    initial_value = 1.0  # see init_weights

    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        return rms_norm(x, self.weight, self.eps)


class Attention(nn.Module):
    writes_to_stream = ("wo",)  # layers whose output is added to the residual stream
    saved_products = ("wk", "wo")  # layers whose output selective checkpointing keeps
    attend = staticmethod(attend)  # so that a subclass can replace it

    def __init__(self, config: LlamaConfig, layer: int):
        super().__init__()
        self.layer = layer  # for your changes; if forward reads it, each layer is compiled anew
        self.head_dim = config.head_dim
        self.wq = nn.Linear(config.dim, config.q_dim, bias=False)
        self.wk = nn.Linear(config.dim, config.kv_dim, bias=False)
        self.wv = nn.Linear(config.dim, config.kv_dim, bias=False)
        self.wo = nn.Linear(config.q_dim, config.dim, bias=False)

    def forward(self, x, rotation, mask=None, cache=None):
        q = rotate(self.queries(x), rotation)  # [B, T, H, E]
        k = rotate(self.keys(x), rotation)  # [B, T, KV, E]
        v = self.values(x)  # [B, T, KV, E]
        if cache is not None:
            k, v = cache.add(k, v)  # [B, S, KV, E]
        return self.wo(self.attend(q, k, v, mask).flatten(2))  # [B, T, D]

    def queries(self, x):
        return self.heads(self.wq(x))

    def keys(self, x):
        return self.heads(self.wk(x))

    def values(self, x):
        return self.heads(self.wv(x))

    def heads(self, features):
        # The number of heads is inferred (-1): under tensor parallelism a rank has H / tp of them.
        # Code for one head, such as q[:, :, 0], would then change a different head on each rank.
        return features.unflatten(-1, (-1, self.head_dim))


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up, elementwise on [B, T, F] (Shazeer 2020, arXiv:2002.05202)."""
    return F.silu(gate) * up


class FeedForward(nn.Module):
    writes_to_stream = ("w2",)
    saved_products = ("w3",)

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.w1 = nn.Linear(config.dim, config.ffn_dim, bias=False)
        self.w2 = nn.Linear(config.ffn_dim, config.dim, bias=False)
        self.w3 = nn.Linear(config.dim, config.ffn_dim, bias=False)

    def forward(self, x):
        return self.w2(swiglu(self.w1(x), self.w3(x)))  # [B, T, D] -> [B, T, F] -> [B, T, D]


class Block(nn.Module):
    attention_type, feed_forward_type = Attention, FeedForward  # files of models/ have others

    def __init__(self, config: LlamaConfig, layer: int):
        super().__init__()
        self.attention_norm = RMSNorm(config.dim, config.norm_eps)
        self.attention = self.attention_type(config, layer)
        self.ffn_norm = RMSNorm(config.dim, config.norm_eps)
        self.feed_forward = self.feed_forward_type(config)

    def forward(self, x, rotation, mask=None, cache=None):
        x = x + self.attention(self.attention_norm(x), rotation, mask, cache)
        return x + self.feed_forward(self.ffn_norm(x))


class Output(nn.Linear):
    """Generation calls it; training calls the loss with its weight. Both compute logits_of."""

    def forward(self, x):
        return logits_of(x, self.weight)  # [B, T, D] -> [B, T, V]


class Llama(nn.Module):
    """Llama 3. Parameter names match Meta's checkpoints. Values come from `init_weights` or a file.

    `compute_dtype`, if set, is the autocast dtype of forward."""

    block_type = Block
    writes_to_stream = ()  # neither tok_embeddings nor output is added to it: see init_weights

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.config = config
        self.compute_dtype: torch.dtype | None = None
        self.loss = sum_of_losses  # a run takes that of techniques/chunked_loss.py, the same sum
        self.vocabulary = Vocabulary(config.vocab_size)  # tensor parallelism replaces it
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.dim)
        blocks = {str(i): self.block_type(config, i) for i in range(config.n_layers)}
        self.layers = nn.ModuleDict(blocks)
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.output = Output(config.dim, config.vocab_size, bias=False)
        self.tie_weights()

    def tie_weights(self) -> None:
        """Let output and embedding share a parameter, if the config says so and both are here."""
        if self.config.tie_embeddings and self.output and self.tok_embeddings:
            self.output.weight = self.tok_embeddings.weight

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        positions: Tensor | None = None,
        cache=None,
        documents=None,
    ) -> Tensor:
        """Return the logits of the next token or, given targets, the sum of their losses.

        tokens [B, T] -> logits [B, T, V]; with a cache only those of the last token, [B, 1, V].
        targets [B, T], IGNORE where no loss counts -> float32 scalar in nats (float64 in a float64
        model), unless a task has set `loss`. It is a sum: train.py adds up microbatches and ranks.
        positions [B, T]: index of each token in its document. Every 0 starts a document, and
        attention does not cross into another. Default: each row is one document. Required with a
        cache (techniques/kv_cache.py), which has the keys and values of earlier tokens. `documents`
        (text/batch.py) holds the same starts, for kernels that need no mask."""
        if positions is None and (cache or documents):
            raise ValueError("cache and documents need positions: else each row is one document")
        T, device = tokens.shape[1], tokens.device
        in_documents = torch.arange(T, device=device)[None] if positions is None else positions
        # A later stage of a pipeline is given x [B, T, D] in place of tokens.
        x = tokens if tokens.is_floating_point() else self.embed(tokens, in_documents)
        dtype = self.compute_dtype
        mask = None
        if cache:
            mask = cache.add_positions(positions, dtype or x.dtype)
        elif documents and documents.have_kernel(dtype or x.dtype, self.config.head_dim):
            mask = documents  # in place of a mask, so that blocks need no other argument
        elif positions is not None:
            mask = document_mask(positions, torch.arange(T, device=device), T)
        rotation = self.rotation(in_documents)

        with torch.autocast(device.type, dtype) if dtype else contextlib.nullcontext():
            for name, block in self.layers.items():
                x = block(x, rotation, mask, cache and cache.layers[name])
            if self.norm is None:  # a later stage of the pipeline has it
                return x
            x = self.norm(x[:, -1:] if cache else x)
            if targets is None:
                return self.output(x)
            hidden, weight = self.vocabulary.local_operands(x, self.output.weight)
            return self.loss(hidden, weight, targets, self.vocabulary)

    def embed(self, tokens, positions):  # a model without RoPE uses the positions
        return self.tok_embeddings(tokens)  # [B, T] -> [B, T, D]

    def rotation(self, positions):
        return rotation_by(rope_frequencies(self.config, positions.device), positions)

    @torch.no_grad()
    def init_weights(self, seed: int = 0, assign: Callable = Tensor.copy_, device=None) -> None:
        """Draw each parameter's initial value on `device`, and call assign(parameter, value).
        `assign` may store only this rank's shard. lora.py initializes adapters and 4-bit matrices.

        Norms start at 1, biases at 0, matrices at normal(0, 0.02), and parameters of another layer
        at its `initial_value`. Matrices that write to the residual stream are divided by sqrt(2 L),
        so that the sum of their 2 L outputs starts as large as one undivided output (Radford et al.
        2019). A value depends on seed, name and shape, and not on the split. A GPU draws other
        values than a CPU."""
        for name, parameter in self.named_parameters():
            path, _, attribute = name.rpartition(".")
            parent_path, _, layer_name = path.rpartition(".")
            parent, layer = self.get_submodule(parent_path), self.get_submodule(path)
            if attribute in getattr(layer, "set_later", ()) or not parameter.is_floating_point():
                continue
            value = torch.empty(parameter.shape, device=device or parameter.device)
            initial_value = initial_value_of(layer, attribute)
            if initial_value is None:
                raise ValueError(f"{name} has no initial value: give its layer an initial_value")
            if initial_value == "normal":
                adds_to_stream = layer_name in parent.writes_to_stream
                std = 0.02 / math.sqrt(2 * self.config.n_layers) if adds_to_stream else 0.02
                value.normal_(0, std, generator=generator_for(name, seed, value.device))
            else:
                value.fill_(initial_value)
            assign(parameter, value.to(parameter.dtype))


def initial_value_of(layer: nn.Module, attribute: str) -> float | str | None:
    """Return the number with which a parameter starts, or "normal"; None if nothing says it."""
    if attribute == "bias":
        return 0.0
    if attribute == "weight" and isinstance(layer, nn.Linear | nn.Embedding):
        return "normal"
    if attribute == "weight" and isinstance(layer, nn.RMSNorm):  # torch's, of a changed model
        return 1.0
    return getattr(layer, "initial_value", None)


def generator_for(name: str, seed: int, device: torch.device) -> torch.Generator:
    """Return a random generator for one parameter, seeded by seed and name."""
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest[:8], "little"))


# -------------------------------------------------------------------------------------- the loss


def logits_of(hidden: Tensor, weight: Tensor) -> Tensor:
    """Return the logits of the next token, in training and in generation.

    hidden [..., D], weight [V, D] -> [..., V]."""
    return F.linear(hidden, weight)


def loss_of(logits: Tensor, targets: Tensor, vocabulary: "Vocabulary") -> Tensor:
    """Return the loss of each token in training, in nats.

    Change this for another loss, but sum over V by methods of `vocabulary` alone: with --tp a
    rank has the logits of one shard. What is returned for IGNORE is dropped.
    logits [n, V] in float32 or float64, targets [n] -> [n]."""
    return vocabulary.cross_entropy(logits, targets)


class Vocabulary:
    """Sums over the vocabulary for loss_of, from logits [n, V] of n tokens. With tensor
    parallelism ShardedVocabulary (parallel.py) replaces it: a rank has the logits of one shard."""

    vocab_start = 0  # the first row of a rank's shard

    def __init__(self, size: int):
        self.size = size  # V

    def all_gather(self, x: Tensor) -> Tensor:
        """Return what each shard has computed, [shards, ...]."""
        return x[None]

    def local_operands(self, hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return the hidden states and the weight whose product is this rank's logits."""
        return hidden, weight  # tensor parallelism gathers the tokens of `hidden` here

    def sum(self, logits: Tensor) -> Tensor:
        return logits.sum(-1)  # [n]

    def logsumexp(self, logits: Tensor) -> Tensor:
        return logits.logsumexp(-1)  # [n]

    def cross_entropy(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return -log softmax(logits)[target] [n]; the caller drops the values at IGNORE."""
        return F.cross_entropy(logits, targets, ignore_index=IGNORE, reduction="none")


def sum_of_losses(
    hidden: Tensor, weight: Tensor, targets: Tensor, vocabulary: Vocabulary
) -> Tensor:
    """Return the sum of loss_of over all targets but IGNORE. In validation, where gradients are
    disabled, it sums cross entropies, so that runs which train with other losses can be compared.

    hidden [..., D], weight [V, D], targets [...] -> scalar in float32 or float64."""
    logits = logits_of(hidden.flatten(0, -2), weight)  # [N, V]
    targets = targets.flatten()  # [N]
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if torch.is_grad_enabled():
        losses = loss_of(logits, targets, vocabulary)
    else:
        losses = vocabulary.cross_entropy(logits, targets)
    return torch.where(targets != IGNORE, losses, 0).sum()
