"""Draw the pictures of README.md and docs from what was measured or is predicted.

    python docs/pictures.py                    docs/*.svg; needs matplotlib
    python docs/pictures.py --run out/tiny     the same, with the losses of a new run

docs/measured.md has the commands that measured the rest. The pictures suit white and dark pages: a
style sheet in each SVG exchanges the colours of text and background where the reader prefers a dark
page.
"""

import argparse
import csv
import io
import json
import re
import statistics
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from matplotlib import rcParams  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch  # noqa: E402

import bench  # noqa: E402
from config import ParallelConfig, Work  # noqa: E402
from costs.page import (  # noqa: E402
    holds,
    sends,
    sent_bytes,
)
from docs.side_by_side import BLOCKS, ROWS  # noqa: E402
from model import PRESETS  # noqa: E402
from perf.instruments import build_on_meta  # noqa: E402
from plumbing.processes import Process  # noqa: E402
from techniques import schedules  # noqa: E402
from techniques.schedules import SCHEDULES  # noqa: E402
from techniques.timelines import FILLS, draw_svg  # noqa: E402

MEASURED = ROOT / "docs/measured"
INK, GREY, PAPER = "#1f2328", "#6e7781", "#ffffff"
ON_DARK_PAGES = {INK: "#e6edf3", GREY: "#9198a1", PAPER: "#0d1117"}
BLUE, ORANGE, GREEN, RED = "#4c8dd6", "#dd8435", "#46a568", "#cf5b5b"


def new_figure(width: float, height: float, columns: int = 1, **options) -> tuple[Figure, list]:
    """Return a figure of this size in inches, and its axes."""
    figure = Figure(figsize=(width, height), facecolor=PAPER, layout="constrained")
    axes = figure.subplots(1, columns, squeeze=False, **options)[0]
    for ax in axes:
        ax.set_facecolor("none")
        ax.spines[["top", "right", "left"]].set_visible(False)
        ax.tick_params(length=0)
    return figure, list(axes)


