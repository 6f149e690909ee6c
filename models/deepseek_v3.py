"""DeepSeek V3 (DeepSeek-AI 2024, arXiv:2412.19437), and R1, without the module that predicts a
second token.

What differs from Llama: keys and values of all heads are made of a small latent; experts in groups,
beside one that every token uses; and YaRN for long contexts.

A token x gives C features, the latent, of which all heads make keys and values, and R features of
keys that all heads share. RoPE rotates these alone:

    x ── wq_a ── norm ── wq_b ──────────── queries of H heads: E - R features, and R rotated ones
    │
    └─── wkv_a ─┬─ C ─ norm ── wkv_b ───── keys of KV heads: E - R features; values: U features
                └─ R, rotated ──────────── R more features of the keys, the same for all heads

These C + R features are all that generation needs to keep of a token (DeepSeek-AI 2024,
arXiv:2405.04434): queries can be multiplied by the rows of wkv_b that make keys, and then attend to
latents, as no rotation stands in between. The cache here (techniques/kv_cache.py) holds keys and
values of all heads, as in other models.

The router's scores are sigmoids: an expert's does not depend on the others'. Experts are in groups,
which their authors place on different nodes: a token chooses among those of the `top_groups` groups
whose two best experts score highest. Its weights are its K scores over their sum, times
`routed_scale`. Balance is by the bias of techniques/experts.py, which comes from this model. The
first `n_dense` layers have one feed-forward of width `dense_dim`.
"""

import math
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import nn

import model
from model import RMSNorm, rotate, rotation_by
from models import mixtral
from models.family import Family, Published
from models.parts import FAST, SLOW, yarn_frequencies
from plumbing.messages import UserError
from techniques import experts, mixture


@dataclass(frozen=True)
class DeepseekV3Config(mixtral.MixtralConfig):
    n_shared: int = 1  # feed-forwards of width F that all tokens use
    n_groups: int = 4
    top_groups: int = 2  # in which a token's experts are
    routed_scale: float = 2.5
    n_dense: int = 1  # layers without experts
    dense_dim: int = 768
    q_rank: int = 96  # features of a query's latent; 0: queries are made of x by one matrix
    kv_rank: int = 64  # C
    rope_dim: int = 16  # R
    value_dim: int = 48  # U
    rope_original: int = 4096  # the longest sequence before rope_scaling
    rope_mscale: float = 1.0  # by how much the scores grow with rope_scaling

    def __post_init__(self):
        super().__post_init__()
        for name in ("n_shared", "n_groups", "top_groups", "dense_dim", "kv_rank", "rope_original"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)}: choose 1 or more")
        if self.n_experts % self.n_groups or self.n_experts < 2 * self.n_groups:
            raise ValueError(
                f"n_experts {self.n_experts} in n_groups {self.n_groups}: choose n_experts as a "
                f"multiple of n_groups, and twice as many at least"
            )
        reachable = self.top_groups * self.n_experts // self.n_groups
        if not self.top_k <= reachable <= self.n_experts:
            raise ValueError(
                f"top_groups {self.top_groups} of {self.n_groups} have {reachable} experts: choose "
                f"up to {self.n_groups} that have top_k {self.top_k} at least"
            )
        if not 0 < self.rope_dim < self.head_dim or self.rope_dim % 2:
            raise ValueError(
                f"rope_dim {self.rope_dim}: choose an even number below head_dim {self.head_dim}"
            )
        if not 0 < self.value_dim <= self.head_dim:
            raise ValueError(f"value_dim {self.value_dim}: choose head_dim {self.head_dim} at most")

    def build(self):
        return DeepseekV3(self)

    @property
    def ffn_uses(self):  # on average over layers: a dense one counts as several of width F
        n_dense = min(self.n_dense, self.n_layers)
        of_dense = n_dense * self.dense_dim / self.ffn_dim
        of_others = (self.n_layers - n_dense) * (self.top_k + self.n_shared)
        return (of_dense + of_others) / self.n_layers

    @property
    def normed_dim(self):
        return self.q_rank + self.kv_rank

    @property
    def attention_weights(self):
        R, C, U = self.rope_dim, self.kv_rank, self.value_dim
        of_queries = self.dim * self.q_dim
        if self.q_rank:
            of_queries = self.q_rank * (self.dim + self.q_dim)
        of_latents = self.dim * (C + R) + C * self.n_kv_heads * (self.head_dim - R + U)
        return of_queries + of_latents + self.n_heads * U * self.dim

    @property
    def gathered_dims(self):
        return self.q_rank or self.dim, self.kv_rank, self.rope_dim


