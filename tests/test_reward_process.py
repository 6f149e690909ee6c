"""A user's reward is called as documented, and whatever it does wrong ends the run in one line.

What was trained until then is saved. The same is true of what is wrong of prompts and flags."""

# ruff: noqa: F811
import json
import math
import re
import runpy

import pytest
from conftest import (
    ROOT,
    changed_copy,
    launch,
    metrics,
    refused,
    succeed,
)
from test_endings import gone_in_time
from test_finetune import CONFIG, base, flags, last_factors, same_run  # noqa: F401
from test_rewards import command, given  # noqa: F401
from test_train import same_losses

three_rewards = runpy.run_path(str(ROOT / "docs/three_rewards.py"))
REWARDS = {  # a file, and flags
    "each": ("def reward(prompt, answer, truth):\n    return value(answer)\n", {}),
    "by three": ("def reward(prompt, answer, truth):\n    return value(answer)\n",
                 dict(reward_workers=3)),
    "all": ("import torch\ndef rewards(prompts, answers, truth):\n"
            "    assert prompts == [f'{t}?' for t in truth]\n"
            "    return torch.tensor([value(answer) for answer in answers]).double()\n", {}),
    "in parts": ("def reward(prompt, answer, **fields):\n"
                 "    whole = len(answer) // 4\n"
                 "    return dict(length=whole, rest=value(answer) - whole)\n", {}),
}  # fmt: skip


def test_rewards_may_be_given_in_several_ways(given, tmp_path):
    """By one function call for each answer, by several processes, by one call for all, and in parts
    that are recorded."""
    runs = {}
    short = dict(steps=2, eval_every=0, save_every=0)
    for name, (body, more) in REWARDS.items():
        path = tmp_path / f"{name}.py"
        value = "def value(text):\n    return len(text) + sum(map(ord, text)) % 8 / 8\n"
        path.write_text(f"import sys\nprint('noise', file=sys.stderr)\n{value}{body}")
        out = tmp_path / name
        result = succeed(*command(given, out, reward=path, **short, **more))
        assert result.err.count("noise") == more.get("reward_workers", 1)
        runs[name] = metrics(out)
    for name, rows in runs.items():
        same_losses(rows, runs["each"])
        assert [row["reward"] for row in rows] == [row["reward"] for row in runs["each"]], name
    for row in runs["in parts"]:
        assert row["reward"] == pytest.approx(row["reward_length"] + row["reward_rest"])


@pytest.mark.parametrize("answer, truth, parts", [
    ("<think>6 x 12</think> #### 72", "6 x 12 = 72 #### 72", (1, 0.2, 0.1)),
    ("It is $1,072.50.", "#### 1072.5", (1, 0, 0.1)),
    ("72 #### 71", "72", (0, 0, 0)),
    ("<think></think> 72", "#### 72", (1, 0, 0.1)),
    ("<think>a<think>b</think> 72", "#### 72", (1, 0, 0.1)),
    ("<think>a</think><think>b</think> 72", "#### 72", (1, 0, 0.1)),
    ("<think>a</think>", "#### 72", (0, 0, 0)),
    ("", "#### 72", (0, 0, 0)),
    ("x" * 798 + "72", "-72", (0, 0, 0)),
    ("x" * 797 + "-72", "-72", (1, 0, 0.05)),
])  # fmt: skip
def test_rewards_to_copy(answer, truth, parts):
    given = three_rewards["reward"]("?", answer, truth, more=1)
    assert tuple(given.values()) == pytest.approx(parts)


def test_groups_with_bad_rewards_are_left_out(given, tmp_path):
    """And counted."""
    (tmp_path / "some.py").write_text(
        f"{given['reward'].read_text()}\nright = reward\n"
        "def reward(prompt, answer, truth):\n"
        "    if truth == '0':\n        return None\n"
        "    assert truth != '1'\n    return right(prompt, answer, truth)\n"
    )
    few = tmp_path / "few.jsonl"
    few.write_text("\n".join(given["data"].read_text().splitlines()[:4]))
    more = dict(data=few, val_data=few, reward=tmp_path / "some.py", group=8, batch=32)
    succeed(*command(given, tmp_path / "out", **more, skip_bad=True), nproc=2)
    rows = metrics(tmp_path / "out")
    assert {row["skipped"] for row in rows} == {0.5}
    assert all(math.isfinite(row["reward"] + row["grad_norm"]) for row in rows)
    assert max(row["grad_norm"] for row in rows) > 0
    assert "val_reward" in rows[1]
    refused(launch(*command(given, tmp_path / "whole", **more)), "some.py: reward('")


