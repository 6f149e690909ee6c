"""Questions about a plan: what a run takes and costs, how often to save, what the time hangs on.

python bench.py plan --gpus 512 --model llama3.1-70b --tokens 15e12 --dollars 2.5 --mtbf 20000
"""

import itertools
import math
from dataclasses import dataclass, replace
from html import escape
from operator import itemgetter

from costs.search import Plan, order
from perf.evidence import spread_of
from plumbing.processes import UserError


@dataclass(frozen=True)
class Run:
    """What a plan is to be used for; None where it was not asked."""

    tokens: float | None = None  # to train on
    dollars: float | None = None  # for a GPU and hour
    mtbf: float | None = None  # mean hours between failures of a node
    save: float = 60.0  # seconds in which a checkpoint is written and nothing trains
    restart: float = 600.0  # seconds from a failure to the next step


def best_interval(save: float, mtbf: float) -> float:
    """Return the seconds of training between two saves with which a run ends first, if a save takes
    `save` seconds and the cluster fails every `mtbf` on average (Young 1974: the square root; Daly
    2006, doi:10.1016/j.future.2004.11.016: the rest)."""
    if save >= 2 * mtbf:
        return mtbf
    x = save / (2 * mtbf)
    return math.sqrt(2 * save * mtbf) * (1 + math.sqrt(x) / 3 + x / 9) - save


def goodput(interval: float, save: float, restart: float, mtbf: float) -> float:
    """Return the share of the time that trains, if failures come at random: what was trained since
    the last save is lost, and a restart may fail too (Daly 2006)."""
    return interval / mtbf / math.exp(restart / mtbf) / math.expm1((interval + save) / mtbf)


def about_run(plan: Plan, run: Run) -> list[str]:
    """Return sentences with days, GPU-hours, cost and goodput, as far as they were asked for."""
    work, lines, share = plan.work, [], 1.0
    gpus = work.parallel.size
    if run.mtbf:
        nodes = math.ceil(gpus / plan.machine.per_node)
        given = run.save, run.restart, run.mtbf * 3600 / nodes
        steps = max(1, round(best_interval(run.save, given[2]) / plan.seconds))
        share = goodput(steps * plan.seconds, *given)
        lines.append(
            f"If a node fails every {run.mtbf:,.0f} h, one of {nodes} fails every "
            f"{run.mtbf / nodes:,.1f} h. With saves of {run.save:,.0f} s and restarts of "
            f"{run.restart:,.0f} s the best is --save-every {steps}, "
            f"{steps * plan.seconds / 60:,.0f} minutes: {share:.1%} of the time trains."
        )
    if run.tokens:
        hours = run.tokens / (work.batch * work.seq_len) * plan.seconds / 3600 / share
        cost = f", ${hours * gpus * run.dollars:,.0f}" if run.dollars else ""
        spread = f" ±{spread_of(plan):.0%}" if not plan.machine.measured else ""
        lines.append(
            f"{run.tokens:.4g} tokens take {hours / 24:,.1f} days{spread}, "
            f"{hours * gpus:,.0f} GPU-hours{cost}."
        )
    return lines


def sensitivity(plan: Plan) -> str:
    """Return in a sentence how the time of a step changes with assumptions about the machine."""
    machine = plan.machine
    changes = {
        "links half as fast": dict(node_link=machine.node_link / 2, link=machine.link / 2),
        "attention at 0.5 of the peak": dict(attention_fraction=0.5, flash_fraction=0.0),
        "products 10 % slower": dict(matmul_fraction=0.9 * machine.matmul_fraction),
    }
    told = (
        f"with {name} {Plan(plan.work, replace(machine, **fields)).seconds / plan.seconds - 1:+.0%}"
        for name, fields in changes.items()
    )
    return f"Its time would change: {', '.join(told)}."


