"""LoRA: fine-tune by training two thin matrices beside each frozen one.

             ┌── W [out, in], frozen ─────────────┐
    x [in] ──┤                                    (+)── y = x Wᵀ + scale (x Aᵀ) Bᵀ
             └── A [r, in] ──────── B [out, r] ───┘

Full fine-tuning adds a matrix to W. LoRA approximates it by a product B A of low rank r (Hu et al.
2021, arXiv:2106.09685). Only A and B have gradients and AdamW moments: 42 million parameters
instead of 8 billion, for all matrices of the 8B model at r = 16. B starts at zero, so that training
starts from the model as it is. scale is alpha / r; rsLoRA takes alpha / sqrt(r) instead, so that
updates do not shrink at large r (Kalajdzievski 2023, arXiv:2312.03732).

Further down: DoRA, and a base in 4 bits. Checkpoints of adapters are files in PEFT's format
(files/adapters.py). Letters: r rank; n tokens; in, out the widths of a matrix.
"""

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial

from model import Llama, LlamaConfig, generator_for
from models.family import TARGETS, family_of
from plumbing.devices import cast_by_autocast
from plumbing.messages import UserError, with_progress
from plumbing.shards import assign_shard, to_local
from techniques.nf4 import dequantized, packed_shape, product_in_4_bits, quantized, some_rows
from techniques.parallel_layers import product_of_shards, writes_to_stream
from techniques.technique import Technique


def with_adapter(y: Tensor, x: Tensor, A: Tensor, B: Tensor, scale: float) -> Tensor:
    """Return y + scale (x Aᵀ) Bᵀ for y = x Wᵀ [n, out] and x [n, in].

    That is LoRA. Backward needs x for A's gradient and x Aᵀ [n, r] for B's; for the frozen W it
    needs no x. addmm computes the thin product and adds it to y in one kernel. A row-major copy of
    Bᵀ makes backward a tenth faster."""
    return torch.addmm(y, x @ A.T, B.T.contiguous(), alpha=scale)


@dataclass(frozen=True)
class LoRA:
    """Settings of an adapter: its size, and which matrices have one."""

    rank: int = 8
    alpha: float = 16.0
    dropout: float = 0.0  # probability of zeroing an input feature of A in training
    rslora: bool = False
    dora: bool = False
    targets: tuple[str, ...] = TARGETS

    @property
    def scale(self) -> float:
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


def product(x, weight, row_scale, A, B, magnitude, norms, dropout, bias, scale):
    """Return the output of a LoRALinear, given its parameters and row norms, for x [..., in].

    Plain LoRA is y = x Wᵀ and with_adapter; the rest is for 4 bits, where `row_scale` is not None,
    and DoRA, which does not scale the bias, as in PEFT. A scale of 0 leaves the adapter out. The
    arguments stand in the order of shard_product's placements."""
    if row_scale is None:
        flat = x.flatten(0, -2).to(weight.dtype)  # [n, in]
        y = flat @ weight.T
    else:
        (cast,) = cast_by_autocast(x)  # the weight is bytes, whose dtype says nothing
        flat = cast.flatten(0, -2)
        y = product_in_4_bits(flat, weight, row_scale)
    if A is not None and scale:
        dropped = F.dropout(flat, dropout)
        y = with_adapter(y, dropped, A.to(flat.dtype), B.to(flat.dtype), scale)
    if magnitude is not None and scale:
        y = with_lengths(y, magnitude, norms)
    if bias is not None:
        y = y + bias.to(y.dtype)
    return y.unflatten(0, x.shape[:-1])


