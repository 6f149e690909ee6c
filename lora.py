"""LoRA (Hu et al. 2021, arXiv:2106.09685): learn a little beside matrices that stay as they are.

             ┌── W [out, in], frozen ──────────────────┐
    x [in] ──┤                                         (+)── y = x Wᵀ + scale (x Aᵀ) Bᵀ
             └── A [r, in] ── r numbers ── B [out, r] ──┘

What a task needs to change in W is well described by a matrix of low rank r, B A. Only A and B have
gradients and an optimizer's moments: for all matrices of the 8B model and r = 16, 42 million
numbers instead of 8 billion. B starts at zero, so that training starts from the model as it is.
scale is alpha / r; with rsLoRA alpha / sqrt(r), which keeps the sum's size at large r
(Kalajdzievski 2023, arXiv:2312.03732).

Adapters are kept in the files of PEFT, so that peft, transformers and servers load them, and theirs
load here. How W and the factors are joined is known to `lora_linear`, `merged_weight` and
`adapt_loss` alone: DoRA, which also learns the length of W's rows, or a base in fewer bits would be
other ones of these.

Letters: r rank; n tokens; in, out a matrix's width.
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from formats import (
    HF_NAMES,
    Json,
    Stored,
    halves_to_pairs,
    hf_name,
    match,
    open_safetensors,
    pairs_to_halves,
    rotated_heads,
    save_safetensors,
)
from model import Llama, LlamaConfig, UserError, generator_of

TARGETS = ("wq", "wk", "wv", "wo", "w1", "w2", "w3", "output")


@dataclass(frozen=True)
class LoRA:
    """What is learnt beside which matrices."""

    rank: int = 8
    alpha: float = 16.0
    dropout: float = 0.0  # part of A's input that is set to zero while training
    rslora: bool = False
    targets: tuple[str, ...] = TARGETS[:-1]

    @property
    def scale(self) -> float:
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


# ------------------------------------------------------------------------------------- the module


@torch.library.custom_op("flatllama::lora_linear", mutates_args=())
def lora_linear(
    x: Tensor, seen: Tensor | None, weight: Tensor, A: Tensor, B: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """x Wᵀ + scale (seen Aᵀ) Bᵀ [n, out], and seen Aᵀ [n, r], which backward needs. `seen` is what
    dropout left of x [n, in], None where that is all of it.

    One operator, so that checkpointing keeps or repeats it as a whole, like a plain product. The
    thin products are small work but long reads: hence they add to the wide result in place instead
    of making one of their own to be added, and multiply in the order that leaves the wide matrix
    as it lies in memory: on a CPU the other order takes up to four times as long.
    """
    low = (x if seen is None else seen) @ A.T
    y = x @ weight.T
    return y.addmm_(low, B.T, alpha=scale), low


@lora_linear.register_fake
def _(x, seen, weight, A, B, scale):
    return x.new_empty(x.shape[0], weight.shape[0]), x.new_empty(x.shape[0], A.shape[0])


def _keep(ctx, inputs, output):
    x, seen, weight, A, B, ctx.scale = inputs
    ctx.save_for_backward(x if seen is None else seen, weight, A, B, output[1])
    ctx.dropped = seen is not None


def _lora_linear_backward(ctx, grad, _):
    seen, weight, A, B, low = ctx.saved_tensors  # low [n, r]; grad [n, out]
    low_grad = (grad @ B.T.contiguous().T).mul_(ctx.scale)  # [n, r]
    x_grad = seen_grad = None
    if ctx.needs_input_grad[0]:
        x_grad = grad @ weight  # [n, in]
        if not ctx.dropped:
            x_grad.addmm_(low_grad, A)
    if ctx.needs_input_grad[1]:
        seen_grad = low_grad @ A
    B_grad = (low.T @ grad).T * ctx.scale
    return x_grad, seen_grad, None, low_grad.T @ seen, B_grad, None


lora_linear.register_autograd(_lora_linear_backward, setup_context=_keep)


def lora_product(x: Tensor, weight: Tensor, A: Tensor, B: Tensor, scale: float, dropout: float):
    """lora_linear of x [..., in], in the weight's dtype: factors may be wider, to learn in."""
    flat = x.flatten(0, -2).to(weight.dtype)  # [n, in]
    seen = dropped(flat, dropout) if dropout else None
    y, _ = lora_linear(flat, seen, weight, A.to(flat.dtype), B.to(flat.dtype), scale)
    return y.unflatten(0, x.shape[:-1])


