//! The network device, without a TAP and, in the `net_…` tests, with one.

use std::net::UdpSocket;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use vmm_control::LostFrames;

use crate::devices::testing::{DATA, DriverQueue, Guest, NET, Piece};

#[test]
fn without_a_tap_frames_are_dropped_and_counted() {
    let mut guest = Guest::new();
    let mut queues = guest.init(NET, 0);
    queues[0].add(&guest.ram, &[Piece::Write(DATA, 2048)]);
    guest.notify(&queues[0]);
    assert_eq!(queues[0].take(&guest.ram), None);
    queues[1].add(
        &guest.ram,
        &[Piece::Read(DATA, 12), Piece::Read(DATA + 12, 60)],
    );
    guest.notify(&queues[1]);
    assert_eq!(queues[1].take(&guest.ram), Some((0, 0)));
    let lost = LostFrames {
        from_guest: 1,
        ..LostFrames::default()
    };
    assert_eq!(guest.bus.lost_frames(), lost);
}

#[test]
fn a_frame_without_content_is_refused_and_counted() {
    let mut guest = Guest::new();
    let mut queues = guest.init(NET, 0);
    queues[1].add(&guest.ram, &[Piece::Read(DATA, 12)]);
    guest.notify(&queues[1]);
    let lost = LostFrames {
        refused: 1,
        ..LostFrames::default()
    };
    assert_eq!(guest.bus.lost_frames(), lost);
}

/// A guest on a TAP in this thread's own network namespace, and a socket at the host's end of the TAP.
struct Wire {
    guest: Guest,
    rx: DriverQueue,
    tx: DriverQueue,
    host: UdpSocket,
}

const HOST: &str = "10.0.0.1:4000";
const GUEST: &str = "10.0.0.2:5000";
const UDP: usize = 12 + 14 + 20 + 8;

/// Sets up the guest and the socket. Returns `None`, and prints the reason, if this host cannot run the test.
fn wire() -> Option<Wire> {
    if !nix::unistd::geteuid().is_root() || !Path::new("/dev/net/tun").exists() {
        eprintln!("skipped: needs root and /dev/net/tun");
        return None;
    }
    nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNET).unwrap();
    let tap = crate::devices::sys::open_tap("tap0").unwrap();
    let setup = "echo 1 > /proc/sys/net/ipv6/conf/all/disable_ipv6; ip addr add 10.0.0.1/24 dev tap0 && ip link set tap0 mtu 65500 up \
         && ip neigh add 10.0.0.2 lladdr 02:cb:00:00:00:01 dev tap0";
    let done = Command::new("sh").args(["-c", setup]).status().unwrap();
    assert!(done.success());
    let mut guest = Guest::with(&[0; 4096], &[0; 4096], Some(tap));
    let mut queues = guest.init(NET, 0);
    let tx = queues.remove(1);
    let rx = queues.remove(0);
    let host = UdpSocket::bind(HOST).unwrap();
    host.set_read_timeout(Some(Duration::from_secs(10)))
        .unwrap();
    Some(Wire {
        guest,
        rx,
        tx,
        host,
    })
}

impl Wire {
    /// Offers `count` receive buffers of `len` bytes. The address of each follows from its head.
    fn offer(&mut self, count: usize, len: u32) {
        for _ in 0..count {
            let head = self.rx.add(&self.guest.ram, &[Piece::Write(DATA, len)]);
            let home = DATA + u64::from(head) * 16_384;
            self.rx.put_desc(&self.guest.ram, head, home, len, 2, 0);
        }
    }

    /// The next frame, and the number of receive buffers that it takes.
    fn frame(&mut self) -> Option<(usize, Vec<u8>)> {
        let (head, len) = self.rx.take(&self.guest.ram)?;
        let home = |head| DATA + u64::from(head) * 16_384;
        let mut frame = self.guest.get(home(head), usize::try_from(len).unwrap());
        let buffers = usize::from(u16::from_le_bytes([frame[10], frame[11]]));
        for _ in 1..buffers {
            let (head, len) = self.rx.take(&self.guest.ram).expect("all at once");
            frame.extend(self.guest.get(home(head), usize::try_from(len).unwrap()));
        }
        Some((buffers, frame))
    }

