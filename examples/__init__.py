# SPDX-License-Identifier: Apache-2.0
"""Programs that use OpenDSec as its users would."""
