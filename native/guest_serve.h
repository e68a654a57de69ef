/* SPDX-License-Identifier: Apache-2.0
 *
 * guestd: the connection. Bytes become frames, frames become requests.
 */
#ifndef GUEST_SERVE_H
#define GUEST_SERVE_H

#include "guest_requests.h"

enum { RX_BYTES = 2 * (HEADER_BYTES + MAX_PAYLOAD) };

struct header {
	u32 magic, length;
	u16 type, flags;
	u32 zero;
	u64 id;
} __attribute__((packed));

static u8 rx[RX_BYTES + 1];
static size_t rx_from, rx_to;
static int lost; /* out of step, until a HELLO */

/* A request in parts. */
static struct {
	u8 *data;
	size_t len;
	u16 type;
	u64 id; /* 0: none */
} assembly;

static void drop_assembly(void)
{
	free(assembly.data);
	assembly.data = NULL;
	assembly.len = 0;
	assembly.id = 0;
}

static void out_of_step(const char *why)
{
	lost = 1;
	drop_assembly();
	answer_error(0, EPROTO, "%s", why);
}

/* --- the connection itself ------------------------------------------------------------------------------------------- */

static void on_hello(u64 id, struct in *in)
{
	u8 nonce[NONCE_BYTES];
	u32 version = take_u32(in), zero = take_u32(in);
	take(in, nonce, sizeof(nonce));
	if (!take_end(in) || zero) {
		answer_error(id, EINVAL, "malformed request");
		return;
	}
	tx_from = tx_to = 0; /* whoever was to hear that is gone */
	parked = TALKING;
	lost = 0;
	drop_assembly();
	drop_requests();
	thaw();
	/* Nobody knows their ids any more: what they do is told by COMMANDS alone. */
	for (struct command *c = commands, *next; c; c = next) {
		next = c->next;
		release_command(c);
	}
	if (version != GUEST_VERSION) {
		answer_error(id, EPROTONOSUPPORT, "%d", GUEST_VERSION);
		return;
	}
	begin(TYPE_HELLO | ANSWER, 0, id);
	put_u32(GUEST_VERSION);
	put_u32((guest.group >= 0 ? FEATURE_CGROUPS : 0) | (guest.is_init ? FEATURE_INIT : 0) | (guest.disk >= 0 ? FEATURE_FREEZE : 0) | FEATURE_PTY);
	put(nonce, sizeof(nonce));
	put_u64(now_ns(CLOCK_BOOTTIME));
	put_text("guestd 1");
	end();
}

static void on_ping(u64 id, struct in *in)
{
	size_t len = (size_t)(in->end - in->at);
	if (len > MAX_PING) {
		answer_error(id, EINVAL, "malformed request");
		return;
	}
	begin(TYPE_PING | ANSWER, 0, id);
	put(in->at, len);
	end();
}

static void on_park(u64 id, struct in *in)
{
	if (!take_end(in)) {
		answer_error(id, EINVAL, "malformed request");
		return;
	}
	answer_empty(TYPE_PARK, id);
	parked = PARKING;
}

static void on_unpark(u64 id, struct in *in)
{
	u8 nonce[NONCE_BYTES];
	take(in, nonce, sizeof(nonce));
	if (!take_end(in)) {
		answer_error(id, EINVAL, "malformed request");
		return;
	}
	parked = TALKING;
	begin(TYPE_UNPARK | ANSWER, 0, id);
	put(nonce, sizeof(nonce));
	end();
}

/* --- streams --------------------------------------------------------------------------------------------------------- */

static void on_stream(const struct header *h, struct in *in)
{
	struct object *o = find(h->id, A_COMMAND);
	if (!o) {
		if ((o = find(h->id, A_TRANSFER)) && transfer_stream((struct transfer *)o, h->type, h->flags, in) < 0)
			out_of_step("data or credit beyond what is allowed");
		return;
	}
	struct command *c = (struct command *)o;
	if (h->flags >= c->n_streams)
		return;
	struct stream *s = &c->streams[h->flags];
	int result = 0;
	switch (h->type) {
	case TYPE_DATA:
		result = stream_feed(s, in->at, (u32)(in->end - in->at));
		break;
	case TYPE_CREDIT: {
		u32 bytes = take_u32(in);
		result = take_end(in) ? stream_credit(s, bytes) : -1;
		break;
	}
	case TYPE_EOF:
		if (c->master < 0) /* a terminal ends with its command, or by RELEASE */
			stream_eof(s);
		break;
	case TYPE_CLOSE:
		close_stream(s);
		if (s->number == 1 || s->number == 2)
			let_higher_go(s);
		break;
	}
	if (result < 0)
		out_of_step("data or credit beyond what is allowed");
}

/* --- requests -------------------------------------------------------------------------------------------------------- */