    /// The payload of the next UDP frame, and the number of receive buffers that it takes. Skips other frames, which
    /// the host's kernel sends on its own.
    fn datagram(&mut self) -> (usize, Vec<u8>) {
        let mut found = None;
        let deadline = std::time::Instant::now() + Duration::from_secs(10);
        while found.is_none() {
            assert!(std::time::Instant::now() < deadline, "no datagram came");
            self.guest.poll(Duration::from_millis(1));
            while let Some((buffers, frame)) = self.frame() {
                if frame.len() > UDP && frame[24..26] == [8, 0] && frame[35] == 17 {
                    found = Some((buffers, frame[UDP..].to_vec()));
                    break;
                }
            }
        }
        found.unwrap()
    }

    /// Sends a frame in descriptors whose boundaries do not follow its headers.
    fn send(&mut self, header: &[u8], frame: &[u8]) {
        self.guest.put(DATA, &[header, frame].concat());
        let len = u32::try_from(header.len() + frame.len()).unwrap();
        let pieces = [
            Piece::Read(DATA, 5),
            Piece::Read(DATA + 5, 20),
            Piece::Read(DATA + 25, len - 25),
        ];
        self.tx.add(&self.guest.ram, &pieces);
        self.guest.notify(&self.tx);
        assert!(self.tx.take(&self.guest.ram).is_some());
    }

    fn kick(&mut self) {
        let rx = self.rx.clone();
        self.guest.notify(&rx);
    }
}

#[test]
fn net_frames_reach_the_guest_in_one_buffer_or_several() {
    let Some(mut wire) = wire() else { return };
    wire.offer(100, 2048);
    wire.kick();
    wire.host.send_to(b"to the guest", GUEST).unwrap();
    assert_eq!(wire.datagram(), (1, b"to the guest".to_vec()));
    assert!(wire.guest.raised.contains(NET));
    let large: Vec<u8> = (0..60_000)
        .map(|at| u8::try_from(at % 241).unwrap())
        .collect();
    wire.host.send_to(&large, GUEST).unwrap();
    let (buffers, payload) = wire.datagram();
    assert_eq!(buffers, (UDP + 60_000).div_ceil(2048));
    assert!(payload == large);
}

#[test]
fn net_a_frame_waits_for_buffers_and_their_notification() {
    let Some(mut wire) = wire() else { return };
    wire.host.send_to(&[1; 5000], GUEST).unwrap();
    wire.guest.poll(Duration::from_millis(100));
    wire.offer(1, 2048);
    wire.kick();
    assert!(wire.frame().is_none(), "one buffer is too little");
    let event = wire.rx.used() + 4 + 256 * 8;
    assert_eq!(
        wire.guest.get(event, 2),
        [1, 0],
        "the next kick shall come with the second buffer"
    );
    wire.offer(40, 2048);
    wire.kick();
    assert_eq!(wire.datagram(), (3, vec![1; 5000]));
    assert_eq!(wire.guest.bus.lost_frames(), LostFrames::default());
}

#[test]
fn net_a_frame_that_exceeds_the_merge_limit_is_dropped_and_counted() {
    let Some(mut wire) = wire() else { return };
    wire.offer(200, 64);
    wire.kick();
    wire.host.send_to(&[1; 20_000], GUEST).unwrap();
    wire.guest
        .until(|guest| guest.bus.lost_frames().to_guest == 1);
}

#[test]
fn net_frames_of_the_guest_reach_the_host() {
    let Some(mut wire) = wire() else { return };
    let frame = udp_frame(&mac_of_tap(), b"to the host");
    let len = u32::try_from(frame.len()).unwrap();
    wire.guest.put(DATA, &frame);
    let pieces = [Piece::Read(DATA, 12), Piece::Read(DATA + 12, len - 12)];
    wire.tx.add(&wire.guest.ram, &pieces);
    wire.guest.notify(&wire.tx);
    assert!(wire.tx.take(&wire.guest.ram).is_some());
    let mut payload = [0; 64];
    let (len, from) = wire.host.recv_from(&mut payload).unwrap();
    assert_eq!(
        (&payload[..len], from.to_string().as_str()),
        (&b"to the host"[..], GUEST)
    );
}

