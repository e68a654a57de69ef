# SPDX-License-Identifier: Apache-2.0
"""The contract that client and edge share: specs, results, errors, routes, wire format. May import msgspec and nothing else."""
