# SPDX-License-Identifier: Apache-2.0
"""OCI images in and out: `pull.pull` and `push.push`. How a layer becomes one of ours is told in docs/adr/0015-oci.md."""
