/* SPDX-License-Identifier: Apache-2.0
 *
 * In the place of QEMU: a process with all that a captured one may have, which finds out whether it still has it. It answers QMP at its
 * third descriptor as far as it has to, and at the fourth to a letter: "c" whether all is as it was ("ok", or what is not), "w" whether it
 * can wait until a time, "x" ends it. Its last argument may name something that cannot be captured.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <malloc.h>
#include <math.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/inotify.h>
#include <sys/mman.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>
#include <linux/futex.h>

enum { QMP = 3, GUEST = 4, BLOCKS = 400, BIG = 3 << 20, RAM = 64 << 20, PAGE = 4096 };
enum { FUTEX, EPOLL, VECTOR, HANDLER, TIMED, SPARE, THREADS };

static char wrong[1024];
static pthread_mutex_t telling = PTHREAD_MUTEX_INITIALIZER;

static void check(int right, const char *what)
{
	if (right)
		return;
	pthread_mutex_lock(&telling);
	strncat(wrong, " ", sizeof(wrong) - strlen(wrong) - 1);
	strncat(wrong, what, sizeof(wrong) - strlen(wrong) - 1);
	pthread_mutex_unlock(&telling);
}

#define CHECK(condition) check(condition, #condition)

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER, again, mine;
static pthread_cond_t go_on = PTHREAD_COND_INITIALIZER;
static int gone_on, word, in_handler, handled;
static _Thread_local int own = 7;
static pthread_t threads[THREADS];
static int numbers[THREADS + 1];
static int counted, semaphore, waker, epoll, signals, file;
static unsigned char *blocks[BLOCKS], *big, *mapped, *ram;

static void futex(int operation, int value) { syscall(SYS_futex, &word, operation, value, NULL, NULL, 0); }

static void begin(int which)
{
	const char *names[] = { "alive futex", "alive epoll", "alive vector", "alive handler", "alive timed", "alive spare" };
	own = 100 + which;
	numbers[which] = (int)syscall(SYS_gettid);
	pthread_setname_np(pthread_self(), names[which]);
}

static void end(int which)
{
	const char *names[] = { "alive futex", "alive epoll", "alive vector", "alive handler", "alive timed", "alive spare" };
	char name[16];
	CHECK(own == 100 + which);
	CHECK(numbers[which] == (int)syscall(SYS_gettid));
	CHECK(pthread_equal(threads[which], pthread_self()));
	pthread_getname_np(pthread_self(), name, sizeof(name));
	CHECK(!strcmp(name, names[which]));
}

static void *in_futex(void *unused)
{
	begin(FUTEX);
	pthread_mutex_lock(&again);
	pthread_mutex_lock(&lock);
	while (!gone_on)
		pthread_cond_wait(&go_on, &lock);
	pthread_mutex_unlock(&lock);
	CHECK(!pthread_mutex_lock(&again)); /* it is its owner still */
	CHECK(!pthread_mutex_unlock(&again) && !pthread_mutex_unlock(&again));
	CHECK(pthread_mutex_unlock(&again) == EPERM);
	end(FUTEX);
	return unused;
}

static void *in_epoll(void *unused)
{
	struct epoll_event event;
	begin(EPOLL);
	while (epoll_wait(epoll, &event, 1, -1) != 1)
		;
	CHECK(event.data.u64 == 0x123456789aULL && event.events == EPOLLIN);
	end(EPOLL);
	return unused;
}

static void *in_vector(void *unused)
{
	unsigned char before[64], after[64] = { 0 };
	unsigned int round = 0x1f80 | 0x6000, now;
	long result, wide = __builtin_cpu_supports("avx2") != 0;
	long double circle = acosl(-1), left;
	begin(VECTOR);
	for (int i = 0; i < 64; i++)
		before[i] = (unsigned char)(i * 37 + 11);
	__asm__ volatile("ldmxcsr %0" : : "m"(round));
	__asm__ volatile("fldt %[circle]\n\tmovdqu (%[before]), %%xmm3\n\tmovdqu 16(%[before]), %%xmm14\n\t"
			 "test %[wide], %[wide]\n\tjz 1f\n\tvmovdqu 32(%[before]), %%ymm9\n\t"
			 "1: mov $202, %%eax\n\tmov $128, %%esi\n\txor %%edx, %%edx\n\txor %%r10d, %%r10d\n\tsyscall\n\tcmp $-4, %%rax\n\tje 1b\n\t"
			 "movdqu %%xmm3, (%[after])\n\tmovdqu %%xmm14, 16(%[after])\n\t"
			 "test %[wide], %[wide]\n\tjz 2f\n\tvmovdqu %%ymm9, 32(%[after])\n\tvzeroupper\n\t2: fstpt %[left]"
			 : "=&a"(result), [left] "=m"(left)
			 : "D"(&word), [circle] "m"(circle), [before] "r"(before), [after] "r"(after), [wide] "r"(wide)
			 : "rcx", "r10", "r11", "rdx", "rsi", "xmm3", "xmm9", "xmm14", "memory", "cc");
	__asm__ volatile("stmxcsr %0" : "=m"(now));
	CHECK((result == 0 || result == -EAGAIN) && !memcmp(before, after, wide ? 64 : 32));
	CHECK(left == circle && (now & 0x6000) == 0x6000);
	end(VECTOR);
	return unused;
}

