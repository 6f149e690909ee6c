"""Predictions of labs: what is counted is explained, right guesses score, and are recorded."""

import argparse
import functools
import io
import json
import math
import re
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from conftest import slow, succeed

from costs.page import holds, sends
from costs.seconds import sent_bytes
from labs.machinery import forms, forms_of_time, predict
from plumbing.processes import UserError


@pytest.fixture(autouse=True)
def record(tmp_path, monkeypatch) -> Path:
    """A record of guesses in which nothing stands yet."""
    monkeypatch.setattr(predict, "RECORD", tmp_path / ".predictions")
    return predict.RECORD


def arguments(form: str | None, *answers, **given) -> argparse.Namespace:
    flags = dict(lab=form, seed=0, key=None, student=None, attempt=None, failed=False)
    return argparse.Namespace(**flags | {"answer": [*map(str, answers)]} | given)


def guess(form: str | None, *answers, **given) -> str:
    """Return what the command prints, but for the prompts."""
    return "\n".join(predict.predict(arguments(form, *answers, **given)))


def recorded(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def question(form: str, seed: int):
    return predict.FORMS[form](Random(seed))


QUICK = [("bubble", range(200)), ("counts", range(3)), ("ranking", range(10))]
LONG = [slow(form, range(10, 15)) for form in ("bytes", "memory", "counts", "crossing")]


@pytest.mark.parametrize("form, seeds", [*QUICK, *LONG, slow("twice", range(10, 13))])
def test_counted_is_explained(form, seeds):
    """Counting raises ArithmeticError where the terms give another sum."""
    for seed in seeds:
        one = question(form, seed)
        found = one.count()
        assert len(found) == len(one.asked)
        if form == "memory":  # the last term is what the page leaves out
            peak = found[-1]
            assert abs(peak.terms[-1].value) < 0.1 * peak.value, (seed, peak)


def read_model(text: list[str]) -> tuple[int, list[int], list[list[int]]]:
    """Return, as a student reads them in the question, the blocks, and the elements and shapes of
    all parameters."""
    blocks = int(re.match(r"A model of (\d) blocks", text[0])[1])
    root, block = ([[*map(int, shape.split(", "))] for shape in re.findall(r"\[([\d, ]+)\]", line)]
                   for line in text[1:3])  # fmt: skip
    return blocks, root, block


def elements(shapes: list[list[int]]) -> int:
    return sum(map(math.prod, shapes))


def right_bytes(seed: int) -> list:
    """Of a step that all-gathers blocks in each pass and microbatch, by the text alone."""
    text = question("bytes", seed).text
    blocks, root, block = read_model(text)
    m = int(re.search(r"(\d) microbatch", text[4])[1])
    assert "bfloat16" in text[0] and "--dp fsdp --reshard weights." in text[3]
    gathers = 2 * (m * 2 * blocks * elements(block) + m * elements(root))
    scatters = 4 * (blocks * elements(block) + elements(root))
    return [m * (2 * blocks + 1), gathers, blocks + 1, f"{scatters / 1e6:.3f} MB", 0]


def right_memory(seed: int) -> list:
    """Of state by the text alone, of the peak by the page."""
    one = question("memory", seed)
    blocks, root, block = read_model(one.text)
    assert ": --dp ddp" in one.text[3]
    state = 4 * (elements(root) + blocks * elements(block))
    (run,) = one.runs
    return [state, state, 2 * state, f"{holds(run)['peak'] / 1e6:.2f} MB"]


def right_counts(seed: int) -> list:
    text = question("counts", seed).text
    m = int(re.search(r"(\d) microbatches", text[2])[1])
    assert "--dp hsdp --reshard weights --checkpointing full" in text[1]
    return [2 * m, 2 * m, 1, 1]


def right_ranking(seed: int) -> list:
    return [question("ranking", seed).count()[0].value.replace(" ", "")]


def right_crossing(seed: int) -> list:
    """At the speed that is counted a is 10 % slower than b, and at half of it more."""
    (found,) = question("crossing", seed).count()
    lines = re.findall(r"^[ab]  ([\d.]+) = ", "\n".join(found.notes), re.MULTILINE)
    a, b, a_below, b_below = map(float, lines)
    assert a / b == pytest.approx(1.1, abs=0.02) and a_below / b_below > a / b
    return [f"{found.value / 8 * 1.1:.3g} GB/s"]


def right_bubble(seed: int) -> list:
    text = question("bubble", seed).text[0]
    p, m = map(int, re.search(r"(\d) ranks, (\d+) microbatches, --schedule 1f1b", text).groups())
    return [f"{p - 1}/{m + p - 1}", min(p, m)]


def right_twice(seed: int) -> list:
    """By what the project predicts of both steps."""
    one = question("twice", seed)
    speed = float(re.search(r"(\d+) Gbit/s", one.text[5])[1])
    found = []
    for run in one.runs:
        traffic, peak = sends(run), holds(run)["peak"]
        compiled = replace(run, parallel=replace(run.parallel, compile=True))
        plan = forms_of_time.plan_of(compiled, forms_of_time.cluster(speed, 4))
        found.append((sent_bytes(traffic, run.parallel), peak, plan.seconds))
    return [f"{after / before:.3g} x" for before, after in zip(*found)]


ROUNDS = {  # form -> a seed, what a student should type, and what not
    "bytes": (0, right_bytes, [8, "1 MB", 8, "2 MB", 1, 77]),
    "memory": (2, right_memory, [1, 2, 3, 4]),
    "counts": (5, right_counts, [1, 3, 4, 0]),
    "ranking": (3, right_ranking, ["c e d b a"]),
    "crossing": (3, right_crossing, ["1 Mbit/s"]),
    "bubble": (1, right_bubble, ["1 %", 99]),
    "twice": (7, right_twice, [4, "5/2", "9x"]),
}


@pytest.mark.parametrize("form", [slow(f) if f == "bytes" else f for f in predict.FORMS])
def test_right_guesses_score_in_full_and_wrong_ones_do_not(form, record, monkeypatch):
    seed, right, wrong = ROUNDS[form]
    draw = predict.FORMS[form]
    one = draw(Random(seed))
    counted_once = replace(one, count=functools.cache(one.count))
    monkeypatch.setitem(predict.FORMS, form, functools.wraps(draw)(lambda _: counted_once))
    out = guess(form, *right(seed), seed=seed)
    assert "score 100%" in out and " wrong" not in out, out
    assert f"predict {form}, seed {seed}\n" in out
    if form == "bytes":
        assert "18 calls: 3 blocks, 517,632 bytes each" in out
    first, scored = recorded(record)
    assert (scored["scored"], scored["score"], first["guess"]) == (1, 1, 1)
    out = guess(form, *wrong, seed=seed)
    assert "score 0%" in out and f"seed {seed}, guess 2" in out, out
    again, scored = recorded(record)[2:]
    assert again["guess"] == 2 and scored["score"] == 0
    assert re.search(rf"{form} .* 1 first, 100%; 1 later, 0%", guess(None))


def test_a_term_that_is_missing_is_named():
    """Here the root's. What is 0, and was said to be 0, does not count."""
    text = question("bytes", 2).text
    assert "--dp ddp" in text[3]
    out = guess("bytes", 0, 0, 1, "690,176", seed=2)
    assert "all-gather" not in out.partition("recorded as")[2] and "score 50%" in out
    assert re.search(r"^all-reduce over replicate, bytes .* 0.7277  wrong$", out, re.MULTILINE)
    assert "1 call: root: embedding, last norm" in out
    assert "Yours could be the sum without line 1." in out


def test_terms_that_give_another_sum_are_an_error():
    with pytest.raises(ArithmeticError, match="the terms give 3, and 4 was counted"):
        forms.explained(4, [forms.Term(1, "one"), forms.Term(2, "two")])


def test_unclear_input_is_asked_again(capsys, record):
    out = guess("bubble", "twelve", "1/7", "", "2", seed=1)
    asked = capsys.readouterr().out
    for prompt in ("waiting (%, to 2% of the number itself): ", "forwards held: "):
        assert asked.count(prompt) == 2
    assert asked.count("is not understood: type") == 2 and "score 100%" in out
    assert "  understood as 14.3 %" in asked and "understood as 2" not in asked
    assert recorded(record)[0]["answers"] == {"waiting": "1/7", "forwards held": "2"}


def test_a_pipe_is_read_and_its_end_ends_without_a_record(record, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("1/7\n"))
    args = arguments("bubble", seed=1, answer=None)
    assert [*predict.predict(args)][-1] == "\nend of input: nothing is recorded"
    assert args.failed
    with pytest.raises(UserError, match="2 answers are wanted, 1 given: nothing is recorded"):
        guess("bubble", "1/7", seed=1)
    with pytest.raises(UserError, match="1 of --answer are left over: nothing is recorded"):
        guess("bubble", "1/7", 2, 3, seed=1)
    assert not record.exists()
    monkeypatch.setattr("sys.stdin", io.StringIO("1/7\n2\n"))
    assert "score 100%" in guess("bubble", seed=1, answer=None)


def test_a_student_at_a_terminal(monkeypatch, capsys):
    typed, prompts = iter(["x", "14.3 %", "2"]), []
    monkeypatch.setattr("builtins.input", lambda prompt: prompts.append(prompt) or next(typed))
    monkeypatch.setattr("sys.stdin", argparse.Namespace(isatty=lambda: True))
    out = guess("bubble", seed=1, answer=None)
    assert [prompt.split()[0] for prompt in prompts] == ["waiting", "waiting", "forwards"]
    assert "'x' is not understood" in capsys.readouterr().out
    assert out.index("recorded as") < out.index("counted  ratio") and "score 100%" in out


def test_a_guess_is_recorded_before_it_is_counted(record, monkeypatch):
    """A student who ends the command before the counted values come has guessed all the same."""

    def end():
        (entry,) = recorded(record)
        assert entry["answers"] == {"waiting": "1/7", "forwards held": "9"}
        raise KeyboardInterrupt

    draw = predict.FORMS["bubble"]
    monkeypatch.setitem(predict.FORMS, "bubble", lambda random: replace(draw(random), count=end))
    with pytest.raises(KeyboardInterrupt):
        guess("bubble", "1/7", 9, seed=1)
    monkeypatch.setitem(predict.FORMS, "bubble", draw)
    assert "guess 2" in guess("bubble", "1/7", 2, seed=1)


def test_a_line_that_is_no_entry_is_passed_over(record):
    guess("bubble", "1/7", 9, seed=1)
    record.write_text(record.read_text() + "cut off\n7\n")
    assert "guess 2" in guess("bubble", "1/7", 2, seed=1)
    assert "1 first, 50%; 1 later, 100%" in guess(None)


def test_a_class_gives_each_student_questions_that_a_teacher_can_repeat(record):
    ada = dict(key="2027", student=" Ada  Lovelace", seed=None)
    first = guess("bubble", 1, 1, **ada)
    second = guess("bubble", 1, 1, **ada)
    head = r"predict bubble, seed (\d+): question {} for ada lovelace, class 2027"
    seeds = [re.match(head.format(n), out)[1] for n, out in ((1, first), (2, second))]
    record.unlink()  # as on the teacher's machine
    for n, seed in enumerate(seeds, 1):
        out = guess("bubble", 1, 1, **ada | dict(student="ada lovelace"), attempt=n)
        assert re.match(head.format(n), out)[1] == seed
        again = f"--class 2027 --student 'ada lovelace' --attempt {n}; leave --attempt out"
        assert f"again with {again}" in out
    others = [guess("bubble", 1, 1, **ada | other) for other in
              (dict(student="bob"), dict(key="2028"))]  # fmt: skip
    others.append(guess("ranking", "abcde", **ada))
    seeds += [re.search(r"seed (\d+)", out)[1] for out in others]
    assert len(set(seeds)) == 5
    assert "guess 2" in guess("bubble", 1, 1, **ada, attempt=1)


def test_the_command(copy):
    command = copy / "labs/run.py", "predict"
    answers = "--answer", "1/7", "--answer", "2"
    out = succeed(*command, "bubble", "--seed", 1, *answers).out
    assert out.index("recorded as") < out.index("score 100%")
    assert "bubble  " in (listed := succeed(*command).out) and "1 first, 100%" in listed
    assert len((copy / "labs/work/.predictions").read_text().splitlines()) == 2
