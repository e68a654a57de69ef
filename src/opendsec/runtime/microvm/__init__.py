# SPDX-License-Identifier: Apache-2.0
"""The backend of microVMs: clones of templates that have booted once (docs/vms.md)."""
