/* SPDX-License-Identifier: Apache-2.0
 *
 * guestd: which request is answered by what, and the ends of transfers.
 */
#ifndef GUEST_REQUESTS_H
#define GUEST_REQUESTS_H

#include "guest_control.h"
#include "guest_extract.h"
#include "guest_network.h"
#include "guest_walk.h"
#include "guest_watch.h"

static void on_commit(u64 id, struct in *in)
{
	struct transfer *t = find(take_u64(in), A_TRANSFER);
	u64 value = 0;
	if (!take_end(in) || !t || !t->feed) {
		answer_error(id, t ? EINVAL : ESRCH, "no such transfer");
		return;
	}
	int error = t->error;
	if (!error && frozen)
		error = -EBUSY;
	if (!error)
		error = t->type == TYPE_WRITE ? commit_writing((struct writing *)t, &value) : commit_extraction((struct extraction *)t, &value);
	if (error < 0)
		answer_error(id, error, "%s", strerror(-error));
	else
		answer_u64(TYPE_COMMIT, id, value);
	end_transfer(t);
}

static void on_abort(u64 id, struct in *in)
{
	struct transfer *t = find(take_u64(in), A_TRANSFER);
	if (!take_end(in) || !t) {
		answer_error(id, t ? EINVAL : ESRCH, "no such transfer");
		return;
	}
	end_transfer(t);
	answer_empty(TYPE_ABORT, id);
}

/* Whoever asked is gone. */
static void drop_requests(void)
{
	while (transfers)
		end_transfer(transfers);
	while (watches)
		end_watch(watches);
}

/* Of these a disk that stands still would keep us waiting. */
static int changes_disk(u16 type)
{
	return type == TYPE_WRITE || type == TYPE_MKDIR || type == TYPE_MOVE || type == TYPE_REMOVE || type == TYPE_CHMOD || type == TYPE_EXTRACT ||
	       type == TYPE_IDENTITY || type == TYPE_MOUNT || type == TYPE_NETWORK;
}

#endif
