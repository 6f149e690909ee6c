"""distill.py: divergences are those of the formulas and of trl, and runs on two ranks are those of
one process. Teachers that do not fit are refused.

Gradients on every split are compared with the formula in test_exact.py."""

import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from conftest import launch, metrics, refused, succeed
from test_chat import write
from test_finetune import CONFIG, SHORT, command_of, last_factors, same_run, write_model
from test_train import flip, resumes, same_metrics

import techniques.chunked_loss as chunked_loss
from config import ParallelConfig, Work
from costs.page import holds
from distill import Distillation, Distilling
from files.loading import load_pretrained
from model import IGNORE, Vocabulary
from perf.instruments import build_on_meta
from runs.each_target import cross_entropies, from_logits
from runs.teacher import check_vocabulary
from techniques.divergence import forward_kl, likeliest, reverse_kl, shares_of
from techniques.nf4 import rounded
from text.bpe import train_tokenizer
from text.tokenizer import load_tokenizer

N, V, K = 9, 17, 5
LARGER = replace(
    CONFIG, dim=64, n_layers=3, n_kv_heads=4, ffn_dim=64, head_dim=0, tie_embeddings=False
)


@pytest.fixture
def logits() -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of a student, with gradients, and of a teacher."""
    torch.manual_seed(0)
    student, teacher = (3 * torch.randn(2, N, V, dtype=torch.float64)).unbind()
    return student.requires_grad_(), teacher


def same_loss(ours: torch.Tensor, expected: torch.Tensor, student: torch.Tensor) -> None:
    """Assert that two sums and their gradients are equal."""
    assert ours.item() == pytest.approx(expected.item(), rel=1e-13)
    (gradient,) = torch.autograd.grad(ours, student, retain_graph=True)
    (other,) = torch.autograd.grad(expected, student, retain_graph=True)
    assert (gradient - other).norm() < 1e-13 * other.norm()
    assert other.norm() > 0.1


def test_divergences_are_those_of_the_formulas(logits):
    student, teacher = logits
    ours, theirs = student.log_softmax(-1), teacher.log_softmax(-1)
    forward = (theirs.exp() * (theirs - ours)).sum()
    reverse = (ours.exp() * (ours - theirs)).sum()
    same_loss(forward_kl(student, teacher, Vocabulary(V)).sum(), forward, student)
    same_loss(reverse_kl(student, teacher, Vocabulary(V)).sum(), reverse, student)
    assert forward.item() != pytest.approx(reverse.item(), rel=0.01)


def test_trl_computes_the_same(logits):
    """Its GKDTrainer, at beta 0 and 1, over the targets that are not ignored."""
    gkd = pytest.importorskip("trl.experimental.gkd", reason="trl is not installed here")
    student, teacher = logits
    labels = torch.tensor([IGNORE, *range(N - 1)])
    for beta, divergence in ((0, forward_kl), (1, reverse_kl)):
        loss_of = gkd.GKDTrainer.generalized_jsd_loss
        expected = loss_of(student[None], teacher[None], labels[None], beta=beta)
        ours = divergence(student, teacher, Vocabulary(V))[1:].sum() / (N - 1)
        same_loss(ours, expected, student)


def test_others_than_the_likeliest_are_one_token(logits):
    student, teacher = logits
    vocabulary = Vocabulary(V)
    _, ids = likeliest(teacher, K, vocabulary)
    log_p = shares_of(teacher, ids, vocabulary)
    ours = (log_p.exp() * (log_p - shares_of(student, ids, vocabulary))).sum()
    expected = 0
    for q, p in zip(student.softmax(-1), teacher.softmax(-1)):
        order = p.argsort(descending=True)
        best, others = order[:K], order[K:]
        q = torch.cat([q[best], q[others].sum()[None]])
        p = torch.cat([p[best], p[others].sum()[None]])
        expected = expected + F.kl_div(q.log(), p, reduction="sum")
    same_loss(ours, expected, student)
    assert 0 < ours < forward_kl(student, teacher, vocabulary).sum()
    assert log_p.exp().sum(-1) == pytest.approx(1)


def test_logits_of_all_tokens_are_never_there(monkeypatch):
    """Neither in forward nor in backward, which makes them again."""
    monkeypatch.setattr(chunked_loss, "LOSS_CHUNK", 4)
    seen = []

    def product(student, teacher, of_tokens):
        seen.append(len(student))
        assert student.shape == teacher.shape == (len(of_tokens), V)
        return (student * teacher).sum(-1) * of_tokens

    states = [torch.randn(2, 5, 3, dtype=torch.float64).requires_grad_() for _ in range(2)]
    weights = [torch.randn(V, 3, dtype=torch.float64) for _ in range(2)]
    of_tokens = torch.rand(2, 5, dtype=torch.float64)
    found = from_logits(product, states, weights, of_tokens)
    found.sum().backward()
    student, teacher = (x @ weight.T for x, weight in zip(states, weights))
    assert torch.allclose(found, (student * teacher).sum(-1) * of_tokens, rtol=1e-13)
    assert sorted(seen) == [2, 2, 4, 4, 4, 4]


def test_an_exam_gets_cross_entropies():
    hidden = torch.randn(2, 3, 4)
    weight = torch.randn(V, 4)
    targets = torch.randint(V, (2, 3))
    given = hidden, weight, targets, Vocabulary(V)
    task = SimpleNamespace(batch=None)
    assert torch.equal(Distillation.sum_of_divergences(task, *given), cross_entropies(*given))


# ------------------------------------------------------------------------------------------ runs


@pytest.fixture(scope="module")
def given(tmp_path_factory, sums) -> dict:
    """Flags of a short run on answers that are given."""
    path = tmp_path_factory.mktemp("given")
    write_model(path / "student", CONFIG, seed=5)
    write_model(path / "teacher", LARGER, seed=6)
    write(path / "prompts.jsonl", *[dict(prompt=f"{i}?") for i in range(9)])
    return SHORT | dict(init=path / "student", teacher=path / "teacher", data=sums, lr=1e-2)


def on_policy(given: dict) -> dict:
    """Return the flags of a run on the student's own answers."""
    prompts = given["teacher"].parent / "prompts.jsonl"
    return given | dict(on_policy=True, data=prompts, max_new_tokens=6)


