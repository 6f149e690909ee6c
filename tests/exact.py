"""Training in plain PyTorch on one process, and assertions that training on a mesh equals it."""

import functools
import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from conftest import HAS_2_13, succeed
from workers.train_cases import (
    BATCH,
    BETA,
    CLIP,
    SEQ,
    batch_of,
    build,
    initialize,
    packed_pairs,
    scored_answers,
    steps_of,
)

from config import ParallelConfig, Work
from generate import generate
from model import IGNORE, Llama, LlamaConfig
from perf.instruments import build_on_meta
from plumbing.messages import UserError
from runs.rules import check_parallel, check_work
from techniques import nf4
from techniques.experts import MixtureOfExperts
from techniques.nf4 import dequantized

# Configurations for tp 1, 2 and 4, with sizes that ranks divide unevenly where tp allows it.
ODD = dict(dim=30, n_layers=2, n_heads=3, n_kv_heads=1, ffn_dim=46, vocab_size=101)
GROUPED = dict(dim=40, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=46, vocab_size=101)
FOUR_HEADS = dict(dim=40, n_layers=2, n_heads=4, n_kv_heads=4, ffn_dim=44, vocab_size=101)


def case(config: dict, microbatch: int = 0, **parallel) -> dict:
    """Return a case as workers/train_cases.py reads it; `parallel` has fields of ParallelConfig."""
    options = {"microbatch": microbatch} if microbatch else {}
    options |= {} if HAS_2_13 or parallel.get("tp", 1) == 1 else {"seq": 16}
    return dict(config=config, packed=False, parallel=parallel, **options)


def train(directory: Path, nproc: int, cases: dict, timeout: float = 300, within=()) -> dict:
    """Train all cases in one launch of `nproc` processes (0: without torchrun).

    Return results by name. `within` is what changed_copy returns, to run scripts of a copy."""
    given, results = directory / "cases.json", directory / "results.pt"
    given.write_text(json.dumps(list(cases.values())))
    script = (*within, "tests/workers/train_cases.py")
    succeed(*script, given, results, nproc=nproc, timeout=timeout)
    return dict(zip(cases, torch.load(results, weights_only=False), strict=True))


# ---------------------------------------------------------------------- cases that are drawn


