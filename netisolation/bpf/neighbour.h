/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only */
/* ARP and neighbour discovery: answers for the gateway, which exists only in these programs. */
#pragma once

#include "packet.h"
#include "settings.h"

/* Turns an ARP request for the gateway into its reply, and drops all other ARP packets. */
INLINE long arp(struct __sk_buff *skb)
{
	struct __attribute__((packed)) {
		__u16 hardware, protocol;
		__u8 hardware_len, protocol_len;
		__u16 operation;
		struct mac sender_mac;
		__u32 sender;
		struct mac target_mac;
		__u32 target;
	} arp;
	struct mac guest = set()->guest_mac, gateway = set()->gateway_mac;
	if (bpf_skb_load_bytes(skb, ETH_HLEN, &arp, sizeof(arp)))
		return TCX_DROP;
	if (arp.hardware != htons(1) || arp.protocol != htons(ETH_P_IP) || arp.hardware_len != 6 || arp.protocol_len != 4 ||
	    arp.operation != htons(ARPOP_REQUEST) || arp.sender != set()->guest4.word[3] || arp.target != set()->gateway4.word[3])
		return TCX_DROP;
	arp.operation = htons(ARPOP_REPLY);
	arp.sender_mac = gateway;
	arp.sender = set()->gateway4.word[3];
	arp.target_mac = guest;
	arp.target = set()->guest4.word[3];
	if (bpf_skb_store_bytes(skb, 0, &guest, sizeof(guest), 0) ||
	    bpf_skb_store_bytes(skb, 6, &gateway, sizeof(gateway), 0) ||
	    bpf_skb_store_bytes(skb, ETH_HLEN, &arp, sizeof(arp), 0))
		return TCX_DROP;
	return bpf_redirect(skb->ifindex, 0);
}

struct __attribute__((packed)) neighbour {
	struct mac to, from;
	__u16 ethernet;
	__u32 version;
	__u16 len;
	__u8 next, hops;
	struct address source, destination;
	__u8 type, code;
	__u16 sum;
	__u32 flags;
	struct address target;
	__u8 option, option_len;
	struct mac mac;
};

/* Answers a neighbour solicitation with the gateway's advertisement (RFC 4861, 4.3 and 4.4). */
INLINE long advertise(struct __sk_buff *skb, const struct address *to)
{
	struct neighbour answer = {
		.to = set()->guest_mac, .from = set()->gateway_mac, .ethernet = htons(ETH_P_IPV6), .version = htonl(6u << 28), .len = htons(32),
		.next = IPPROTO_ICMPV6, .hops = 255, .source = set()->gateway6, .destination = *to, .type = ADVERTISEMENT,
		.flags = htonl(0xe0000000), .target = set()->gateway6, .option = 2, .option_len = 1, .mac = set()->gateway_mac};
	__u32 pseudo[2] = {htonl(32), htonl(IPPROTO_ICMPV6)};
	__s64 sum = bpf_csum_diff(0, 0, pseudo, sizeof(pseudo), 0);
	sum = bpf_csum_diff(0, 0, (__u8 *)&answer + 22, 64, sum);
	sum = (sum & 0xffff) + (sum >> 16 & 0xffff);
	sum = (sum & 0xffff) + (sum >> 16);
	answer.sum = ~sum;
	if (bpf_skb_change_tail(skb, sizeof(answer), 0) || bpf_skb_store_bytes(skb, 0, &answer, sizeof(answer), 0))
		return TCX_DROP;
	return bpf_redirect(skb->ifindex, 0);
}

/* Answers a neighbour solicitation for the gateway from the guest's address or a link-local address. Returns 0 for any
 * other packet. */
FUNCTION int neighbour(struct __sk_buff *skb)
{
	struct ipv6hdr ip;
	struct {
		__u8 type, code;
		__u16 sum;
		__u32 zero;
		struct address target;
	} ask;
	struct address source, gateway = set()->gateway6, guest = set()->guest6;
	if (skb->protocol != htons(ETH_P_IPV6) || bpf_skb_load_bytes(skb, ETH_HLEN, &ip, sizeof(ip)) ||
	    bpf_skb_load_bytes(skb, ETH_HLEN + sizeof(ip), &ask, sizeof(ask)))
		return 0;
	__builtin_memcpy(&source, &ip.saddr, sizeof(source));
	if (ip.version != 6 || ip.nexthdr != IPPROTO_ICMPV6 || ip.hop_limit != 255 || ask.type != SOLICITATION || ask.code != 0 ||
	    !same(&ask.target, &gateway))
		return 0;
	if (!same(&source, &guest) && (source.word[0] & htonl(0xffc00000)) != htonl(0xfe800000))
		return 0;
	return advertise(skb, &source);
}
