//! Compares the Rust structures with the C structures, whose members, sizes and offsets come from the type information
//! in the object file.

use std::mem::{offset_of, size_of};

use super::*;

/// Size of a Rust structure, and names and offsets of its members.
macro_rules! members {
    ($structure:ty { $($member:ident),* }) => {
        (size_of::<$structure>(), vec![$((stringify!($member), offset_of!($structure, $member))),*])
    };
}

/// Names and offsets of members.
type Members = Vec<(String, usize)>;

/// Size and members of a structure in the object file, by its C name.
fn of_object(name: &str) -> (usize, Members) {
    types()
        .into_iter()
        .find(|(n, ..)| n == name)
        .map(|(_, size, members)| (size, members))
        .unwrap_or_else(|| panic!("struct {name}"))
}

/// The C name of a structure, its size in Rust and its members.
type Structure = (&'static str, (usize, Vec<(&'static str, usize)>));

#[test]
fn structures_have_the_same_members_as_in_c() {
    let all = policy_structures().into_iter().chain(flow_structures());
    for (name, (size, members)) in all {
        let members: Members = members
            .into_iter()
            .map(|(n, o)| (n.to_owned(), o))
            .collect();
        assert_eq!(of_object(name), (size, members), "struct {name}");
    }
    let (size, members) = of_object("rule_key");
    assert_eq!(size, 4 + size_of::<RuleKey>());
    assert_eq!(members[1].1, 4 + offset_of!(RuleKey, number));
    assert_eq!(members[2].1, 4 + offset_of!(RuleKey, address));
    assert_eq!(of_object("address").0, size_of::<Address>());
}

fn policy_structures() -> Vec<Structure> {
    vec![
        (
            "tap",
            members!(Tap {
                bytes_per_s,
                flows_per_s,
                closed,
                policy,
                ifindex,
                tenure,
                max_flows,
                hands_all
            }),
        ),
        (
            "state",
            members!(State {
                packets_out,
                bytes_out,
                packets_in,
                bytes_in,
                opened,
                refused,
                out_due,
                in_due,
                flows_due,
                records_due
            }),
        ),
        (
            "access",
            members!(PortRange {
                protocol,
                zero,
                first,
                last
            }),
        ),
        (
            "rule",
            members!(Rule {
                verdict,
                prefix,
                accesses,
                zero,
                access
            }),
        ),
        ("pin_key", members!(PinKey { tap, address })),
        (
            "pin",
            members!(Pin {
                expires,
                tenure,
                marks,
                name
            }),
        ),
    ]
}

fn flow_structures() -> Vec<Structure> {
    vec![
        (
            "flow_key",
            members!(FlowKey {
                tap,
                port,
                remote_port,
                remote,
                protocol,
                zero
            }),
        ),
        (
            "wire_key",
            members!(WireKey {
                local,
                remote,
                port,
                remote_port,
                protocol,
                zero
            }),
        ),
        (
            "flow",
            members!(Flow {
                seen,
                policy,
                tap,
                tenure,
                port,
                marks,
                handed,
                zero,
                local
            }),
        ),
        (
            "uplink",
            members!(Uplink {
                local4,
                local6,
                mtu
            }),
        ),
        (
            "refusal",
            members!(Refusal {
                tap,
                tenure,
                reason,
                direction,
                protocol,
                family,
                source_port,
                destination_port,
                source,
                destination
            }),
        ),
        (
            "settings",
            members!(Settings {
                guest4,
                guest6,
                gateway4,
                gateway6,
                resolver4,
                resolver6,
                resolver_ifindex,
                route_ifindex,
                resolver_port,
                proxy_port,
                first_port,
                ports,
                zero,
                guest_mac,
                gateway_mac,
                resolver_mac
            }),
        ),
    ]
}

#[test]
fn structures_have_no_padding() {
    let sizes = |name: &str| -> usize { of_object(name).0 };
    assert_eq!(sizes("tap"), 4 * 8 + 4 * 4);
    assert_eq!(sizes("state"), (5 + REASONS + 4) * 8);
    assert_eq!(sizes("rule"), 4 + ACCESSES * 6);
    assert_eq!(sizes("rule_key"), 8 + 16);
    assert_eq!(sizes("pin_key"), 4 + 16);
    assert_eq!(sizes("pin"), 16 + NAME);
    assert_eq!(sizes("flow_key"), 4 + 4 + 16 + 4);
    assert_eq!(sizes("wire_key"), 16 + 16 + 4 + 4);
    assert_eq!(sizes("flow"), 2 * 8 + 16 + 16);
    assert_eq!(sizes("uplink"), 2 * 16 + 4);
    assert_eq!(sizes("refusal"), 2 * 4 + 4 + 2 * 2 + 2 * 16);
    assert_eq!(sizes("settings"), 6 * 16 + 2 * 4 + 5 * 2 + 3 * 6);
}

