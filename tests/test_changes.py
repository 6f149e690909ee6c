"""Changes that people make in class, seven of them patches in tests/changes, and their mistakes.

Applied to a copy of the project, a change computes what another program does, trains, resumes and
generates, or it is refused. Smaller changes of model.py go through every split in
test_mutants.py."""

import math
import re
import runpy
import shutil
import subprocess
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from conftest import (
    CHANGES,
    ROOT,
    changed_copy,
    launch,
    metrics,
    needs_2_13,
    refused,
    slow,
    slow_after,
    succeed,
)
from exact import GROUPED, assert_traffic, case, train
from plain import plain_model, plain_step
from test_model import peer_in_float64, relative, to_hugging_face
from test_train import flags, same_metrics
from torch.func import functional_call
from workers.train_cases import batch_of

from files import published
from files.published import with_fixed_weights
from model import IGNORE, Attention, Block, FeedForward, Llama, LlamaConfig, RMSNorm
from models.family import HERE, families
from runs.changed import prediction_note
from runs.unseen import added_to_stream, integers_read
from runs.unseen import notes as unseen_notes

NAMES = sorted(path.stem for path in CHANGES.glob("*.patch"))
CONFIG = LlamaConfig(**GROUPED)

FLAGS = {"lion": {"optimizer": "lion"}, "sqrt": {"lr_schedule": "sqrt"}}


@pytest.fixture(scope="module", params=NAMES)
def name(request):
    return request.param


@pytest.fixture(scope="module")
def within(name, tmp_path_factory):
    """The first arguments of `launch` for a script of the project with this change."""
    edits = {"WINDOW = 64": "WINDOW = 3"} if name == "sliding_window" else {}
    return changed_copy(tmp_path_factory.mktemp(name), name, edits)


def test_docs_change_md_has_the_length_of_a_change(name):
    patch = (CHANGES / f"{name}.patch").read_text()
    lines = re.findall(r"^([+-])(?!\1\1 )", patch, re.MULTILINE)
    length = f"+{lines.count('+')} -{lines.count('-')}"
    page = (ROOT / "docs/change.md").read_text()
    assert f"[{name}](../tests/changes/{name}.patch), {length}" in page


def test_it_applies(name):
    subprocess.run(["git", "apply", "--check", CHANGES / f"{name}.patch"], cwd=ROOT, check=True)


@pytest.mark.slow
def test_it_trains_resumes_and_generates(name, within, corpus, tmp_path):
    """The last of the runs shares sequences between ranks (--cp)."""
    out = tmp_path / "run"
    given = dict(steps=6, save_every=3, eval_every=3, **FLAGS.get(name, {}))
    run = ["train.py", *flags(corpus, out, **given)]
    told = succeed(*within, *run).out
    assert not re.search("note: (generation|in validation|with --document-mask)", told)
    expected = metrics(out)
    if name == "sqrt":  # two steps of warmup; of the two steps of decay the first is at the peak
        rates = [0.5, 1, 1, 1, 1, 1 - math.sqrt(1 / 2)]
        assert [row["lr"] for row in expected] == pytest.approx([0.01 * rate for rate in rates])
    shutil.rmtree(out / "step-00000006")
    succeed(*within, *run, "--resume", "--dp", "fsdp", nproc=2)
    same_metrics(metrics(out), expected)
    shared = flags(corpus, tmp_path / "cp", cp=2, dp="fsdp", **given)
    result = launch(*within, "train.py", *shared, nproc=2)
    if name == "sliding_window":  # which takes a rank's own tokens for all there are
        refused(result, "the output of layers.0.attention.wo", "under --cp")
    else:
        assert result.code == 0, result.err
        same_metrics(metrics(tmp_path / "cp"), expected)
    succeed(*within, "generate.py", out, "--prompt", "1 and", "--max-new-tokens", 20)


# ------------------------------------------------------------------- natural mistakes, and notes

