"""Print as JSON what guard.py finds about a submission: LAB FILE SECONDS."""

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))

from labs.machinery.guard import check_guarded  # noqa: E402

lab, file, seconds = sys.argv[1:]
print(json.dumps(check_guarded(lab, Path(file), 5, float(seconds))))
