"""Answers to labs: right ones pass, in unusual styles too, and wrong ones get their sentence."""

import json
import os
import re
import subprocess
import sys
import time
from xml.etree import ElementTree

import pytest
import torch
from conftest import launch, metrics, succeed
from test_labs import ANSWERS, lab, student_file

from labs.machinery import answers, checking, compare, guard, ranks, student
from labs.machinery.answers import starter_of
from labs.machinery.checking import check_module

RECT = "{http://www.w3.org/2000/svg}rect"


@pytest.mark.parametrize("name", ["zero1", "pipeline"])
def test_solutions_pass(name, tmp_path):
    """The file that is checked is the one that was given. Time lines are drawn."""
    path, plot = student_file(name, tmp_path), tmp_path / "plot.svg"
    size, draws = check_module(name).SIZES[0], hasattr(check_module(name), "drawing")
    given = ["--ranks", size, "--seed", 7, *(["--plot", plot] if draws else [])]
    out = lab("check", name, "--file", path, *given)
    assert re.search(rf"^{path}  .* {size} ranks?, seed 7 ", out, re.MULTILINE)
    assert f"passed on {size} rank" in out and " no\n" not in out
    if draws:
        assert str(plot) in out and len(ElementTree.parse(plot).getroot().findall(RECT)) > 10


def size_of(name: str) -> int:
    """Return a number of ranks on which a lab is checked, 3 if it can be."""
    sizes = check_module(name).SIZES
    return 3 if 3 in sizes else sizes[0]


KINDS = r"  (loss|norm|gradients|gathered|output|adapters|weights|example|ids) .*"  # of numbers


@pytest.mark.slow
@pytest.mark.parametrize("name", ANSWERS)
def test_wrong_answers_are_named(name, tmp_path):
    """Also one that does nothing."""
    wrong_answers = answers.wrong_answers(name)
    sources = [answers.patched(ANSWERS[name], wrong.patch) for wrong in wrong_answers]
    sources.append(re.sub(r"raise NotImplementedError.*", "pass", starter_of(name)))
    files = [tmp_path / f"{number}.py" for number in range(len(sources))]
    for path, source in zip(files, sources):
        path.write_text(source)
    result = launch("tests/workers/reports.py", name, size_of(name), *files, timeout=600)
    *texts, of_nothing = json.loads(result.out)
    assert "returned None, and should return" in " ".join(of_nothing.split())
    for wrong, text in zip(wrong_answers, texts, strict=True):
        words, (says, *_) = " ".join(text.split()), wrong.says.split("{")
        assert says in words, f"{wrong.name}: {text}"
        if wrong.tells == "right numbers":  # so it takes more than numbers to find it
            numbers = [line for line in text.splitlines() if re.match(KINDS, line)]
            assert numbers and all(line.endswith("ok") for line in numbers), text
        if wrong.tells == "hangs":
            assert "stopped: ranks wait" in text
            assert re.search(r"rank \d  (call \d+: .*, line|is in line) \d", text), text


@pytest.mark.parametrize("line, says", [
    ("totals = torch.stack([loss", "SyntaxError: '[' was never closed"),
    ("return loss.detach()", "returned Tensor, and should return the mean loss and the norm"),
    ("assert dist.get_rank() != 1; return loss, loss", "rank 1 failed in line"),
    ("dist.all_reduce(loss.detach().view(-1)[: dist.get_rank()])", "They parted at call 1"),
    ("(dist.send if dist.get_rank() else dist.recv)(loss, 1 - dist.get_rank()); 1 / 0",
     "ZeroDivisionError: division by zero"),
])  # fmt: skip
def test_other_mistakes_are_explained(line, says, tmp_path):
    starter, path = starter_of("mean"), tmp_path / "mean.py"
    path.write_text(re.sub(r"raise NotImplementedError.*", line, starter))
    out = lab("check", "mean", "--file", path, "--ranks", 2, code=1)
    assert says in " ".join(out.split()), out
    assert "hint: python labs/run.py hint mean" in out