def dropped(x: Tensor, dropout: float) -> Tensor:
    """Dropout is for training: where no gradient is asked for, as in evaluation, there is none."""
    return F.dropout(x, dropout) if dropout and torch.is_grad_enabled() else x


class LoRALinear(nn.Linear):
    """A linear layer with an adapter beside its weight, which keeps its name.

    `product` is what forward computes with; a split over ranks brings its own."""

    def __init__(self, base: nn.Linear, lora: LoRA):
        super().__init__(base.in_features, base.out_features, bias=False, device="meta")
        self.weight = base.weight
        self.rank, self.scale, self.dropout = lora.rank, lora.scale, lora.dropout
        wide = torch.promote_types(self.weight.dtype, torch.float32)  # to learn small differences
        like = dict(dtype=wide, device=self.weight.device)
        self.lora_A = nn.Parameter(torch.empty(lora.rank, base.in_features, **like))
        self.lora_B = nn.Parameter(torch.empty(base.out_features, lora.rank, **like))
        self.product: Callable = lora_product
        self.unmerged: nn.Parameter | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.unmerged is not None:
            return super().forward(x)
        factors = self.lora_A, self.lora_B
        return self.product(x, self.weight, *factors, self.scale, self.dropout)

    @torch.no_grad()
    def merge(self) -> None:
        """Add the adapter to the weight: then this is as fast as a plain linear layer."""
        if self.unmerged is None:
            merged = merged_weight(self.weight, self.lora_A, self.lora_B, self.scale)
            self.unmerged, self.weight = self.weight, nn.Parameter(merged, requires_grad=False)

    def unmerge(self) -> None:
        """The way back, to the last bit: the weight was kept, as subtracting would round."""
        if self.unmerged is not None:
            self.weight, self.unmerged = self.unmerged, None


def merged_weight(weight: Tensor, A: Tensor, B: Tensor, scale: float) -> Tensor:
    """W + scale B A, summed in float32 at least and rounded once to W's dtype."""
    wide = torch.promote_types(weight.dtype, torch.float32)
    return torch.addmm(weight.to(wide), B.to(wide), A.to(wide), alpha=scale).to(weight.dtype)


def add_adapters(model: Llama, lora: LoRA) -> None:
    """Freeze a model, and put adapters, still without values, beside the matrices it names."""
    if any(isinstance(module, LoRALinear) for module in model.modules()):
        raise UserError("this model has an adapter already: merge it, or load the base anew")
    model.requires_grad_(False)
    for name, module in list(model.named_modules()):
        parent, _, own = name.rpartition(".")
        if own in lora.targets and isinstance(module, nn.Linear):
            setattr(model.get_submodule(parent), own, LoRALinear(module, lora))


