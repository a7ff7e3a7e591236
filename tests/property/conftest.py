"""Settings of the property tests: HYPOTHESIS_PROFILE=fuzz searches far longer than a normal run."""

from __future__ import annotations

import os

from hypothesis import settings

settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))
