# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The fp8-colocate authors
"""The patch tool behind `apply.py`. Standard library and git only; never imports torch or an overlay.

Import order, top to bottom (a test fails on an upward import):
errors, types, manifest, git, series, lock, target, scratch, plan, swap, state, engine, then one module a verb, cli.
"""
