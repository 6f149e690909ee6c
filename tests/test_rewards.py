"""rewards.py: a run on two ranks is that of one process, and loses no step to a kill.

Its loss and gradient are those of trl's GRPOTrainer; test_exact.py has gradients on every split."""

import json
import math
from collections import Counter
from dataclasses import asdict, replace
from functools import partial
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from conftest import (
    HAS_2_13,
    alone,
    changed_copy,
    launch,
    line_of_refusal,
    metrics,
    parsed_by,
    refused,
    slow,
    succeed,
    with_fault,
)
from test_chat import BYTES, write
from test_finetune import (  # noqa: F401
    CONFIG,
    SHORT,
    base,
    command_of,
    flags,
    last_factors,
    same_run,
    write_model,
)
from test_formats import our_model, stored
from test_train import resumes, same_losses

from checkpoint import load_pretrained
from files.conversion import write_checkpoint
from model import IGNORE
from models.family import families
from parallel import World
from plumbing.messages import UserError
from rewards import Rewarding, Rewards, advantages_of
from runs.answers import Answers, Prompts, prompts_of_evaluation, prompts_of_step
from runs.records import warn_about_changed_flags
from text.batch import Batch


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """Flags of a short run: of a model some of whose answers end, and a reward of their text."""
    path = tmp_path_factory.mktemp("given")
    write_model(path / "base", CONFIG)
    lines = [dict(prompt=f"{i}?", truth=str(i)) for i in range(9)]
    prompts = write(path / "prompts.jsonl", *lines)
    (path / "reward.py").write_text(
        "def reward(prompt, answer, truth):\n"
        "    assert prompt == truth + '?'\n"
        "    return len(answer) + sum(map(ord, answer)) % 7 / 7\n"
    )
    names = dict(init=path / "base", data=prompts, reward=path / "reward.py")
    return SHORT | names | dict(lr=1e-3, max_new_tokens=6)


command = partial(command_of, "rewards.py")
CHOOSES_ANEW = "self.replays = self.world.parallel.tp == 1", "self.replays = False"
SEVERAL = dict(updates=2, group=4, normalize="std", lr=1e-2)


@pytest.mark.parametrize(
    "mesh, more",
    [
        slow(dict(dp="fsdp"), {}),
        slow(dict(tp=2), dict(dora=True)),
        slow(dict(cp=2), {}),
        (dict(dp="fsdp"), SEVERAL | dict(kl=0.1)),
        slow(dict(dp="zero1"), SEVERAL | dict(all_weights=True)),
        slow(dict(cp=2), SEVERAL | dict(dora=True, kl=0)),
        slow(dict(dp="ddp", compile=True), SEVERAL | dict(kl=0.1)),
        slow(dict(tp=2), SEVERAL | dict(kl=0.1)),
        slow(dict(pp=2, schedule="gpipe"), SEVERAL | dict(kl=0.1)),
        slow(dict(dp="fsdp", offload=True, reshard="all"), SEVERAL | dict(all_weights=True)),
    ],
)
def test_a_run_on_two_ranks_is_the_same_run(given, tmp_path, mesh, more):
    """With FSDP a group is on both ranks. A resumed run ends the same in every bit."""
    succeed(*command(given, tmp_path / "one", **more))
    on_two = command(given, tmp_path / "two", **mesh, **more, microbatch=1)
    out = succeed(*on_two, nproc=2).out
    same_run(tmp_path / "two", tmp_path / "one", step=4)
    names = {"reward", "mixed", "end", "length", "mean_log_ratio", "clipped", "entropy"}
    if "kl" in more:
        names.add("kl")
    for ours, theirs in zip(metrics(tmp_path / "two"), metrics(tmp_path / "one")):
        for name in theirs.keys() & {*names, "val_reward"}:
            assert ours[name] == pytest.approx(theirs[name], rel=1e-12, abs=1e-12), name
        assert theirs.keys() >= names
        assert ours["log_ratio"] < 1e-12 or "updates" in more
    assert metrics(tmp_path / "one")[0]["tokens"] <= 8 * (2 + 6)  # an answer has six at most
    assert "step 4: validation loss" in out and "val_reward" in metrics(tmp_path / "two")[-1]
    resumes(tmp_path / "two", 2, last_factors, *on_two, nproc=2)


