//! Accepts connections until the control socket closes.

use std::{sync::Arc, time::Duration};

use tokio::{
    net::TcpListener,
    sync::Semaphore,
    task::JoinSet,
    time::{sleep, timeout},
};

use super::{DRAIN_TIME, Shared, connection};

/// After a failed `accept(2)`, as at the limit for open files.
const PAUSE: Duration = Duration::from_millis(100);

pub(crate) async fn run(listener: TcpListener, shared: Arc<Shared>) {
    let room = Arc::new(Semaphore::new(shared.settings.connections as usize));
    let mut connections = JoinSet::new();
    let mut closed = shared.link.closed();
    tracing::info!("accepting connections");
    loop {
        let accepted = tokio::select! {
            biased;
            () = closed.wait() => break,
            Some(_) = connections.join_next(), if !connections.is_empty() => continue,
            accepted = listener.accept() => accepted,
        };
        match accepted {
            Ok((stream, peer)) => {
                // Without room the connection is closed at once.
                let Ok(permit) = Arc::clone(&room).try_acquire_owned() else {
                    continue;
                };
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
        "the control socket is closed: {} connections may end",
        connections.len()
    );
    let drained = timeout(DRAIN_TIME, async {
        while connections.join_next().await.is_some() {}
    });
    if drained.await.is_err() {
        tracing::warn!("{} connections are ended", connections.len());
    }
}
