/* SPDX-License-Identifier: Apache-2.0
 *
 * guestd: frames. What is to be sent is written to one buffer of fixed size: whatever produces stops while more than TX_SOFT bytes wait.
 */
#ifndef GUEST_WIRE_H
#define GUEST_WIRE_H

#include "guest_base.h"

enum { TX_BYTES = 1 << 20, TX_SOFT = 256 << 10 };

static u8 tx[TX_BYTES];
static size_t tx_from, tx_to; /* what waits */
static size_t frame_at; /* of the frame being written */
static enum { TALKING, PARKING, PARKED } parked; /* PARKING: what waits is still sent; PARKED: nothing is */

static int throttled(void)
{
	return parked != TALKING || tx_to - tx_from > TX_SOFT;
}

/* Room for so many bytes more, in one piece. Those who ask have looked at throttled(): it is there. */
static int make_room(size_t len)
{
	if (TX_BYTES - tx_to < len && tx_from) {
		memmove(tx, tx + tx_from, tx_to - tx_from);
		frame_at -= tx_from;
		tx_to -= tx_from;
		tx_from = 0;
	}
	return TX_BYTES - tx_to >= len;
}

/* --- writing --------------------------------------------------------------------------------------------------------- */

static void put(const void *data, size_t len)
{
	if (!make_room(len)) {
		say("guestd: a frame did not fit");
		abort();
	}
	memcpy(tx + tx_to, data, len);
	tx_to += len;
}

static void put_u16(u16 value)
{
	put(&value, sizeof(value));
}

static void put_u32(u32 value)
{
	put(&value, sizeof(value));
}

static void put_u64(u64 value)
{
	put(&value, sizeof(value));
}

static void put_str(const char *text, size_t len)
{
	put_u32((u32)len);
	put(text, len);
}

static void put_text(const char *text)
{
	put_str(text, strlen(text));
}

static void begin(u16 type, u16 flags, u64 id)
{
	make_room(HEADER_BYTES + MAX_PAYLOAD);
	frame_at = tx_to;
	put_u32(GUEST_MAGIC);
	put_u32(0);
	put_u16(type);
	put_u16(flags);
	put_u32(0);
	put_u64(id);
}

static void end(void)
{
	u32 len = (u32)(tx_to - frame_at - HEADER_BYTES);
	if (len > MAX_PAYLOAD) {
		say("guestd: a frame is too long");
		abort();
	}
	memcpy(tx + frame_at + 4, &len, sizeof(len));
}

static void answer_empty(u16 type, u64 id)
{
	begin(type | ANSWER, 0, id);
	end();
}

static void answer_u32(u16 type, u64 id, u32 value)
{
	begin(type | ANSWER, 0, id);
	put_u32(value);
	end();
}

static void answer_u64(u16 type, u64 id, u64 value)
{
	begin(type | ANSWER, 0, id);
	put_u64(value);
	end();
}

/* `error`: an errno, positive or negative. */
static void answer_error(u64 id, int error, const char *format, ...)
{
	char text[1024];
	va_list args;
	va_start(args, format);
	vsnprintf(text, sizeof(text), format, args);
	va_end(args);
	begin(TYPE_ERROR, 0, id);
	put_u32((u32)(error < 0 ? -error : error));
	put_text(text);
	end();
}

/* Answer what went well (0) or not (a negative errno). */
static void answer_result(u16 type, u64 id, int error)
{
	if (error < 0)
		answer_error(id, error, "%s", strerror(-error));
	else
		answer_empty(type, id);
}

/* --- reading --------------------------------------------------------------------------------------------------------- */

/* A payload being taken apart. What is missing reads as zero and leaves `bad` set. */
struct in {
	u8 *at, *end;
	int bad;
};

static int take(struct in *in, void *to, size_t len)
{
	if ((size_t)(in->end - in->at) < len) {
		in->bad = 1;
		memset(to, 0, len);
		return 0;
	}
	memcpy(to, in->at, len);
	in->at += len;
	return 1;
}

static u16 take_u16(struct in *in)
{
	u16 value;
	take(in, &value, sizeof(value));
	return value;
}

static u32 take_u32(struct in *in)
{
	u32 value;
	take(in, &value, sizeof(value));
	return value;
}

static u64 take_u64(struct in *in)
{
	u64 value;
	take(in, &value, sizeof(value));
	return value;
}

/* A string, ended by a zero byte in place: it is moved onto the last byte of its length. */
static char *take_bytes(struct in *in, u32 *len, int zeros)
{
	*len = take_u32(in);
	if (in->bad || (size_t)(in->end - in->at) < *len || (!zeros && memchr(in->at, 0, *len))) {
		in->bad = 1;
		*len = 0;
		return (char *)"";
	}
	char *text = (char *)in->at - 1;
	memmove(text, in->at, *len);
	text[*len] = 0;
	in->at += *len;
	return text;
}

static char *take_str(struct in *in)
{
	u32 len;
	return take_bytes(in, &len, 0);
}

static int take_end(struct in *in)
{
	return !in->bad && in->at == in->end;
}

/* A list's count, of items that have at least `least` bytes each. */
static u32 take_count(struct in *in, size_t least)
{
	u32 count = take_u32(in);
	if (in->bad || count > (size_t)(in->end - in->at) / least) {
		in->bad = 1;
		return 0;
	}
	return count;
}

#endif
