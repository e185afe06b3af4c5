/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only */
/* The maps. The loader sets the sizes of `indices`, `taps`, `states`, `flows` and `wires`, which are 1 here. A server
 * takes over its predecessor's maps only if the tokens of this file and of `layout.h` are the same (`build.rs`). */
#pragma once

#include "kernel.h"
#include "layout.h"

#define MAP(name, kind, key_type, value_type, entries, flags)                                                          \
	struct {                                                                                                       \
		__uint(type, kind);                                                                                    \
		__uint(max_entries, entries);                                                                          \
		__uint(map_flags, flags);                                                                              \
		__uint(pinning, PIN_BY_NAME);                                                                          \
		__type(key, key_type);                                                                                 \
		__type(value, value_type);                                                                             \
	} name SEC(".maps")

MAP(indices, BPF_MAP_TYPE_HASH, __u32, __u32, 1, 0); /* TAP number by device index */
MAP(taps, BPF_MAP_TYPE_ARRAY, __u32, struct tap, 1, 0);
MAP(states, BPF_MAP_TYPE_ARRAY, __u32, struct state, 1, 0);
MAP(rules, BPF_MAP_TYPE_LPM_TRIE, struct rule_key, struct rule, 1 << 20, BPF_F_NO_PREALLOC);
MAP(pins, BPF_MAP_TYPE_HASH, struct pin_key, struct pin, 1 << 18, BPF_F_NO_PREALLOC);
MAP(flows, BPF_MAP_TYPE_HASH, struct flow_key, struct flow, 1, BPF_F_NO_PREALLOC);
MAP(wires, BPF_MAP_TYPE_HASH, struct wire_key, struct flow_key, 1, BPF_F_NO_PREALLOC);
MAP(uplinks, BPF_MAP_TYPE_HASH, __u32, struct uplink, 64, 0); /* by device index */
MAP(refusals, BPF_MAP_TYPE_LRU_HASH, struct refusal, __u64, 1 << 14, 0);
struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 1 << 20);
	__uint(pinning, PIN_BY_NAME);
} records SEC(".maps");
