# SPDX-License-Identifier: Apache-2.0
"""OpenDSec: throw-away computers for AI agents, by the thousand, from one SDK."""