@pytest.mark.parametrize("when", [slow("rewarding"), "updating"])
def test_a_kill_loses_no_step_that_was_saved(given, tmp_path, when):
    """In the middle of step 3, whose answers are rewarded, or of which the first of two updates is
    done. The run that goes on ends in the bits of one that nobody has stopped."""
    more = SEVERAL | dict(save_every=1, eval_every=0)
    out = tmp_path / "out"
    succeed(*command(given, tmp_path / "whole", **more))
    edits = {}
    if when == "updating":
        line = "run.clip, world, step)\n"
        edits = {line: f"{line}                step == 3 and os.kill(os.getpid(), 9)\n"}
        edits["import math\n"] = "import math\nimport os\n"
    else:
        (tmp_path / "kills.py").write_text(
            f"{given['reward'].read_text()}\n"
            "import os\nright, calls = reward, []\n"
            "def reward(**given):\n    calls.append(1)\n"
            "    if len(calls) == 20:\n        os.kill(os.getppid(), 9)\n"
            "    return right(**given)\n"
        )
        more |= dict(reward=tmp_path / "kills.py")
    within = changed_copy(tmp_path / "copy", edits=edits, file="train")
    assert launch(*within, *command(given, out, **more)).code == -9
    assert [path.name for path in sorted(out.glob("step-*"))] == ["step-00000001", "step-00000002"]
    more |= dict(reward=given["reward"])
    resumed = succeed(*command(given, out, **more, resume=True))
    assert "resumed from" in resumed.out
    same_losses(metrics(out), metrics(tmp_path / "whole"))
    for name, weight in last_factors(tmp_path / "whole").items():
        assert torch.equal(weight, last_factors(out)[name]), name


def test_a_changed_reward_is_told_on_resume(given, tmp_path, capsys):
    """Once: the run goes on with the new one. The runs of before have no digest to compare."""
    reward = tmp_path / "reward.py"
    reward.write_text(given["reward"].read_text())
    more = dict(reward=reward, eval_every=0, save_every=1, steps=1, warmup=0)
    succeed(*command(given, tmp_path / "out", **more))
    says = f"warning: --reward {reward} has changed: answers get its new rewards"

    def warned(steps: int) -> int:
        again = command(given, tmp_path / "out", **more | dict(steps=steps, resume=True))
        result = succeed(*again, nproc=2)
        assert "step-0000000" in result.out and "digest" not in result.err
        return result.err.count(says)

    assert warned(2) == 0
    reward.write_text("def reward(**given):\n    return 1\n")
    assert [warned(3), warned(4)] == [1, 0]
    assert [row["reward"] == 1 for row in metrics(tmp_path / "out")] == [False, False, True, True]
    config = json.loads((tmp_path / "out/config.json").read_text())
    now = config["flags"] | config["facts"]
    before = {name: value for name, value in now.items() if name != "reward_digest"}
    warn_about_changed_flags(before, now, set())
    assert capsys.readouterr().err == ""


@pytest.mark.slow
@pytest.mark.parametrize(
    "backend, mesh",
    [
        ("aot_eager_decomp_partition", {}),
        ("inductor", {}),
        ("inductor", dict(dp="fsdp")),
        ("inductor", dict(tp=2)),
        ("inductor", dict(pp=2, schedule="gpipe", microbatch=1)),
    ],
)
def test_compiled_blocks_sample_what_is_trained(given, tmp_path, backend, mesh):
    """Steps of sampling are compiled, too. Evaluations are of other numbers of answers."""
    if backend == "inductor" and not HAS_2_13:
        pytest.skip("torch 2.11 has another dtype for a sum of its compiled attention in float64")
    succeed(*command(given, tmp_path / "eager"))
    by_backend = f'forward, backend="{backend}", dynamic'
    within = with_fault(tmp_path / "copy", "recompute", "forward, dynamic", by_backend)
    compiled = command(given, tmp_path / "compiled", compile=True, **mesh)
    succeed(*within, *compiled, nproc=2 if mesh else 0)
    same_run(tmp_path / "compiled", tmp_path / "eager", step=4)
    for ours, theirs in zip(metrics(tmp_path / "compiled"), metrics(tmp_path / "eager")):
        assert ours["reward"] == pytest.approx(theirs["reward"], rel=1e-12)
        assert ours["log_ratio"] < 1e-12


