# SPDX-License-Identifier: Apache-2.0
"""A text editor in a desktop, used as a person would: by screen, pointer and keyboard."""