def save(figure: Figure, path: Path) -> None:
    """Write an SVG with the colours of both kinds of pages."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    rules = "".join(
        f'[style*="{kind}: {light}"] {{ {kind}: {dark} !important }} '
        for light, dark in ON_DARK_PAGES.items()
        for kind in ("fill", "stroke")
    )
    style = f"<style>@media (prefers-color-scheme: dark) {{ {rules}}}</style>\n <defs>"
    path.write_text(buffer.getvalue().replace("<defs>", style, 1))
    print(path)


# ------------------------------------------------------------------------------ the pictures


def keep_losses(out: Path) -> None:
    """Copy the losses of a run to docs/measured."""
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    lines = ["step,bits_per_byte,val_bits_per_byte"]
    for row in rows:
        validation = f"{row['val_bits_per_byte']:.4f}" if "val_bits_per_byte" in row else ""
        lines.append(f"{row['step']},{row['bits_per_byte']:.4f},{validation}")
    (MEASURED / "loss.csv").write_text("\n".join(lines) + "\n")


def draw_loss(path: Path) -> None:
    """Bits per byte of the default run: each step, the mean of 50, and validation."""
    rows = [line.split(",") for line in (MEASURED / "loss.csv").read_text().splitlines()[1:]]
    bits = [float(row[1]) for row in rows]
    validation = [(int(row[0]), float(row[2])) for row in rows if row[2]]
    figure, (ax,) = new_figure(7, 3)
    steps = range(1, len(bits) + 1)
    ax.plot(steps, bits, color=BLUE, alpha=0.3, linewidth=0.7)
    means = [statistics.mean(bits[step - 25 : step + 25]) for step in steps[25:-25]]
    ax.plot(steps[25:-25], means, color=BLUE, linewidth=1.8)
    ax.plot(*zip(*validation), "o", color=ORANGE, markersize=5)
    last, value = validation[-1]
    ax.annotate("each step, and the mean of 50", (230, 2.65), color=BLUE)
    told = dict(color=ORANGE, textcoords="offset points", ha="right")
    ax.annotate(f"validation: {value:.3f} at the end", (last, value), (0, 34), **told)
    ax.set_ylim(1.3, 3.4)
    ax.grid(axis="y", color=GREY, alpha=0.25)
    ax.set_xlabel("step")
    ax.set_title("torchrun train.py: bits per byte of text", loc="left")
    save(figure, path)


def draw_strategies(path: Path) -> None:
    """Peak memory of a rank and the bytes that it sends, by strategy: measured and predicted."""
    report = json.loads((MEASURED / "strategies.json").read_text())
    names = list(report["strategies"])
    step = {name: report[name] for name in ("model", "batch", "microbatch", "seq_len")}
    asked = bench.Comparison(**step)
    process = Process(0, report["ranks"], 0, report["per_node"], torch.device("cpu"))
    counted = report["strategies"].values()
    memory, traffic = [], []
    for work in (bench.work_of(asked, name, process) for name in names):
        memory.append(holds(work)["peak"] / 1e9)
        traffic.append(sent_bytes(sends(work), work.parallel) / 1e9)
    figure, (left, right) = new_figure(8, 0.9 + 0.36 * len(names), columns=2, sharey=True)
    bars(left, names, [row["peak_bytes"] / 1e9 for row in counted], memory, BLUE)
    bars(right, names, [row["sends"] / 1e9 for row in counted], traffic, ORANGE)
    left.set_title("peak memory of a rank, GB", loc="left")
    right.set_title("a rank sends in a step, GB", loc="left")
    left.invert_yaxis()
    figure.supxlabel("bars: counted; lines: predicted", color=GREY, fontsize=9)
    save(figure, path)


def bars(ax: Axes, names: list[str], counted: list[float], predicted: list[float], color) -> None:
    """Draw horizontal bars with their values, and a line across each where it was predicted."""
    drawn = ax.barh(names, counted, color=color, height=0.62)
    ax.bar_label(drawn, [f"{value:.2f}" for value in counted], padding=6, color=INK)
    for row, value in enumerate(predicted):
        ax.plot([value, value], [row - 0.42, row + 0.42], color=INK, linewidth=1.6)
    ax.margins(x=0.16)
    ax.set_xticks([])
    ax.spines["bottom"].set_visible(False)


def draw_two_nodes(path: Path) -> None:
    """Seconds a step of four strategies on two nodes, over links of three speeds."""
    links = {"none": "no limit", "200mbit": "200 Mbit/s", "50mbit": "50 Mbit/s"}
    reports = [json.loads((MEASURED / f"two_nodes_{link}.json").read_text()) for link in links]
    labels = {
        "ddp": ("DDP", BLUE),
        "fsdp": ("FSDP over all ranks", ORANGE),
        "hsdp": ("HSDP: shards within a node", GREEN),
        "wrong": ("HSDP, the mesh the wrong way round", RED),
    }
    figure, (ax,) = new_figure(8, 3.4)
    for place, (name, (label, color)) in enumerate(labels.items()):
        medians = [statistics.median(r["strategies"][name]["seconds"]) for r in reports]
        positions = [group + 0.2 * (place - 1.5) for group in range(len(links))]
        drawn = ax.bar(positions, medians, 0.18, color=color, label=label)
        ax.bar_label(drawn, [f"{median:.2f}" for median in medians], padding=2, color=INK)
    ax.set_xticks(range(len(links)), [f"{text} between nodes" for text in links.values()])
    ax.set_yticks([])
    ax.legend(frameon=False, loc="upper left")
    ax.set_title("seconds a step, two nodes of two ranks", loc="left")
    save(figure, path)


def draw_context(path: Path) -> None:
    """Peak memory of a rank by the number of ranks that share a sequence."""
    lines = (MEASURED / "context.csv").read_text().splitlines()[1:]
    ranks, counted, predicted = zip(*(map(int, line.split(",")) for line in lines))
    names = [f"{n} ranks" if n > 1 else "one rank" for n in ranks]
    figure, (ax,) = new_figure(7, 1.9)
    bars(ax, names, [n / 1e9 for n in counted], [n / 1e9 for n in predicted], BLUE)
    ax.set_title("a sequence of 8,192 tokens: peak memory of a rank, GB", loc="left")
    ax.invert_yaxis()
    figure.supxlabel("bars: counted; lines: predicted", color=GREY, fontsize=9)
    save(figure, path)


def draw_float8(path: Path) -> None:
    """Bits per byte, the mean of 25 steps, beside float32: by recipe, and for other seeds."""
    header, *lines = (MEASURED / "float8.csv").read_text().splitlines()
    columns = dict(zip(header.split(",")[1:], zip(*(line.split(",")[1:] for line in lines))))

    def means(name: str) -> list[float]:
        bits = [float(value) for value in columns[name]]
        return [statistics.mean(bits[i : i + 25]) for i in range(len(bits) - 24)]

    float32 = means("float32")
    steps = range(13, 13 + len(float32))
    figure, (ax,) = new_figure(7, 3)
    colors = {"tensorwise": BLUE, "rowwise": GREEN, "mxfp8": RED}
    for name in columns:
        difference = [a - b for a, b in zip(means(name), float32)]
        of_recipe = dict(color=colors.get(name, GREY), linewidth=1.5 if name in colors else 0.8)
        ax.plot(steps, difference, **of_recipe, label=name if name in colors else None)
    ax.plot([], [], color=GREY, linewidth=0.8, label="float32, other seeds")
    figure.legend(frameon=False, ncols=4, loc="outside lower center")
    ax.set_ylim(-0.2, 0.2)
    ax.grid(axis="y", color=GREY, alpha=0.25)
    ax.set_xlabel("step")
    ax.set_title("bits per byte, beside those of float32 (mean of 25 steps)", loc="left")
    save(figure, path)


def draw_mesh(path: Path) -> None:
    """Eight ranks on two nodes as 2 x 2 x 2: who communicates with whom, and how much."""
    sizes = dict(replicate=2, shard=2, tp=2)
    parallel = ParallelConfig(dp="hsdp", dtype=torch.bfloat16, **sizes)
    model = build_on_meta(PRESETS["llama3.1-8b"])
    traffic = sends(Work(model, parallel, batch=16, microbatch=1, seq_len=8192))
    sent = {
        dim: sent_bytes({k: v for k, v in traffic.items() if k[0] == dim}, parallel) / 1e9
        for dim in sizes
    }
    what = {
        "tp": "tp: activations of every layer",
        "shard": "shard: weights, and their gradients",
        "replicate": "replicate: gradients, once a step",
    }
    colors = {"tp": RED, "shard": ORANGE, "replicate": BLUE}
    figure, (ax,) = new_figure(8, 3.6)
    ax.set_axis_off()
    ax.set(xlim=(0, 16), ylim=(0, 7.2), aspect="equal")

    def place(rank: int) -> tuple[float, float]:
        node, shard, tp = rank // 4, rank // 2 % 2, rank % 2
        return 2 + 6.2 * node + 2.4 * tp, 5 - 2.4 * shard

    for node in range(2):
        ax.add_patch(rounded(0.9 + 6.2 * node, 1.5, 4.6, 4.6, edgecolor=GREY, linestyle="--"))
        ax.text(3.2 + 6.2 * node, 6.35, f"node {node}", color=GREY, ha="center")
    for dim, stride in (("replicate", 4), ("shard", 2), ("tp", 1)):
        for rank in range(8):
            if rank // stride % 2 == 0:
                ax.add_patch(link(place(rank), place(rank + stride), dim, colors[dim], sent[dim]))
    for rank in range(8):
        x, y = place(rank)
        ax.add_patch(rounded(x - 0.55, y - 0.55, 1.1, 1.1, edgecolor=INK, facecolor=PAPER))
        ax.text(x, y, f"{rank}", color=INK, ha="center", va="center", fontsize=13)
    for row, dim in enumerate(what):
        ax.text(12.2, 5 - 1.2 * row, what[dim], color=colors[dim], va="center", fontsize=10)
        ax.text(12.2, 4.55 - 1.2 * row, f"{sent[dim]:.0f} GB", color=INK, va="center")
    ax.text(
        0.9, 0.7, "Llama 3.1 8B, a step of 4 microbatches of 8,192 tokens: what each rank sends. "
        "What talks most stays in a node.", color=INK, fontsize=9,
    )  # fmt: skip
    save(figure, path)


def draw_models(path: Path) -> None:
    """The blocks of all families side by side; what differs from Llama's is filled."""
    figure, (ax,) = new_figure(1.2 + 1.4 * len(BLOCKS), 2.7)
    for column, (family, cells) in enumerate(BLOCKS.items()):
        ax.text(column, 0.75, family, ha="center", weight="bold", color=INK)
        for row, (cell, of_llama) in enumerate(zip(cells, BLOCKS["llama"])):
            differs = row > 0 and cell != of_llama
            ax.add_patch(rounded(column - 0.47, -row - 0.36, 0.94, 0.72,
                                 BLUE if differs else "none", edgecolor=GREY))  # fmt: skip
            words = cell
            if len(cell) > 17:  # in two lines
                middle = cell.find(" ", len(cell) // 2 - 2)
                words = f"{cell[:middle]}\n{cell[middle + 1 :]}"
            ax.text(column, -row, words, ha="center", va="center", fontsize=7.5, color=INK)
    for row, name in enumerate(ROWS):
        ax.text(-0.6, -row, name, ha="right", va="center", color=GREY)
    ax.set_xlim(-1.4, len(BLOCKS) - 0.4)
    ax.set_ylim(-len(ROWS) + 0.5, 1.2)
    ax.axis("off")
    save(figure, path)


def draw_rewards(path: Path) -> None:
    """What runs of rewards.py record, the mean of ten steps: three seeds of each way."""
    rows = csv.DictReader((MEASURED / "rewards.csv").read_text().splitlines())
    runs = defaultdict(list)  # way and seed -> rows
    for row in rows:
        runs[row["way"], row["seed"]].append(row)
    titles = dict(reward="reward", length="tokens of an answer", kl="KL, nats a token",
                  clipped="share of clipped tokens")  # fmt: skip
    figure, axes = new_figure(11, 2.8, columns=len(titles))
    ways = [*dict.fromkeys(way for way, _ in runs)]
    colors = dict(zip(ways, (BLUE, ORANGE, GREEN, RED)))
    for ax, (name, title) in zip(axes, titles.items()):
        for (way, seed), of_run in runs.items():
            steps = [int(row["step"]) for row in of_run]
            values = [float(row[name]) for row in of_run]
            label = way if seed == "0" else None
            ax.plot(steps, values, color=colors[way], linewidth=1.1, label=label)
        ax.set_title(title, loc="left", fontsize=10)
        ax.grid(axis="y", color=GREY, alpha=0.25)
        ax.set_xlabel("step")
    axes[0].legend(frameon=False, fontsize=8, loc="lower right")
    save(figure, path)


def draw_pipeline(path: Path) -> None:
    """The three schedules for four ranks and eight microbatches, one below another; the times of
    interleaved stages, two on a rank, are half of the others'."""
    key = {"F": "forward", "B": "backward; paler: a later stage"}
    words = (f'<tspan fill="{FILLS[kind]}">■</tspan> {word} ' for kind, word in key.items())
    parts, height = [f'<text x="60" y="20">{"".join(words)}</text>'], 26
    for name in SCHEDULES:
        v = schedules.STAGES.get(name, 1)
        spans = schedules.check_schedule(schedules.make_schedule(name, 4, 8, v), 8, 4 * v)
        share = f"{100 * schedules.bubble(spans):.0f} %"
        drawing = draw_svg(spans, f"{name}: ranks wait {share} of the time")
        own_height = int(re.search(r'viewBox="0 0 900 (\d+)"', drawing)[1])
        parts.append(drawing.replace("<svg ", f'<svg y="{height}" height="{own_height}" ', 1))
        height += own_height + 6
    font = 'font-family="sans-serif" font-size="12"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 900 {height}" {font}>'
    path.write_text("\n".join([head, *parts, "</svg>\n"]))


def rounded(x: float, y: float, width: float, height: float, facecolor="none", **options):
    box = "round,pad=0,rounding_size=0.2"
    return FancyBboxPatch((x, y), width, height, box, facecolor=facecolor, **options)


def link(start: tuple, end: tuple, dim: str, color: str, gigabytes: float) -> FancyArrowPatch:
    """Return a line between two ranks, as wide as what it carries; over replicate, an arc."""
    bend = "arc3,rad=-0.22" if dim == "replicate" else "arc3"
    return FancyArrowPatch(
        start, end, arrowstyle="-", connectionstyle=bend, color=color, linewidth=gigabytes / 8
    )


PICTURES = {
    "mesh": draw_mesh,
    "loss": draw_loss,
    "strategies": draw_strategies,
    "two_nodes": draw_two_nodes,
    "pipeline": draw_pipeline,
    "context": draw_context,
    "float8": draw_float8,
    "models": draw_models,
    "rewards": draw_rewards,
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw the pictures of README.md and docs.")
    parser.add_argument("--run", type=Path, metavar="OUT", help="take the losses of this run")
    args = parser.parse_args()
    if args.run:
        keep_losses(args.run)
    rcParams.update({
        "svg.fonttype": "none",  # text stays text
        "svg.hashsalt": "flatllama",  # the same data give the same file
        "font.family": "sans-serif",
        "font.size": 10,
        **dict.fromkeys(["text.color", "axes.labelcolor", "axes.titlecolor"], INK),
        **dict.fromkeys(["xtick.color", "ytick.color", "axes.edgecolor"], GREY),
        **dict.fromkeys(["xtick.labelcolor", "ytick.labelcolor", "legend.labelcolor"], INK),
    })  # fmt: skip
    for name, draw in PICTURES.items():
        draw(ROOT / "docs" / f"{name}.svg")


if __name__ == "__main__":
    main()