@pytest.fixture(scope="module")
def given_experts(given, tmp_path_factory):
    """The same flags for models with experts, by family."""
    found = {}
    latents = dict(n_shared=1, n_groups=2, top_groups=1, n_dense=1, dense_dim=40)
    latents |= dict(q_rank=16, kv_rank=16, rope_dim=4, value_dim=8)
    for family, of_family in (("mixtral", {}), ("deepseek_v3", latents)):
        sizes = dict(asdict(CONFIG), n_layers=3, tie_embeddings=False, **of_family)
        path = tmp_path_factory.mktemp(family) / "base"
        write_model(path, families()[family].config(**sizes), norms=(0.5, 2))
        found[family] = given | dict(init=path, max_new_tokens=9)
    return found


@pytest.mark.parametrize(
    "family, nproc, more",
    [
        ("mixtral", 2, dict(dp="fsdp", ep=2, all_weights=True, updates=2, group=4)),
        slow("deepseek_v3", 0, dict(all_weights=True, microbatch=4, checkpointing="full")),
        slow("mixtral", 2, dict(cp=2, microbatch=2, updates=2, group=4, targets="wq")),
        slow("mixtral", 2, dict(pp=2, microbatch=2, checkpointing="full", targets="wq")),
        slow(
            "deepseek_v3", 2, dict(pp=2, microbatch=2, checkpointing="selective", all_weights=True)
        ),
        slow("mixtral", 0, dict(compile=True, checkpointing="full", all_weights=True)),
    ],
)
def test_experts_of_sampling_are_those_of_training(given_experts, tmp_path, family, nproc, more):
    """Also where forward is computed again. In training routers are told to prefer other experts:
    without a replay they do, and the run is refused."""
    edits = {"experts = ranking.detach().topk(": "experts = wrong(self, ranking).topk("}
    edits["class Router(nn.Linear):"] = (
        "def wrong(layer, ranking):\n"
        "    return -ranking.detach() if layer.training else ranking.detach()\n\n\n"
        "class Router(nn.Linear):"
    )
    within = changed_copy(tmp_path / "copy", edits=edits, file="experts")
    # The check before a run would call such a router changed.
    equal = tmp_path / "copy/runs/setup.py"
    equal.write_text(equal.read_text().replace("    check_model(", "    0 and check_model("))
    given = given_experts[family]
    without_mesh = {name: more[name] for name in more.keys() - {"dp", "ep", "cp", "pp"}}
    succeed(*command(given, tmp_path / "one", **without_mesh))
    wrong = command(given, tmp_path / "two", **more)
    succeed(*within, *wrong, nproc=nproc)
    same_run(tmp_path / "two", tmp_path / "one", step=4)
    assert all(row["log_ratio"] < 1e-9 or "updates" in more for row in metrics(tmp_path / "two"))
    rewards = tmp_path / "copy/rewards.py"
    rewards.write_text(rewards.read_text().replace(*CHOOSES_ANEW))
    anew = command(given, tmp_path / "anew", **more)
    refused(launch(*within, *anew, nproc=nproc), "between sampling and training")


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3"])
@pytest.mark.parametrize(
    "mesh",
    [
        dict(ep=2, tp=2),
        dict(ep=4, tp=2),
        dict(ep=2, pp=2, schedule="gpipe", microbatch=2),
        dict(ep=4, cp=2),
    ],
)
def test_ranks_that_share_experts_sample_together(given_experts, tmp_path, family, mesh):
    """Though their answers end at different times. A dimension beside ep is no other group."""
    given = given_experts[family]
    model = load_pretrained(given["init"], torch.float64)
    with torch.no_grad():
        model.output.weight[BYTES.stop[0]] *= 2  # most answers end
    write_checkpoint(tmp_path / "base", model.config, stored(model), BYTES)
    given = given | dict(init=tmp_path / "base", all_weights=True, batch=4, group=2)
    given["max_new_tokens"] = 40
    succeed(*command(given, tmp_path / "one"))
    succeed(*command(given, tmp_path / "four", **mesh), nproc=4)
    same_run(tmp_path / "four", tmp_path / "one", step=4)
    assert any(row["end"] for row in metrics(tmp_path / "one"))


