"""Eight changes that people make in class: five are patches in tests/changes, and QK-norm, experts
and ZeRO-1 are in the code. Applied to a copy of the project, each is exact in every parallel
configuration or refused."""

import copy
import math
import re
import shutil
import subprocess
import sys
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
    succeed,
)
from exact import GROUPED, assert_same, assert_traffic, attentions, case, train
from test_model import peer_in_float64, to_hugging_face
from test_train import flags, same_metrics
from torch.func import functional_call
from workers.lion_reference import plain_lion
from workers.train_cases import batch_of

from files import published
from model import IGNORE, FeedForward, Llama, LlamaConfig
from runs.changed import prediction_note

NAMES = sorted(path.stem for path in CHANGES.glob("*.patch"))
CONFIG = LlamaConfig(**GROUPED)

FLAGS = {"lion": {"optimizer": "lion"}, "cosine": {"decay": "cosine"}}

CASES = {
    1: {"accumulating": case(GROUPED, 1)},
    2: {
        "ddp": case(GROUPED, dp="ddp", replicate=2),
        "zero1": case(GROUPED, 1, dp="zero1", replicate=2),
        "fsdp": case(GROUPED, 1, dp="fsdp", shard=2),
        "tp selective": case(GROUPED, 4, dp="ddp", tp=2, checkpointing="selective"),
    },
    4: {"fsdp tp full": case(GROUPED, 1, dp="fsdp", shard=2, tp=2, checkpointing="full")},
}


@pytest.fixture(scope="module", params=NAMES)
def name(request):
    return request.param


@pytest.fixture(scope="module")
def changed(name, tmp_path_factory):
    """The first arguments of `launch` for a script of the project with this change."""
    edits = {"WINDOW = 64": "WINDOW = 3"} if name == "sliding_window" else {}
    return changed_copy(tmp_path_factory.mktemp(name), name, edits)


def test_a_change_has_all_names_and_the_length_in_docs_change_md(name, changed):
    ruff = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F821", changed[1]]
    subprocess.run(ruff, check=True)
    patch = (CHANGES / f"{name}.patch").read_text()
    lines = re.findall(r"^([+-])(?!\1\1 )", patch, re.MULTILINE)
    length = f"+{lines.count('+')} -{lines.count('-')}"
    page = (ROOT / "docs/change.md").read_text()
    assert f"[{name}](../tests/changes/{name}.patch), {length}" in page


@pytest.mark.slow
def test_every_configuration_computes_the_same(name, changed, tmp_path):
    expected = None
    for nproc, cases in copy.deepcopy(CASES).items():
        for options in cases.values():
            options |= {"generate": True}
            options["parallel"] |= {"optimizer": "lion"} if name == "lion" else {}
        for label, result in train(tmp_path, nproc, cases, within=changed).items():
            print(label)
            if not expected and name == "lion":
                for parameter, weight in plain_lion(GROUPED).items():
                    error = (result["last"][parameter] - weight).norm() / weight.norm()
                    assert error < 1e-12, (parameter, error)
            expected = expected or result
            assert_same(result, expected)
            assert result["attentions"] == attentions(cases[label], result["layers"])
            assert result["tokens"] == expected["tokens"]
            if name != "z_loss":  # which sends more than is predicted
                assert_traffic(result, cases[label], nproc)


@pytest.mark.slow
def test_it_trains_resumes_and_generates(name, changed, corpus, tmp_path):
    """Also where ranks share sequences."""
    out = tmp_path / "run"
    given = dict(steps=6, save_every=3, eval_every=3, **FLAGS.get(name, {}))
    run = ["train.py", *flags(corpus, out, **given)]
    succeed(*changed, *run)
    expected = metrics(out)
    if name == "cosine":  # (1 + cos 2x) / 2 is cos² x; the first of two warmup steps is lower
        rates = [0.5, *(math.cos(math.pi * step / 14) ** 2 for step in range(2, 7))]
        assert [row["lr"] for row in expected] == pytest.approx([0.01 * rate for rate in rates])
    shutil.rmtree(out / "step-00000006")
    succeed(*changed, *run, "--resume", "--dp", "fsdp", nproc=2)
    same_metrics(metrics(out), expected)
    shared = flags(corpus, tmp_path / "cp", cp=2, dp="fsdp", **given)
    result = launch(*changed, "train.py", *shared, nproc=2)
    if name == "sliding_window":  # which takes a rank's own tokens for all there are
        refused(result, "the output of layers.0.attention.wo", "under --cp")
    else:
        assert result.code == 0, result.err
        same_metrics(metrics(tmp_path / "cp"), expected)
    succeed(*changed, "generate.py", out, "--prompt", "1 and", "--max-new-tokens", 20)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gelu", "sliding_window"], indirect=True)
