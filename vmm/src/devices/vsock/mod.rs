//! virtio-vsock (virtio 1.2, 5.10) in user space: streams between guest ports and unix sockets.
//!
//! ```text
//! client ─ "CONNECT 5000\n" ─► socket ─► stream to guest port 5000; "OK <host port>\n", then bytes
//! guest  ─ REQUEST to any host port ─► RST: a guest opens no streams
//! ```
//! All streams share the device's two queues. Streams with something to say stand in a line, each gets one
//! packet per turn. Everything is bounded: clients that have not asked yet, streams, bytes per stream and
//! resets that wait for a buffer.

mod line;
mod listener;
mod packet;
mod stream;

#[cfg(test)]
mod tests;

use std::collections::{HashMap, VecDeque};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;

use serde::{Deserialize, Serialize};

use super::buffers::Buffers;
use super::queue::{Chain, Virtqueue};
use super::registers::{COMMON_FEATURES, Identity};
use super::state::DeviceStateError;
use super::{DeviceError, FIRST_TOKEN, Io, Ram, VirtioDevice};
use crate::watch::{Interest, Watch};
use line::{Turn, TurnLine};
use listener::{Line, Listener, read_line};
use packet::{Credit, GUEST_CID, HEADER, Key, Op, Packet};
use stream::{Greeting, ROOM_MIN, Stream, Verdict};

const DEVICE_ID: u32 = 19;
const RX: usize = 0;
const TX: usize = 1;
/// Streams at a time; more are refused.
const STREAMS_MAX: usize = 512;
/// Clients that have connected and not asked yet; the oldest makes room for the next.
const CLIENTS_MAX: usize = 64;
/// Resets that wait for a buffer of the guest; more are not sent, and the guest's own time-outs serve.
const RESETS_MAX: usize = 2 * STREAMS_MAX;
/// Host ports of streams that the host opens count up from here.
const FIRST_HOST_PORT: u32 = 1 << 30;

const LISTENER_TOKEN: u64 = FIRST_TOKEN + 1;
const FIRST_STREAM_TOKEN: u64 = FIRST_TOKEN << 1;

/// What a snapshot keeps of the streams.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VsockState {
    /// Host port of the next stream that the host opens.
    pub next_host_port: u32,
    /// Host and guest port of each stream that the guest believes open, in the order of their making.
    pub open: Vec<(u32, u32)>,
}

/// The vsock device.
#[derive(Debug)]
pub(super) struct Vsock {
    listener: Listener,
    clients: VecDeque<(u64, UnixStream)>,
    /// By token of the watch; tokens count up, so their order is that of the streams' making.
    streams: HashMap<u64, Stream>,
    by_key: HashMap<Key, u64>,
    next_token: u64,
    next_host_port: u32,
    line: TurnLine,
}

impl Vsock {
    pub(super) fn new(socket: OwnedFd, watch: &mut Watch) -> Result<Self, DeviceError> {
        let failed = |source| DeviceError::Listen { source };
        let listener = Listener::new(socket).map_err(failed)?;
        watch
            .add(listener.socket(), LISTENER_TOKEN, Interest::ReadEdge)
            .map_err(failed)?;
        Ok(Self {
            listener,
            clients: VecDeque::new(),
            streams: HashMap::new(),
            by_key: HashMap::new(),
            next_token: FIRST_STREAM_TOKEN,
            next_host_port: FIRST_HOST_PORT,
            line: TurnLine::default(),
        })
    }

    pub(super) fn identity() -> Identity {
        Identity {
            device_id: DEVICE_ID,
            features: COMMON_FEATURES,
            queue_sizes: &[128, 128, 16],
            config: GUEST_CID.to_le_bytes().to_vec(),
        }
    }

    pub(super) fn state(&self) -> VsockState {
        let mut tokens: Vec<_> = self.streams.iter().collect();
        tokens.sort_by_key(|(token, _)| **token);
        let known = tokens.iter().filter(|(_, stream)| stream.known_to_guest());
        let keys = self
            .line
            .resets()
            .chain(known.map(|(_, stream)| stream.key));
        VsockState {
            next_host_port: self.next_host_port,
            open: keys.map(|key| (key.host_port, key.guest_port)).collect(),
        }
    }

    /// Goes on from a snapshot: its streams have lost their sockets and are reset, in order.
    pub(super) fn restore(&mut self, state: &VsockState) -> Result<(), DeviceStateError> {
        let limit = RESETS_MAX + STREAMS_MAX;
        let found = state.open.len();
        if found > limit {
            return Err(DeviceStateError::StreamCount { found, limit });
        }
        self.next_host_port = state.next_host_port.max(FIRST_HOST_PORT);
        for &(host_port, guest_port) in &state.open {
            let key = Key {
                host_port,
                guest_port,
            };
            self.line.push_reset(key, limit);
        }
        Ok(())
    }

