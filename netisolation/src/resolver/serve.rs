//! The sockets.

use std::{
    convert::Infallible,
    io,
    net::SocketAddr,
    sync::Arc,
    time::{Duration, Instant},
};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream, UdpSocket},
    sync::Semaphore,
    task::JoinSet,
    time::{MissedTickBehavior, interval, sleep, timeout},
};

use super::{
    Client, Judgement, Resolver,
    query::{self, MAX_MESSAGE, MAX_QUERY, MAX_UNREAD},
};
use crate::event::Protocol;

/// For the next message of a connection to be complete, and for a reply to be taken.
const IDLE: Duration = Duration::from_secs(10);
/// Connections of all sandboxes, at most.
const MAX_CONNECTIONS: usize = 2048;
/// Before a socket is asked again that has just failed.
const PAUSE: Duration = Duration::from_millis(100);
/// How often refusals are summed up.
const TICK: Duration = Duration::from_secs(1);

impl Resolver {
    /// Answers on these sockets until the future is dropped; every task of it ends then. May run for several pairs at
    /// a time.
    ///
    /// # Errors
    /// The sockets cannot be used by this runtime.
    pub async fn serve(
        self: Arc<Self>,
        udp: std::net::UdpSocket,
        tcp: std::net::TcpListener,
    ) -> io::Result<Infallible> {
        udp.set_nonblocking(true)?;
        tcp.set_nonblocking(true)?;
        let replies = Replies(Arc::new(udp.try_clone()?));
        let udp = UdpSocket::from_std(udp)?;
        let tcp = TcpListener::from_std(tcp)?;
        tokio::select! {
            never = Arc::clone(&self).serve_datagrams(udp, replies) => Ok(never),
            never = Arc::clone(&self).serve_connections(tcp) => Ok(never),
            never = self.tick() => Ok(never),
        }
    }

    async fn serve_datagrams(self: Arc<Self>, udp: UdpSocket, replies: Replies) -> Infallible {
        let mut tasks = JoinSet::new();
        // One byte more, so that what is too long is seen to be.
        let mut buffer = vec![0; MAX_QUERY + 1];
        loop {
            while tasks.try_join_next().is_some() {}
            let (length, source) = match udp.recv_from(&mut buffer).await {
                Ok(received) => received,
                Err(_) => {
                    sleep(PAUSE).await;
                    continue;
                }
            };
            let bytes = buffer.get(..length).unwrap_or_default();
            match self.judge(source, Protocol::Udp, bytes) {
                Judgement::Silence => {}
                Judgement::Reply(reply) => {
                    replies.send(source, query::encode(&reply, MAX_UNREAD));
                }
                Judgement::Ask(ask) => {
                    let (resolver, replies) = (Arc::clone(&self), replies.clone());
                    tasks.spawn(async move {
                        let reply = resolver.resolve(&ask).await;
                        let most = ask.question.max_datagram();
                        if resolver.is_there(source, &ask.client) {
                            replies.send(source, query::encode(&reply, most));
                        }
                    });
                }
            }
        }
    }

    async fn serve_connections(self: Arc<Self>, tcp: TcpListener) -> Infallible {
        let mut tasks = JoinSet::new();
        let places = Arc::new(Semaphore::new(MAX_CONNECTIONS));
        loop {
            while tasks.try_join_next().is_some() {}
            let (stream, source) = match tcp.accept().await {
                Ok(accepted) => accepted,
                Err(_) => {
                    sleep(PAUSE).await;
                    continue;
                }
            };
            // Without a place the connection closes.
            let Ok(place) = Arc::clone(&places).try_acquire_owned() else {
                continue;
            };
            let resolver = Arc::clone(&self);
            tasks.spawn(async move {
                resolver.converse(stream, source).await;
                drop(place);
            });
        }
    }

    /// One message after the other, until there is none or the TAP has another sandbox.
    async fn converse(&self, mut stream: TcpStream, source: SocketAddr) {
        let Some(client) = (self.hooks.client)(source) else {
            return;
        };
        let Some(_place) = self.guard().connect(&client.sandbox, Instant::now()) else {
            return;
        };
        while let Ok(Ok(message)) = timeout(IDLE, receive(&mut stream)).await {
            if !self.is_there(source, &client) {
                return;
            }
            let reply = match self.judge(source, Protocol::Tcp, &message) {
                Judgement::Silence => return,
                Judgement::Reply(reply) => reply,
                Judgement::Ask(ask) => self.resolve(&ask).await,
            };
            let Some(reply) = query::encode(&reply, MAX_MESSAGE) else {
                return;
            };
            if !self.is_there(source, &client) {
                return;
            }
            let Ok(Ok(())) = timeout(IDLE, reply_to(&mut stream, &reply)).await else {
                return;
            };
        }
    }

    /// Whether an address is still that sandbox's: what upstream is asked takes seconds.
    fn is_there(&self, source: SocketAddr, client: &Client) -> bool {
        (self.hooks.client)(source).is_some_and(|now| now.sandbox == client.sandbox)
    }

    async fn tick(&self) -> Infallible {
        let mut ticks = interval(TICK);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            let events = self.guard().tick(Instant::now());
            for (tap, event) in events {
                (self.hooks.refused)(tap, event);
            }
        }
    }
}

/// The way back for datagrams.
#[derive(Clone)]
struct Replies(Arc<std::net::UdpSocket>);

impl Replies {
    /// Never waits: a guest that takes nothing must not fill the way for others. A reply that cannot be sent is lost,
    /// which clients of UDP expect.
    fn send(&self, to: SocketAddr, reply: Option<Vec<u8>>) {
        if let Some(reply) = reply {
            let _lost = self.0.send_to(&reply, to);
        }
    }
}

/// A message with its length before it (RFC 1035, 4.2.2).
async fn receive(stream: &mut TcpStream) -> io::Result<Vec<u8>> {
    let length = usize::from(stream.read_u16().await?);
    if length > MAX_QUERY {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let mut message = vec![0; length];
    stream.read_exact(&mut message).await?;
    Ok(message)
}

async fn reply_to(stream: &mut TcpStream, reply: &[u8]) -> io::Result<()> {
    let length = u16::try_from(reply.len()).map_err(io::Error::other)?;
    stream
        .write_all(&[&length.to_be_bytes(), reply].concat())
        .await
}
