/* SPDX-License-Identifier: Apache-2.0
 *
 * guestd's parser and handlers, fed with bytes: under libFuzzer where the compiler has it (clang -fsanitize=fuzzer), else by the small
 * mutator below. Whatever comes in, guestd must not fault, and what it says must be frames that its own rules allow.
 *
 *     guest_frames ROOT CORPUS RUNS SEED      ROOT: a directory that may be changed; CORPUS: files of valid conversations
 */
#define GUEST_FUZZ
#define _GNU_SOURCE
#include <time.h>
#define clock_settime(clock, time) ((void)(time), -1) /* the clock is the machine's, whatever the namespaces */
#include "../../native/guestd.c"

static void check(int good, const char *what)
{
	if (!good) {
		fprintf(stderr, "guestd said something impossible: %s\n", what);
		abort();
	}
}

/* What waits to be sent is frames. */
static void check_said(void)
{
	struct header h;
	while (tx_from < tx_to) {
		check(tx_to - tx_from >= HEADER_BYTES, "half a header");
		memcpy(&h, tx + tx_from, sizeof(h));
		check(h.magic == GUEST_MAGIC && !h.zero && h.length <= MAX_PAYLOAD, "a broken header");
		check(h.type & ANSWER || (h.type >= TYPE_DATA && h.type <= TYPE_CLOSE) || h.type == TYPE_WATCHED, "an unexpected type");
		check(tx_to - tx_from >= HEADER_BYTES + h.length, "half a payload");
		check(h.type == TYPE_ERROR || h.id, "an answer to nothing");
		tx_from += HEADER_BYTES + h.length;
	}
	tx_from = tx_to = 0;
	if (parked == PARKING)
		parked = PARKED;
}

static void start(const char *root)
{
	guest.root = open(root, O_PATH | O_DIRECTORY | O_CLOEXEC);
	guest.proc = open("/proc", O_PATH | O_DIRECTORY | O_CLOEXEC);
	set_up();
	if (guest.root < 0 || guest.proc < 0)
		fail(root, errno);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	struct header hello = { GUEST_MAGIC, 8 + NONCE_BYTES, TYPE_HELLO, 0, 0, 1 };
	u32 version[2] = { GUEST_VERSION, 0 };
	memcpy(rx, &hello, sizeof(hello));
	memcpy(rx + HEADER_BYTES, version, sizeof(version));
	memset(rx + HEADER_BYTES + 8, 7, NONCE_BYTES);
	rx_from = 0;
	rx_to = HEADER_BYTES + 8 + NONCE_BYTES;
	parse();
	check(tx_to && !lost, "no answer to HELLO");
	check_said();
	while (size) {
		size_t part = RX_BYTES - rx_to < size ? RX_BYTES - rx_to : size;
		check(part, "no room for what comes");
		memcpy(rx + rx_to, data, part);
		rx_to += part;
		data += part;
		size -= part;
		parse();
		check_said();
		for (int i = 0; i < 64 && work_waits(); i++) {
			work();
			check_said();
		}
		for (struct watch *w = watches; w; w = w->next)
			watch_ready(&w->source, 0);
		check_said();
	}
	rx_from = rx_to = 0;
	shutting_down = 0;
	return 0;
}

#ifdef LIBFUZZER
int LLVMFuzzerInitialize(int *argc, char ***argv)
{
	(void)argc;
	(void)argv;
	start(getenv("GUEST_ROOT"));
	return 0;
}
#else

static u64 state;

static u32 random_below(u32 limit)
{
	state ^= state << 13;
	state ^= state >> 7;
	state ^= state << 17;
	return limit ? (u32)((state >> 11) % limit) : 0;
}

enum { INPUT_BYTES = 200000, MAX_CORPUS = 256 };
static struct {
	u8 *data;
	size_t len;
} corpus[MAX_CORPUS];
static int n_corpus;

static void load(const char *path)
{
	DIR *dir = opendir(path);
	for (struct dirent *entry; dir && (entry = readdir(dir)) && n_corpus < MAX_CORPUS;) {
		int fd = openat(dirfd(dir), entry->d_name, O_RDONLY);
		struct stat st;
		if (entry->d_name[0] != '.' && fd >= 0 && !fstat(fd, &st) && st.st_size <= INPUT_BYTES) {
			corpus[n_corpus].data = malloc((size_t)st.st_size + 1);
			corpus[n_corpus].len = (size_t)read(fd, corpus[n_corpus].data, (size_t)st.st_size);
			n_corpus++;
		}
		close(fd);
	}
	if (dir)
		closedir(dir);
	check(n_corpus > 0, "no corpus");
}

static size_t mutate(u8 *data, size_t len)
{
	static const u32 interesting[] = { 0, 1, 2, 16, 255, 4095, 4096, 65535, 65536, 65537, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, GUEST_MAGIC };
	for (u32 n = 1 + random_below(6); n && len; n--) {
		size_t at = random_below((u32)len);
		u32 word = interesting[random_below(sizeof(interesting) / sizeof(*interesting))];
		switch (random_below(7)) {
		case 0:
			data[at] ^= (u8)(1 << random_below(8));
			break;
		case 1:
			data[at] = (u8)random_below(256);
			break;
		case 2:
			if (at + 4 <= len)
				memcpy(data + at, &word, 4);
			break;
		case 3: /* something is missing */
			memmove(data + at, data + at + 1, len - at - 1);
			len--;
			break;
		case 4: /* it ends early */
			len = random_below(8) ? len : at;
			break;
		case 5: { /* another conversation goes on here */
			int other = (int)random_below((u32)n_corpus);
			size_t from = random_below((u32)corpus[other].len + 1), part = corpus[other].len - from;
			if (part > INPUT_BYTES - at)
				part = INPUT_BYTES - at;
			memcpy(data + at, corpus[other].data + from, part);
			len = at + part;
			break;
		}
		case 6: { /* a payload gets longer or shorter, and its header knows */
			struct header h;
			if (at + HEADER_BYTES <= len) {
				for (; at && memcmp(data + at, "DSG1", 4); at--)
					;
				memcpy(&h, data + at, sizeof(h));
				h.length = h.length + random_below(9) - 4;
				memcpy(data + at, &h, sizeof(h));
			}
			break;
		}
		}
	}
	return len;
}

int main(int argc, char **argv)
{
	static u8 input[INPUT_BYTES];
	check(argc == 5, "usage: guest_frames ROOT CORPUS RUNS SEED");
	start(argv[1]);
	load(argv[2]);
	state = strtoull(argv[4], NULL, 10) * 0x9E3779B97F4A7C15u + 1;
	for (int i = 0; i < n_corpus; i++)
		LLVMFuzzerTestOneInput(corpus[i].data, corpus[i].len);
	for (long runs = atol(argv[3]); runs; runs--) {
		int which = (int)random_below((u32)n_corpus);
		memcpy(input, corpus[which].data, corpus[which].len);
		LLVMFuzzerTestOneInput(input, mutate(input, corpus[which].len));
	}
	puts("done");
	return 0;
}
#endif
