# SPDX-License-Identifier: Apache-2.0
"""Function calls at the edge. The map, from the wire inwards:

routes    handlers of /v1/fn and /run_code            batch     one NDJSON stream of calls, both ways
judge     many tests of one program                   fusion    SandboxFusion's request and answer
calls     from what was asked for to jobs in a pool   compiled  what compilers made, kept by content
pools     all pools: admission, uids, the journal     serving   one pool: members, calls under way
pool      what a pool does next; pure                 events    its vocabulary
holding   a call and a member, as a pool holds them   parts     what an edge needs for all this
outcome, checkers, languages, devices: pure
"""
