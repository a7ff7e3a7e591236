"""A part of the GPU proof that ends as it is told: `python -m tests.fakes.gpu_part WHAT --out FILE --seconds N`.

WHAT: passes, fails, crashes, says nothing, hangs (with a child, after a check that passed). Loads no torch.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("what")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    arguments = parser.parse_args()
    print(f"{arguments.what} begins", flush=True)
    if arguments.what == "says nothing":
        return 0
    checks = [{"name": f"of who {arguments.what}", "passed": True}]
    if arguments.what == "fails":
        checks.append({"name": "a wrong number", "passed": False, "error": "7 instead of 8"})
    passed = all(check["passed"] for check in checks)
    arguments.out.write_text(json.dumps({"passed": passed, "checks": checks}), encoding="utf-8")
    if arguments.what == "crashes":
        os.kill(os.getpid(), signal.SIGSEGV)
    if arguments.what == "hangs":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        print(f"child {child.pid}", flush=True)
        time.sleep(600)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
