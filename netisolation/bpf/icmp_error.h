/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only */
/* ICMP errors from the wire about flows of guests. */
#pragma once

#include "packet.h"
#include "settings.h"

/* Translates the destination of an ICMP error, and the source address and port of the packet that it quotes, and
 * updates the checksums. The quoted transport checksum is not updated: receivers cannot verify it, because the quoted
 * packet is usually truncated. */
INLINE long translate_error(struct __sk_buff *skb, struct packet *p, const struct wire_key *wire, __u16 port)
{
	int v4 = p->family == 4;
	struct address guest = pick(v4, &set()->guest4, &set()->guest6);
	__u32 ip = p->l4 + 8, sum = p->l4 + 2;
	__u32 field = ip + (v4 ? 20 : 40) + (wire->protocol == IPPROTO_ICMP || wire->protocol == IPPROTO_ICMPV6 ? 4 : 0);
	long failed = bpf_l4_csum_replace(skb, sum, wire->port, port, 2);
	failed |= bpf_skb_store_bytes(skb, field, &port, 2, 0);
	if (v4) {
		failed |= bpf_l3_csum_replace(skb, ip + 10, wire->local.word[3], guest.word[3], 4);
		failed |= bpf_l3_csum_replace(skb, ETH_HLEN + 10, p->destination.word[3], guest.word[3], 4);
	} else {
		__s64 inner = difference(&wire->local, &guest, 0), outer = difference(&p->destination, &guest, 0);
		failed |= bpf_l4_csum_replace(skb, sum, 0, inner, 0);
		failed |= bpf_l4_csum_replace(skb, sum, 0, outer, BPF_F_PSEUDO_HDR);
	}
	failed |= store_address(skb, address_offset(ip, v4, SOURCE), &guest, v4);
	failed |= store_address(skb, address_offset(ETH_HLEN, v4, DESTINATION), &guest, v4);
	return failed ? -1 : 0;
}

/* Reads the flow that an ICMP error quotes into `wire`. Returns 0 if the packet is not an ICMP error about a packet
 * from its own destination address. */
FUNCTION int quoted(struct __sk_buff *skb, struct packet *p, struct wire_key *wire)
{
	if (!p || !wire || p->l4_len < 8 || !ICMP_ANY(p))
		return 0;
	__u8 type = p->icmp_type;
	__u16 start[3];
	__u32 ip = p->l4 + 8;
	if (p->family == 4) {
		struct iphdr inner;
		if ((type != UNREACHABLE && type != TIME_EXCEEDED && type != PARAMETER_PROBLEM) ||
		    bpf_skb_load_bytes(skb, ip, &inner, sizeof(inner)) || inner.version != 4 || inner.ihl != 5)
			return 0;
		map_v4(&wire->local, inner.saddr);
		map_v4(&wire->remote, inner.daddr);
		wire->protocol = inner.protocol;
		ip += sizeof(inner);
	} else {
		struct ipv6hdr inner;
		if (type < FIRST_ERROR6 || type > LAST_ERROR6 || bpf_skb_load_bytes(skb, ip, &inner, sizeof(inner)) || inner.version != 6)
			return 0;
		__builtin_memcpy(&wire->local, &inner.saddr, sizeof(wire->local));
		__builtin_memcpy(&wire->remote, &inner.daddr, sizeof(wire->remote));
		wire->protocol = inner.nexthdr;
		ip += sizeof(inner);
	}
	if (bpf_skb_load_bytes(skb, ip, start, sizeof(start)))
		return 0;
	int echo = wire->protocol == IPPROTO_ICMP || wire->protocol == IPPROTO_ICMPV6;
	wire->port = echo ? start[2] : start[0];
	wire->remote_port = echo ? 0 : start[1];
	return same(&p->destination, &wire->local);
}