static const struct handler {
	u16 type;
	void (*handle)(u64 id, struct in *in);
} handlers[] = {
	{ TYPE_HELLO, on_hello },
	{ TYPE_PING, on_ping },
	{ TYPE_PARK, on_park },
	{ TYPE_UNPARK, on_unpark },
	{ TYPE_EXEC, on_exec },
	{ TYPE_SIGNAL, on_signal },
	{ TYPE_MARK, on_mark },
	{ TYPE_MEMBERS, on_members },
	{ TYPE_RESIZE, on_resize },
	{ TYPE_RELEASE, on_release },
	{ TYPE_COMMANDS, on_commands },
	{ TYPE_CUT, on_cut },
	{ TYPE_STAT, on_stat },
	{ TYPE_LIST, on_list },
	{ TYPE_READ, on_read },
	{ TYPE_WRITE, on_write },
	{ TYPE_COMMIT, on_commit },
	{ TYPE_ABORT, on_abort },
	{ TYPE_MKDIR, on_mkdir },
	{ TYPE_MOVE, on_move },
	{ TYPE_REMOVE, on_remove },
	{ TYPE_CHMOD, on_chmod },
	{ TYPE_WALK, on_walk },
	{ TYPE_EXTRACT, on_extract },
	{ TYPE_WATCH, on_watch },
	{ TYPE_UNWATCH, on_unwatch },
	{ TYPE_IDENTITY, on_identity },
	{ TYPE_CLOCK, on_clock },
	{ TYPE_NETWORK, on_network },
	{ TYPE_USAGE, on_usage },
	{ TYPE_SYNC, on_sync },
	{ TYPE_FREEZE, on_freeze },
	{ TYPE_THAW, on_thaw },
	{ TYPE_MOUNT, on_mount },
	{ TYPE_SHUTDOWN, on_shutdown },
	{ TYPE_LIMITS, on_limits },
};

static void (*handler_of(u16 type))(u64, struct in *)
{
	for (size_t i = 0; i < sizeof(handlers) / sizeof(*handlers); i++)
		if (handlers[i].type == type)
			return handlers[i].handle;
	return NULL;
}

static void request(u16 type, u64 id, u8 *data, size_t len)
{
	struct in in = { data, data + len, 0 };
	if (parked && type != TYPE_HELLO && type != TYPE_UNPARK)
		return; /* the host promised to say nothing */
	if (type != TYPE_HELLO && known(id)) {
		answer_error(id, EEXIST, "this id is in use");
		return;
	}
	if (frozen && changes_disk(type)) {
		answer_error(id, EBUSY, "the disk stands still");
		return;
	}
	handler_of(type)(id, &in);
}

/* One frame, whole and with a sound header. */
static void on_frame(const struct header *h, u8 *payload)
{
	struct in in = { payload, payload + h->length, 0 };
	if (assembly.id && h->type != TYPE_HELLO && (h->id != assembly.id || h->type != assembly.type)) {
		out_of_step("a frame within another request");
		return;
	}
	if (h->type >= TYPE_DATA && h->type <= TYPE_CLOSE) {
		if (!parked)
			on_stream(h, &in);
		return;
	}
	if (!handler_of(h->type)) {
		answer_error(h->id, ENOSYS, "unknown request %#x", h->type);
		return;
	}
	if (h->type == TYPE_HELLO || (!assembly.id && !(h->flags & FLAG_MORE))) {
		request(h->type, h->id, payload, h->length);
		return;
	}
	u8 *grown = assembly.len + h->length > MAX_REQUEST ? NULL : realloc(assembly.data, assembly.len + h->length + 1);
	if (!grown) {
		out_of_step("a request is too long");
		return;
	}
	memcpy(grown + assembly.len, payload, h->length);
	assembly.data = grown;
	assembly.len += h->length;
	assembly.type = h->type;
	assembly.id = h->id;
	if (h->flags & FLAG_MORE)
		return;
	u8 *data = assembly.data;
	size_t len = assembly.len;
	assembly.data = NULL;
	drop_assembly();
	request(h->type, h->id, data, len);
	free(data);
}

static int sound(const struct header *h)
{
	int is_stream = h->type >= TYPE_DATA && h->type <= TYPE_CLOSE;
	return h->magic == GUEST_MAGIC && h->length <= MAX_PAYLOAD && !h->zero && h->id && (is_stream || h->flags <= FLAG_MORE);
}

static int is_hello(const struct header *h)
{
	return sound(h) && h->type == TYPE_HELLO && !h->flags && h->length == 8 + NONCE_BYTES;
}

/* Take apart what has come, as long as answers find room. */
static void parse(void)
{
	struct header h;
	while (rx_to - rx_from >= HEADER_BYTES && (parked || !throttled())) {
		memcpy(&h, rx + rx_from, sizeof(h));
		if (lost && !is_hello(&h)) {
			u8 *next = memchr(rx + rx_from + 1, GUEST_MAGIC & 0xFF, rx_to - rx_from - 1);
			rx_from = next ? (size_t)(next - rx) : rx_to;
			continue;
		}
		if (!sound(&h)) {
			out_of_step("a frame is malformed");
			continue;
		}
		if (rx_to - rx_from < HEADER_BYTES + h.length)
			break;
		u8 *payload = rx + rx_from + HEADER_BYTES;
		rx_from += HEADER_BYTES + h.length;
		on_frame(&h, payload);
	}
	if (rx_to - rx_from >= HEADER_BYTES && throttled())
		unfinished = 1;
	if (rx_from == rx_to)
		rx_from = rx_to = 0;
	else if (rx_from > RX_BYTES / 2) {
		memmove(rx, rx + rx_from, rx_to - rx_from);
		rx_to -= rx_from;
		rx_from = 0;
	}
}

#endif
