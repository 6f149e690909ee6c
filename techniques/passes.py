"""RMSNorm, RoPE, SwiGLU and cross entropy in few passes over memory: what model.py writes plainly.

Between matrix products, time goes into reading and writing: an operator on [B, T, D] is a pass over
memory, however little it computes. On a CPU, torch's RMSNorm makes 4 such passes in forward and 11
in backward, and RoPE written with cosines 7 and 8, over half of x each. Here the norm makes 3 and
8, half of them in place, and RoPE one in each direction: a complex product. In bfloat16 each has
two or three more, to compute in float32. torch.compile, the default on a GPU, makes one kernel of
what lies between matrix products of a block, so there only SwiGLU differs, which saves less for
backward. The loss is not compiled: autograd makes some 9 passes over logits, and 3 numbers of each
exist at a time; here it takes 5 passes and 2 numbers.

parallelize() puts these functions in for training, each only where model.py's own is used, and if
a small model computes the same with it as without it: model.py may have been changed.
"""

import sys
from dataclasses import replace
from functools import cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

import model as model_py
from model import Llama, LlamaConfig, Vocabulary
from plumbing.processes import print_rank_zero

NAMES = ("RMSNorm", "RoPE", "SwiGLU", "cross entropy")


def use_fewer_passes(model: Llama) -> None:
    """Let norms, RoPE, SwiGLU and cross entropy of a model compute by the functions below."""
    sizes = dict(dim=16, n_layers=4, n_heads=2, n_kv_heads=1, head_dim=0, ffn_dim=12, vocab_size=11)
    put_in(model, replaceable(type(model), replace(model.config, **sizes)))


@cache
def replaceable(model_class: type[Llama], small: LlamaConfig) -> tuple[str, ...]:
    """Return those of NAMES with which a small model computes the same, and say once which not."""
    if compute_the_same(model_class, small, NAMES):
        return NAMES
    found = tuple(name for name in NAMES if compute_the_same(model_class, small, (name,)))
    for name in (name for name in NAMES if name not in found):
        note = f"note: model.py's own {name} is used: techniques/passes.py computes another one"
        print_rank_zero(note, file=sys.stderr)
    return found


def compute_the_same(model_class: type[Llama], small: LlamaConfig, names: tuple[str, ...]) -> bool:
    """Return whether a small model has the same loss and gradients with the functions below as with
    those of model.py."""
    try:  # with large weights, too: a limit on activations shows only where it is reached
        for scale in (1, 3):
            plain, ours = (trial(model_class, small, scale, given) for given in ((), names))
            # Of the largest, since some are rounding errors, where one key has all the attention.
            allowed = 1e-9 * max(value.norm() for value in plain)
            if not all((a - b).norm() <= allowed for a, b in zip(plain, ours)):
                return False
    except (TypeError, AttributeError, ValueError, RuntimeError):  # it is called in another way
        return False
    return True


def trial(
    model_class: type[Llama], small: LlamaConfig, scale: int, names: tuple[str, ...]
) -> list[Tensor]:
    """Return the loss and the gradients of a small model on the CPU, of which the functions that
    `names` say are replaced."""
    with torch.device("cpu"), torch.random.fork_rng(devices=[]):
        model = model_class(small)
    model.double().eval()  # dropout would be random
    with torch.no_grad():
        for i, parameter in enumerate(model.parameters()):
            values = torch.arange(parameter.numel()).double() ** 2 + i
            parameter.copy_(scale * values.sin().view(parameter.shape))
    put_in(model, names)
    tokens = torch.arange(64)[None] ** 2 % 11
    loss = model(tokens, targets=tokens)
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def put_in(model: nn.Module, names: tuple[str, ...]) -> None:
    """Put the functions below that `names` say wherever a model has model.py's."""
    for module in model.modules():
        # The same objects in all blocks, so that one compiled graph serves them.
        if "RMSNorm" in names and getattr(module, "normalize", None) is model_py.rms_norm:
            module.normalize = norm_in_few_passes
        if "RoPE" in names and getattr(module, "rotate", None) is model_py.rotate:
            module.rotate = rotate_in_one_pass
        if "SwiGLU" in names and getattr(module, "swiglu", None) is model_py.swiglu:
            module.swiglu = swiglu_that_saves_less
        if "cross entropy" in names and isinstance(module, Llama):
            vocabulary = module.vocabulary
            vocabulary.cross_entropy = partial(cross_entropy_in_few_passes, vocabulary)


def torch_fuses(x: Tensor) -> bool:
    """Return whether torch's own operators need no help: on a GPU, and where they are compiled."""
    return x.is_cuda or torch.compiler.is_compiling()


