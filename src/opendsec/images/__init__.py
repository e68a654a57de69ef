# SPDX-License-Identifier: Apache-2.0
"""Content store, layers, EROFS, garbage collection. May import: opendsec.api, opendsec.kernel."""
