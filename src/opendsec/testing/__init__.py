# SPDX-License-Identifier: Apache-2.0
"""The shipped test kit: contract suites, fakes, posture. May import everything; nothing imports it."""
