//! Copies bytes in both directions after `101 Switching Protocols`, until both sides have closed.

use hyper::upgrade::OnUpgrade;
use hyper_util::rt::TokioIo;
use tokio::io::copy_bidirectional_with_sizes;

/// Bytes buffered per direction, in addition to the socket buffers.
const BUFFER: usize = 64 << 10;

/// Joins two connections. Each side may close its sending direction while the other continues to send; a slow reader
/// slows the sender down. `held` is kept until both directions have ended.
pub(crate) fn join(client: OnUpgrade, sandbox: OnUpgrade, held: impl Send + 'static) {
    tasks::spawn(async move {
        let (client, sandbox) = match tokio::try_join!(client, sandbox) {
            Ok(both) => both,
            Err(error) => {
                tracing::debug!(%error, "cannot complete an upgrade");
                return;
            }
        };
        let mut client = TokioIo::new(client);
        let mut sandbox = TokioIo::new(sandbox);
        let copied = copy_bidirectional_with_sizes(&mut client, &mut sandbox, BUFFER, BUFFER).await;
        if let Err(error) = copied {
            tracing::debug!(%error, "an upgraded connection failed");
        }
        drop(held);
    });
}