command = partial(command_of, "distill.py")


def same_measures(ours: Path, theirs: Path) -> None:
    """Assert that runs on different numbers of ranks have measured the same."""
    for row, expected in zip(metrics(ours), metrics(theirs), strict=True):
        names = {"agreement", "end", "length", "val_agreement", "val_end", "val_length"}
        for name in names & expected.keys():
            assert row[name] == pytest.approx(expected[name], rel=1e-12, abs=1e-12), name
        assert row.get("sample", "").startswith("---") == ("val_loss" in row)


RUNS = [
    (dict(dp="fsdp"), dict(all_weights=True, top_k=9)),
    (dict(tp=2), dict(top_k=9)),
    (dict(pp=2, microbatch=2), dict(all_weights=True, top_k=9)),
    (dict(dp="fsdp", cp=2, offload=True), dict(dora=True)),
]


@pytest.mark.slow
@pytest.mark.parametrize("mesh, more", RUNS)
def test_a_run_on_two_ranks_is_the_same_run(given, tmp_path, mesh, more):
    """The loss falls; a resumed run ends the same in every bit."""
    succeed(*command(given, tmp_path / "one", **more))
    on_two = command(given, tmp_path / "two", **dict(microbatch=1) | mesh | more)
    out = succeed(*on_two, nproc=2).out
    rows = metrics(tmp_path / "one")
    same_metrics(metrics(tmp_path / "two"), rows)
    same_measures(tmp_path / "two", tmp_path / "one")
    assert 0 < rows[-1]["val_loss"] < rows[1]["val_loss"]
    assert "step 4: validation loss" in out and "agreement" in out
    resumes(tmp_path / "two", 2, last_factors, *on_two, nproc=2)


