# SPDX-License-Identifier: Apache-2.0
"""What runs a sandbox on one node: one interface, its backends, the spawner. May import: api, policy, images, kernel."""
