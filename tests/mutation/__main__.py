"""`make mutation`, or `python -m tests.mutation [NAME ...]`: reverts each rule of scheduler and cache in a copy of the
package and shows that its test fails.

Where it stands in the flow: by hand and before a release. `make test` runs a part of it (test_mutations.py).
"""

from __future__ import annotations

import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from .copies import Mutation, run_tests, survives, write_copy
from .rules import MUTATIONS


def main(names: list[str]) -> int:
    """0 when every mutation is noticed. With names (or parts of them): only those."""
    chosen = [one for one in MUTATIONS if not names or any(name in one.name for name in names)]
    if not chosen:
        print(f"no mutation is called {', '.join(names)}; there are: {', '.join(one.name for one in MUTATIONS)}")
        return 2
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        tests = tuple(sorted({test for one in chosen for test in one.tests}))
        whole = write_copy(home / "whole", None)  # all others are made of it: the checkout may change meanwhile
        code, printed = run_tests(whole, tests, timeout_s=600)
        if code != 0:
            print(f"the tests do not pass without any mutation:\n{printed[-4000:]}")
            return 2

        def one(numbered: tuple[int, Mutation]) -> str:
            return survives(numbered[1], home / str(numbered[0]), whole)

        survivors = []
        with ThreadPoolExecutor(2) as pool:
            for mutation, seen in zip(chosen, pool.map(one, enumerate(chosen)), strict=True):
                print(f"{'SURVIVES' if seen else 'noticed '}  {mutation.name:44} {mutation.rule}", flush=True)
                if seen:
                    survivors.append(seen)
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} reverted rules were noticed")
    for seen in survivors:
        print(seen)
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