def test_a_router_that_chooses_by_itself_is_refused(given_experts, tmp_path):
    """As a student may write it: training could not replay what it has chosen."""
    best, chosen = "experts = self.best(ranking)", "experts = ranking.topk(self.top_k).indices"
    within = with_fault(tmp_path / "copy", "experts", best, chosen)
    given = command(given_experts["mixtral"], tmp_path / "out", all_weights=True)
    refused(launch(*within, *given, nproc=2), "Router chooses by itself: let it call self.best")


@pytest.mark.slow
def test_in_bfloat16_replayed_experts_agree_as_a_dense_model_does(given, tmp_path):
    """Chosen anew, rounding sends some tokens to other experts: that is said once, here of a single
    token already, and such a token weighs no more than --max-ratio."""
    sizes = dict(asdict(CONFIG), n_layers=4, dim=64, ffn_dim=96, tie_embeddings=False)
    mixture = families()["mixtral"].config(**sizes)
    for name, config in (("dense", replace(CONFIG, **sizes)), ("mixture", mixture)):
        model = our_model(config, seed=5, factor=8)
        write_checkpoint(tmp_path / name, config, stored(model), BYTES)
    more = dict(all_weights=True, dtype="bfloat16", max_new_tokens=64, batch=64, steps=1, warmup=1)
    more |= dict(eval_every=0, save_every=0)
    edits = {"WARN_ABOVE = 1e-3": "WARN_ABOVE = 0"}
    replayed = changed_copy(tmp_path / "replayed", edits=edits, file="rewards")
    edits |= dict([CHOOSES_ANEW])
    chosen_anew = changed_copy(tmp_path / "anew", edits=edits, file="rewards")
    largest = {}
    for name, model, within in (
        ("dense", "dense", replayed),
        ("mixture", "mixture", replayed),
        ("anew", "mixture", chosen_anew),
    ):
        ours = command(given, tmp_path / f"out-{name}", init=tmp_path / model, **more)
        result = succeed(*within, *ours)
        largest[name] = max(row["log_ratio"] for row in metrics(tmp_path / f"out-{name}"))
        warnings = result.err.count("of a step's tokens differs between sampling and training by")
        assert warnings == (name == "anew")
        print(name, largest[name], result.err)  # docs/measured.md has it
    assert largest["mixture"] < 3 * largest["dense"] < math.log(2) < largest["anew"]