def test_adapters_of_a_changed_model_can_be_used(name, changed, corpus, sums, tmp_path):
    """Trained, resumed on two ranks, merged and generated from; or refused before they are."""
    base, out = tmp_path / "base", tmp_path / "adapter"
    succeed(*changed, "train.py", *flags(corpus, base, steps=1))
    tune = ["finetune_lora.py", "--init", base, "--data", sums, "--out", out]
    tune += ["--batch", 4, "--seq-len", 64]
    succeed(*changed, *tune, "--steps", 2, "--save-every", 1)
    succeed(*changed, *tune, "--steps", 3, "--resume", nproc=2)
    succeed(*changed, "generate.py", base, "--adapter", out, "--prompt", "1 and")
    succeed(*changed, "checkpoint.py", "merge", base, out, tmp_path / "merged")
    succeed(*changed, "generate.py", tmp_path / "merged", "--prompt", "1 and")


# ------------------------------------------------------------------- natural mistakes, and notes

# Places in model.py.
EMBED = "        device, dtype, E = tokens.device.type, self.compute_dtype, self.config.head_dim\n"
FEED_FORWARD = "self.feed_forward(self.ffn_norm(x))"
FEATURES = "swiglu(self.w1(x), self.w3(x))"
W3 = "        self.w3 = nn.Linear(config.dim, config.ffn_dim, bias=False)\n"
SUM = "return torch.where(targets != IGNORE, losses, 0).sum()"
LOSS = "return vocabulary.cross_entropy(logits, targets)"
OUTPUT = "return self.output(x)"
NORM = "self.norm(x if cache is None else x[:, -1:])"
KEYS = "k = self.k_norm(self.wk(x).view(B, T, -1, self.head_dim))"
VALUES = "v = self.wv(x).view(B, T, -1, self.head_dim)"
ATTENTION = "self.attention(self.attention_norm(x), cos, sin, mask, cache)"
RETURN_LOSS = "return self.loss(hidden, weight, targets, self.vocabulary)"
LOOP = "            for block in self.layers.values():\n                x = block("

SHARED_GLOBAL = {  # odd layers add the keys of the layer before, from a global
    f"{VALUES}  #": "KEYS.append(k) if self.layer % 2 == 0 else None\n"
    f"        k = k + KEYS[-1]\n        {VALUES}  #",
    "class Attention(": "KEYS = []\n\n\nclass Attention(",
}
SHARED = {  # odd layers add the values of the layer before, which blocks hand on
    "cache=None):\n        B, T, _": "cache=None, last=None):\n        B, T, _",
    VALUES: f"v = own = {VALUES[4:]} + (last if self.layer % 2 else 0)",
    "mask).flatten(2))": "mask).flatten(2)), own",
    "cache=None):\n        x = x": "cache=None, last=None):\n        x = x",
    f"x = x + {ATTENTION}": f"y, last = {ATTENTION[:-1]}, last)\n        x = x + y",
    f"return x + {FEED_FORWARD}": f"return x + {FEED_FORWARD}, last",
    f"{LOOP}x, cos, sin, mask, cache)": f"            last = None\n{LOOP[:-10]}x, last = block("
    "x, cos, sin, mask, cache, last)",
}
SCALES = {  # each head has a learned scale, 1 at first as that of a norm
    "class Attention(": "class HeadScale(RMSNorm):\n    def forward(self):\n"
    "        return self.weight\n\n\nclass Attention(",
    "        self.head_dim = config.head_dim\n": "        self.head_dim = config.head_dim\n"
    "        self.scale = HeadScale(config.n_heads, 0.0)\n",
    KEYS: f"q = q * self.scale()[:, None]\n        {KEYS}",
}