def parallel_config(ranks: int, has_adapters: bool, dp: str, tp: int, cp: int, pp: int, **options):
    """Return a ParallelConfig for this number of ranks. Raises UserError for options that have no
    effect together, or that the project refuses."""
    data, rest = divmod(ranks, tp * pp)
    if rest or data % cp:
        raise UserError("these dimensions do not divide the ranks")
    if pp == 1 and options["schedule"] != "1f1b":
        raise UserError("without a pipeline, a schedule has no effect")
    if options["reshard"] == "adapters" and not has_adapters:
        raise UserError("without adapters, nothing is frozen")
    replicate = {"hsdp": 1 if data % 2 else 2, "fsdp": 1}.get(dp, data)
    options |= dict(replicate=replicate, shard=data // replicate)
    options |= dict(stages_per_rank=2 if options["schedule"] == "interleaved" else 1)
    return ParallelConfig(dp=dp, tp=tp, cp=cp, pp=pp, **options)


@functools.cache
def meta_model(config: LlamaConfig, trainable: bool) -> Llama:
    """Return a model on meta; below adapters it is frozen."""
    return build_on_meta(config).requires_grad_(trainable)


def check_step(work: Work, base_bits: int) -> None:
    """Raise UserError for a step that train.py or finetune_lora.py refuses."""
    check_parallel(work, None, SimpleNamespace(size=work.parallel.size))
    check_work(work, *[nf4.TECHNIQUE] * (base_bits == 4))


# ------------------------------------------------------------------------------- the reference


def plain_model(config: dict, lora: dict | None = None) -> Llama:
    """Return a model on one process, in float64, with the weights of train_cases.initialize."""
    model = build(config, lora).double().to_empty(device="cpu")
    model.tie_weights()
    initialize(model)
    return model


def mean_loss(logits: torch.Tensor, targets: torch.Tensor, own_loss: bool) -> torch.Tensor:
    """Return the mean loss of targets [n] by PyTorch: the plain one, or train_cases.own_loss."""
    if not own_loss:
        return F.cross_entropy(logits, targets)
    logits = 3 * torch.tanh(logits / 3)
    smoothed = F.cross_entropy(logits, targets, reduction="none", label_smoothing=0.1)
    p = logits.softmax(-1).gather(1, targets[:, None])[:, 0]
    return ((1 - p) ** 2 * smoothed + 1e-2 * logits.logsumexp(-1) ** 2).mean()


def plain_step(logits, targets, named: dict, optimizer, clip=CLIP, own_loss=False) -> tuple:
    """Update the parameters `named`. Return the mean loss, the number of targets and the norm of
    the gradients, as a tuple; and the gradients once clipped."""
    valid = targets != IGNORE
    loss = mean_loss(logits[valid], targets[valid], own_loss)
    return plain_update(loss, valid.sum().item(), named, optimizer, clip)


def plain_update(loss, count: int, named: dict, optimizer, clip=CLIP) -> tuple:
    """Do what plain_step does, given the mean loss and of how many it is the mean."""
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(named.values(), clip).item()
    assert norm > clip  # otherwise clipping would not be tested
    gradients = {name: p.grad for name, p in named.items()}
    optimizer.step()
    for p in named.values():
        p.grad = None
    return (loss.item(), count, norm), gradients


def plain_preferences(loss: str, bare: Llama, weights: dict, base: dict, rows) -> tuple:
    """Return the mean loss of the pairs in some rows of packed_pairs, their number, and measures.
    An answer is computed in a row of its own, without padding."""
    pairs = packed_pairs()
    samples = [pairs.samples[i] for row in rows for i in pairs.rows[row]]

    def log_p(weights: dict, ids: list[int], is_target: list[bool]) -> torch.Tensor:
        given = {"tokens": torch.tensor([ids[:-1]])}
        logits = torch.func.functional_call(bare, weights, (), given)[0]
        return sum(logits[i - 1].log_softmax(0)[ids[i]] for i, on in enumerate(is_target) if on)

    ours, theirs = (torch.stack([log_p(w, *s) for s in samples]) for w in (weights, base))
    chosen, rejected = (BETA * (ours - theirs)).view(-1, 2).T
    margin = chosen - rejected
    losses = {
        "sigmoid": (1 + (-margin).exp()).log(),
        "ipo": (margin / BETA - 0.5 / BETA) ** 2,
    }
    measures = (margin > 0).double(), margin, chosen, rejected
    return losses[loss].mean(), len(margin), tuple(each.mean().item() for each in measures)


def plain_rewards(bare: Llama, weights: dict) -> tuple:
    """Return the mean loss of scored_answers, a token at a time, their number, and the largest
    difference between the sampler's log p and ours."""
    total, gap = 0, 0
    for prompt, answer, old, advantage in zip(*scored_answers()):
        given = {"tokens": torch.tensor([prompt + answer[:-1]])}
        log_p = torch.func.functional_call(bare, weights, (), given)[0].log_softmax(-1)
        for now, token, before in zip(log_p[len(prompt) - 1 :], answer, old):
            log_ratio = now[token] - before
            total, gap = total - log_ratio.exp() * advantage, max(gap, abs(log_ratio.item()))
    return total / BATCH, BATCH, (gap,)


@functools.cache
def plain_training(key: str) -> dict:
    """Train on the whole batch in one process, in plain PyTorch: nothing of parallel.py runs.

    `key` is JSON, so that results can be cached: a case's config, packed, lora, own_loss, seq,
    optimizer, objective and steps. Where it has adapters, a model without any computes with the
    effective_weights."""
    config, packed, lora, own_loss, seq, optimizer_name, objective, steps = json.loads(key)
    model = plain_model(config, lora)
    first = {name: p.detach().clone() for name, p in model.named_parameters()}
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    make = {"adamw": plain_adamw, "muon": plain_muon}[optimizer_name]
    optimizer = make(trainable, 1e-3 if lora else 1e-2)
    batch, rows, first_gradients = batch_of(packed, seq), [], {}
    inputs = {"tokens": batch.tokens, "positions": batch.positions}
    bare = Llama(LlamaConfig(**config | dict(tie_embeddings=False))).double()
    excess = with_dense_experts(bare)
    base = effective_weights(model, lora, with_adapters=False)
    base = {name: weight.detach().clone() for name, weight in base.items()}
    for step in range(steps):
        weights = effective_weights(model, lora)
        if objective == "rewards":
            loss, count, measures = plain_rewards(bare, weights)
            row, gradients = plain_update(loss, count, trainable, optimizer)
            row += measures
        elif objective:
            pairs = partial(plain_preferences, objective, bare, weights, base)
            if step == 0:  # evaluation comes before
                loss, _, measures = pairs(range(BATCH + 1))
                rows.append((loss.item(), *measures))
            loss, count, measures = pairs(range(BATCH))
            row, gradients = plain_update(loss, count, trainable, optimizer)
            row += measures
        else:
            logits = torch.func.functional_call(bare, weights, (), inputs)
            for name in excess.keys() & trainable.keys():
                trainable[name].grad = excess[name] / (batch.targets != IGNORE).sum()
            row, gradients = plain_step(logits, batch.targets, trainable, optimizer, CLIP, own_loss)
        rows.append(row)
        first_gradients = first_gradients or gradients
    last = dict(model.named_parameters())
    return {"rows": rows, "gradients": first_gradients, "first": first, "last": last}


def with_dense_experts(model: Llama) -> dict[str, torch.Tensor]:
    """Let mixtures of experts compute a plain formula: all experts compute all tokens, and those
    that a token does not use get the weight 0. Return what stands for gradients of the routers'
    biases, by name; forward writes it there."""
    excess = {}

    def dense(name: str, mixture: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        router, experts = mixture.router, mixture.experts
        scores = F.linear(x, router.weight)
        ranking = scores if router.bias is None else scores.softmax(-1) + router.bias
        used = torch.zeros_like(scores, dtype=torch.bool)
        used.scatter_(-1, ranking.topk(router.top_k).indices, True)
        counts = used.sum((0, 1))
        excess[f"{name}.router.bias"] = (len(counts) * counts - counts.sum()).double() / 1024
        weights = scores.masked_fill(~used, -torch.inf).softmax(-1)
        w1, w2, w3 = (layer.weight.unbind() for layer in (experts.w1, experts.w2, experts.w3))
        return sum(
            weights[..., i, None] * F.linear(F.silu(F.linear(x, a)) * F.linear(x, c), b)
            for i, (a, b, c) in enumerate(zip(w1, w2, w3))
        )

    for name, module in model.named_modules():
        if isinstance(module, MixtureOfExperts):
            module.forward = functools.partial(dense, name, module)
    return excess


def effective_weights(model: Llama, lora: dict | None, with_adapters: bool = True) -> dict:
    """Return the weights that a model computes with, by their names in a model without adapters:
    NF4 codes dequantized, LoRA as W + scale B A, DoRA's rows scaled to its magnitudes, biases."""
    named = dict(model.named_parameters())
    if not with_adapters:
        named = {name: p for name, p in named.items() if ".lora_" not in name}
    weights = {name: p for name, p in named.items() if name.endswith(".weight")}
    biases = {name: p for name, p in named.items() if name.endswith(".bias")}
    weights["output.weight"] = model.output.weight  # not listed where it is tied
    for name, weight in weights.items():
        if (row_scale := named.get(name.replace("weight", "row_scale"))) is not None:
            weight = weights[name] = dequantized(weight, row_scale, torch.float64)
        if (A := named.get(name.replace("weight", "lora_A"))) is not None:
            B, r = named[name.replace("weight", "lora_B")], lora["rank"]
            scale = lora.get("alpha", 16) / (r**0.5 if lora.get("rslora") else r)
            weights[name] = weight + scale * B @ A
        if (magnitude := named.get(name.replace("weight", "lora_magnitude"))) is not None:
            norms = weights[name].detach().norm(dim=1)
            weights[name] = (magnitude / norms)[:, None] * weights[name]
    return weights | biases


def plain_adamw(named: dict[str, torch.Tensor], lr: float):
    """Return torch's AdamW, which decays matrices."""
    groups = [
        {"params": [p for p in named.values() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in named.values() if p.ndim == 1], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    return torch.optim.AdamW(groups, lr, betas=(0.9, 0.95), fused=False, foreach=False)


def plain_muon(named: dict[str, torch.Tensor], lr: float):
    """Return Muon for the matrices of blocks, with AdamW for all other parameters, written
    independently of techniques/optimizers.py."""
    matrices = {n: p for n, p in named.items() if n.startswith("layers.") and p.ndim > 1}
    adamw = plain_adamw({n: p for n, p in named.items() if n not in matrices}, lr)
    momenta = {name: torch.zeros_like(p) for name, p in matrices.items()}

    @torch.no_grad()
    def step() -> None:
        adamw.step()
        for name, p in matrices.items():
            momenta[name] = 0.95 * momenta[name] + p.grad
            direction = orthogonalized(p.grad + 0.95 * momenta[name])
            p.copy_(p - lr * (0.1 * p + 0.1 * max(p.shape[-2:]) ** 0.5 * direction))

    return SimpleNamespace(step=step)


def orthogonalized(x: torch.Tensor) -> torch.Tensor:
    """Return what Newton-Schulz iterations make of a matrix, by its singular value decomposition:
    each iteration maps the singular values s to a polynomial of s, and leaves the vectors."""
    u, s, v = torch.linalg.svd(x, full_matrices=False)
    s = s / s.norm(dim=-1, keepdim=True).clamp(min=1e-30)  # an expert may have had no token
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return u @ torch.diag_embed(s) @ v


# ------------------------------------------------------------------------------- the comparison


def assert_same(result: dict, expected: dict, tolerance: float = 1e-12) -> None:
    for ours, theirs in zip(result["rows"], expected["rows"], strict=True):
        assert ours == pytest.approx(theirs, rel=tolerance)
    for what in ("gradients", "last"):
        assert result[what].keys() == expected[what].keys()
        for name, value in expected[what].items():
            value = value.double()  # NF4 codes are integers
            error = (result[what][name] - value).norm() / value.norm()
            assert error < tolerance, (what, name, error)
    for name, value in expected["first"].items():
        rtol = 1e-14 if name.endswith("lora_magnitude") else 0  # ranks sum squares in another order
        assert torch.allclose(result["first"][name], value, rtol=rtol, atol=0), name


def assert_generation(result: dict, case: dict) -> None:
    """Assert that a split model generates the tokens of a plain one with the same weights, and that
    FSDP gathers each block once for all of them."""
    if "generate" not in case:
        return
    model = Llama(LlamaConfig(**case["config"])).double().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(result["last"][name])
    assert result["tokens"] == generate(model, [[1, 2, 3]], 4, temperature=0)
    parallel = ParallelConfig(**case["parallel"])
    gathers = parallel.shard > 1 and parallel.reshard != "none"
    assert result["sampling_gathers"] == gathers * result["layers"]


def assert_saved(result: dict, case: dict) -> None:
    """Assert that saving gathers the adapters and no more; there may be none."""
    size = 0
    for name, factor in result["adapters"].items():
        assert torch.equal(factor, result["last"][name])
        size += factor.nbytes
    parallel = ParallelConfig(**case["parallel"])
    in_parts = parallel.shard > 1 or parallel.tp > 1  # by both, a factor is gathered twice
    assert result["saving_bytes"] <= in_parts * 2.2 * size


def assert_traffic(result: dict, case: dict, nproc: int) -> None:
    """Assert that calls and payload of each collective are the predicted ones, but for the number
    of DDP's buckets, and for how FSDP pads rows of which tp has made parts. With adapters
    predictions are further off: tests/test_page.py has them. A loss of one's own may send more."""
    if case.keys() & {"lora", "own_loss", "objective"}:
        return
    parallel = ParallelConfig(**case["parallel"])
    sizes = {dim: getattr(parallel, dim) for dim in ("pp", "replicate", "shard", "tp")}
    expected = dict(result["predicted"])
    if nproc > 1:  # a step also gathers 5 scalars of a rank, in a group named by its dimension
        dim = next((dim for dim, size in sizes.items() if size == nproc), "world")
        calls, nbytes = expected.get((dim, "all-gather"), (0, 0))
        expected[dim, "all-gather"] = calls + 1, nbytes + nproc * 40
    assert result["sent"].keys() == expected.keys()
    within = 0.05 if parallel.tp > 1 and parallel.shard > 1 else 1e-12
    for key, (calls, nbytes) in result["sent"].items():
        assert nbytes == pytest.approx(expected[key][1], rel=within), key
        assert calls == expected[key][0] or parallel.strategy.wrapper == "ddp", key


def attentions(case: dict, layers: float) -> float:
    """Return the attention forwards of a step in so many layers: one for each microbatch, twice as
    many with full checkpointing of uncompiled blocks, and again with cp, where a rank has two
    chunks of a sequence."""
    parallel = ParallelConfig(**case["parallel"])
    parts = parallel.replicate * parallel.shard // parallel.cp
    microbatches = BATCH // parts // case.get("microbatch", BATCH // parts)
    times = 2 if parallel.repeats_attention else 1
    return times * (2 if parallel.cp > 1 else 1) * microbatches * layers


def assert_trained(result: dict, case: dict, reference: dict | None = None) -> None:
    """Assert that a case has trained as plain PyTorch does, or as a `reference`."""
    optimizer = case["parallel"].get("optimizer", "adamw")
    key = [case["config"], case["packed"], case.get("lora"), case.get("own_loss", False)]
    key += [case.get("seq", SEQ), optimizer, case.get("objective"), steps_of(case)]
    # Newton-Schulz and the singular value decomposition agree to fewer digits.
    tolerance = 1e-10 if optimizer == "muon" and not reference else 1e-12
    assert_same(result, reference or plain_training(json.dumps(key)), tolerance)


def assert_case(result: dict, case: dict, nproc: int, reference: dict | None = None) -> None:
    """Make all comparisons above that apply. A `reference` takes the place of plain PyTorch."""
    assert_trained(result, case, reference)
    assert_generation(result, case)
    assert_saved(result, case)
    compiled = case["parallel"].get("compile")
    if compiled and case["config"].get("n_experts"):  # which run between two graphs, and selective
        return  # checkpointing around them in none
    assert result["attentions"] == attentions(case, result["layers"])
    if compiled:  # all blocks share a graph; with LoRA the first has another
        graphs = 2 if "lora" in case else 1  # since its input needs no gradient
        assert not result["breaks"]
        assert result["graphs"]["unique_graphs"] == graphs or "objective" in case
    else:
        assert_traffic(result, case, nproc)