class LoRALinear(nn.Linear):
    """A frozen linear layer that has an adapter, or is stored in 4 bits, or both. Weight and bias
    keep their names.

    In 4 bits (QLoRA; Dettmers et al. 2023, arXiv:2305.14314): W is never updated, so it is rounded
    once, and errors do not add up. It is stored as techniques/nf4.py says, at about 4.13 bits a
    weight, and becomes a full matrix only while a product needs it, in forward and again in
    backward. Gradients of the adapters are exact for this rounded W, so that they also learn to
    make up for its error. A layer in 4 bits that is no target has `lora` too, but no A and B.

    `product` is the function that forward computes; tensor parallelism replaces it."""

    # All but the bias, in the order of product's arguments. What a layer does not have is None.
    PARAMETERS = ("weight", "row_scale", "lora_A", "lora_B", "lora_magnitude")
    matrices = ("weight", "lora_A", "lora_B")  # which weight decay is for (plumbing/shards.py)
    set_later = PARAMETERS[2:]  # by init_adapters

    def __init__(self, base: nn.Linear, lora: LoRA, is_target: bool = True, bits: int = 16):
        out, width = base.out_features, base.in_features
        super().__init__(width, out, bias=False, device="meta")
        for name in self.PARAMETERS:
            self.register_parameter(name, None)
        self.weight = base.weight
        self.bias = base.bias
        self.training = base.training
        self.lora = lora
        self.is_off = False  # within adapters_off
        if bits == 4:
            empty_bytes = partial(base.weight.new_empty, dtype=torch.uint8)
            self.weight = nn.Parameter(empty_bytes(packed_shape(out, width)), requires_grad=False)
            self.row_scale = nn.Parameter(empty_bytes(out, 4), requires_grad=False)
        if is_target:
            dtype = torch.promote_types(base.weight.dtype, torch.float32)  # master weights
            empty_floats = partial(base.weight.new_empty, dtype=dtype)
            self.lora_A = nn.Parameter(empty_floats(lora.rank, width))
            self.lora_B = nn.Parameter(empty_floats(out, lora.rank))
            self.lora_magnitude = nn.Parameter(empty_floats(out)) if lora.dora else None
        self.product: Callable = product

    def forward(self, x: Tensor) -> Tensor:
        norms = self.lora_magnitude  # adapters that are off use neither
        if norms is not None and not self.is_off:
            norms = self.row_norms()
        dropout = self.lora.dropout if self.training else 0.0
        scale = 0.0 if self.is_off else self.lora.scale
        return self.product(x, *self.ordered_parameters(), norms, dropout, self.bias, scale)

    def ordered_parameters(self) -> list[nn.Parameter | None]:
        return [getattr(self, name) for name in self.PARAMETERS]

    @torch.no_grad()
    def row_norms(self, adapted: bool = True) -> Tensor:
        """Return the length of each row of W + scale B A, or of W alone. Where tensor parallelism
        gives a rank a part of each row, the squared lengths are all-reduced."""
        weight, row_scale, A, B, _ = map(to_local, self.ordered_parameters())
        if not adapted:
            A, B = A[:0], A.new_empty(len(weight), 0)  # an adapter of rank 0
        norms = changed_norms(weight, row_scale, A, B, self.lora.scale)
        if not isinstance(self.weight, DTensor):
            return norms
        squares = DTensor.from_local(
            norms.square(),
            self.weight.device_mesh,
            # Of columns a rank has a part of each sum.
            [Partial() if p.is_shard(1) else p for p in self.weight.placements],
            shape=self.lora_magnitude.shape,
            stride=(1,),
        )
        # An all-reduce, where sums are partial. The base alone may lie whole on ranks along shard.
        placements = self.lora_magnitude.placements[-squares.device_mesh.ndim :]
        return squares.redistribute(placements=placements).sqrt()

    def sharded_dims(self, dim: int) -> dict[str, int | None]:
        """Return the dimension on which tensor parallelism shards each parameter if it shards the
        weight on `dim`. It is None for a parameter that is replicated.

        A has the weight's input features, the others have its output features."""
        dims = dict.fromkeys(self.PARAMETERS, 0 if dim == 0 else None)
        dims["weight"] = dim
        dims["lora_A"] = 1 if dim == 1 else None
        return {name: d for name, d in dims.items() if getattr(self, name) is not None}

    def shard_product(self, mesh: DeviceMesh) -> None:
        """Let forward compute with this rank's shards of parameters that have become DTensors. The
        gradient of a replicated factor is all-reduced, like that of a norm (parallel.py)."""
        placements = [getattr(p, "placements", None) for p in self.ordered_parameters()]
        bias = getattr(self.bias, "placements", None)
        # Norms are where magnitudes are. Dropout and scale are numbers.
        placements += [placements[-1], None, bias, None]
        self.product = product_of_shards(self.product, placements, mesh)


# -------------------------------------------------------------------------------------------- DoRA

# DoRA (Liu et al. 2024, arXiv:2402.09353) also trains the length of each row of the matrix, apart
# from its direction. Output i is multiplied by m[i] / (norm of row i of W + scale B A). The norms
# are computed from A and B in each forward, but are constants in backward. The magnitudes m [out]
# are trained, and start at the norms of W's rows.


