//! An upstream server with answers chosen by the test, including wrong ones.

use std::{
    net::SocketAddr,
    sync::{Arc, Mutex},
};

use hickory_proto::{
    op::{Message, MessageType, ResponseCode},
    rr::{
        Name, RData, Record, RecordType,
        rdata::{A, AAAA, CNAME},
    },
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream, UdpSocket},
    sync::Semaphore,
};

/// The transport of a query.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum By {
    Udp,
    Tcp,
}

/// Makes the messages that answer a query.
type Script = dyn Fn(&Message, By) -> Vec<Message> + Send + Sync;

#[derive(Clone)]
pub(crate) struct Upstream {
    pub(crate) address: SocketAddr,
    /// Queried names, in order.
    asked: Arc<Mutex<Vec<String>>>,
    /// Each query waits for a permit and uses it up before it is answered.
    pub(crate) gate: Arc<Semaphore>,
    script: Arc<Script>,
}

impl Upstream {
    pub(crate) async fn start(
        script: impl Fn(&Message, By) -> Vec<Message> + Send + Sync + 'static,
    ) -> Self {
        let (udp, tcp) = sockets().await;
        let upstream = Self {
            address: udp.local_addr().unwrap(),
            asked: Arc::default(),
            gate: Arc::new(Semaphore::new(1_000_000)),
            script: Arc::new(script),
        };
        tokio::spawn(upstream.clone().datagrams(udp));
        tokio::spawn(upstream.clone().connections(tcp));
        upstream
    }

    /// A server that answers every query with these records.
    pub(crate) async fn with(records: Vec<Record>) -> Self {
        Self::start(move |query, _| vec![answer(query, &records)]).await
    }

    pub(crate) fn asked(&self) -> Vec<String> {
        self.asked.lock().unwrap().clone()
    }

    async fn replies(&self, bytes: &[u8], by: By) -> Vec<Vec<u8>> {
        let query = Message::from_vec(bytes).unwrap();
        self.asked
            .lock()
            .unwrap()
            .push(query.queries[0].name.to_ascii());
        self.gate.acquire().await.unwrap().forget();
        let replies = (self.script)(&query, by);
        replies
            .iter()
            .map(|reply| reply.to_vec().unwrap())
            .collect()
    }

    async fn datagrams(self, udp: UdpSocket) {
        let mut buffer = [0; 4096];
        loop {
            let (length, source) = udp.recv_from(&mut buffer).await.unwrap();
            for reply in self.replies(&buffer[..length], By::Udp).await {
                udp.send_to(&reply, source).await.unwrap();
            }
        }
    }

    async fn connections(self, tcp: TcpListener) {
        loop {
            let (stream, _) = tcp.accept().await.unwrap();
            tokio::spawn(self.clone().serve_connection(stream));
        }
    }

    async fn serve_connection(self, mut stream: TcpStream) {
        while let Ok(length) = stream.read_u16().await {
            let mut query = vec![0; length.into()];
            stream.read_exact(&mut query).await.unwrap();
            for reply in self.replies(&query, By::Tcp).await {
                stream
                    .write_u16(reply.len().try_into().unwrap())
                    .await
                    .unwrap();
                stream.write_all(&reply).await.unwrap();
            }
        }
    }
}

/// UDP and TCP sockets on the same free port.
async fn sockets() -> (UdpSocket, TcpListener) {
    loop {
        let udp = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        if let Ok(tcp) = TcpListener::bind(udp.local_addr().unwrap()).await {
            return (udp, tcp);
        }
    }
}

pub(crate) fn answer(query: &Message, records: &[Record]) -> Message {
    let mut reply = coded(query, ResponseCode::NoError);
    reply.add_answers(records.iter().cloned());
    reply
}

pub(crate) fn coded(query: &Message, code: ResponseCode) -> Message {
    let mut reply = query.clone();
    reply.metadata.message_type = MessageType::Response;
    reply.metadata.recursion_available = true;
    reply.metadata.response_code = code;
    reply
}

/// An A, AAAA or CNAME record, depending on `is`.
pub(crate) fn record(of: &str, ttl_s: u32, is: &str) -> Record {
    let name = |text: &str| Name::from_ascii(text).unwrap();
    let data = if let Ok(address) = is.parse() {
        RData::A(A(address))
    } else if let Ok(address) = is.parse() {
        RData::AAAA(AAAA(address))
    } else {
        RData::CNAME(CNAME(name(is)))
    };
    Record::from_rdata(name(of), ttl_s, data)
}

pub(crate) fn is_for(query: &Message, name: &str, kind: RecordType) -> bool {
    let asked = &query.queries[0];
    asked.name == Name::from_ascii(name).unwrap() && asked.query_type == kind
}
