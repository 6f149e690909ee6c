"""Check that model.py, as it may have been changed, computes one and the same everywhere.

Each check runs a small model, whose weights need no random numbers: in float64, or in the dtype of
a kernel."""

import itertools
import math
import zlib
from dataclasses import replace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from model import KVCache, Llama, LlamaConfig
from parallel import World, tensor_parallel
from plumbing.processes import UserError
from plumbing.shards import to_local
from techniques.context_parallel import own_tokens, share_sequences
from techniques.pipeline import part_of, stages_of
from text.batch import Batch, kernel_widths


def check_model(config: LlamaConfig, world: World) -> None:
    """Raise UserError on all ranks if a small model computes something else when it is split along
    tp, cp or pp as the model is, or by the kernel for documents."""
    check_documents(config, world.device, world.parallel.dtype)
    check_tensor_parallel(config, world.mesh["tp"], world.parallel.async_tp)
    if world.parallel.cp > 1:
        check_context_parallel(config, world)
    if world.parallel.pp > 1:
        check_stages(config, world.device)


@torch.no_grad()
def check_context_parallel(config: LlamaConfig, world: World) -> None:
    """Raise UserError on all ranks if a small model has other logits when ranks share sequences, in
    float64 and with the kernel of training. Attention that was changed may ignore the tokens of
    other ranks."""
    cp, device, dtype = world.parallel.cp, world.device, world.parallel.dtype
    tolerances = {torch.float64: 1e-9}
    if widths := kernel_widths(device.type, dtype):
        tolerances[dtype] = 0.03  # roundings to 8 bits, added up
        if config.head_dim not in widths:
            raise UserError(
                f"--cp needs heads of a width in {widths} on this device, and they have "
                f"{config.head_dim}: choose other --dim or --n-heads, or --dtype float32"
            )
    T = math.ceil(512 / cp) * 2 * cp
    model, tokens = _small_model(config, 1, device, n_layers=4, length=T)
    # Two documents with a border within a chunk, and one of a single token between them.
    packed = torch.cat([torch.arange(n, device=device) for n in (T // 3, 1, T)])[None, :T]
    for (dtype, tolerance), positions in itertools.product(tolerances.items(), (None, packed)):
        in_dtype = replace(world, parallel=replace(world.parallel, dtype=dtype))
        own = share_sequences(Batch(tokens, tokens, positions, text_bytes=0), in_dtype)
        model.to(dtype)
        found = model(own.tokens, positions=own.positions, documents=own.documents)
        expected = model(tokens, positions=positions)
        expected = own_tokens(expected, world.cp_mesh.get_local_rank(), cp)
        error = (found - expected).norm() / expected.norm()
        dist.all_reduce(error, dist.ReduceOp.MAX, group=world.cp_mesh.get_group())
        if not error <= tolerance:  # NaN fails too
            raise UserError(
                "--cp computes other logits than one process, since model.py was changed: let "
                "Llama.forward hand `documents` on to attend, and mix tokens nowhere else; what "
                "attend does to scores belongs in techniques/context_parallel.py, too"
            )


@torch.no_grad()
def check_stages(config: LlamaConfig, device: torch.device) -> None:
    """Raise UserError if a small model has another loss when two stages compute it.

    Each stage calls Llama.forward on its part: what a change adds there happens in every stage."""
    model, tokens = _small_model(config, 1, device, n_layers=2)
    first, last = (stages_of(part_of(model, rank, 2, 1), rank, 2, 1)[0].eval() for rank in (0, 1))
    found = last(first(tokens), tokens)
    expected = model(tokens, tokens)
    if not (found - expected).abs() <= 1e-9 * expected.abs():  # NaN fails too
        raise UserError(
            "--pp computes another loss than one process, since model.py was changed: each stage "
            "calls Llama.forward on its layers, so move what you added there into a block, or do "
            "it only where the embedding or the output is"
        )


def check_tensor_parallel(config: LlamaConfig, mesh: DeviceMesh, asynchronous: bool) -> None:
    """Raise UserError on all ranks if a small model has another loss or another gradient when it
    is sharded over a mesh of one dimension.

    PLAN covers all parameters, but cannot know what a change does between column-parallel and
    row-parallel layers, where a rank has some of the features, nor in the loss, where it has some
    of the vocabulary."""
    if mesh.size() == 1:
        return
    expected = _loss_and_gradients(config, mesh, split=False)
    try:
        found = _loss_and_gradients(config, mesh, split=True, asynchronous=asynchronous)
    except (TypeError, AttributeError) as error:
        if not asynchronous:
            raise
        raise UserError(
            f"--async-tp lets the input of attention and feed-forward arrive while layers multiply "
            f"it, and this model does more with it ({error}): leave out --async-tp"
        )
    for name, value in expected.items():
        if not (found[name] - value).norm() <= 1e-9 * value.norm():  # NaN fails too
            raise UserError(
                f"--tp computes another {name} than one process, since model.py was changed: from "
                f"wq to wo a rank has some of the heads, from w1 to w2 some of the features, and "
                f"in the loss some of the vocabulary"
            )


def _loss_and_gradients(
    config: LlamaConfig, mesh: DeviceMesh, split: bool, asynchronous: bool = False
) -> dict[str, Tensor]:
    model, tokens = _small_model(config, mesh.size(), torch.device(mesh.device_type))
    if split:
        tensor_parallel(model, mesh, asynchronous)
    loss = model(tokens, targets=tokens)
    loss.backward()
    found = {"loss": loss.detach()}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        is_sharded = isinstance(gradient, DTensor)
        found[f"gradient of {name}"] = gradient.full_tensor() if is_sharded else gradient
    return found


@torch.no_grad()
def layers_caveat(whole: Llama, float8: str) -> str:
    """Return a one-line warning if adapters or 8 bits, which replace linear layers, have no effect
    somewhere, since a small model does not call the layer; else ""."""
    if float8 == "none" and all(parameter.requires_grad for parameter in whole.parameters()):
        return ""
    model, tokens = _small_model(whole.config, 1, torch.device("cpu"))
    layers = {name: m for name, m in model.layers.named_modules() if isinstance(m, nn.Linear)}
    not_called = set(layers)
    for name, layer in layers.items():
        layer.register_forward_pre_hook(lambda *_, name=name: not_called.discard(name))
    model(tokens)
    if not not_called:
        return ""
    name = min(not_called).partition(".")[2]  # without the number of the block
    return (
        f"note: adapters and 8 bits have no effect in {name}, which model.py did not call in a "
        f"trial: it has to write {name.rpartition('.')[2]}(x), not F.linear(x, its weight)"
    )


@torch.no_grad()
def loss_caveat(config: LlamaConfig) -> str:
    """Return a one-line warning if the loss in validation is not the cross entropy of the logits
    that generation uses, else "". Both are computed from the output matrix, each in its own way."""
    model, tokens = _small_model(config, 1, torch.device("cpu"))
    expected = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten(), reduction="sum")
    if torch.isclose(model(tokens, targets=tokens), expected, rtol=1e-9):
        return ""
    return (
        "note: the loss is not the cross entropy of the logits that generation uses: a change to "
        "logits belongs in Llama.forward and in _ChunkedCrossEntropy"
    )


@torch.no_grad()
def check_documents(config: LlamaConfig, device: torch.device, dtype: torch.dtype) -> None:
    """Raise UserError if a small model computes other logits with `documents` than with a mask.

    Where there is a kernel for documents, it takes the place of document_mask in training."""
    if config.head_dim not in kernel_widths(device.type, dtype):
        return
    model, _ = _small_model(config, 1, device)
    tokens = torch.arange(1024, device=device).view(1, -1) ** 2 % 5
    positions = torch.cat([torch.arange(n) for n in (700, 1, 323)]).view(1, -1)
    batch = Batch(tokens, tokens, positions, text_bytes=0).to(device)
    model.to(dtype)
    expected = model(tokens, positions=batch.positions)
    error = model(tokens, positions=batch.positions, documents=batch.documents) - expected
    if not error.norm() <= 0.03 * expected.norm():  # roundings to 8 bits, added up; NaN fails too
        raise UserError(
            "Documents.attention and document_mask give other logits, since model.py was changed: "
            "change both alike, or remove the entry of DOCUMENT_KERNELS"
        )


@torch.no_grad()
def _small_model(
    config: LlamaConfig, tp: int, device: torch.device, n_layers: int = 1, length: int = 0
) -> tuple[Llama, Tensor]:
    """Return a model that tp divides, and tokens [1, length], by default 4 tp of them."""
    small = dict(dim=32 * tp, n_layers=n_layers, n_heads=2 * tp, n_kv_heads=tp, ffn_dim=6 * tp)
    model = Llama(replace(config, **small, vocab_size=5 * tp)).double().to(device).eval()
    for name, parameter in model.named_parameters():
        parameter.copy_(fixed_weight(name, parameter))
    return model, torch.arange(length or 4 * tp, device=device)[None] ** 2 % (5 * tp)


@torch.no_grad()
def check_equal_replicas(model: nn.Module, world: World) -> None:
    """Raise UserError where ranks that should have the same weights have different ones, as with
    other files on a second node or weights drawn differently. Compares norms, and sums of codes."""
    local = [to_local(p) for p in model.parameters()]
    norm = torch.nn.utils.get_total_norm([p for p in local if p.is_floating_point()])
    codes = sum(p.sum() for p in local if not p.is_floating_point())  # of matrices in 4 bits
    parallel = world.parallel
    of_replica = parallel.shard * parallel.tp
    norms = world.all_gather_scalars([norm, codes])
    norms = norms.view(parallel.pp, parallel.replicate, of_replica, 2)
    different = ((norms - norms[:, :1]).abs() > 1e-6 * norms[:, :1]).nonzero().tolist()
    if different:
        stage, replica, place, _ = different[0]
        first = stage * parallel.replicate * of_replica + place
        raise UserError(
            f"rank {first + replica * of_replica} begins with other weights than rank {first}: "
            f"give every node the same files, and draw weights from generator_for(name, seed) as "
            f"Llama.init_weights does"
        )


# -------------------------------------------------------------------------------- a published Llama
# A changed activation, norm or mask leaves names and shapes of the weights as they were. So before
# an export a small model with fixed weights is run, and its logits are compared with LOGITS, which
# transformers computed from the same weights (tests/test_export.py computes them again).


# All that a real model has matters in this one: grouped queries, the epsilon, and each range of
# Llama 3.1's RoPE. It has four layers, as some models treat every fourth layer differently.
CONFIG = LlamaConfig(32, 4, 4, 2, 40, 64, norm_eps=0.01, rope_theta=1e6, rope_scaling=8.0)
TOKENS = torch.arange(600)[None] ** 2 % 61  # [1, T]; longer than a short sliding window
LOGITS = (-2.065278, -0.008952, -3.993807, -0.007986)  # of vocabulary entries 0 to 3, after TOKENS
CONTEXT = 32_768  # longer than a sliding window
TOLERANCE = 1e-4  # angles in float32 make differences of some 1e-6, real changes 1e-2 or more


def fixed_weight(name: str, like: Tensor) -> Tensor:
    """Return weights in float64 that depend on nothing but the parameter's name and shape.

    They are large enough for attention and activations to be far from linear."""
    phase = zlib.crc32(name.encode()) % 1000
    waves = (torch.arange(like.numel(), dtype=torch.float64) ** 2 + phase).sin().view(like.shape)
    return 1 + waves / 2 if like.ndim == 1 else waves / 2


@torch.no_grad()
def check_computes_llama() -> None:
    """Raise UserError if model.py no longer computes the logits of a published Llama."""
    model = Llama(CONFIG).double().eval()
    for name, parameter in model.named_parameters():
        parameter.copy_(fixed_weight(name, parameter))
    logits = model(TOKENS)[0, -1, :4]
    same = torch.allclose(logits, torch.tensor(LOGITS).double(), rtol=0, atol=TOLERANCE)
    if not same or not attends_to_everything(model):
        raise UserError(
            "model.py has been changed and no longer computes a published Llama: other programs "
            "would compute other logits from the exported weights"
        )


@torch.enable_grad()
def attends_to_everything(model: Llama) -> bool:
    """Return whether each layer attends to the first of CONTEXT cached tokens: whether logits have
    a gradient there. With a sliding window, which may be longer than TOKENS, they have none."""
    shape = 1, CONTEXT, CONFIG.n_kv_heads, CONFIG.head_dim
    keys, *values = (torch.zeros(shape).double() for _ in range(1 + CONFIG.n_layers))
    cache, position = KVCache(), torch.tensor([[CONTEXT]])
    cache.add_positions(torch.arange(CONTEXT)[None])
    for layer, v in enumerate(values):
        cache.add(layer, keys, v.requires_grad_())
    logits = model(torch.zeros_like(position), positions=position, cache=cache)
    return all(grad[:, 0].any() for grad in torch.autograd.grad(logits.sum(), values))
