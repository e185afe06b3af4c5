//! What goes on after `101 Switching Protocols`: bytes both ways until both ends have ended.

use hyper::upgrade::OnUpgrade;
use hyper_util::rt::TokioIo;
use tokio::io::copy_bidirectional_with_sizes;

use super::lanes::Pass;

/// Bytes on their way in one direction, beside what the sockets hold.
const BUFFER: usize = 64 << 10;

/// Joins two connections. Either end may end its direction while the other goes on; whoever reads slowly
/// slows the other down. `held` is what counts as under way until both directions have ended.
pub(super) fn join(client: OnUpgrade, sandbox: OnUpgrade, pass: Pass, held: impl Send + 'static) {
    tokio::spawn(async move {
        let (client, sandbox) = match tokio::try_join!(client, sandbox) {
            Ok(both) => both,
            Err(error) => {
                tracing::debug!(%error, "an upgrade came to nothing");
                return;
            }
        };
        let mut client = TokioIo::new(client);
        let mut sandbox = TokioIo::new(sandbox);
        let copied = copy_bidirectional_with_sizes(&mut client, &mut sandbox, BUFFER, BUFFER).await;
        if let Err(error) = copied {
            tracing::debug!(%error, "an upgraded connection broke off");
        }
        drop((pass, held));
    });
}