def test_an_update_without_rewards_is_left_out(given, tmp_path):
    """Of a step's two groups one has rewards, and with it the only update."""
    (tmp_path / "some.py").write_text(
        f"{given['reward'].read_text()}\nright, calls = reward, []\n"
        "def reward(**given):\n    calls.append(1)\n"
        "    return right(**given) if len(calls) % 8 in (5, 6, 7, 0) else None\n"
    )
    more = dict(reward=tmp_path / "some.py", skip_bad=True, group=4, eval_every=0, lr=1e-2)
    for updates in (1, 2):
        out = tmp_path / f"out-{updates}"
        succeed(*command(given, out, **more, updates=updates), nproc=2)
    same_losses(metrics(tmp_path / "out-2"), metrics(tmp_path / "out-1"))
    assert {row["skipped"] for row in metrics(tmp_path / "out-2")} == {0.5}


WRONG = {  # flags, or a file in place of one that a flag names; and what is said
    "raises": (dict(reward="def reward(**given):\n    return 1 / 0"), "raised ZeroDivisionError"),
    "workers": (
        dict(reward="def rewards(**given):\n    return [1]", reward_workers=2),
        "which is called once, by one worker",
    ),
    "all bad": (
        dict(reward="def reward(**given):\n    return None", skip_bad=True, eval_every=0),
        "no group of the step has all its rewards",
    ),
    "all held-out": (
        dict(
            val_data='{"prompt": "v", "truth": ""}',
            reward="def reward(truth, **given):\n    return 1 if truth else None",
            skip_bad=True,
        ),
        "no answer to a held-out prompt has a reward",
    ),
    "answers": (dict(data='{"prompt": "Hi", "answers": "Ho"}'), "rename the field"),
    "nothing": (dict(reward=""), "has no function reward"),
    "no fields": (
        dict(  # of nine lines not all are held out, whatever their file is called
            reward="def reward(prompt, answer):\n    return 1",
            data='{"prompt": "a", "x": 1}\n' * 9,
        ),
        "write reward(prompt, answer, **fields)",
    ),
    "no text": (dict(data='{"prompt": 3}'), '"prompt" is 3'),
    "another name": (dict(data='{"prompt": "Hi", "answer": "Ho"}'), "rename the field"),
    "no JSON": (dict(val_data="Hi"), 'give {"prompt": "..."}'),
    "no prompt": (dict(data=""), "has too few prompts"),
    "no room": (dict(max_new_tokens=99), "--max-new-tokens 99 exceed --seq-len 96"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_refused_in_one_line(given, tmp_path, name):
    wrong, says = WRONG[name]
    more = dict(wrong)
    for flag in more.keys() & {"reward", "data", "val_data"}:
        path = tmp_path / f"bad.{flag}"
        path.write_text(more[flag])
        more[flag] = path
    nproc = 2 if "reward" in more else 0
    result = launch(*command(given, tmp_path / "out", **more), nproc=nproc)
    refused(result, says)


def test_a_missing_file_of_a_reward_is_named(given, tmp_path):
    result = launch(*command(given, tmp_path / "out", reward=tmp_path / "none.py"))
    refused(result, "none.py: there is no such file")


def test_prompts_reach_a_terminal_without_what_it_would_obey(given, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text(
        "\n".join(json.dumps(dict(prompt=f"{i}\x1b[2J\x07", truth="")) for i in range(9))
    )
    (tmp_path / "one.py").write_text("def reward(**given):\n    return 1\n")
    more = dict(data=path, reward=tmp_path / "one.py", steps=1, warmup=1)
    out = succeed(*command(given, tmp_path / "out", **more)).out
    assert "\\x1b[2J\\x07" in out
    assert "\x1b" not in out and "\x07" not in out


def test_rank_0_rewards_all_answers(given, tmp_path):
    """So that a reward that is random, or reads a clock, does not give ranks other gradients."""
    body = "return int(os.environ['RANK'])"
    (tmp_path / "rank.py").write_text(f"import os\ndef reward(**given):\n    {body}\n")
    more = dict(reward=tmp_path / "rank.py", steps=2, dp="ddp", merge=True)
    out = succeed(*command(given, tmp_path / "out", **more), nproc=2).out
    assert "--chat" not in out and f"curves:     python report.py {tmp_path / 'out'}" in out
    assert [row["reward"] for row in metrics(tmp_path / "out")] == [0.0, 0.0]


ENDINGS = {  # of a process by a reward, and what is said
    "sys.exit(0)": "raised SystemExit(0)",
    "raise KeyboardInterrupt": "raised KeyboardInterrupt",
    "os._exit(0)": "ended its process with exit code 0",
    "os.kill(os.getpid(), 11)": "ended its process with SIGSEGV",
}


@pytest.mark.parametrize("end, nproc, eval_every", [*zip(ENDINGS, (0, 2, 2, 0), (0, 0, 2, 2))])
def test_a_reward_that_ends_its_process_ends_no_other(given, tmp_path, end, nproc, eval_every):
    """The run names the file, the prompt and the answer, and saves what it has trained."""
    calls = 17  # the first after two steps
    if eval_every:
        calls += 11  # one of the second evaluation: they have nine calls, or ten on two ranks
    (tmp_path / "ends.py").write_text(
        "import os, sys\ncalls = []\n"
        "def reward(**given):\n    calls.append(1)\n"
        f"    if len(calls) == {calls}:\n        {end}\n    return len(calls)\n"
    )
    more = dict(reward=tmp_path / "ends.py", save_every=0, eval_every=eval_every)
    out = tmp_path / "out"
    result = launch(*command(given, out, **more), nproc=nproc)
    refused(result, "ends.py: reward('", ENDINGS[end])
    assert metrics(out)[-1]["step"] == 2
    assert (out / "step-00000002").is_dir()


def test_a_reward_may_do_anything_to_its_process(given, tmp_path):
    """A run with it is the same run. Nothing of it is left at the end."""
    (tmp_path / "wild.py").write_text(
        "import os, random, signal, sys, torch\n"
        f"sys.path.insert(0, {str(given['reward'].parent)!r})\n"
        "from reward import reward as right\n"
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\n"
        "def reward(**given):\n"
        "    os.chdir('/')\n    torch.set_grad_enabled(False)\n"
        "    torch.set_default_dtype(torch.float16)\n    torch.manual_seed(0)\n"
        "    signal.signal(signal.SIGALRM, signal.SIG_IGN)\n    signal.alarm(1)\n"
        "    assert sys.stdin.read() == ''\n    print('rewarded')\n    os.environ.clear()\n"
        "    return right(**given)\n"
    )
    succeed(*command(given, tmp_path / "one"))
    wild = succeed(*command(given, tmp_path / "two", reward=tmp_path / "wild.py"))
    assert "rewarded" in wild.out
    same_run(tmp_path / "two", tmp_path / "one", step=4)
    assert gone_in_time(int((tmp_path / "pid").read_text()))


def test_slow_rewards_are_waited_for(given, tmp_path):
    """For longer than a collective waits. Meanwhile rank 0 says which rank computes them."""
    (tmp_path / "slow.py").write_text(
        "import time\ndef reward(**given):\n    time.sleep(1.2)\n    return 1\n"
    )
    edits = {"COLLECTIVE_TIMEOUT = timedelta(minutes=10)": "COLLECTIVE_TIMEOUT = timedelta(0, 5)"}
    within = changed_copy(tmp_path / "copy", edits=edits, file="joining")
    stuck = tmp_path / "copy/plumbing/stuck.py"
    stuck.write_text(stuck.read_text().replace("STUCK_AFTER = 60", "STUCK_AFTER = 1"))
    more = dict(reward=tmp_path / "slow.py", steps=1, eval_every=0, warmup=1)
    result = succeed(*within, *command(given, tmp_path / "out", **more), nproc=2)
    assert "rewarding: " in result.err
    says = "rank 0 computing at runs/reward_process.py:\\d+; rank 1 waiting at rewards.py:"
    assert re.search(says, result.err), result.err
