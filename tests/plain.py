"""Training in plain PyTorch on one process, in float64: what exact.py compares every split with.

Nothing of parallel.py runs here. Adapters, experts, preferences, rewards and Muon are written out
as formulas; AdamW is torch's."""

import functools
import json
import math
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from workers.train_cases import (
    BATCH,
    BETA,
    CLIP,
    DISTILLED,
    KL,
    TOP_K,
    batch_of,
    before_updates,
    build,
    config_of,
    initialize,
    initialize_teacher,
    packed_pairs,
    scored_answers,
    teacher_config,
)

from model import IGNORE, Llama
from techniques.mixture import MixtureOfExperts
from techniques.nf4 import dequantized

# ----------------------------------------------------------------------------------- one step


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
    of_targets = logits.softmax(-1).gather(1, targets[:, None])
    p = of_targets[:, 0]
    focal = (1 - p) ** 2 * smoothed
    z_loss = 1e-2 * logits.logsumexp(-1) ** 2
    return (focal + z_loss).mean()


def plain_step(
    logits, targets, named: dict, optimizer, clip=CLIP, own_loss=False, excess=()
) -> tuple:
    """Update the parameters `named`. Return the mean loss, the number of targets and the norm of
    the gradients, as a tuple; and the gradients once clipped."""
    valid = targets != IGNORE
    loss = mean_loss(logits[valid], targets[valid], own_loss)
    return plain_update(loss, valid.sum().item(), named, optimizer, clip, excess)


def plain_update(loss, count: int, named: dict, optimizer, clip=CLIP, excess=()) -> tuple:
    """Do what plain_step does, given the mean loss and of how many it is the mean. `excess` is what
    with_dense_experts returns."""
    loss.backward()
    slopes = [p for name, p in named.items() if name not in excess]
    norm = torch.nn.utils.clip_grad_norm_(slopes, clip)
    for name in excess:
        named[name].grad = excess[name] / count
    assert norm > clip  # otherwise clipping would not be tested
    gradients = {name: p.grad for name, p in named.items()}
    optimizer.step()
    for p in named.values():
        p.grad = None
    row = loss.item(), count, norm.item()
    return row, gradients


# ----------------------------------------------------------------------------- other objectives


def distributions(bare: Llama, weights: dict, ids: list[int]) -> torch.Tensor:
    """Return log p of the whole vocabulary at each token but the last, in a row of its own."""
    given = {"tokens": torch.tensor(ids)[None, :-1]}
    return torch.func.functional_call(bare, weights, (), given)[0].log_softmax(-1)


def log_probabilities(bare: Llama, weights: dict, ids: list[int]) -> torch.Tensor:
    """Return log p of each token but the first, in a row of its own and without padding."""
    following = torch.tensor(ids)[1:, None]
    return distributions(bare, weights, ids).gather(1, following)[:, 0]


def plain_preferences(loss: str, bare: Llama, weights: dict, base: dict, rows) -> tuple:
    """Return the mean loss of the pairs in rows of packed_pairs, their number, and measures."""
    pairs = packed_pairs()
    ours = []
    theirs = []
    for row in rows:
        for i in pairs.rows[row]:
            ids, is_target = pairs.samples[i]
            answer = torch.tensor(is_target[1:])
            ours.append(log_probabilities(bare, weights, ids)[answer].sum())
            theirs.append(log_probabilities(bare, base, ids)[answer].sum())
    rewards = BETA * (torch.stack(ours) - torch.stack(theirs))
    chosen, rejected = rewards.view(-1, 2).T
    margin = chosen - rejected
    if loss == "sigmoid":
        losses = (1 + (-margin).exp()).log()
    else:
        losses = (margin / BETA - 0.5 / BETA) ** 2
    accuracy = (margin > 0).double()
    measures = [each.mean().item() for each in (accuracy, margin, chosen, rejected)]
    return losses.mean(), len(margin), tuple(measures)


def plain_rewards(bare: Llama, weights: dict) -> tuple:
    """Return the mean loss of scored_answers, a token at a time, their number, and measures:
    the share of tokens that are clipped; the means of -log p, of the difference between the
    sampler's log p and ours, and of the distance to the base; and the largest difference."""
    total = 0
    gaps = []
    clipped = []
    entropy = []
    distances = []
    for prompt, answer, of_sampler, advantage in zip(*scored_answers()):
        log_p = log_probabilities(bare, weights, prompt + answer)
        others = before_updates(of_sampler)
        of_answer = log_p[len(prompt) - 1 :]
        for now, sampled, old, base in zip(of_answer, of_sampler, *others.values()):
            weight = min(math.exp(old - sampled), 2.0)
            ratio = (now - old).exp()
            is_clipped = bool(ratio > 1.28 if advantage > 0 else ratio < 0.8)
            bound = 1.28 if advantage > 0 else 0.8
            gain = (bound if is_clipped else ratio) * advantage
            distance = (base - now).exp() - (base - now) - 1
            total = total - weight * (gain - KL * ratio * distance)
            gaps.append(abs(now - sampled).item())
            clipped.append(is_clipped)
            entropy.append(-now.item())
            distances.append(distance.item())
    means = [sum(values) / len(values) for values in (clipped, entropy, gaps, distances)]
    return total / BATCH, BATCH, (*means, max(gaps))