# Places in model.py.
FEED_FORWARD = "self.feed_forward(self.ffn_norm(x))"
FEATURES = "swiglu(self.w1(x), self.w3(x))"
W3 = "        self.w3 = nn.Linear(config.dim, config.ffn_dim, bias=False)\n"
LOSS = "return vocabulary.cross_entropy(logits, targets)"
OUTPUT = "return self.output(x)"
NORM = "self.norm(x[:, -1:] if cache else x)"
KEYS = "k = rotate(self.keys(x), rotation)"
VALUES = "v = self.values(x)"

HEAD_DIM = "        self.head_dim = config.head_dim\n"
SHARED_GLOBAL = {  # odd layers add the keys of the layer before, from a global
    f"{VALUES}  #": "KEYS.append(k) if self.layer % 2 == 0 else None\n"
    f"        k = k + KEYS[-1]\n        {VALUES}  #",
    "class Attention(": "KEYS = []\n\n\nclass Attention(",
}
SHARED = {  # odd layers add the values of the layer before, which blocks hand on
    "cache=None):\n        q =": "cache=None, last=None):\n        q =",
    VALUES: "v = own = self.values(x) + (last if self.layer % 2 else 0)",
    "mask).flatten(2))": "mask).flatten(2)), own",
    "cache=None):\n        x = x": "cache=None, last=None):\n        x = x",
    "x = x + self.attention(self.attention_norm(x), rotation, mask, cache)":
        "y, last = self.attention(self.attention_norm(x), rotation, mask, cache, last)\n"
        "        x = x + y",
    f"return x + {FEED_FORWARD}": f"return x + {FEED_FORWARD}, last",
    "            for name, block in self.layers.items():\n"
    "                x = block(x, rotation, mask, cache and cache.layers[name])":
        "            last = None\n"
        "            for name, block in self.layers.items():\n"
        "                x, last = block(x, rotation, mask, cache and cache.layers[name], last)",
}  # fmt: skip
SCALES = {  # each head has a learned scale, 1 at first as that of a norm
    "class Attention(": "class HeadScale(RMSNorm):\n    def forward(self):\n"
    "        return self.weight\n\n\nclass Attention(",
    HEAD_DIM: f"{HEAD_DIM}        self.scale = HeadScale(config.n_heads, 0.0)\n",
    KEYS: f"q = q * self.scale()[:, None]\n        {KEYS}",
}

FORWARD = "first in forward: the output of layers."
TP = f"{FORWARD} ... under --tp a rank has some of the heads"
REFUSED = {  # what is changed, flags, parts of the line that refuses it
    "a norm of features": ({FEATURES: f"F.normalize({FEATURES}, dim=-1)"}, dict(tp=2), TP),
    "detached": ({"self.w1(x)": "self.w1(x).detach()"}, {},
                 "layers.1.feed_forward.w1.weight of model.py got no gradient"),
    "a layer that is gone": ({FEATURES: "F.gelu(self.w1(x))", W3: ""},
                             dict(checkpointing="selective"),
                             "FeedForward has no w3, which its saved_products names"),
    "dropout of scores": (
        {"v: Tensor, mask) ->": "v: Tensor, mask, p) ->", "options = dict(": "options = dict("
         "dropout_p=p / 10, ", "self.attend(q, k, v, mask)":
         "self.attend(q, k, v, mask, self.training)"},
        dict(cp=2), "attend has dropout"),
    "no writes_to_stream": (
        {'    writes_to_stream = ("w2",)\n': ""}, {},
        "of model.py, Llama: 'FeedForward' object has no  ... name there the layers of that"),
    "features where all are needed": (
        {FEATURES: f"self.w1(x)[..., :1] * {FEATURES} * x.mean(-1, keepdim=True)"}, dict(tp=2),
        ", FeedForward: aten.mul ... for outputs that every rank needs, as a router's"),
    # From here on, slow tests.
    "keys of another microbatch": (
        SHARED_GLOBAL, dict(pp=2, microbatch=1, n_layers=4, checkpointing="full"),
        "first in backward: the gradient of the output of layers.1.feed_forward.w3"),
    "a norm before q": (  # needs all tokens at once
        {"self.wq(x)": "self.wq(F.rms_norm(x, x.shape[-1:]))"}, dict(tp=2, async_tp=True),
        "leave out --async-tp"),
    "a sum of logits": ({LOSS: f"{LOSS} + logits.logsumexp(-1)"}, dict(tp=2), "first in loss"),
}  # fmt: skip


