// SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
/* The data path between guests and uplinks; docs/use/network.md explains it.
 *
 * from_guest      on every TAP: answers a frame, redirects it to the resolver, the proxy or an uplink, or drops it
 * from_wire       on every uplink: redirects replies to guests' flows; leaves all other packets to the host
 * from_resolver   on the egress of the resolver's device: redirects answers of the resolver and of the proxy to guests
 *                 and drops everything else */
#include "icmp_error.h"
#include "judge.h"
#include "maps.h"
#include "neighbour.h"
#include "offload.h"
#include "packet.h"
#include "settings.h"

char terms[] SEC("license") = "GPL";

#define SECOND 1000000000ULL
#define RECORDS_PER_S 100
#define COMMON_TRIES 32
#define OWN_TRIES 32
/* Ports of handed flows. They need not differ from those of other sandboxes, because the addresses do. */
#define FIRST_HANDED_PORT 1024
#define HANDED_PORTS 64000
/* The verdict on a flow that the policy allows and that goes to the proxy. The other verdicts are in `enum reason`. */
#define HANDED (-1)
#define COUNT(counter, n) __sync_fetch_and_add(&(counter), (n))

/* Takes `cost` from a token bucket that holds at most `burst`; both are in nanoseconds of refill time. Returns 0 if the
 * bucket has too little. */
INLINE long spend(__u64 *due, __u64 cost, __u64 burst)
{
	__u64 now = bpf_ktime_get_ns(), was = *due, floor = now > burst ? now - burst : 0;
	if (was < floor && __sync_val_compare_and_swap(due, was, floor) == was)
		was = floor;
	if (__sync_fetch_and_add(due, cost) + cost <= now)
		return 1;
	__sync_fetch_and_add(due, -cost);
	return 0;
}

/* Counts a refused packet, and writes a record for the first one of its flow. */
FUNCTION int refuse(struct packet *p, __u32 index, __u8 reason, __u8 direction)
{
	struct tap *tap = bpf_map_lookup_elem(&taps, &index);
	struct state *state = bpf_map_lookup_elem(&states, &index);
	if (!p || !tap || !state || reason >= REASONS)
		return TCX_DROP;
	COUNT(state->refused[reason], 1);
	struct record record = {};
	struct refusal *refusal = &record.refusal;
	refusal->tap = index;
	refusal->tenure = tap->tenure;
	refusal->reason = reason;
	refusal->direction = direction;
	refusal->protocol = p->protocol;
	refusal->family = p->family;
	refusal->source_port = p->source_port;
	refusal->destination_port = p->destination_port;
	refusal->source = p->source;
	refusal->destination = p->destination;
	__u64 *known = bpf_map_lookup_elem(&refusals, refusal), one = 1;
	if (known) {
		COUNT(*known, 1);
		return TCX_DROP;
	}
	if (!spend(&state->records_due, SECOND / RECORDS_PER_S, SECOND))
		return TCX_DROP;
	if (bpf_map_update_elem(&refusals, refusal, &one, BPF_NOEXIST))
		return TCX_DROP;
	record.time = bpf_ktime_get_ns();
	if (bpf_ringbuf_output(&records, &record, sizeof(record), 0))
		bpf_map_delete_elem(&refusals, refusal);
	return TCX_DROP;
}

/* Whether a packet's flow contains names that the proxy checks: TLS and HTTP, and QUIC, to which it does not speak. */
INLINE long has_checked_name(const struct packet *p, __u16 port)
{
	return (p->protocol == IPPROTO_TCP && (port == 443 || port == 80)) || (p->protocol == IPPROTO_UDP && port == 443);
}

/* Evaluates the policy for a packet: returns PASS, HANDED, or the reason to refuse the packet. `open`: the packet
 * belongs to an open flow, so an expired name pin still allows its address. */