def with_lengths(y: Tensor, magnitude: Tensor, norms: Tensor) -> Tensor:
    """Return y [n, out] as if row i of the matrix had the length magnitude[i]."""
    # FSDP may have rounded m to bfloat16. Norms are rounded alike, so that an untrained m is a
    # factor of exactly 1.
    norms = norms.to(magnitude.dtype).to(norms.dtype)
    return (y * (magnitude / at_least_tiny(norms))).to(y.dtype)


@torch.library.custom_op("flatllama::changed_norms", mutates_args=())
def changed_norms(
    weight: Tensor, row_scale: Tensor | None, A: Tensor, B: Tensor, scale: float
) -> Tensor:
    """Return the norm of each row of W + scale B A, [out] in float32 or 64, without gradients."""
    dtype = torch.promote_types(A.dtype, torch.float32)
    stored = [weight] if row_scale is None else [weight, row_scale]
    norms = []
    with torch.autocast(A.device.type, enabled=False):
        for rows_of_B, *rows in some_rows(A.shape[1], B, *stored):
            matrix = rows[0] if row_scale is None else dequantized(*rows, dtype)
            update = rows_of_B.to(dtype), A.to(dtype)
            changed = torch.addmm(matrix.to(dtype), *update, alpha=scale)
            norms.append(changed.norm(dim=1))
    return torch.cat(norms)


@changed_norms.register_fake
def _(weight, row_scale, A, B, scale):
    return A.new_empty(len(weight), dtype=torch.promote_types(A.dtype, torch.float32))


def at_least_tiny(norms: Tensor) -> Tensor:
    """Return norms that are safe to divide by, so that a row of zeros does not become NaN."""
    return norms.clamp(min=torch.finfo(norms.dtype).tiny)


def merged_weight(
    weight: Tensor, scale: float, A: Tensor, B: Tensor, magnitude: Tensor | None = None
) -> Tensor:
    """Return the weight of a layer that computes the same without an adapter. It is W + scale B A,
    with rows as long as `magnitude` says, computed in float32 or float64 and rounded once."""
    dtype = torch.promote_types(weight.dtype, torch.float32)
    merged = torch.addmm(weight.to(dtype), B.to(dtype), A.to(dtype), alpha=scale)
    if magnitude is not None:
        merged *= (magnitude.to(dtype) / at_least_tiny(merged.norm(dim=1)))[:, None]
    return merged.to(weight.dtype)


# ------------------------------------------------------------------------ adapters of a model


def all_matrices(config: LlamaConfig) -> tuple[str, ...]:
    """Return the names of all matrices that an adapter, or a base in 4 bits, may change."""
    return tuple({*TARGETS, *family_of(config).targets(config)})


def add_adapters(model: Llama, lora: LoRA, base_bits: int = 16) -> None:
    """Freeze a model and put an adapter beside each target matrix. With base_bits = 4, all matrices
    of the blocks are stored in 4 bits, and those that are no target have no A and B. No values are
    set yet: init_adapters and quantize_base do that."""
    if adapter_settings(model):
        raise UserError("this model has an adapter already: load the base, or a merged model")
    if lora.rank > model.config.dim:
        raise UserError(f"--rank {lora.rank} exceeds the model width: at most {model.config.dim}")
    model.requires_grad_(False)
    replaced = all_matrices(model.config) if base_bits == 4 else lora.targets
    for name, layer in list(model.named_modules()):  # a list, since the loop replaces layers
        parent, _, attribute = name.rpartition(".")
        if attribute not in replaced:
            continue
        if not isinstance(layer, nn.Linear):
            raise UserError(
                f"{name} cannot have an adapter, since it is no nn.Linear: leave {attribute} out "
                f"of --targets, and leave out --base-bits 4"
            )
        layer = LoRALinear(layer, lora, attribute in lora.targets, base_bits)
        setattr(model.get_submodule(parent), attribute, layer)


def adapter_settings(model: nn.Module) -> LoRA | None:
    """Return the settings of a model's adapters, None for a model without adapters."""
    for module in model.modules():
        if isinstance(module, LoRALinear):
            return module.lora
    return None


def adapters(model: Llama) -> dict[str, nn.Parameter]:
    """Return every factor and magnitude by its name, such as layers.0.attention.wq.lora_A."""
    return {name: p for name, p in model.named_parameters() if ".lora_" in name}


