/* SPDX-License-Identifier: Apache-2.0
 *
 * guestd: our one program inside a VM. It runs commands and works on files for the host, on a private channel. docs/guest-protocol.md has
 * what is said there.
 *
 *     guest_base.h      sources of events, ids                  guest_files.h     files, one request each
 *     guest_wire.h      frames to be sent, payloads taken apart guest_transfer.h  what takes longer: content, lists, removal
 *     guest_stream.h    commands' streams and their credit      guest_watch.h     watches
 *     guest_user.h      paths inside, users                     guest_machine.h   identity, clock, usage, disks, the end
 *     guest_group.h     control groups                          guest_network.h   addresses, routes, name servers
 *     guest_launch.h    the child                               guest_boot.h      process 1: from the initramfs to the sandbox's root
 *     guest_command.h   EXEC to RELEASE                         guest_service.h   a service of another Linux
 *     guest_control.h   signals, marks, members                 guest_requests.h  ends of transfers
 *     guest_walk.h      a tree as records                       guest_extract.h   records as a tree
 *     guest_serve.h     the connection
 *
 * One process, one loop, nothing waits: a pipe or a channel that is full is left alone until it is not, and who produces stops while much
 * is to be sent. All buffers and tables are bounded. Nothing here is secret; whoever is root in the guest may replace it, and then the host
 * loses the sandbox: it believes no more of an answer than that the request's id was known to whoever sent it.
 */
#define _GNU_SOURCE
#include "guest_service.h"
#include "guest_serve.h"

static int port_poller = -1; /* knows the port alone */
static int port_readable = 1, port_writable = 1;
static struct source port_source, signal_source;

/* --- the channel ----------------------------------------------------------------------------------------------------- */

/* The other end is gone. Of a machine's port it may come back; half a frame will never be whole. */
static void port_gone(void)
{
	if (guest.port_is_socket) {
		for (struct command *c = commands; c; c = c->next)
			kill_command(c);
		exit(0);
	}
	port_readable = 0;
	rx_from = rx_to = 0;
	drop_assembly();
}

static void flush(void)
{
	while (port_writable && parked != PARKED && tx_from < tx_to) {
		ssize_t wrote = write(guest.port, tx + tx_from, tx_to - tx_from);
		if (wrote > 0)
			tx_from += (size_t)wrote;
		else if (wrote < 0 && (errno == EPIPE || errno == ECONNRESET))
			port_gone();
		else if (wrote == 0 || errno != EINTR)
			port_writable = 0;
	}
	if (tx_from == tx_to) {
		tx_from = tx_to = 0;
		if (parked == PARKING)
			parked = PARKED;
	}
}

static void receive(void)
{
	while (port_readable && rx_to < RX_BYTES && (parked || !throttled())) {
		ssize_t got = read(guest.port, rx + rx_to, RX_BYTES - rx_to);
		if (got > 0) {
			rx_to += (size_t)got;
			parse();
			flush();
		} else if (got == 0 || errno == ECONNRESET)
			port_gone();
		else if (errno != EINTR)
			port_readable = 0;
	}
	if (rx_to - rx_from >= HEADER_BYTES)
		parse();
}

static void port_ready(struct source *source, u32 events)
{
	(void)source;
	if (events & ~(u32)EPOLLOUT)
		port_readable = 1;
	if (events & (EPOLLOUT | EPOLLERR | EPOLLHUP))
		port_writable = 1;
}

static void signalled(struct source *source, u32 events)
{
	struct signalfd_siginfo info[16];
	(void)events;
	ssize_t got = read(source->fd, info, sizeof(info));
	for (ssize_t i = 0; i < got / (ssize_t)sizeof(info[0]); i++)
		if (info[i].ssi_signo == SIGTERM && !guest.is_init) {
			for (struct command *c = commands; c; c = c->next)
				kill_command(c);
			exit(0);
		}
	reap();
}

