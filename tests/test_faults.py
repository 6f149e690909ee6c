"""Mutation tests: faults of one line, each of which some case of test_exact.py has to find.

Each is planted in a copy of the project, and test_exact.py's cases train with it, the fast ones
first and then others that are not compiled, until one differs."""

import ast
import functools
import math
import tempfile
from pathlib import Path

import pytest
import test_fake_cuda
import test_mutants
import test_nccl
from conftest import ROOMS, ROOT, changed_copy, with_fault
from test_exact import LOSSES, QUICK, assert_result, slower_cases, train_all, train_references
from workers.train_cases import DISTILLED

FAULTS = {
    "parallel": [
        ('dims = ("replicate", "shard") if', 'dims = ("shard",) if'),  # HSDP without its all-reduce
        ("set_requires_gradient_sync(last or", "set_requires_gradient_sync(not last or"),
        ("set_requires_all_reduce(last)", "set_requires_all_reduce(not last)"),
        ("with runner.no_sync() if sends_later else", "with runner.no_sync() if last else"),
        ('    "layers.*.attention_norm": NORM,', '    "layers.*.attention_norm": COLUMNS,'),
        ('    "layers.*.attention.wo": ROWS,', '    "layers.*.attention.wo": COLUMNS,'),
        ("    model.tie_weights()  # embedding", "    # embedding"),
        ("mesh.size()) * mesh.get_local_rank()", "mesh.size()) * (mesh.get_local_rank() + 1)"),
        ("to_local(grad_placements=[Partial()]), weight", "to_local(), weight"),
        ("hidden.redistribute(placements=[Replicate()])", "hidden"),
        ("return lse.logsumexp(0) - target_logit", "return lse.amax(0) - target_logit"),
    ],
    "parallel_layers": [
        ("Shard(1)  # placements", "Shard(2)  # placements"),
        ("operand.to_local(grad_placements=[Partial()])", "operand.to_local()"),
    ],
    "more_layers": [
        ("whole.to_local(grad_placements=[Partial()])", "whole.to_local()"),
        ("squares.full_tensor(grad_placements=[Partial()])", "squares.to_local() * 2"),
        ("squares.full_tensor(grad_placements=[Partial()])", "squares.full_tensor()"),
    ],
    "context_parallel": [
        ("own = torch.stack([k, v])[None]", "own = torch.stack([v, k])[None]"),
        ("*second.flip(0).unbind(0)", "*second.unbind(0)"),
        ("return rank, 2 * n - 1 - rank", "return 2 * rank, 2 * rank + 1"),
        ("parts.full_tensor(grad_placements=[Partial()])", "parts.full_tensor()"),
        ("attend_within(queries, *seen, window)", "attend(queries, *seen)"),
        ("sums.full_tensor(grad_placements=[Partial()])", "sums.full_tensor()"),
        (" * (self.mesh.get_local_rank() == 0)", ""),  # pairs counted on each rank
        ("batch.targets, positions)]", "batch.targets, positions * 0 + 1)]"),
    ],
    "experts": [("for part, matrix in parts]", "for part, matrix in parts if len(part)]")],
    "host_reads": [
        ("reading_by(read_again, again)", "reading_by(READERS[0], again)"),
    ],
    "expert_parallel": [
        ("forward(Reordered.apply(rows, order, back, 1), arriving", "forward(rows, arriving"),
        ("Reordered.apply(out, back, order, 1)", "out[order]"),
        ("gradient * parallel.tp / parallel.ep", "gradient"),
        ("AllToAll.apply(out, received", "AllToAll.apply(out.detach(), received"),
    ],
    "zero1": [
        ("gradient / self.mesh.size()", "gradient"),
        ("parameter.data.copy_(", "parameter.data.clone().copy_("),
    ],
    "pipeline": [
        ("self.inbox = {}  #", "microbatches = microbatches[1:]; self.inbox = {}  #"),
        ("own += other", "pass"),
        ("embedding.weight.copies = 2", "pass"),
        ("microbatch.positions, documents", "None, documents"),
        ("first = stage * each + min(stage, more)", "first = stage * each"),
    ],
    "async_tp": [
        ("products[(ring.rank - step) %", "products[(ring.rank + step + 1) %"),
        ("ring.rank - 1 - step", "ring.rank - step"),
        ("return ctx.ring.send(grad, -1), None", "return ctx.ring.send(grad, 1) * 0, None"),
        ("total = own + arrived", "total = own"),
    ],
    "muon": [
        ("max(parameter.shape[-2:])", "max(update.shape[-2:])"),
        ("shard_of(whole, matrix, at) for", "shard_of(whole, matrix) for"),
        ("gradient.lerp(momentum, MOMENTUM)", "momentum"),
    ],
    "chunked_loss": [
        ("weight_grad += w_grad", "weight_grad = w_grad"),
        ("hidden_grad[chunk], w_grad =", "hidden_grad[:1], w_grad ="),
    ],
    "lora": [
        ("contiguous(), alpha=scale", "contiguous(), alpha=1.0"),
        ("Partial() if p.is_shard(1) else p", "p"),
        ("0.0 if self.is_off else self.lora.scale", "self.lora.scale"),
    ],
    "preferences": [
        ("batch)[..., 0] > 0", "batch)[..., 0] >= 0"),  # padding counted as a pair
        ('return sums["loss"]', 'return sums["loss"] / sums["pairs"] * 20 / 9 * len(batch.tokens)'),
        ("with adapters_off(self.job.model)", "with torch.no_grad()"),
        ("ReduceOp.MIN", "ReduceOp.SUM"),  # ranks along tp have computed the same
        ("return {name: value / pairs", "return {name: value / len(sums)"),
    ],
    "distill": [
        ("is_target = targets != IGNORE", "is_target = targets == targets"),  # prompts count
        ("return loss.sum()", "return loss.sum() / is_target.sum()"),  # a mean of microbatches
        ("reverse_kl if self.run.on_policy else", "forward_kl if self.run.on_policy else"),
    ],
    "divergence": [
        ("lse.detach()[:, None]", "lse[:, None]"),  # whose gradient goes through other shards
        ("/ vocabulary.sum(p)", ""),
        ("log_p = teacher - vocabulary", "log_p = student - vocabulary"),
        ("rest = logits.masked_fill(counts > 0, lowest)", "rest = logits"),
        ("ids + vocabulary.vocab_start", "ids"),
    ],
    "rewards": [
        ("return bounded.exp() *", "return (1 + bounded) *"),
        ("advantage < 0, not_below", "advantage > 0, not_below"),  # clipped on the wrong side
        (".clamp(max=run.max_ratio)", ""),
        ("run.kl * log_change.exp() * k3", "run.kl * k3"),
    ],
    "answers": [
        ("begins[row, columns[:1]] = 1", "begins[row, columns] = 1"),
    ],
    "train": [
        ("parallel.replicate * parallel.shard", "world.parallel.data_size"),
        ("shares.sum().sqrt()", "shares[world.rank].sqrt()"),
        ("losses.sum() / parallel.tp", "losses.sum()"),
    ],
}  # fmt: skip
SEVERAL = range(2, 9)  # ranks
USES = {  # file -> a setting, and its values in the cases that use it; others are used by all
    "context_parallel": ("cp", SEVERAL),
    "experts": ("ep", SEVERAL),
    "expert_parallel": ("ep", SEVERAL),
    "host_reads": ("ep", SEVERAL),
    "zero1": ("dp", ["zero1"]),
    "pipeline": ("pp", SEVERAL),
    "async_tp": ("async_tp", [True]),
    "muon": ("optimizer", ["muon"]),
    "preferences": ("objective", LOSSES),
    "distill": ("objective", DISTILLED),
    "divergence": ("objective", DISTILLED),
    "rewards": ("objective", ["rewards"]),
    "answers": ("objective", ["rewards"]),
}
ALL = [(file, old, new) for file, faults in FAULTS.items() for old, new in faults]


