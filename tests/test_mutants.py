"""Mutants of model.py: each split trains one as a single process does, or refuses it in a line.

Those that are right start in every split that they can have: a check that refuses everything would
not pass. And bench.py equal names the first module that a fault reaches."""

import pytest
from conftest import changed_copy, launch, metrics, refused, slow, succeed, with_fault
from test_train import SIZES, flags, same_metrics

SPLITS = {  # two ranks each
    "ddp": dict(dp="ddp"), "fsdp": dict(dp="fsdp"),
    "tp": dict(tp=2), "pp": dict(pp=2, microbatch=2), "cp": dict(cp=2),
}  # fmt: skip
SMALL = dict(steps=3, n_layers=6)

SWIGLU, FEATURES = "return F.silu(gate) * up", "swiglu(self.w1(x), self.w3(x))"
FFN = "return x + self.feed_forward(self.ffn_norm(x))"
ATTENTION = "x = x + self.attention(self.attention_norm(x), rotation, mask, cache)"
Q = "q = rotate(self.queries(x), rotation)"
V = "v = self.values(x)"
NORM = "return rms_norm(x, self.weight, self.eps)"
EMBED = "else self.embed(tokens, in_documents)"
LOOP = "for name, block in self.layers.items():"
LOGITS = "return F.linear(hidden, weight)"
LOSS_OF = "return vocabulary.cross_entropy(logits, targets)"
SUM = "return torch.where(targets != IGNORE, losses, 0).sum()"
FORWARD_LOSS = "return self.loss(hidden, weight, targets, self.vocabulary)"

