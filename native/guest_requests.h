/* SPDX-License-Identifier: Apache-2.0
 *
 * guestd: all further requests: files, the machine.
 */
#ifndef GUEST_REQUESTS_H
#define GUEST_REQUESTS_H

#include "guest_machine.h"

struct transfer { struct object object; };
static int transfer_stream(struct transfer *t, u16 type, u16 number, struct in *in)
{
	(void)t; (void)type; (void)number; (void)in;
	return 0;
}
static void drop_requests(void) {}
static int work_waits(void) { return 0; }
static void work(void) {}
#define MORE_HANDLERS \
	{ TYPE_IDENTITY, on_identity }, { TYPE_CLOCK, on_clock }, { TYPE_USAGE, on_usage }, { TYPE_SYNC, on_sync }, \
	{ TYPE_FREEZE, on_freeze }, { TYPE_THAW, on_thaw }, { TYPE_MOUNT, on_mount }, { TYPE_SHUTDOWN, on_shutdown }, \
	{ TYPE_LIMITS, on_limits },

#endif
