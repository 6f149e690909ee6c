"""Print as JSON what guard.py finds about a submission: LAB FILE SECONDS."""

import json
import sys
from pathlib import Path

from labs.machinery.checking import check_module
from labs.machinery.guard import Job, check_guarded

lab, file, seconds = sys.argv[1:]
job = Job(lab, Path(file), 5, check_module(lab).SIZES, float(seconds), cpu_seconds=60)
((_, found),) = check_guarded([job])
print(json.dumps(found))
