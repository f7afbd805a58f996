# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The fp8-colocate authors
"""The command line: pick the verb, run it, turn every error into one message and an exit code."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

from patchset import verbs
from patchset.errors import PatchsetError, UsageError, os_failure
from patchset.manifest import Manifest, load
from patchset.report import Report


@dataclass(frozen=True)
class Verb:
    """`configure` adds arguments, `execute` does the work and returns the exit code."""

    help: str
    module: str | None = None  # imported when used: these verbs may need more than the standard library
    configure: Callable[[argparse.ArgumentParser, Manifest], None] | None = None
    execute: Callable[[argparse.Namespace, Manifest, Report], int] | None = None


VERBS = {
    "apply": Verb("put the patch set onto trees (the default)", None, verbs.configure_apply, verbs.execute_apply),
    "status": Verb("pristine, patched, mixed, drifted or unknown", None, verbs.configure_status, verbs.execute_status),
    "list": Verb("the patches of each pin", None, verbs.configure_list, verbs.execute_list),
    "lint": Verb("check patches, overlay, series and locks", "patchset.lint"),
    "doctor": Verb("what a Python imports from where, and known bad combinations", "patchset.doctor"),
    "wheel": Verb("build patched wheels from the official ones", "patchset.wheel"),
    "dev": Verb("a worktree with one commit a patch", "patchset.dev"),
    "export": Verb("commits of the worktree back to patches, series and lock", "patchset.export"),
    "refresh": Verb("carry the series onto a newer upstream", "patchset.refresh"),
    "upstream": Verb("a branch and a pull-request draft for one patch", "patchset.upstream"),
}

_EPILOG = "verbs: " + "; ".join(f"{name}: {verb.help}" for name, verb in VERBS.items())


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. Never raises: an unknown error is code 1 and one line."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a path need not be valid UTF-8
    try:
        code = _run(arguments)
        if sys.stdout is not None:
            sys.stdout.flush()
        return code
    except OSError as error:  # nobody reads stdout, or its disk is full
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            print(os_failure("standard output cannot be written", error), file=sys.stderr)
        return 1


def _run(arguments: list[str]) -> int:
    report = Report(as_json="--json" in arguments)
    try:
        manifest = load()
        name, verb, rest = _pick(arguments)
        args = _parse(name, verb, rest, manifest)
        report = Report(args.json, args.quiet, args.verbose > 0)
        return report.close(_execute(verb)(args, manifest, report))
    except PatchsetError as error:
        return _fail(report, error.as_dict(), str(error), error.exit_code)
    except KeyboardInterrupt:
        return _fail(report, {"error": "KeyboardInterrupt"}, "interrupted; run the same command again", 1)
    except BrokenPipeError:
        raise
    except OSError as error:
        failure = os_failure(
            "the operating system refused", error, next_step="mend that and run the same command again"
        )
        return _fail(report, failure.as_dict(), str(failure), failure.exit_code)
    except Exception as error:  # a fault of ours: no traceback reaches a user who did not ask for it
        if os.environ.get("FP8_COLOCATE_TRACEBACK"):
            traceback.print_exc()
        name = type(error).__name__
        what = f"error: unexpected {name}: {error}\n  next:         set FP8_COLOCATE_TRACEBACK=1 and report it"
        return _fail(report, {"error": name, "what": str(error)}, what, 1)


def _pick(arguments: list[str]) -> tuple[str, Verb, list[str]]:
    if arguments and arguments[0] in VERBS:
        return arguments[0], VERBS[arguments[0]], arguments[1:]
    return "apply", VERBS["apply"], arguments


def _parse(name: str, verb: Verb, arguments: list[str], manifest: Manifest) -> argparse.Namespace:
    parser = _Parser(
        prog="apply.py" if name == "apply" else f"apply.py {name}",
        description=verb.help,
        epilog=_EPILOG if name == "apply" else None,
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    parser.add_argument("-q", "--quiet", action="store_true", help="errors only")
    parser.add_argument("-v", "--verbose", action="count", default=0, help="name every file")
    configure = verb.configure or importlib.import_module(verb.module or "").configure
    configure(parser, manifest)
    return parser.parse_args(arguments)


class _Parser(argparse.ArgumentParser):
    """argparse, with its complaints in the tool's own form (and in JSON)."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(message, next_step=f"python {self.prog} --help")


def _execute(verb: Verb) -> Callable[[argparse.Namespace, Manifest, Report], int]:
    return verb.execute or importlib.import_module(verb.module or "").execute


def _fail(report: Report, payload: dict, message: str, exit_code: int) -> int:
    print(message, file=sys.stderr)
    report.put(**{k: v for k, v in payload.items() if k != "exit_code"})
    return report.close(exit_code)
