"""A process with SGLang in it: carries out the scenarios that ``Worker`` sends, one JSON object per line."""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

from tests.sglang import shims


def main() -> None:
    faulthandler.enable()
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever SGLang prints goes to the log
    shims.install()
    from tests.sglang import scenarios  # imports SGLang

    logging.disable(logging.WARNING)  # each miss and each injected failure is a warning
    known: dict[str, Callable[..., Any]] = {
        name: vars(scenarios)[name] for name in ("walk", "aborts", "restarts", "version")
    }
    for line in sys.stdin:
        call = json.loads(line)
        try:
            answer = {"result": known[call.pop("what")](**call)}
        except BaseException as error:  # noqa: BLE001  # reported to the test, which fails
            answer = {"error": type(error).__name__, "message": str(error), "trace": traceback.format_exc()}
        print(json.dumps(answer), file=results, flush=True)


if __name__ == "__main__":
    main()