/* --- the loop -------------------------------------------------------------------------------------------------------- */

static void turn(void)
{
	int busy = !throttled() && (unfinished || work_waits() || (port_readable && rx_to < RX_BYTES));
	if (!throttled())
		unfinished = 0;
	batch_len = epoll_wait(throttled() ? port_poller : poller, batch, BATCH, busy ? 0 : -1);
	for (batch_at = 0; batch_at < batch_len; batch_at++) {
		struct source *source = batch[batch_at].data.ptr;
		/* What is left out is reported again: all but the port is level-triggered. */
		if (source && (source == &port_source || !throttled()))
			source->ready(source, batch[batch_at].events);
	}
	batch_len = 0;
	receive();
	if (!throttled()) {
		reap(); /* what a full buffer had made wait */
		work();
	}
	flush();
	if (shutting_down && tx_from == tx_to) {
		shut_down();
		shutting_down = 0;
	}
}

static void watch_port(void)
{
	struct epoll_event event = { .events = EPOLLIN | EPOLLOUT | EPOLLET, .data.ptr = &port_source };
	port_source = (struct source){ .fd = guest.port, .ready = port_ready, .armed = event.events };
	fcntl(guest.port, F_SETFL, fcntl(guest.port, F_GETFL) | O_NONBLOCK);
	/* Edge-triggered: a port whose host is gone is "hung up" all the time. */
	if (epoll_ctl(poller, EPOLL_CTL_ADD, guest.port, &event) < 0 || epoll_ctl(port_poller, EPOLL_CTL_ADD, guest.port, &event) < 0)
		fail("watching the port", errno);
}

static void set_up(void)
{
	sigset_t heard;
	struct rlimit core = { 0, 0 };
	static const uint64_t plain[4]; /* the kernel's struct sigaction: SIG_DFL, no flags, nothing blocked */
	while ((guest.null = open("/dev/null", O_RDWR | O_CLOEXEC)) >= 0 && guest.null < RESERVED_FDS)
		;
	guest.random = open("/dev/urandom", O_RDONLY | O_CLOEXEC);
	/* Who started us may have ignored some, and commands would too. By the system call: the C library refuses its own two. */
	for (int number = 1; number < NSIG; number++)
		syscall(SYS_rt_sigaction, number, &plain, NULL, sizeof(uint64_t));
	signal(SIGPIPE, SIG_IGN);
	sigemptyset(&guest.no_signals);
	sigemptyset(&heard);
	sigaddset(&heard, SIGCHLD);
	sigaddset(&heard, SIGTERM);
	sigprocmask(SIG_BLOCK, &heard, NULL);
	guest.signals = signalfd(-1, &heard, SFD_CLOEXEC | SFD_NONBLOCK);
	poller = epoll_create1(EPOLL_CLOEXEC);
	port_poller = epoll_create1(EPOLL_CLOEXEC);
	launch = mmap(NULL, sizeof(*launch), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	if (guest.null < 0 || guest.signals < 0 || poller < 0 || port_poller < 0 || launch == MAP_FAILED)
		fail("setting up", errno);
	signal_source = (struct source){ .fd = guest.signals, .ready = signalled };
	arm(&signal_source, EPOLLIN);
	prctl(PR_SET_DUMPABLE, 0);
	prctl(PR_SET_CHILD_SUBREAPER, 1);
	setrlimit(RLIMIT_CORE, &core);
	umask(022);
}

#ifndef GUEST_FUZZ
int main(int argc, char **argv)
{
	if (getpid() == 1 && argc < 2) {
		guest.is_init = 1;
		boot_early();
		set_up();
		boot();
	} else {
		set_up();
		start_service(argc, argv);
	}
	watch_port();
	if (guest.group >= 0 && !make_group(&spares[0]))
		n_spares = 1;
	if (guest.is_init) {
		cover_boot_id(); /* now, so that clones need not */
		say("guestd: ready");
	}
	for (;;)
		turn();
}
#endif
