"""LoRA (Hu et al. 2021, arXiv:2106.09685): train two thin matrices beside each frozen one.

             ┌── W [out, in], frozen ─────────────┐
    x [in] ──┤                                    (+)── y = x Wᵀ + scale (x Aᵀ) Bᵀ
             └── A [r, in] ──────── B [out, r] ───┘

Fine-tuning changes W by a matrix that a product B A of low rank r approximates well. Only A and B
have gradients and AdamW moments: for all matrices of the 8B model and r = 16, 42 million parameters
instead of 8 billion. B starts at zero, so that training starts from the model as it is. scale is
alpha / r; with rsLoRA alpha / sqrt(r), which keeps the size of the update at large r (Kalajdzievski
2023, arXiv:2312.03732).

Checkpoints of adapters are files in PEFT's format (plumbing/peft_files.py).
Letters: r rank; n tokens; in, out the widths of a matrix.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.experimental import local_map

from model import Llama, generator_for
from plumbing.processes import UserError

TARGETS = ("wq", "wk", "wv", "wo", "w1", "w2", "w3")  # matrices that can have an adapter


@dataclass(frozen=True)
class LoRA:
    """Settings of an adapter: its size, and which matrices have one."""

    rank: int = 8
    alpha: float = 16.0
    dropout: float = 0.0  # probability of zeroing an input feature of A in training
    rslora: bool = False
    targets: tuple[str, ...] = TARGETS

    @property
    def scale(self) -> float:
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


# --------------------------------------------------------------------------------- the product


@torch.library.custom_op("flatllama::lora_linear", mutates_args=())
def lora_linear(
    x: Tensor, x_dropped: Tensor | None, weight: Tensor, A: Tensor, B: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Return y = x Wᵀ + scale (x_dropped Aᵀ) Bᵀ [n, out] and x_dropped Aᵀ [n, r], for backward.

    x [n, in]; x_dropped is x after dropout, or None without dropout. A single operator, so that
    checkpointing saves or recomputes it as a whole. It saves 10 % of a step against two calls of
    F.linear: the thin products are added to the wide result in place, not in a pass of their own,
    and backward chooses the order and memory layout in which they are fastest.
    """
    xA = (x if x_dropped is None else x_dropped) @ A.T
    y = x @ weight.T
    return y.addmm_(xA, B.T, alpha=scale), xA


@lora_linear.register_fake
def _(x, x_dropped, weight, A, B, scale):
    return x.new_empty(x.shape[0], weight.shape[0]), x.new_empty(x.shape[0], A.shape[0])


def _save_for_backward(ctx, inputs, output):
    x, x_dropped, weight, A, B, ctx.scale = inputs
    ctx.save_for_backward(x if x_dropped is None else x_dropped, weight, A, B, output[1])
    ctx.has_dropout = x_dropped is not None


def _backward(ctx, grad, _):
    x_dropped, weight, A, B, xA = ctx.saved_tensors  # xA [n, r]; grad [n, out]
    # B is copied into column-major order, in which this product is faster.
    xA_grad = (grad @ B.T.contiguous().T).mul_(ctx.scale)  # [n, r]
    x_grad = x_dropped_grad = None
    if ctx.needs_input_grad[0]:
        x_grad = grad @ weight  # [n, in]
        if not ctx.has_dropout:
            x_grad.addmm_(xA_grad, A)
    if ctx.needs_input_grad[1]:
        x_dropped_grad = xA_grad @ A
    B_grad = (xA.T @ grad).T * ctx.scale  # faster than grad.T @ xA
    return x_grad, x_dropped_grad, None, xA_grad.T @ x_dropped, B_grad, None


lora_linear.register_autograd(_backward, setup_context=_save_for_backward)


def lora_product(x: Tensor, weight: Tensor, A: Tensor, B: Tensor, scale: float, dropout: float):
    """Return lora_linear of x [..., in], computed in the dtype of the weight."""
    flat = x.flatten(0, -2).to(weight.dtype)  # [n, in]
    # Dropout is for training: evaluation asks for no gradient.
    x_dropped = F.dropout(flat, dropout) if dropout and torch.is_grad_enabled() else None
    y, _ = lora_linear(flat, x_dropped, weight, A.to(flat.dtype), B.to(flat.dtype), scale)
    return y.unflatten(0, x.shape[:-1])


# ------------------------------------------------------------------------------------ the module


