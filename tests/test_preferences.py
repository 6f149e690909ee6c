"""preferences.py and rewards.py: runs of them, and what rewards.py reads."""

import json
import math
import re
from collections import Counter
from dataclasses import asdict
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from conftest import (
    alone,
    changed_copy,
    hugging_face_model,
    launch,
    metrics,
    refused,
    slow,
    succeed,
)
from exact import GROUPED
from plain import effective_weights, plain_model
from test_chat import BYTES
from test_endings import gone_in_time
from test_finetune import CONFIG, base, flags, last_factors, same_run  # noqa: F401
from test_formats import our_model, stored
from test_model import to_hugging_face
from test_pairs import PAIRS, written
from test_train import as_flags, resumes, same_losses
from workers.train_cases import BETA, JobOfTask, packed_pairs

from files.conversion import write_checkpoint
from model import IGNORE, Llama, LlamaConfig
from models.family import families
from plumbing.messages import UserError
from preferences import Preferences, Preferring
from rewards import Rewarding, Rewards, advantages_of
from runs.answers import Answers
from runs.scores import evenly_spaced
from text.batch import Batch
from text.order import Order, Steps, window_of
from text.packing import Packed


def test_a_run_begins_at_log_2_and_resumes(tmp_path, base):  # noqa: F811
    out = tmp_path / "out"
    more = dict(save_every=2, eval_every=2, microbatch=2)
    given = flags(base, written(tmp_path, PAIRS), out, **more)
    result = succeed("preferences.py", *given, nproc=2)
    rows = metrics(out)
    first, last = rows[0], rows[3]
    assert first["loss"] == pytest.approx(math.log(2), rel=1e-12)
    assert first["accuracy"] == 0
    for name in ("accuracy", "margin", "chosen", "rejected"):
        assert name in first
        assert f"val_{name}" in rows[1]
    assert "bits_per_byte" not in first
    assert last["loss"] < first["loss"]
    shown = f"validation loss {last['val_loss']:.4f}, {last['val_accuracy']:.4f} accur"
    assert shown in result.out
    resumes(out, 2, last_factors, "preferences.py", *given, nproc=2)


@pytest.fixture(scope="module")
def unsplit(tmp_path_factory, base):  # noqa: F811
    """The flags of a run of all weights, and the losses of one process."""
    path = tmp_path_factory.mktemp("unsplit")
    data = written(path, PAIRS)
    out = path / "out"
    given = flags(base, data, out, save_every=2, all_weights=True)
    succeed("preferences.py", *given)
    losses = [row["loss"] for row in metrics(out)]
    return given, losses


@pytest.mark.parametrize("split", [
    "--dp ddp",
    "--dp zero1",
    "--dp fsdp --eval-every 2",
    "--pp 2 --eval-every 2",
    slow("--dp fsdp --reshard none"),
    slow("--dp fsdp --reshard all --microbatch 1"),
    slow("--dp hsdp --shard 2"),
    slow("--dp hsdp --shard 1"),
    slow("--dp fsdp --offload"),
    slow("--dp fsdp --cp 2"),
    slow("--tp 2"),
    slow("--dp fsdp --async-save --keep-best --eval-every 2"),
])  # fmt: skip
def test_all_weights_are_trained_beside_the_base_as_it_was(tmp_path, unsplit, split):
    """Under every strategy, with the Saver; a resumed run, too, has its rewards relative to --init.
    The base's forward passes leave FSDP's weights unsharded before step 1."""
    out = tmp_path / "out"
    given, losses = unsplit
    given = [*given, *split.split(), "--out", out]
    succeed("preferences.py", *given, nproc=2)
    ours = [row["loss"] for row in metrics(out)]
    assert losses[0] == pytest.approx(math.log(2), rel=1e-12)
    assert losses[3] < losses[0]
    assert ours == pytest.approx(losses, rel=1e-12)
    resumes(out, 2, lambda out: {}, "preferences.py", *given, nproc=2)


def test_the_base_is_computed_for_the_rows_that_are_read(monkeypatch):
    """And for the held-out rows of evaluations; all other rows have none."""
    computed = []

    def log_p_of(task, dataset, rows):
        computed.append((dataset, [*rows]))
        return torch.zeros(len(dataset), dataset.seq_len)

    monkeypatch.setattr(Preferences, "base_log_p", log_p_of)
    train_set = packed_pairs()
    val_set = packed_pairs()
    run = Preferring(all_weights=True, eval_windows=3)
    job = JobOfTask(Llama(CONFIG), train_set, val_set)
    task = Preferences(run, job, None, None, None)
    order = Order(batch=2, seq_len=24, seed=0)
    task.begin(Steps(done=0, last=2, skipped=(), order=order))
    n = len(train_set)
    read = {window_of(i, n, seed=0) for i in range(4)}
    assert n > len(read)
    evaluated = evenly_spaced(val_set, 3)
    assert computed == [(train_set, sorted(read)), (val_set, evaluated)]


