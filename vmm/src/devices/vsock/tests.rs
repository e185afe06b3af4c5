//! Streams from the point of view of a guest's driver and of host clients.

use std::io::{ErrorKind, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::Duration;

use super::stream::BUF_ALLOC;
use crate::devices::testing::{DATA, DriverQueue, Guest, Piece, VSOCK};

const REQUEST: u16 = 1;
const RESPONSE: u16 = 2;
const RST: u16 = 3;
const SHUTDOWN: u16 = 4;
const RW: u16 = 5;
const CREDIT_UPDATE: u16 = 6;

/// Size of a receive buffer, and the credit that the guest gives a stream, in bytes.
const BUFFER: u32 = 4096;
const WINDOW: u32 = 64 << 10;
const TX_DATA: u64 = DATA + (8 << 20);

/// A packet as the guest sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Seen {
    host_port: u32,
    guest_port: u32,
    op: u16,
    flags: u32,
    fwd_cnt: u32,
    payload: Vec<u8>,
}

/// A guest with only the vsock driver.
struct Peer {
    guest: Guest,
    rx: DriverQueue,
    tx: DriverQueue,
    /// Bytes that the guest has read from all streams together. Tests use one stream at a time.
    fwd_cnt: u32,
}

impl Peer {
    /// A guest with `buffers` receive buffers.
    fn new(buffers: usize) -> Self {
        let mut guest = Guest::new();
        let mut queues = guest.init(VSOCK, 0);
        let tx = queues.remove(1);
        let rx = queues.remove(0);
        let mut peer = Self {
            guest,
            rx,
            tx,
            fwd_cnt: 0,
        };
        (0..buffers).for_each(|_| peer.add_buffer());
        let rx = peer.rx.clone();
        peer.guest.notify(&rx);
        peer
    }

    fn add_buffer(&mut self) {
        let at = DATA + u64::try_from(self.rx.room()).unwrap() * 8192;
        let pieces = [Piece::Write(at, 44), Piece::Write(at + 44, BUFFER)];
        let head = self.rx.add(&self.guest.ram, &pieces);
        // The address of a chain follows from its head, so that `recv` can find it.
        let home = DATA + u64::from(head) * 8192;
        self.rx.put_desc(
            &self.guest.ram,
            head,
            home,
            44,
            3,
            head_next(&self.rx, head),
        );
        let next = head_next(&self.rx, head);
        self.rx
            .put_desc(&self.guest.ram, next, home + 44, BUFFER, 2, 0);
    }

    /// The next packet that the device has delivered. Its buffer is offered again.
    fn recv(&mut self) -> Option<Seen> {
        let (head, len) = self.rx.take(&self.guest.ram)?;
        let home = DATA + u64::from(head) * 8192;
        let bytes = self.guest.get(home, usize::try_from(len).unwrap());
        let word = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
        assert_eq!((word(0), word(8)), (2, 3), "CIDs");
        assert_eq!(word(24), len - 44, "length");
        assert!(bytes[30] == 3 || word(36) == BUF_ALLOC);
        let seen = Seen {
            host_port: word(16),
            guest_port: word(20),
            op: u16::from_le_bytes([bytes[30], bytes[31]]),
            flags: word(32),
            fwd_cnt: word(40),
            payload: bytes[44..].to_vec(),
        };
        self.add_buffer();
        let rx = self.rx.clone();
        self.guest.notify(&rx);
        Some(seen)
    }

    /// Waits for the next packet.
    fn expect(&mut self) -> Seen {
        let mut seen = self.recv();
        for _ in 0..20_000 {
            if let Some(seen) = seen {
                return seen;
            }
            self.guest.poll(Duration::from_millis(1));
            seen = self.recv();
        }
        panic!("no packet arrived");
    }

    fn expect_op(&mut self, op: u16) -> Seen {
        let seen = self.expect();
        assert_eq!(seen.op, op, "{seen:?}");
        seen
    }

