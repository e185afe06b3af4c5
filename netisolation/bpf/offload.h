/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only */
/* What the writer of a frame leaves to the host. `__sk_buff` shows nothing of it, so it is read from the kernel's own
 * structures. */
#pragma once

#include "packet.h"

/* Functions of the kernel, not helpers: each has the number that the kernel's type information gives it, which the loader
 * puts in place of ours (`src/kfuncs.rs`). */
static void *(*const bpf_cast_to_kern_ctx)(void *skb) = (void *)0x63756201;
static void *(*const bpf_rdonly_cast)(const void *at, __u32 type) = (void *)0x63756202;

/* Of the kernel's own structures what `__sk_buff` has not, by name: the loader finds where it is (CO-RE). */
#define KERNELS __attribute__((preserve_access_index))
struct sk_buff {
	__u8 ip_summed : 2;
	__u16 mac_header, csum_start, csum_offset; /* from `head`; the last from `csum_start` */
	unsigned char *head;
	__u32 end;
} KERNELS;
struct skb_shared_info {
	__u32 gso_type;
} KERNELS;

enum field { BYTE_OFFSET = 0, LEFT_SHIFT = 4, RIGHT_SHIFT = 5 };
/* Bits of a byte. */
#define BITS(structure, member)                                                                                        \
	((__u64) * ((const __u8 *)(structure) + __builtin_preserve_field_info((structure)->member, BYTE_OFFSET))       \
	 << __builtin_preserve_field_info((structure)->member, LEFT_SHIFT) >>                                          \
	 __builtin_preserve_field_info((structure)->member, RIGHT_SHIFT))
/* As the kernel numbers the type. */
#define KERNELS_TYPE(type) __builtin_btf_type_id(*(type *)0, 1)

#define CHECKSUM_NONE 0
enum { SKB_GSO_TCPV4 = 1 << 0, SKB_GSO_DODGY = 1 << 1, SKB_GSO_TCPV6 = 1 << 4 };

/* Whether the host has nothing to do to a frame before it leaves. */
INLINE long is_finished(struct __sk_buff *skb, struct sk_buff *kernels)
{
	return BITS(kernels, ip_summed) == CHECKSUM_NONE && !skb->gso_size;
}

/* Whoever writes to the TAP says where the host is to put a checksum and how to cut the packet; the host does it after
 * verdict and translation. So both have to be of the packet's own transport header: 0, or why it does not pass. */
FUNCTION int check_offload(struct __sk_buff *skb, struct packet *p)
{
	struct sk_buff *kernels = bpf_cast_to_kern_ctx(skb);
	if (!p)
		return INTERNAL;
	if (is_finished(skb, kernels))
		return PASS;
	__u16 sum = p->protocol == IPPROTO_TCP ? 16 : 6, start = kernels->csum_start - kernels->mac_header;
	if (BITS(kernels, ip_summed) == CHECKSUM_NONE || (p->protocol != IPPROTO_TCP && p->protocol != IPPROTO_UDP))
		return OFFLOAD;
	if (start != p->l4)
		return OFFLOAD;
	if (kernels->csum_offset != sum)
		return OFFLOAD;
	if (!skb->gso_size)
		return PASS;
	struct skb_shared_info *shared = bpf_rdonly_cast(kernels->head + kernels->end, KERNELS_TYPE(struct skb_shared_info));
	__u32 kind = p->family == 4 ? SKB_GSO_TCPV4 : SKB_GSO_TCPV6;
	if (p->protocol != IPPROTO_TCP || (shared->gso_type & ~SKB_GSO_DODGY) != kind)
		return OFFLOAD;
	/* No stack announces so small a segment; each costs the host as much as a large one. */
	return skb->gso_size < 48 ? OFFLOAD : PASS;
}
