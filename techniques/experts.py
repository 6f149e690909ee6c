"""Mixture of experts: a block has X feed-forwards, of which each token uses K (Shazeer et al. 2017,
arXiv:1701.06538; Jiang et al. 2024, arXiv:2401.04088).

A router scores the experts for each token. The K experts with the highest scores compute the token,
and their outputs are summed, weighted by the softmax of these K scores. So a token is multiplied by
3 K D F of the 3 X D F weights of all experts. Rows are sorted by expert (mixture.py), so that those
of an expert are multiplied at once.

Balance. If most tokens choose the same experts, the others learn little, and under expert
parallelism their ranks wait. So each expert has a bias, which counts in the choice but not in the
weights, and falls while the expert gets more than its share (Wang et al. 2024, arXiv:2408.15664).
The loss does not depend on the bias. In place of a gradient, backward gives it the excess of its
expert's tokens, which adds up over microbatches and ranks as gradients do. AdamW's step is nearly
the sign of that, which is the rule of the paper. Only tokens with a gradient are counted, so no
padding. A hook after the optimizer's step would have to sum counts over ranks itself. The usual
auxiliary loss, X sum_x f_x p_x of an expert's share f of the tokens and its mean probability p, is
a product of two means, to which those of two halves of a batch do not add up.

Use when FLOPs limit a training, and memory, links and text do not: for the time of K feed-forwards
there are X of them to hold and to train. Avoid with little text, of which each expert sees K / X.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model import swiglu
from plumbing.host_reads import read_counts


def whole(parameter: Tensor | None) -> Tensor | None:
    """Return a whole parameter, on one process. expert_parallel.py replaces this function by one
    that returns this rank's part."""
    return parameter


class Router(nn.Linear):
    """Choose the experts of each token, and the weights of their outputs. The softmax of the K
    chosen scores equals their part of the softmax over all X, divided by its sum."""

    no_slope = ("bias",)  # parameters whose gradient is not the slope of the loss

    def __init__(self, config):
        super().__init__(config.dim, config.n_experts, bias=config.balance == "bias")
        self.top_k = config.top_k
        self.local_part = whole
        self.keeps_choices = False
        self.chosen: Tensor | None = None  # of the last forward, if it keeps them: experts [N, K]
        self.given: Tensor | None = None  # experts [N, K] to take, whatever the scores

    def sharded_dims(self, dim):
        return {name: None for name, _ in self.named_parameters()}  # --tp replicates both

    def forward(self, x):
        """x [N, D] -> experts [N, K] of each token, weights [N, K], tokens of each expert [X]"""
        weight = self.local_part(self.weight)
        bias = self.local_part(self.bias)
        # In float32 at least: in bfloat16 scores tie, and another kernel would choose others.
        dtype = torch.promote_types(x.dtype, torch.float32)
        with torch.autocast(x.device.type, enabled=False):
            scores = F.linear(x.to(dtype), weight.to(dtype))  # [N, X]
        experts, weights = self.choose(scores, bias)
        if bias is not None:
            weights = ExcessAsGradient.apply(weights, bias, experts)
        return experts, weights, tokens_of_each(experts, scores.shape[1])

    def choose(self, scores, bias):
        """scores [N, X], bias [X] or None -> experts [N, K], weights [N, K]"""
        # The bias is added to probabilities: scores grow without limit, and would outrun it.
        ranking = scores if bias is None else scores.softmax(1) + bias.to(scores.dtype)
        experts = self.best(ranking)
        return experts, scores.gather(1, experts).softmax(1)

    def best(self, ranking):
        """ranking [N, X] -> the K experts of each token that are ranked highest, or those given"""
        if self.given is not None:
            return self.given
        experts = ranking.detach().topk(self.top_k).indices
        if self.keeps_choices:
            self.chosen = experts
        return experts


def tokens_of_each(experts: Tensor, n_experts: int) -> Tensor:
    """Return how many tokens have chosen each expert: [X]. `experts` are those of each token."""
    numbers = torch.arange(n_experts, device=experts.device)
    return (experts.view(-1, 1) == numbers).sum(0)