@pytest.mark.parametrize("kl, corrected", [(None, False), (None, True), (0.3, False)])
def test_trl_computes_the_same_loss_of_rewards(kl, corrected):
    """And its gradient: clipped ratios; with --kl, the estimate of KL times the ratio; truncated
    importance weights, which trl has for answers of vLLM."""
    trl = pytest.importorskip("trl")
    torch.manual_seed(0)
    shape = 6, 9
    now, old, sampled, of_base = -3 + torch.randn(4, *shape, dtype=torch.float64) / 2
    now.requires_grad_(True)
    mask = torch.rand(shape) < 0.7
    advantages = torch.linspace(-1, 2, 6, dtype=torch.float64)
    if not corrected:
        sampled = old
    values = dict(
        old_log_p=old * mask,
        sampled_log_p=sampled * mask,
        advantage=advantages[:, None] * mask,
        base_log_p=of_base * mask,
    )
    task = Rewards.__new__(Rewards)
    task.run = Rewarding(reward=None, kl=kl)
    task.sums, task.tolerance = Counter(), math.inf
    task.largest_now = task.largest_by_rounding = 0.0
    targets = torch.where(mask, 1, IGNORE)
    loss = task.loss(-now * mask, Batch(targets, targets, None, 0, target_values=values))
    (gradient,) = torch.autograd.grad(loss, now)

    stub = MagicMock()
    stub.use_vllm = stub.vllm_importance_sampling_correction = corrected
    stub.aux_loss_enabled = False
    stub.off_policy_mask_threshold = stub.args.delta = None
    stub.top_entropy_quantile = 1.0
    stub.use_adaptive_entropy, stub.entropy_coef = False, 0.0
    stub.importance_sampling_level, stub.loss_type = "token", "dr_grpo"
    stub.beta, stub.args.use_bias_correction_kl = kl or 0.0, True
    stub.epsilon_low, stub.epsilon_high = 0.2, 0.28
    stub.max_completion_length = stub.current_gradient_accumulation_steps = 1
    stub._get_per_token_logps_and_entropies.return_value = now, torch.zeros(shape), None
    stub.accelerator.gather = lambda x: x
    inputs = dict(
        prompt_ids=targets,
        prompt_mask=mask,
        completion_ids=targets,
        completion_mask=mask,
        advantages=advantages,
        old_per_token_logps=old,
        ref_per_token_logps=of_base,
        importance_sampling_ratio=(old - sampled).exp().clamp(max=2),
    )
    theirs = trl.GRPOTrainer._compute_loss(stub, stub.model, inputs) * len(mask)
    (their_gradient,) = torch.autograd.grad(theirs, now)
    assert loss.item() == pytest.approx(theirs.item(), rel=1e-12)
    assert torch.allclose(gradient, their_gradient, rtol=1e-12, atol=1e-14)
    assert 0 < task.sums["clipped"] < task.sums["tokens"] == mask.sum()


def test_advantages():
    rewards = torch.tensor([[0, 0, 1, 3], [0.1] * 4, [1, 2, 3, math.nan]], dtype=torch.float64)
    advantages, is_mixed = advantages_of(rewards, "none")
    assert advantages.tolist() == [[-1, -1, 0, 2], [0] * 4, [0] * 4]
    assert is_mixed.tolist() == [True, False, False]
    normalized, _ = advantages_of(rewards, "std")
    assert normalized[0].tolist() == pytest.approx([-(0.5**0.5), -(0.5**0.5), 0, 2**0.5])
    assert not normalized[1:].any()
    # Rounded, the mean of equal rewards may differ from them.
    assert not advantages_of(torch.full((1, 7), 1 / 3, dtype=torch.float32), "std")[0].any()
    # The same sum in another order, or a square that is 0 in float64, is no difference.
    nearly_equal = torch.tensor([[0.1 + 0.2, 0.3], [0, 1e-200]], dtype=torch.float64)
    assert advantages_of(nearly_equal, "std")[0].abs().max() < 1e-9


REFUSED = {  # flags, and what is said
    "--clip-ratio 1 0.2": "the first distance is below 1",  # the logarithm of 0 is not finite
    "--updates 2 --group 8": "--batch 8 must be a multiple of --group x --updates 2",
    "--group 3": "--batch 8 must be a multiple of --group;",
    "--max-ratio 0.5": "--max-ratio is 1 or more",
    "--all-weights --kl 0.1": "--kl compares with the base",
    "--dropout 0.1": "leave them out",
    "--train-on-prompt": "changes nothing here: leave them out",
}


@pytest.mark.parametrize("typed", REFUSED)
def test_flags_that_do_not_fit_are_refused(typed):
    given = "--init=base", "--reward=reward.py", "--batch=8"
    run = parsed_by("rewards.py", *given, *typed.split())
    assert REFUSED[typed] in line_of_refusal(run.check)


def test_evaluations_draw_with_numbers_that_training_has_not():
    """The number of an answer seeds its random numbers, and those of training begin with 0."""
    prompts = ["2?", "3?", "5?"]
    job = SimpleNamespace(val_set=SimpleNamespace(prompts=prompts))
    task = SimpleNamespace(job=job, run=SimpleNamespace(eval_windows=9), world=alone())
    asked, numbers, limit = prompts_of_evaluation(task)
    assert (asked, [*numbers], limit) == (prompts, [-1, -2, -3], 3)


