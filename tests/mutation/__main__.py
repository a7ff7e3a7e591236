"""`make mutation`, or `python -m tests.mutation [NAME ...]`: reverts each rule of scheduler, cache and running engine
in a copy of the package and shows that its test fails. `ARGS=engine-` takes the running engine's rules alone.

Where it stands in the flow: by hand and before a release. `make test` runs a part of it (test_mutations.py).
"""

from __future__ import annotations

import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from .copies import Unhealthy, Verdict, Whole, judge, write_copy
from .rules import MUTATIONS


def main(names: list[str]) -> int:
    """0 when every mutation is noticed. With names (or parts of them): only those."""
    chosen = [one for one in MUTATIONS if not names or any(name in one.name for name in names)]
    if not chosen:
        print(f"no mutation is called {', '.join(names)}; there are: {', '.join(one.name for one in MUTATIONS)}")
        return 2
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as pool:
        home = Path(folder)
        whole = Whole(write_copy(home / "whole", None))  # all others are made of it: the checkout may change meanwhile
        verdicts: list[Verdict] = []
        try:
            for done in as_completed([pool.submit(judge, one, home / one.name, whole) for one in chosen]):
                verdicts.append(done.result())
                mutation = verdicts[-1].mutation
                print(f"{verdicts[-1].word:8}  {mutation.name:44} {mutation.rule}", flush=True)
        except Unhealthy as error:
            print(error)
            return 2
        finally:
            pool.shutdown(cancel_futures=True)  # also after a Ctrl-C: no more begin
    survivors = [one for one in verdicts if one.survived]
    hanging = sum(one.word == "hangs" for one in verdicts)
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} reverted rules were noticed, {hanging} of them by a hang")
    for verdict in verdicts:
        for test in verdict.hanging:
            print(f"{verdict.mutation.name}: {test} hangs")
    for verdict in survivors:
        print(verdict.survived)
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
