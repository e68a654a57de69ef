# SPDX-License-Identifier: Apache-2.0
"""The container backend: a plan made of small operations, applied by the spawner. May import: what runtime may."""
