/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only */
/* Parses headers into `struct packet`, and rewrites addresses and ports with their checksums. Helpers copy the bytes
 * and check the bounds; no function holds a pointer into a packet. */
#pragma once

#include "judge.h"
#include "kernel.h"
#include "layout.h"

#define ICMP_ANY(p) ((p)->protocol == IPPROTO_ICMP || (p)->protocol == IPPROTO_ICMPV6)

enum icmp_type { ECHO_REPLY = 0, UNREACHABLE = 3, ECHO = 8, TIME_EXCEEDED = 11, PARAMETER_PROBLEM = 12 };
enum icmp6_type { FIRST_ERROR6 = 1, LAST_ERROR6 = 4, ECHO6 = 128, ECHO_REPLY6 = 129, SOLICITATION = 135, ADVERTISEMENT = 136 };
enum tcp_flag { FIN = 1, SYN = 2, RST = 4, ACK = 16 };
enum side { SOURCE, DESTINATION };

struct packet {
	struct address source, destination;
	__u16 source_port, destination_port; /* the identifier of ICMP echo is the port of the requester */
	__u16 l4, l4_len;                    /* offset from the start of the frame and length, in bytes */
	__u8 protocol, family;
	__u8 ttl;
	__u8 tcp_flags;
	__u8 icmp_type;
	__u8 ports; /* whether the ports are valid */
	__u8 tcp_len; /* length of the TCP header in bytes */
	__u8 zero;
};

INLINE long same(const struct address *a, const struct address *b)
{
	return a->word[0] == b->word[0] && a->word[1] == b->word[1] && a->word[2] == b->word[2] &&
	       a->word[3] == b->word[3];
}

/* Selects one of two addresses without a branch: without CAP_PERFMON, the verifier rejects a choice between
 * pointers. */
INLINE struct address pick(int first, const struct address *a, const struct address *b)
{
	__u32 mask = first ? 0xffffffff : 0;
	struct address picked;
	asm volatile("" : "+r"(mask));
	for (int i = 0; i < 4; i++)
		picked.word[i] = (a->word[i] & mask) | (b->word[i] & ~mask);
	return picked;
}

/* Selects one of two ports without a branch. */
INLINE __u16 pick_port(int first, __u16 a, __u16 b)
{
	__u32 mask = first ? 0xffff : 0;
	asm volatile("" : "+r"(mask));
	return (a & mask) | (b & ~mask);
}

INLINE long same_mac(const __u8 *a, const __u8 *b)
{
	__u8 differs = 0;
	for (int i = 0; i < 6; i++)
		differs |= a[i] ^ b[i];
	return !differs;
}

INLINE long absent(const struct address *a)
{
	return !a->word[0] && !a->word[1] && !a->word[2] && !a->word[3];
}

INLINE long parse_tcp(struct __sk_buff *skb, struct packet *p)
{
	__u8 tcp[20];
	if (p->l4_len < sizeof(tcp) || bpf_skb_load_bytes(skb, p->l4, tcp, sizeof(tcp)))
		return MALFORMED;
	p->source_port = *(__u16 *)tcp;
	p->destination_port = *(__u16 *)(tcp + 2);
	p->ports = 1;
	__u8 flags = p->tcp_flags = tcp[13];
	__u16 header = (tcp[12] >> 4) * 4;
	if (header < sizeof(tcp) || header > p->l4_len)
		return MALFORMED;
	p->tcp_len = header;
	if (!(flags & (SYN | ACK | RST)) || ((flags & SYN) && (flags & (FIN | RST))) || ((flags & FIN) && !(flags & ACK)))
		return MALFORMED;
	return PASS;
}

INLINE long parse_udp(struct __sk_buff *skb, struct packet *p)
{
	__u16 udp[4];
	if (p->l4_len < sizeof(udp) || bpf_skb_load_bytes(skb, p->l4, udp, sizeof(udp)))
		return MALFORMED;
	p->source_port = udp[0];
	p->destination_port = udp[1];
	p->ports = 1;
	return ntohs(udp[2]) == p->l4_len ? PASS : MALFORMED;
}

