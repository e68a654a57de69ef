# SPDX-License-Identifier: Apache-2.0
"""Rollouts: tasks run in sandboxes, each judged in a second, fresh one.

tasks.py     the format of a task file; reading and checking it (pure)
results.py   the format of a result, the file they go to, the summary
carry.py     the declared outputs, from the agent's sandbox to the judge's
runner.py    running them
"""
