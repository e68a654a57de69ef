/* SPDX-License-Identifier: Apache-2.0 */
/* Stands where QEMU would, and tries what a guest that has taken it over would try. One line on standard error for each: name, errno. */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#define TRY(name, call) (errno = 0, dprintf(2, "%s %d\n", name, (long)(call) < 0 ? errno : 0))

int main(void)
{
    TRY("inet", socket(AF_INET, SOCK_STREAM, 0));
    TRY("unix", socket(AF_UNIX, SOCK_STREAM, 0));
    TRY("netlink", socket(AF_NETLINK, SOCK_RAW, 0));
    TRY("vsock", socket(AF_VSOCK, SOCK_STREAM, 0));
    TRY("unshare", unshare(CLONE_NEWUSER));
    TRY("mount", mount("none", "/dev", "tmpfs", 0, ""));
    TRY("setns", setns(3, 0));
    TRY("ptrace", ptrace(PTRACE_TRACEME, 0, 0, 0));
    TRY("chroot", chroot("/"));
    TRY("mknod", mknod("/x", S_IFBLK, 0));
    TRY("create", open("/x", O_CREAT | O_WRONLY, 0600));
    TRY("create-in-dev", open("/dev/x", O_CREAT | O_WRONLY, 0600));
    TRY("kernel-for-writing", open("/kernel", O_RDWR));
    TRY("ram-for-writing", open("/ram", O_RDWR));
    TRY("self", open("/usr/bin/qemu-system-x86_64", O_RDONLY));
    TRY("proc", open("/proc/self/maps", O_RDONLY));
    TRY("sys", open("/sys", O_RDONLY));
    TRY("etc", open("/etc/passwd", O_RDONLY));
    TRY("kvm", open("/dev/kvm", O_RDWR));
    TRY("kill-all", kill(-1, 0));
    TRY("setuid", setuid(0));
    TRY("bpf", syscall(SYS_bpf, 0, 0, 0));
    TRY("io-uring", syscall(SYS_io_uring_setup, 1, 0));
    TRY("userfaultfd", syscall(SYS_userfaultfd, 0));
    TRY("pidfd-open", syscall(SYS_pidfd_open, 1, 0));
    TRY("handle", syscall(SYS_name_to_handle_at, AT_FDCWD, "/", 0, 0, 0));
    TRY("tiocsti", ioctl(0, TIOCSTI, "x"));
    TRY("add-key", syscall(SYS_add_key, "user", "x", "y", 1, -1));
    TRY("clone3", syscall(SYS_clone3, 0, 0));
    dprintf(2, "end\n");
    pause();
}
