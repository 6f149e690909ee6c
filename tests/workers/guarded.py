"""Print as JSON what guard.py finds about a submission: LAB FILE SECONDS."""

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))

from labs.machinery.guard import run_guarded  # noqa: E402

lab, file, longest = sys.argv[1:]
((_, result),) = run_guarded([(lab, Path(file).resolve(), 5)], float(longest))
print(json.dumps(result))
