//! Accepts connections until the control socket closes.

use std::{io, net::SocketAddr, sync::Arc, time::Duration};

use tokio::{
    net::{TcpListener, TcpStream},
    sync::{OwnedSemaphorePermit, Semaphore},
    task::JoinSet,
    time::{sleep, timeout},
};

use super::{DRAIN_TIME, Shared, connection};

/// Pause after a failed `accept(2)`, for example at the limit for open files.
const PAUSE: Duration = Duration::from_millis(100);

/// Connections beyond the limit for all: connections whose sandbox is not known yet, and ones that are being closed to
/// make room. Further connections wait in the listener.
pub(crate) const HEADROOM: u32 = 64;

pub(crate) async fn run(listener: TcpListener, shared: Arc<Shared>) {
    let room = shared.settings.connections.saturating_add(HEADROOM);
    let room = Arc::new(Semaphore::new(room as usize));
    let mut connections = JoinSet::new();
    let mut closed = shared.link.closed();
    tracing::info!("accepting connections");
    loop {
        let accepted = tokio::select! {
            biased;
            () = closed.wait() => break,
            Some(_) = connections.join_next(), if !connections.is_empty() => continue,
            accepted = next(&listener, &room) => accepted,
        };
        match accepted {
            Ok((stream, peer, permit)) => {
                let shared = Arc::clone(&shared);
                connections.spawn(async move {
                    connection::serve(&shared, stream, peer).await;
                    drop(permit);
                });
            }
            Err(error) => {
                tracing::warn!("cannot accept a connection: {error}");
                sleep(PAUSE).await;
            }
        }
    }
    drop(listener);
    tracing::info!(
        "the control socket is closed: waiting for {} connections to end",
        connections.len()
    );
    let drained = timeout(DRAIN_TIME, async {
        while connections.join_next().await.is_some() {}
    });
    if drained.await.is_err() {
        tracing::warn!("closing the remaining {} connections", connections.len());
    }
}

async fn next(
    listener: &TcpListener,
    room: &Arc<Semaphore>,
) -> io::Result<(TcpStream, SocketAddr, OwnedSemaphorePermit)> {
    let permit = Arc::clone(room).acquire_owned().await;
    let permit = permit.map_err(io::Error::other)?;
    let (stream, peer) = listener.accept().await?;
    Ok((stream, peer, permit))
}
