/* SPDX-License-Identifier: Apache-2.0
 *
 * guestd: addresses, routes, name servers of one device. What the device had before goes: a clone has another identity than its template.
 */
#ifndef GUEST_NETWORK_H
#define GUEST_NETWORK_H

#include <arpa/inet.h>
#include <linux/netlink.h>
#include <linux/rtnetlink.h>
#include <net/if_arp.h>

#include "guest_files.h"

enum { MAX_ADDRESSES = 64, MAC_BYTES = 6, REPLY_BYTES = 16384 };

struct netlink_request {
	struct nlmsghdr head;
	union {
		struct ifaddrmsg address;
		struct rtmsg route;
	} body;
	char attributes[256];
};

struct address {
	int family;
	u8 bytes[16];
	u8 len, prefix;
};

/* "a.b.c.d/n" or IPv6; without a prefix, all bits. */
static int parse_address(const char *text, struct address *address)
{
	char bare[INET6_ADDRSTRLEN + 1];
	const char *slash = strchr(text, '/');
	size_t len = slash ? (size_t)(slash - text) : strlen(text);
	if (len >= sizeof(bare))
		return -EINVAL;
	memcpy(bare, text, len);
	bare[len] = 0;
	address->family = strchr(bare, ':') ? AF_INET6 : AF_INET;
	address->len = address->family == AF_INET ? 4 : 16;
	if (inet_pton(address->family, bare, address->bytes) != 1)
		return -EINVAL;
	char *end = (char *)"";
	unsigned long prefix = slash ? strtoul(slash + 1, &end, 10) : address->len * 8u;
	address->prefix = (u8)prefix;
	return *end || prefix > address->len * 8u ? -EINVAL : 0;
}

static void add_attribute(struct netlink_request *r, u16 type, const void *data, size_t len)
{
	struct rtattr *attribute = (struct rtattr *)((char *)r + NLMSG_ALIGN(r->head.nlmsg_len));
	attribute->rta_type = type;
	attribute->rta_len = (unsigned short)RTA_LENGTH(len);
	memcpy(RTA_DATA(attribute), data, len);
	r->head.nlmsg_len = NLMSG_ALIGN(r->head.nlmsg_len) + (u32)RTA_ALIGN(attribute->rta_len);
}

/* Send one and hear what became of it. */
static int netlink_call(int sock, struct netlink_request *r)
{
	char reply[REPLY_BYTES] __attribute__((aligned(8)));
	r->head.nlmsg_flags |= NLM_F_REQUEST | NLM_F_ACK;
	if (send(sock, r, r->head.nlmsg_len, 0) < 0)
		return -errno;
	ssize_t got = recv(sock, reply, sizeof(reply), 0);
	struct nlmsghdr *head = (struct nlmsghdr *)reply;
	if (got < (ssize_t)NLMSG_LENGTH(sizeof(struct nlmsgerr)) || head->nlmsg_type != NLMSG_ERROR)
		return got < 0 ? -errno : -EPROTO;
	return ((struct nlmsgerr *)NLMSG_DATA(head))->error;
}

static int add_address(int sock, u32 device, const struct address *address)
{
	struct netlink_request r = { .head = { .nlmsg_len = NLMSG_LENGTH(sizeof(struct ifaddrmsg)), .nlmsg_type = RTM_NEWADDR } };
	r.head.nlmsg_flags = NLM_F_CREATE | NLM_F_REPLACE;
	r.body.address = (struct ifaddrmsg){ .ifa_family = (u8)address->family, .ifa_prefixlen = address->prefix, .ifa_index = device };
	if (address->family == AF_INET6)
		r.body.address.ifa_flags = IFA_F_NODAD; /* it is ours alone, and is to be used at once */
	add_attribute(&r, IFA_LOCAL, address->bytes, address->len);
	add_attribute(&r, IFA_ADDRESS, address->bytes, address->len);
	return netlink_call(sock, &r);
}

