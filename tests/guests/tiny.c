/* SPDX-License-Identifier: Apache-2.0 */
/* A whole guest: started by PVH in 32-bit mode, it writes to its serial port and to its memory.
 *
 *     cc -m32 -Os -ffreestanding -fno-pie -fno-stack-protector -nostdlib -static -no-pie -Wl,-Ttext=0x100000 -Wl,--build-id=none tiny.c
 *
 * Its command line: `pages=N` to fill that many pages (4 KiB each, from 32 MiB on), `reset` to reset the machine by a triple fault, `quiet`
 * to halt instead of counting. After "up" it prints "n=<count> sum=<sum of the first word of each page>" again and again. */

typedef unsigned int u32;
typedef unsigned char u8;

__asm__(".section .note.pvh, \"a\", @note\n"
        ".long 4, 4, 18\n" /* XEN_ELFNOTE_PHYS32_ENTRY */
        ".asciz \"Xen\"\n"
        ".long start\n"
        ".text\n"
        ".globl start\n"
        "start: mov $0x90000, %esp\n"
        "push %ebx\n"
        "call guest\n"
        "1: hlt\n"
        "jmp 1b\n");

struct start_info {
    u32 magic, version, flags, modules;
    unsigned long long module_list;
    unsigned long long command_line;
};

static inline void outb(unsigned short port, u8 value) { __asm__ volatile("outb %0, %1" : : "a"(value), "Nd"(port)); }
static inline u8 inb(unsigned short port)
{
    u8 value;
    __asm__ volatile("inb %1, %0" : "=a"(value) : "Nd"(port));
    return value;
}

static void put(char c)
{
    while (!(inb(0x3fd) & 0x20))
        ;
    outb(0x3f8, (u8)c);
}

static void say(const char *text)
{
    while (*text)
        put(*text++);
}

static void number(u32 value)
{
    char digits[12];
    int at = 11;
    digits[11] = 0;
    do
        digits[--at] = (char)('0' + value % 10);
    while (value /= 10);
    say(digits + at);
}

static const char *option(const char *line, const char *name)
{
    for (; *line; line++) {
        const char *a = line, *b = name;
        while (*b && *a == *b)
            a++, b++;
        if (!*b)
            return a;
    }
    return 0;
}

static const u8 empty_idt[6];

void guest(struct start_info *info)
{
    const char *line = (const char *)(u32)info->command_line, *pages = option(line, "pages=");
    u32 count = 0, filled = 0;
    volatile u32 *const memory = (u32 *)(32u << 20);

    if (pages)
        while (*pages >= '0' && *pages <= '9')
            filled = filled * 10 + (u32)(*pages++ - '0');
    for (u32 page = 0; page < filled; page++)
        memory[page * 1024] = page + 1;
    say("up\n");
    if (option(line, "reset"))
        __asm__ volatile("lidt %0; int3" : : "m"(empty_idt));
    if (option(line, "quiet"))
        return;
    for (;;) {
        u32 sum = 0;
        for (u32 page = 0; page < filled; page++)
            sum += memory[page * 1024];
        say("n=");
        number(count++);
        say(" sum=");
        number(sum);
        say("\n");
        for (volatile u32 wait = 0; wait < 3000000; wait++)
            ;
    }
}