FUNCTION int evaluate(struct packet *p, __u32 index, __u8 outward, __u8 open)
{
	struct tap *tap = bpf_map_lookup_elem(&taps, &index);
	if (!p || !tap || !tap->tenure || !tap->policy)
		return POLICY;
	struct pin_key pin_key = {.tap = index, .address = pick(outward, &p->destination, &p->source)};
	const struct address *remote = &pin_key.address;
	__u16 port = ntohs(pick_port(outward, p->destination_port, p->source_port));
	if (p->family == 6 && is_v4(remote))
		return FORBIDDEN_RANGE;
	__u8 protocol = ICMP_ANY(p) ? IPPROTO_ICMP : p->protocol;
	long refused = judge(remote, protocol, port, FROM_GUEST);
	if (refused)
		return refused;
	struct pin *pin = bpf_map_lookup_elem(&pins, &pin_key);
	__u32 marks = pin && pin->tenure == tap->tenure && (open || pin->expires > bpf_ktime_get_ns()) ? pin->marks : 0;
	long all = tap->hands_all, checked = all || (set()->proxy_port && has_checked_name(p, port));
	if ((marks & ADMITS) && !checked)
		return PASS;
	struct rule *rule = rule_for((__u32)tap->policy, remote);
	long allowed = rule && rule->verdict == ALLOW && covers(rule, protocol, port);
	if (!allowed && !(marks & ADMITS))
		return POLICY;
	if (!checked || (allowed && !(marks & RULED) && !all))
		return PASS;
	/* Without a proxy, as after a restart with other options, a flow that only it may carry does not pass. */
	return p->protocol == IPPROTO_TCP && set()->proxy_port ? HANDED : POLICY;
}

/* Evaluates an open flow again if the policy has changed since the flow was last allowed. Returns PASS, or the reason
 * to refuse the packet. A flow that would now be handed to the proxy, but was not, is refused. */
INLINE long still_allowed(struct flow *flow, struct tap *tap, struct packet *p, __u32 index, __u8 outward)
{
	__u64 policy = tap->policy;
	if (flow->policy == policy)
		return PASS;
	long reason = evaluate(p, index, outward, 1);
	if (reason == HANDED)
		reason = flow->handed ? PASS : POLICY;
	if (!reason)
		flow->policy = policy;
	return reason;
}

INLINE long within_rate(__u64 *due, __u64 bytes_per_s, __u32 bytes)
{
	return !bytes_per_s || spend(due, bytes * SECOND / bytes_per_s, SECOND / 10 + 65536 * SECOND / bytes_per_s);
}

/* An integer hash. */
INLINE __u32 mix(__u32 x)
{
	x = (x ^ x >> 16) * 0x7feb352d;
	x = (x ^ x >> 15) * 0x846ca68b;
	return x ^ x >> 16;
}

/* Adds an entry to `wires` that reserves a free port of the local address for a remote end, one of `ports` ports.
 * Returns the port in network byte order, or 0 if every port that was tried is in use. Three quarters of the ports are
 * common to all sandboxes. Of the other ports, each sandbox tries about an eighth, selected by the sandbox and the
 * remote end, so that one sandbox cannot use up the ports that others need for the same remote end. */
FUNCTION int take_port(struct wire_key *wire, const struct flow_key *key, __u32 first, __u32 ports)
{
	if (!wire || !key || ports < 4)
		return 0;
	__u32 kept = ports / 4, common = ports - kept, own = kept / 8 + 8, at = bpf_get_prandom_u32();
	__u32 seed = mix(key->tap ^ mix(key->remote_port ^ key->protocol << 16 ^ mix(key->remote.word[3])));
	seed ^= mix(key->remote.word[0] ^ mix(key->remote.word[1] ^ mix(key->remote.word[2])));
	for (int i = 0; i < COMMON_TRIES + OWN_TRIES; i++) {
		__u32 place = i < COMMON_TRIES ? (at + i * 97) % common : common + mix(seed + (at + i) % own) % kept;
		wire->port = htons(first + place);
		if (!bpf_map_update_elem(&wires, wire, key, BPF_NOEXIST))
			return wire->port;
	}
	return 0;
}

