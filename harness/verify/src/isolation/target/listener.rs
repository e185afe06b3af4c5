//! Echo servers at an address of this host that count arriving packets.

use std::{
    io::{self, Read, Write},
    net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::Duration,
};

/// A connection that is idle for this long is closed.
const IDLE_TIMEOUT: Duration = Duration::from_secs(30);

/// A server at one port. Its thread runs until the process exits.
#[derive(Debug)]
pub(super) struct Listener {
    address: SocketAddr,
    arrived: Arc<AtomicU64>,
}

impl Listener {
    /// Opens four servers, in the order TCP, UDP, TCP, UDP.
    pub(super) fn open_all(address: IpAddr) -> io::Result<Vec<Self>> {
        Ok(vec![
            Self::tcp(address)?,
            Self::udp(address)?,
            Self::tcp(address)?,
            Self::udp(address)?,
        ])
    }

    pub(super) fn address(&self) -> SocketAddr {
        self.address
    }

    /// Connections or datagrams that have arrived.
    pub(super) fn arrived(&self) -> u64 {
        self.arrived.load(Ordering::Relaxed)
    }

    fn tcp(address: IpAddr) -> io::Result<Self> {
        let listener = TcpListener::bind((address, 0))?;
        let (this, arrived) = Self::at(listener.local_addr()?);
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                arrived.fetch_add(1, Ordering::Relaxed);
                // The guest's probe reports a failure.
                thread::spawn(move || echo(stream));
            }
        });
        Ok(this)
    }

    fn udp(address: IpAddr) -> io::Result<Self> {
        let socket = UdpSocket::bind((address, 0))?;
        let (this, arrived) = Self::at(socket.local_addr()?);
        thread::spawn(move || {
            let mut buffer = [0; 4096];
            while let Ok((length, from)) = socket.recv_from(&mut buffer) {
                arrived.fetch_add(1, Ordering::Relaxed);
                // The guest's probe reports a failure.
                let _ = socket.send_to(&buffer[..length], from);
            }
        });
        Ok(this)
    }

    fn at(address: SocketAddr) -> (Self, Arc<AtomicU64>) {
        let arrived = Arc::new(AtomicU64::new(0));
        let this = Self {
            address,
            arrived: Arc::clone(&arrived),
        };
        (this, arrived)
    }
}

fn echo(mut stream: TcpStream) -> io::Result<()> {
    stream.set_read_timeout(Some(IDLE_TIMEOUT))?;
    let mut buffer = [0; 4096];
    loop {
        match stream.read(&mut buffer)? {
            0 => return Ok(()),
            length => stream.write_all(&buffer[..length])?,
        }
    }
}
