//! virtio-vsock (virtio 1.2, 5.10) in user space: streams between guest ports and unix sockets.
//!
//! ```text
//! client ─ "CONNECT 5000\n" ─► socket ─► stream to guest port 5000; "OK <host port>\n", then bytes
//! guest  ─ REQUEST to any host port ─► RST: only the host opens streams
//! ```
//! All streams share the device's two queues. Streams with data for the guest take turns, one packet each
//! ([`packet_queue`]). Everything is bounded: clients that have not sent their `CONNECT` line, streams, bytes per
//! stream and resets that wait for a receive buffer.

mod listener;
mod packet;
mod packet_queue;
mod stream;

#[cfg(test)]
mod tests;

use std::collections::{HashMap, VecDeque};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;

use super::backend::DeviceError;
use super::buffers::Buffers;
use super::device::{Io, VirtioDevice};
use super::queue::{Chain, Virtqueue};
use super::ram::Ram;
use super::registers::{COMMON_FEATURES, Identity};
use super::state::{DeviceStateError, VsockState};
use crate::watch::{DeviceToken, Interest, Token, Watch};
use listener::{ConnectLine, Listener, read_line};
use packet::{Credit, GUEST_CID, HEADER, Key, Op, Packet};
use packet_queue::{PacketQueue, PacketSource};
use stream::{Greeting, ROOM_MIN, Stream, StreamAction};

const DEVICE_ID: u32 = 19;
const RX: usize = 0;
const TX: usize = 1;
/// Limit on concurrent streams. Further connections are closed.
const STREAMS_MAX: usize = 512;
/// Limit on clients that have not sent their `CONNECT` line. The next client replaces the oldest.
const CLIENTS_MAX: usize = 64;
/// Limit on resets that wait for a receive buffer. Further resets are dropped: the guest's streams then time out.
const RESETS_MAX: usize = 2 * STREAMS_MAX;
/// Host port of the first stream. Later streams count up from it, skip ports in use, and start over after `u32::MAX`.
const FIRST_HOST_PORT: u32 = 1 << 30;

/// The vsock device.
#[derive(Debug)]
pub(super) struct Vsock {
    listener: Listener,
    /// Clients that have not sent their whole `CONNECT` line, oldest first.
    clients: VecDeque<(u64, UnixStream)>,
    /// Streams by id. Ids count up, so their order is the order of creation.
    streams: HashMap<u64, Stream>,
    by_key: HashMap<Key, u64>,
    /// Id of the next client or stream. A client keeps its id when it becomes a stream.
    next_id: u64,
    next_host_port: u32,
    packets: PacketQueue,
}

impl Vsock {
    pub(super) fn new(socket: OwnedFd, watch: &mut Watch) -> Result<Self, DeviceError> {
        let failed = |source| DeviceError::Listen { source };
        let listener = Listener::new(socket).map_err(failed)?;
        watch
            .add(
                listener.socket(),
                Token::Device(DeviceToken::VsockListener),
                Interest::ReadEdge,
            )
            .map_err(failed)?;
        Ok(Self {
            listener,
            clients: VecDeque::new(),
            streams: HashMap::new(),
            by_key: HashMap::new(),
            next_id: 0,
            next_host_port: FIRST_HOST_PORT,
            packets: PacketQueue::default(),
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
        let mut streams: Vec<_> = self.streams.iter().collect();
        streams.sort_by_key(|(id, _)| **id);
        let known = streams.iter().filter(|(_, stream)| stream.known_to_guest());
        let keys = self
            .packets
            .resets()
            .chain(known.map(|(_, stream)| stream.key));
        VsockState {
            next_host_port: self.next_host_port,
            open: keys.map(|key| (key.host_port, key.guest_port)).collect(),
        }
    }

    /// Queues a reset for each stream of a snapshot, because the new process does not have the streams' sockets.
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
            self.packets.push_reset(key, limit);
        }
        Ok(())
    }

    /// Closes all clients and streams, including those that the guest has not seen.
    pub(super) fn hang_up(&mut self, watch: &mut Watch) {
        self.clients.clear();
        let ids: Vec<u64> = self.streams.keys().copied().collect();
        ids.into_iter().for_each(|id| self.remove(id, watch));
    }