static void handler(int number)
{
	int here;
	handled += number == SIGUSR2;
	if (in_handler)
		return;
	in_handler = 1;
	stack_t stack;
	sigaltstack(NULL, &stack);
	CHECK(stack.ss_flags == SS_ONSTACK && (char *)&here >= (char *)stack.ss_sp && (char *)&here < (char *)stack.ss_sp + stack.ss_size);
	while (word < 2)
		futex(FUTEX_WAIT_PRIVATE, word);
	sigaltstack(NULL, &stack);
	CHECK(stack.ss_flags == SS_ONSTACK);
}

static void *in_its_handler(void *unused)
{
	stack_t stack = { .ss_sp = malloc(65536), .ss_size = 65536 }, now;
	begin(HANDLER);
	sigaltstack(&stack, NULL);
	pthread_kill(pthread_self(), SIGUSR2);
	sigaltstack(NULL, &now);
	CHECK(now.ss_flags == 0 && now.ss_sp == stack.ss_sp && handled == 1);
	pthread_kill(pthread_self(), SIGUSR2);
	CHECK(handled == 2);
	end(HANDLER);
	return unused;
}

static void *timed(void *unused)
{
	struct timespec far;
	begin(TIMED);
	clock_gettime(CLOCK_REALTIME, &far);
	far.tv_sec += 100000;
	pthread_mutex_lock(&lock);
	while (!gone_on)
		CHECK(pthread_cond_timedwait(&go_on, &lock, &far) == 0);
	pthread_mutex_unlock(&lock);
	end(TIMED);
	return unused;
}

static void *spare(void *unused)
{
	begin(SPARE);
	while (word < 2)
		futex(FUTEX_WAIT_PRIVATE, word);
	end(SPARE);
	return unused;
}

static void *nothing(void *unused) { return unused; }

static void prepare(void)
{
	pthread_mutexattr_t recursive;
	pthread_mutexattr_init(&recursive);
	pthread_mutexattr_settype(&recursive, PTHREAD_MUTEX_RECURSIVE);
	pthread_mutex_init(&again, &recursive);
	pthread_mutex_init(&mine, &recursive);
	pthread_mutex_lock(&mine);
	struct sigaction action = { .sa_handler = handler, .sa_flags = SA_ONSTACK | SA_RESTART };
	sigaddset(&action.sa_mask, SIGURG);
	sigaction(SIGUSR2, &action, NULL);
	sigset_t blocked;
	sigemptyset(&blocked);
	sigaddset(&blocked, SIGUSR1);
	sigprocmask(SIG_BLOCK, &blocked, NULL);
	signals = signalfd(-1, &blocked, SFD_NONBLOCK | SFD_CLOEXEC);
	counted = eventfd(5, EFD_NONBLOCK);
	semaphore = eventfd(3, EFD_SEMAPHORE | EFD_NONBLOCK);
	waker = eventfd(0, EFD_CLOEXEC);
	epoll = epoll_create1(EPOLL_CLOEXEC);
	struct epoll_event event = { .events = EPOLLIN, .data.u64 = 0x123456789aULL };
	epoll_ctl(epoll, EPOLL_CTL_ADD, waker, &event);
	for (int i = 0; i < BLOCKS; i++) {
		blocks[i] = malloc(1000 + (size_t)i * 50);
		memset(blocks[i], i, 1000 + (size_t)i * 50);
	}
	big = malloc(BIG); /* a mapping of its own */
	memset(big, 0x5a, BIG);
	file = open("/usr/bin/dsec-file", O_RDONLY);
	if (file >= 0) {
		lseek(file, 100, SEEK_SET);
		mapped = mmap(NULL, 4 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE, file, 0);
		mapped[2 * PAGE + 7] = 'd';
	}
	int memory = open("/ram", O_RDONLY);
	if (memory >= 0) {
		ram = mmap(NULL, RAM, PROT_READ | PROT_WRITE, MAP_PRIVATE, memory, 0);
		memset(ram + (40 << 20), 'r', 3 * PAGE);
		close(memory);
	}
	pthread_t soon;
	for (int i = 0; i < 3; i++) { /* numbers that nobody has any more */
		pthread_create(&soon, NULL, nothing, NULL);
		pthread_join(soon, NULL);
	}
	void *(*what[])(void *) = { in_futex, in_epoll, in_vector, in_its_handler, timed, spare };
	for (int i = 0; i < THREADS; i++) {
		pthread_create(&threads[i], NULL, what[i], NULL);
		pthread_create(&soon, NULL, nothing, NULL);
		pthread_join(soon, NULL);
	}
}