EXCESS_SCALE = 2.0**-10  # any would do, since AdamW divides by it; old checkpoints have this one


class ExcessAsGradient(torch.autograd.Function):
    """Return the weights [N, K]; in backward give the bias [X] the excess of tokens over the mean,
    X times. A token whose weights have no gradient counts for none."""

    @staticmethod
    def forward(ctx, weights, bias, experts):
        ctx.save_for_backward(experts)
        ctx.n_experts = len(bias)
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx, gradient):
        (experts,) = ctx.saved_tensors
        is_counted = (gradient != 0).any(1, keepdim=True)
        counts = tokens_of_each(torch.where(is_counted, experts, -1), ctx.n_experts)
        excess = ctx.n_experts * counts - counts.sum()
        return gradient, excess.to(gradient.dtype) * EXCESS_SCALE, None


class GroupedLinear(nn.Module):
    """A linear layer for each expert, with weight [X, out, in]. Of x [n, in] the first counts[0]
    rows are those of expert 0, the next counts[1] of expert 1, and so on -> [n, out]."""

    initial_value = "normal"  # see init_weights
    matrices = ("weight",)

    def __init__(self, n_experts: int, in_features: int, out_features: int, used: int):
        super().__init__()
        self.used = used  # a token uses so many of the matrices
        # One kernel multiplies the rows of all experts, if rows have whole parts of 16 bytes.
        self.has_kernel = in_features % 8 == out_features % 8 == 0
        self.local_part = whole
        self.weight = nn.Parameter(torch.empty(n_experts, out_features, in_features))

    def forward(self, x, counts):
        weight = self.local_part(self.weight)
        if x.is_cuda and torch.is_autocast_enabled("cuda"):
            x = x.to(torch.get_autocast_dtype("cuda"))
        if x.is_cuda and x.dtype == torch.bfloat16 and self.has_kernel:
            ends = counts.cumsum(0, dtype=torch.int32)  # which the host need not know
            return F.grouped_mm(x, weight.to(x.dtype).transpose(1, 2), offs=ends)
        return products_of_each(x, weight, counts)


@torch.compiler.disable  # its shapes change with every batch, and each would be compiled anew
def products_of_each(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    # An expert without rows is multiplied, too, so that all of `weight` has a gradient. In
    # backward, weight[i] would write zeros for all experts, for each i; unbind does not.
    (sizes,) = read_counts(counts[None], total=len(x))
    parts = zip(x.split(sizes), weight.unbind())
    return torch.cat([F.linear(part, matrix) for part, matrix in parts])


class Experts(nn.Module):
    writes_to_stream = ("w2",)
    shapes_vary = True  # with the routing, see ParallelConfig.fixes_shapes

    def __init__(self, config):
        super().__init__()
        X, K = config.n_experts, config.top_k
        D, F = config.dim, config.ffn_dim
        self.w1 = GroupedLinear(X, D, F, K)
        self.w2 = GroupedLinear(X, F, D, K)
        self.w3 = GroupedLinear(X, D, F, K)

    def forward(self, rows, counts):
        gate = self.w1(rows, counts)
        up = self.w3(rows, counts)
        return self.w2(swiglu(gate, up), counts)


class Reordered(torch.autograd.Function):
    """Return the rows `order` [N K] of K copies of each row of x [N, D], without making these:
    [N K, D]. `back` is the inverse of the order. By it backward reads the gradients of the copies,
    and adds them in their order; autograd would add rows to zeros, on a GPU by atomic operations.
    """

    @staticmethod
    def forward(ctx, x, order, back, K):
        ctx.save_for_backward(back)
        ctx.K = K
        return x[order // K]

    @staticmethod
    def backward(ctx, gradient):
        (back,) = ctx.saved_tensors
        of_copies = gradient[back].unflatten(0, (-1, ctx.K))
        return of_copies.sum(1), None, None, None


def experts_of(block: nn.Module) -> dict[str, Experts]:
    """Return the experts of a block, if it has any, by their paths in it."""
    return {path: module for path, module in block.named_modules() if isinstance(module, Experts)}