    /// Opens a stream to a guest port. Returns the token with which to serve it. Returns `None`, and closes the socket,
    /// if the limit on streams is reached or the socket cannot be watched.
    pub(super) fn connect_guest(
        &mut self,
        port: u32,
        socket: UnixStream,
        watch: &mut Watch,
    ) -> Option<DeviceToken> {
        socket.set_nonblocking(true).ok()?;
        let id = self.take_id();
        watch.add(&socket, token(id), Interest::ReadEdge).ok()?;
        self.open(id, port, socket, Greeting::None, watch)?;
        Some(DeviceToken::VsockStream(id))
    }

    fn open(
        &mut self,
        id: u64,
        guest_port: u32,
        socket: UnixStream,
        greeting: Greeting,
        watch: &mut Watch,
    ) -> Option<()> {
        if !self.make_room(watch) {
            return None;
        }
        let key = self.free_key(guest_port);
        let stream = Stream::new(key, socket, greeting);
        self.by_key.insert(key, id);
        self.streams.insert(id, stream);
        self.enqueue(id);
        Some(())
    }

    /// Queues a stream if it may have a packet for the guest.
    fn enqueue(&mut self, id: u64) {
        if self.streams.get(&id).is_some_and(Stream::has_packet) {
            self.packets.push_stream(id);
        }
    }

    /// Makes room for another stream: at the limit, resets the oldest stream whose client has left. Returns whether
    /// there is room.
    fn make_room(&mut self, watch: &mut Watch) -> bool {
        if self.streams.len() < STREAMS_MAX {
            return true;
        }
        let abandoned = self.streams.iter().filter(|(_, stream)| stream.gone());
        let Some((&id, stream)) = abandoned.min_by_key(|(id, _)| **id) else {
            return false;
        };
        let key = stream.key;
        self.remove(id, watch);
        self.reset(key);
        true
    }

    /// A key for this guest port with an unused host port.
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

    fn take_id(&mut self) -> u64 {
        let id = self.next_id;
        self.next_id += 1;
        id
    }

    /// Accepts all waiting clients, and reads the `CONNECT` lines that have already arrived. At the limit on clients,
    /// drops the oldest.
    fn accept(&mut self, watch: &mut Watch) {
        while let Some(client) = self.listener.accept() {
            let id = self.take_id();
            if watch.add(&client, token(id), Interest::ReadEdge).is_err() {
                continue;
            }
            if self.clients.len() == CLIENTS_MAX {
                self.clients.pop_front();
            }
            self.clients.push_back((id, client));
            self.read_client(id, watch);
        }
    }

    /// Reads from a client that has not sent its `CONNECT` line. Returns false if `id` is not such a client.
    fn read_client(&mut self, id: u64, watch: &mut Watch) -> bool {
        let Some(index) = self.clients.iter().position(|(own, _)| *own == id) else {
            return false;
        };
        match read_line(&self.clients[index].1) {
            ConnectLine::Partial => {}
            ConnectLine::Invalid => {
                self.clients.remove(index);
            }
            ConnectLine::Port(port) => {
                if let Some((id, client)) = self.clients.remove(index) {
                    self.open(id, port, client, Greeting::Line, watch);
                }
            }
        }
        true
    }

    fn stream_ready(&mut self, id: u64, watch: &mut Watch) {
        let Some(stream) = self.streams.get_mut(&id) else {
            return;
        };
        let was_congested = stream.congested();
        let action = stream.socket_ready();
        self.apply(id, action, was_congested, watch);
    }

    /// Carries out the action that a stream requires. Watches the stream's socket for writability only while bytes wait
    /// to be written to it.
    fn apply(&mut self, id: u64, action: StreamAction, was_congested: bool, watch: &mut Watch) {
        let Some(stream) = self.streams.get(&id) else {
            return;
        };
        let key = stream.key;
        match action {
            StreamAction::Keep => {
                let interest = if stream.congested() {
                    Interest::ReadWriteEdge
                } else {
                    Interest::ReadEdge
                };
                let changed = stream.congested() != was_congested;
                let watched = !changed || watch.modify(&stream.socket, token(id), interest).is_ok();
                if watched {
                    self.enqueue(id);
                } else {
                    self.remove(id, watch);
                    self.reset(key);
                }
            }
            StreamAction::Remove => self.remove(id, watch),
            StreamAction::Reset => {
                self.remove(id, watch);
                self.reset(key);
            }
        }
    }