/// A driver without a network stack sends every offload header that does not match the frame.
#[test]
fn net_frames_with_an_offload_request_for_other_bytes_are_dropped_and_counted() {
    let Some(mut wire) = wire() else { return };
    let frame = udp_frame(&mac_of_tap(), b"left to the host");
    let own = [1, 0, 0, 0, 0, 0, 34, 0, 6, 0, 0, 0];
    for start in 0..80 {
        for offset in 0..80 {
            let header = [1, 0, 0, 0, 0, 0, start, 0, offset, 0, 0, 0];
            if header != own {
                wire.send(&header, &frame[12..]);
            }
        }
    }
    for gso_type in 1..=u8::MAX {
        for flags in [0, 1] {
            let header = [flags, gso_type, 42, 0, 8, 0, 34, 0, 6, 0, 0, 0];
            wire.send(&header, &frame[12..]);
        }
    }
    wire.send(&[0; 12], &udp_frame(&mac_of_tap(), b"finished")[12..]);
    let mut payload = [0; 64];
    let len = wire.host.recv(&mut payload).unwrap();
    assert_eq!(payload[..len], b"finished"[..]);
    let lost = wire.guest.bus.lost_frames();
    assert_eq!((lost.refused, lost.from_guest), (80 * 80 - 1 + 2 * 255, 0));
    wire.send(&own, &frame[12..]);
    let len = wire.host.recv(&mut payload).unwrap();
    assert_eq!(payload[..len], b"left to the host"[..]);
}

#[test]
fn net_a_descriptor_that_is_not_a_tap_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let mut watch = crate::watch::tests::test_watch();
    let (near, _far) = std::os::unix::net::UnixStream::pair().unwrap();
    let spec = crate::devices::testing::spec(&dir, &[], &[], Some(near.into()));
    let error = crate::devices::DeviceBus::new(spec, &mut watch).map(|_| ());
    let error = error.unwrap_err().to_string();
    assert_eq!(error, "cannot use the network descriptor as a TAP");
}

fn mac_of_tap() -> Vec<u8> {
    let shown = Command::new("ip")
        .args(["-o", "link", "show", "tap0"])
        .output();
    let text = String::from_utf8(shown.unwrap().stdout).unwrap();
    let mut words = text.split_whitespace();
    let mac = words
        .find(|word| *word == "link/ether")
        .and_then(|_| words.next());
    let bytes = mac.unwrap().split(':');
    bytes
        .map(|byte| u8::from_str_radix(byte, 16).unwrap())
        .collect()
}

/// A frame from the guest's address to the host's, preceded by an empty offload header.
fn udp_frame(to: &[u8], payload: &[u8]) -> Vec<u8> {
    let udp_len = u16::try_from(payload.len() + 8).unwrap();
    let ip_len = udp_len + 20;
    let mut ip = vec![0x45, 0];
    ip.extend(ip_len.to_be_bytes());
    ip.extend([0, 0, 0, 0, 64, 17, 0, 0, 10, 0, 0, 2, 10, 0, 0, 1]);
    let words = ip
        .chunks(2)
        .map(|word| u32::from(word[0]) << 8 | u32::from(word[1]));
    let sum: u32 = words.sum();
    let sum = !u16::try_from((sum & 0xffff) + (sum >> 16)).unwrap();
    ip[10..12].copy_from_slice(&sum.to_be_bytes());
    let mut frame = vec![0; 12];
    frame.extend(to);
    frame.extend([2, 0xcb, 0, 0, 0, 1, 8, 0]);
    frame.extend(ip);
    frame.extend(5000_u16.to_be_bytes());
    frame.extend(4000_u16.to_be_bytes());
    frame.extend(udp_len.to_be_bytes());
    frame.extend([0, 0]);
    frame.extend(payload);
    frame
}