LATENT_EPS = 1e-6  # of the norms of latents, whatever norm_eps is: so its authors' code has it


class Attention(nn.Module):
    """No model.Attention, but called like one."""

    writes_to_stream = ("wo",)
    saved_products = ("wkv_a", "wo")
    token_layers = ("wq_a", "wkv_a")

    def __init__(self, config: DeepseekV3Config, layer: int):
        super().__init__()
        D, E, R = config.dim, config.head_dim, config.rope_dim
        self.sizes = E, R, config.kv_rank, config.value_dim
        if config.q_rank:
            self.wq_a = nn.Linear(D, config.q_rank, bias=False)
            self.q_norm = RMSNorm(config.q_rank, LATENT_EPS)
            self.wq_b = nn.Linear(config.q_rank, config.q_dim, bias=False)
        else:
            self.wq = nn.Linear(D, config.q_dim, bias=False)
        self.wkv_a = nn.Linear(D, config.kv_rank + R, bias=False)
        self.kv_norm = RMSNorm(config.kv_rank, LATENT_EPS)
        of_head = E - R + config.value_dim
        self.wkv_b = nn.Linear(config.kv_rank, config.n_kv_heads * of_head, bias=False)
        self.wo = nn.Linear(config.n_heads * config.value_dim, D, bias=False)
        self.score_scale = score_scale(config)

    def forward(self, x, rotation, mask=None, cache=None):
        E, R, C, U = self.sizes
        q = self.query_features(x).unflatten(-1, (-1, E))  # [B, T, H, E]
        q, q_rope = q.split([E - R, R], -1)
        latent, k_rope = self.wkv_a(x).split([C, R], -1)  # [B, T, C], [B, T, R]
        kv = self.wkv_b(self.kv_norm(latent)).unflatten(-1, (-1, E - R + U))
        k, v = kv.split([E - R, U], -1)  # [B, T, KV, E - R], [B, T, KV, U]
        k_rope = rotate(self.all_tokens(k_rope)[:, :, None], rotation)  # [B, T, 1, R]
        q = torch.cat([q, rotate(q_rope, rotation)], -1) * self.score_scale
        k = torch.cat([k, k_rope.expand(-1, -1, k.shape[2], -1)], -1)  # [B, T, KV, E]
        v = F.pad(v, (0, E - U))  # kernels want values as wide as keys
        if cache is not None:
            k, v = cache.add(k, v)  # [B, S, KV, E]
        return self.wo(model.attend(q, k, v, mask)[..., :U].flatten(2))  # [B, T, D]

    def query_features(self, x):
        if hasattr(self, "wq"):
            return self.wq(x)
        return self.wq_b(self.q_norm(self.wq_a(x)))

    def all_tokens(self, features):
        return features  # --tp gathers those of other ranks' tokens


class Router(experts.Router):
    def __init__(self, config: DeepseekV3Config):
        super().__init__(config)
        self.groups = config.n_groups, config.top_groups
        self.routed_scale = config.routed_scale

    def choose(self, scores, bias):
        n_groups, top_groups = self.groups
        scores = scores.sigmoid()
        ranking = scores if bias is None else scores + bias.to(scores.dtype)
        ranking = ranking.detach().unflatten(1, (n_groups, -1))  # [N, groups, X / groups]
        of_groups = ranking.topk(2).values.sum(-1)
        chosen_groups = of_groups.topk(top_groups).indices
        left_out = torch.ones_like(of_groups, dtype=torch.bool).scatter(1, chosen_groups, False)
        ranking = ranking.masked_fill(left_out[..., None], -math.inf).flatten(1)
        chosen = self.best(ranking)  # [N, K]
        weights = scores.gather(1, chosen)
        weights = weights / (weights.sum(1, keepdim=True) + 1e-20)
        return chosen, weights * self.routed_scale


class SharedExperts(model.FeedForward):
    token_layers = ("w1", "w2", "w3")


