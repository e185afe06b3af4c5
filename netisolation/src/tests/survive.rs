//! Changes by other programs, reuse of TAPs, and servers that are killed.

use std::{fs, os::fd::AsFd, thread, time::Duration};

use aya::programs::links::PinnedLink;

use super::{
    frame::{ACK, Packet, SYN, TCP, UDP, tcp, udp},
    server::start_server,
    sys,
    world::{Guest, PEER4, World, command, config, eventually, in_namespace, ip, write},
};
use crate::{
    Counters, DefaultEgress, Isolation, IsolationConfig, IsolationError, Policy, Reason, Rule,
    RuleAction, Tap, TapIndex,
    datapath::{
        layout::{PinKey, pin_mark},
        programs_on,
        rule_sets::{self, FOR_ALL},
    },
    enforcement::{Enforcement, compile, tap_table::Usage},
    taps::device,
};

/// Start of the device name in the error about a removed TAP.
const GONE: &str = "cube";

/// Changes the state of a guest's TAP. The last argument is the name of its device.
type Tamper = fn(&World, &Guest, &str);

fn datagram(port: u16) -> Packet {
    Packet::from_guest(ip(PEER4), UDP, udp(4000, port, b"x"))
}

#[test]
fn net_verify_detects_changes_by_other_programs() {
    in_namespace(|| {
        let world = World::new();
        for (what, tamper) in tampering() {
            let policy = Policy {
                names: vec!["example.com".parse().unwrap()],
                ..Policy::internet()
            };
            let guest = world.guest(&policy);
            world.isolation.verify(guest.index).unwrap();
            let name = world
                .isolation
                .inspect(|maps| maps.taps.get(guest.index.0).unwrap().name.clone());
            tamper(&world, &guest, &name);
            match world.isolation.verify(guest.index) {
                Err(IsolationError::Mismatch { index, what: found }) => {
                    assert_eq!(index, guest.index);
                    assert!(found.contains(what), "{what}: {found}");
                }
                // The maintenance thread may have cleared the TAP already.
                Err(IsolationError::Unknown(_)) if what == GONE => {}
                other => panic!("{what}: {other:?}"),
            }
            world.isolation.release(guest.index);
            // Restores the rules for all sandboxes for the next iteration.
            world.isolation.inspect(remove_added);
        }
    });
}