/* The address of the resolver's and the proxy's sockets. */
INLINE struct address socket_address(const struct packet *p)
{
	return pick(p->family == 4, &set()->resolver4, &set()->resolver6);
}

/* The last word of an address, plus a number. */
INLINE __u32 plus(__u32 word, __u32 number)
{
	return htonl(htonl(word) + number);
}

/* Opens a flow that `policy` has allowed. `handed`: the proxy's port, or 0. Returns PASS, or the reason to refuse the
 * packet. If the policy has changed in the meantime, the flow's next packet is evaluated against the new policy. */
FUNCTION int open_flow(struct packet *p, const struct flow_key *key, const struct address *local, __u64 policy, __u16 handed)
{
	if (!p || !key || !local)
		return INTERNAL;
	__u32 index = key->tap;
	struct tap *tap = bpf_map_lookup_elem(&taps, &index);
	struct state *state = bpf_map_lookup_elem(&states, &index);
	if (!tap || !state)
		return INTERNAL;
	if (state->opened - tap->closed >= tap->max_flows)
		return FLOWS;
	if (tap->flows_per_s && !spend(&state->flows_due, SECOND / tap->flows_per_s, SECOND))
		return FLOWS;
	struct wire_key wire = {
		.local = *local, .remote = key->remote, .remote_port = key->remote_port, .protocol = key->protocol};
	struct flow flow = {
		.seen = bpf_ktime_get_ns(), .tap = index, .tenure = tap->tenure, .policy = policy, .handed = handed, .local = *local};
	if (handed) {
		wire.remote.word[0] = local->word[0];
		wire.remote.word[1] = local->word[1];
		wire.remote.word[2] = local->word[2];
		wire.remote.word[3] = plus(local->word[3], -index);
		wire.remote_port = handed;
		flow.port = take_port(&wire, key, FIRST_HANDED_PORT, HANDED_PORTS);
	} else {
		flow.port = take_port(&wire, key, set()->first_port, set()->ports);
	}
	if (!flow.port)
		return FLOWS;
	if (bpf_map_update_elem(&flows, key, &flow, BPF_NOEXIST)) {
		bpf_map_delete_elem(&wires, &wire);
		return INTERNAL;
	}
	COUNT(state->opened, 1);
	return PASS;
}

/* Looks up the host's route and the uplink's address. Returns PASS, or the reason to refuse the packet. */
FUNCTION int route(struct __sk_buff *skb, struct packet *p, struct bpf_fib_lookup *fib, struct address *local)
{
	if (!p || !fib || !local)
		return INTERNAL;
	fib->ifindex = set()->route_ifindex;
	fib->l4_protocol = p->protocol;
	fib->family = p->family == 4 ? 2 : 10;
	if (p->family == 4)
		fib->ipv4_dst = p->destination.word[3];
	else
		__builtin_memcpy(fib->ipv6_dst, &p->destination, sizeof(fib->ipv6_dst));
	if (bpf_fib_lookup(skb, fib, sizeof(*fib), FIB_LOOKUP_SKIP_NEIGHBOUR))
		return NO_ROUTE;
	__u32 ifindex = fib->ifindex;
	struct uplink *uplink = bpf_map_lookup_elem(&uplinks, &ifindex);
	if (!uplink)
		return NO_ROUTE;
	*local = pick(p->family == 4, &uplink->local4, &uplink->local6);
	return absent(local) ? NO_ROUTE : PASS;
}

/* Clamps the maximum segment size of a SYN to the uplink's MTU. Returns 0, also for other packets, or -1 on failure. */
INLINE long fit_segments(struct __sk_buff *skb, struct packet *p, __u32 ifindex)
{
	__u32 headers = p->family == 4 ? 40 : 60;
	if (p->protocol != IPPROTO_TCP || !(p->tcp_flags & SYN))
		return 0;
	struct uplink *uplink = bpf_map_lookup_elem(&uplinks, &ifindex);
	return uplink && uplink->mtu > headers ? clamp_mss(skb, p, uplink->mtu - headers) : -1;
}