class MixtureOfExperts(mixture.MixtureOfExperts):
    def __init__(self, config: DeepseekV3Config):
        super().__init__(config)
        self.router = Router(config)
        self.shared = SharedExperts(replace(config, ffn_dim=config.n_shared * config.ffn_dim))

    def forward(self, x):
        return super().forward(x) + self.shared(x)


class Block(model.Block):
    attention_type, feed_forward_type = Attention, MixtureOfExperts

    def __init__(self, config: DeepseekV3Config, layer: int):
        super().__init__(config, layer)
        if layer < config.n_dense:
            self.feed_forward = model.FeedForward(replace(config, ffn_dim=config.dense_dim))


class DeepseekV3(model.Llama):
    block_type = Block

    def rotation(self, positions):
        c = self.config
        frequencies = yarn_frequencies(
            c.rope_dim, c.rope_theta, c.rope_scaling, c.rope_original, positions.device
        )
        return rotation_by(frequencies, positions)


def score_scale(c: DeepseekV3Config) -> float:
    """Return by what YaRN multiplies attention's scores: a softmax of more keys is flatter."""
    if c.rope_scaling <= 1.0:
        return 1.0
    return (0.1 * c.rope_mscale * math.log(c.rope_scaling) + 1.0) ** 2


def plan():
    from techniques.more_layers import GatheredColumns, GatherFeatures, OwnTokens
    from techniques.parallel_layers import NORM

    own_tokens = OwnTokens()
    gathered_columns = GatheredColumns()
    layers = {
        "attention": GatherFeatures(),
        "attention.wq": gathered_columns,
        "attention.wq_a": own_tokens,
        "attention.q_norm": NORM,
        "attention.wq_b": gathered_columns,
        "attention.wkv_a": own_tokens,
        "attention.kv_norm": NORM,
        "attention.wkv_b": gathered_columns,
        "feed_forward.shared.w1": own_tokens,
        "feed_forward.shared.w2": own_tokens,
        "feed_forward.shared.w3": own_tokens,
    }
    return mixtral.plan() | {f"layers.*.{name}": style for name, style in layers.items()}


def targets(config):
    """Return the matrices of attention: those of experts, which are stacked, have no adapters."""
    queries = ("wq_a", "wq_b") if config.q_rank else ("wq",)
    return *queries, "wkv_a", "wkv_b", "wo"


YARN = dict(rope_type="yarn", beta_fast=FAST, beta_slow=SLOW)
# Scores by sigmoids, a bias in the choice, and experts in every layer that is not dense.
SUPPORTED = dict(
    norm_topk_prob=True, scoring_func="sigmoid", topk_method="noaux_tc", moe_layer_freq=1,
    rope_interleave=True,
)  # fmt: skip
DEFAULTS = SUPPORTED | YARN
DEFAULTS |= dict(rope_theta=1e4, rms_norm_eps=1e-6, num_key_value_heads=128, q_lora_rank=1536)
DEFAULTS |= dict(first_k_dense_replace=3, num_experts_per_tok=8, n_shared_experts=1, n_group=8)
DEFAULTS |= dict(topk_group=4, routed_scaling_factor=2.5)
# transformers fails with null here, and takes it for False where it cannot fail.
NEVER_NULL = "first_k_dense_replace", "num_experts_per_tok", "n_group", "topk_group"
NEVER_NULL += "norm_topk_prob", "rope_interleave"


def read(content):
    """Return what no field says alone: a head's width, and how YaRN scales attention."""
    parts = "qk_nope_head_dim", "qk_rope_head_dim"
    width = sum(content.checked(name, content[name], int) for name in parts)
    if content["rope_type"] == "default":
        return dict(head_dim=width)
    mscale = content.get("mscale")
    of_all = content.get("mscale_all_dim")
    others = {"attention_factor", "truncate"} & content.keys()
    if not mscale or mscale != of_all or others:
        told = f"mscale {mscale}, mscale_all_dim {of_all}"
        told = ", ".join([told, *(f"{name} {content[name]}" for name in sorted(others))])
        raise UserError(
            f"{content.path} has YaRN with {told}: only two equal scales, and no other, work here"
        )
    original = content["original_max_position_embeddings"]
    return dict(head_dim=width, rope_mscale=mscale, rope_original=original)


