"""Training in plain PyTorch on one process, and assertions that training on a mesh equals it."""

import functools
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from conftest import succeed
from workers.train_cases import (
    BATCH,
    CLIP,
    SEQ,
    STEPS,
    batch_of,
    build,
    initialize,
    pairs_of,
    scored_answers,
)

from config import ParallelConfig, Work
from generate import generate
from model import IGNORE, Llama, LlamaConfig
from perf.instruments import build_on_meta
from plumbing.processes import UserError
from rewards import Answers
from runs.rules import check_parallel, check_work
from techniques import nf4
from techniques.nf4 import dequantized
from text.pairs import Pairs

# Configurations for tp 1, 2 and 4, with sizes that ranks divide unevenly where tp allows it.
ODD = dict(dim=30, n_layers=2, n_heads=3, n_kv_heads=1, ffn_dim=46, vocab_size=101)
GROUPED = dict(dim=40, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=46, vocab_size=101)
FOUR_HEADS = dict(dim=40, n_layers=2, n_heads=4, n_kv_heads=4, ffn_dim=44, vocab_size=101)


def case(config: dict, microbatch: int = 0, **parallel) -> dict:
    """Return a case as workers/train_cases.py reads it; `parallel` has fields of ParallelConfig."""
    options = {"microbatch": microbatch} if microbatch else {}
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


def plain_update(loss, count: int, named: dict, optimizer, clip=CLIP, more=()) -> tuple:
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(named.values(), clip).item()
    assert norm > clip  # otherwise clipping would not be tested
    gradients = {name: p.grad for name, p in named.items()}
    optimizer.step()
    for p in named.values():
        p.grad = None
    return (loss.item(), count, norm, *more), gradients


def answer_log_p(bare: Llama, weights: dict, answers: list[tuple]) -> list[torch.Tensor]:
    """Return log p of the targets of each answer, which is computed alone."""
    found = []
    for ids, is_target in answers:
        tokens = {"tokens": torch.tensor([ids[:-1]])}
        log_p = torch.func.functional_call(bare, weights, (), tokens)[0].log_softmax(-1)
        found.append(log_p[range(len(ids) - 1), ids[1:]][torch.tensor(is_target[1:])])
    return found


def plain_preferences(bare: Llama, weights: dict, base: dict, pairs: Pairs) -> list[torch.Tensor]:
    """Return means over the pairs, as DPO's formulas have them: the loss, the share of pairs with
    the chosen answer ahead, the margin, and the rewards of chosen and rejected."""
    answers = [pairs.samples[i] for row in pairs.rows for i in row]
    now, before = (answer_log_p(bare, w, answers) for w in (weights, base))
    rewards = torch.stack([0.3 * (a.sum() - b.sum().detach()) for a, b in zip(now, before)])
    chosen, rejected = rewards[::2], rewards[1::2]
    margin = chosen - rejected
    loss = torch.log1p(torch.exp(-margin))
    return [x.mean() for x in (loss, (margin > 0).double(), margin, chosen, rejected)]


def plain_rewards(bare: Llama, weights: dict, answers: Answers) -> list[torch.Tensor]:
    """Return the mean loss over answers, a token at a time, and the largest |log ratio|."""
    log_p = answer_log_p(bare, weights, answers.samples)
    total, gap = 0, 0
    for of_answer, old, advantage in zip(log_p, answers.log_p, answers.advantages):
        for now, before in zip(of_answer, old):
            log_ratio = now - before
            total = total - log_ratio.exp() * advantage
            gap = max(gap, log_ratio.abs().item())
    return [total / len(log_p), torch.tensor(gap, dtype=torch.float64)]