/* Sends the packet out of the uplink that the route lookup found. */
INLINE long leave(struct bpf_fib_lookup *fib)
{
	struct bpf_redir_neigh next = {.nh_family = fib->family};
	if (fib->family == 2)
		next.ipv4_nh = fib->ipv4_dst;
	else
		__builtin_memcpy(next.ipv6_nh, fib->ipv6_dst, sizeof(next.ipv6_nh));
	return bpf_redirect_neigh(fib->ifindex, &next, sizeof(next), 0);
}

INLINE void mark(struct flow *flow, __u16 marks)
{
	if ((flow->marks | marks) != flow->marks)
		flow->marks |= marks;
}

/* Redirects a packet of TAP `index` to a socket on the resolver's device: from the address that identifies the TAP and
 * `port`, to `to_port`. Returns the action, or -1 on failure. */
FUNCTION int enter(struct __sk_buff *skb, const struct packet *p, __u32 index, __u16 port, __u16 to_port)
{
	if (!p)
		return -1;
	struct address resolver = socket_address(p), peer = resolver;
	struct mac mac = set()->resolver_mac;
	peer.word[3] = plus(peer.word[3], index);
	if (translate(skb, p, SOURCE, &peer, port) || translate(skb, p, DESTINATION, &resolver, to_port) ||
	    bpf_skb_store_bytes(skb, 0, &mac, sizeof(mac), 0))
		return -1;
	return bpf_redirect(set()->resolver_ifindex, BPF_F_INGRESS);
}

/* Looks up the way of a packet of a flow that goes to an uplink. Returns PASS, or the reason to refuse the packet. */
INLINE long find_way(struct __sk_buff *skb, struct packet *p, struct bpf_fib_lookup *fib, struct address *local)
{
	long reason = route(skb, p, fib, local);
	/* Size of the packet, or of each segment if the host will segment it. */
	__u32 size = skb->gso_size ? p->l4 - ETH_HLEN + p->tcp_len + skb->gso_size : skb->len - ETH_HLEN;
	return !reason && size > fib->mtu_result ? NO_ROUTE : reason;
}

/* Sends a packet to an uplink, or to the proxy. Returns PASS and sets `action`, or returns the reason to refuse the
 * packet. */