@pytest.mark.parametrize("name", slow_after(6, REFUSED))
def test_a_change_that_would_train_another_model_is_refused(name, corpus, tmp_path):
    edits, options, says = REFUSED[name]
    within = changed_copy(tmp_path / "copy", edits=edits)
    given = flags(corpus, tmp_path / "run", **options)
    ranks = math.prod(options.get(name, 1) for name in ("tp", "pp", "cp"))
    refused(launch(*within, "train.py", *given, nproc=ranks * (ranks > 1)), *says.split(" ... "))


def trains_as_one_does(within, corpus, tmp_path, split: dict, **given) -> None:
    """Assert that two processes take the same two steps as one."""
    one, two = tmp_path / "one", tmp_path / "two"
    succeed(*within, "train.py", *flags(corpus, one, steps=2, **given))
    succeed(*within, "train.py", *flags(corpus, two, steps=2, **given, **split), nproc=2)
    same_metrics(metrics(two), metrics(one))


@pytest.mark.parametrize("edits", [SHARED, slow(SCALES)])
def test_a_change_in_its_right_place_is_exact(edits, corpus, tmp_path):
    """Values of another layer are handed on as arguments; a scale for each head is in PLAN."""
    within = changed_copy(tmp_path / "copy", edits=edits)
    if edits is SCALES:
        file, place = tmp_path / "copy/parallel.py", '    "layers.*.attention.wo": ROWS,'
        planned = f'{place}\n    "layers.*.attention.scale": OfHeads(),'
        source = file.read_text().replace("    NORM,\n", "    NORM,\n    OfHeads,\n")
        file.write_text(source.replace(place, planned))
    trains_as_one_does(within, corpus, tmp_path, split=dict(tp=2))


PRINTED = re.findall(r"```python\n(.*?)\n```", (ROOT / "docs/change.md").read_text(), re.DOTALL)


def test_docs_change_md_prints_what_its_files_say():
    for printed, name in zip(PRINTED[:3], ("geglu", "gate", "nope"), strict=True):
        assert printed in (CHANGES / f"{name}.py").read_text(), name


@needs_2_13
@pytest.mark.parametrize("split", [dict(tp=2), slow(dict(pp=2, microbatch=2)), slow(dict(cp=2))])
def test_the_loss_that_docs_change_md_prints_is_exact(split, corpus, tmp_path):
    within = changed_copy(tmp_path / "copy", edits={f"    {LOSS}": PRINTED[3]})
    trains_as_one_does(within, corpus, tmp_path, split, optimizer="muon")


WQ = {"self.wq(x)": "F.linear(x, self.wq.weight)"}
SHIFTED = "x = x + F.pad(x, (0, 0, 1, -1)) + self.attention(self.attention_norm(x)"
WINDOW = {"first = slots - positions": "first = slots - positions.clamp(max=63)"}
NO_CACHE = {"x = x + self.attention(self.attention_norm(x)": SHIFTED}
CAPPED = {OUTPUT: f"{OUTPUT}.tanh()"}
ZEROS = {W3: f"{W3}        nn.init.zeros_(self.w3.weight)\n"}
UNNAMED = {'    writes_to_stream = ("w2",)\n': "    writes_to_stream = ()\n"}
SUM_OF_LOSSES = "return self.loss(hidden, weight, targets, self.vocabulary)"
SHIFT_OF_TWO = {
    SUM_OF_LOSSES: f"{SUM_OF_LOSSES} + self.training * self.loss(hidden[:, :-2], weight, "
    "targets[:, 2:], self.vocabulary)"
}


