"""What command lines no longer take, and what replaces it.

To retire a flag, one of its values, or a command, add it to RETIRED as it was typed; and a line to
docs/deleted.md, which says why it went. Runs whose checkpoints can then no longer be loaded have a
flag in ENDED, too.
"""

from plumbing.messages import UserError

LAST_COMMIT = "86671ca"  # the last that has what went after 2026-11-27

# A flag, a flag and its value, or a script and its command -> what a user has to know.
RETIRED = {
    ("--dollars",): "multiply the GPU-hours that --tokens prints by what one costs",
    ("--format", "meta"): "use --format hf, which other programs read",
    ("--measured",): "nccl-tests measure links: give their speed to bench.py plan as --link",
    ("bench.py", "comm"): "nccl-tests measure links, whose speed bench.py plan takes as --link",
    ("--dp", "diloco"): (
        f"use --dp hsdp; labs/rarely teaches DiLoCo, and commit {LAST_COMMIT} trains by it, and "
        f"resumes its runs"
    ),
    ("--schedule", "zero-bubble"): (
        f"use --schedule 1f1b, with which its runs resume, or interleaved; labs/pipeline teaches "
        f"it, and commit {LAST_COMMIT} trains by it, and resumes its runs"
    ),
    ("--per-node",): "give --gpus NODESxGPUS, as 4x4",
}

# A flag and its value, of runs that only LAST_COMMIT can resume.
ENDED = [("--dp", "diloco")]


def check_words(script: str, words: list[str]) -> None:
    """Raise UserError if a command line, `script` and `words`, has something that is retired."""
    line = [script]
    for word in words:
        line += word.split("=", 1) if word.startswith("--") else [word]
    for word, next_word in zip(line, [*line[1:], ""]):
        for typed in ((word,), (word, next_word)):
            if typed in RETIRED:
                raise UserError(f"{' '.join(typed)} is retired: {RETIRED[typed]}")


def check_run(flags: dict) -> None:
    """Raise UserError if nothing here can resume a run with these flags, by their names."""
    for flag, value in ENDED:
        if flags.get(flag.removeprefix("--").replace("-", "_")) == value:
            raise UserError(
                f"the run began with {flag} {value}, which is retired: only commit {LAST_COMMIT} "
                f"can resume it"
            )