INLINE long parse_icmp(struct __sk_buff *skb, struct packet *p)
{
	__u8 icmp[8];
	if (p->l4_len < sizeof(icmp) || bpf_skb_load_bytes(skb, p->l4, icmp, sizeof(icmp)))
		return MALFORMED;
	int v6 = p->protocol == IPPROTO_ICMPV6;
	p->icmp_type = icmp[0];
	if (icmp[0] == (v6 ? ECHO6 : ECHO))
		p->source_port = *(__u16 *)(icmp + 4);
	else if (icmp[0] == (v6 ? ECHO_REPLY6 : ECHO_REPLY))
		p->destination_port = *(__u16 *)(icmp + 4);
	else
		return PROTOCOL;
	p->ports = 1;
	return icmp[1] == 0 ? PASS : MALFORMED;
}

INLINE long parse_transport(struct __sk_buff *skb, struct packet *p)
{
	if (p->protocol == IPPROTO_TCP)
		return parse_tcp(skb, p);
	if (p->protocol == IPPROTO_UDP)
		return parse_udp(skb, p);
	if (p->protocol == (p->family == 4 ? IPPROTO_ICMP : IPPROTO_ICMPV6))
		return parse_icmp(skb, p);
	return PROTOCOL;
}

/* Whether the frame has `len` bytes after the Ethernet header. Frames shorter than 60 bytes may be padded to 60. */
INLINE long fits(struct __sk_buff *skb, __u32 len)
{
	return skb->len == ETH_HLEN + len || (skb->len > ETH_HLEN + len && skb->len <= 60);
}

/* Returns PASS, or the first reason to refuse the packet. Even then, fills in the fields that were read before. */
INLINE long parse_v4(struct __sk_buff *skb, struct packet *p)
{
	struct iphdr ip;
	if (bpf_skb_load_bytes(skb, ETH_HLEN, &ip, sizeof(ip)))
		return MALFORMED;
	p->family = 4;
	p->protocol = ip.protocol;
	p->ttl = ip.ttl;
	map_v4(&p->source, ip.saddr);
	map_v4(&p->destination, ip.daddr);
	__u32 total = ntohs(ip.tot_len), header = ip.ihl * 4;
	if (ip.version != 4 || header < sizeof(ip) || total < header || !fits(skb, total) || (ip.frag_off & htons(0x8000)))
		return MALFORMED;
	if (ip.frag_off & htons(0x1fff))
		return FRAGMENT;
	p->l4 = ETH_HLEN + header;
	p->l4_len = total - header;
	long reason = parse_transport(skb, p);
	if (ip.frag_off & htons(0x2000))
		return FRAGMENT;
	return header > sizeof(ip) ? OPTIONS : reason;
}

INLINE long parse_v6(struct __sk_buff *skb, struct packet *p)
{
	struct ipv6hdr ip;
	if (bpf_skb_load_bytes(skb, ETH_HLEN, &ip, sizeof(ip)))
		return MALFORMED;
	p->family = 6;
	p->protocol = ip.nexthdr;
	p->ttl = ip.hop_limit;
	__builtin_memcpy(&p->source, &ip.saddr, sizeof(p->source));
	__builtin_memcpy(&p->destination, &ip.daddr, sizeof(p->destination));
	__u32 len = ntohs(ip.payload_len);
	if (ip.version != 6 || !fits(skb, sizeof(ip) + len))
		return MALFORMED;
	p->l4 = ETH_HLEN + sizeof(ip);
	p->l4_len = len;
	switch (ip.nexthdr) {
	case 44:
		return FRAGMENT;
	case 0: case 43: case 50: case 51: case 60: case 135: case 139: case 140:
		return OPTIONS;
	}
	return parse_transport(skb, p);
}

INLINE long parse(struct __sk_buff *skb, struct packet *p)
{
	if (skb->vlan_present)
		return NOT_IP;
	if (skb->protocol == htons(ETH_P_IP))
		return parse_v4(skb, p);
	if (skb->protocol == htons(ETH_P_IPV6))
		return parse_v6(skb, p);
	return NOT_IP;
}

INLINE __s64 difference(const struct address *from, const struct address *to, int v4)
{
	if (v4)
		return bpf_csum_diff(&from->word[3], 4, &to->word[3], 4, 0);
	return bpf_csum_diff(from, 16, to, 16, 0);
}