static int add_route(int sock, u32 device, const struct address *gateway)
{
	struct netlink_request r = { .head = { .nlmsg_len = NLMSG_LENGTH(sizeof(struct rtmsg)), .nlmsg_type = RTM_NEWROUTE } };
	r.head.nlmsg_flags = NLM_F_CREATE | NLM_F_REPLACE;
	r.body.route = (struct rtmsg){
		.rtm_family = (u8)gateway->family, .rtm_table = RT_TABLE_MAIN, .rtm_protocol = RTPROT_STATIC, .rtm_scope = RT_SCOPE_UNIVERSE,
		.rtm_type = RTN_UNICAST, .rtm_flags = RTNH_F_ONLINK,
	};
	add_attribute(&r, RTA_GATEWAY, gateway->bytes, gateway->len);
	add_attribute(&r, RTA_OIF, &device, sizeof(device));
	return netlink_call(sock, &r);
}

/* Its addresses so far, collected first: what is deleted would disturb the listing. */
static int forget_addresses(int sock, u32 device)
{
	static struct netlink_request old[MAX_ADDRESSES];
	char reply[REPLY_BYTES] __attribute__((aligned(8)));
	struct netlink_request list = { .head = { .nlmsg_len = NLMSG_LENGTH(sizeof(struct ifaddrmsg)), .nlmsg_type = RTM_GETADDR } };
	int n = 0, over = 0;
	list.head.nlmsg_flags = NLM_F_REQUEST | NLM_F_DUMP;
	if (send(sock, &list, list.head.nlmsg_len, 0) < 0)
		return -errno;
	while (!over) {
		ssize_t got = recv(sock, reply, sizeof(reply), 0);
		if (got <= 0)
			return got < 0 ? -errno : -EPROTO;
		unsigned left = (unsigned)got;
		for (struct nlmsghdr *head = (struct nlmsghdr *)reply; NLMSG_OK(head, left); head = NLMSG_NEXT(head, left)) {
			struct ifaddrmsg *found = NLMSG_DATA(head);
			over |= head->nlmsg_type == NLMSG_DONE || head->nlmsg_type == NLMSG_ERROR;
			if (head->nlmsg_type != RTM_NEWADDR || found->ifa_index != device || n == MAX_ADDRESSES)
				continue;
			int attributes = (int)IFA_PAYLOAD(head);
			struct netlink_request *r = &old[n];
			*r = (struct netlink_request){ .head = { .nlmsg_len = NLMSG_LENGTH(sizeof(struct ifaddrmsg)), .nlmsg_type = RTM_DELADDR } };
			r->body.address = *found;
			for (struct rtattr *a = IFA_RTA(found); RTA_OK(a, attributes); a = RTA_NEXT(a, attributes))
				if ((a->rta_type == IFA_LOCAL || a->rta_type == IFA_ADDRESS) && RTA_PAYLOAD(a) <= 16)
					add_attribute(r, a->rta_type, RTA_DATA(a), RTA_PAYLOAD(a));
			n++;
		}
	}
	for (int i = 0; i < n; i++)
		netlink_call(sock, &old[i]); /* one that went with another is gone already */
	return 0;
}

/* The device's name, or the first that is no loopback. */
static int find_device(const char *wanted, char *name)
{
	struct if_nameindex *all = if_nameindex();
	int found = 0;
	for (struct if_nameindex *one = all; one && one->if_index && !found; one++)
		if (*wanted ? !strcmp(one->if_name, wanted) : strcmp(one->if_name, "lo") != 0) {
			snprintf(name, IFNAMSIZ, "%s", one->if_name);
			found = (int)one->if_index;
		}
	if_freenameindex(all);
	return found ? found : -ENODEV;
}

static int set_flags(int sock, struct ifreq *request, int up)
{
	if (ioctl(sock, SIOCGIFFLAGS, request) < 0)
		return -errno;
	request->ifr_flags = (short)(up ? request->ifr_flags | IFF_UP : request->ifr_flags & ~IFF_UP);
	return ioctl(sock, SIOCSIFFLAGS, request) < 0 ? -errno : 0;
}

