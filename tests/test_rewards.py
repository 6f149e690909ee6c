"""rewards.py as its users run it: the same on any number of ranks, and what it refuses.

That its gradients are those of the formula on every split is test_exact.py's."""

import json
from types import SimpleNamespace

import pytest
import torch
from conftest import changed_copy, launch, metrics, refused, succeed
from test_chat import BYTES
from test_finetune import CONFIG, last_factors, same_run
from test_formats import our_model, stored
from test_train import as_flags, resumes

from checkpoint import write_checkpoint
from model import IGNORE
from rewards import Answers, Rewards


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """Flags of a short run: of a model some of whose answers end, and a reward of their text."""
    path = tmp_path_factory.mktemp("given")
    model = our_model(CONFIG, torch.float64, seed=5, factor=2, norms=(1, 1))
    with torch.no_grad():
        model.output.weight[BYTES.stop[0]] *= 4
    write_checkpoint(path / "base", CONFIG, stored(model), BYTES)
    lines = [json.dumps(dict(prompt=f"{i}?", truth=str(i))) for i in range(9)]
    (path / "prompts.jsonl").write_text("\n".join(lines))
    (path / "reward.py").write_text(
        "def reward(prompt, answer, truth):\n"
        "    assert prompt == truth + '?'\n"
        "    return len(answer) + sum(map(ord, answer)) % 7 / 7\n"
    )
    return dict(init=path / "base", data=path / "prompts.jsonl", reward=path / "reward.py", steps=4,
                batch=8, lr=1e-3, warmup=2, save_every=2, keep=0, eval_every=2, dtype="float64",
                seq_len=96, max_new_tokens=6)  # fmt: skip


def command(given: dict, out, **more) -> list:
    return ["rewards.py", *as_flags(given | dict(out=out) | more)]


@pytest.mark.parametrize("mesh", [dict(dp="fsdp"), dict(tp=2, dora=True), dict(cp=2)])
def test_a_run_on_two_ranks_is_the_same_run(given, tmp_path, mesh):
    """With FSDP a group is on both ranks. A resumed run ends the same in every bit."""
    more = dict(dora=True) if "dora" in mesh else {}
    succeed(*command(given, tmp_path / "one", **more))
    on_two = command(given, tmp_path / "two", **mesh, microbatch=1)
    out = succeed(*on_two, nproc=2).out
    same_run(tmp_path / "two", tmp_path / "one", step=4)
    names = {"reward", "mixed", "end", "length"}
    for ours, theirs in zip(metrics(tmp_path / "two"), metrics(tmp_path / "one")):
        for name in theirs.keys() & {*names, "val_reward"}:
            assert ours[name] == pytest.approx(theirs[name], rel=1e-12, abs=1e-12), name
        assert theirs.keys() >= names and ours["log_ratio"] < 1e-12
    assert "step 4: validation loss" in out and "val_reward" in metrics(tmp_path / "two")[-1]
    resumes(tmp_path / "two", 2, last_factors, *on_two, nproc=2)


WRONG = {  # flags, or a file in place of one that a flag names; and what is said
    "raises": (dict(reward="def reward(**given):\n    return 1 / 0"), "raised ZeroDivisionError"),
    "no number": (dict(reward="def reward(**given):\n    return float('nan')"), "returned nan"),
    "a string": (dict(reward="def reward(**given):\n    return 'good'"), "raised ValueError"),
    "nothing": (dict(reward=""), "has no function reward"),
    "no text": (dict(data='{"prompt": 3}'), '"prompt" is 3'),
    "another name": (dict(data='{"prompt": "Hi", "answer": "Ho"}'), "rename the field"),
    "no JSON": (dict(val_data="Hi"), 'give {"prompt": "..."}'),
    "no prompt": (dict(data=""), "has too few prompts"),
    "dropout": (dict(dropout=0.1), "leave it out"),
    "groups": (dict(group=3), "must be a multiple of --group"),
    "no room": (dict(max_new_tokens=99), "--max-new-tokens 99"),
    "both": (dict(all_weights=True, dora=True), "are for adapters"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_refused_in_one_line(given, tmp_path, name):
    more, says = dict(WRONG[name][0]), WRONG[name][1]
    for flag in more.keys() & {"reward", "data", "val_data"}:
        (path := tmp_path / f"bad.{flag}").write_text(more[flag])
        more[flag] = path
    refused(launch(*command(given, tmp_path / "out", **more), nproc=2 * ("reward" in more)), says)


def test_rank_0_rewards_all_answers(given, tmp_path):
    """So that a reward that is random, or reads a clock, does not give ranks other gradients."""
    body = "return int(os.environ['RANK'])"
    (tmp_path / "rank.py").write_text(f"import os\ndef reward(**given):\n    {body}\n")
    more = dict(reward=tmp_path / "rank.py", steps=2, dp="ddp", merge=True)
    assert "--chat" not in succeed(*command(given, tmp_path / "out", **more), nproc=2).out
    assert [row["reward"] for row in metrics(tmp_path / "out")] == [0.0, 0.0]


def test_an_answer_that_does_not_end_is_none():
    """And the end of another is a target, but no text of it. Models may have more ids than there
    are tokens, and draw them."""
    task, (stop, *_) = Rewards.__new__(Rewards), BYTES.stop
    task.job = SimpleNamespace(tokenizer=BYTES)
    answers = [[*b"7", stop], [*b"77", 9999]]
    assert [task.text_of(answer) for answer in answers] == ["7", ""]
    log_p, advantages = -torch.arange(6.0).view(2, 3), torch.tensor([0.5, -0.5])
    batch = Answers([[1], [1, 2]], answers, log_p, advantages, BYTES).batch([0, 1])
    assert batch.targets.tolist() == [[*b"7", stop, IGNORE, IGNORE], [IGNORE, *b"77", 9999]]
    assert batch.given[..., 0].tolist() == [[0.5, 0.5, 0.0, 0.0], [0.0, -0.5, -0.5, -0.5]]
    assert batch.given[..., 1].tolist() == [[0.0, -1.0, 0.0, 0.0], [0.0, -3.0, -4.0, -5.0]]
    assert batch.given[..., 2].tolist() == [[1.0, 0.0, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0]]


def test_a_cache_that_computes_something_else_is_found(given, tmp_path):
    edits = {"        self.layers[layer] = k, v": "        self.layers[layer] = k, 1.01 * v"}
    within = changed_copy(tmp_path / "copy", edits=edits)
    refused(launch(*within, *command(given, tmp_path / "out")), "between sampling and training")


def test_bench_step_times_the_sampling(given, tmp_path):
    _, *flags = command(given, tmp_path / "none", dp="ddp")
    out = succeed("bench.py", "step", "--lora", "rewards", *flags, "--repeats", 1, nproc=2).out
    assert "| sampling | " in out and "attention runs forward 1 time" in out