@pytest.mark.parametrize("edits, float8, note", [
    ({}, "tensorwise", ""),
    (NO_CACHE, "none",
     "generation computes ... with --document-mask and in fine-tuning, a doc"),
    (WINDOW, "none", "generation computes other logits than training"),
    slow(CAPPED, "none", "in validation the loss is "),
    (WQ, "tensorwise", "adapters and 8 bits have no effect in attention.wq"),
    slow(ZEROS, "none", "the values that __init__ gives to layers.0.feed_forward.w3.weight (2 of"),
    (UNNAMED, "none", "the output of layers.0.feed_forward.w2 (2 of them) is added to x"),
    (SHIFT_OF_TWO, "none", "in training there is another loss, of the token that is 3 after"),
], ids="no_change no_cache window capped no_call zeros unnamed shift".split())  # fmt: skip
def test_a_change_with_another_effect_than_it_seems_is_told(edits, float8, note, corpus, tmp_path):
    within = changed_copy(tmp_path / "copy", edits=edits)
    given = flags(corpus, tmp_path / "run", steps=1, float8=float8, dim=32, ffn_dim=64)
    notes = re.findall("note: (.*)", succeed(*within, "train.py", *given).out)
    expected = note.split(" ... ") if note else []
    assert len(notes) == len(expected), notes
    assert all(text.startswith(start) for text, start in zip(notes, expected)), notes


def test_an_integer_that_differs_between_layers_is_told(monkeypatch):
    config = replace(CONFIG, n_layers=3)
    assert integers_read(config) == []
    values = Attention.values
    monkeypatch.setattr(Attention, "values", lambda m, x: values(m, x) * (1 + m.layer))
    assert integers_read(config) == ["attention.layer"]


def test_blocks_may_hand_on_more_than_x(monkeypatch):
    """As value_residual.patch does; wk is as wide as x."""
    blocks, norms = Block.forward, RMSNorm.forward

    def x_of(given):
        return given[0] if isinstance(given, tuple) else given

    def with_more(block, given, *rest):
        return blocks(block, x_of(given), *rest), given

    monkeypatch.setattr(Block, "forward", with_more)
    monkeypatch.setattr(RMSNorm, "forward", lambda norm, given: norms(norm, x_of(given)))
    config = replace(CONFIG, n_kv_heads=CONFIG.n_heads)
    with torch.no_grad():
        assert added_to_stream(config) == []
        monkeypatch.setattr(FeedForward, "writes_to_stream", ())
        assert "layers.0.feed_forward.w2" in added_to_stream(config)


def test_a_small_model_that_cannot_be_computed_is_told(monkeypatch):
    family = families()["qwen3"]
    config = family.small_config
    monkeypatch.setitem(families(), "qwen3", replace(family, small=dict(dim=31)))
    (note,) = unseen_notes(config, compiles=False)
    assert note.startswith("note: qwen3 cannot compute its small model")


@pytest.mark.parametrize("family", HERE)
def test_models_that_are_here_are_told_nothing(family):
    assert unseen_notes(families()[family].small_config, compiles=True) == []


def test_a_prediction_says_that_the_model_is_no_llama(monkeypatch):
    assert prediction_note(CONFIG) == ""
    published.small_logits.cache_clear()
    monkeypatch.setattr(FeedForward, "forward", lambda m, x: m.w2(m.w1(x) * m.w3(x)))
    assert "llama is here no published model: bench.py step counts" in prediction_note(CONFIG)


def test_other_code_than_trained_a_run_is_told(corpus, tmp_path):
    """Generating and resuming say so; a run resumed with another loss says nothing."""
    no_rope = changed_copy(tmp_path / "copy", edits={KEYS: "k = self.keys(x)"})
    z_loss = changed_copy(tmp_path / "z-loss", "z_loss")
    run = ["train.py", *flags(corpus, tmp_path / "run", steps=2, save_every=1), "--resume"]
    succeed(*run)
    told = f"the code that trained {tmp_path / 'run' / 'step-'}"
    assert told not in succeed(*z_loss, *run, "--steps", 3).err
    assert told in succeed(*no_rope, "generate.py", tmp_path / "run", "--prompt", "1 and").err
    assert told in succeed(*no_rope, *run, "--steps", 4).err