    fn send(&mut self, op: u16, to: &Seen, flags: u32, payload: &[u8]) {
        let mut bytes = vec![0; 44];
        bytes[0] = 3;
        bytes[8] = 2;
        bytes[16..20].copy_from_slice(&to.guest_port.to_le_bytes());
        bytes[20..24].copy_from_slice(&to.host_port.to_le_bytes());
        let len = u32::try_from(payload.len()).unwrap();
        bytes[24..28].copy_from_slice(&len.to_le_bytes());
        bytes[28] = 1;
        bytes[30..32].copy_from_slice(&op.to_le_bytes());
        bytes[32..36].copy_from_slice(&flags.to_le_bytes());
        bytes[36..40].copy_from_slice(&WINDOW.to_le_bytes());
        bytes[40..44].copy_from_slice(&self.fwd_cnt.to_le_bytes());
        bytes.extend_from_slice(payload);
        self.guest.put(TX_DATA, &bytes);
        let mut pieces = vec![Piece::Read(TX_DATA, 44)];
        if len > 0 {
            pieces.push(Piece::Read(TX_DATA + 44, len));
        }
        self.tx.add(&self.guest.ram, &pieces);
        let tx = self.tx.clone();
        self.guest.notify(&tx);
        assert!(self.tx.take(&self.guest.ram).is_some());
    }

    /// Connects a client to guest port `port` and accepts the stream.
    fn connect(&mut self, port: u32) -> (UnixStream, Seen) {
        let mut client = UnixStream::connect(self.guest.vsock_path()).unwrap();
        client
            .write_all(format!("CONNECT {port}\n").as_bytes())
            .unwrap();
        let request = self.expect_op(REQUEST);
        assert_eq!(request.guest_port, port);
        self.fwd_cnt = 0;
        self.send(RESPONSE, &request, 0, b"");
        let mut line = [0; 64];
        let len = client.read(&mut line).unwrap();
        let expected = format!("OK {}\n", request.host_port);
        assert_eq!(&line[..len], expected.as_bytes());
        client.set_nonblocking(true).unwrap();
        (client, request)
    }
}

fn head_next(queue: &DriverQueue, head: u16) -> u16 {
    queue.chain(head)[1]
}

fn would_block(client: &mut UnixStream) -> bool {
    matches!(client.read(&mut [0; 1]), Err(error) if error.kind() == ErrorKind::WouldBlock)
}

fn at_end(client: &mut UnixStream) -> bool {
    matches!(client.read(&mut [0; 1]), Ok(0))
}

#[test]
fn a_client_connects_and_is_echoed() {
    let mut peer = Peer::new(16);
    let (mut client, stream) = peer.connect(5000);
    client.write_all(b"hello").unwrap();
    let seen = peer.expect_op(RW);
    assert_eq!(seen.payload, b"hello");
    assert!(peer.guest.raised.contains(VSOCK));
    peer.send(RW, &stream, 0, b"hello to you");
    let mut answer = [0; 64];
    let len = client.read(&mut answer).unwrap();
    assert_eq!(&answer[..len], b"hello to you");
}

#[test]
fn bytes_after_the_connect_line_belong_to_the_stream() {
    let mut peer = Peer::new(16);
    let mut client = UnixStream::connect(peer.guest.vsock_path()).unwrap();
    client.write_all(b"CONNECT 80\nGET / HTTP/1.1\r\n").unwrap();
    let request = peer.expect_op(REQUEST);
    peer.send(RESPONSE, &request, 0, b"");
    assert_eq!(peer.expect_op(RW).payload, b"GET / HTTP/1.1\r\n");
}