@pytest.mark.slow
def test_the_ddp_of_a_student_trains_as_the_project(copy):
    """A wrong answer trains otherwise: so the run uses the student's file."""
    (copy / "labs/work").mkdir()
    flags = "--dp ddp --model tiny --tokenizer bytes --seq-len 32 --batch 12 --microbatch 6".split()
    flags += "--optimizer adamw --dtype float64 --steps 4 --eval-every 0".split()
    change = {"            parameter.grad /= dist.get_world_size()\n": ""}
    found = []
    for script, changed in (("train.py", {}), ("labs/train.py", {}), ("labs/train.py", change)):
        student_file("ddp", copy / "labs/work", changed)
        out = copy / str(len(found))
        succeed(copy / script, *flags, "--data", copy / "docs", "--out", out, nproc=2)
        found.append([row[what] for row in metrics(out) for what in ("loss", "grad_norm")])
    projects, students, wrong = found
    assert students == pytest.approx(projects, rel=1e-12)
    assert wrong != pytest.approx(projects, rel=1e-3)


# -------------------------------------------------------------------- answers in other styles

SEND = """\
        work = dist.all_reduce(parameter.grad, async_op=True)
        pending.append((parameter, work))
"""
LATE = {
    "pending = []": "pending, late = [], []",
    "hook(send)": "hook(late.append if dist.get_rank() == 1 else send)",
    "        for parameter, work in pending:": """\
        while late:
            send(late.pop(0))
        for parameter, work in pending:""",
}
EARLY_WAIT = {SEND: SEND + "        if dist.get_rank() == 1:\n            work.wait()\n"}
LOADED = """
class Loaded(torch.Tensor):
    def __reduce_ex__(self, _):
        return exec, ("raise SystemExit(7)",)  # where a result is loaded


"""
RETURN = "    return totals[0] / totals[1], norm"
FLAT = "total = tensor.flatten().clone()"
PASSES = ""
OWN_GROUPS = {
    """\
    nodes = dist.get_world_size() // per_node
    mesh = init_device_mesh("cpu", (nodes, per_node), mesh_dim_names=("replicate", "shard"))
    within, across = mesh.get_group("shard"), mesh.get_group("replicate")
""": """\
    size = dist.get_world_size()
    nodes = [range(first, first + per_node) for first in range(0, size, per_node)]
    within, _ = dist.new_subgroups_by_enumeration([[*node] for node in nodes])
    across, _ = dist.new_subgroups_by_enumeration([[*ranks] for ranks in zip(*nodes)])
"""
}
RECOMPUTE = answers.answer_of("recompute")
BY_HOOKS = {  # backward asks for what forward has saved: then forward runs again
    RECOMPUTE[RECOMPUTE.index("    # >>>") : RECOMPUTE.index("    # <<<")]: """\
    hooks = torch.autograd.graph.saved_tensors_hooks

    def checkpointed(x, *others):
        rng_state, numbers, again = torch.get_rng_state(), itertools.count(), {}

        def unpack(number):
            if not again:
                now = torch.get_rng_state()
                torch.set_rng_state(rng_state)
                keep = lambda tensor: again.setdefault(len(again), tensor.detach())
                with torch.enable_grad(), hooks(keep, lambda kept: kept):
                    forward(x.detach().requires_grad_(), *others)
                torch.set_rng_state(now)
            return again.pop(number)

        with hooks(lambda tensor: next(numbers), unpack):
            return forward(x, *others)

    return checkpointed
""",
    "import torch\n": "import itertools\n\nimport torch\n",
}
AS_IN_PPO = {
    "(log_p - old_log_p)[is_answer]": "(log_p - old_log_p)[is_answer].clamp(-20, 20)",
    "ratio = torch.where(advantages < 0, not_below, not_above).exp()": "ratio = log_ratio.exp()",
    "losses.append(-(ratio * advantages).sum())": """\
clipped = ratio.clamp(1 - low, 1 + high)
        losses.append(-torch.minimum(ratio * advantages, clipped * advantages).sum())""",
}
BY_KERNEL = {  # the heads that share a key stand for queries
    "attended = scores.softmax(-1) @ values": """\
is_seen = ~is_free[:, None, None]
        attended = F.scaled_dot_product_attention(q, keys, values, attn_mask=is_seen)"""
}
TRIED = [
    ("rewards", AS_IN_PPO, PASSES),
    ("sampling", BY_KERNEL, PASSES),
    ("hsdp", OWN_GROUPS, PASSES),
    ("resume", {'part / f"rank-{rank}"': 'f=part / f"of rank {rank}"',
                'newest / f"rank-{rank}"': 'newest / f"of rank {rank}"'}, PASSES),
    ("recompute", BY_HOOKS, PASSES),
    ("ddp", {"async_op=True)": "async_op=True).get_future().then(lambda f: f.value()[0].div_(3))",
             "            parameter.grad /= dist.get_world_size()\n": ""}, PASSES),
    ("ddp", {SEND: f"        if not parameter.grad.any():\n            return\n{SEND}"},
     "does not come out"),
    ("ddp", LATE, "A rank sends when backward is over"),
    ("ddp", EARLY_WAIT, "A rank waits for each all-reduce before it sends the next"),
    ("ddp", {"        pending.clear()\n": "        done.extend(pending)\n        pending.clear()\n",
             "    pending = []": "    pending, done = [], []"}, "keeps more tensors or handles"),
    ("ring", {FLAT: "total = tensor.view(-1).clone()"}, "flatten copies it where needed"),
    ("ring", {FLAT: "total = tensor.flatten().double()"}, "The sum of float32 is wrong"),
    ("ring", {"view_as(tensor)": "view(tensor.shape or 1)"}, "without dimensions is wrong"),
    ("ring", {"def ring": f"{LOADED}def ring", "as(tensor)": "as(tensor).as_subclass(Loaded)"},
     PASSES),
    ("ring", {FLAT: f"__import__('threading').Thread().start()\n    {FLAT}"}, "without a thread"),
    ("mean", {"    norm = ": "    norm = torch.nn.utils.clip_grad_norm_(parameters, clip)\n"
              "    return totals[0] / totals[1], norm\n    norm = "}, PASSES),
    ("mean", {RETURN: f"    dist.barrier()\n{RETURN}"}, "A barrier makes all ranks wait"),
    ("mean", {RETURN: f"    loss.data.mul_(2)\n{RETURN}"}, "changes `loss` in line"),
    ("mean", {"grad /= totals[1]": "grad /= totals[1] if targets else targets"}, "0 / 0 is NaN"),
    ("logits", {"dist.all_reduce(sums)": "[dist.all_reduce(number) for number in sums.flatten()]"},
     "of all tokens at once"),
    ("fsdp", {"backward(x, rows)": "backward(x.clone(), rows)"}, "kept for nothing"),
    ("hsdp", {"return weight\n": "return vars(gather).setdefault(0, weight)\n"},
     "gather returns the weight as it was"),
    ("hsdp", {"[within.rank()].clone()": "[within.rank()]"}, "A chunk is a view"),
    ("hsdp", {"weight = rows": 'init_device_mesh("cpu", (nodes, per_node))\n        weight = rows'},
     "makes a group in every call"),
    ("accumulate", {"total = 0.0": "total = microbatches.reverse() or 0.0"},
     "changes `microbatches` in line"),
    ("accumulate", {"loss = runner": "runner.module(tokens, targets)\n            loss = runner"},
     "Each microbatch runs forward once"),
    ("accumulate", {"total += ": "vars(runner)[len(vars(runner))] = loss.data\n        total += "},
     "keeps more tensors in memory"),
    ("ddp", {SEND: f"{SEND}        parameter.grad /= dist.get_world_size()\n",
             "            parameter.grad /= dist.get_world_size()\n": ""}, "after wait()"),
    ("tp", {"return SumInForward.apply(hidden @ w2.T)":
            "return (SumInForward.apply(hidden @ w2.T), hidden @ w2.T)[rank > 0]"},
     "Rank 0 alone has what is right"),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name, change, says", TRIED)
def test_answers_in_other_styles(name, change, says, tmp_path):
    path = student_file(name, tmp_path, change)
    out = lab("check", name, "--file", path, "--ranks", size_of(name), code=1 if says else 0)
    assert says in " ".join(out.split()), out


@pytest.mark.parametrize("word", "distributed_c10d _getframe x.f_back _fork_exec ctypes".split())
def test_names_that_evade_the_counting_are_refused(word, tmp_path):
    (tmp_path / "mean.py").write_text(word)
    with pytest.raises(student.Misuse, match="write it without"):
        student.load_function(tmp_path / "mean.py", "average")
    assert not student.HIDDEN.search("half_back, f_backward")


def computes(rank: int, seconds: float = 0.5) -> None:
    while time.process_time() < seconds:  # of this process, which begins
        pass


def sleeps(rank: int) -> None:
    time.sleep(9)


@pytest.mark.slow
@pytest.mark.parametrize(
    "function, end, platform",
    [
        (computes, "results", sys.platform),
        (computes, "results", "darwin"),
        (sleeps, "hangs", sys.platform),
        (sleeps, "hangs", "darwin"),
        (lambda rank: computes(rank, 99), "error", sys.platform),
    ],
)
def test_ranks_that_compute_do_not_hang(function, end, platform, monkeypatch, tmp_path):
    """Ranks that compute, or wait for a core, do not hang: they are not asleep. After LONGEST
    seconds of computing they end with an error."""
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(ranks, "PATIENCE", 5)
    monkeypatch.setattr(ranks, "LONGEST", 1)
    monkeypatch.setattr(os, "getloadavg", lambda: (999.0, 0.0, 0.0))
    ended = ranks.run_ranks(function, 2, tmp_path / "mean.py")
    assert [name for name in ("results", "hangs", "error") if getattr(ended, name)] == [end]
    if end == "hangs":
        assert "busy (load 999 on" in " ".join(" ".join(checking.explain_hang(ended)).split())


@pytest.mark.slow
def test_right_answers_pass_beside_others(tmp_path):
    """Sixteen programs use all cores, and come first."""

    def run() -> None:
        os.nice(10)
        for name in ("tp", "context"):
            assert checking.check(name, 3, 0, student_file(name, tmp_path)).passed, name

    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(16)]
    (process := guard.FORK.Process(target=run)).start()
    process.join()
    for other in others:
        other.kill()
    assert process.exitcode == 0


