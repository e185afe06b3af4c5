//! A WebSocket after its handshake: bytes in both directions, unread.

use hyper::upgrade::OnUpgrade;
use hyper_util::rt::TokioIo;
use tokio::io::{self, AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

use super::record::Record;

const BUFFER: usize = 16 << 10;

/// Ends when either side ends. The sandbox's connection closes idle tunnels.
pub(crate) async fn run(guest: OnUpgrade, server: OnUpgrade, record: Record) {
    let (Ok(guest), Ok(server)) = tokio::join!(guest, server) else {
        return;
    };
    let (guest_reader, guest_writer) = io::split(TokioIo::new(guest));
    let (server_reader, server_writer) = io::split(TokioIo::new(server));
    let traffic = record.traffic();
    let out = copy(guest_reader, server_writer, |bytes| {
        traffic.count_out(bytes)
    });
    let back = copy(server_reader, guest_writer, |bytes| traffic.count_in(bytes));
    let _ = tokio::try_join!(out, back);
}

pub(crate) async fn copy(
    mut from: impl AsyncRead + Unpin,
    mut to: impl AsyncWrite + Unpin,
    count: impl Fn(usize),
) -> io::Result<()> {
    let mut buffer = vec![0; BUFFER];
    loop {
        match from.read(&mut buffer).await? {
            0 => return to.shutdown().await,
            read => {
                to.write_all(&buffer[..read]).await?;
                to.flush().await?;
                count(read);
            }
        }
    }
}