@pytest.mark.parametrize("first", [0, 426])
def test_a_group_is_of_one_prompt(first):
    """Also where a resume with another --seq-len begins between multiples of --group."""
    run = SimpleNamespace(group=8, seed=0)
    job = SimpleNamespace(train_set=SimpleNamespace(prompts=range(99)))
    asked = prompts_of_step(SimpleNamespace(job=job, run=run), range(first, first + 32))
    groups = {*zip(*[iter(asked)] * 8)}
    assert groups == {(prompt,) * 8 for prompt in asked} and len(groups) == 4


def test_a_checksum_covers_what_a_reward_is_given():
    assert len({Prompts([([1], {"truth": truth})]).checksum() for truth in "23"}) == 2


def test_an_answer_that_does_not_end_is_none():
    """And the end of another is a target, but no text of it. Models may have more ids than there
    are tokens, and draw them."""
    stop, *_ = BYTES.stop
    task = Rewards.__new__(Rewards)
    task.job = SimpleNamespace(tokenizer=BYTES)
    answers = [[*b"7", stop], [*b"77", 9999]]
    assert [task.text_of(answer) for answer in answers] == ["7", ""]
    prompts = [[1], [1, 2]]
    log_p = -torch.arange(6.0).view(2, 3)
    advantages = torch.tensor([0.5, -0.5])
    dataset = Answers(prompts, answers, log_p, advantages, [True, True], BYTES)
    batch = dataset.batch([0, 1])
    assert batch.targets.tolist() == [[*b"7", stop, IGNORE, IGNORE], [IGNORE, *b"77", 9999]]
    values = {name: tensor.tolist() for name, tensor in batch.target_values.items()}
    assert values["advantage"] == [[0.5, 0.5, 0.0, 0.0], [0.0, -0.5, -0.5, -0.5]]
    assert values["sampled_log_p"] == [[0.0, -1.0, 0.0, 0.0], [0.0, -3.0, -4.0, -5.0]]
    assert values["begins"] == [[1.0, 0.0, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0]]


@pytest.mark.parametrize("far, share, is_refused", [
    (4, 0.1, False), (5, 0.1, True), (0, 0.0, False), (1, 0.0, True),
])  # fmt: skip
def test_a_few_tokens_may_differ_between_sampling_and_training(far, share, is_refused, monkeypatch):
    """Where rounding may send a token to another expert; elsewhere none. On another rank as many
    are far, but all less."""
    task = Rewards.__new__(Rewards)
    task.world = alone(dtype=torch.float32)

    def of_two_ranks(world, values):
        return torch.tensor([values, [0, 0, *values[2:]]])

    monkeypatch.setattr(World, "all_gather_scalars", of_two_ranks)
    task.job = SimpleNamespace(model=torch.nn.Linear(1, 1))
    task.run = Rewarding(reward=None)
    task.measured = task.seconds = {}
    task.sums = Counter()
    task.largest_now = task.largest_by_rounding = 0.0
    task.tolerance = 0.01
    task.share_may_be_far = share
    task.only_warns = False
    sampled_log_p = torch.zeros(1, 45)
    sampled_log_p[0, :far] = 0.05
    values = dict(sampled_log_p=sampled_log_p, advantage=torch.ones(1, 45))
    tokens = torch.ones(1, 45, dtype=torch.int64)
    task.loss(torch.zeros(1, 45), Batch(tokens, tokens, None, 0, target_values=values))
    if is_refused:
        with pytest.raises(
            UserError, match=r"between sampling and training by more than 0.01, at most by 0\.05"
        ):
            task.finish_measures(None)
    else:
        assert task.finish_measures(None)["log_ratio"] == pytest.approx(0.05 if far else 0)


def test_a_cache_that_computes_something_else_is_found(given, tmp_path):
    right, wrong = "self.whole.slots, v)", "self.whole.slots, 1.01 * v)"
    within = with_fault(tmp_path / "copy", "kv_cache", right, wrong)
    refused(launch(*within, *command(given, tmp_path / "out")), "between sampling and training")
