//! What is found when somebody meddled, and what is left when the server is killed.

use std::{
    env, fs,
    io::{IoSlice, IoSliceMut, Read},
    os::{
        fd::AsRawFd,
        unix::net::{UnixListener, UnixStream},
    },
    process::{Child, Command, Stdio},
    time::Duration,
};

use aya::{maps::lpm_trie::Key, programs::links::PinnedLink};
use nix::{
    cmsg_space,
    sys::socket::{ControlMessage, MsgFlags, recvmsg, sendmsg},
};

use super::{
    frame::{ACK, Packet, SYN, TCP, UDP, tcp, udp},
    sys,
    world::{Guest, PEER4, World, command, config, eventually, in_namespace, ip, write},
};
use crate::{Isolation, IsolationConfig, IsolationError, Policy, Reason, TapIndex, device};

/// Where the child finds the socket, and what it calls its installation.
const SOCKET: &str = "CUBE_TEST_SOCKET";
const INSTANCE: &str = "CUBE_TEST_INSTANCE";

/// Changes something of a guest's TAP, whose name comes last.
type Tamper = fn(&World, &Guest, &str);

fn datagram(port: u16) -> Packet {
    Packet::from_guest(ip(PEER4), UDP, udp(4000, port, b"x"))
}

#[test]
fn net_verify_finds_what_others_changed() {
    in_namespace(|| {
        let world = World::new();
        let tamper: [(&str, Tamper); 9] = [
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
            ("the rule for", |world, guest, _| {
                world.isolation.inspect(|owner| {
                    let rules = owner.seat(guest.index.0).unwrap().rules.clone();
                    let ((prefix, key), _) = rules.iter().next().unwrap();
                    owner
                        .datapath
                        .rules
                        .remove(&Key::new(*prefix, *key))
                        .unwrap();
                });
            }),
            ("the rule for", |world, guest, _| {
                world.isolation.inspect(|owner| {
                    let rules = owner.seat(guest.index.0).unwrap().rules.clone();
                    let ((prefix, key), rule) = rules.iter().next().unwrap();
                    let mut wider = *rule;
                    wider.verdict ^= 1;
                    owner
                        .datapath
                        .rules
                        .insert(&Key::new(*prefix, *key), wider, 0)
                        .unwrap();
                });
            }),
            ("its entry is", |world, guest, _| {
                world.isolation.inspect(|owner| {
                    let mut tap = owner.seat(guest.index.0).unwrap().tap;
                    tap.policy += 1;
                    owner.datapath.taps.set(guest.index.0, tap, 0).unwrap();
                });
            }),
            ("its device leads to", |world, guest, _| {
                world.isolation.inspect(|owner| {
                    let ifindex = owner.seat(guest.index.0).unwrap().tap.ifindex;
                    owner.datapath.indices.insert(ifindex, 16, 0).unwrap();
                });
            }),
            ("cube", |_, _, name| command(&["link", "del", name])),
        ];
        for (what, tamper) in tamper {
            let guest = world.guest(&Policy::internet());
            world.isolation.verify(guest.index).unwrap();
            let name = world
                .isolation
                .inspect(|owner| owner.seat(guest.index.0).unwrap().name.clone());
            tamper(&world, &guest, &name);
            match world.isolation.verify(guest.index) {
                Err(IsolationError::Mismatch { index, what: found }) => {
                    assert_eq!(index, guest.index);
                    assert!(found.contains(what), "{what}: {found}");
                }
                other => panic!("{what}: {other:?}"),
            }
            world.isolation.release(guest.index);
        }
    });
}