    /// Begins a stream to a guest port; its token, or `None` when there is no room.
    pub(super) fn connect_guest(
        &mut self,
        port: u32,
        socket: UnixStream,
        watch: &mut Watch,
    ) -> Option<u64> {
        socket.set_nonblocking(true).ok()?;
        let token = self.take_token();
        watch.add(&socket, token, Interest::ReadEdge).ok()?;
        self.begin(token, port, socket, Greeting::None, watch)
    }

    fn begin(
        &mut self,
        token: u64,
        guest_port: u32,
        socket: UnixStream,
        greeting: Greeting,
        watch: &mut Watch,
    ) -> Option<u64> {
        if !self.make_room(watch) {
            return None;
        }
        let key = self.free_key(guest_port);
        let stream = Stream::asked_by_host(key, socket, greeting);
        self.insert(token, stream);
        Some(token)
    }

    fn insert(&mut self, token: u64, stream: Stream) {
        self.by_key.insert(stream.key, token);
        self.streams.insert(token, stream);
        self.line_up(token);
    }

    /// Puts a stream that has something to say at the end of the line, once.
    fn line_up(&mut self, token: u64) {
        if self.streams.get(&token).is_some_and(Stream::has_packet) {
            self.line.push_stream(token);
        }
    }

    /// Whether a stream more can be; one that only waits for the guest's last word makes room.
    fn make_room(&mut self, watch: &mut Watch) -> bool {
        if self.streams.len() < STREAMS_MAX {
            return true;
        }
        let over = self.streams.iter().filter(|(_, stream)| stream.is_over());
        let Some((&token, stream)) = over.min_by_key(|(token, _)| **token) else {
            return false;
        };
        let key = stream.key;
        self.remove(token, watch);
        self.reset(key);
        true
    }

    /// A host port that no stream to this guest port uses.
    fn free_key(&mut self, guest_port: u32) -> Key {
        loop {
            let host_port = self.next_host_port;
            self.next_host_port = host_port.checked_add(1).unwrap_or(FIRST_HOST_PORT);
            let key = Key {
                host_port,
                guest_port,
            };
            if !self.by_key.contains_key(&key) {
                return key;
            }
        }
    }

    fn take_token(&mut self) -> u64 {
        let token = self.next_token;
        self.next_token += 1;
        token
    }

    /// Takes all waiting clients; those that have asked already become streams at once.
    fn accept(&mut self, watch: &mut Watch) {
        while let Some(client) = self.listener.accept() {
            let token = self.take_token();
            if watch.add(&client, token, Interest::ReadEdge).is_err() {
                continue;
            }
            if self.clients.len() == CLIENTS_MAX {
                self.clients.pop_front();
            }
            self.clients.push_back((token, client));
            self.hear(token, watch);
        }
    }

    /// Reads the line of a client. Whether the token is one's.
    fn hear(&mut self, token: u64, watch: &mut Watch) -> bool {
        let Some(index) = self.clients.iter().position(|(own, _)| *own == token) else {
            return false;
        };
        match read_line(&self.clients[index].1) {
            Line::Partial => {}
            Line::Bad => {
                self.clients.remove(index);
            }
            Line::Port(port) => {
                if let Some((token, client)) = self.clients.remove(index) {
                    self.begin(token, port, client, Greeting::Line, watch);
                }
            }
        }
        true
    }

    /// A stream's socket became ready.
    fn stream_ready(&mut self, token: u64, watch: &mut Watch) {
        let Some(stream) = self.streams.get_mut(&token) else {
            return;
        };
        let congested = stream.congested();
        let verdict = stream.socket_ready();
        self.conclude(token, verdict, congested, watch);
    }

    /// Does what a stream's verdict asks for, and watches for room in its socket while it is full.
    fn conclude(&mut self, token: u64, verdict: Verdict, was_congested: bool, watch: &mut Watch) {
        let Some(stream) = self.streams.get(&token) else {
            return;
        };
        let key = stream.key;
        match verdict {
            Verdict::Keep => {
                let interest = if stream.congested() {
                    Interest::ReadWriteEdge
                } else {
                    Interest::ReadEdge
                };
                let changed = stream.congested() != was_congested;
                let watched = !changed || watch.modify(&stream.socket, token, interest).is_ok();
                if !watched {
                    self.remove(token, watch);
                    self.reset(key);
                } else {
                    self.line_up(token);
                }
            }
            Verdict::Forget => self.remove(token, watch),
            Verdict::Reset => {
                self.remove(token, watch);
                self.reset(key);
            }
        }
    }

    fn remove(&mut self, token: u64, watch: &mut Watch) {
        if let Some(stream) = self.streams.remove(&token) {
            self.by_key.remove(&stream.key);
            let _closed_anyway = watch.remove(&stream.socket);
            self.line.forget_stream(token);
        }
    }

    fn reset(&mut self, key: Key) {
        self.line.push_reset(key, RESETS_MAX);
    }

