/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only */
/* What the programs and the server share: keys and values of the maps. `src/layout.rs` has the same structures in
 * the same order, and a test compares sizes and offsets with the type information that clang wrote.
 * Addresses and ports are in network order unless a comment says otherwise. */
#pragma once

#include <linux/types.h>

#define ACCESSES 8
#define REASONS 19
#define NAME_MAX_BYTES 256
#define FIRST_PORT 61000

/* IPv6; IPv4 as ::ffff:a.b.c.d. */
struct address {
	__u32 word[4];
};

/* Of an Ethernet device. */
struct mac {
	__u8 byte[6];
};

/* What the programs are told when they are loaded. */
struct settings {
	struct address guest4, guest6, gateway4, gateway6;
	struct address resolver4, resolver6; /* TAP i is resolver + i; zero: none */
	__u32 resolver_ifindex;
	__u32 route_ifindex; /* as if from there, routes are looked up */
	__u16 resolver_port;
	__u16 first_port, ports; /* of flows on the wire, host order: this server's part of those from FIRST_PORT on */
	struct mac guest_mac, gateway_mac, resolver_mac;
};

/* A TAP, by its index. Written by the server only. */
struct tap {
	__u64 bytes_per_s; /* each way; 0: no limit */
	__u64 flows_per_s; /* 0: no limit */
	__u64 closed;      /* flows that were removed; `state.opened` less this is how many there are */
	__u64 policy;      /* changes with every policy; the lower half is the number in `rule_key`; 0: nothing passes */
	__u32 ifindex;     /* 0: no such TAP */
	__u32 tenure;      /* changes with the sandbox; 0: no sandbox, nothing passes */
	__u32 max_flows;
	__u32 zero;
};

/* Written by the programs only. Times are CLOCK_MONOTONIC, nanoseconds. */
struct state {
	__u64 packets_out, bytes_out, packets_in, bytes_in;
	__u64 opened;            /* flows */
	__u64 refused[REASONS];  /* packets, by reason */
	__u64 out_due, in_due;   /* when the bandwidth used so far will have been earned */
	__u64 flows_due, records_due;
};

/* Longest prefix over number and address. Number 0 is what holds for all sandboxes; others may be shared by sandboxes
 * with the same rules. */
struct rule_key {
	__u32 prefix; /* bits: 32 of the number and those of the address */
	__u32 number;
	struct address address;
};

struct access {
	__u8 protocol; /* of IPv4's registry; ICMP stands for ICMPv6 too */
	__u8 zero;
	__u16 first, last; /* host order */
};

struct rule {
	__u8 verdict;
	__u8 prefix;   /* of the address: 96 and more for IPv4 */
	__u8 accesses; /* 0: all services */
	__u8 zero;
	struct access access[ACCESSES];
};

enum verdict { DENY = 1, ALLOW = 2, FORBIDDEN = 3, HOST = 4 };

/* An address that the resolver answered. */
struct pin_key {
	__u32 tap;
	struct address address;
};

struct pin {
	__u64 expires; /* CLOCK_MONOTONIC, nanoseconds */
	__u32 tenure;
	__u32 zero;
	char name[NAME_MAX_BYTES];
};

/* A flow as the guest has it; the port of ICMP is the identifier. */
struct flow_key {
	__u32 tap;
	__u16 port;
	__u16 remote_port;
	struct address remote;
	__u8 protocol;
	__u8 zero[3];
};

/* The same as it is on the wire. */
struct wire_key {
	struct address local;
	struct address remote;
	__u16 port;
	__u16 remote_port;
	__u8 protocol;
	__u8 zero[3];
};

struct flow {
	__u64 seen; /* last packet; CLOCK_MONOTONIC, nanoseconds */
	__u64 policy; /* that allowed it, as in `tap` */
	__u32 tap;
	__u32 tenure;
	__u16 port; /* on the wire */
	__u16 marks;
	__u32 zero;
	struct address local;
};

enum mark { REPLIED = 1, FIN_OUT = 2, FIN_IN = 4, RESET = 8 };

/* Addresses of an uplink; zero: none. */
struct uplink {
	struct address local4;
	struct address local6;
	__u32 mtu;
};

/* A refused flow: the key under which its packets are counted. */
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

/* Its first packet. */
struct record {
	__u64 time; /* CLOCK_MONOTONIC, nanoseconds */
	struct refusal refusal;
};

_Static_assert(__builtin_offsetof(struct record, refusal) == 8, "no padding");

enum direction { OUT, IN };

/* As `Reason` in `src/event.rs`. */
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