OF_ANSWERS = [
    dict(cp=2),
    dict(dp="fsdp"),
    dict(tp=2),
    dict(pp=2, microbatch=2),
]


@pytest.mark.slow
@pytest.mark.parametrize("mesh", OF_ANSWERS)
def test_its_own_answers_are_the_same_on_two_ranks(given, tmp_path, mesh):
    """9 prompts are held out and trained on: with FSDP, one is answered twice to share them."""
    given = on_policy(given)
    succeed(*command(given, tmp_path / "one"))
    on_two = command(given, tmp_path / "two", **dict(microbatch=1) | mesh)
    succeed(*on_two, nproc=2)
    same_run(tmp_path / "two", tmp_path / "one", step=4)
    same_measures(tmp_path / "two", tmp_path / "one")
    rows = metrics(tmp_path / "one")
    assert all(0 < row["length"] <= 6 for row in rows)
    assert any(row["end"] > 0 for row in rows)
    assert rows[0]["tokens"] <= 8 * (2 + 6)
    resumes(tmp_path / "two", 2, last_factors, *on_two, nproc=2)


@pytest.mark.slow
def test_a_run_goes_on_with_other_ranks(given, tmp_path):
    given = on_policy(given) | dict(all_weights=True)
    out = tmp_path / "out"
    succeed(*command(given, out))
    rows = metrics(out)
    shutil.rmtree(out / "step-00000004")
    succeed(*command(given, out, dp="fsdp", resume=True), nproc=2)
    same_metrics(metrics(out), rows)


def test_another_teacher_is_noticed(given, tmp_path):
    teacher = tmp_path / "teacher"
    write_model(teacher, LARGER, seed=6)
    more = dict(teacher=teacher, steps=2, save_every=1, eval_every=0)
    succeed(*command(given, tmp_path / "out", **more))
    shutil.rmtree(tmp_path / "out/step-00000002")
    shutil.rmtree(teacher)
    write_model(teacher, LARGER, seed=7)
    resumed = launch(*command(given, tmp_path / "out", **more, resume=True), nproc=2)
    refused(resumed, f"{teacher} has other weights than the --teacher that the run began with")


def test_a_teacher_in_4_bits_is_one_of_rounded_matrices(given, tmp_path):
    write_model(tmp_path / "rounded", LARGER, seed=6, change=lambda p: rounded(p.detach()))
    exact = dict(eval_every=0, steps=1, warmup=1)
    succeed(*command(given, tmp_path / "four", teacher_bits=4, **exact))
    succeed(*command(given | dict(teacher=tmp_path / "rounded"), tmp_path / "sixteen", **exact))
    succeed(*command(given, tmp_path / "whole", **exact))
    four, sixteen, whole = (
        metrics(tmp_path / name)[0]["loss"] for name in ("four", "sixteen", "whole")
    )
    assert four == pytest.approx(sixteen, rel=1e-12)
    assert four != pytest.approx(whole, rel=1e-6)


def test_a_teacher_is_counted_in_memory():
    """--dp auto has to know of its weights, and of the hidden states that it leaves."""
    student, teacher = (build_on_meta(config) for config in (CONFIG, LARGER))
    teacher.requires_grad_(False)
    work = Work(student, ParallelConfig(), batch=8, microbatch=2, seq_len=16)
    beside = replace(work, teacher=teacher)
    weights = sum(parameter.nbytes for parameter in teacher.parameters())
    more = weights + 8 * 16 * LARGER.dim * 4
    assert holds(beside)["kept"] == more
    assert holds(beside)["peak"] == holds(work)["peak"] + more
    assert holds(replace(beside, parallel=ParallelConfig(dp="fsdp", shard=4)))["kept"] < more