def test_adapters_do_not_continue_all_weights(tmp_path, unsplit):
    given = [*unsplit[0], "--out", tmp_path / "out"]
    succeed("preferences.py", *given)
    given.remove("--all-weights")
    refused(launch("preferences.py", *given, "--resume"), "resume it with --all-weights")


def test_bench_step_knows_the_second_forward(tmp_path, base):  # noqa: F811
    """Collectives are counted as predicted."""
    path = written(tmp_path, PAIRS)
    more = dict(microbatch=4, dtype="float32", dp="fsdp")
    given = flags(base, path, tmp_path / "none", **more)
    given = "--lora", "preferences", *given, "--repeats", 1
    out = succeed("bench.py", "step", *given, nproc=2).out
    assert "| reference | " in out
    assert "attention runs forward 1 time" in out
    collectives = []
    for line in out.splitlines():
        if "rank sends " in line:
            _, sent, *_ = line.split("each rank sends ")
            found = re.findall(r"(\d+) ([a-z-]+) over", sent)
            collectives.append(sorted(found))
    predicted, counted = collectives
    assert predicted == counted
    assert counted != []


@pytest.mark.parametrize("flag, says", [
    ("--dropout=0.1", "leave them out"),
    ("--train-on-prompt", "leave them out"),
    ("--all-weights --dora", "are for adapters"),
])  # fmt: skip
def test_what_would_spoil_rewards_is_refused(tmp_path, flag, says):
    words = flag.split()
    result = launch("preferences.py", "--init", tmp_path, *words)
    name, _, _ = words[0].partition("=")
    refused(result, name, says)