#[test]
fn a_connect_line_may_arrive_in_pieces_and_an_invalid_one_closes_the_client() {
    let mut peer = Peer::new(16);
    let mut client = UnixStream::connect(peer.guest.vsock_path()).unwrap();
    for piece in ["CONN", "ECT 7", "0\n"] {
        peer.guest.poll(Duration::from_millis(5));
        assert_eq!(peer.recv(), None);
        client.write_all(piece.as_bytes()).unwrap();
    }
    assert_eq!(peer.expect_op(REQUEST).guest_port, 70);
    let bad = [
        "CONNECT\n",
        "CONNECT -1\n",
        "CONNECT +1\n",
        "GET / HTTP/1.1\r\n",
        "CONNECT 4294967296\n",
    ];
    let long = "CONNECT 000000000000000000000000000000000001\n";
    for line in bad.into_iter().chain([long]) {
        let mut client = UnixStream::connect(peer.guest.vsock_path()).unwrap();
        client.write_all(line.as_bytes()).unwrap();
        client.set_nonblocking(true).unwrap();
        let mut ended = false;
        peer.guest.until(|_| {
            ended |= !would_block(&mut client);
            ended
        });
        assert_eq!(peer.recv(), None, "{line:?}");
    }
}

#[test]
fn a_refused_request_closes_the_client() {
    let mut peer = Peer::new(16);
    let mut client = UnixStream::connect(peer.guest.vsock_path()).unwrap();
    client.write_all(b"CONNECT 9\n").unwrap();
    let request = peer.expect_op(REQUEST);
    peer.send(RST, &request, 0, b"");
    assert!(at_end(&mut client));
    assert!(peer.guest.bus.state().vsock.open.is_empty());
}

#[test]
fn a_guest_cannot_open_streams() {
    let mut peer = Peer::new(16);
    let mut path = peer.guest.vsock_path().into_os_string();
    path.push("_6000");
    let listener = UnixListener::bind(path).unwrap();
    listener.set_nonblocking(true).unwrap();
    let asked = Seen {
        host_port: 6000,
        guest_port: 1234,
        op: REQUEST,
        flags: 0,
        fwd_cnt: 0,
        payload: Vec::new(),
    };
    peer.send(REQUEST, &asked, 0, b"");
    assert_eq!(peer.expect_op(RST).host_port, 6000);
    assert!(listener.accept().is_err(), "no client connects");
}

#[test]
fn ten_mebibytes_to_the_guest_respect_its_credit() {
    const TOTAL: usize = 10 << 20;
    let mut peer = Peer::new(40);
    let (client, stream) = peer.connect(5000);
    let data: Vec<u8> = (0..TOTAL)
        .map(|at| u8::try_from(at % 253).unwrap())
        .collect();
    let expected = data.clone();
    client.set_nonblocking(false).unwrap();
    let mut writer = client.try_clone().unwrap();
    let thread = std::thread::spawn(move || writer.write_all(&data).unwrap());
    let mut got = Vec::new();
    while got.len() < TOTAL {
        let taken = usize::try_from(peer.fwd_cnt).unwrap();
        if got.len() - taken == usize::try_from(WINDOW).unwrap() {
            peer.guest.poll(Duration::from_millis(2));
            assert_eq!(peer.recv(), None, "more than the window arrived");
            peer.fwd_cnt = u32::try_from(got.len()).unwrap();
            peer.send(CREDIT_UPDATE, &stream, 0, b"");
        }
        got.extend(peer.expect_op(RW).payload);
    }
    thread.join().unwrap();
    assert!(got == expected);
}

#[test]
fn ten_mebibytes_to_the_host_wait_for_a_slow_reader() {
    const TOTAL: usize = 10 << 20;
    const PIECE: usize = 60_000;
    let mut peer = Peer::new(16);
    let (mut client, stream) = peer.connect(5000);
    let data: Vec<u8> = (0..TOTAL)
        .map(|at| u8::try_from(at % 249).unwrap())
        .collect();
    let (mut sent, mut announced) = (0, 0);
    let mut got = Vec::new();
    let mut buffer = vec![0; 100_000];
    let mut stalls = 0;
    while got.len() < TOTAL {
        while let Some(seen) = peer.recv() {
            assert_eq!(seen.op, CREDIT_UPDATE);
            announced = usize::try_from(seen.fwd_cnt).unwrap();
        }
        let end = (sent + PIECE).min(TOTAL);
        if sent < TOTAL && end - announced <= usize::try_from(BUF_ALLOC).unwrap() {
            peer.send(RW, &stream, 0, &data[sent..end]);
            sent = end;
            continue;
        }
        stalls += 1;
        match client.read(&mut buffer) {
            Ok(len) => got.extend_from_slice(&buffer[..len]),
            Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock),
        }
        peer.guest.poll(Duration::from_millis(1));
    }
    assert!(stalls > 10, "there was back-pressure");
    assert!(got == data);
}