def compared(found: list, expected) -> str:
    """The sentence for tensors that ranks have, where others are expected."""
    return compare.tensors("gradients", found, expected).mistake


def test_guesses_are_made_only_where_they_are_shown():
    """Rank 0 alone is right; a factor that the number of ranks explains; a rounding to float32."""
    one, two, zero = torch.tensor([(1, 2), (3, 5), (0, 0)], dtype=torch.float64)
    assert compared([one, two, two], one) == compare.RANK_0
    assert compared([one, one / 7, one / 7], [one, one, one]) == ""  # ranks need their own
    assert compared([zero, one, one], zero) == ""  # rank 0 has nothing, which may be luck
    for factor, says in {
        3: "3 times as large as it should be, and there are 3 ranks",
        9: "3 x 3 times",
        1 / 3: "divided by 3 once too often",
        1 / 9: "divided by 3 x 3 too much",
        3 / 2: "3 / 2 times as large as it should be, on 3 ranks",
        0: "All of it is 0",
        -1: "the wrong sign",
    }.items():
        of_ranks = [one, two, one]
        assert says in compared([factor * tensor for tensor in of_ranks], of_ranks), factor
        assert compared([factor * one, two, one], of_ranks) == "", factor  # not all of it
    assert compare.tensors("output", [zero] * 2, [one, two]).mistake == ""  # whatever made it so
    assert compared([4 * one] * 3, [one] * 3) == ""  # no factor that is known
    assert compared([2 * one], [one]) == ""  # there are no other ranks
    assert compared([one.float().double() * (1 + 1e-8)] * 2, [one] * 2) == compare.ROUNDED
    assert compared([one + 1e-11] * 2, [one] * 2) == ""  # nearer than float32 comes