def adapt_loss(model: Llama) -> None:
    """Where the output has an adapter: make the loss, which takes W and no layer, take note of it.

    [x, scale x Aᵀ] [W, B]ᵀ is the layer's product. Costs a copy of W a microbatch, and the gradient
    of all of it, of which B's is used: much for rank r, but nothing that the loss has to know."""
    output, loss = model.output, model.loss
    if not isinstance(output, LoRALinear):
        return

    def adapted(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        if output.unmerged is not None:
            return loss(hidden, weight, targets)
        A, B = output.lora_A.to(weight.dtype), output.lora_B.to(weight.dtype)
        hidden = hidden.to(weight.dtype)
        low = F.linear(dropped(hidden, output.dropout), A) * output.scale
        return loss(torch.cat([hidden, low], -1), torch.cat([weight, B], -1), targets)

    model.loss = adapted


def adapters(model: Llama) -> dict[str, nn.Parameter]:
    """Every factor by its name, such as layers.0.attention.wq.lora_A."""
    named = model.named_parameters()
    return {name: p for name, p in named if name.endswith((".lora_A", ".lora_B"))}


@torch.no_grad()
def init_adapters(
    model: Llama, seed: int = 0, put: Callable = Tensor.copy_, device: torch.device | None = None
) -> None:
    """Fill every factor by put(factor, its first value in full): B with zeros, A uniformly within
    1 / sqrt(in), as PEFT does. A function of seed and name, as Llama.init_weights is."""
    for name, parameter in adapters(model).items():
        first = torch.zeros(parameter.shape, device=device or parameter.device)
        if name.endswith("lora_A"):
            bound = 1 / math.sqrt(parameter.shape[1])
            first.uniform_(-bound, bound, generator=generator_of(name, seed, first.device))
        put(parameter, first)


# ------------------------------------------------------------------------------------ PEFT's files
#
#     adapter_config.json           rank, alpha, and beside which matrices
#     adapter_model.safetensors     base_model.model.NAME.lora_A.weight, NAME as at Hugging Face
#
# The rows of wq and wk stand in another order there, hence those of their lora_B, too.

PEFT_FILES = ("adapter_config.json", "adapter_model.safetensors")

# What a config may say about things that are not done here, if it says this.
NEUTRAL = dict(
    peft_type=("LORA",),
    bias=("none",),
    use_rslora=(False, True, None),
    init_lora_weights=(True, False, "gaussian", "orthogonal", "eva"),  # others change the base
    **dict.fromkeys(
        "use_dora lora_bias fan_in_fan_out rank_pattern alpha_pattern modules_to_save "
        "layers_to_transform layer_replication trainable_token_indices target_parameters "
        "use_qalora alora_invocation_tokens arrow_config exclude_modules use_bdlora".split(),
        (None, False, {}, []),
    ),
)


def peft_name(name: str) -> str:
    """output.lora_A -> base_model.model.lm_head.lora_A.weight"""
    layer, factor = name.rsplit(".", 1)
    return f"base_model.model.{hf_name(f'{layer}.weight').removesuffix('weight')}{factor}.weight"


def _heads(name: str, config: LlamaConfig) -> int:
    """How many heads a factor makes whose rows stand in another order in PEFT's files; mostly 0."""
    return rotated_heads(name, config) if name.endswith("lora_B") else 0


def gather_adapters(model: Llama) -> dict[str, Tensor]:
    """Every factor in full, on the CPU. Every rank calls it; it sends the adapters and no more."""

    def whole(factor: Tensor) -> Tensor:
        if not isinstance(factor, DTensor):
            return factor
        for dim in range(factor.device_mesh.ndim):  # the way that parallel.py's put_shard cut it
            places = list(factor.placements)
            places[dim] = Replicate()
            factor = factor.redistribute(placements=places)
        return factor.to_local()

    with torch.no_grad():
        return {name: whole(p).to("cpu", copy=True) for name, p in adapters(model).items()}


def save_adapter(
    directory: Path, lora: LoRA, config: LlamaConfig, factors: dict[str, Tensor], base: str
) -> None:
    """Write PEFT's two files. `base` is what the adapter was trained beside."""

    def read(name: str) -> Tensor:
        heads = _heads(name, config)
        return pairs_to_halves(factors[name], heads) if heads else factors[name]

    stored = {
        peft_name(name): Stored(factor.dtype, tuple(factor.shape), partial(read, name))
        for name, factor in factors.items()
    }
    save_safetensors(directory / PEFT_FILES[1], stored, {"format": "pt"})
    about = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": int(lora.alpha) if lora.alpha == int(lora.alpha) else lora.alpha,
        "lora_dropout": lora.dropout,
        "use_rslora": lora.rslora,
        "target_modules": [_hf_module(target) for target in lora.targets],
        "bias": "none",
        "inference_mode": True,
    }
    (directory / PEFT_FILES[0]).write_text(json.dumps(about, indent=1))


