"""runs/reward_process.py: only a reward's own process replies to the run, and none outlives it.

A reward may return any number, and start any process."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, Forks, slow, wait_for_lines
from test_endings import gone_in_time
from test_finetune import base  # noqa: F401 (a fixture)
from test_rewards import command, given  # noqa: F401 (a fixture)

from runs.reward_process import RewardProcesses

RECORD = dict(prompt="1+1", truth="2" * 100_000)
IMPORTS = "import builtins, json, os, re, subprocess, sys, time\n"


def write_reward(directory: Path, body: str) -> Path:
    path = directory / "reward.py"
    lines = body.replace("\n", "\n    ")
    path.write_text(f"{IMPORTS}def reward(prompt, answer, truth):\n    {lines}\n")
    return path


ENDS_A_FORK = """
child = os.fork()
if not child:
    time.sleep(60)
os.kill(child, 15)
return os.wait()[1]
"""
ASKS_A_POOL = """
from multiprocessing import Pool
with Pool(2) as pool:
    return sum(pool.map(abs, [1, -5]))
"""
RETURNED = {  # what a reward does, and the number that the run takes
    "import numpy\nreturn numpy.float32(0.5)": 0.5,
    "import torch\nreturn torch.tensor([2.5])": 2.5,
    "return type('Int', (int,), {'__repr__': lambda self: 'seven'})(7)": 7,
    "return len(truth)": 100_000,
    "print('x' * 2**20, file=sys.stderr)\nreturn 3": 3,
    "builtins.print = None\nreturn 4": 4,
    "child = os.fork()\nif child: os.waitpid(child, 0)\nreturn 5 if child else 100": 5,
    ENDS_A_FORK: 15,
    ASKS_A_POOL: 6,
}


@pytest.mark.parametrize("body", RETURNED)
def test_a_reward_may_return_any_number(tmp_path, body):
    """And only its own process replies. The reply of a fork would be taken for the next one."""
    process = RewardProcesses(write_reward(tmp_path, body))
    for _ in range(2):
        replies = process.replies([RECORD] * 2, ["2", "3"])
        assert [*replies] == [dict(reward=RETURNED[body], parts={})] * 2


ENDS = {  # what a reward does, and what the run says of it
    "if os.fork(): os._exit(3)\ntime.sleep(60)": "ended its process with exit code 3",
    "if os.fork(): sys.exit()\ntime.sleep(60)": "raised SystemExit()",
}
NO_REWARD = {
    "return float('nan')": "returned nan, which is no finite number",
    "return '1'": "returned '1', which is no finite number",
    "return True": "returned True, which is no number: write float(...)",
    "return dict(a=1, b=None)": "returned None as 'b', which is no finite number",
    "return dict(a=1e308, b=1e308)":
        "returned {'a': 1e+308, 'b': 1e+308}, whose sum is no finite number",
    "return {'3': 1, 3: 1}": "returned 3, which is no name of a part",
}  # fmt: skip


@pytest.mark.parametrize("body", [*ENDS, *NO_REWARD])
def test_a_failure_is_told_at_once(tmp_path, body):
    """And whether the process has ended by it."""
    process = RewardProcesses(write_reward(tmp_path, body))
    told = dict(failed=ENDS[body], ended=True) if body in ENDS else dict(failed=NO_REWARD[body])
    assert [*process.replies([RECORD], ["2"])] == [told]


@pytest.mark.parametrize("values, problem", [
    ("{0: 1, 1: 1}", "TypeError('no list of rewards: {0: 1, 1: 1}')"),
    ("[1]", "ValueError('1 rewards for 2 answers')"),
])  # fmt: skip
def test_what_is_no_list_of_rewards_is_told(tmp_path, values, problem):
    path = tmp_path / "reward.py"
    path.write_text(f"def rewards(**given):\n    return {values}\n")
    replies = RewardProcesses(path).replies([RECORD] * 2, ["2", "3"])
    assert [*replies] == [dict(failed=f"raised {problem}")] * 2


STAYS = {  # rewards that would outlive the run; their processes write so many ids to a file
    "a regular expression": (1, "re.match('(a+)+$', 'a' * 60 + 'b')"),
    "a child": (
        2,
        "subprocess.Popen(['sh', '-c', f'echo $$ >> {truth}; sleep 60'])\ntime.sleep(60)",
    ),
    "a fork": (3, "os.fork()\nprint(os.getpid(), file=open(truth, 'a'))\ntime.sleep(60)"),
}
ASKS = """
import os, sys
from pathlib import Path
from runs.reward_process import RewardProcesses

_, reward, ids, written, killed_by = sys.argv
records = [dict(prompt="", truth=ids)] + [dict(prompt=" " * 10**6)] * 2


def all_run() -> bool:
    return Path(ids).read_text().count("\\n") == int(written)


replies = RewardProcesses(Path(reward)).replies(records, [""] * 3, all_run)
assert next(replies) == {}
if int(killed_by):
    os.kill(os.getpid(), int(killed_by))
"""


@pytest.mark.parametrize("killed_by", [slow(0), 9])
@pytest.mark.parametrize("name", STAYS)
def test_nothing_outlives_the_run(tmp_path, name, killed_by):
    """And the run does not wait until a reward can take the next answers, which fill the pipe."""
    ids = tmp_path / "ids"
    ids.touch()
    written, stays = STAYS[name]
    body = f"print(os.getpid(), file=open(truth, 'a'))\n{stays}"
    path = write_reward(tmp_path, body)
    command = [sys.executable, "-c", ASKS, path, ids, written, killed_by]
    assert subprocess.run([*map(str, command)], cwd=ROOT, timeout=30).returncode == -killed_by
    for process in set(ids.read_text().split()):
        assert gone_in_time(int(process))


@pytest.mark.parametrize("told", [slow([0, 1]), [1]])
def test_a_signal_does_not_wait_for_a_reward(given, tmp_path, told):  # noqa: F811
    """The run saves what it has trained, although a reward may take longer than torchrun waits. The
    signal may come to a rank that only waits for the rewards."""
    sleeps = tmp_path / "sleeps"
    (tmp_path / "slow.py").write_text(
        "import time\ncalls = []\n"
        "def reward(**given):\n    calls.append(1)\n"
        f"    if len(calls) > 16:\n        print(file=open({str(sleeps)!r}, 'a'))\n"
        "        time.sleep(300)\n    return len(calls)\n"
    )
    out = tmp_path / "out"
    more = dict(reward=tmp_path / "slow.py", save_every=0, eval_every=0)
    run = Forks(*command(given, out, **more), nproc=2)
    wait_for_lines(sleeps, 1)
    for rank in told:
        os.kill(run.ranks[rank], signal.SIGTERM)
    result = run.finish()
    assert "stopped at step 2; the same command with --resume goes on" in result.out
    assert set(result.codes) == {0} and (out / "step-00000002").is_dir()
