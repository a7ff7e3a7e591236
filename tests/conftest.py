"""Settings of all tests: how hard Hypothesis searches. Deterministic by default, so a run says the same twice;
HYPOTHESIS_PROFILE=fuzz searches far longer and anew each time.
"""

from __future__ import annotations

import os
from datetime import timedelta

from hypothesis import HealthCheck, settings

settings.register_profile(
    "default",
    max_examples=100,
    derandomize=True,
    deadline=timedelta(seconds=5),
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
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))
