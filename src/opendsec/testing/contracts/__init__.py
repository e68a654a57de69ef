# SPDX-License-Identifier: Apache-2.0
"""Named checks over a factory: every implementation of an interface, and every fake, passes the same ones."""