static int set_link(const char *name, const u8 *mac, u32 mtu)
{
	static const u8 none[MAC_BYTES];
	struct ifreq request = { 0 };
	int sock = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0), error = sock < 0 ? -errno : 0;
	snprintf(request.ifr_name, IFNAMSIZ, "%s", name);
	if (!error && memcmp(mac, none, MAC_BYTES)) {
		error = set_flags(sock, &request, 0);
		request.ifr_hwaddr.sa_family = ARPHRD_ETHER;
		memcpy(request.ifr_hwaddr.sa_data, mac, MAC_BYTES);
		if (!error && ioctl(sock, SIOCSIFHWADDR, &request) < 0)
			error = -errno;
	}
	request.ifr_mtu = (int)mtu;
	if (!error && mtu && ioctl(sock, SIOCSIFMTU, &request) < 0)
		error = -errno;
	if (!error)
		error = set_flags(sock, &request, 1);
	close_fd(&sock);
	return error;
}

static int write_name_servers(char **servers, u32 count)
{
	char text[4096] = "";
	size_t len = 0;
	struct address checked;
	struct stat st;
	for (u32 i = 0; i < count; i++) {
		if (parse_address(servers[i], &checked) < 0 || strchr(servers[i], '/'))
			return -EINVAL;
		len += (size_t)snprintf(text + len, sizeof(text) - len, "nameserver %s\n", servers[i]);
	}
	int fd = open_how(guest.root, "/etc/resolv.conf", O_WRONLY | O_CREAT | O_NONBLOCK | O_NOCTTY, 0644, RESOLVE_IN_ROOT | RESOLVE_NO_MAGICLINKS);
	if (fd < 0)
		return fd;
	int error = fstat(fd, &st) < 0 || !S_ISREG(st.st_mode) ? -ENXIO : 0;
	if (!error && (ftruncate(fd, 0) < 0 || write(fd, text, len) != (ssize_t)len))
		error = -errno;
	close(fd);
	return error;
}

static int set_network(const char *device, const u8 *mac, u32 mtu, char **lists[2], const u32 counts[2])
{
	char name[IFNAMSIZ];
	struct address address;
	int index = find_device(device, name), error = index < 0 ? index : 0;
	int sock = socket(AF_NETLINK, SOCK_RAW | SOCK_CLOEXEC, NETLINK_ROUTE);
	if (!error && sock < 0)
		error = -errno;
	if (!error)
		error = forget_addresses(sock, (u32)index);
	if (!error)
		error = set_link(name, mac, mtu);
	for (int which = 0; which < 2; which++)
		for (u32 i = 0; !error && i < counts[which]; i++) {
			error = parse_address(lists[which][i], &address);
			if (!error)
				error = which ? add_route(sock, (u32)index, &address) : add_address(sock, (u32)index, &address);
		}
	close_fd(&sock);
	return error;
}

static void on_network(u64 id, struct in *in)
{
	u8 mac[MAC_BYTES];
	const char *device = take_str(in);
	take(in, mac, sizeof(mac));
	u32 mtu = take_u32(in), counts[3] = { 0 };
	char **lists[3] = { NULL };
	int good = 1;
	for (int i = 0; i < 3 && good; i++)
		good = (lists[i] = take_list(in, &counts[i], 1)) != NULL && counts[i] <= MAX_ADDRESSES;
	if (!good || !take_end(in) || strlen(device) >= IFNAMSIZ || mtu > 65535)
		malformed(id);
	else {
		int error = set_network(device, mac, mtu, lists, counts);
		if (!error && counts[2])
			error = write_name_servers(lists[2], counts[2]);
		answer_result(TYPE_NETWORK, id, error);
	}
	for (int i = 0; i < 3; i++)
		free(lists[i]);
}

#endif