/// Changes by other programs, with a part of the error that verification must report.
fn tampering() -> [(&'static str, Tamper); 12] {
    [
        ("is down", |_, _, name| {
            command(&["link", "set", name, "down"])
        }),
        ("has the address 10.9.9.9", |_, _, name| {
            command(&["addr", "add", "10.9.9.9/32", "dev", name])
        }),
        ("has the address", |_, _, name| {
            device::configure("ipv6", name, "disable_ipv6", "0").unwrap();
            command(&["addr", "add", "fd99::1/64", "dev", name, "nodad"]);
        }),
        ("the first program of", |world, guest, _| {
            let links = world.config.pins.join(&world.config.instance).join("links");
            let named = format!("tap-{}-", guest.index.0);
            let pins = fs::read_dir(links).unwrap().flatten();
            let pin = pins
                .map(|e| e.path())
                .find(|p| p.to_string_lossy().contains(&named));
            PinnedLink::from_pin(pin.unwrap()).unwrap().unpin().unwrap();
        }),
        ("the name pin of 198.51.100.7", |world, guest, _| {
            let (index, sandbox) = (guest.index, &guest.sandbox);
            let day = Duration::from_secs(86400);
            let pinned = world
                .isolation
                .pin(index, sandbox, ip(PEER4), "example.com", day);
            pinned.unwrap();
            world.isolation.verify(index).unwrap();
            world.isolation.inspect(|maps| {
                let address = ip(PEER4).into();
                let key = PinKey {
                    tap: index.0,
                    address,
                };
                let mut pin = maps.pins.map.get(&key, 0).unwrap();
                pin.marks = pin_mark::RULED;
                maps.pins.map.insert(key, pin, 0).unwrap();
            });
        }),
        ("the rule for", |world, guest, _| {
            world.isolation.inspect(|maps| {
                let number = number(maps, guest);
                let sets = &mut maps.policies.rules;
                let first = *sets.expected(number).unwrap().keys().next().unwrap();
                sets.map.remove(number, [&first]).unwrap();
            });
        }),
        ("the rule for", |world, guest, _| {
            world.isolation.inspect(|maps| {
                let number = number(maps, guest);
                let sets = &mut maps.policies.rules;
                let mut rules = sets.expected(number).unwrap().clone();
                rules.values_mut().for_each(|rule| rule.verdict ^= 1);
                sets.map.write(number, &rules).unwrap();
            });
        }),
        ("added a rule for 10.0.0.0/9", |world, _, _| {
            add(world, FOR_ALL, "10.0.0.0/9");
        }),
        ("its entry is", |world, guest, _| {
            world.isolation.inspect(|maps| {
                let mut entry = maps.taps.get(guest.index.0).unwrap().entry;
                entry.policy += 1;
                maps.taps.write_entry(guest.index.0, &entry).unwrap();
            });
        }),
        ("its device is mapped to", |world, guest, _| {
            world.isolation.inspect(|maps| {
                let ifindex = maps.taps.get(guest.index.0).unwrap().entry.ifindex;
                maps.taps.write_index(ifindex, 16).unwrap();
            });
        }),
        (GONE, |_, _, name| command(&["link", "del", name])),
        // Nothing restores it, so this case comes last.
        ("the first program of cubedns", |world, _, _| {
            let links = world.config.pins.join(&world.config.instance).join("links");
            let pin = links.join(format!("resolver-{}", resolvers(&world.config)[0]));
            PinnedLink::from_pin(pin).unwrap().unpin().unwrap();
        }),
    ]
}

/// Adds a rule that allows a block to a rule set, as another program could.
fn add(world: &World, number: u32, block: &str) {
    let wider = Policy {
        rules: vec![Rule {
            block: block.parse().unwrap(),
            action: RuleAction::Allow(Vec::new()),
        }],
        ..Policy::default()
    };
    let mut rules = compile::rules_of(&wider).unwrap();
    rules.remove(&rule_sets::SENTINEL);
    let write = |maps: &mut Enforcement| maps.policies.rules.map.write(number, &rules).unwrap();
    world.isolation.inspect(write);
}

/// Removes rules that this server did not write.
fn remove_added(maps: &mut Enforcement) {
    let sets = &mut maps.policies.rules;
    for (number, mut found) in sets.map.all().unwrap() {
        found.retain(|prefix, _| {
            !sets
                .expected(number)
                .is_some_and(|rules| rules.contains_key(prefix))
        });
        sets.map.remove(number, found.keys()).unwrap();
    }
}

/// Number of a guest's rule set.
fn number(maps: &Enforcement, guest: &Guest) -> u32 {
    maps.taps.get(guest.index.0).unwrap().entry.rule_set()
}

#[test]
fn net_verify_detects_every_added_rule() {
    in_namespace(|| {
        let world = World::new();
        let some = Policy::of_lists(
            DefaultEgress::Deny,
            &[],
            &["8.8.0.0/16", "9.9.9.9/32", "2600::/16", "2600::1/128"].map(|b| b.parse().unwrap()),
        );
        // The two rule sets that are changed, one of them empty, lie between other sets.
        let policies = [
            Policy::internet(),
            some,
            Policy::default(),
            Policy::internet(),
        ];
        let guests = policies.each_ref().map(|policy| world.guest(policy));
        let blocks = [
            "0.0.0.0/0",
            "::/0",
            "::/127",
            "::1/128",
            "::/1",
            "8000::/1",
            "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff/128",
            "0.0.0.0/32",
            "255.255.255.255/32",
            "8.8.8.0/24",
            "8.0.0.0/8",
            "9.9.9.8/31",
            "2600::2/128",
            "2600::/17",
        ];
        for guest in &guests[1..3] {
            let number = world.isolation.inspect(|maps| number(maps, guest));
            for block in blocks {
                add(&world, number, block);
                let found = world.isolation.verify(guest.index).unwrap_err();
                let wanted = format!("added a rule for {block}");
                assert!(found.to_string().contains(&wanted), "{block}: {found}");
                world.isolation.inspect(remove_added);
                for guest in &guests {
                    world.isolation.verify(guest.index).unwrap();
                }
            }
        }
    });
}

#[test]
fn net_verify_detects_a_rule_set_without_its_sentinel() {
    in_namespace(|| {
        let world = World::new();
        let guest = world.guest(&Policy::default());
        let number = world.isolation.inspect(|maps| number(maps, &guest));
        add(&world, number, "8.8.8.8/32");
        world.isolation.inspect(|maps| {
            let map = &mut maps.policies.rules.map;
            map.remove(number, [&rule_sets::SENTINEL]).unwrap();
        });
        let found = world.isolation.verify(guest.index);
        assert!(matches!(found, Err(IsolationError::Mismatch { .. })));
    });
}

#[test]
fn net_removing_rules_skips_missing_ones() {
    in_namespace(|| {
        let world = World::new();
        let guest = world.guest(&Policy::internet());
        world.isolation.inspect(|maps| {
            let number = number(maps, &guest);
            let map = &mut maps.policies.rules.map;
            let mut prefixes: Vec<_> = map.read(number, 9).unwrap().into_keys().collect();
            assert_eq!(prefixes.len(), 3);
            let absent = |bits| (bits, rule_sets::SENTINEL.1);
            prefixes.insert(0, absent(40));
            prefixes.insert(2, absent(50));
            prefixes.push(absent(60));
            map.remove(number, &prefixes).unwrap();
            let left: Vec<u32> = map.all().unwrap().into_keys().collect();
            assert_eq!(left, [FOR_ALL]);
        });
    });
}

#[test]
fn net_sandboxes_with_the_same_rules_share_a_rule_set_until_the_last_release() {
    in_namespace(|| {
        let world = World::new();
        let guests = [(); 3].map(|()| world.guest(&Policy::internet()));
        let numbers = || {
            let all = world
                .isolation
                .inspect(|maps| maps.policies.rules.map.all());
            all.unwrap().into_keys().collect::<Vec<_>>()
        };
        let of = |guest| world.isolation.inspect(|maps| number(maps, guest));
        let [a, b, c] = &guests;
        assert_eq!((of(a), of(b)), (of(c), of(c)));
        assert_eq!(numbers(), [FOR_ALL, of(a)]);
        // A set is removed with its last user.
        world.isolation.update(a.index, &narrow()).unwrap();
        assert_ne!(of(a), of(b));
        world.refused(a, &datagram_to("198.51.100.8"), Reason::Policy);
        world.pass(b, &datagram(7));
        world.isolation.release(a.index);
        world.isolation.release(b.index);
        assert_eq!(numbers(), [FOR_ALL, of(c)]);
        world.isolation.verify(c.index).unwrap();
        world.pass(c, &datagram(7));
        world.isolation.release(c.index);
        assert_eq!(numbers(), [FOR_ALL]);
    });
}

#[test]
fn net_a_rule_set_that_was_changed_is_not_shared_with_further_sandboxes() {
    in_namespace(|| {
        let world = World::new();
        let guest = world.guest(&Policy::default());
        let number = |guest| world.isolation.inspect(|maps| number(maps, guest));
        add(&world, number(&guest), "8.8.8.8/32");
        world.isolation.verify(guest.index).unwrap_err();
        let next = world.guest(&Policy::default());
        assert_ne!(number(&guest), number(&next));
        world.isolation.verify(next.index).unwrap();
    });
}

fn datagram_to(peer: &str) -> Vec<u8> {
    Packet::from_guest(ip(peer), UDP, udp(4000, 7, b"x")).bytes()
}

#[test]
fn net_verify_detects_an_uplink_without_its_program() {
    in_namespace(|| {
        let world = World::new();
        let guest = world.guest(&Policy::internet());
        let pin = world
            .config
            .pins
            .join(&world.config.instance)
            .join(format!("links/uplink-{}", world.wan.index));
        PinnedLink::from_pin(pin).unwrap().unpin().unwrap();
        let found = world.isolation.verify(guest.index).unwrap_err().to_string();
        assert!(found.contains("the uplink wan"), "{found}");
    });
}

#[test]
fn net_the_state_of_a_removed_tap_is_cleared() {
    in_namespace(|| {
        let world = World::new();
        let (guest, stays) = (
            world.guest(&Policy::internet()),
            world.guest(&Policy::internet()),
        );
        world.pass(&guest, &datagram(7));
        let index = guest.index;
        // The device remains until the TAP is released, even if the VMM dies.
        let device = world
            .isolation
            .inspect(|maps| maps.taps.get(index.0).unwrap().name.clone());
        drop(guest);
        assert!(device::index(&device).is_ok());
        world.isolation.discard(index);
        eventually("the TAP is cleared", || {
            matches!(
                world.isolation.verify(index),
                Err(IsolationError::Unknown(_))
            )
        });
        let links = world.config.pins.join(&world.config.instance).join("links");
        let left: Vec<String> = fs::read_dir(links)
            .unwrap()
            .flatten()
            .map(|e| e.file_name().to_string_lossy().into_owned())
            .collect();
        // The links of the other TAP, the uplink and the resolver's device.
        assert_eq!(left.len(), 3, "{left:?}");
        let all = world
            .isolation
            .inspect(|maps| maps.datapath.flow_maps().unwrap().flows.keys().count());
        assert_eq!(all, 0);
        world.isolation.verify(stays.index).unwrap();
        world.pass(&stays, &datagram(7));
    });
}

/// The device of a TAP.
fn device_of(world: &World, index: TapIndex) -> (u32, String) {
    world.isolation.inspect(|maps| {
        let attachment = maps.taps.get(index.0).unwrap();
        (attachment.entry.ifindex, attachment.name.clone())
    })
}

#[test]
fn net_a_reused_tap_keeps_nothing_of_its_previous_sandbox() {
    in_namespace(|| {
        let world = World::new();
        let policy = Policy {
            names: vec!["example.com".parse().unwrap()],
            ..narrow()
        };
        let first = world.guest(&policy);
        let (ifindex, _) = device_of(&world, first.index);
        let (pinned, day) = (ip("198.51.100.8"), Duration::from_secs(86400));
        let pin = |guest: &Guest| {
            let (index, sandbox) = (guest.index, &guest.sandbox);
            world
                .isolation
                .pin(index, sandbox, pinned, "example.com", day)
        };
        pin(&first).unwrap();
        world.refused(&first, &datagram_to("198.51.100.9"), Reason::Policy);
        let out = world.pass(&first, &datagram(7));
        let answer = out.answer(udp(7, out.source_port(), b"first's"));
        // Queues three frames, with a header length other than the default.
        sys::set_header_len(&first.fd, 12);
        for _ in 0..3 {
            world.send_on_wire(&answer);
        }
        eventually("the answers are in the queue", || {
            world.counters(&first).packets_in == 3
        });
        let (past, fd) = (first.index, first.fd);
        drop(fd);
        world.isolation.release(past);

        let next = world.guest(&narrow());
        assert_eq!(device_of(&world, next.index).0, ifindex);
        assert_ne!(next.index, past);
        assert_eq!(world.counters(&next), Counters::default());
        assert!(next.has_nothing());
        world.send_on_wire(&answer);
        world.refused(&next, &datagram_to("198.51.100.8"), Reason::Policy);
        assert!(next.has_nothing());
        let own = world.pass(&next, &datagram(7));
        world.send_on_wire(&own.answer(udp(7, own.source_port(), b"next's")));
        assert_eq!(&next.next().body[8..], b"next's");
        let mut counted = world.counters(&next);
        assert_eq!((counted.packets_in, counted.flows), (1, 1));
        assert_eq!(counted.refused.remove(&Reason::Policy), Some(1));
        assert_eq!(counted.refused.len(), 0);
        world.isolation.counters(past).unwrap_err();
        let reported = world.events.try_iter().map(|event| event.destination.ip());
        assert_eq!(reported.collect::<Vec<_>>(), [ip("198.51.100.9"), pinned]);
    });
}

#[test]
fn net_a_changed_or_discarded_tap_is_not_reused() {
    in_namespace(|| {
        let world = World::new();
        let changes: [(&str, Tamper); 4] = [
            ("mtu", |_, _, name| {
                command(&["link", "set", name, "mtu", "1400"])
            }),
            ("promiscuous", |_, _, name| {
                command(&["link", "set", name, "promisc", "on"])
            }),
            ("MAC", |_, _, name| {
                command(&["link", "set", name, "address", "02:00:00:00:00:77"])
            }),
            ("address", |_, _, name| {
                command(&["addr", "add", "10.9.9.9/32", "dev", name])
            }),
        ];
        for (what, change) in changes {
            let guest = world.guest(&Policy::default());
            let (ifindex, name) = device_of(&world, guest.index);
            change(&world, &guest, &name);
            drop(guest.fd);
            world.isolation.release(guest.index);
            let next = world.guest(&Policy::default());
            assert_ne!(device_of(&world, next.index).0, ifindex, "{what}");
            drop(next.fd);
            world.isolation.discard(next.index);
        }
        let guest = world.guest(&Policy::default());
        let (ifindex, _) = device_of(&world, guest.index);
        world.isolation.discard(guest.index);
        let next = world.guest(&Policy::default());
        assert_ne!(device_of(&world, next.index).0, ifindex);
        guest.send(&datagram(7));
        world.nothing_on_wire();
    });
}

#[test]
fn net_a_released_tap_passes_nothing_while_its_device_exists() {
    in_namespace(|| {
        let world = World::new();
        let guest = world.guest(&Policy::internet());
        let out = world.pass(&guest, &datagram(7));
        world.isolation.release(guest.index);
        guest.send(&datagram(7));
        world.nothing_on_wire();
        world.send_on_wire(&out.answer(udp(7, out.source_port(), b"late")));
        assert!(guest.has_nothing());
        world.isolation.release(TapIndex(15));
    });
}

#[test]
fn net_packets_from_before_the_sandbox_are_not_in_its_counters() {
    in_namespace(|| {
        let world = World::new();
        let tap = world.isolation.take().unwrap();
        write(&tap.fd, &datagram(7).bytes());
        let sandbox = model::SandboxId::from_random([3; 19]);
        let counters = || world.isolation.counters(tap.index).unwrap();
        assert_eq!(counters().refused[&Reason::Policy], 1);
        world.nothing_on_wire();
        world
            .isolation
            .confine(tap.index, &sandbox, &Policy::internet())
            .unwrap();
        assert_eq!(counters(), Counters::default());
        assert!(world.events.try_recv().is_err());
    });
}

#[test]
fn net_a_ready_tap_that_fails_verification_is_removed_and_its_number_becomes_free() {
    in_namespace(|| {
        let config = IsolationConfig {
            stock: 1,
            max_taps: 1,
            ..config()
        };
        let world = World::with(config);
        let ready = || {
            let find = |maps: &mut Enforcement| {
                let (_, attachment) = maps.taps.iter().next()?;
                let is_ready = matches!(attachment.usage, Usage::Ready(_));
                is_ready.then(|| (attachment.entry.ifindex, attachment.name.clone()))
            };
            world.isolation.inspect(find)
        };
        eventually("a TAP is ready", || ready().is_some());
        let (ifindex, name) = ready().unwrap();
        command(&["addr", "add", "10.9.9.9/32", "dev", &name]);
        let taken = world.isolation.take();
        assert!(
            matches!(taken, Err(IsolationError::Mismatch { .. })),
            "{taken:?}"
        );
        eventually("the device is removed", || device::name(ifindex).is_err());
        eventually("another TAP can be taken", || {
            world.isolation.take().is_ok()
        });
    });
}

#[test]
fn net_the_number_of_taps_is_limited_and_released_numbers_become_free() {
    in_namespace(|| {
        let mut config = config();
        config.max_taps = 2;
        let world = World::with(config);
        let (a, b) = (
            world.isolation.take().unwrap(),
            world.isolation.take().unwrap(),
        );
        assert!(matches!(
            world.isolation.take(),
            Err(IsolationError::Exhausted(2))
        ));
        let gone = b.index;
        drop(b);
        world.isolation.release(gone);
        eventually("a number is free", || {
            world.isolation.take().is_ok_and(|tap| tap.index == gone)
        });
        drop(a);
    });
}

#[test]
fn net_taking_and_releasing_without_pause_never_exhausts_the_numbers() {
    in_namespace(|| {
        let mut config = config();
        config.max_taps = 6;
        let world = World::with(config);
        // Takes more TAPs than there are numbers, without pauses in which the threads could catch up.
        thread::scope(|scope| {
            for _ in 0..3 {
                let isolation = world.isolation.clone();
                scope.spawn(move || {
                    for _ in 0..20 {
                        let Tap { index, fd } = isolation.take().unwrap();
                        drop(fd);
                        isolation.release(index);
                    }
                });
            }
        });
    });
}

#[test]
fn net_two_servers_share_a_namespace_and_an_uplink() {
    in_namespace(|| {
        let world = World::new();
        let (other, _events) = Isolation::open(&config()).unwrap();
        let ours = world.guest(&Policy::internet());
        let tap = other.take().unwrap();
        other
            .confine(tap.index, &ours.sandbox, &Policy::internet())
            .unwrap();
        let sent = datagram(7);
        let first = world.pass(&ours, &sent);
        write(&tap.fd, &sent.bytes());
        let second = world.next_on_wire();
        assert_ne!(first.source_port(), second.source_port());
        world.send_on_wire(&second.answer(udp(7, second.source_port(), b"second")));
        world.send_on_wire(&first.answer(udp(7, first.source_port(), b"first")));
        assert_eq!(&ours.next().body[8..], b"first");
        let theirs = Guest {
            index: tap.index,
            fd: tap.fd,
            sandbox: ours.sandbox.clone(),
        };
        assert_eq!(&theirs.next().body[8..], b"second");
        assert!(ours.has_nothing() && theirs.has_nothing());
        assert!(
            Isolation::open(&world.config).is_err_and(|e| e.to_string().contains("another server"))
        );
    });
}

#[test]
fn net_dropping_the_last_handle_removes_the_pins_if_no_vm_lives() {
    in_namespace(|| {
        for _ in 0..3 {
            // The threads still have work when the last handle is dropped. The drop must wait for them before it cleans
            // up.
            let config = IsolationConfig {
                stock: 8,
                ..config()
            };
            let home = config.pins.join(&config.instance);
            let (isolation, _events) = Isolation::open(&config).unwrap();
            let taken = isolation.take().unwrap();
            eventually("the stock has TAPs", || {
                isolation.inspect(|maps| maps.taps.ready_count()) > 0
            });
            let another = isolation.clone();
            drop(isolation);
            assert!(home.exists());
            drop(taken);
            drop(another);
            assert!(!home.exists());
        }
    });
}

#[test]
fn net_a_killed_server_leaves_policies_in_force_and_a_successor_takes_them_over() {
    in_namespace(|| {
        let mut world = World::new();
        let config = config();
        let (mut server, guest, _) = start_server(&config, &narrow(), None);
        let syn = world.pass(
            &guest,
            &Packet::from_guest(ip(PEER4), TCP, tcp(5000, 80, SYN, b"")),
        );
        server.kill().unwrap();
        server.wait().unwrap();
        let data = Packet::from_guest(ip(PEER4), TCP, tcp(5000, 80, ACK, b"data"));
        assert_eq!(world.pass(&guest, &data).source_port(), syn.source_port());
        world.send_on_wire(&syn.answer(tcp(80, syn.source_port(), SYN | ACK, b"")));
        guest.next();
        guest.send(&Packet::from_guest(
            ip("198.51.100.8"),
            TCP,
            tcp(5000, 80, SYN, b""),
        ));
        world.nothing_on_wire();

        let (successor, _events) = Isolation::open(&config).unwrap();
        assert_eq!(world.pass(&guest, &data).source_port(), syn.source_port());
        successor
            .adopt(guest.index, &guest.sandbox, &narrow())
            .unwrap();
        assert_eq!(world.pass(&guest, &data).source_port(), syn.source_port());
        world.isolation = successor;
        let other = Packet::from_guest(ip("198.51.100.8"), TCP, tcp(5000, 80, SYN, b""));
        world.refused(&guest, &other.bytes(), Reason::Policy);
        drop(guest);
        let links = config.pins.join(&config.instance).join("links");
        let pins = || {
            fs::read_dir(&links)
                .unwrap()
                .flatten()
                .filter(|e| e.file_name().to_string_lossy().starts_with("tap"))
                .count()
        };
        eventually("its pin is gone", || pins() == 0);
    });
}

#[test]
fn net_a_successor_clears_the_taps_that_died_with_their_server() {
    in_namespace(|| {
        let world = World::new();
        let config = config();
        let (mut server, guest, _) = start_server(&config, &narrow(), None);
        world.pass(&guest, &datagram_tcp());
        server.kill().unwrap();
        server.wait().unwrap();
        drop(guest);
        let (successor, _events) = Isolation::open(&config).unwrap();
        let (taps, sets, flows) = successor.inspect(|maps| {
            let flows = maps.datapath.flow_maps().unwrap().flows.keys().count();
            let sets = maps.policies.rules.map.all().unwrap().into_keys();
            (maps.taps.iter().count(), sets.collect::<Vec<_>>(), flows)
        });
        assert_eq!((taps, sets, flows), (0, vec![FOR_ALL], 0));
    });
}

/// A killed server exits immediately, because the kernel has no TAP to remove, and its successor has a stock and
/// programs from the start.
#[test]
fn net_a_successor_takes_over_the_programs_and_the_stock_of_a_killed_server() {
    in_namespace(|| {
        let world = World::new();
        let config = IsolationConfig {
            stock: 4,
            ..config()
        };
        let (mut server, guest, _) = start_server(&config, &narrow(), None);
        server.kill().unwrap();
        server.wait().unwrap();
        let (successor, _events) = Isolation::open(&config).unwrap();
        let (id, ready) = successor.inspect(|maps| {
            let ready = maps.taps.iter().filter(|(_, tap)| tap.is_ready());
            let ready: Vec<(u32, String)> = ready
                .map(|(_, tap)| (tap.entry.ifindex, tap.name.clone()))
                .collect();
            (maps.datapath.from_guest_id, ready)
        });
        assert_eq!(ready.len(), 4, "{ready:?}");
        let links = config.pins.join(&config.instance).join("links");
        let of_guest = fs::read_dir(links).unwrap().flatten().find_map(|entry| {
            let name = entry.file_name().into_string().unwrap();
            let ifindex = name.strip_prefix(&format!("tap-{}-", guest.index.0))?;
            ifindex.parse::<u32>().ok()
        });
        let of_guest = of_guest.unwrap();
        assert_eq!(programs_on(of_guest).unwrap(), [id]);
        successor
            .adopt(guest.index, &guest.sandbox, &narrow())
            .unwrap();
        world.pass(&guest, &datagram_tcp());
        // A TAP of the stock is taken, verified and used like any other.
        let tap = successor.take().unwrap();
        let sandbox = model::SandboxId::from_random([8; 19]);
        successor.confine(tap.index, &sandbox, &narrow()).unwrap();
        let other = Guest {
            index: tap.index,
            fd: tap.fd,
            sandbox,
        };
        world.pass(&other, &datagram_tcp());
        drop((guest, other));
        // A process that another test starts at this moment has a copy of the descriptor until it executes its program.
        eventually("the TAP is removed", || device::name(of_guest).is_err());
        drop(successor);
        let left: Vec<_> = ready
            .iter()
            .filter(|(i, _)| device::name(*i).is_ok())
            .collect();
        assert!(left.is_empty(), "{left:?}");
    });
}

/// If a server is killed after it has taken a TAP from its stock and before it binds the TAP to its VM, the TAP exists
/// without a process.
#[test]
fn net_a_tap_that_no_process_has_open_is_removed_and_keeps_nothing_else() {
    in_namespace(|| {
        let config = IsolationConfig {
            stock: 4,
            ..config()
        };
        let home = config.pins.join(&config.instance);
        for is_stopped_at_once in [true, false] {
            let (mut server, guest, _) = start_server(&config, &narrow(), None);
            server.kill().unwrap();
            server.wait().unwrap();
            device::set_persistent(guest.fd.as_fd(), true).unwrap();
            let (successor, _events) = Isolation::open(&config).unwrap();
            let (index, name) = successor.inspect(|maps| {
                let attachment = maps.taps.get(guest.index.0).unwrap();
                (attachment.entry.ifindex, attachment.name.clone())
            });
            if !is_stopped_at_once {
                let adopted = successor.adopt(guest.index, &guest.sandbox, &narrow());
                adopted.unwrap();
            }
            let released = guest.index;
            drop(guest);
            assert_eq!(device::index(&name).ok(), Some(index));
            if !is_stopped_at_once {
                successor.release(released);
                eventually("the device is removed", || device::name(index).is_err());
            }
            drop(successor);
            assert_eq!(taps_left(), Vec::<String>::new(), "{is_stopped_at_once}");
            assert!(!home.exists());
        }
    });
}

/// Names of the devices of this namespace that a server made.
fn taps_left() -> Vec<String> {
    let mut names: Vec<String> = (1..1000).filter_map(|i| device::name(i).ok()).collect();
    names.retain(|name| name.starts_with("cube"));
    names
}

/// Different settings need different programs, which replace the existing ones.
#[test]
fn net_a_successor_with_other_settings_loads_its_own_programs() {
    in_namespace(|| {
        let world = World::new();
        let config = config();
        let (mut server, guest, _) = start_server(&config, &narrow(), None);
        server.kill().unwrap();
        server.wait().unwrap();
        // Without its device, the successor needs a new one.
        let former: Vec<u32> = resolvers(&config);
        for ifindex in &former {
            command(&["link", "del", &device::name(*ifindex).unwrap()]);
        }
        let (successor, _events) = Isolation::open(&config).unwrap();
        assert!(!resolvers(&config).contains(&former[0]));
        successor
            .adopt(guest.index, &guest.sandbox, &narrow())
            .unwrap();
        world.pass(&guest, &datagram_tcp());
    });
}

/// Indices of the resolver's devices of an instance.
fn resolvers(config: &IsolationConfig) -> Vec<u32> {
    let links = config.pins.join(&config.instance).join("links");
    let names = fs::read_dir(links).unwrap().flatten();
    names
        .filter_map(|e| {
            e.file_name()
                .to_str()?
                .strip_prefix("resolver-")?
                .parse()
                .ok()
        })
        .collect()
}

fn datagram_tcp() -> Packet {
    Packet::from_guest(ip(PEER4), TCP, tcp(5000, 80, SYN, b""))
}

fn narrow() -> Policy {
    let mut policy = Policy::internet();
    policy.rules.retain(|rule| rule.block.addr().is_ipv4());
    policy.rules[0].block = "198.51.100.7/32".parse().unwrap();
    policy
}
