"""techniques/experts.py and techniques/expert_parallel.py."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from model import LlamaConfig, swiglu
from techniques.experts import EXCESS_SCALE, MixtureOfExperts

SMALL = LlamaConfig(16, 2, 2, 2, 24, 31, n_experts=8)


def dense(mixture: MixtureOfExperts, x: torch.Tensor) -> torch.Tensor:
    """Return what a mixture computes, by a plain formula: all experts compute all tokens, and those
    that a token does not use get the weight 0. It also sets the gradient of the bias."""
    router, experts = mixture.router, mixture.experts
    scores = F.linear(x, router.weight)
    ranking = scores if router.bias is None else scores.softmax(-1) + router.bias
    used = torch.zeros_like(scores, dtype=torch.bool)
    used.scatter_(-1, ranking.topk(router.top_k).indices, True)
    weights = scores.masked_fill(~used, -torch.inf).softmax(-1)
    w1, w2, w3 = (layer.weight.unbind() for layer in (experts.w1, experts.w2, experts.w3))
    return used, sum(
        weights[..., i, None] * F.linear(F.silu(F.linear(x, a)) * F.linear(x, c), b)
        for i, (a, b, c) in enumerate(zip(w1, w2, w3))
    )


@pytest.mark.parametrize("X, K, balance", [(4, 2, "bias"), (8, 3, "none"), (6, 6, "bias")])
def test_a_mixture_is_the_dense_formula(X, K, balance):
    """Also where an expert has no tokens. The excess of two parts of a batch adds up."""
    torch.manual_seed(0)
    config = replace(SMALL, n_experts=X, top_k=K, balance=balance)
    mixture = MixtureOfExperts(config, swiglu).double()
    for parameter in mixture.parameters():
        torch.nn.init.normal_(parameter, 0, 0.3)
    if balance == "bias" and K < X:
        mixture.router.bias.data[1] = -9
    x = torch.randn(4, 7, 16, dtype=torch.float64, requires_grad=True)
    used, expected = dense(mixture, x)
    ours = torch.cat([mixture(x[:1]), mixture(x[1:])])
    assert torch.dist(ours, expected) < 1e-14 * expected.norm()
    assert (used.sum((0, 1)) == 0).sum() == (balance == "bias" and K < X)
    named = dict(mixture.named_parameters())
    bias = named.pop("router.bias", None)
    upstream, leaves = torch.randn_like(expected), [x, *named.values()]
    wanted = torch.autograd.grad(expected, leaves, upstream)
    for a, b in zip(torch.autograd.grad(ours, leaves, upstream, retain_graph=True), wanted):
        assert torch.dist(a, b) < 1e-14 * b.norm()
    if bias is not None:
        ours.backward(upstream)
        counts = used.sum((0, 1))
        assert torch.equal(bias.grad, (X * counts - counts.sum()).double() * EXCESS_SCALE)
