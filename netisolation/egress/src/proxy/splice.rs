//! Connections that pass unread. Buffers exist only while bytes move, so idle connections have none.

use tokio::{
    io::{self, AsyncWriteExt},
    net::{
        TcpStream,
        tcp::{ReadHalf, WriteHalf},
    },
};

use tokio_rustls::client::TlsStream;

use super::{TUNNEL_IDLE_TIME, record::Traffic, stream::Activity, tunnel};

const BUFFER: usize = 64 << 10;

/// Sends `first` and then copies in both directions until both have ended, one fails, or the connection is idle for too
/// long. If one side has failed, the other is then reset: a guest must not mistake a failure for the end of the data.
pub(crate) async fn run(
    guest: &mut TcpStream,
    server: &mut TcpStream,
    first: &[u8],
    traffic: &Traffic,
    activity: &Activity,
) {
    if server.write_all(first).await.is_err() {
        reset(guest);
        return;
    }
    traffic.count_out(first.len());
    let copied = {
        let (guest_reader, guest_writer) = guest.split();
        let (server_reader, server_writer) = server.split();
        let out = copy(&guest_reader, server_writer, activity, |bytes| {
            traffic.count_out(bytes)
        });
        let back = copy(&server_reader, guest_writer, activity, |bytes| {
            traffic.count_in(bytes)
        });
        tokio::select! {
            copied = async { tokio::try_join!(out, back) } => copied.is_ok(),
            () = activity.idle(TUNNEL_IDLE_TIME) => false,
        }
    };
    if !copied {
        reset(guest);
        reset(server);
    }
}

/// Like [`run`], inside the TLS connection of the sandbox's proxy, with a buffer for each direction while the
/// connection lasts.
pub(crate) async fn run_in_tls(
    guest: &mut TcpStream,
    mut server: TlsStream<TcpStream>,
    first: &[u8],
    traffic: &Traffic,
    activity: &Activity,
) {
    let copied = async {
        server.write_all(first).await?;
        server.flush().await?;
        traffic.count_out(first.len());
        let (guest_reader, guest_writer) = guest.split();
        let (server_reader, server_writer) = io::split(server);
        let out = tunnel::copy(guest_reader, server_writer, |bytes| {
            activity.touch();
            traffic.count_out(bytes);
        });
        let back = tunnel::copy(server_reader, guest_writer, |bytes| {
            activity.touch();
            traffic.count_in(bytes);
        });
        tokio::try_join!(out, back)
    };
    let copied = tokio::select! {
        copied = copied => copied.is_ok(),
        () = activity.idle(TUNNEL_IDLE_TIME) => false,
    };
    if !copied {
        reset(guest);
    }
}

async fn copy(
    from: &ReadHalf<'_>,
    mut to: WriteHalf<'_>,
    activity: &Activity,
    count: impl Fn(usize),
) -> io::Result<()> {
    loop {
        from.readable().await?;
        let mut buffer = Vec::with_capacity(BUFFER);
        loop {
            buffer.clear();
            match from.try_read_buf(&mut buffer) {
                Ok(0) => return to.shutdown().await,
                Ok(read) => {
                    to.write_all(&buffer).await?;
                    activity.touch();
                    count(read);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) => return Err(error),
            }
        }
    }
}

/// Makes the close of this connection a reset.
pub(crate) fn reset(stream: &TcpStream) {
    // If this fails, the connection is closed normally.
    let _ = stream.set_zero_linger();
}