@pytest.mark.slow
def test_dropout_is_for_training(corpus, tmp_path):
    """As seen after two steps without a learning rate."""
    dropped = f"F.dropout({FEED_FORWARD}, 0.5, self.training)"
    edits = {FEED_FORWARD: dropped, NORM: f"F.dropout({NORM}, 0.5, self.training)"}
    for out, changes in (("plain", {}), ("dropout", edits)):
        given = flags(corpus, tmp_path / out, steps=2, lr=0, eval_every=1)
        within = changed_copy(tmp_path / f"{out}-copy", edits=changes)
        succeed(*within, "train.py", *given)
    plain, changed = metrics(tmp_path / "plain"), metrics(tmp_path / "dropout")
    assert len(plain) == 2
    for row, other in zip(plain, changed, strict=True):
        assert row["val_loss"] == other["val_loss"]
        assert row["loss"] != other["loss"]


# ---------------------------------------------------------------------------- what is computed

# Each returns the logits [B, T, V] of the changed model, from another program or a formula.


def unchanged(weights: dict, tokens: torch.Tensor) -> torch.Tensor:
    return functional_call(Llama(CONFIG).double(), weights, tokens)


def gelu(weights: dict, tokens: torch.Tensor) -> torch.Tensor:
    def forward(self: FeedForward, x: torch.Tensor) -> torch.Tensor:
        x = self.w1(x)
        return self.w2(x * (1 + torch.erf(x / math.sqrt(2))) / 2)

    with mock.patch.object(FeedForward, "forward", forward):
        return unchanged(weights, tokens)


def sliding_window(weights: dict, tokens: torch.Tensor) -> torch.Tensor:
    peer = peer_in_float64(CONFIG, "Mistral", sliding_window=3)
    return functional_call(
        peer, to_hugging_face(CONFIG, weights), kwargs={"input_ids": tokens}
    ).logits


MODELS = dict(gelu=gelu, sliding_window=sliding_window, z_loss=unchanged)


@pytest.mark.parametrize("name", MODELS, indirect=True)
def test_it_computes_what_others_compute(name, within):
    """In training: loss and gradients, also of documents that share rows."""
    model_py = runpy.run_path(str(within[1] / "model.py"))
    model = model_py["Llama"](model_py["LlamaConfig"](**GROUPED)).double()
    weights = dict(with_fixed_weights(model).named_parameters())
    for packed in (False, True):
        batch, expected = batch_of(packed), 0
        for document in (slice(0, 4), slice(4, 13)) if packed else (slice(0, 13),):
            logits = MODELS[name](weights, batch.tokens[:, document])
            targets = batch.targets[:, document]
            expected += F.cross_entropy(
                logits[targets != IGNORE], targets[targets != IGNORE], reduction="sum"
            )
            if name == "z_loss":
                expected += 1e-4 * (logits.logsumexp(-1) ** 2)[targets != IGNORE].sum()
        loss = model(*batch.inputs)
        assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
        ours, theirs = (torch.autograd.grad(each, [*weights.values()]) for each in (loss, expected))
        for parameter, gradient, other in zip(weights, ours, theirs):
            assert relative(gradient, other) < 1e-12, (packed, parameter)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lion"], indirect=True)
def test_an_optimizer_updates_the_same_where_weights_are_sharded(name, within, tmp_path):
    """Lion, which is written here independently of its patch, takes three steps."""
    model, batch = plain_model(GROUPED), batch_of(packed=False)
    named = dict(model.named_parameters())
    means = dict.fromkeys(named, 0.0)

    @torch.no_grad()
    def step() -> None:
        for name, p in named.items():
            direction = torch.sign(0.9 * means[name] + 0.1 * p.grad)
            p.copy_(p - 1e-2 * (direction + (0.1 if p.ndim == 2 else 0.0) * p))
            means[name] = 0.99 * means[name] + 0.01 * p.grad

    for _ in range(3):
        plain_step(model(batch.tokens), batch.targets, named, SimpleNamespace(step=step))
    splits = dict(zero1=dict(dp="zero1", replicate=2), fsdp=dict(dp="fsdp", shard=2), tp=dict(tp=2))
    cases = {}
    for split, more in splits.items():
        cases[split] = case(GROUPED, 1, optimizer=name, **more) | dict(steps=3)
    for split, result in train(tmp_path, 2, cases, within=within).items():
        for parameter, weight in named.items():
            assert relative(result["last"][parameter], weight.detach()) < 1e-12, (split, parameter)
        assert_traffic(result, cases[split], 2)
