# SPDX-License-Identifier: Apache-2.0
"""The container backend: namespaces, cgroups and seccomp on the shared kernel. May import: api, policy, images, kernel, runtime."""
