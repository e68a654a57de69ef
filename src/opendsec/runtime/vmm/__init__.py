# SPDX-License-Identifier: Apache-2.0
"""One virtual machine monitor process and how it is driven: shared by the microVM and the full-VM backend."""
