"""What holds for all tests."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# No test fails by the time that it takes: the machine may be busy with other things.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")
