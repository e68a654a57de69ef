# SPDX-License-Identifier: Apache-2.0
"""The command `dsec`: one file a command, each a function that Typer reads; `main.py` loads only the one that is asked for.

Exit codes: those of the command that was run, where there is one; 128 + signal if a signal ended it; 124 if it ran out of time; 126 and
127 if it could not start; 125 if dsec itself failed (no edge, no such sandbox, a refused request); 2 for wrong usage; 130 on Ctrl-C.
"""
