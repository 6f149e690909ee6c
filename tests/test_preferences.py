"""preferences.py and rewards.py as their users run them; text/pairs.py; DPO against trl's trainer.

That their gradients are those of the formulas on every split is test_exact.py's."""

import json
import math
from types import SimpleNamespace

import exact
import pytest
import torch
import torch.nn.functional as F
from conftest import changed_copy, hugging_face_model, launch, metrics, refused, succeed, with_fault
from exact import GROUPED, ODD, assert_case, case
from test_chat import BYTES, assistant, target_text, user
from test_finetune import CONFIG, factors, same_run
from test_formats import our_model, stored
from test_train import as_flags, resumes
from workers.train_cases import NO_TOKENIZER, answers_of

from checkpoint import write_checkpoint
from config import ParallelConfig, Work
from files.formats import hf_name, to_hf_rows
from model import IGNORE, LlamaConfig
from parallel import return_each_loss, with_mesh
from plumbing.processes import UserError, init_distributed
from preferences import DPO
from rewards import GRPO, Answers
from text.corpora import Reading
from text.pairs import Pairs, encode_pair, open_pairs, pair_of

SUM = [user("1+1?"), assistant("2")], [user("1+1?"), assistant("3")]
ANSWERS = dict(chosen="2", rejected="3")
EARLIER = [user("Hi"), assistant("Ho")]
AFTER = tuple(EARLIER + each for each in SUM)
HH = "\n\nHuman: Hi\n\nAssistant: Ho\n\nHuman: 1+1?\n\nAssistant: "
LAYOUTS = {
    "strings": (dict(prompt="1+1?", **ANSWERS), SUM),
    "lists": (dict(prompt=SUM[0][:1], chosen=SUM[0][1:], rejected=SUM[1][1:]), SUM),
    "whole": (dict(chosen=AFTER[0], rejected=AFTER[1]), AFTER),
    "string and whole": (dict(prompt="1+1?", chosen=SUM[0], rejected=SUM[1]), SUM),
    "hh": (dict(chosen=HH + "2", rejected=HH + "3"), AFTER),
    "orca": (dict(system="S", question="1+1?", **ANSWERS),
             tuple([{"role": "system", "content": "S"}, *each] for each in SUM)),
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_of_pairs(layout):
    record, expected = LAYOUTS[layout]
    assert pair_of(record, "here") == expected


@pytest.mark.parametrize("record, told", [
    (dict(prompt="Hi", chosen="2"), '"rejected" is None'),
    (dict(prompt="Hi", chosen="2", rejected="2"), "both answers are the same"),
    (dict(chosen="2", rejected="3"), '"chosen" is []'),
    (dict(prompt="Hi", chosen=[3], rejected="3"), "message 1 is 3"),
])  # fmt: skip
def test_what_is_no_pair(record, told):
    with pytest.raises(UserError, match=told.replace("[", r"\[")):
        pair_of(record, "here")


def test_targets_of_a_pair_are_its_last_answers_with_their_ends():
    """The prompt, and earlier answers, are in both, and cancel."""
    for sample, said in zip(encode_pair(AFTER, BYTES), "23"):
        assert target_text(*sample) == f"{said}{{eot_id}}"


def test_rows_do_not_split_pairs(tmp_path):
    lines = [
        dict(prompt="p" * (1 + i % 13), chosen="c" * (1 + i % 7), rejected="r") for i in range(40)
    ]
    lines.append(dict(prompt="p" * 200, **ANSWERS))
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, lines)))
    train, val, examples, summary = open_pairs([tmp_path], BYTES, 128, None, Reading())
    assert len(train.samples + val.samples) == 80 and examples and "1 dropped" in summary
    batch = train.batch([*range(len(train)), None])
    for row, targets, positions in zip(train.rows, batch.targets, batch.positions):
        starts = (positions == 0).nonzero().flatten().tolist()
        texts = [targets[a:b] for a, b in zip(starts, [*starts[1:], 128])]
        said = [BYTES.decode(t for t in text.tolist() if 0 <= t < 256) for text in texts]
        assert {*said[1 : len(row) : 2]} <= {"r"} and "r" not in said[0 : len(row) : 2]
    assert batch.units.tolist() == [len(row) // 2 for row in train.rows] + [0]


@pytest.mark.parametrize("loss", ["sigmoid", "ipo", "simpo"])
def test_losses_by_their_formulas(loss):
    """Of one pair, beside padding: answers of 2 and of 3 tokens."""
    beta, dpo = 0.5, DPO.__new__(DPO)
    dpo.args, dpo.sums = SimpleNamespace(loss=loss, beta=beta), 0
    samples = [([1, 2, 3], [False, True, True]), ([1, 4, 5, 6], [False, True, True, True])]
    batch = Pairs(samples, 8, SimpleNamespace(special={}, count_bytes=len)).batch([0, None])
    batch.given = torch.tensor([[[-3.0, -5.0]], [[0.0, 0.0]]]) * (loss != "simpo")
    losses = torch.where(batch.targets == IGNORE, 0, torch.arange(8.0))
    chosen, rejected = -(0 + 1), -(2 + 3 + 4)
    expected = {
        "sigmoid": -math.log(torch.sigmoid(torch.tensor(beta * ((chosen + 3) - (rejected + 5))))),
        "ipo": ((chosen + 3) - (rejected + 5) - 1 / (2 * beta)) ** 2,
        "simpo": -F.logsigmoid(torch.tensor(beta * (chosen / 2 - rejected / 3) - 0.5)).item(),
    }[loss]
    assert dpo(losses, batch).item() == pytest.approx(expected)
    assert dpo.sums[-1] == 1


# ------------------------------------------------------------------------------------------ runs


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A model some of whose answers end."""
    model = our_model(CONFIG, torch.float64, seed=5, factor=2, norms=(1, 1))
    with torch.no_grad():
        model.output.weight[BYTES.stop[0]] *= 4
    path = tmp_path_factory.mktemp("base") / "base"
    write_checkpoint(path, CONFIG, stored(model), BYTES)
    return path


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Pairs, prompts, and a reward: for the digits of an answer that ends."""
    path = tmp_path_factory.mktemp("data")
    lines = [dict(prompt=f"{i}?", chosen=f"is {i}", rejected=f"no {i % 7}") for i in range(60)]
    (path / "pairs.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (path / "prompts.jsonl").write_text("\n".join(map(json.dumps, lines[:9])))
    (path / "reward.py").write_text(
        "def reward(prompt, answer, chosen, rejected):\n"
        "    return len(answer) + sum(map(ord, answer)) % 7 / 7\n"
    )
    return path


def command(script: str, base, data, out, **more) -> list:
    given = dict(init=base, out=out, steps=4, batch=8, lr=1e-3, warmup=2, save_every=2, keep=0,
                 eval_every=2, dtype="float64", seq_len=96)  # fmt: skip
    if script == "rewards.py":
        given |= dict(data=data / "prompts.jsonl", reward=data / "reward.py", max_new_tokens=6)
    else:
        given |= dict(data=data / "pairs.jsonl", microbatch=2)
    return [script, *as_flags(given | more)]


@pytest.mark.parametrize("script, mesh", [
    ("preferences.py", dict(dp="fsdp")),
    ("rewards.py", dict(dp="fsdp")),  # a group is on both ranks
    ("rewards.py", dict(tp=2, dora=True)),
])  # fmt: skip
def test_a_run_on_two_ranks_is_the_same_run(base, data, tmp_path, script, mesh):
    more = dict(dora=True) if "dora" in mesh else {}
    succeed(*command(script, base, data, tmp_path / "one", **more))
    on_two = command(script, base, data, tmp_path / "two", **mesh, microbatch=1)
    told = succeed(*on_two, nproc=2).out
    same_run(tmp_path / "two", tmp_path / "one", step=4)
    names = {"preferences.py": ("accuracy", "margin", "val_chosen"),
             "rewards.py": ("reward", "mixed", "end", "length", "val_reward")}[script]  # fmt: skip
    for ours, theirs in zip(metrics(tmp_path / "two"), metrics(tmp_path / "one")):
        for name in theirs.keys() & {*names}:
            assert ours[name] == pytest.approx(theirs[name], rel=1e-12, abs=1e-12), name
    assert {*names} <= metrics(tmp_path / "one")[-1].keys() and "step 4: validation loss" in told
    if script == "rewards.py":
        assert max(row["log_ratio"] for row in metrics(tmp_path / "two")) < 1e-12
    resumes(tmp_path / "two", 2, lambda out: factors(out / "step-00000004"), *on_two, nproc=2)


def test_all_weights_are_trained_beside_the_base_as_it_was(base, data, tmp_path):
    """A resumed run, too, has its rewards relative to --init."""
    given = command("preferences.py", base, data, tmp_path, all_weights=True, dp="zero1")
    succeed(*given, nproc=2)
    rows = metrics(tmp_path)
    assert rows[0]["loss"] == pytest.approx(math.log(2)) and rows[-1]["loss"] < 0.6
    resumes(tmp_path, 2, lambda out: {}, *given, nproc=2)


REWARDS = {
    "raises": ("return 1 / 0", "raised ZeroDivisionError"),
    "no number": ("return float('nan')", "returned nan"),
    "a string": ("return 'good'", "raised ValueError"),
    "nothing": ("", "has no function reward"),
    "on one rank alone": ("import os; return 1 / int(os.environ.get('RANK') != '1')", "raised"),
}


@pytest.mark.parametrize("kind", REWARDS)
def test_a_reward_that_is_none_ends_in_one_line(base, data, tmp_path, kind):
    body, told = REWARDS[kind]
    (tmp_path / "bad.py").write_text(f"def reward(**given):\n    {body}\n" * bool(body))
    given = command("rewards.py", base, data, tmp_path / "out", reward=tmp_path / "bad.py")
    refused(launch(*given, nproc=2), "bad.py", told)


@pytest.mark.parametrize("script, flag, told", [
    ("preferences.py", "--dropout=0.1", "leave them out"),
    ("preferences.py", "--all-weights --dora", "are for adapters"),
    ("rewards.py", "--dropout=0.1", "leave it out"),
    ("rewards.py", "--group=3", "must be a multiple of --group"),
    ("rewards.py", "--max-new-tokens=99", "--max-new-tokens 99"),
])  # fmt: skip
def test_refusals(base, data, tmp_path, script, flag, told):
    refused(launch(*command(script, base, data, tmp_path / "out"), *flag.split()), told)


FAULTS = {
    "padding counts as a pair": ("preferences", "torch.where(is_pair, row, 0)", "row"),
    "means of microbatches": ("preferences", "return sums[0]", "return sums[0] / is_pair.sum()"),
    "adapters are not switched off": ("lora", "layer.is_off = True", "layer.is_off = False"),
    "a token's loss counts as another's": ("chunked_loss", "cat(losses)", "cat(losses).flip(0)"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found(tmp_path, fault):
    within = with_fault(tmp_path / "copy", *FAULTS[fault])
    given = case(ODD, 2) | dict(packed=True, objective="preferences", lora=dict(rank=3, alpha=5))
    (result,) = exact.train(tmp_path, 0, {"one": given}, within=within).values()
    with pytest.raises(AssertionError):
        assert_case(result, given, 1)


def test_groups_normalized_on_each_rank_are_found(base, data, tmp_path):
    """A group of 8 is on two ranks."""
    old = "own = advantages[world.data_rank * share :][:share]"
    new = "own = rewards[world.data_rank * share :][:share]; own = own - own.mean()"
    within = with_fault(tmp_path / "copy", "rewards", old, new)
    rows = []
    for nproc in (1, 2):
        out = tmp_path / str(nproc)
        succeed(*within, *command("rewards.py", base, data, out), nproc=nproc)
        rows.append([row["grad_norm"] for row in metrics(out)])
    assert rows[0] != pytest.approx(rows[1], rel=1e-3)


def test_an_answer_that_does_not_end_is_none():
    """And the end of another is a target, but no text of it."""
    grpo, (stop, *_) = GRPO.__new__(GRPO), BYTES.stop
    grpo.job = SimpleNamespace(tokenizer=BYTES)
    answers = [[*b"7", stop], [*b"777"]]
    assert grpo.texts_of(answers) == ["7", ""]
    rows = Answers([[1], [1]], answers, torch.zeros(2, 3), torch.tensor([0.5, -0.5]), BYTES)
    batch = rows.batch([0, 1])
    assert batch.targets.tolist() == [[*b"7", stop, IGNORE], [*b"777"]]
    assert batch.given[..., 0].tolist() == [[0.5, 0.5, 0.0], [-0.5] * 3]


def test_a_cache_that_computes_something_else_is_found(base, data, tmp_path):
    edits = {"        self.layers[layer] = k, v": "        self.layers[layer] = k, 1.01 * v"}
    within = changed_copy(tmp_path / "copy", edits=edits)
    given = command("rewards.py", base, data, tmp_path / "out")
    refused(launch(*within, *given), "between sampling and training")


def test_dpo_is_that_of_trl(tmp_path):
    """trl's DPOTrainer, with its tokenization: loss and gradients of all weights. Its numbers come
    back in float32."""
    trl = pytest.importorskip("trl", reason="pip install trl compares with its trainer")
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(101)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w100", pad_token="w99")
    config = LlamaConfig(**GROUPED)
    ours, reference = (our_model(config, torch.float64, seed) for seed in (1, 2))
    theirs = []
    for model in (ours, reference):
        theirs.append(hugging_face_model(config).double())
        named = model.named_parameters()
        weights = {hf_name(n): to_hf_rows(n, config, p.detach()) for n, p in named}
        theirs[-1].load_state_dict(weights)
    answers, rows = answers_of(6), []
    for (a, flags), (b, _) in zip(answers[::2], answers[1::2]):
        start = flags.index(True)
        prompt, *texts = (" ".join(f"w{i}" for i in ids) for ids in (a[:start], a[start:], b))
        rows.append(dict(prompt=f"{prompt} ", chosen=texts[0], rejected=texts[1]))
    options = dict(output_dir=str(tmp_path), use_cpu=True, report_to=[], bf16=False, beta=0.3)
    options |= dict(per_device_train_batch_size=6, max_length=None, gradient_checkpointing=False)
    model, ref_model = theirs
    options = dict(args=trl.DPOConfig(**options), train_dataset=Dataset.from_list(rows))
    trainer = trl.DPOTrainer(model, ref_model, **options, processing_class=words)
    trainer.model.double(), trainer.ref_model.double()
    batch = trainer.data_collator([trainer.train_dataset[i] for i in range(6)])
    loss = trainer._compute_loss(trainer.model, batch, False)
    loss.backward()

    tokenized = batch["input_ids"].tolist(), batch["completion_mask"].tolist()
    chosen_and_rejected = []
    for ids, mask in zip(*tokenized):
        n = max(i for i, flag in enumerate(mask) if flag) + 1
        chosen_and_rejected.append((ids[:n], [bool(flag) for flag in mask[:n]]))
    samples = [s for pair in zip(chosen_and_rejected[:6], chosen_and_rejected[6:]) for s in pair]
    assert all(ids[-1] == 100 for ids, _ in samples)  # an end is a target
    pairs = Pairs(samples, 24, NO_TOKENIZER)
    world = with_mesh(init_distributed(), ParallelConfig(dtype=torch.float64))
    args = SimpleNamespace(microbatch=2, loss="sigmoid", beta=0.3, all_weights=True)
    args.references = 0
    job = SimpleNamespace(model=reference, train_set=pairs, val_set=pairs)
    dpo = DPO(args, job, world, Work(reference, world.parallel, 8, 2, 24), None)
    return_each_loss(ours)
    batch = dpo.with_reference(pairs.batch([*range(len(pairs))]))
    total = batch.loss(ours(*batch.inputs, documents=batch.documents)) / 6
    total.backward()
    assert total.item() == pytest.approx(loss.item(), rel=1e-6)
    expected = {name: p.grad for name, p in trainer.model.named_parameters()}
    for name, p in ours.named_parameters():
        gradient = to_hf_rows(name, config, p.grad)
        assert (gradient - expected[hf_name(name)]).norm() < 1e-5 * gradient.norm(), name