/* Offset of an address in the IP header at offset `ip`. */
INLINE __u32 address_offset(__u32 ip, int v4, enum side side)
{
	return ip + (v4 ? (side == SOURCE ? 12 : 16) : (side == SOURCE ? 8 : 24));
}

INLINE long store_address(struct __sk_buff *skb, __u32 offset, const struct address *to, int v4)
{
	if (v4)
		return bpf_skb_store_bytes(skb, offset, &to->word[3], 4, 0);
	return bpf_skb_store_bytes(skb, offset, to, 16, 0);
}

/* Rewrites one side's address and port in the frame, but not in `p`, and updates the checksums. This also works if the
 * checksum is left to the device: the checksum field then contains the sum of the pseudo header, which the update
 * changes accordingly. */
FUNCTION int translate(struct __sk_buff *skb, const struct packet *p, enum side side, const struct address *to, __u16 port)
{
	if (!p || !to)
		return -1;
	int v4 = p->family == 4, icmp = ICMP_ANY(p);
	struct address from = pick(side == SOURCE, &p->source, &p->destination);
	__u16 old = pick_port(side == SOURCE, p->source_port, p->destination_port);
	__u32 sum = p->l4 + (p->protocol == IPPROTO_TCP ? 16 : p->protocol == IPPROTO_UDP ? 6 : 2);
	__u64 flags = p->protocol == IPPROTO_UDP ? BPF_F_MARK_MANGLED_0 : 0;
	long failed = 0;
	if (p->protocol != IPPROTO_ICMP)
		failed |= bpf_l4_csum_replace(skb, sum, 0, difference(&from, to, v4), flags | BPF_F_PSEUDO_HDR);
	failed |= bpf_l4_csum_replace(skb, sum, old, port, flags | 2);
	if (v4)
		failed |= bpf_l3_csum_replace(skb, ETH_HLEN + 10, from.word[3], to->word[3], 4);
	failed |= store_address(skb, address_offset(ETH_HLEN, v4, side), to, v4);
	__u32 offset = p->l4 + (icmp ? 4 : side == SOURCE ? 0 : 2);
	failed |= bpf_skb_store_bytes(skb, offset, &port, 2, 0);
	return failed ? -1 : 0;
}

#define MAX_TCP_OPTIONS 10

/* Clamps the maximum segment size in a SYN to `most`, because the guest cannot learn an uplink's MTU. Leaves a SYN
 * unchanged if the option is not among the first MAX_TCP_OPTIONS options. */
FUNCTION int clamp_mss(struct __sk_buff *skb, const struct packet *p, __u32 most)
{
	if (!p || most > 0xffff)
		return -1;
	__u32 at = p->l4 + 20, end = p->l4 + p->tcp_len;
	for (int i = 0; i < MAX_TCP_OPTIONS; i++) {
		__u8 option[4];
		if (at + sizeof(option) > end || bpf_skb_load_bytes(skb, at, option, sizeof(option)) || option[0] == 0)
			return 0;
		if (option[0] == 1) {
			at++;
			continue;
		}
		if (option[0] == 2 && option[1] == 4) {
			__u16 from = option[2] << 8 | option[3], to = most;
			__u16 stored = htons(to);
			if (from <= to)
				return 0;
			/* The checksum counts a value at an odd offset with its bytes swapped. */
			int odd = (at - p->l4) & 1;
			long failed = bpf_l4_csum_replace(skb, p->l4 + 16, odd ? from : htons(from), odd ? to : htons(to), 2);
			return failed || bpf_skb_store_bytes(skb, at + 2, &stored, 2, 0) ? -1 : 0;
		}
		if (option[1] < 2)
			return 0;
		at += option[1];
	}
	return 0;
}

/* Decrements the TTL, which must be at least 2. */
INLINE long decrement_ttl(struct __sk_buff *skb, struct packet *p)
{
	__u8 ttl = p->ttl - 1;
	if (p->family == 6)
		return bpf_skb_store_bytes(skb, ETH_HLEN + 7, &ttl, 1, 0);
	__u16 from = p->ttl | p->protocol << 8, to = ttl | p->protocol << 8;
	return bpf_l3_csum_replace(skb, ETH_HLEN + 8 + 2, from, to, 2) |
	       bpf_skb_store_bytes(skb, ETH_HLEN + 8, &ttl, 1, 0);
}
