# SPDX-License-Identifier: Apache-2.0
"""Loading layers on demand: a family of processes apart from the edge answers the kernel's questions. Why so, and what happens when which
process dies: docs/adr/0013-loading-on-demand.md.

board       memory that the family shares: who lives, which readers wait
keeper      the family: two keepers and a loader over one descriptor table, each replaceable
loader      the process that does the work: puts the parts below together
server      what the edge asks it, over a unix socket           protocol, client, source: the edge's side
watch       readers that wait: fanotify events                   fuse: the same as a FUSE file system
engine      chunks asked for become fetches: demand before prefetch, neighbours in one request
line        how much of what nobody waits for is under way
fetch       one fetch: other local layers, the stores in turn, every chunk checked
cache       a layer's sparse file and which of it is here        chunkmap: that, on disk
readahead   sequential reads                                     trace: what was read first, in order
evict       what to drop when the cache is full
"""