    fn remove(&mut self, id: u64, watch: &mut Watch) {
        if let Some(stream) = self.streams.remove(&id) {
            self.by_key.remove(&stream.key);
            let _closed_anyway = watch.remove(&stream.socket);
            self.packets.remove_stream(id);
        }
    }

    fn reset(&mut self, key: Key) {
        self.packets.push_reset(key, RESETS_MAX);
    }

    /// Handles the packets that the guest sent.
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
            Some(&id) => self.take_known(id, &packet, whole.then_some(payload), watch),
            None => self.take_unknown(&packet),
        }
    }

    fn take_known(
        &mut self,
        id: u64,
        packet: &Packet,
        payload: Option<Buffers<'_>>,
        watch: &mut Watch,
    ) {
        let Some(stream) = self.streams.get_mut(&id) else {
            return;
        };
        let was_congested = stream.congested();
        let action = match payload {
            Some(payload) => stream.take(packet, payload),
            None => StreamAction::Reset,
        };
        self.apply(id, action, was_congested, watch);
    }

    /// Sends a reset in response to a packet that belongs to no stream, unless the packet is a reset.
    fn take_unknown(&mut self, packet: &Packet) {
        if packet.op != Op::Reset {
            self.reset(packet.key);
        }
    }

    /// Sends packets to the guest while there are both packets and receive buffers.
    fn receive(&mut self, io: &mut Io<'_>) {
        let Some(queue) = io.queues.get_mut(RX) else {
            return;
        };
        while let Some(source) = self.next_source() {
            let Some(chain) = queue.pop(io.ram) else {
                self.packets.put_back(source);
                if queue.await_kick(io.ram) {
                    continue;
                }
                return;
            };
            self.serve(source, chain, queue, io.ram);
        }
    }

    /// The next source that may have a packet. A stream's socket can turn out to be empty.
    fn next_source(&mut self) -> Option<PacketSource> {
        while let Some(source) = self.packets.pop() {
            match source {
                PacketSource::Stream(id)
                    if !self.streams.get(&id).is_some_and(Stream::has_packet) => {}
                _ => return Some(source),
            }
        }
        None
    }

    fn serve(&mut self, source: PacketSource, chain: Chain<'_>, queue: &mut Virtqueue, ram: &Ram) {
        let Chain {
            head, mut writable, ..
        } = chain;
        if writable.len() < ROOM_MIN {
            self.packets.put_back(source);
            return queue.complete(ram, head, 0);
        }
        let payload = writable.split_off(HEADER).unwrap_or_default();
        let written = match source {
            PacketSource::Reset(key) => {
                writable.write(&reset_packet(key).encode());
                Some(0)
            }
            PacketSource::Stream(id) => self.serve_stream(id, &writable, payload),
        };
        match written {
            Some(len) => queue.complete(ram, head, u32::try_from(HEADER).unwrap_or(0) + len),
            None => queue.undo_pop(),
        }
    }

    fn serve_stream(&mut self, id: u64, header: &Buffers<'_>, payload: Buffers<'_>) -> Option<u32> {
        let stream = self.streams.get_mut(&id)?;
        let written = stream.next_packet(header, payload);
        self.enqueue(id);
        written
    }
}

/// The watch's token for a client or stream.
fn token(id: u64) -> Token {
    Token::Device(DeviceToken::VsockStream(id))
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
        let known: Vec<u64> = known.map(|(id, _)| *id).collect();
        known.into_iter().for_each(|id| self.remove(id, watch));
        // Streams that the guest has not seen yet stay: their clients connected before the driver was ready.
        self.packets.remove_resets();
    }

    fn notify(&mut self, queue: usize, io: &mut Io<'_>) {
        if queue == TX {
            self.transmit(io);
        }
        self.receive(io);
    }

    fn ready(&mut self, token: DeviceToken, io: &mut Io<'_>) {
        match token {
            DeviceToken::VsockListener => self.accept(io.watch),
            DeviceToken::VsockStream(id) => {
                if !self.read_client(id, io.watch) {
                    self.stream_ready(id, io.watch);
                }
            }
            DeviceToken::Tap | DeviceToken::Backlog => {}
        }
        self.receive(io);
    }
}
