# SPDX-License-Identifier: Apache-2.0
"""Stores that are elsewhere: one interface (`store`), two ways to reach them (`posix`, `objects`), patience (`retry`), the operator's
configuration (`config`) and what lies where in them (`layout`)."""