MADE = "        self.feed_forward = self.feed_forward_type(config)\n"
LATE = {MADE: f"{MADE}        self.late = layer == 5\n"}  # of six blocks
RIGHT = {  # equal under every split
    "GeGLU": {SWIGLU: "return F.gelu(gate) * up"},
    "parallel blocks": {ATTENTION: f"y{ATTENTION[1:]}", FFN: f"return y{FFN[8:]}"},
    "a cap of the logits": {LOGITS: "return 8 * (F.linear(hidden, weight) / 8).tanh()"},
    "smoothed labels": {LOSS_OF: "smooth = vocabulary.logsumexp(logits) - vocabulary.sum(logits) / "
                        f"vocabulary.size\n    {LOSS_OF} * 0.9 + 0.1 * smooth"},
    "focal loss": {LOSS_OF: f"loss ={LOSS_OF[6:]}\n    return loss * (1 - (-loss).exp())"},
    "norms of 1 + weight": {NORM: "return rms_norm(x, 1 + self.weight, self.eps)"},
    "no RoPE in odd layers": {
        Q: f"if self.layer % 2:\n            rotation = torch.eye(2)[0]\n        {Q}"},
    "values from keys": {V: f"{V} + k"},
    "a scale at the embedding": {EMBED: f"{EMBED} * 8"},
    "biases": {"self.wq = nn.Linear(config.dim, config.q_dim, bias=False)":
               "self.wq = nn.Linear(config.dim, config.q_dim, bias=True)"},
}  # fmt: skip
PARTLY = {  # equal under some splits, and refused under the named ones
    # Rows of one document have a mask under --cp alone.
    "a window of scores": (
        {"return visible[:, None]": "return visible[:, None] & (keys < 9)"}, "cp"),
    "a mean over heads": ({Q: f"{Q}\n        q = q - q.mean(2, keepdim=True)"}, "tp"),
    "a norm of the logits": (
        {LOGITS: "return 8 * F.normalize(F.linear(hidden, weight), dim=-1)"}, "tp"),
    "a rank's z-loss in training": (
        {FORWARD_LOSS: "z = F.linear(hidden, weight).logsumexp(-1)[targets != IGNORE].sum()\n"
         f"            {FORWARD_LOSS} + self.training * z"}, "tp"),
    "a scale in each stage": ({LOOP: f"x = 2 * x\n            {LOOP}"}, "pp"),
    "another first block": (
        {LOOP: "first = next(iter(self.layers))\n            "
         f"{LOOP}\n                x = 2 * x if name == first else x"}, "pp"),
    "tokens shifted": ({FFN: f"x = x + F.pad(x, (0, 0, 1, -1))\n        {FFN}"}, "cp"),
    "later tokens seen": ({"is_causal=mask is None": "is_causal=False"}, "cp"),
    "positions of a rank": (
        {"self.rotation(in_documents)": "self.rotation(torch.arange(T)[None])"}, "cp"),
    "a condition on the length": (
        {FFN: f"x = 2 * x if x.shape[1] > 13 else x\n        {FFN}"}, "cp"),
    "the token after next": (
        {FORWARD_LOSS: f"{FORWARD_LOSS} + self.loss(hidden[:, :-1], weight, targets[:, 1:], "
         "self.vocabulary)"}, "cp"),
    "tokens shifted in a late layer": (
        {FFN: "x = x + self.late * F.pad(x, (0, 0, 1, -1))\n        " + FFN, **LATE}, "cp"),
    "a mean over heads in a late layer": (
        {Q: f"{Q}\n        if self.layer == 5:\n            q -= q.mean(2, keepdim=True)"}, "tp"),
    "a condition on the rank": (
        {FFN: "import os\n        x = 2 * x if os.environ.get('RANK') == '1' else x\n"
         f"        {FFN}"}, "ddp fsdp tp pp cp"),
}  # fmt: skip
WRONG = {  # on one process, too
    "detached": {FEATURES: "swiglu(self.w1(x).detach(), self.w3(x))"},
    "detached in a late layer": {
        FFN: "if self.late:\n            x = x.detach()\n        " + FFN, **LATE},
    "a layer is not called": {FEATURES: "F.silu(self.w1(x))"},
    "without gradients": {ATTENTION: f"with torch.no_grad():\n            {ATTENTION}"},
    "rounded": {FEATURES: f"{FEATURES}.bfloat16().to(x)"},
    "a mean of losses": {SUM: SUM.replace(".sum()", ".mean()")},
    "a mean over targets": {SUM: f"{SUM} / (targets != IGNORE).sum()"},
    "IGNORE counts": {SUM: "return torch.where(targets != IGNORE, losses, 1).sum()"},
    "a mean of rows": {FFN: f"x = x - 0.5 * x.mean(0)\n        {FFN}"},
    "counted calls": {FFN: "self.calls = getattr(self, 'calls', 0) + 1\n"
                      f"        x = x * (1 + 1 / self.calls)\n        {FFN}"},
    "dropout without a condition": {FFN: f"{FFN[:-3]}F.dropout(x, 0.1)))"},
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", [*RIGHT, *PARTLY])
def test_it_is_equal_or_refused(name, corpus, tmp_path):
    edits, refused_under = PARTLY.get(name, (RIGHT.get(name), ""))
    changed = changed_copy(tmp_path / "copy", edits=edits)
    for split, given in ({"one": {}} | SPLITS).items():
        out = tmp_path / split
        run = flags(corpus, out, **SMALL, **given)
        result = launch(*changed, "train.py", *run, nproc=2 * bool(given))
        if split in refused_under.split():
            refused(result)
        else:
            assert result.code == 0 and "Traceback" not in result.err, (split, result.err)
            same_metrics(metrics(out), metrics(tmp_path / "one"))


QUICK = "a mean of losses", "dropout without a condition"


@pytest.mark.parametrize("name", [name if name in QUICK else slow(name) for name in WRONG])
def test_it_is_refused_on_one_process(name, corpus, tmp_path):
    changed = changed_copy(tmp_path / "copy", edits=WRONG[name])
    run = flags(corpus, tmp_path / "run", **SMALL)
    refused(launch(*changed, "train.py", *run), "model.py")


# ---------------------------------------------------------------------------- bench.py equal

EQUAL = ["bench.py", "equal", *SIZES, "--seq-len=32", "--batch=4", "--microbatch=1", "--data"]


def test_a_step_of_the_project_is_equal(corpus):
    """As every run of several processes finds before its first step."""
    assert succeed(*EQUAL, corpus, "--tp=2", nproc=2).out.endswith("the steps are equal\n")


FAULTS = [  # a file, what stands there and what replaces it, the flags, what is named
    ("parallel", "hidden.to_local(grad_placements=[Partial()])", "hidden.to_local()",
     "--tp 2", "first in backward: the gradient of the output of norm, "),
    slow("zero1", "gradient / self.mesh.size()", "gradient",
         "--dp zero1", "first in reduction: the gradient of norm.weight, relative difference 1;"),
    slow("zero1", "parameter.data.copy_(value.to_local())", "pass",
         "--dp zero1", "first in update: "),
]  # fmt: skip


@pytest.mark.parametrize("file, old, new, split, named", FAULTS)
def test_a_fault_is_named_in_its_module(file, old, new, split, named, corpus, tmp_path):
    within = with_fault(tmp_path / "copy", file, old, new)
    result = launch(*within, *EQUAL, corpus, *split.split(), nproc=2)
    assert result.code == 1, result.err
    assert named in result.out and "usual causes" in result.out
