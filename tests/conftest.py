"""Settings of all tests: how hard Hypothesis searches. Deterministic by default, so a run says the same twice;
HYPOTHESIS_PROFILE=fuzz searches far longer and anew each time.
"""

from __future__ import annotations

import os
import signal
from datetime import timedelta

from hypothesis import HealthCheck, Phase, settings

settings.register_profile(
    "default",
    max_examples=100,
    derandomize=True,
    deadline=timedelta(seconds=60),
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile(
    "fuzz",
    parent=settings.get_profile("default"),
    max_examples=5000,
    derandomize=False,
    deadline=None,
    print_blob=True,
)
settings.register_profile(
    "mutation",  # tests/mutation: that a test fails is enough, and minutes of searching for the least failure are not
    parent=settings.get_profile("default"),
    phases=[phase for phase in Phase if phase not in (Phase.shrink, Phase.explain)],
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))

if (
    signal.getsignal(signal.SIGINT) is signal.SIG_IGN
):  # a shell that starts us with `&`: tests of Ctrl-C mean a person's
    signal.signal(signal.SIGINT, signal.default_int_handler)