INLINE long to_world(struct __sk_buff *skb, struct packet *p, struct tap *tap, struct state *state, __u32 index, long *action)
{
	struct flow_key key = {
		.tap = index, .port = p->source_port, .remote_port = p->destination_port,
		.remote = p->destination, .protocol = p->protocol};
	struct bpf_fib_lookup fib = {};
	struct address local = {};
	__u64 policy = *(volatile __u64 *)&tap->policy; /* read before the policy is evaluated */
	long begins = p->protocol != IPPROTO_TCP || (p->tcp_flags & (SYN | ACK)) == SYN;
	struct flow *flow = bpf_map_lookup_elem(&flows, &key);
	if (flow && (flow->tap != index || flow->tenure != tap->tenure))
		return INTERNAL;
	long reason = flow ? still_allowed(flow, tap, p, index, 1) : evaluate(p, index, 1, 0);
	if (reason && reason != HANDED)
		return reason;
	__u16 handed = flow ? flow->handed : reason == HANDED ? set()->proxy_port : 0;
	if (!flow && !begins)
		return UNSOLICITED;
	if (p->ttl <= 1)
		return NO_ROUTE;
	if (handed) {
		local = socket_address(p);
		local.word[3] = plus(local.word[3], index);
		/* A server without a proxy, or with another address or port, took the flow over. */
		if (handed != set()->proxy_port || (flow && !same(&flow->local, &local)))
			return POLICY;
		if (flow && !begins && !(flow->marks & REPLIED))
			return UNSOLICITED;
	}
	reason = handed ? PASS : find_way(skb, p, &fib, &local);
	if (reason)
		return reason;
	if (!within_rate(&state->out_due, tap->bytes_per_s, skb->len))
		return BANDWIDTH;
	if (!flow) {
		reason = open_flow(p, &key, &local, policy, handed);
		if (reason)
			return reason;
		flow = bpf_map_lookup_elem(&flows, &key);
		if (!flow)
			return INTERNAL;
	}
	flow->seen = bpf_ktime_get_ns();
	if ((p->tcp_flags & (SYN | ACK)) == SYN && flow->marks)
		flow->marks = 0;
	mark(flow, (p->tcp_flags & RST ? RESET : 0) | (p->tcp_flags & FIN ? FIN_OUT : 0));
	local = flow->local;
	__u16 port = flow->port;
	/* The entry may have been removed, and its memory reused, while it was read. */
	if (flow->tap != index || flow->handed != handed)
		return INTERNAL;
	COUNT(state->packets_out, 1);
	COUNT(state->bytes_out, skb->len);
	if (handed) {
		*action = enter(skb, p, index, port, handed);
		return *action < 0 ? INTERNAL : PASS;
	}
	if (fit_segments(skb, p, fib.ifindex) || decrement_ttl(skb, p) || translate(skb, p, SOURCE, &local, port))
		return INTERNAL;
	*action = leave(&fib);
	return PASS;
}

/* Redirects a query to the resolver's socket. Returns PASS and sets `action`, or returns the reason to refuse the
 * packet. */
INLINE long to_resolver(struct __sk_buff *skb, struct packet *p, struct tap *tap, struct state *state, __u32 index, long *action)
{
	struct address resolver = socket_address(p);
	if (!tap->tenure || !tap->policy || !set()->resolver_port || absent(&resolver))
		return POLICY;
	if (!within_rate(&state->out_due, tap->bytes_per_s, skb->len))
		return BANDWIDTH;
	COUNT(state->packets_out, 1);
	COUNT(state->bytes_out, skb->len);
	*action = enter(skb, p, index, p->source_port, set()->resolver_port);
	return *action < 0 ? INTERNAL : PASS;
}

/* Sends an IP packet with the guest's source address to the resolver or to an uplink. Returns PASS and sets `action`,
 * or returns the reason to refuse the packet. */
INLINE long outward(struct __sk_buff *skb, struct packet *p, struct tap *tap, struct state *state, __u32 index, long *action)
{
	long reason = parse(skb, p);
	struct address gateway = pick(p->family == 4, &set()->gateway4, &set()->gateway6), guest = pick(p->family == 4, &set()->guest4, &set()->guest6);
	if (p->family && !same(&p->source, &guest))
		return SPOOFED;
	if (reason)
		return reason;
	reason = check_offload(skb, p);
	if (reason)
		return reason;
	if (ICMP_ANY(p) && p->icmp_type != (p->family == 4 ? ECHO : ECHO6))
		return PROTOCOL;
	if (ICMP_ANY(p) || p->destination_port != htons(53))
		return to_world(skb, p, tap, state, index, action);
	return same(&p->destination, &gateway) ? to_resolver(skb, p, tap, state, index, action) : DNS;
}