@functools.cache
def plain_training(key: str) -> dict:
    """Train on the whole batch in one process, in plain PyTorch: nothing of parallel.py runs.

    `key` is JSON, so that results can be cached: a case's config, packed, lora, own_loss, seq,
    optimizer and objective. Where it has adapters, a model without any computes with the
    effective_weights."""
    config, packed, lora, own_loss, seq, optimizer_name, objective = json.loads(key)
    model = plain_model(config, lora)
    first = {name: p.detach().clone() for name, p in model.named_parameters()}
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    make = {"adamw": plain_adamw, "muon": plain_muon}[optimizer_name]
    optimizer = make(trainable, 1e-3 if lora else 1e-2)
    batch, rows, first_gradients = batch_of(packed, seq), [], {}
    inputs = {"tokens": batch.tokens, "positions": batch.positions}
    bare = Llama(LlamaConfig(**config | dict(tie_embeddings=False))).double()
    is_target, pairs = batch.targets != IGNORE, pairs_of(seq)
    n_pairs = sum(len(row) // 2 for row in pairs.rows)
    base = {name: w.detach().clone() for name, w in effective_weights(model, None).items()}
    for _ in range(STEPS):
        weights = effective_weights(model, lora)
        if objective == "preferences":
            means, count = plain_preferences(bare, weights, base, pairs), n_pairs
        elif objective == "rewards":
            means, count = plain_rewards(bare, weights, scored_answers()), BATCH
        else:
            logits, valid = torch.func.functional_call(bare, weights, (), inputs), is_target
            means = [mean_loss(logits[valid], batch.targets[valid], own_loss)]
            count = valid.sum().item()
        more = [mean.item() for mean in means[1:]]
        row, gradients = plain_update(means[0], count, trainable, optimizer, more=more)
        rows.append(row)
        first_gradients = first_gradients or gradients
    if objective == "preferences":
        with torch.no_grad():
            weights = effective_weights(model, lora)
            means = plain_preferences(bare, weights, base, pairs)
        rows.append([mean.item() for mean in means])
    last = dict(model.named_parameters())
    return {"rows": rows, "gradients": first_gradients, "first": first, "last": last}


def effective_weights(model: Llama, lora: dict | None) -> dict:
    """Return the weights that a model computes with, by their names in a model without adapters
    (without `lora`, as if it had none):
    NF4 codes dequantized, LoRA as W + scale B A, DoRA's rows scaled to its magnitudes, biases."""
    named = dict(model.named_parameters())
    weights = {name: p for name, p in named.items() if name.endswith(".weight")}
    biases = {name: p for name, p in named.items() if name.endswith(".bias")}
    weights["output.weight"] = model.output.weight  # not listed where it is tied
    for name, weight in weights.items():
        if (row_scale := named.get(name.replace("weight", "row_scale"))) is not None:
            weight = weights[name] = dequantized(weight, row_scale, torch.float64)
        if lora and (A := named.get(name.replace("weight", "lora_A"))) is not None:
            B, r = named[name.replace("weight", "lora_B")], lora["rank"]
            scale = lora.get("alpha", 16) / (r**0.5 if lora.get("rslora") else r)
            weights[name] = weight + scale * B @ A
        magnitude = named.get(name.replace("weight", "lora_magnitude"))
        if lora and magnitude is not None:
            norms = weights[name].detach().norm(dim=1)
            weights[name] = (magnitude / norms)[:, None] * weights[name]
    return weights | biases


def plain_adamw(named: dict[str, torch.Tensor], lr: float):
    """Return torch's AdamW, which decays matrices."""
    groups = [
        {"params": [p for p in named.values() if p.ndim == 2], "weight_decay": 0.1},
        {"params": [p for p in named.values() if p.ndim == 1], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    return torch.optim.AdamW(groups, lr, betas=(0.9, 0.95), fused=False, foreach=False)


def plain_muon(named: dict[str, torch.Tensor], lr: float):
    """Return Muon for the matrices of blocks, with AdamW for all other parameters, written
    independently of techniques/optimizers.py."""
    matrices = {n: p for n, p in named.items() if n.startswith("layers.") and p.ndim == 2}
    adamw = plain_adamw({n: p for n, p in named.items() if n not in matrices}, lr)
    momenta = {name: torch.zeros_like(p) for name, p in matrices.items()}

    @torch.no_grad()
    def step() -> None:
        adamw.step()
        for name, p in matrices.items():
            momenta[name] = 0.95 * momenta[name] + p.grad
            direction = orthogonalized(p.grad + 0.95 * momenta[name])
            p.copy_(p - lr * (0.1 * p + 0.1 * max(p.shape) ** 0.5 * direction))

    return SimpleNamespace(step=step)


def orthogonalized(x: torch.Tensor) -> torch.Tensor:
    """Return what Newton-Schulz iterations make of a matrix, by its singular value decomposition:
    each iteration maps the singular values s to a polynomial of s, and leaves the vectors."""
    u, s, v = torch.linalg.svd(x, full_matrices=False)
    s = s / s.norm()
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return u @ s.diag() @ v


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
    many with full checkpointing, and again with cp, where a rank has two chunks of a sequence."""
    parallel = ParallelConfig(**case["parallel"])
    parts = parallel.replicate * parallel.shard // parallel.cp
    microbatches = BATCH // parts // case.get("microbatch", BATCH // parts)
    times = 2 if parallel.checkpointing == "full" else 1
    return times * (2 if parallel.cp > 1 else 1) * microbatches * layers


def assert_case(result: dict, case: dict, nproc: int, reference: dict | None = None) -> None:
    """Make all comparisons above that apply. A `reference` takes the place of plain PyTorch."""
    optimizer = case["parallel"].get("optimizer", "adamw")
    key = [case["config"], case["packed"], case.get("lora"), case.get("own_loss", False)]
    key += [case.get("seq", SEQ), optimizer, case.get("objective")]
    # Newton-Schulz and the singular value decomposition agree to fewer digits.
    tolerance = 1e-10 if optimizer == "muon" and not reference else 1e-12
    assert_same(result, reference or plain_training(json.dumps(key)), tolerance)
    assert_generation(result, case)
    assert_saved(result, case)
    assert result["attentions"] == attentions(case, result["layers"])
    if case["parallel"].get("compile"):  # all blocks share a graph; with LoRA the first has another
        graphs = 2 if "lora" in case else 1  # since its input needs no gradient
        is_one = result["graphs"]["unique_graphs"] == graphs or "objective" in case
        assert is_one and not result["breaks"]
    else:
        assert_traffic(result, case, nproc)