static int deep(int depth)
{
	volatile char room[8192];
	memset((char *)room, depth, sizeof(room));
	return depth ? deep(depth - 1) + (room[99] == (char)depth) : 0;
}

static void see(void)
{
	uint64_t count = 0;
	CHECK(own == 7 && getpid() == (int)syscall(SYS_gettid));
	CHECK(read(counted, &count, 8) == 8 && count == 5);
	CHECK(read(counted, &count, 8) < 0 && errno == EAGAIN);
	CHECK(read(semaphore, &count, 8) == 8 && count == 1);
	CHECK(fcntl(epoll, F_GETFD) == FD_CLOEXEC && fcntl(counted, F_GETFD) == 0);
	struct signalfd_siginfo info;
	CHECK(read(signals, &info, sizeof(info)) < 0 && errno == EAGAIN);
	kill(getpid(), SIGUSR1);
	CHECK(read(signals, &info, sizeof(info)) == sizeof(info) && info.ssi_signo == SIGUSR1);
	struct sigaction action;
	sigaction(SIGUSR2, NULL, &action);
	CHECK(action.sa_handler == handler && (action.sa_flags & (SA_ONSTACK | SA_RESTART)) == (SA_ONSTACK | SA_RESTART) && sigismember(&action.sa_mask, SIGURG));
	CHECK(!pthread_mutex_lock(&mine) && !pthread_mutex_unlock(&mine) && !pthread_mutex_unlock(&mine) && pthread_mutex_unlock(&mine) == EPERM);
	if (file >= 0) {
		unsigned char bytes[8];
		CHECK(lseek(file, 0, SEEK_CUR) == 100 && pread(file, bytes, 8, 2 * PAGE) == 8);
		CHECK(!memcmp(mapped + 2 * PAGE, bytes, 7) && mapped[2 * PAGE + 7] == 'd');
	}
	if (ram)
		CHECK(ram[(40 << 20) - 1] == 0 && ram[(40 << 20)] == 'r' && ram[(40 << 20) + 3 * PAGE - 1] == 'r' && !ram[(40 << 20) + 3 * PAGE]);
	for (int i = 0; i < BLOCKS; i++)
		for (size_t at = 0; at < 1000 + (size_t)i * 50; at++)
			if (blocks[i][at] != (unsigned char)i) {
				CHECK(!"heap");
				break;
			}
	for (int i = 1; i < BLOCKS; i += 2)
		free(blocks[i]);
	malloc_trim(0);
	/* Both the heap and a mapping grow, shrink and grow again. */
	for (int round = 0; round < 3; round++) {
		static unsigned char *small[4000];
		for (int i = 0; i < 4000; i++) {
			small[i] = calloc(1, 5000);
			for (int at = 0; at < 5000; at++)
				if (small[i][at]) {
					CHECK(!"zeros");
					break;
				}
			memset(small[i], i, 5000);
		}
		for (int i = 0; i < 4000; i++)
			CHECK(small[i][4999] == (unsigned char)i);
		for (int i = 0; i < 4000; i++)
			free(small[i]);
		malloc_trim(0);
		CHECK((char *)sbrk(0) > (char *)blocks[0] && (char *)sbrk(0) < (char *)blocks[0] + (64 << 20));
	}
	for (size_t size = BIG; size <= 8 * (size_t)BIG; size *= 2) {
		big = realloc(big, size * 2);
		CHECK(big[0] == 0x5a && big[size - 1] == 0x5a);
		memset(big + size, 0x5a, size);
	}
	CHECK(deep(600) == 600); /* its stack grows */
	pthread_mutex_lock(&lock);
	gone_on = 1;
	pthread_cond_broadcast(&go_on);
	pthread_mutex_unlock(&lock);
	count = 1;
	CHECK(write(waker, &count, 8) == 8);
	word = 2;
	for (int i = 0; i < THREADS; i++) {
		struct timespec soon;
		do { /* who was about to wait has to hear it too */
			futex(FUTEX_WAKE_PRIVATE, 100);
			clock_gettime(CLOCK_REALTIME, &soon);
			soon.tv_nsec += 10000000;
			soon.tv_sec += soon.tv_nsec / 1000000000;
			soon.tv_nsec %= 1000000000;
		} while (pthread_timedjoin_np(threads[i], NULL, &soon));
	}
	for (int i = 0; i < 20; i++) { /* on stacks of those that have ended */
		CHECK(!pthread_create(&threads[0], NULL, nothing, &own));
		void *result;
		CHECK(!pthread_join(threads[0], &result) && result == &own);
	}
}

