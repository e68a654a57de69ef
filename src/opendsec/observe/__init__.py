# SPDX-License-Identifier: Apache-2.0
"""What happened: events, logs, metrics. May import: opendsec.api, opendsec.kernel."""
