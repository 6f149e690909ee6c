"""The results of `bench.py gpu` as Markdown, for docs/measured.md."""

import re

from perf.instruments import markdown_table

TITLE = "## On one GPU"


def replace_section(text: str, section: str) -> str:
    """Return a document with its section TITLE replaced, or with the section at its end."""
    found = re.search(rf"^{TITLE}\n.*?(?=^## |\Z)", text, flags=re.MULTILINE | re.DOTALL)
    if not found:
        return f"{text.rstrip()}\n\n{section}\n"
    return f"{text[: found.start()]}{section}\n\n{text[found.end() :]}".rstrip() + "\n"


def markdown_section(report: dict, command: str) -> str:
    """Return the section: a table for each part that was measured."""
    machine = report.get("machine") or {}
    lines = [
        TITLE,
        "",
        f"{machine.get('device', 'no GPU')}, driver {machine.get('driver')}, torch "
        f"{machine.get('torch')}, {machine.get('date', '')[:10]} (`{command}`). Quartiles in "
        f"parentheses; what stands in one table ran in turns.",
    ]
    for name, part in report["parts"].items():
        lines += ["", f"**{name}** ({part['took']} s)", ""]
        if "error" in part:
            lines.append(f"not measured: {part['error']}")
        else:
            kind = name.split("-")[0]
            lines += TABLES[kind](part["results"])
    return "\n".join(lines)


def seconds_text(quartiles: list[float]) -> str:
    lower, middle, upper = (f"{value:.4g}" for value in quartiles)
    return f"{middle} ({lower}-{upper})"


def gigabytes(nbytes: int | None) -> str:
    return f"{nbytes / 1e9:.1f}" if nbytes else "-"


def percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"


def rates_table(results: dict) -> list[str]:
    def rate(result: dict) -> str:
        unit = {"FLOP/s": "TFLOP/s", "bytes/s": "TB/s"}[result["unit"]]
        return f"{result['rate'] / 1e12:,.3g} {unit}"

    rows = [[name, seconds_text(r["seconds"]), rate(r)] for name, r in results.items()]
    return markdown_table(["operation", "seconds", "rate"], rows)


def loss_table(results: dict) -> list[str]:
    rows = [[n, seconds_text(r["seconds"]), gigabytes(r["peak"])] for n, r in results.items()]
    return markdown_table(["LOSS_CHUNK", "seconds", "peak GB"], rows)


def training_table(results: dict) -> list[str]:
    headings = "step|seconds|tokens/s|MFU|MFU, causal|peak GB|predicted GB|compiling s".split("|")
    rows = []
    for name, result in results.items():
        speed = [result.get("error", "-"), "-", "-", "-"]
        if "seconds" in result:
            speed = [seconds_text(result["seconds"]), f"{result['tokens/s']:,.0f}"]
            speed += [percent(result["mfu"]), percent(result["causal mfu"])]
        memory = [gigabytes(result.get("peak")), gigabytes(result.get("predicted"))]
        first = f"{result['compiling']:.0f}" if "compiling" in result else "-"
        rows.append([name, *speed, *memory, first])
    return markdown_table(headings, rows)


def parts_table(results: dict) -> list[str]:
    whole = sum(results["seconds"].values())
    rows = [[part, f"{s:.4f}", percent(s / whole)] for part, s in results["seconds"].items()]
    peak, predicted = gigabytes(results["memory"]["peak"]), gigabytes(results["predicted"])
    return [
        *markdown_table(["part", "seconds", "share"], rows),
        "",
        f"Peak {peak} GB, predicted {predicted}. Time stamps cost "
        f"{percent(results['time stamps'])} of a step.",
    ]


def largest_table(results: dict) -> list[str]:
    rows = [[name, r["fits"], r["predicted to fit"]] for name, r in results.items()]
    return markdown_table(["sequences of a microbatch", "fit", "predicted to fit"], rows)


TABLES = {  # kind of part -> the lines of its table
    "rates": rates_table,
    "loss": loss_table,
    "train": training_table,
    "float8": training_table,
    "lora": training_table,
    "step": parts_table,
    "largest": largest_table,
}
