// SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
/* Where the processes in the proxy's cgroup may connect, whatever code runs in them. Both programs return 1, or 0 to
 * refuse the connection with EPERM.
 *
 * connect4, connect6   connect(2) on sockets that were made in the group */
#include "judge.h"

char terms[] SEC("license") = "GPL";

INLINE int may_connect(const struct bpf_sock_addr *to, const struct address *remote)
{
	return to->protocol == IPPROTO_TCP && judge(remote, IPPROTO_TCP, ntohs((__u16)to->user_port), FROM_PROXY) == PASS;
}

SEC("cgroup/connect4") int connect4(struct bpf_sock_addr *to)
{
	struct address remote;
	map_v4(&remote, to->user_ip4);
	return may_connect(to, &remote);
}

/* The address may be an IPv4-mapped one, which is then judged as the IPv4 address. */
SEC("cgroup/connect6") int connect6(struct bpf_sock_addr *to)
{
	struct address remote = {{to->user_ip6[0], to->user_ip6[1], to->user_ip6[2], to->user_ip6[3]}};
	return may_connect(to, &remote);
}
