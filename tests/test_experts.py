"""techniques/experts.py and techniques/expert_parallel.py. Splits are in test_exact.py, models of
transformers in test_model.py, files in test_formats.py."""

import argparse
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from conftest import metrics, succeed
from test_train import flags, same_metrics
from torch.utils._python_dispatch import TorchDispatchMode

from checkpoint import find_checkpoint, load_pretrained, read_config
from costs.shapes import flops_per_token
from lora import LoRA, add_adapters
from model import Llama, LlamaConfig, swiglu
from perf.instruments import build_on_meta
from plumbing.processes import UserError
from techniques.experts import EXCESS_SCALE, MixtureOfExperts
from techniques.recompute import recompute_and_compile
from text.tokenizer import load_tokenizer

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


class CountTopK(TorchDispatchMode):
    times = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.times += operator == torch.ops.aten.topk.default
        return operator(*args, **kwargs or {})


@pytest.mark.parametrize("kind", ["none", "products", "selective"])
def test_a_recomputation_does_not_choose_again(kind):
    """Compiled, it might round scores otherwise, and take other experts."""
    model = Llama(SMALL)
    recompute_and_compile(model, kind, compile=False)
    tokens = torch.zeros(2, 5, dtype=torch.int64)
    with CountTopK() as counted:
        model(tokens, tokens).backward()
    assert counted.times == SMALL.n_layers


def test_a_run_on_four_ranks_is_resumed_on_two_and_on_one(corpus, tmp_path):
    """With experts on other ranks, or on all. The four ranks train as one does, in float64."""
    given = dict(n_experts=8, dp="fsdp", save_every=2, eval_every=2)
    run = ["train.py", *flags(corpus, first := tmp_path / "first", steps=4, **given)]
    succeed(*run, "--ep", 4, nproc=4)
    for ep in (2, 1):
        shutil.copytree(first, out := tmp_path / f"ep {ep}")
        shutil.rmtree(out / "step-00000004")
        run = ["train.py", *flags(corpus, out, steps=4, **given), "--ep", ep, "--resume"]
        assert "resumed from" in succeed(*run, nproc=ep * (ep > 1)).out
        same_metrics(metrics(out), metrics(first))


def test_a_token_costs_its_experts_alone():
    K, X = SMALL.top_k, SMALL.n_experts
    plain = replace(SMALL, n_experts=0, ffn_dim=K * SMALL.ffn_dim)
    router = 6 * SMALL.n_layers * SMALL.dim * X
    costs = [flops_per_token(build_on_meta(config), 64) for config in (SMALL, plain)]
    assert costs[0] == costs[1] + router


def test_adapters_stand_beside_attention_alone():
    lora = LoRA(targets=["wq", "w1"])
    with pytest.raises(UserError, match=r"no nn\.Linear, so leave w1 out of --targets"):
        add_adapters(Llama(SMALL), lora)
    add_adapters(Llama(SMALL), replace(lora, targets=["wq", "wo"]))
    wide = replace(SMALL, dim=64, head_dim=0)
    with pytest.raises(UserError, match="give --base-bits 16"):
        add_adapters(Llama(wide), replace(lora, targets=["wq"]), base_bits=4)


@torch.no_grad()
def busiest(out: Path, tokens: torch.Tensor) -> list[float]:
    """Return, for each block of a run's model, the tokens of its busiest expert over the mean."""
    model, counts = load_pretrained(find_checkpoint(out), torch.float32), []
    for block in model.layers.values():
        router = block.feed_forward.router
        router.register_forward_hook(lambda _, inputs, chosen: counts.append(chosen[2].double()))
    model(tokens)
    return [(of_block.max() / of_block.mean()).item() for of_block in counts]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_bias_balances_experts(seed, tmp_path):
    """After 240 steps on Python's standard library, on a part of it."""
    given = "--model tiny-experts --steps 240 --batch 4 --optimizer adamw --eval-every 0".split()
    found = {}
    for balance in ("bias", "none"):
        out = tmp_path / balance
        succeed("train.py", *given, "--seed", seed, "--balance", balance, "--out", out, timeout=900)
        tokenizer = load_tokenizer(read_config(find_checkpoint(out))["tokenizer"])
        ids = tokenizer.encode(Path(argparse.__file__).read_text())[: 32 * 256]
        found[balance] = busiest(out, torch.tensor(ids).view(-1, 256))
    print({name: [f"{ratio:.2f}" for ratio in ratios] for name, ratios in found.items()})
    assert max(found["bias"]) <= 1.6 and max(found["none"]) > 2