SEC("classifier") int from_guest(struct __sk_buff *skb)
{
	__u32 ifindex = skb->ifindex;
	__u32 *known = bpf_map_lookup_elem(&indices, &ifindex);
	if (!known)
		return TCX_DROP;
	__u32 index = *known;
	struct tap *tap = bpf_map_lookup_elem(&taps, &index);
	struct state *state = bpf_map_lookup_elem(&states, &index);
	if (!tap || !state)
		return TCX_DROP;
	struct packet p = {};
	struct ethhdr ethernet;
	struct mac mac = set()->guest_mac;
	long action = TCX_DROP;
	if (bpf_skb_load_bytes(skb, 0, &ethernet, sizeof(ethernet)))
		return refuse(&p, index, MALFORMED, OUT);
	if (!same_mac(ethernet.h_source, mac.byte))
		return refuse(&p, index, SPOOFED, OUT);
	if (!skb->vlan_present && is_finished(skb, bpf_cast_to_kern_ctx(skb)))
		action = skb->protocol == htons(ETH_P_ARP) ? arp(skb) : neighbour(skb) ?: TCX_DROP;
	if (action != TCX_DROP)
		return action;
	long reason = outward(skb, &p, tap, state, index, &action);
	return reason ? refuse(&p, index, reason, OUT) : action;
}

/* Delivers a packet of a known flow to the guest. */
INLINE long deliver(struct __sk_buff *skb, struct tap *tap, struct state *state)
{
	struct ethhdr ethernet = {.h_proto = skb->protocol};
	struct mac guest = set()->guest_mac, gateway = set()->gateway_mac;
	__builtin_memcpy(ethernet.h_dest, &guest, sizeof(guest));
	__builtin_memcpy(ethernet.h_source, &gateway, sizeof(gateway));
	if (bpf_skb_store_bytes(skb, 0, &ethernet, sizeof(ethernet), 0))
		return TCX_DROP;
	COUNT(state->packets_in, 1);
	COUNT(state->bytes_in, skb->len);
	return bpf_redirect(tap->ifindex, 0);
}

/* Removes a flow that carried nothing. */
INLINE void forget(struct state *state, struct flow_key *key, struct wire_key *wire)
{
	if (bpf_map_delete_elem(&flows, key))
		return;
	bpf_map_delete_elem(&wires, wire);
	COUNT(state->opened, -1);
}

/* Handles a packet of the flow `key`, or with `error`, an ICMP error about that flow. `handed`: the proxy's port if the
 * packet comes from the proxy, or 0. `reason` is the result of parsing. Returns PASS and sets `action`, or returns the
 * reason to refuse the packet. */
INLINE long inward(struct __sk_buff *skb, struct packet *p, struct wire_key *wire, struct flow_key *key, __u16 handed,
		  long error, long reason, long *action)
{
	__u32 index = key->tap;
	struct tap *tap = bpf_map_lookup_elem(&taps, &index);
	struct state *state = bpf_map_lookup_elem(&states, &index);
	struct flow *flow = bpf_map_lookup_elem(&flows, key);
	if (!tap || !state)
		return INTERNAL;
	if (!flow || flow->tap != index || flow->tenure != tap->tenure || flow->port != wire->port)
		return UNSOLICITED;
	/* Only the proxy answers a handed flow, and it answers no other. */
	if (flow->handed != handed)
		return UNSOLICITED;
	/* A segment before the listener's answer is of an older connection with this port, which has just ended, or of which
	 * the TAP's former sandbox was the other end. Nothing passes between it and this guest, whose next SYN gets another
	 * port. */
	if (handed && !(flow->marks & REPLIED) && !(p->tcp_flags & (SYN | RST))) {
		forget(state, key, wire);
		return UNSOLICITED;
	}
	/* The policy is evaluated for the flow's remote end, not for the sender, which may be the proxy, or any router. */
	struct packet about = {.source = key->remote, .source_port = key->remote_port, .protocol = key->protocol, .family = p->family};
	reason = error ? PASS : reason;
	reason = reason ?: still_allowed(flow, tap, &about, index, 0);
	if (reason)
		return reason;
	if (p->ttl <= 1)
		return NO_ROUTE;
	if (!within_rate(&state->in_due, tap->bytes_per_s, skb->len))
		return BANDWIDTH;
	if (!error) {
		struct address guest = pick(p->family == 4, &set()->guest4, &set()->guest6);
		flow->seen = bpf_ktime_get_ns();
		mark(flow, REPLIED | (p->tcp_flags & RST ? RESET : 0) | (p->tcp_flags & FIN ? FIN_IN : 0));
		if (handed ? translate(skb, p, SOURCE, &key->remote, key->remote_port) : fit_segments(skb, p, skb->ifindex))
			return INTERNAL;
		if (translate(skb, p, DESTINATION, &guest, key->port))
			return INTERNAL;
	} else if (translate_error(skb, p, wire, key->port)) {
		return INTERNAL;
	}
	if (decrement_ttl(skb, p))
		return INTERNAL;
	*action = deliver(skb, tap, state);
	return PASS;
}