def test_trl_computes_the_same(tmp_path, monkeypatch):
    """DPOTrainer on the merged weights, by its own tokenization; its numbers are in float32."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    trl = pytest.importorskip("trl", reason="trl's DPOTrainer is not installed here")
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    lora = dict(rank=3, alpha=5)
    config = LlamaConfig(**GROUPED)
    model = plain_model(GROUPED, lora)
    old = packed_pairs()
    samples = []
    for ids, on in old.samples:
        samples.append(([*ids, 100], [*on, True]))  # the end token
    for chosen, rejected in zip(samples[::2], samples[1::2]):  # one prompt
        prompt = chosen[1].index(True)
        rejected[0][:prompt] = chosen[0][:prompt]
    data = Packed(samples, 26, old.tokenizer, together=2)
    job = SimpleNamespace(model=model)
    work = SimpleNamespace(microbatch=3)
    task = Preferences(Preferring(beta=BETA), job, None, work, None)
    rows = [*range(len(data))]
    batch = task.with_base(data.batch(rows))
    losses = []
    for part in batch.microbatches(3):
        output = model(*part.inputs, documents=part.documents)
        losses.append(task.loss(output, part))
    loss = sum(losses) / task.count(batch)

    ids = {f"w{i}": i for i in range(101)}
    words = Tokenizer(models.WordLevel(ids, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w100", pad_token="w99")

    def theirs(with_adapters: bool) -> torch.nn.Module:
        weights = effective_weights(model, lora, with_adapters)
        llama = hugging_face_model(config).double()
        llama.load_state_dict(to_hugging_face(config, weights))
        return llama

    def text(ids: list[int]) -> str:
        return " ".join(f"w{i}" for i in ids)

    rows = []
    for (chosen, on), (rejected, _) in zip(samples[::2], samples[1::2]):
        at = on.index(True)
        row = {}
        row["prompt"] = f"{text(chosen[:at])} "
        row["chosen"] = text(chosen[at:-1])
        row["rejected"] = text(rejected[at:-1])
        rows.append(row)
    config_of_trainer = trl.DPOConfig(
        output_dir=str(tmp_path),
        use_cpu=True,
        report_to=[],
        beta=BETA,
        max_length=None,
        per_device_train_batch_size=len(rows),
        bf16=False,
        gradient_checkpointing=False,
    )
    trainer = trl.DPOTrainer(
        model=theirs(True),
        ref_model=theirs(False),
        args=config_of_trainer,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
    )
    trainer.model.double()
    trainer.ref_model.double()
    given = trainer.data_collator([trainer.train_dataset[i] for i in range(len(rows))])
    their_loss = trainer._compute_loss(trainer.model, given, False)
    assert loss.item() == pytest.approx(their_loss.item(), rel=1e-6)


# ------------------------------------------------------------------------------------ rewards.py
# That its gradients are those of the formula on every split is test_exact.py's.


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
    return dict(
        init=path / "base",
        data=path / "prompts.jsonl",
        reward=path / "reward.py",
        steps=4,
        batch=8,
        lr=1e-3,
        warmup=2,
        save_every=2,
        keep=0,
        eval_every=2,
        dtype="float64",
        seq_len=96,
        max_new_tokens=6,
    )


def command(given: dict, out, **more) -> list:
    return ["rewards.py", *as_flags(given | dict(out=out) | more)]


SEVERAL = dict(updates=2, group=4, normalize="std", lr=1e-2)


@pytest.mark.parametrize(
    "mesh, more",
    [
        slow(dict(dp="fsdp"), {}),
        (dict(tp=2), dict(dora=True)),
        (dict(cp=2), {}),
        (dict(dp="fsdp"), SEVERAL | dict(kl=0.1)),
        (dict(dp="zero1"), SEVERAL | dict(all_weights=True)),
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


@pytest.mark.parametrize("when", ["rewarding", "updating"])
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


@pytest.mark.parametrize(
    "mesh",
    [
        {},
        slow(dict(dp="fsdp")),
        slow(dict(tp=2)),
        slow(dict(pp=2, schedule="gpipe", microbatch=1)),
    ],
)
def test_compiled_blocks_sample_what_is_trained(given, tmp_path, mesh):
    """Steps of sampling are compiled, too. Evaluations are of other numbers of answers."""
    succeed(*command(given, tmp_path / "eager"))
    compiled = command(given, tmp_path / "compiled", compile=True, **mesh)
    succeed(*compiled, nproc=2 if mesh else 0)
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
        model = our_model(families()[family].config(**sizes), torch.float64, seed=5, factor=2)
        with torch.no_grad():
            model.output.weight[BYTES.stop[0]] *= 4
        path = tmp_path_factory.mktemp(family) / "base"
        write_checkpoint(path, model.config, stored(model), BYTES)
        found[family] = given | dict(init=path, max_new_tokens=9)
    return found


@pytest.mark.parametrize(
    "family, nproc, more",
    [
        ("mixtral", 2, dict(dp="fsdp", ep=2, all_weights=True, updates=2, group=4)),
        ("deepseek_v3", 0, dict(all_weights=True, microbatch=4, checkpointing="full")),
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
    succeed(*command(given, tmp_path / "one", **(more if nproc == 0 else one_process(more))))
    wrong = command(given, tmp_path / "two", **more)
    succeed(*within, *wrong, nproc=nproc)
    same_run(tmp_path / "two", tmp_path / "one", step=4)
    assert all(row["log_ratio"] < 1e-9 or "updates" in more for row in metrics(tmp_path / "two"))
    anew = command(given, tmp_path / "anew", **more, no_replay=True)
    refused(launch(*within, *anew, nproc=nproc), "between sampling and training")


def one_process(more: dict) -> dict:
    """Return what is left of flags where one process computes all."""
    return {name: value for name, value in more.items() if name not in ("dp", "ep", "cp", "pp")}


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
    task.sums, task.largest, task.furthest, task.tolerance = Counter(), 0.0, 0.0, math.inf
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
    thirds = torch.full((1, 7), 1 / 3, dtype=torch.float32)
    assert not advantages_of(thirds, "std")[0].any()


REWARDS = {  # a file, and flags
    "each": ("def reward(prompt, answer, truth):\n    return value(answer)\n", {}),
    "by three": ("def reward(prompt, answer, truth):\n    return value(answer)\n",
                 dict(reward_workers=3)),
    "all": ("def rewards(prompts, answers, truth):\n"
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
    for name, (body, more) in REWARDS.items():
        path = tmp_path / f"{name}.py"
        value = "def value(text):\n    return len(text) + sum(map(ord, text)) % 8 / 8\n"
        path.write_text(f"import sys, torch\nprint('noise', file=sys.stderr)\n{value}{body}")
        out = tmp_path / name
        result = succeed(*command(given, out, reward=path, steps=2, **more))
        assert result.err.count("noise") == more.get("reward_workers", 1)
        runs[name] = metrics(out)
    for name, rows in runs.items():
        same_losses(rows, runs["each"])
        assert [row["reward"] for row in rows] == [row["reward"] for row in runs["each"]], name
    for row in runs["in parts"]:
        assert row["reward"] == pytest.approx(row["reward_length"] + row["reward_rest"])


def test_groups_with_bad_rewards_are_left_out(given, tmp_path):
    """And counted. The gradient is that of the other groups."""
    (tmp_path / "some.py").write_text(
        f"{given['reward'].read_text()}\nright = reward\n"
        "def reward(prompt, answer, truth):\n"
        "    if truth == '0':\n        return None\n"
        "    assert truth != '1'\n    return right(prompt, answer, truth)\n"
    )
    few = tmp_path / "few.jsonl"
    few.write_text("\n".join(given["data"].read_text().splitlines()[:4]))
    more = dict(data=few, val_data=few, reward=tmp_path / "some.py", group=8, batch=32)
    succeed(*command(given, tmp_path / "out", **more, skip_bad_rewards=True), nproc=2)
    rows = metrics(tmp_path / "out")
    assert {row["skipped"] for row in rows} == {0.5}
    assert all(math.isfinite(row["reward"] + row["grad_norm"]) for row in rows)
    assert max(row["grad_norm"] for row in rows) > 0
    assert "val_reward" in rows[1]
    refused(launch(*command(given, tmp_path / "whole", **more)), "some.py: reward('")


WRONG = {  # flags, or a file in place of one that a flag names; and what is said
    "raises": (dict(reward="def reward(**given):\n    return 1 / 0"), "raised ZeroDivisionError"),
    "no number": (
        dict(reward="def reward(**given):\n    return float('nan')"),
        "returned nan, which is no finite number",
    ),
    "a string": (dict(reward="def reward(**given):\n    return '1'"), "'1', which is no finite"),
    "a bool": (dict(reward="def reward(**given):\n    return True"), "write float(...)"),
    "a part": (dict(reward="def reward(**given):\n    return dict(a=1, b=None)"), "None as 'b'"),
    "too few": (dict(reward="def rewards(**given):\n    return [1]"), "1 rewards for "),
    "workers": (
        dict(reward="def rewards(**given):\n    return [1]", reward_workers=2),
        "which is called once, by one worker",
    ),
    "all bad": (
        dict(reward="def reward(**given):\n    return None", skip_bad_rewards=True, eval_every=0),
        "no group of the step has all its rewards",
    ),
    "updates": (dict(updates=2, group=8), "must be a multiple of --group x --updates 2"),
    "weights": (dict(max_ratio=0.5), "--max-ratio is 1 or more"),
    "base": (dict(all_weights=True, kl=0.1), "--kl compares with the base"),
    "answers": (dict(data='{"prompt": "Hi", "answers": "Ho"}'), "rename the field"),
    "nothing": (dict(reward=""), "has no function reward"),
    "no fields": (
        dict(reward="def reward(prompt, answer):\n    return 1", data='{"prompt": "a", "x": 1}'),
        "write reward(prompt, answer, **fields)",
    ),
    "no text": (dict(data='{"prompt": 3}'), '"prompt" is 3'),
    "another name": (dict(data='{"prompt": "Hi", "answer": "Ho"}'), "rename the field"),
    "no JSON": (dict(val_data="Hi"), 'give {"prompt": "..."}'),
    "no prompt": (dict(data=""), "has too few prompts"),
    "dropout": (dict(dropout=0.1), "leave it out"),
    "prompts": (dict(train_on_prompt=True), "changes nothing here: leave it out"),
    "groups": (dict(group=3), "must be a multiple of --group"),
    "no room": (dict(max_new_tokens=99), "--max-new-tokens 99"),
    "both": (dict(all_weights=True, dora=True), "are for adapters"),
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
    assert re.search(says, result.err)


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
def test_a_few_tokens_may_differ_between_sampling_and_training(far, share, is_refused):
    """Where rounding may send a token to another expert; elsewhere none."""
    task = Rewards.__new__(Rewards)
    task.world = alone(dtype=torch.float32)
    task.job = SimpleNamespace(model=torch.nn.Linear(1, 1))
    task.run = Rewarding(reward=None)
    task.measured = {}
    task.sums = Counter()
    task.largest = task.furthest = 0.0
    task.tolerance = 0.01
    task.may_be_far = share
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
    edits = {"self.whole.slots, v)": "self.whole.slots, 1.01 * v)"}
    within = changed_copy(tmp_path / "copy", edits=edits, file="kv_cache")
    refused(launch(*within, *command(given, tmp_path / "out")), "between sampling and training")
