# SPDX-License-Identifier: Apache-2.0
"""SDK and command line. May import: opendsec.api, and nothing of the node."""