def norm_in_few_passes(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return model.py's rms_norm(x, weight, eps)."""
    if torch_fuses(x):
        with torch.autocast(x.device.type, enabled=False):  # else it returns, and saves, float32
            return F.rms_norm(x, x.shape[-1:], weight.type_as(x), eps)
    return Normalized.apply(x, weight, eps)


class Normalized(torch.autograd.Function):
    """Saves x. With r = 1 / sqrt(mean(x²) + eps) and z = x r, it returns y = z w. With h = dy, dw
    is the sum of h z over all tokens, dz = g = h w, and dx = r (g - z mean(g z))."""

    @staticmethod
    def forward(ctx, x, weight, eps):
        x32 = in_float(x)
        r = torch.linalg.vector_norm(x32, dim=-1, keepdim=True)  # [..., 1]; one pass over x
        r = r.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, r)
        return (x32 * r).mul_(weight).type_as(x)

    @staticmethod
    @once_differentiable  # r has no graph
    def backward(ctx, grad):
        saved, weight, r = ctx.saved_tensors
        x, grad = in_float(saved), in_float(grad)
        product = (grad * x).mul_(r)  # h z: the gradient of the weight, for each token
        weight_grad = None
        if ctx.needs_input_grad[1]:  # the weight is not frozen
            # Over all tokens. [None] adds a dimension: x may be a single one, [D].
            weight_grad = product[None].sum(tuple(range(product.ndim))).type_as(weight)
        mean = product.mul_(weight).mean(-1, keepdim=True)  # of g z
        x_grad = (grad * weight).addcmul_(x, mean * r, value=-1).mul_(r)
        return x_grad.type_as(saved), weight_grad, None


def rotate_in_one_pass(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return model.py's rotate(x, cos, sin)."""
    return model_py.rotate(x, cos, sin) if torch_fuses(x) else Rotation.apply(x, cos, sin)


class Rotation(torch.autograd.Function):
    """RoPE by complex numbers: a pair of features times cos + i sin. Backward rotates back."""

    @staticmethod
    def forward(ctx, x, cos, sin):
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin)

    @staticmethod
    def backward(ctx, grad):
        cos, sin = ctx.saved_tensors
        return _rotated(grad, cos, -sin), None, None


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    pairs = torch.view_as_complex(in_float(x).contiguous().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * torch.complex(cos, sin)).flatten(-2).type_as(x)


def swiglu_that_saves_less(gate: Tensor, up: Tensor) -> Tensor:
    """Return model.py's swiglu(gate, up)."""
    return SwiGLU.apply(gate, up)


class SwiGLU(torch.autograd.Function):
    """silu(gate) * up, saving only gate and up [B, T, F] for backward. Autograd would save
    silu(gate) as well; computing it again in backward takes less time than writing and reading."""

    @staticmethod
    def forward(ctx, gate, up):
        ctx.save_for_backward(gate, up)
        return F.silu(gate) * up  # in place, torch 2.11's compiler would lose the gradient

    @staticmethod
    def backward(ctx, grad):
        gate, up = ctx.saved_tensors
        return torch.ops.aten.silu_backward(grad * up, gate), F.silu(gate).mul_(grad)


def cross_entropy_in_few_passes(vocabulary: Vocabulary, logits: Tensor, targets: Tensor) -> Tensor:
    """Return model.py's Vocabulary.cross_entropy(logits, targets)."""
    return CrossEntropy.apply(logits, targets, vocabulary)


class CrossEntropy(torch.autograd.Function):
    """Saves only the log softmax of this rank's logits, and turns it into their gradient in place:
    softmax over the whole vocabulary, minus 1 at the target."""

    @staticmethod
    def forward(ctx, logits, targets, vocabulary):
        log_p = F.log_softmax(logits, -1)  # [n, V], over this rank's shard of the vocabulary
        index, is_local = vocabulary.local_index(targets, logits)
        target_logit = torch.where(is_local, logits.gather(-1, index), 0)
        local_lse = logits[:, :1] - log_p[:, :1]  # logsumexp over the shard, [n, 1]
        lse, logit = vocabulary.all_gather(torch.cat([local_lse, target_logit], 1)).unbind(-1)
        ctx.is_whole, lse = len(lse) == 1, lse.logsumexp(0)  # from [ranks, n]
        ctx.save_for_backward(log_p, local_lse - lse[:, None], index, is_local)
        return lse - logit.sum(0)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        log_p, log_share, index, is_local = ctx.saved_tensors  # log of the shard's probability
        p = log_p.exp_() if ctx.is_whole else log_p.add_(log_share).exp_()
        grad = grad[:, None]
        return p.mul_(grad).scatter_add_(1, index, -grad * is_local), None, None


def in_float(x: Tensor) -> Tensor:
    """Return x in float32, or in float64 where it is."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
