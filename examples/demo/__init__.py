# SPDX-License-Identifier: Apache-2.0
"""The main job on real input: HumanEval and bugs of released packages, as tasks for `dsec rollout`.

- `lines`      the shape of a task line
- `fetch`      pinned distributions through pip, unpacked with care
- `humaneval`  164 problems, each once as published and once mutated
- `repos`      released bugs, the recorded actions that fix them, the upstream tests that judge
- `prove`      the same tasks without OpenDSec (in bubblewrap), to tell a wrong task from a wrong sandbox

Everything that is downloaded is pinned by version and sha256. No text of the packages or of their tests is kept here.
"""