static void answer_monitor(int fd, const char *said)
{
	char text[300] = "{\"return\": {}}\r\n";
	const char *id = strstr(said, "\"id\": \"");
	if (id)
		snprintf(text, sizeof(text), "{\"return\": {}, %.*s\"}\r\n", (int)(7 + strcspn(id + 7, "\"")), id);
	(void)!write(fd, text, strlen(text));
}

static void answer(int fd, char letter)
{
	char text[2048];
	switch (letter) {
	case 'c':
		see();
		snprintf(text, sizeof(text), "%s\n", *wrong ? wrong : "ok");
		break;
	case 'w': { /* for 20 ms, as the main thread and by its own clock */
		struct timespec before, after;
		clock_gettime(CLOCK_MONOTONIC, &before);
		poll(NULL, 0, 20);
		clock_gettime(CLOCK_MONOTONIC, &after);
		long us = (after.tv_sec - before.tv_sec) * 1000000 + (after.tv_nsec - before.tv_nsec) / 1000;
		snprintf(text, sizeof(text), "%s\n", us >= 20000 && us < 60000000 ? "ok" : "time");
		break;
	}
	default:
		_exit(3);
	}
	(void)!write(fd, text, strlen(text));
}

static void have(const char *what)
{
	int pair[2];
	struct itimerval far = { .it_value.tv_sec = 100000 };
	if (!strcmp(what, "pipe"))
		(void)!pipe(pair);
	else if (!strcmp(what, "socket"))
		socketpair(AF_UNIX, SOCK_STREAM, 0, pair);
	else if (!strcmp(what, "timerfd"))
		timerfd_create(CLOCK_MONOTONIC, 0);
	else if (!strcmp(what, "inotify"))
		inotify_init1(0);
	else if (!strcmp(what, "memfd"))
		memfd_create("some", 0);
	else if (!strcmp(what, "shared"))
		*(int *)mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0) = 1;
	else if (!strcmp(what, "low"))
		*(int *)mmap((void *)0x10000000, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) = 1;
	else if (!strcmp(what, "timer")) {
		timer_t timer;
		struct sigevent none = { .sigev_notify = SIGEV_NONE };
		timer_create(CLOCK_MONOTONIC, &none, &timer);
	} else if (!strcmp(what, "alarm"))
		setitimer(ITIMER_REAL, &far, NULL);
	else if (!strcmp(what, "lock")) {
		struct flock all = { .l_type = F_RDLCK };
		fcntl(open("/usr/bin/env", O_RDONLY), F_SETLK, &all);
	}
}

int main(int argc, char **argv)
{
	struct pollfd polled[4] = { { QMP, POLLIN, 0 }, { GUEST, POLLIN, 0 }, { -1, POLLIN, 0 }, { -1, POLLIN, 0 } };
	prepare();
	have(argv[argc - 1]);
	for (;;) {
		if (poll(polled, 4, -1) < 0)
			continue;
		for (int i = 0; i < 2; i++)
			if (polled[i].revents) {
				polled[2 + i].fd = accept(polled[i].fd, NULL, NULL);
				polled[i].fd = -1; /* one at a time */
				const char *hello = "{\"QMP\": {\"version\": {}, \"capabilities\": []}}\r\n";
				if (!i)
					(void)!write(polled[2].fd, hello, strlen(hello));
			} else if (polled[2 + i].revents) {
				char said[1024];
				ssize_t got = read(polled[2 + i].fd, said, sizeof(said) - 1);
				if (got <= 0) {
					close(polled[2 + i].fd);
					polled[2 + i].fd = -1;
					polled[i].fd = i ? GUEST : QMP;
					continue;
				}
				said[got] = 0;
				if (i)
					answer(polled[3].fd, *said);
				else
					answer_monitor(polled[2].fd, said);
			}
	}
}