@contextlib.contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Within this context a model computes what its base does, without gradients: activation
    checkpointing would run forward again later, with adapters."""
    layers = [module for module in model.modules() if isinstance(module, LoRALinear)]
    for layer in layers:
        layer.is_off = True
    try:
        with torch.no_grad():
            yield
    finally:
        for layer in layers:
            layer.is_off = False


@torch.no_grad()
def init_adapters(
    model: Llama, seed: int = 0, assign: Callable = assign_shard, device: torch.device | None = None
) -> None:
    """Call assign(parameter, full_initial_value) for each parameter of adapters. B starts at zero,
    and A is uniform within ± 1 / sqrt(in), as in PEFT. Magnitudes start as the lengths of the
    base's rows, so load the base first. Values of A depend on seed, name and shape only."""
    for name, parameter in adapters(model).items():
        path, _, kind = name.rpartition(".")
        value = torch.zeros(parameter.shape, device=device or parameter.device)
        if kind == "lora_A":
            bound = 1 / math.sqrt(parameter.shape[1])
            generator = generator_for(name, seed, value.device)
            value.uniform_(-bound, bound, generator=generator)
        if kind == "lora_magnitude":
            value = model.get_submodule(path).row_norms(adapted=False)
            if isinstance(value, DTensor):
                value = value.full_tensor()
        assign(parameter, value)


@torch.no_grad()
def quantize_base(
    model: Llama, read: Callable[[str], Tensor], assign: Callable = Tensor.copy_
) -> None:
    """Call assign(parameter, full_value) for each matrix in 4 bits, and for its scales. read(name)
    returns a full matrix. Only one at a time is in memory."""
    layers = []
    for path, module in model.named_modules():
        if getattr(module, "row_scale", None) is not None:
            layers.append((path, module))
    for path, layer in with_progress(layers, "matrices in 4 bits"):
        matrix = read(f"{path}.weight").to(layer.weight.device)  # a GPU is faster
        codes, row_scale = quantized(matrix)
        del matrix  # before the next one is read
        assign(layer.weight, codes)
        assign(layer.row_scale, row_scale)


# ------------------------------------------------------------------ what others ask of a technique


def holds(model: Llama, work) -> dict[str, float]:
    """Return how many elements per token a block saves for backward, on average, beyond a block
    without adapters. An adapter saves x Aᵀ; with dropout also its own x, and a mask (in bytes;
    uncompiled on a CPU in elements); with DoRA also the y that is scaled. An input that only frozen
    layers read is no longer saved, except wo's: it is attention's output, which attention saves."""
    mask = 1 / work.parallel.weight_bytes if work.fused else 1
    saved = [saved_by_block(block, work.parallel.tp, mask) for block in model.layers.values()]
    return {"saved": sum(saved) / len(saved)}


@lru_cache(4096)
def saved_by_block(block: nn.Module, tp: int, mask: float) -> float:
    elements = 0.0
    widths = {}  # (module, row_parallel) -> of the input
    needed = set()  # of these
    for path, layer in block.named_modules():
        if not isinstance(layer, nn.Linear):
            continue
        row_parallel = writes_to_stream(block, path)  # tp shards x, else it shards y
        x_width = layer.in_features / (tp if row_parallel else 1)
        y_width = layer.out_features / (1 if row_parallel else tp)
        is_needed = layer.weight.requires_grad
        if getattr(layer, "lora_A", None) is not None:
            lora = layer.lora
            is_needed = not lora.dropout
            elements += lora.rank
            if lora.dora:
                elements += y_width
            if lora.dropout:
                elements += (1 + mask) * x_width
        if not path.endswith("wo"):
            key = path.split(".")[0], row_parallel  # w1 and w3 read the same x, as do wq, wk and wv
            widths[key] = x_width
            if is_needed:
                needed.add(key)
    return elements - sum(width for key, width in widths.items() if key not in needed)


def sends(model: Llama, work) -> Iterator[tuple]:
    """DoRA's squared lengths of rows of which each rank along tp has a part, for each forward."""
    forwards = work.microbatches * (1 + work.parallel.repeats_attention)
    for path, layer in model.named_modules():
        if getattr(layer, "lora_magnitude", None) is not None and writes_to_stream(model, path):
            yield "tp", "all-reduce", forwards, layer.out_features * work.parallel.grad_bytes


# It has no flag in config.py: costs/page.py asks it for every model, and finetune_lora.py lists it.
# add_adapters is what changes the model.
TECHNIQUE = Technique("", holds=holds, sends=sends)
