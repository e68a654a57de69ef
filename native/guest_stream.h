/* SPDX-License-Identifier: Apache-2.0
 *
 * guestd: streams of commands. One is a pipe, or one direction of a terminal, and moves no more bytes than its reader has given credit for.
 */
#ifndef GUEST_STREAM_H
#define GUEST_STREAM_H

#include "guest_wire.h"

enum { CREDIT_STEP = 32 << 10 }; /* credit is given back in parts of this size at least */

struct stream {
	struct source source; /* first: cast */
	u64 id; /* the command's */
	u8 number, kind;
	u8 eof; /* KIND_IN: the host's last word was heard */
	u32 credit; /* KIND_OUT: bytes that we may send; KIND_IN: that the host may */
	u32 owed; /* KIND_IN: consumed, not yet given back as credit */
	u32 queued_from, queued_to;
	u8 *queue; /* KIND_IN: what the pipe did not take */
	u64 sent;
	u8 held; /* KIND_OUT: waits until of streams 1 and 2 was sent what is in `before` */
	u64 before[2];
};

static void stream_frame(struct stream *s, u16 type)
{
	begin(type, s->number, s->id);
	end();
}

static void tell_close(u64 id, u16 number, int error)
{
	begin(TYPE_CLOSE, number, id);
	put_u32((u32)error);
	end();
}

static void tell_credit(u64 id, u16 number, u32 bytes)
{
	begin(TYPE_CREDIT, number, id);
	put_u32(bytes);
	end();
}

static void close_stream(struct stream *s)
{
	close_source(&s->source);
	free(s->queue);
	s->queue = NULL;
}

/* --- out of the guest ------------------------------------------------------------------------------------------------ */

static void stream_readable(struct source *source, u32 events);

static u64 stream_end(struct stream *s);

static int lower_sent(struct stream *s)
{
	for (int i = 0; i < 2; i++) {
		struct stream *lower = s - s->number + 1 + i;
		if (lower->kind == KIND_OUT && lower->source.fd >= 0 && lower->sent < s->before[i])
			return 0;
	}
	return 1;
}

/* What is said on 3 and above (that a shell is done) stands for what was written to 1 and 2 before: that goes first. */
static int hold(struct stream *s)
{
	for (int i = 0; i < 2; i++) {
		struct stream *lower = s - s->number + 1 + i;
		s->before[i] = stream_end(lower);
		while (lower->source.fd >= 0 && lower->credit && lower->sent < s->before[i]) {
			u64 sent = lower->sent;
			stream_readable(&lower->source, 0);
			if (lower->sent == sent)
				break;
		}
	}
	s->held = !lower_sent(s);
	return s->held;
}

static void let_higher_go(struct stream *s)
{
	for (struct stream *higher = s + 3 - s->number; higher < s + MAX_STREAMS - s->number; higher++)
		if (higher->held && lower_sent(higher)) {
			higher->held = 0;
			if (higher->source.fd >= 0 && higher->credit)
				arm(&higher->source, EPOLLIN);
		}
}

static void stream_readable(struct source *source, u32 events)
{
	struct stream *s = (struct stream *)source;
	size_t most = s->credit < MAX_PAYLOAD ? s->credit : MAX_PAYLOAD;
	(void)events;
	if (!most || (s->number > 2 && (s->held || hold(s)))) {
		arm(source, 0);
		return;
	}
	begin(TYPE_DATA, s->number, s->id); /* makes room for the longest payload */
	ssize_t got = read(source->fd, tx + tx_to, most);
	if (got <= 0) {
		int error = errno;
		tx_to = frame_at;
		if (got < 0 && (error == EAGAIN || error == EINTR))
			return;
		stream_frame(s, TYPE_EOF); /* a terminal whose other side is closed says EIO */
		close_stream(s);
		let_higher_go(s);
		return;
	}
	tx_to += (size_t)got;
	end();
	s->credit -= (u32)got;
	s->sent += (u64)got;
	if (!s->credit)
		arm(source, 0);
	if (s->number <= 2)
		let_higher_go(s);
}