def write(config):
    content = {
        "q_lora_rank": config.q_rank or None,
        "qk_nope_head_dim": config.head_dim - config.rope_dim,
        "num_nextn_predict_layers": 0,
    }
    if config.rope_scaling != 1.0:
        content["rope_scaling"] = YARN | {
            "factor": config.rope_scaling,
            "mscale": config.rope_mscale,
            "mscale_all_dim": config.rope_mscale,
            "original_max_position_embeddings": config.rope_original,
        }
    return content


def ignored(name, config):
    if name.startswith(f"model.layers.{config.n_layers}."):
        return "a layer that predicts a second token"
    return ""


def unpublished(config):
    if config.balance != "bias":
        return "a published deepseek_v3 balances experts by a bias: train without --balance none"
    if config.n_kv_heads != config.n_heads:
        return (
            f"a published deepseek_v3 has keys for each head: n_kv_heads {config.n_heads}, not "
            f"{config.n_kv_heads}"
        )
    return ""


def paired(config):
    return {"wq": 0}  # the files have the features of a pair next to each other, as model.py has


# D, layers, H, KV, F, V, longest sequence, norm_eps, theta
TINY = DeepseekV3Config(
    96, 4, 4, 4, 72, 2048, tie_embeddings=True, head_dim=32, n_experts=8, top_k=3, dense_dim=288,
    q_rank=48, kv_rank=32, rope_dim=8, value_dim=24,
)  # fmt: skip
V3 = DeepseekV3Config(
    7168, 61, 128, 128, 2048, 129_280, 163_840, 1e-6, 1e4, rope_scaling=40.0, head_dim=192,
    n_experts=256, top_k=8, n_groups=8, top_groups=4, n_dense=3, dense_dim=18_432,
    q_rank=1536, kv_rank=512, rope_dim=64, value_dim=128,
)  # fmt: skip

MODEL = Family(
    "deepseek_v3",
    DeepseekV3Config,
    presets={
        "tiny-deepseek": TINY,
        "deepseek-v3": V3,
    },
    small=dict(
        n_kv_heads=4,
        head_dim=12,
        n_experts=8,
        top_k=3,
        dense_dim=48,
        q_rank=20,
        kv_rank=16,
        rope_dim=8,
        value_dim=10,
        rope_original=64,
        rope_mscale=0.7,
    ),
    plan=plan,
    targets=targets,
    published=Published(
        logits=(-1.980454, -0.004547, 0.817000, 1.680921),
        names={
            "attention.wq_a": "self_attn.q_a_proj",
            "attention.q_norm": "self_attn.q_a_layernorm",
            "attention.wq_b": "self_attn.q_b_proj",
            "attention.wkv_a": "self_attn.kv_a_proj_with_mqa",
            "attention.kv_norm": "self_attn.kv_a_layernorm",
            "attention.wkv_b": "self_attn.kv_b_proj",
            "feed_forward.router": "mlp.gate",
            "feed_forward.router.bias": "mlp.gate.e_score_correction_bias",
            "feed_forward.experts.w1": "mlp.experts.{}.gate_proj",
            "feed_forward.experts.w2": "mlp.experts.{}.down_proj",
            "feed_forward.experts.w3": "mlp.experts.{}.up_proj",
            "feed_forward.shared.w1": "mlp.shared_experts.gate_proj",
            "feed_forward.shared.w2": "mlp.shared_experts.down_proj",
            "feed_forward.shared.w3": "mlp.shared_experts.up_proj",
        },
        fields=dict(
            ffn_dim="moe_intermediate_size",
            dense_dim="intermediate_size",
            n_dense="first_k_dense_replace",
            n_experts="n_routed_experts",
            top_k="num_experts_per_tok",
            n_shared="n_shared_experts",
            n_groups="n_group",
            top_groups="topk_group",
            routed_scale="routed_scaling_factor",
            q_rank="q_lora_rank",
            kv_rank="kv_lora_rank",
            rope_dim="qk_rope_head_dim",
            value_dim="v_head_dim",
        ),
        defaults=DEFAULTS,
        renamed={"num_local_experts": "n_routed_experts"},
        supported=SUPPORTED,
        absent=("head_dim", "mlp_bias", "use_sliding_window"),
        nulls={"q_lora_rank": 0} | dict.fromkeys(NEVER_NULL),
        scaling=YARN,
        read=read,
        write=write,
        ignored=ignored,
        paired=paired,
        unpublished=unpublished,
    ),
)