#[test]
fn a_guest_that_ignores_its_credit_is_reset() {
    let mut peer = Peer::new(16);
    let (_client, stream) = peer.connect(5000);
    for _ in 0..20 {
        peer.send(RW, &stream, 0, &[0; 60_000]);
    }
    let mut seen = peer.expect();
    while seen.op == CREDIT_UPDATE {
        seen = peer.expect();
    }
    assert_eq!(seen.op, RST);
    assert!(peer.guest.bus.state().vsock.open.is_empty());
}

#[test]
fn a_client_that_stops_writing_still_reads() {
    let mut peer = Peer::new(16);
    let (mut client, stream) = peer.connect(5000);
    client.write_all(b"question").unwrap();
    client.shutdown(Shutdown::Write).unwrap();
    assert_eq!(peer.expect_op(RW).payload, b"question");
    assert_eq!(peer.expect_op(SHUTDOWN).flags, 2);
    peer.send(RW, &stream, 0, b"answer");
    peer.send(SHUTDOWN, &stream, 3, b"");
    let mut answer = Vec::new();
    client.set_nonblocking(false).unwrap();
    client.read_to_end(&mut answer).unwrap();
    assert_eq!(answer, b"answer");
    peer.expect_op(RST);
    assert!(peer.guest.bus.state().vsock.open.is_empty());
}

#[test]
fn a_guest_that_stops_writing_still_reads() {
    let mut peer = Peer::new(16);
    let (mut client, stream) = peer.connect(5000);
    peer.send(RW, &stream, 0, b"all");
    peer.send(SHUTDOWN, &stream, 2, b"");
    let mut bytes = Vec::new();
    client.set_nonblocking(false).unwrap();
    client.read_to_end(&mut bytes).unwrap();
    assert_eq!(bytes, b"all");
    client.write_all(b"thanks").unwrap();
    assert_eq!(peer.expect_op(RW).payload, b"thanks");
    drop(client);
    assert_eq!(peer.expect_op(SHUTDOWN).flags, 3);
    peer.send(RST, &stream, 0, b"");
    assert!(peer.guest.bus.state().vsock.open.is_empty());
}

#[test]
fn data_of_a_client_that_closed_arrives_before_the_shutdown() {
    let mut peer = Peer::new(16);
    let (mut client, stream) = peer.connect(5000);
    client.write_all(&[9; 10_000]).unwrap();
    drop(client);
    let mut len = 0;
    let last = loop {
        let seen = peer.expect();
        if seen.op != RW {
            break seen;
        }
        len += seen.payload.len();
    };
    assert_eq!((len, last.op, last.flags), (10_000, SHUTDOWN, 3));
    // The response to data for an unknown stream is a reset.
    peer.send(RW, &stream, 0, b"late");
    peer.expect_op(RST);
}

#[test]
fn data_that_waits_for_a_slow_client_survives_the_guests_close() {
    let mut peer = Peer::new(16);
    let (mut client, stream) = peer.connect(5000);
    let data = vec![3; 60_000];
    for _ in 0..4 {
        peer.send(RW, &stream, 0, &data);
    }
    peer.send(SHUTDOWN, &stream, 3, b"");
    let mut got = 0;
    let mut buffer = vec![0; 4096];
    peer.guest.until(|_| {
        match client.read(&mut buffer) {
            Ok(len) => got += len,
            Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock),
        }
        got == 240_000
    });
    let mut seen = peer.expect();
    while seen.op == CREDIT_UPDATE {
        seen = peer.expect();
    }
    assert_eq!(seen.op, RST);
    assert!(at_end(&mut client));
}