/* The key of a packet that arrived, in `wires`. */
INLINE struct wire_key wire_of(const struct packet *p)
{
	return (struct wire_key){
		.local = p->destination, .remote = p->source, .port = p->destination_port, .remote_port = p->source_port,
		.protocol = p->protocol};
}

SEC("classifier") int from_wire(struct __sk_buff *skb)
{
	struct packet p = {};
	struct wire_key wire = {};
	if (skb->vlan_present || skb->pkt_type != 0)
		return TCX_NEXT;
	long reason = parse(skb, &p), error = !p.ports && ICMP_ANY(&p) && reason == PROTOCOL;
	if (error && !quoted(skb, &p, &wire))
		return TCX_NEXT;
	if (!error) {
		if (!p.ports)
			return TCX_NEXT;
		wire = wire_of(&p);
	}
	__u16 port = ntohs(wire.port);
	if (port < FIRST_PORT)
		return TCX_NEXT;
	struct flow_key *known = bpf_map_lookup_elem(&wires, &wire);
	if (!known)
		return TCX_NEXT;
	struct flow_key key = *known;
	long action = TCX_DROP;
	reason = inward(skb, &p, &wire, &key, 0, error, reason, &action);
	return reason ? refuse(&p, key.tap, reason, IN) : action;
}

/* Handles a segment of the proxy. */
INLINE int from_proxy(struct __sk_buff *skb, struct packet *p)
{
	struct wire_key wire = wire_of(p);
	struct flow_key *known = bpf_map_lookup_elem(&wires, &wire);
	if (!known)
		return TCX_DROP;
	struct flow_key key = *known;
	long action = TCX_DROP, reason = inward(skb, p, &wire, &key, set()->proxy_port, 0, PASS, &action);
	if (!reason)
		return action;
	p->source = key.remote;
	p->source_port = key.remote_port;
	return refuse(p, key.tap, reason, IN);
}

SEC("classifier") int from_resolver(struct __sk_buff *skb)
{
	struct packet p = {};
	if (parse(skb, &p) || ICMP_ANY(&p))
		return TCX_DROP;
	if (p.source_port == set()->proxy_port)
		return from_proxy(skb, &p);
	if (p.source_port != set()->resolver_port)
		return TCX_DROP;
	struct address resolver = pick(p.family == 4, &set()->resolver4, &set()->resolver6), guest = pick(p.family == 4, &set()->guest4, &set()->guest6);
	struct address gateway = pick(p.family == 4, &set()->gateway4, &set()->gateway6);
	__u32 index = htonl(p.destination.word[3]) - htonl(resolver.word[3]);
	struct tap *tap = bpf_map_lookup_elem(&taps, &index);
	struct state *state = bpf_map_lookup_elem(&states, &index);
	if (!same(&p.source, &resolver) || !index || !tap || !state || !tap->tenure || !tap->ifindex)
		return TCX_DROP;
	if (!within_rate(&state->in_due, tap->bytes_per_s, skb->len))
		return refuse(&p, index, BANDWIDTH, IN);
	if (translate(skb, &p, SOURCE, &gateway, htons(53)) || translate(skb, &p, DESTINATION, &guest, p.destination_port))
		return TCX_DROP;
	return deliver(skb, tap, state);
}