SECOND = {
    RETURN_LOSS: f"{RETURN_LOSS} + self.loss(hidden[:, :-1], weight, targets[:, 1:], "
    "self.vocabulary)"
}  # predicts the token after the next, too
GROUPS = {  # each third of a norm's features is divided by its own size
    "        return rms_norm(x, self.weight, self.eps)": "        x = x.unflatten(-1, (3, -1))\n"
    "        x = x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt()\n"
    "        return x.flatten(-2) * self.weight",
}
FORWARD = "first in forward: the output of layers."
TP = f"{FORWARD} ... under --tp a rank has some of the heads"
REFUSED = {  # what is changed, flags, parts of the line that refuses it
    "a scale that each stage repeats": ({EMBED: f"        x = 8 * x\n{EMBED}"}, dict(pp=2),
        f"{FORWARD} ... under --pp each stage calls Llama.forward on its layers"),
    "a norm of features": ({FEATURES: f"F.normalize({FEATURES}, dim=-1)"}, dict(tp=2), TP),
    "values handed on between stages": (
        SHARED, dict(pp=2, n_layers=6), "an error (TypeError in line  ... under --pp each stage"),
    "keys of another microbatch": (
        SHARED_GLOBAL, dict(pp=2, microbatch=1, n_layers=4, checkpointing="full"),
        "first in backward: the gradient of the output of layers.1.feed_forward.w3"),
    "a norm before q": (  # needs all tokens at once
        {"self.wq(x)": "self.wq(F.rms_norm(x, x.shape[-1:]))"}, dict(tp=2, async_tp=True),
        "leave out --async-tp"),
    "detached": ({"self.w1(x)": "self.w1(x).detach()"}, {},
                 "layers.1.feed_forward.w1.weight of model.py got no gradient"),
    "a mean": ({SUM: SUM.replace(".sum()", ".mean()")}, {},
               "beside a row without targets the loss is  ... it must be a sum over targets"),
    "a layer that is gone": ({FEATURES: "F.gelu(self.w1(x))", W3: ""},
                             dict(checkpointing="selective"),
                             "FeedForward has no w3, which its saved_products names"),
    "a sum of logits": ({LOSS: f"{LOSS} + logits.logsumexp(-1)"}, dict(tp=2), "first in loss"),
    "a mean of targets": (  # in a chunk
        {SUM: f"{SUM} / (targets != IGNORE).sum()"}, {},
        "beside a row with targets the loss is "),
    "a loss that sees the next target": (SECOND, dict(cp=2),
        "first in loss: the loss ... and a loss sees this rank's tokens"),
    "a line for training alone": (
        {RETURN_LOSS: "z = F.linear(hidden, weight).logsumexp(-1)[targets != IGNORE].sum()\n    "
         f"        {RETURN_LOSS} + self.training * z"}, dict(tp=2), "first in loss: the loss"),
    "dropout of scores": (
        {"v: Tensor, mask) ->": "v: Tensor, mask, p) ->", "options = dict(": "options = dict("
         "dropout_p=p, ", "attend(q, k, v, mask)": "attend(q, k, v, mask, 0.1 * self.training)"},
        dict(cp=2), "attend has dropout"),
    "dropout without a condition": (
        {FEED_FORWARD: f"F.dropout({FEED_FORWARD}, 0.5)"}, {},
        "model.py computes another loss each time, in evaluation, too"),
    "no writes_to_stream": (
        {'    writes_to_stream = ("w2",)\n': ""}, {},
        "of model.py, Llama: 'FeedForward' object has no  ... name there the layers of that"),
    "features where all are needed": (
        {FEATURES: f"self.w1(x)[..., :1] * {FEATURES} * x.mean(-1, keepdim=True)"}, dict(tp=2),
        ", FeedForward: aten.mul ... for outputs that every rank needs, as a router's"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_change_that_would_train_another_model_is_refused(name, corpus, tmp_path):
    edits, options, says = REFUSED[name]
    changed = changed_copy(tmp_path / "copy", edits=edits)
    given = flags(corpus, tmp_path / "run", **options)
    ranks = math.prod(options.get(name, 1) for name in ("tp", "pp", "cp"))
    refused(launch(*changed, "train.py", *given, nproc=ranks * (ranks > 1)), *says.split(" ... "))


@pytest.mark.parametrize(
    "edits, split",
    [
        slow(SHARED, dict(pp=2, n_layers=4)),  # no stage begins between two layers that share
        (SHARED, dict(tp=2)),
        (SCALES, dict(tp=2)),
        (GROUPS, dict(tp=2, dim=96)),
    ],
    ids=["pp", "tp", "tp of scales", "groups"],
)
def test_what_has_its_place_is_exact(edits, split, corpus, tmp_path):
    """Values of another layer as arguments; in PLAN, a number for each head; a norm of three groups
    of features, which a small model has, too."""
    changed = changed_copy(tmp_path / "copy", edits=edits)
    if edits is SCALES:
        file, place = tmp_path / "copy/parallel.py", '    "layers.*.attention.wo": ROWS,'
        planned = f'{place}\n    "layers.*.attention.scale": OfHeads(),'
        source = file.read_text().replace("    NORM,\n", "    NORM,\n    OfHeads,\n")
        file.write_text(source.replace(place, planned))
    one, two = tmp_path / "one", tmp_path / "two"
    given = dict(steps=2, n_layers=split.get("n_layers", 2), dim=split.get("dim", 32))
    succeed(*changed, "train.py", *flags(corpus, two, **given | split), nproc=2)
    succeed(*changed, "train.py", *flags(corpus, one, **given))
    same_metrics(metrics(two), metrics(one))


@needs_2_13
def test_the_three_worked_changes_are_exact(corpus, tmp_path):
    """Those of docs/change.md, all in one copy, as they are printed there."""
    page = (ROOT / "docs/change.md").read_text()
    activation, gate, loss, *_ = re.findall(r"```python\n(.*?)\n```", page, re.DOTALL)
    made, h, called = (
        re.search(f"`({begin}[^`]*)`", page)[1] for begin in ("self.gate = G", "h =", "x = x")
    )
    planned = re.search(r"`(\"layers[^`]*)`", page)[1]
    changed = changed_copy(tmp_path / "copy", edits={
        "    return F.silu(gate) * up": activation, f"    {LOSS}": loss,
        "class Block(": f"{gate}\n\n\nclass Block(",
        "        self.ffn_norm": f"        {made}\n        self.ffn_norm",
        f"x = x + {ATTENTION}": f"{h}\n        {called}",
    })  # fmt: skip
    file, place = tmp_path / "copy/parallel.py", '    "layers.*.attention.wo": ROWS,'
    file.write_text(file.read_text().replace(place, f"{place}\n    {planned},"))
    runs = {"one": {}, "tp": dict(tp=2), "pp": dict(pp=2, microbatch=2), "cp": dict(cp=2)}
    for out, split in runs.items():
        given = flags(corpus, tmp_path / out, steps=2, optimizer="muon", **split)
        succeed(*changed, "train.py", *given, nproc=2 * bool(split))
        same_metrics(metrics(tmp_path / out), metrics(tmp_path / "one"))


WQ = {"self.wq(x)": "F.linear(x, self.wq.weight)"}
SHIFTED = "x = x + F.pad(x, (0, 0, 1, -1)) + self.attention(self.attention_norm(x)"
SEEN = "    return (same & causal)[:, None]"
WINDOW = {SEEN: f"    same &= causal ^ causal.tril(S - queries - 64)\n{SEEN}"}
NO_CACHE = {"x = x + self.attention(self.attention_norm(x)": SHIFTED}
CAPPED = {OUTPUT: f"{OUTPUT}.tanh()"}


@pytest.mark.parametrize(
    "edits, float8, note",
    [
        ({}, "tensorwise", ""),
        (
            NO_CACHE,
            "none",
            "generation computes ... with --document-mask and in fine-tuning, a doc",
        ),
        (WINDOW, "none", "generation computes other logits than training"),
        (CAPPED, "none", "in validation the loss is "),
        (WQ, "tensorwise", "adapters and 8 bits have no effect in attention.wq"),
        slow(WQ, "none", ""),
    ],
    ids=["no change", "no cache", "a window", "capped", "no call", "no call, no 8 bits"],
)
def test_a_change_with_another_effect_than_it_seems_is_told(edits, float8, note, corpus, tmp_path):
    changed = changed_copy(tmp_path / "copy", edits=edits)
    given = flags(corpus, tmp_path / "run", steps=1, float8=float8, dim=32, ffn_dim=64)
    notes = re.findall("note: (.*)", succeed(*changed, "train.py", *given).out)
    expected = note.split(" ... ") if note else []
    assert len(notes) == len(expected), notes
    assert all(text.startswith(start) for text, start in zip(notes, expected)), notes


def test_a_prediction_says_that_the_model_is_no_llama(monkeypatch):
    assert prediction_note() == ""
    published.small_logits.cache_clear()
    monkeypatch.setattr(FeedForward, "forward", lambda m, x: m.w2(m.w1(x) * m.w3(x)))
    assert "model.py was changed: bench.py step counts" in prediction_note()


def test_other_code_than_trained_a_run_is_told(corpus, tmp_path):
    """Generating and resuming; another loss is not."""
    no_rope = changed_copy(tmp_path / "copy", edits={"rotate(k, cos, sin)": "rotate(k, 1, 0)"})
    z_loss = changed_copy(tmp_path / "z-loss", "z_loss")
    run = ["train.py", *flags(corpus, tmp_path / "run", steps=2, save_every=1), "--resume"]
    succeed(*run)
    told = f"the code that trained {tmp_path / 'run' / 'step-'}"
    assert told not in succeed(*z_loss, *run, "--steps", 3).err
    assert told in succeed(*no_rope, "generate.py", tmp_path / "run", "--prompt", "1 and").err
    assert told in succeed(*no_rope, *run, "--steps", 4).err


@pytest.mark.parametrize("nproc", [1, slow(2)])
def test_dropout_is_for_training(nproc, corpus, tmp_path):
    """As seen after two steps without a learning rate; in a block, and in each stage."""
    dropped = f"F.dropout({FEED_FORWARD}, 0.5, self.training)"
    edits = {FEED_FORWARD: dropped, NORM: f"F.dropout({NORM}, 0.5, self.training)"}
    for out, changes in (("plain", {}), ("dropout", edits)):
        given = flags(corpus, tmp_path / out, steps=2, lr=0, eval_every=1, pp=nproc)
        within = changed_copy(tmp_path / f"{out}-copy", edits=changes)
        succeed(*within, "train.py", *given, nproc=nproc)
    plain, changed = metrics(tmp_path / "plain"), metrics(tmp_path / "dropout")
    assert [row["val_loss"] for row in plain] == [row["val_loss"] for row in changed]
    assert all(row["loss"] != other["loss"] for row, other in zip(plain, changed))


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
    return hugging_face("Mistral", to_hugging_face(CONFIG, weights), tokens, sliding_window=3)


def hugging_face(kind: str, weights: dict, tokens: torch.Tensor, **options) -> torch.Tensor:
    peer = peer_in_float64(CONFIG, kind, **options)
    return functional_call(peer, weights, kwargs={"input_ids": tokens}).logits


MODELS = dict(gelu=gelu, sliding_window=sliding_window, z_loss=unchanged)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS, indirect=True)
def test_it_computes_what_others_compute(name, changed, tmp_path):
    given, results = tmp_path / "given.pt", tmp_path / "results.pt"
    rows = {packed: batch_of(packed).inputs for packed in (False, True)}
    torch.save({"config": GROUPED, "batches": rows}, given)
    succeed(*changed, "tests/workers/outputs.py", given, results)
    result = torch.load(results)
    weights = {name: weight.requires_grad_() for name, weight in result["weights"].items()}
    torch.testing.assert_close(result["cached"], result["full"], rtol=1e-12, atol=1e-12)
    for packed, ours in result["batches"].items():
        loss = extra = 0
        for document in (slice(0, 4), slice(4, 13)) if packed else (slice(0, 13),):
            tokens, targets = (t[:, document] for t in rows[packed][:2])
            logits = MODELS[name](weights, tokens)
            loss = loss + F.cross_entropy(
                logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE, reduction="sum"
            )
            if name == "z_loss":  # which training adds
                extra = extra + 1e-4 * (logits.logsumexp(-1) ** 2)[targets != IGNORE].sum()
        assert ours["validation"] == pytest.approx(loss.item(), rel=1e-12)
        assert ours["loss"] == pytest.approx((loss + extra).item(), rel=1e-12)
        gradients = torch.autograd.grad(loss + extra, list(weights.values()))
        for (parameter, gradient), expected in zip(ours["gradients"].items(), gradients):
            error = (gradient - expected).norm() / expected.norm()
            assert error < 1e-12, (packed, parameter, error)
