# SPDX-License-Identifier: Apache-2.0
"""An image's way from a registry and back, as a new user would go it."""