def test_faults_are_of_lines_that_are_there():
    """Else a slow test would be the first to tell. What is put there is Python: a copy that cannot
    be imported would be found by every case."""
    faults = [*ALL]
    faults += [(file, old, new) for file, old, new, *_ in test_fake_cuda.FAULTS]
    faults += [(file, old, new) for _, file, old, new, _ in test_nccl.FAULTS]
    for fault in test_mutants.FAULTS:
        file, old, new, *_ = getattr(fault, "values", fault)  # of a slow case
        faults.append((file, old, new))
    partly = [edits for edits, _ in test_mutants.PARTLY.values()]
    for edits in (*test_mutants.RIGHT.values(), *partly, *test_mutants.WRONG.values()):
        faults += [("model", old, new) for old, new in edits.items()]
    missing = []
    for file, old, new in faults:
        (path,) = [p for room in (".", *ROOMS) if (p := ROOT / room / f"{file}.py").exists()]
        source = path.read_text()
        if source.count(old) != 1:
            missing.append((file, old))
        ast.parse(source.replace(old, new), f"{file}.py: {new}")
    assert missing == []


@functools.cache
def cases_of(quick: bool) -> tuple[dict, dict]:
    """Return the fast cases, or all others that are not compiled, and their references."""
    cases = QUICK
    if not quick:
        slower = slower_cases().items()
        cases = {name: case for name, case in slower if not case[1]["parallel"]["compile"]}
    with tempfile.TemporaryDirectory() as directory:
        return cases, train_references(Path(directory), cases)


def is_found(directory: Path, file: str, quick: bool, within: tuple) -> bool:
    """Return whether a case that uses the changed file fails or differs. They train in groups: the
    first often suffices."""
    cases, expected = cases_of(quick)
    using = []
    for name, (_, case) in cases.items():
        settings = case | case["parallel"]
        if file not in USES or settings.get(USES[file][0]) in USES[file][1]:
            using.append((name, cases[name]))
    n = math.ceil(len(using) / 12)
    for group in (dict(using[i::n]) for i in range(n)):
        try:
            results = train_all(directory, group, within)
            for name, result in results.items():
                assert_result(*cases[name], result, expected)
        except (AssertionError, pytest.fail.Exception):
            return True
    return False


@pytest.mark.slow
def test_no_fault_is_found_in_a_copy_without_one(tmp_path):
    assert not is_found(tmp_path, "", quick=True, within=changed_copy(tmp_path / "copy"))


found_fast = []  # of each fault tested so far, whether a fast case finds it


@pytest.mark.slow
@pytest.mark.parametrize("file, old, new", ALL)
def test_faults_are_found(tmp_path, file, old, new):
    within = with_fault(tmp_path / "copy", file, old, new)
    found_fast.append(is_found(tmp_path, file, quick=True, within=within))
    assert found_fast[-1] or is_found(tmp_path, file, quick=False, within=within), "no case differs"


@pytest.mark.slow
def test_the_fast_cases_find_most_faults():
    if len(found_fast) < 15:
        pytest.skip("needs the tests of some faults, before this one")
    assert sum(found_fast) >= 0.9 * len(found_fast)
