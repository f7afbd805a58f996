# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The fp8-colocate authors
"""What a verb says: result lines (or one JSON document) on stdout, progress on stderr."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field


@dataclass
class Report:
    """Collects the result of one verb. Verbs call `line` for people, `put` for programs, `progress` while working."""

    as_json: bool = False
    quiet: bool = False
    verbose: bool = False
    payload: dict = field(default_factory=dict)

    def line(self, text: str) -> None:
        """A result line on stdout; silent with --json and -q."""
        if not self.as_json and not self.quiet:
            print(text)

    def detail(self, text: str) -> None:
        """A result line that only -v shows."""
        if self.verbose:
            self.line(text)

    def progress(self, text: str) -> None:
        """A line on stderr while work goes on; silent with -q."""
        if not self.quiet:
            print(text, file=sys.stderr, flush=True)

    def put(self, **values: object) -> None:
        """Values of the JSON document."""
        self.payload |= values

    def close(self, exit_code: int) -> int:
        """Print the JSON document, if asked for, and hand the exit code on."""
        if self.as_json:
            print(json.dumps({"exit_code": exit_code, **self.payload}, indent=2, default=str))
        return exit_code
