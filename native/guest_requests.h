/* SPDX-License-Identifier: Apache-2.0
 *
 * guestd: all further requests: files, the machine.
 */
#ifndef GUEST_REQUESTS_H
#define GUEST_REQUESTS_H

#include "guest_command.h"

struct transfer { struct object object; };
static int transfer_stream(struct transfer *t, u16 type, u16 number, struct in *in)
{
	(void)t; (void)type; (void)number; (void)in;
	return 0;
}
static void drop_requests(void) {}
static int work_waits(void) { return 0; }
static void work(void) {}
#define MORE_HANDLERS

#endif
