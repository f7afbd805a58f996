# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The fp8-colocate authors
"""Every run of pytest in this clone knows the lanes: GPU marks, expected skips, results for the summary."""

pytest_plugins = ["tests.plugins.lanes"]