class LoRALinear(nn.Linear):
    """A linear layer with an adapter beside its weight, which keeps its name.

    `product` is the function that forward computes; tensor parallelism replaces it."""

    def __init__(self, base: nn.Linear, lora: LoRA):
        super().__init__(base.in_features, base.out_features, bias=False, device="meta")
        self.weight = base.weight
        self.lora = lora
        dtype = torch.promote_types(self.weight.dtype, torch.float32)  # master weights
        options = dict(dtype=dtype, device=self.weight.device)
        self.lora_A = nn.Parameter(torch.empty(lora.rank, base.in_features, **options))
        self.lora_B = nn.Parameter(torch.empty(base.out_features, lora.rank, **options))
        self.product: Callable = lora_product
        self.merged = False

    def forward(self, x: Tensor) -> Tensor:
        if self.merged:
            return super().forward(x)
        factors = self.lora_A, self.lora_B
        return self.product(x, self.weight, *factors, self.lora.scale, self.lora.dropout)

    @torch.no_grad()
    def merge(self) -> None:
        """Add the adapter to the weight for good: the layer is then as fast as one without."""
        if not self.merged:
            weight = merged_weight(self.weight, self.lora_A, self.lora_B, self.lora.scale)
            self.weight, self.merged = nn.Parameter(weight, requires_grad=False), True

    def sharded_dims(self, dim: int) -> dict[str, int | None]:
        """Return the dimension on which tensor parallelism shards each parameter, None for a
        replicated one; `dim` is that of the weight.

        A factor is sharded along the dimension that it shares with the weight: B with its output
        features, A with its input features. The other factor is replicated."""
        return {"weight": dim, "lora_A": dim or None, "lora_B": None if dim else 0}

    def shard_product(self, mesh: DeviceMesh) -> None:
        """Let forward compute with this rank's shards of parameters that have become DTensors.

        The product of a rank's shards is its shard of the output, or its partial sum, just as for
        the weight alone, and needs no communication of its own. The gradient of the replicated
        factor is all-reduced, like that of a norm (tensor_parallel.py)."""
        weight, A, B = (p.placements for p in (self.weight, self.lora_A, self.lora_B))
        rows = weight[0].is_shard(1)
        x, y = ([Shard(2)], [Partial()]) if rows else ([Replicate()], [Shard(2)])  # [B, T, width]
        inputs = (x, weight, A, B)
        # Of a replicated tensor each rank computes a part of the gradient, to be summed.
        gradients = [[Partial()] if place[0].is_replicate() else place for place in inputs]
        self.product = local_map(
            self.product,
            out_placements=y,
            in_placements=(*inputs, None, None),
            in_grad_placements=(*gradients, None, None),
            device_mesh=mesh,
        )


def merged_weight(weight: Tensor, A: Tensor, B: Tensor, scale: float) -> Tensor:
    """Return W + scale B A, summed in float32 or float64 and rounded once to W's dtype."""
    dtype = torch.promote_types(weight.dtype, torch.float32)
    return torch.addmm(weight.to(dtype), B.to(dtype), A.to(dtype), alpha=scale).to(weight.dtype)


# ------------------------------------------------------------------------ adapters of a model


def add_adapters(model: Llama, lora: LoRA) -> None:
    """Freeze a model and put an adapter, still uninitialized, beside each target matrix."""
    if adapter_settings(model):
        raise UserError("this model has an adapter already: merge it, or load the base again")
    model.requires_grad_(False)
    for name, module in list(model.named_modules()):
        parent, _, attribute = name.rpartition(".")
        if attribute in lora.targets and isinstance(module, nn.Linear):
            setattr(model.get_submodule(parent), attribute, LoRALinear(module, lora))


def adapter_settings(model: nn.Module) -> LoRA | None:
    """Return the settings of a model's adapters, None for a model without adapters."""
    return next((m.lora for m in model.modules() if isinstance(m, LoRALinear)), None)


def adapters(model: Llama) -> dict[str, nn.Parameter]:
    """Return every factor by its name, such as layers.0.attention.wq.lora_A."""
    return {n: p for n, p in model.named_parameters() if n.endswith((".lora_A", ".lora_B"))}


@torch.no_grad()
def init_adapters(
    model: Llama, seed: int = 0, assign: Callable = Tensor.copy_, device: torch.device | None = None
) -> None:
    """Call assign(factor, full_initial_value) for each factor: B zero, A uniform within
    1 / sqrt(in), as in PEFT. Values depend on seed and name only, as in Llama.init_weights."""
    for name, parameter in adapters(model).items():
        value = torch.zeros(parameter.shape, device=device or parameter.device)
        if name.endswith("lora_A"):
            bound = 1 / math.sqrt(parameter.shape[1])
            value.uniform_(-bound, bound, generator=generator_for(name, seed, value.device))
        assign(parameter, value)