#[test]
fn packets_of_unknown_streams_are_reset_and_invalid_ones_ignored() {
    let mut peer = Peer::new(16);
    let unknown = Seen {
        host_port: 1,
        guest_port: 2,
        op: 0,
        flags: 0,
        fwd_cnt: 0,
        payload: Vec::new(),
    };
    peer.send(RW, &unknown, 0, b"x");
    peer.expect_op(RST);
    peer.send(RST, &unknown, 0, b"");
    peer.send(77, &unknown, 0, b"");
    assert_eq!(peer.recv(), None);
}

#[test]
fn a_hundred_streams_live_side_by_side() {
    let mut peer = Peer::new(32);
    let mut streams: Vec<_> = (0..100).map(|port| peer.connect(port)).collect();
    for (client, stream) in &mut streams {
        client.write_all(&stream.guest_port.to_le_bytes()).unwrap();
    }
    let mut heard = Vec::new();
    for _ in 0..100 {
        let seen = peer.expect_op(RW);
        assert_eq!(seen.payload, seen.guest_port.to_le_bytes());
        peer.send(RW, &seen, 0, &seen.payload);
        heard.push(seen.guest_port);
    }
    heard.sort_unstable();
    assert_eq!(heard, (0..100).collect::<Vec<_>>());
    for (client, stream) in &mut streams {
        let mut echo = [0; 4];
        client.read_exact(&mut echo).unwrap();
        assert_eq!(echo, stream.guest_port.to_le_bytes());
    }
    assert_eq!(peer.guest.bus.state().vsock.open.len(), 100);
}

#[test]
fn requests_wait_for_the_guests_buffers_and_for_its_driver() {
    let mut guest = Guest::new();
    let clients: Vec<_> = (0..20_u32)
        .map(|port| {
            let mut client = UnixStream::connect(guest.vsock_path()).unwrap();
            client
                .write_all(format!("CONNECT {port}\n").as_bytes())
                .unwrap();
            client
        })
        .collect();
    guest.poll(Duration::from_millis(10));
    let mut queues = guest.init(VSOCK, 0);
    let tx = queues.remove(1);
    let rx = queues.remove(0);
    let mut peer = Peer {
        guest,
        rx,
        tx,
        fwd_cnt: 0,
    };
    for _ in 0..3 {
        peer.add_buffer();
    }
    let rx = peer.rx.clone();
    peer.guest.notify(&rx);
    for port in 0..20 {
        assert_eq!(peer.expect_op(REQUEST).guest_port, port);
    }
    drop(clients);
}

#[test]
fn clients_without_a_connect_line_are_limited() {
    let mut peer = Peer::new(16);
    let silent: Vec<_> = (0..200)
        .map(|_| {
            let client = UnixStream::connect(peer.guest.vsock_path()).unwrap();
            peer.guest.poll(Duration::from_millis(1));
            client
        })
        .collect();
    let mut first = &silent[0];
    assert_eq!(first.read(&mut [0; 1]).unwrap(), 0, "the oldest went");
    peer.connect(80);
}

#[test]
fn streams_of_the_vmm_get_no_greeting() {
    let mut peer = Peer::new(16);
    let (mut near, far) = UnixStream::pair().unwrap();
    peer.guest.raised |=
        peer.guest
            .bus
            .connect_guest(49983, far, &peer.guest.ram, &mut peer.guest.watch);
    let request = peer.expect_op(REQUEST);
    assert_eq!(request.guest_port, 49983);
    near.write_all(b"GET /health").unwrap();
    peer.send(RESPONSE, &request, 0, b"");
    assert_eq!(peer.expect_op(RW).payload, b"GET /health");
    near.set_nonblocking(true).unwrap();
    assert!(would_block(&mut near));
}

