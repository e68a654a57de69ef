# SPDX-License-Identifier: Apache-2.0
"""Stand-ins that pass the same contract suites as the real things."""
