# SPDX-License-Identifier: Apache-2.0
"""The daemon of one node: lifecycle, admission, journal, function calls (`fn`), server. May import: all of the node, no client."""