def plain_teacher(case: dict) -> Llama:
    """Return the teacher of a case on one process."""
    model = config_of(teacher_config(case)).build().double()
    initialize_teacher(model)
    with_dense_experts(model)
    return model.requires_grad_(False)


def divergence(objective: str, ours: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    """Return the loss of a target, given log p of the vocabulary by the student and the teacher."""
    if objective == "top_k":  # all but the likeliest are one token
        order = theirs.argsort(descending=True)
        ours, theirs = (
            torch.cat([each[order[:TOP_K]], each[order[TOP_K:]].exp().sum().log()[None]])
            for each in (ours, theirs)
        )
    if objective == "reverse":
        ours, theirs = theirs, ours
    return (theirs.exp() * (theirs - ours)).sum()


def plain_distillation(objective: str, bare: Llama, weights: dict, teacher: Llama, rows) -> tuple:
    """Return the mean loss of the targets in rows of packed_pairs, their number, and how often the
    likeliest token is the teacher's."""
    pairs = packed_pairs()
    losses = []
    agreed = []
    for row in rows:
        for i in pairs.rows[row]:
            ids, is_target = pairs.samples[i]
            ours = distributions(bare, weights, ids)
            theirs = distributions(teacher, {}, ids)
            for student, target, counts in zip(ours, theirs, is_target[1:]):
                if counts:
                    losses.append(divergence(objective, student, target))
                    agreed.append(float(student.argmax() == target.argmax()))
    return torch.stack(losses).mean(), len(losses), (sum(agreed) / len(agreed),)


# ------------------------------------------------------------------------------------- training


@functools.cache
def plain_training(key: str) -> dict:
    """Train on the whole batch in one process, in plain PyTorch: nothing of parallel.py runs.

    `key` is JSON, so that results can be cached: a case's config, packed, lora, own_loss, seq,
    optimizer, objective, parallel and steps. Where it has adapters, a model without any computes
    with the effective_weights."""
    case = json.loads(key)
    lora = case["lora"]
    objective = case["objective"]
    model = plain_model(case["config"], lora)
    first = {}
    trainable = {}
    for name, parameter in model.named_parameters():
        first[name] = parameter.detach().clone()
        if parameter.requires_grad:
            trainable[name] = parameter
    make_optimizer = plain_muon if case["optimizer"] == "muon" else plain_adamw
    optimizer = make_optimizer(trainable, 1e-3 if lora else 1e-2)
    batch = batch_of(case["packed"], case["seq"])
    untied = case["config"] | dict(tie_embeddings=False)
    bare = config_of(untied).build().double()
    excess = with_dense_experts(bare)
    base = {}
    for name, weight in effective_weights(model, lora, with_adapters=False).items():
        base[name] = weight.detach().clone()
    rows = []
    if objective in DISTILLED:
        plain_objective = plain_distillation
        compared = plain_teacher(case)
    else:
        plain_objective = plain_preferences
        compared = base
    if objective and objective != "rewards":  # evaluation comes before
        weights = effective_weights(model, lora)
        every_row = range(BATCH + 1)
        loss, _, measures = plain_objective(objective, bare, weights, compared, every_row)
        rows.append((loss.item(), *measures))
    first_gradients = {}
    for _ in range(case["steps"]):
        weights = effective_weights(model, lora)
        excess.clear()
        if not objective:
            inputs = {"tokens": batch.tokens, "positions": batch.positions}
            logits = torch.func.functional_call(bare, weights, (), inputs)
            given = logits, batch.targets, trainable, optimizer, CLIP, case["own_loss"]
            row, gradients = plain_step(*given, excess)
        else:
            if objective == "rewards":
                loss, count, measures = plain_rewards(bare, weights)
            else:
                trained = range(BATCH)
                loss, count, measures = plain_objective(objective, bare, weights, compared, trained)
            row, gradients = plain_update(loss, count, trainable, optimizer, CLIP, excess)
            row += measures
        rows.append(row)
        first_gradients = first_gradients or gradients
    return {
        "rows": rows,
        "gradients": first_gradients,
        "first": first,
        "last": dict(model.named_parameters()),
    }


def with_dense_experts(model: Llama) -> dict[str, torch.Tensor]:
    """Let mixtures of experts compute a plain formula: all experts compute all tokens, and those
    that a token does not use get the weight 0. Return what stands for gradients of the routers'
    biases, by name; backward adds it there. It counts tokens whose weights have a gradient."""
    excess = {}

    def dense(name: str, mixture: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        router = mixture.router
        experts = mixture.experts
        scores = F.linear(x, router.weight)
        has_groups = hasattr(router, "groups")
        p = scores.sigmoid() if has_groups else scores.softmax(-1)
        ranking = scores
        if router.bias is not None:
            ranking = p + router.bias
        if has_groups:
            ranking = within_best_groups(ranking, *router.groups)
        chosen = ranking.topk(router.top_k).indices
        used = torch.zeros_like(scores, dtype=torch.bool)
        used.scatter_(-1, chosen, True)
        weights = torch.where(used, p, 0)
        weights = weights / weights.sum(-1, keepdim=True)
        y = 0
        if has_groups:
            weights = weights * router.routed_scale
        if hasattr(mixture, "shared"):
            y = mixture.shared(x)

        def add_excess(gradient: torch.Tensor) -> None:
            depended_on = gradient.abs().sum(-1, keepdim=True) > 0
            counts = (used & depended_on).sum((0, 1))
            above_mean = len(counts) * counts - counts.sum()
            key = f"{name}.router.bias"
            excess[key] = excess.get(key, 0) + above_mean.double() / 1024

        if router.bias is not None and router.bias.requires_grad and weights.requires_grad:
            weights.register_hook(add_excess)
        for i in range(scores.shape[-1]):
            gate = F.silu(F.linear(x, experts.w1.weight[i]))
            up = F.linear(x, experts.w3.weight[i])
            down = F.linear(gate * up, experts.w2.weight[i])
            y = y + weights[..., i, None] * down
        return y

    for name, module in model.named_modules():
        if isinstance(module, MixtureOfExperts):
            module.forward = functools.partial(dense, name, module)
    return excess


def within_best_groups(ranking: torch.Tensor, n_groups: int, best: int) -> torch.Tensor:
    """Return a ranking in which only experts of the best groups are above -inf: of those whose two
    best experts have the largest sums."""
    groups = ranking.unflatten(-1, (n_groups, -1))
    sums = groups.sort(-1).values[..., -2:].sum(-1, keepdim=True)
    least = sums.sort(-2).values[..., -best, None, :]
    return groups.masked_fill(sums < least, -torch.inf).flatten(-2)


def effective_weights(model: Llama, lora: dict | None, with_adapters: bool = True) -> dict:
    """Return the weights that a model computes with, by their names in a model without adapters:
    NF4 codes dequantized, LoRA as W + scale B A, DoRA's rows scaled to its magnitudes, biases."""
    named = dict(model.named_parameters())
    weights = {"output.weight": model.output.weight}  # not listed where it is tied
    for name, parameter in named.items():
        if name.endswith((".weight", ".bias")):
            weights[name] = parameter
    for name, weight in weights.items():
        layer = name.removesuffix(".weight")
        row_scale = named.get(f"{layer}.row_scale")
        if row_scale is not None:
            weight = dequantized(weight, row_scale, torch.float64)
        A = named.get(f"{layer}.lora_A")
        if with_adapters and A is not None:
            B = named[f"{layer}.lora_B"]
            divisor = lora["rank"]
            if lora.get("rslora"):
                divisor = divisor**0.5
            scale = lora.get("alpha", 16) / divisor
            weight = weight + scale * B @ A
        magnitude = named.get(f"{layer}.lora_magnitude")
        if with_adapters and magnitude is not None:
            norms = weight.detach().norm(dim=1)
            weight = (magnitude / norms)[:, None] * weight
        weights[name] = weight
    return weights


# ----------------------------------------------------------------------------------- optimizers


def plain_adamw(named: dict[str, torch.Tensor], lr: float):
    """Return torch's AdamW, which decays matrices."""
    matrices = [p for p in named.values() if p.ndim > 1]
    vectors = [p for p in named.values() if p.ndim == 1]
    groups = [
        {"params": matrices, "weight_decay": 0.1},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr, betas=(0.9, 0.95), fused=False, foreach=False)


def plain_muon(named: dict[str, torch.Tensor], lr: float):
    """Return Muon for the matrices of blocks, with AdamW for all other parameters, written
    independently of techniques/optimizers.py."""
    matrices = []
    others = {}
    for name, p in named.items():
        if name.startswith("layers.") and p.ndim > 1:
            matrices.append(p)
        else:
            others[name] = p
    adamw = plain_adamw(others, lr)
    momenta = [torch.zeros_like(p) for p in matrices]

    @torch.no_grad()
    def step() -> None:
        adamw.step()
        for p, momentum in zip(matrices, momenta):
            momentum.copy_(0.95 * momentum + p.grad)
            direction = orthogonalized(p.grad + 0.95 * momentum)
            size = 0.1 * max(p.shape[-2:]) ** 0.5
            change = 0.1 * p + size * direction
            p.copy_(p - lr * change)

    return SimpleNamespace(step=step)


def orthogonalized(x: torch.Tensor) -> torch.Tensor:
    """Return what Newton-Schulz iterations make of a matrix, by its singular value decomposition:
    each iteration maps the singular values s to a polynomial of s, and leaves the vectors."""
    u, s, v = torch.linalg.svd(x, full_matrices=False)
    length = s.norm(dim=-1, keepdim=True)
    s = s / length.clamp(min=1e-30)  # an expert may have had no token
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return u @ torch.diag_embed(s) @ v
