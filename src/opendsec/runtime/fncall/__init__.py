# SPDX-License-Identifier: Apache-2.0
"""Function calls on pool members: `interface` says what the edge asks for, the rest does it."""
