/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only */
/* Judges addresses by the rules for all sandboxes: for flows of guests, and for connections that the proxy makes. */
#pragma once

#include "kernel.h"
#include "layout.h"
#include "maps.h"

enum judged { FROM_GUEST, FROM_PROXY };

INLINE void map_v4(struct address *to, __u32 v4)
{
	to->word[0] = 0;
	to->word[1] = 0;
	to->word[2] = htonl(0xffff);
	to->word[3] = v4;
}

INLINE long is_v4(const struct address *a)
{
	return a->word[0] == 0 && a->word[1] == 0 && a->word[2] == htonl(0xffff);
}

/* Whether a rule's services include a protocol (ICMP stands for ICMPv6) and `port`, which is in host byte order. A rule
 * without services includes all. */
INLINE long covers(const struct rule *rule, __u8 protocol, __u16 port)
{
	if (!rule->accesses)
		return 1;
	for (int i = 0; i < ACCESSES && i < rule->accesses; i++) {
		const struct access *access = &rule->access[i];
		if (access->protocol != protocol)
			continue;
		if (protocol == IPPROTO_ICMP || (access->first <= port && port <= access->last))
			return 1;
	}
	return 0;
}

/* The rule for an address. A rule for an IPv6 block does not apply to an IPv4 address inside ::ffff:0:0/96. */
INLINE struct rule *rule_for(__u32 number, const struct address *address)
{
	struct rule_key key = {.prefix = 32 + 128, .number = number, .address = *address};
	struct rule *rule = bpf_map_lookup_elem(&rules, &key);
	return rule && is_v4(address) && rule->prefix < 96 ? 0 : rule;
}

/* Returns PASS, OF_HOST or FORBIDDEN_RANGE. Only the proxy may use the services of the host that the operator opened. */
INLINE long judge(const struct address *remote, __u8 protocol, __u16 port, enum judged from)
{
	struct rule *rule = rule_for(0, remote);
	if (rule && rule->verdict == HOST)
		return from == FROM_PROXY && rule->accesses && covers(rule, protocol, port) ? PASS : OF_HOST;
	return rule && (rule->verdict == FORBIDDEN) == covers(rule, protocol, port) ? FORBIDDEN_RANGE : PASS;
}