def compare_with_diloco(plan: Plan) -> list[str]:
    """Return a sentence with the speed of links between nodes at which DiLoCo, with a replica per
    node, takes less than half of a plan's time; [] where it does not fit or does not combine."""
    parallel, machine = plan.work.parallel, plan.machine
    nodes, data_ranks = parallel.size // machine.per_node, parallel.size // parallel.tp
    sequences, rest = divmod(plan.work.batch, data_ranks)
    frozen = any(not parameter.requires_grad for parameter in plan.work.model.parameters())
    if nodes < 2 or data_ranks % nodes or rest or frozen or parallel.dp == "diloco":
        return []
    sizes = dict(replicate=nodes, shard=data_ranks // nodes, cp=1, pp=1)
    try:
        split = replace(parallel, dp="diloco", schedule="1f1b", stages_per_rank=1, **sizes)
    except UserError:
        return []
    work = replace(plan.work, parallel=split, microbatch=math.gcd(plan.work.microbatch, sequences))
    if not Plan(work, machine).fits:
        return []
    slower = [replace(machine, link=machine.link / 2**halvings) for halvings in range(20)]
    links = (m.link for m in slower if 2 * Plan(work, m).seconds < Plan(plan.work, m).seconds)
    told = (
        f"With --link {8 * link / 1e9:.3g}gbit it would take twice as long as --dp diloco --every "
        f"{parallel.every}, which is another training."
        for link in links
    )
    return list(itertools.islice(told, 1))


def best_batch(questions: list) -> tuple:
    """Return that of some Questions (perf/plan.py), alike but for their batch, whose best plan
    trains on the most tokens a second, and a sentence. Where nothing fits, the first and ""."""
    best = [min(question.plans(), key=order, default=None) for question in questions]
    found = [(p.tokens_per_second, q) for p, q in zip(best, questions) if p and p.fits]
    if not found:
        return questions[0], ""
    told = ", ".join(f"{q.work.batch}: {speed:,.0f}" for speed, q in found)
    _, chosen = max(found, key=itemgetter(0))
    return chosen, f"Tokens/s per GPU by --batch: {told}. The best is {chosen.work.batch}."


def plot(plans: dict[int, Plan], run: Run) -> str:
    """Return a picture of the best plan for each number of GPUs: the time of a step, and the GPU
    time of the run, or of a step; below, the meshes."""
    seconds = {n: plan.seconds for n, plan in plans.items()}
    title, factor = "GPU-seconds a step", 1.0
    if run.tokens:
        work = next(iter(plans.values())).work
        factor = run.tokens / (work.batch * work.seq_len) / 3600 * (run.dollars or 1)
        title = "dollars" if run.dollars else "GPU-hours"
        title += f" for {run.tokens:.4g} tokens"
    used = {n: n * s * factor for n, s in seconds.items()}
    width, height, step = 150 * len(plans) + 60, 420, 150
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="12" text-anchor="middle">',
        "<style>text { fill: #1f2328 } @media (prefers-color-scheme: dark) "
        "{ text { fill: #e6edf3 } }</style>",
    ]
    rows = (("seconds a step", seconds, 30, "#4c8dd6"), (title, used, 210, "#dd8435"))
    for name, values, top, colour in rows:
        low, high = min(values.values()), max(values.values())
        points = [
            (90 + step * i, top + 120 - 90 * (math.log(v / low) / (math.log(high / low) or 1)), v)
            for i, v in enumerate(values.values())
        ]
        line = " ".join(f"{x:.0f},{y:.0f}" for x, y, _ in points)
        parts.append(f'<text x="{width / 2:.0f}" y="{top}">{name}, logarithmic</text>')
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}"/>')
        for x, y, value in points:
            parts.append(f'<circle cx="{x:.0f}" cy="{y:.0f}" r="3" fill="{colour}"/>')
            parts.append(f'<text x="{x:.0f}" y="{y - 8:.0f}">{value:,.3g}</text>')
    for i, (n, plan) in enumerate(plans.items()):
        label = f"{n} GPUs", plan.mesh
        parts += [f'<text x="{90 + step * i}" y="{370 + 18 * j}">{escape(text)}</text>'
                  for j, text in enumerate(label)]  # fmt: skip
    return "\n".join([*parts, "</svg>"]) + "\n"