#[test]
fn a_snapshots_streams_are_reset_in_order_and_port_numbers_continue() {
    let mut peer = Peer::new(16);
    let streams: Vec<_> = (0..3).map(|port| peer.connect(port + 10)).collect();
    let state = peer.guest.bus.state();
    let last = streams[2].1.host_port;
    let Peer { guest, rx, tx, .. } = peer;
    let guest = guest.restore(&state).unwrap();
    assert!(guest.raised.contains(VSOCK));
    let mut peer = Peer {
        guest,
        rx,
        tx,
        fwd_cnt: 0,
    };
    for (_, stream) in &streams {
        let seen = peer.expect_op(RST);
        assert_eq!(
            (seen.host_port, seen.guest_port),
            (stream.host_port, stream.guest_port)
        );
    }
    let (_client, stream) = peer.connect(80);
    assert_eq!(stream.host_port, last + 1);
}

#[test]
fn a_driver_reset_closes_all_clients() {
    let mut peer = Peer::new(16);
    let (mut client, _) = peer.connect(80);
    peer.guest.write(VSOCK, 0x70, 0);
    assert!(at_end(&mut client));
    assert!(peer.guest.bus.state().vsock.open.is_empty());
}

#[test]
fn no_client_waits_for_a_guest_that_has_ended() {
    let mut peer = Peer::new(1);
    let (mut known, _) = peer.connect(80);
    let mut connect = |line: &[u8]| {
        let mut client = UnixStream::connect(peer.guest.vsock_path()).unwrap();
        client.write_all(line).unwrap();
        peer.guest.poll(Duration::from_millis(50));
        client.set_nonblocking(true).unwrap();
        assert!(would_block(&mut client));
        client
    };
    // The guest has no receive buffer for its REQUEST.
    let mut unseen = connect(b"CONNECT 81\n");
    let mut partial = connect(b"CONN");
    peer.guest.bus.hang_up(&mut peer.guest.watch);
    // A client with unread data gets ECONNRESET instead of end-of-file.
    for client in [&mut known, &mut unseen, &mut partial] {
        assert!(!would_block(client));
    }
    assert!(peer.guest.bus.state().vsock.open.is_empty());
}

#[test]
fn buffers_without_room_for_a_payload_come_back_empty() {
    let mut peer = Peer::new(0);
    let mut client = UnixStream::connect(peer.guest.vsock_path()).unwrap();
    client.write_all(b"CONNECT 5000\nx").unwrap();
    peer.guest.poll(Duration::from_millis(50));
    for len in [1, 43, 44] {
        peer.rx.add(&peer.guest.ram, &[Piece::Write(DATA, len)]);
    }
    peer.guest.notify(&peer.rx);
    for _ in 0..3 {
        assert_eq!(peer.rx.take(&peer.guest.ram).unwrap().1, 0);
    }
    peer.add_buffer();
    peer.guest.notify(&peer.rx);
    peer.expect_op(REQUEST);
}

#[test]
fn a_full_table_drops_only_abandoned_streams() {
    let mut peer = Peer::new(16);
    let mut clients: Vec<_> = (0..512).map(|port| peer.connect(port)).collect();
    let mut refused = UnixStream::connect(peer.guest.vsock_path()).unwrap();
    refused.write_all(b"CONNECT 1\n").unwrap();
    peer.guest.poll(Duration::from_millis(50));
    assert!(at_end(&mut refused));

    let (gone, stream) = clients.remove(7);
    drop(gone);
    assert_eq!(peer.expect_op(SHUTDOWN).flags, 3);
    let mut client = UnixStream::connect(peer.guest.vsock_path()).unwrap();
    client.write_all(b"CONNECT 1\n").unwrap();
    assert_eq!(peer.expect_op(RST).guest_port, stream.guest_port);
    peer.expect_op(REQUEST);
}
