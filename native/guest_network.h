/* SPDX-License-Identifier: Apache-2.0
 *
 * guestd: addresses, routes, name servers.
 */
#ifndef GUEST_NETWORK_H
#define GUEST_NETWORK_H

#include "guest_machine.h"

static void on_network(u64 id, struct in *in)
{
	(void)in;
	answer_error(id, ENOSYS, "not yet");
}

#endif
