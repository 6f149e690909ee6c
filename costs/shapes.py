"""What follows from the shapes of a model: its elements on a rank, and the FLOPs of a token."""

import copy
import functools
import math
import re
from collections import Counter
from typing import NamedTuple

from torch import nn

from config import ParallelConfig
from model import Llama, LlamaConfig
from parallel import style_of
from techniques.experts import experts_of
from techniques.parallel_layers import planned_dims


class LocalShape(NamedTuple):
    """A parameter, and the shape that it has on a rank along tp."""

    parameter: nn.Parameter
    shape: list[int]
    is_whole: bool  # every rank along tp has all of it


class Size(NamedTuple):
    """How much of a module a rank along tp has."""

    trained: int  # elements
    frozen: int  # bytes

    def without(self, part: "Size") -> "Size":
        return Size(self.trained - part.trained, self.frozen - part.frozen)


class Unit(NamedTuple):
    """What FSDP gathers at once, a block or all that is in none, on a rank along tp."""

    copies: int  # alike: as many as the rank has blocks, or 1
    trained: int  # elements
    frozen: int  # bytes
    gathered: int  # bytes to compute with: trained elements rounded, frozen ones if sharded
    kind: str = ""  # "expert_": it is sharded over mesh dimensions with this before their names


@functools.lru_cache(4096)
def shapes_on_rank(module: nn.Module, path: str, config: LlamaConfig, tp: int) -> list[LocalShape]:
    """Return the parameters of the module at `path` of a model, as one of `tp` ranks has them.
    Raises UserError for one that PLAN does not cover."""
    found = {}  # a tied matrix is one parameter
    for below, layer in module.named_modules():
        place = ".".join(filter(None, (path, below)))
        dims = planned_dims(style_of(place, config), place, layer) if tp > 1 else {}
        for name, parameter in layer.named_parameters(recurse=False):
            shape = list(parameter.shape) or [1]
            dim = dims.get(name)
            if dim is not None:
                shape[dim] = math.ceil(shape[dim] / tp)
            found[parameter] = LocalShape(parameter, shape, is_whole=dim is None)
    return list(found.values())


@functools.lru_cache(1 << 14)
def size_on_rank(
    module: nn.Module, path: str, config: LlamaConfig, tp: int, weight_bytes: int, shards: int
) -> Size:
    """Return the size of the module at `path` on one of `tp` ranks. A frozen element takes
    `weight_bytes`, or one byte if it is a code. FSDP pads rows to a multiple of `shards`."""
    trained = frozen = 0
    for parameter, (rows, *columns), _ in shapes_on_rank(module, path, config, tp):
        elements = math.ceil(rows / shards) * shards * math.prod(columns)
        if parameter.requires_grad:
            trained += elements
        elif parameter.is_floating_point():
            frozen += elements * weight_bytes
        else:
            frozen += elements
    return Size(trained, frozen)


def units(part: Llama, parallel: ParallelConfig, shards: int) -> list[Unit]:
    """Return the root of a rank's part of a model, and its blocks, alike ones together; under --ep
    also the experts of the blocks, which are sharded over ep and expert_shard."""
    of_block = part.config, parallel.tp, parallel.weight_bytes, shards
    of_experts = part.config, parallel.ep, parallel.weight_bytes, parallel.expert_shard
    return _units(part, of_block, of_experts, parallel.reshard == "adapters")


@functools.lru_cache(4096)  # many configurations differ in nothing that counts here
def _units(part: Llama, of_block: tuple, of_experts: tuple, keeps_frozen: bool) -> list[Unit]:
    _, ep, weight_bytes, _ = of_experts
    without_blocks = copy.copy(part)
    without_blocks._modules = part._modules | {"layers": None}
    root = size_on_rank(without_blocks, "", *of_block)
    blocks, experts = Counter(), Counter()  # sizes -> how many have them
    for number, block in part.layers.items():
        size = size_on_rank(block, f"layers.{number}", *of_block)
        for path, module in experts_of(block).items() if ep > 1 else ():
            place = module, f"layers.{number}.{path}"
            size = size.without(size_on_rank(*place, *of_block))
            experts[size_on_rank(*place, *of_experts)] += 1
        blocks[size] += 1

    def unit(copies: int, size: Size, kind: str = "") -> Unit:
        gathered = size.trained * weight_bytes
        if not keeps_frozen:
            gathered += size.frozen
        return Unit(copies, size.trained, size.frozen, gathered, kind)

    found = [unit(1, root)]
    found += [unit(n, size) for size, n in blocks.items()]
    found += [unit(n, size, "expert_") for size, n in experts.items()]
    return found


@functools.lru_cache(256)
def numbers_summed(part: Llama) -> int:
    """Return how many numbers of a token ranks along tp sum up in the blocks of a rank's part."""
    numbers = 0
    for path, _ in part.layers.named_modules(prefix="layers"):
        numbers += getattr(style_of(path, part.config), "sums", 0)
    return numbers


@functools.lru_cache(256)
def attended_by_layer(config: LlamaConfig, seq_len: int, times: int = 1) -> list[int]:
    """Return for each layer seq_len, or so many `times` its window, if that is less."""
    windows = config.windows or [0] * config.n_layers
    return [min(times * window or seq_len, seq_len) for window in windows]


@functools.lru_cache(1 << 14)
def flops_per_token(model: Llama, seq_len: int) -> int:
    """Return the floating-point operations to train on one token of a text, of which seq_len tokens
    attend to each other: a sequence, or a document.

    Per weight of a matrix: 2 in forward, 2 in backward for the gradient of the input and, if it is
    trainable, 2 for its own gradient. Attention takes 4 H E per layer and token attended to, for
    scores and weighted sums, and three times as much with backward. As usual (Chowdhery et al.
    2022, arXiv:2204.02311, appendix B), causal attention is counted as if each token attended to
    seq_len tokens, and recomputation is not counted, so that published figures compare.
    With adapters, the gradient of the first block's input counts, too, which nothing needs.
    In 8 bits products are faster, so that the share of the bfloat16 peak may exceed 100 %. The
    exercise labs/scaling plans a run by its FLOPs."""
    config = model.config
    attention = 3 * 4 * config.q_dim * sum(attended_by_layer(config, seq_len))
    products = 0
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            per_weight = 6 if layer.weight.requires_grad else 4
            products += per_weight * layer.in_features * layer.out_features
            for name, parameter in layer.named_parameters():
                if name.startswith("lora_"):
                    products += 6 * parameter.numel()
        elif hasattr(layer, "used"):  # of its stacked matrices, by a token
            per_weight = 6 if layer.weight.requires_grad else 4
            products += per_weight * layer.used * layer.weight[0].numel()
    return products + attention


# Dense peaks in bfloat16, FLOP/s. The first name that matches counts. Those of them that multiply
# in 8 bits reach twice as much there, by the same data sheets.
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
    "MI250X": 191.5e12,  # of one of its two dies: torch counts each as a device
}


def peak_flops(device_name: str) -> float | None:
    """Return the peak of a device by its name, None if it is not known: MFU is never guessed."""
    for name, peak in PEAK_FLOPS.items():
        # "RTX 4090 Laptop" and "RTX 4090 D" are slower than what the table means.
        if re.search(rf"\b{name}\b(?! (Laptop|D\b))", device_name):
            return peak
    return None
