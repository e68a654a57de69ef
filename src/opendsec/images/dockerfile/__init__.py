# SPDX-License-Identifier: Apache-2.0
"""The Dockerfile subset, without running anything.

parse, words     text → instructions; variables and quotes
plan             instructions → stages → steps
context, ignore  the files that a COPY means
cache            what a step has made before
"""