/// `struct record` is in no map, so the object file does not describe it. A static assertion in `bpf/layout.h` checks
/// that `refusal` is at offset 8.
#[test]
fn a_record_is_read_from_the_offsets_of_its_members() {
    let bytes: Vec<u8> = (0..u8::try_from(size_of::<Record>()).unwrap()).collect();
    let record = Record::read(&bytes).unwrap();
    assert_eq!(record.time.to_ne_bytes(), bytes[..8]);
    let at = offset_of!(Record, refusal);
    assert_eq!(at, 8);
    let refusal = record.refusal;
    assert_eq!(
        refusal.tenure.to_ne_bytes(),
        bytes[at + offset_of!(Refusal, tenure)..][..4]
    );
    assert_eq!(refusal.reason, bytes[at + offset_of!(Refusal, reason)]);
    assert_eq!(refusal.family, bytes[at + offset_of!(Refusal, family)]);
    let port = offset_of!(Refusal, destination_port);
    assert_eq!(
        refusal.destination_port.to_ne_bytes(),
        bytes[at + port..][..2]
    );
    assert_eq!(
        refusal.destination.0,
        bytes[at + offset_of!(Refusal, destination)..][..16]
    );
    assert!(Record::read(&bytes[1..]).is_none());
}

#[test]
fn the_layout_hash_ignores_comments_and_whitespace() {
    let hash = |source: &str| layout_hash::layout_hash([source]);
    let plain = "struct tap { __u32 ifindex; }; MAP(taps, struct tap, 1 << 20);";
    for same in [
        "/* A TAP. */ struct tap { __u32 ifindex; /* 0: none */ }; MAP(taps, struct tap, 1 << 20);",
        "struct tap\n{\n\t__u32 ifindex; // the device\n};\nMAP(taps,struct tap,1<<20);",
        "struct tap { __u32 ifindex; }; \\\n MAP(taps, struct tap, 1 << 20); /* unterminated",
    ] {
        assert_eq!(hash(same), hash(plain), "{same}");
    }
    for other in [
        "struct tap { __u64 ifindex; }; MAP(taps, struct tap, 1 << 20);",
        "struct tap { __u32 tenure; }; MAP(taps, struct tap, 1 << 20);",
        "struct tap { __u32 ifindex; }; MAP(taps, struct tap, 1 << 21);",
        "struct tap { __u32 if index; }; MAP(taps, struct tap, 1 << 20);",
    ] {
        assert_ne!(hash(other), hash(plain), "{other}");
    }
    assert_ne!(hash("\"/* a */ \\\" b\""), hash("\"\\\" b\""));
    assert_ne!(hash("\"a b\""), hash("\"ab\""));
}

/// The hash of the files, without their comments. If this test fails, an upgrade does not take over the open flows of
/// the previous version: change the expected value only together with a change of the layout.
#[test]
fn the_layout_is_unchanged() {
    assert_eq!(env!("MAP_LAYOUT"), "03a314fad9e5e0ec");
}

/// All named structures in the section `.BTF` (kernel documentation, `bpf/btf.rst`; little-endian).
fn types() -> Vec<(String, usize, Members)> {
    let object: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/net.bpf.o"));
    // Magic number, version, flags, header length. The header of `.BTF.ext` has another length.
    let magic = [0x9f, 0xeb, 1, 0, 24, 0, 0, 0];
    let at = object.windows(8).position(|w| w == magic).unwrap();
    let btf = &object[at..];
    let word = |at: usize| -> usize {
        let bytes: [u8; 4] = btf[at..at + 4].try_into().unwrap();
        usize::try_from(u32::from_le_bytes(bytes)).unwrap()
    };
    let (header, type_at, type_len, string_at) = (word(4), word(8), word(12), word(16));
    let text = |offset: usize| -> String {
        let bytes = &btf[header + string_at + offset..];
        let end = bytes.iter().position(|b| *b == 0).unwrap();
        String::from_utf8(bytes[..end].to_vec()).unwrap()
    };
    let mut found = Vec::new();
    let mut next = header + type_at;
    while next < header + type_at + type_len {
        let (name, info, size) = (word(next), word(next + 4), word(next + 8));
        let (kind, count) = (info >> 24 & 0x1f, info & 0xffff);
        next += 12;
        let rest = match kind {
            // Members of a structure or union: name, type, offset in bits.
            4 | 5 => {
                let member = |n: usize| (text(word(next + 12 * n)), word(next + 12 * n + 8) / 8);
                found.push((text(name), size, (0..count).map(member).collect()));
                12 * count
            }
            1 | 14 | 17 => 4,
            3 => 12,
            6 | 13 => 8 * count,
            15 | 19 => 12 * count,
            _ => 0,
        };
        next += rest;
    }
    found
}
