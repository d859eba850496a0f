"""Says at the end, loudly, what the tests could not use."""

import pathlib
import sys

HERE = pathlib.Path(__file__).resolve().parent
for folder in (HERE, HERE.parent / "python"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

import harness  # noqa: E402
import test_core  # noqa: E402


def pytest_terminal_summary(terminalreporter):
    stubs = harness.REASON and f"vLLM's own classes ({harness.REASON}); stubs took their place"
    for reason in (stubs, test_core.MISSING):
        if reason:
            terminalreporter.write_sep("!", f"NOT CHECKED: {reason}", red=True, bold=True)