def test_bench_step_times_the_teacher(given, tmp_path):
    more = dict(steps=1, warmup=1, save_every=0, eval_every=0, dtype="float32")
    _, *words = command(given, tmp_path / "none", **more)
    out = succeed("bench.py", "step", "--lora", "distill", *words, "--repeats", 1, nproc=2).out
    assert "| teacher | " in out
    assert "attention runs forward 1 time" in out


# ------------------------------------------------------------------------------------ refusals


def test_other_vocabularies_are_named():
    ours = SimpleNamespace(pieces={0: b"a", 1: b"b", 2: b"c"})
    theirs = SimpleNamespace(pieces={0: b"a", 1: b"B"})
    check_vocabulary(ours, ours, "TEACHER")
    with pytest.raises(Exception, match=r"TEACHER .* of 3 ids 2 differ, id 1 is 'B', and 'b' of"):
        check_vocabulary(theirs, ours, "TEACHER")


WRONG = {  # ranks, flags, what is said
    "missing": (2, dict(teacher="nowhere"), "no checkpoint in 'nowhere'"),
    "all tokens": (2, dict(top_k=267), "--top-k 267 is all of 267 tokens"),
    "own answers": (0, dict(on_policy=True, top_k=3), "are for answers that are given"),
    "no answers": (0, dict(chat=True), "are for --on-policy"),
    "ranks": (2, dict(tp=8), "are no multiple of --tp 8"),
}


@pytest.mark.parametrize("nproc, more, says", WRONG.values(), ids=WRONG)
def test_what_cannot_be_is_refused(given, tmp_path, nproc, more, says):
    refused(launch(*command(given, tmp_path / "out", **more), nproc=nproc), says)


def refuses(given: dict, teacher: Path, says: str, nproc: int = 2, **more) -> None:
    """Assert that a run names this teacher and what is wrong with it."""
    result = launch(*command(given, teacher.parent / "out", teacher=teacher, **more), nproc=nproc)
    refused(result, str(teacher), says)


UNFIT = {  # what the teacher has, flags, what is said
    "rows": (dict(vocab_size=270), {}, "its output has 270 rows, the student's 267"),
    "short": (dict(max_seq_len=64), {}, "maximum: --seq-len 64"),
    "heads": (dict(n_heads=3, n_kv_heads=3, dim=48), dict(tp=2), "--tp 2 cannot shard 3 key"),
}


@pytest.mark.parametrize("sizes, more, says", UNFIT.values(), ids=UNFIT)
def test_a_teacher_that_does_not_fit_is_refused(given, tmp_path, sizes, more, says):
    """On all ranks, in one line."""
    teacher = tmp_path / "teacher"
    write_model(teacher, replace(LARGER, **sizes), seed=6)
    refuses(given, teacher, says, **more)


def test_a_teacher_of_another_vocabulary_is_refused(given, text, tmp_path):
    teacher = tmp_path / "teacher"
    train_tokenizer([str(text)], 300, tmp_path / "tokenizer.model")
    tokenizer = load_tokenizer(str(tmp_path / "tokenizer.model"))
    config = replace(LARGER, vocab_size=tokenizer.vocab_size)
    write_model(teacher, config, seed=6, tokenizer=tokenizer)
    refuses(given, teacher, "has another vocabulary")


def test_a_damaged_teacher_is_refused(given, tmp_path):
    teacher = shutil.copytree(given["teacher"], tmp_path / "teacher")
    (file,) = (teacher / "weights").glob("*.distcp")
    flip(file)
    refuses(given, teacher, "damaged", nproc=0)


def test_the_teacher_is_no_part_of_a_checkpoint(given, tmp_path):
    """And the student alone is trained: a run leaves a model of its size."""
    out = tmp_path / "out"
    succeed(*command(given, out, all_weights=True, steps=1, warmup=1, eval_every=0))
    # It would not load with a tensor more.
    assert load_pretrained(out, torch.float64).config == CONFIG
    assert Distilling(teacher=given["teacher"]).references == 0
