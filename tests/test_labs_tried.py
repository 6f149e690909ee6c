"""Right answers in unusual styles pass, and wrong ones get a sentence of their own."""

import pytest
from test_labs import lab, student_file

SEND = """\
        work = dist.all_reduce(parameter.grad, async_op=True)
        pending.append((parameter, work))
"""
WAIT = """\
        for parameter, work in pending:
            work.wait()
            parameter.grad /= dist.get_world_size()
"""
PAIRS = {
    SEND: """\
        held.append(parameter)
        seen.append(parameter)
        if len(held) == 2 or len(seen) == len(list(model.parameters())):
            flat = torch.cat([p.grad.flatten() for p in held])
            pending.append((held[:], flat, dist.all_reduce(flat, async_op=True)))
            held.clear()
""",
    WAIT: """\
        seen.clear()
        for bucket, flat, work in pending:
            work.wait()
            flat /= dist.get_world_size()
            for p, part in zip(bucket, flat.split([p.numel() for p in bucket])):
                p.grad.copy_(part.view_as(p.grad))
""",
    "    pending = []": "    import torch\n\n    pending, held, seen = [], [], []",
}
SCATTERED = {
    SEND: """\
        flat = parameter.grad.flatten()
        flat = torch.nn.functional.pad(flat, (0, -len(flat) % dist.get_world_size()))
        own = flat.new_empty(len(flat) // dist.get_world_size())
        pending.append((parameter, own, dist.reduce_scatter_tensor(own, flat, async_op=True)))
""",
    WAIT: """\
        for parameter, own, work in pending:
            work.wait()
            whole = own.new_empty(len(own) * dist.get_world_size())
            dist.all_gather_into_tensor(whole, own)
            whole = whole[: parameter.grad.numel()] / dist.get_world_size()
            parameter.grad.copy_(whole.view_as(parameter.grad))
""",
    "    pending = []": "    import torch\n\n    pending = []",
}
FUNCTIONAL = {
    SEND: """\
        total = functional.all_reduce(parameter.grad, "sum", dist.group.WORLD)
        pending.append((parameter, total))
""",
    "work.wait()": "parameter.grad.copy_(functional.wait_tensor(work))",
    "    pending = []": """\
    import torch.distributed._functional_collectives as functional

    pending = []""",
}
LATE = {
    SEND: SEND.replace("work = ", "work = None if dist.get_rank() == 1 else "),
    WAIT: WAIT.replace(
        "            work.", "            work = work or send_now(parameter)\n            work."
    ),
    "    pending = []": """\
    def send_now(parameter):
        return dist.all_reduce(parameter.grad, async_op=True)

    pending = []""",
}
EARLY_WAIT = {SEND: SEND + "        if dist.get_rank() == 1:\n            work.wait()\n"}
NORM = """\
    norm = torch.stack([parameter.grad.norm() for parameter in parameters]).norm()
    for parameter in parameters:
        parameter.grad *= min(1.0, clip / norm)
"""
RETURN = "    return totals[0] / totals[1], norm"
FORWARD = "            loss = runner(tokens, targets)\n"
TOTAL = "        total += loss.detach()\n"
GATHER = "        dist.all_gather_into_tensor(weight, rows, group=within)\n"
FLAT = "total = tensor.flatten().clone()"
PASSES = ""
TRIED = [
    ("ddp", {"work.wait()": "work.get_future().wait()"}, PASSES),
    ("ddp", {"async_op=True)": "async_op=True).get_future().then(lambda f: f.value()[0].div_(3))",
             "            parameter.grad /= dist.get_world_size()\n": ""}, PASSES),
    ("ddp", FUNCTIONAL, PASSES),
    ("ddp", {SEND: f"        if not parameter.grad.any():\n            return\n{SEND}"},
     "does not come out"),
    ("ddp", PAIRS, PASSES),
    ("ddp", SCATTERED, PASSES),
    ("ddp", LATE, "A rank sends when backward is over"),
    ("ddp", EARLY_WAIT, "A rank waits for each all-reduce before it sends the next"),
    ("ddp", {"        pending.clear()\n": "        done.extend(pending)\n        pending.clear()\n",
             "    pending = []": "    pending, done = [], []"}, "keeps more tensors or handles"),
    ("ddp", {"= dist.all_reduce(": "= dist.distributed_c10d.all_reduce("}, "write it without"),
    ("ring", {FLAT: "total = tensor.view(-1).clone()"}, "flatten copies it where needed"),
    ("ring", {FLAT: "total = tensor.flatten().double()"}, "The sum of float32 is wrong"),
    ("ring", {"    return total.view_as(tensor)": "    return total.view(tensor.shape or 1)"},
     "without dimensions is wrong"),
    ("mean", {NORM: "    norm = torch.nn.utils.clip_grad_norm_(parameters, clip)\n"}, PASSES),
    ("mean", {RETURN: "    return number(totals[0] / totals[1]), number(norm)\n\n\n"
              "def number(x):\n    return x.item()"}, PASSES),
    ("mean", {RETURN: f"    dist.barrier()\n{RETURN}"}, "A barrier makes all ranks wait"),
    ("mean", {RETURN: f"    loss.data.mul_(2)\n{RETURN}"}, "has other numbers"),
    ("mean", {"grad /= totals[1]": "grad /= totals[1] if targets else targets"}, "0 / 0 is NaN"),
    ("logits", {"            dist.all_reduce(sums)": """\
            for i in range(len(targets)):
                of_token = sums[:, i].clone()
                dist.all_reduce(of_token)
                sums[:, i] = of_token"""}, "of all tokens at once"),
    ("fsdp", {"save_for_backward(x, rows)": "save_for_backward(x.clone(), rows)"},
     "kept for nothing"),
    ("nf4", {"scales = blocks.abs().amax(2)": "scales = blocks.abs().amax(2).bfloat16().float()"},
     "is not rounded"),
    ("hsdp", {"return weight\n": "return vars(gather).setdefault('kept', weight)\n"},
     "Right if it is called once"),
    ("hsdp", {"[within.rank()].clone()": "[within.rank()]"}, "A chunk is a view"),
    ("hsdp", {GATHER: f'{GATHER}        init_device_mesh("cpu", (nodes, per_node))\n'},
     "makes a group in every call"),
    ("accumulate", {"    total = 0.0": "    microbatches.reverse()\n    total = 0.0"},
     "or is gone"),
    ("accumulate", {FORWARD: f"{FORWARD}            runner.module(tokens, targets)\n"},
     "Each microbatch runs forward once"),
    ("accumulate", {TOTAL: f"        vars(runner).setdefault('x', []).append(loss.data)\n{TOTAL}"},
     "keeps more tensors in memory"),
    # Wrong formulas, known by the numbers that they give.
    ("zero1", {"square.sqrt() + EPS": "(square + EPS).sqrt()"}, "eps is added under the root"),
    ("zero1", {"parameters, moments, count =": "shown, parameters, moments, count = {},",
               "padded(parameter.grad))": "shown.setdefault(parameter, padded(parameter.grad)))"},
     "Every step has the gradients of the first"),
    ("context", {"mask, enable_gqa=True": "mask, scale=1.0, enable_gqa=True"}, "the root of E"),
    ("context", {"chunk[:, None] >=": "chunk[:, None] >"}, "A token does not see itself"),
    ("logits", {"- vocab_start": "- dist.get_rank() * logits.shape[1]"},
     "look for targets from [0, 34, 66] on"),
    ("mean", {"parameter.grad *= min(1.0, clip / norm)": "parameter.grad.clamp_(-clip, clip)"},
     "Each element is cut off at `clip`"),
    ("mean", {"grad /= totals[1]": "grad /= 1 if dist.get_rank() else totals[1]"},
     "Rank 0 alone divides"),
    ("ddp", {SEND: f"{SEND}        parameter.grad /= dist.get_world_size()\n",
             "            parameter.grad /= dist.get_world_size()\n": ""}, "after wait()"),
    ("accumulate", {"== len(microbatches) - 1": "== 1"}, "averaged after microbatch 2 of 4"),
    ("fsdp", {"            weight_grad = ": "            dist.all_reduce(x_grad)\n"
              "            weight_grad = "}, "The last matrix has its right gradient"),
    ("nf4", {"scales = blocks.abs().amax(2)":
             "scales = blocks.gather(2, blocks.abs().argmax(2, True))[..., 0]",
             "scales.clamp(min=1e-30)": "scales.where(scales != 0, 1e-30)"}, "has the sign of"),
    ("tp", {"return SumInForward.apply(hidden @ w2.T)":
            "total = SumInForward.apply(hidden @ w2.T)\n"
            "        return hidden @ w2.T if rank else total"}, "Rank 0 alone has what is right"),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name, change, says", TRIED)
def test_answers_in_other_styles(name, change, says, tmp_path):
    path, size = student_file(name, tmp_path, change), {"hsdp": 4, "nf4": 1}.get(name, 3)
    out = lab("check", name, "--file", path, "--ranks", size, code=1 if says else 0)
    assert says in " ".join(out.split()), out
