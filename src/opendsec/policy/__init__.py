# SPDX-License-Identifier: Apache-2.0
"""Policy documents to enforceable rules, pure. May import: opendsec.api, opendsec.kernel."""

POLICIES = ("default",)  # the names that a spec may ask for
