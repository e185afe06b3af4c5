/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only */
/* Offload requests: checksums and segmentation that the writer of a frame leaves to the host. `__sk_buff` does not show
 * them completely, so the programs read the kernel's own structures. */
#pragma once

#include "packet.h"

/* kfuncs. The loader replaces these placeholder addresses with the functions' BTF ids (`src/datapath/kfuncs.rs`). */
static void *(*const bpf_cast_to_kern_ctx)(void *skb) = (void *)0x63756201;
static void *(*const bpf_rdonly_cast)(const void *at, __u32 type) = (void *)0x63756202;

/* Members of the kernel's structures that are missing in `__sk_buff`. The loader relocates the accesses by name
 * (CO-RE). */
#define KERNELS __attribute__((preserve_access_index))
struct sk_buff {
	__u8 ip_summed : 2;
	__u16 mac_header, csum_start, csum_offset; /* offsets from `head`, except `csum_offset`: from `csum_start` */
	unsigned char *head;
	__u32 end;
} KERNELS;
struct skb_shared_info {
	__u32 gso_type;
} KERNELS;

enum field { BYTE_OFFSET = 0, LEFT_SHIFT = 4, RIGHT_SHIFT = 5 };
/* Value of a bit field within one byte. */
#define BITS(structure, member)                                                                                        \
	((__u64) * ((const __u8 *)(structure) + __builtin_preserve_field_info((structure)->member, BYTE_OFFSET))       \
	 << __builtin_preserve_field_info((structure)->member, LEFT_SHIFT) >>                                          \
	 __builtin_preserve_field_info((structure)->member, RIGHT_SHIFT))
/* BTF id of a type in the running kernel. */
#define KERNELS_TYPE(type) __builtin_btf_type_id(*(type *)0, 1)

#define CHECKSUM_NONE 0
enum { SKB_GSO_TCPV4 = 1 << 0, SKB_GSO_DODGY = 1 << 1, SKB_GSO_TCPV6 = 1 << 4 };

/* Whether the frame requests no offload. */
INLINE long is_finished(struct __sk_buff *skb, struct sk_buff *kernels)
{
	return BITS(kernels, ip_summed) == CHECKSUM_NONE && !skb->gso_size;
}

/* The writer of a frame chooses where the host stores a checksum and how it segments the packet, and the host does both
 * after this program has evaluated and translated the packet. Both requests must therefore match the packet's own
 * transport header. Returns PASS, or the reason to refuse the packet. */
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
	/* No network stack uses smaller segments, and each segment costs the host the same, whatever its size. */
	return skb->gso_size < 48 ? OFFLOAD : PASS;
}
