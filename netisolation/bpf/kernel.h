/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only */
/* BPF helpers (bpf-helpers(7)) and macros for map declarations, based on the kernel's UAPI headers. */
#pragma once

#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/in6.h>
#include <linux/ip.h>
#include <linux/ipv6.h>

#define SEC(name) __attribute__((section(name), used))
#define INLINE static inline __attribute__((always_inline))
/* A global function: the verifier checks it separately from its callers, for any arguments. */
#define FUNCTION __attribute__((noinline))
#define __uint(name, value) int(*name)[value]
#define __type(name, value) typeof(value) *name
#define PIN_BY_NAME 1

#define HELPER(result, name, ...) static result (*const bpf_##name)(__VA_ARGS__) = (void *)BPF_FUNC_##name
HELPER(void *, map_lookup_elem, void *map, const void *key);
HELPER(long, map_update_elem, void *map, const void *key, const void *value, __u64 flags);
HELPER(long, map_delete_elem, void *map, const void *key);
HELPER(__u64, ktime_get_ns, void);
HELPER(__u32, get_prandom_u32, void);
HELPER(long, skb_load_bytes, const void *skb, __u32 offset, void *to, __u32 len);
HELPER(long, skb_store_bytes, struct __sk_buff *skb, __u32 offset, const void *from, __u32 len, __u64 flags);
HELPER(long, skb_change_tail, struct __sk_buff *skb, __u32 len, __u64 flags);
HELPER(long, l3_csum_replace, struct __sk_buff *skb, __u32 offset, __u64 from, __u64 to, __u64 size);
HELPER(long, l4_csum_replace, struct __sk_buff *skb, __u32 offset, __u64 from, __u64 to, __u64 flags);
HELPER(__s64, csum_diff, const void *from, __u32 from_size, const void *to, __u32 to_size, __u32 seed);
HELPER(long, fib_lookup, void *skb, struct bpf_fib_lookup *params, int size, __u32 flags);
HELPER(long, redirect, __u32 ifindex, __u64 flags);
HELPER(long, redirect_neigh, __u32 ifindex, struct bpf_redir_neigh *next, int size, __u64 flags);
HELPER(long, ringbuf_output, void *ring, const void *data, __u64 size, __u64 flags);

#define htons(x) __builtin_bswap16(x)
#define ntohs(x) __builtin_bswap16(x)
#define htonl(x) __builtin_bswap32(x)

#define ARPOP_REQUEST 1
#define ARPOP_REPLY 2

/* Missing in the headers of some distributions. */
#define TCX_NEXT (-1)
#define TCX_DROP 2
#define FIB_LOOKUP_SKIP_NEIGHBOUR 4
