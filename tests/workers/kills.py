"""Kill runs that are split by pp, cp and tp, and resume them: nothing is lost, no loss differs.

    python tests/workers/kills.py 100        so many kills, shared among the layouts

test_crashes.py does it with ten.
"""

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

LAYOUTS = [
    dict(pp=2, microbatch=1),
    dict(cp=2),
    dict(tp=2),
    dict(dp="fsdp", tp=2),
    dict(pp=2, cp=2, microbatch=1),
]


def ranks_of(layout: dict) -> int:
    """Return the number of ranks for a layout: 4 where two of its dimensions are split."""
    return 2 ** sum(key != "microbatch" for key in layout)


if __name__ == "__main__":
    from conftest import succeed
    from test_crashes import kill_and_resume

    with tempfile.TemporaryDirectory() as name:
        (text := Path(name, "text.txt")).write_text("one and two make three\n" * 4000)
        succeed("data.py", "tokenize", text, "--tokenizer=bytes", "--out", Path(name, "corpus"))
        for i, layout in enumerate(LAYOUTS):
            kills = (int(sys.argv[1]) + i) // len(LAYOUTS)
            place = Path(name, str(i))
            kill_and_resume(Path(name, "corpus"), place, ranks_of(layout), kills, **layout)
            print(f"{kills} kills of {layout}: nothing was lost", flush=True)