def is_adapter(directory: Path) -> bool:
    return (directory / PEFT_FILES[0]).is_file()


def open_adapter(directory: Path, config: LlamaConfig) -> tuple[LoRA, dict[str, Stored]]:
    """Settings and factors, under our names and in our order, of an adapter for a Llama of this
    shape. UserError for one that does not fit, or that is more than LoRA."""
    path, file = (directory / name for name in PEFT_FILES)
    if not path.is_file() or not file.is_file():
        raise UserError(f"no adapter in '{directory}': it has no {' and '.join(PEFT_FILES)}")
    about, found = Json(path), open_safetensors(file)
    for key, values in NEUTRAL.items():
        if (value := about.get(key, values[0])) not in values:
            raise UserError(f"{path} has {key} {value!r:.80}: only plain LoRA is known here")
    names = {_hf_module(target): target for target in TARGETS}
    modules = {name.rsplit(".", 3)[1] for name in found if name.count(".") >= 3}
    told = about.get("target_modules")
    told = {str(name).split(".")[-1] for name in told} if isinstance(told, list) else modules
    if missing := (told & names.keys()) - modules or not modules:
        raise UserError(f"{file} has no factors for {missing if modules else 'any matrix'}")
    lora = LoRA(
        rank=_number(about, "r", int),
        alpha=_number(about, "lora_alpha", float),
        dropout=_number(about, "lora_dropout", float, 1) if about.get("lora_dropout") else 0.0,
        rslora=bool(about.get("use_rslora")),
        targets=tuple(target for name, target in names.items() if name in modules),
    )
    with torch.device("meta"):
        model = Llama(config)
    add_adapters(model, lora)
    ours = {name: tuple(p.shape) for name, p in adapters(model).items()}
    found.pop("base_model.model.lm_head.base_layer.weight", None)  # frozen: PEFT adds a copy
    match(found, {peft_name(name): shape for name, shape in ours.items()}, file)

    def read(name: str) -> Tensor:
        factor = found[peft_name(name)].read()
        heads = _heads(name, config)
        return halves_to_pairs(factor, heads) if heads else factor

    return lora, {
        name: Stored(found[peft_name(name)].dtype, shape, partial(read, name))
        for name, shape in ours.items()
    }


def _hf_module(target: str) -> str:
    """wq -> q_proj"""
    return next(hf for ours, hf in HF_NAMES.items() if ours.endswith(target)).split(".")[-1]


def _number(about: Json, key: str, kind: type, limit: float = 2**31) -> int | float:
    value = about[key]
    if type(value) not in (kind, int) or not 0 < value < limit:
        raise UserError(f"{about.path} is damaged: {key} cannot be {value!r:.50}")
    return kind(value)


@torch.no_grad()
def load_adapter(model: Llama, directory: str | Path) -> None:
    """Put an adapter in PEFT's files beside the weights of a model, in place."""
    lora, stored = open_adapter(Path(directory), model.config)
    add_adapters(model, lora)
    for name, parameter in adapters(model).items():
        parameter.copy_(stored[name].read())
    adapt_loss(model)


def merge_adapter(
    config: LlamaConfig, weights: dict[str, Stored], lora: LoRA, factors: dict[str, Stored]
) -> tuple[LlamaConfig, dict[str, Stored]]:
    """The weights of a model, still in their files, with an adapter's added when they are read.

    Where the output is tied to the embedding and has an adapter, it becomes a matrix of its own."""
    weights = dict(weights)
    if config.tie_embeddings and "output" in lora.targets:
        config = replace(config, tie_embeddings=False)
        weights["output.weight"] = weights["tok_embeddings.weight"]

    def read(name: str) -> Tensor:
        layer = name.removesuffix(".weight")
        A, B = (factors[f"{layer}.{factor}"].read() for factor in ("lora_A", "lora_B"))
        return merged_weight(weights[name].read(), A, B, lora.scale)

    merged = {
        name: Stored(weight.dtype, weight.shape, partial(read, name))
        for name, weight in weights.items()
        if name.replace(".weight", ".lora_A") in factors
    }
    return config, weights | merged
