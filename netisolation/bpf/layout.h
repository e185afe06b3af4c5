/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only */
/* Keys and values of the maps, shared by the programs and the server. `src/datapath/layout.rs` declares the same
 * structures, and a test compares sizes and offsets with the type information that clang writes. Addresses and ports
 * are in network byte order unless a comment says otherwise. */
#pragma once

#include <linux/types.h>

#define ACCESSES 8
#define REASONS 19
#define NAME_MAX_BYTES 256
#define FIRST_PORT 61000

/* An IPv6 address, or an IPv4 address as ::ffff:a.b.c.d. */
struct address {
	__u32 word[4];
};

struct mac {
	__u8 byte[6];
};

/* Constants that the loader sets before it loads the programs. */
struct settings {
	struct address guest4, guest6, gateway4, gateway6;
	struct address resolver4, resolver6; /* queries and handed flows of TAP i come from resolver + i; zero: none */
	__u32 resolver_ifindex;
	__u32 route_ifindex; /* the device from which routes are looked up */
	__u16 resolver_port;
	__u16 proxy_port; /* of the proxy's listener at the resolver's address; 0: no flow is handed to it */
	__u16 first_port, ports; /* this server's range of ports on the wire, host byte order */
	__u16 zero;
	struct mac guest_mac, gateway_mac, resolver_mac;
};

/* A TAP, by its number. Only the server writes it. */
struct tap {
	__u64 bytes_per_s; /* for each direction; 0: no limit */
	__u64 flows_per_s; /* 0: no limit */
	__u64 closed;      /* flows removed; `state.opened` minus this is the number of open flows */
	__u64 policy;      /* changes with every policy; the lower half is `rule_key.number`; 0: nothing passes */
	__u32 ifindex;     /* 0: the TAP does not exist */
	__u32 tenure;      /* number of the sandbox's stay on the TAP; 0: no sandbox, nothing passes */
	__u32 max_flows;
	__u32 hands_all;   /* every TCP flow is handed to the proxy, and nothing else but DNS passes */
};

/* Counters and rate limits of a TAP. Only the programs write it. Times are CLOCK_MONOTONIC in nanoseconds. */
struct state {
	__u64 packets_out, bytes_out, packets_in, bytes_in;
	__u64 opened;            /* flows */
	__u64 refused[REASONS];  /* packets, by reason */
	__u64 out_due, in_due;   /* token buckets: the time up to which the refill is spent */
	__u64 flows_due, records_due;
};

/* The longest matching prefix of number and address decides. Rule set 0 applies to all sandboxes; each policy has one
 * other set, which policies with the same rules may share. */
struct rule_key {
	__u32 prefix; /* in bits: 32 for the number, plus the prefix of the address */
	__u32 number;
	struct address address;
};

struct access {
	__u8 protocol; /* IANA number; ICMP stands for ICMPv6 too */
	__u8 zero;
	__u16 first, last; /* host byte order */
};

struct rule {
	__u8 verdict;
	__u8 prefix;   /* length in bits; 96 and more for IPv4 */
	__u8 accesses; /* length of `access`; 0: all services, and with HOST none */
	__u8 zero;
	struct access access[ACCESSES];
};

/* HOST: the services are those that the operator opened to the proxy. */
enum verdict { DENY = 1, ALLOW = 2, FORBIDDEN = 3, HOST = 4 };

/* A name pin: an address that the resolver answered to a TAP's sandbox for a name in the policy. */
struct pin_key {
	__u32 tap;
	struct address address;
};

struct pin {
	__u64 expires; /* CLOCK_MONOTONIC, nanoseconds */
	__u32 tenure;
	__u32 marks; /* of `enum pin_mark` */
	char name[NAME_MAX_BYTES]; /* the last one, if several names have this address */
};

/* ADMITS: the policy allows the name, so the address may be reached without a rule.
 * RULED: the name has header rules, so flows to the address are handed to the proxy even if a rule allows it. */
enum pin_mark { ADMITS = 1, RULED = 2 };

/* A flow as the guest sees it. For ICMP echo, `port` is the identifier. */
struct flow_key {
	__u32 tap;
	__u16 port;
	__u16 remote_port;
	struct address remote;
	__u8 protocol;
	__u8 zero[3];
};

/* A flow as it is on the wire: with the uplink's address and port. A handed flow is between the resolver's address plus
 * the TAP's number, and the proxy's listener. */
struct wire_key {
	struct address local;
	struct address remote;
	__u16 port;
	__u16 remote_port;
	__u8 protocol;
	__u8 zero[3];
};

struct flow {
	__u64 seen; /* time of the last packet; CLOCK_MONOTONIC, nanoseconds */
	__u64 policy; /* `tap.policy` under which the flow was last allowed */
	__u32 tap;
	__u32 tenure;
	__u16 port; /* on the wire */
	__u16 marks; /* of `enum mark` */
	__u16 handed; /* port of the proxy to which the flow is handed; 0: it leaves by an uplink */
	__u16 zero;
	struct address local;
};

enum mark { REPLIED = 1, FIN_OUT = 2, FIN_IN = 4, RESET = 8 };

/* Addresses of an uplink (zero: none) and its MTU in bytes. */
struct uplink {
	struct address local4;
	struct address local6;
	__u32 mtu;
};

/* A refused flow: the key under which the programs count its packets. */
struct refusal {
	__u32 tap;
	__u32 tenure;
	__u8 reason;
	__u8 direction;
	__u8 protocol; /* as in the packet */
	__u8 family;   /* 4, 6, or 0: no addresses */
	__u16 source_port;
	__u16 destination_port;
	struct address source;
	struct address destination;
};

/* The record of a refused flow's first packet. */
struct record {
	__u64 time; /* CLOCK_MONOTONIC, nanoseconds */
	struct refusal refusal;
};

_Static_assert(__builtin_offsetof(struct record, refusal) == 8, "no padding");

enum direction { OUT, IN };

/* The numbers of `Reason` in `src/events/event.rs`, which documents them. */
enum reason {
	PASS = 0,
	POLICY = 1,
	FORBIDDEN_RANGE = 2,
	OF_HOST = 3,
	SPOOFED = 4,
	NOT_IP = 5,
	FRAGMENT = 6,
	OPTIONS = 7,
	MALFORMED = 8,
	PROTOCOL = 9,
	DNS = 10,
	UNSOLICITED = 13,
	BANDWIDTH = 14,
	FLOWS = 15,
	NO_ROUTE = 16,
	INTERNAL = 17,
	OFFLOAD = 18,
};