/* What will have been sent when all that is in the pipe by now is. */
static u64 stream_end(struct stream *s)
{
	int waiting = 0;
	if (s->kind != KIND_OUT)
		return 0;
	if (s->source.fd >= 0 && ioctl(s->source.fd, FIONREAD, &waiting) < 0)
		waiting = 0;
	return s->sent + (u64)waiting;
}

/* --- into the guest -------------------------------------------------------------------------------------------------- */

static void consumed(struct stream *s, u32 bytes)
{
	s->owed += bytes;
	if (s->owed < CREDIT_STEP || s->eof)
		return;
	tell_credit(s->id, s->number, s->owed);
	s->credit += s->owed;
	s->owed = 0;
}

static void stream_broken(struct stream *s, int error)
{
	tell_close(s->id, s->number, error);
	close_stream(s);
}

static void stream_writable(struct source *source, u32 events)
{
	struct stream *s = (struct stream *)source;
	u32 waiting = s->queued_to - s->queued_from;
	(void)events;
	if (!waiting) { /* armed for the reader's end alone, which is what came */
		if (events & (EPOLLERR | EPOLLHUP))
			stream_broken(s, EPIPE);
		return;
	}
	ssize_t wrote = write(source->fd, s->queue + s->queued_from, waiting);
	if (wrote < 0) {
		if (errno != EAGAIN && errno != EINTR)
			stream_broken(s, errno);
		return;
	}
	s->queued_from += (u32)wrote;
	if (s->queued_from == s->queued_to) {
		s->queued_from = s->queued_to = 0;
		free(s->queue);
		s->queue = NULL;
		arm(source, EPOLLERR);
		if (s->eof) {
			close_stream(s);
			return;
		}
	}
	consumed(s, (u32)wrote);
}

/* Bytes from the host. -1: without credit. */
static int stream_feed(struct stream *s, const u8 *data, u32 len)
{
	if (s->kind != KIND_IN || s->source.fd < 0 || s->eof)
		return 0; /* has crossed with the end */
	if (len > s->credit)
		return -1;
	s->credit -= len;
	u32 done = 0;
	if (!s->queue) {
		ssize_t wrote = write(s->source.fd, data, len);
		if (wrote < 0 && errno != EAGAIN && errno != EINTR) {
			stream_broken(s, errno);
			return 0;
		}
		done = wrote > 0 ? (u32)wrote : 0;
	}
	if (done < len) {
		if (!s->queue && !(s->queue = malloc(INITIAL_CREDIT))) {
			stream_broken(s, ENOMEM);
			return 0;
		}
		if (s->queued_from) {
			memmove(s->queue, s->queue + s->queued_from, s->queued_to - s->queued_from);
			s->queued_to -= s->queued_from;
			s->queued_from = 0;
		}
		/* Fits: what is queued was paid by credit that was not given back. */
		memcpy(s->queue + s->queued_to, data + done, len - done);
		s->queued_to += len - done;
		arm(&s->source, EPOLLOUT);
	}
	if (done)
		consumed(s, done);
	return 0;
}

static void stream_eof(struct stream *s)
{
	if (s->kind != KIND_IN || s->source.fd < 0)
		return;
	s->eof = 1;
	if (!s->queue)
		close_stream(s);
}

/* -1: more than there may be. */
static int stream_credit(struct stream *s, u32 bytes)
{
	if (s->kind != KIND_OUT || s->source.fd < 0)
		return 0;
	if (bytes > INITIAL_CREDIT - s->credit)
		return -1;
	s->credit += bytes;
	if (s->credit && !s->held)
		arm(&s->source, EPOLLIN);
	return 0;
}

static void open_stream(struct stream *s, u64 id, u8 number, u8 kind, int fd)
{
	memset(s, 0, sizeof(*s));
	s->source.fd = fd;
	s->source.ready = kind == KIND_OUT ? stream_readable : stream_writable;
	s->id = id;
	s->number = number;
	s->kind = kind;
	s->credit = INITIAL_CREDIT;
	arm(&s->source, kind == KIND_OUT ? EPOLLIN : EPOLLERR); /* for the end of all readers */
}

#endif