    /// Takes the guest's packets.
    fn transmit(&mut self, io: &mut Io<'_>) {
        let Some(queue) = io.queues.get_mut(TX) else {
            return;
        };
        loop {
            while let Some(chain) = queue.pop(io.ram) {
                let head = chain.head;
                self.take(chain, io.watch);
                queue.complete(io.ram, head, 0);
            }
            if !queue.await_kick(io.ram) {
                return;
            }
        }
    }

    fn take(&mut self, chain: Chain<'_>, watch: &mut Watch) {
        let mut payload = chain.readable;
        let mut header = [0; HEADER];
        let Some(front) = payload.split_front(HEADER) else {
            return;
        };
        front.read(&mut header);
        let Some(packet) = Packet::decode(&header) else {
            return;
        };
        let len = usize::try_from(packet.len).unwrap_or(usize::MAX);
        let whole = payload.split_off(len).is_some();
        match self.by_key.get(&packet.key) {
            Some(&token) => self.take_known(token, &packet, whole.then_some(payload), watch),
            None => self.take_unknown(&packet),
        }
    }

    fn take_known(
        &mut self,
        token: u64,
        packet: &Packet,
        payload: Option<Buffers<'_>>,
        watch: &mut Watch,
    ) {
        let Some(stream) = self.streams.get_mut(&token) else {
            return;
        };
        let congested = stream.congested();
        let verdict = match payload {
            Some(payload) => stream.take(packet, payload),
            None => Verdict::Reset,
        };
        self.conclude(token, verdict, congested, watch);
    }

    /// A packet of no stream is reset, but for a reset.
    fn take_unknown(&mut self, packet: &Packet) {
        if packet.op != Op::Reset {
            self.reset(packet.key);
        }
    }

    /// Gives the guest packets while there are both packets and buffers.
    fn receive(&mut self, io: &mut Io<'_>) {
        let Some(queue) = io.queues.get_mut(RX) else {
            return;
        };
        while let Some(turn) = self.next_turn() {
            let Some(chain) = queue.pop(io.ram) else {
                self.line.put_back(turn);
                if queue.await_kick(io.ram) {
                    continue;
                }
                return;
            };
            self.serve(turn, chain, queue, io.ram);
        }
    }

    /// The next turn that may lead to a packet: a socket may still turn out to be empty.
    fn next_turn(&mut self) -> Option<Turn> {
        while let Some(turn) = self.line.pop() {
            match turn {
                Turn::Stream(token)
                    if !self.streams.get(&token).is_some_and(Stream::has_packet) => {}
                _ => return Some(turn),
            }
        }
        None
    }

    fn serve(&mut self, turn: Turn, chain: Chain<'_>, queue: &mut Virtqueue, ram: &Ram) {
        let Chain {
            head, mut writable, ..
        } = chain;
        if writable.len() < ROOM_MIN {
            self.line.put_back(turn);
            return queue.complete(ram, head, 0);
        }
        let payload = writable.split_off(HEADER).unwrap_or_default();
        let written = match turn {
            Turn::Reset(key) => {
                writable.write(&reset_packet(key).encode());
                Some(0)
            }
            Turn::Stream(token) => self.serve_stream(token, &writable, payload),
        };
        match written {
            Some(len) => queue.complete(ram, head, u32::try_from(HEADER).unwrap_or(0) + len),
            None => queue.undo_pop(),
        }
    }

    fn serve_stream(
        &mut self,
        token: u64,
        header: &Buffers<'_>,
        payload: Buffers<'_>,
    ) -> Option<u32> {
        let stream = self.streams.get_mut(&token)?;
        let written = stream.next_packet(header, payload);
        self.line_up(token);
        written
    }
}

fn reset_packet(key: Key) -> Packet {
    Packet {
        key,
        op: Op::Reset,
        len: 0,
        flags: 0,
        credit: Credit::default(),
    }
}

impl VirtioDevice for Vsock {
    fn activate(&mut self, _features: u64, io: &mut Io<'_>) {
        self.receive(io);
    }

    fn reset(&mut self, watch: &mut Watch) {
        let known = self
            .streams
            .iter()
            .filter(|(_, stream)| stream.known_to_guest());
        let known: Vec<u64> = known.map(|(token, _)| *token).collect();
        known
            .into_iter()
            .for_each(|token| self.remove(token, watch));
        // Who asked before the driver was there still waits for it.
        self.line.forget_resets();
    }

    fn notify(&mut self, queue: usize, io: &mut Io<'_>) {
        if queue == TX {
            self.transmit(io);
        }
        self.receive(io);
    }

    fn ready(&mut self, token: u64, io: &mut Io<'_>) {
        if token == LISTENER_TOKEN {
            self.accept(io.watch);
        } else if !self.hear(token, io.watch) {
            self.stream_ready(token, io.watch);
        }
        self.receive(io);
    }
}