#[test]
fn net_an_uplink_without_its_program_is_found() {
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
fn net_what_a_gone_tap_had_is_cleared_away() {
    in_namespace(|| {
        let world = World::new();
        let (guest, stays) = (
            world.guest(&Policy::internet()),
            world.guest(&Policy::internet()),
        );
        world.pass(&guest, &datagram(7));
        let index = guest.index;
        drop(guest);
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
        assert_eq!(left.len(), 2, "{left:?}");
        let all = world
            .isolation
            .inspect(|owner| owner.datapath.flow_maps().unwrap().flows.keys().count());
        assert_eq!(all, 0);
        world.isolation.verify(stays.index).unwrap();
        world.pass(&stays, &datagram(7));
    });
}

#[test]
fn net_a_released_tap_is_closed_while_its_device_lives() {
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
fn net_what_a_guest_sent_while_it_waited_is_not_its_sandboxs() {
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
        assert_eq!(counters(), crate::Counters::default());
        assert!(world.events.try_recv().is_err());
    });
}

#[test]
fn net_taps_are_limited_and_their_numbers_come_back_late() {
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
        eventually("a number is free", || {
            world.isolation.take().is_ok_and(|tap| tap.index == gone)
        });
        drop(a);
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
fn net_a_killed_server_leaves_policies_in_force_and_a_successor_takes_them_over() {
    in_namespace(|| {
        let mut world = World::new();
        let config = config();
        let (mut server, guest) = start_server(&config);
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
fn net_what_died_with_its_server_is_swept_by_the_next() {
    in_namespace(|| {
        let world = World::new();
        let config = config();
        let (mut server, guest) = start_server(&config);
        world.pass(&guest, &datagram_tcp());
        server.kill().unwrap();
        server.wait().unwrap();
        drop(guest);
        let (successor, _events) = Isolation::open(&config).unwrap();
        let (seats, rules, flows) = successor.inspect(|owner| {
            let flows = owner.datapath.flow_maps().unwrap().flows.keys().count();
            let policies = owner
                .datapath
                .rules
                .keys()
                .flatten()
                .filter(|key| { key.data() }.policy != 0);
            (owner.seats.len(), policies.count(), flows)
        });
        assert_eq!((seats, rules, flows), (0, 0, 0));
    });
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

/// A server in a process of its own, with one guest whose TAP it gives us.
fn start_server(config: &IsolationConfig) -> (Child, Guest) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("socket");
    let listener = UnixListener::bind(&path).unwrap();
    let child = Command::new(env::current_exe().unwrap())
        .args(["--exact", "tests::survive::a_server_that_is_killed"])
        .env(SOCKET, &path)
        .env(INSTANCE, &config.instance)
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let (stream, _) = listener.accept().unwrap();
    let mut index = [0; 4];
    let mut space = cmsg_space!([i32; 1]);
    let mut buffers = [IoSliceMut::new(&mut index)];
    let message = recvmsg::<()>(
        stream.as_raw_fd(),
        &mut buffers,
        Some(&mut space),
        MsgFlags::MSG_CMSG_CLOEXEC,
    )
    .unwrap();
    let fd = sys::received(message.cmsgs().unwrap().next().unwrap());
    let guest = Guest {
        index: TapIndex(u32::from_ne_bytes(index)),
        fd,
        sandbox: model::SandboxId::from_random([9; 19]),
    };
    (child, guest)
}

/// The other process of the tests above; without their environment it is nothing.
#[test]
fn a_server_that_is_killed() {
    let (Ok(socket), Ok(instance)) = (env::var(SOCKET), env::var(INSTANCE)) else {
        return;
    };
    let config = IsolationConfig {
        instance,
        ..config()
    };
    let (isolation, _events) = Isolation::open(&config).unwrap();
    let tap = isolation.take().unwrap();
    let sandbox = model::SandboxId::from_random([9; 19]);
    isolation.confine(tap.index, &sandbox, &narrow()).unwrap();
    let mut stream = UnixStream::connect(socket).unwrap();
    let index = tap.index.0.to_ne_bytes();
    let fds = [tap.fd.as_raw_fd()];
    let rights = [ControlMessage::ScmRights(&fds)];
    sendmsg::<()>(
        stream.as_raw_fd(),
        &[IoSlice::new(&index)],
        &rights,
        MsgFlags::empty(),
        None,
    )
    .unwrap();
    // Until it is killed, or whoever started it is gone.
    stream
        .set_read_timeout(Some(Duration::from_secs(120)))
        .unwrap();
    let _end = stream.read(&mut [0]);
}
