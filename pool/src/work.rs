//! Jobs started by the driver, each for one slot. All jobs block and run on threads, except [`lease::serve`], which
//! runs on a task. A failed job kills every process that it has started.

pub(crate) mod adopt;
pub(crate) mod base;
pub(crate) mod lease;
pub(crate) mod needs;
mod read_ahead;
pub(crate) mod rebuild;
pub(crate) mod save;
pub(crate) mod start;
pub(crate) mod take;
pub(crate) mod wall_clock;

use std::{
    io,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use envd::guest_text;
use envd::{AnswerLimits, ClientError, ENVD_PORT, EnvdClient, InitRequest, Timestamp};
use library::error::is_full;
use model::SandboxId;
use model::chain;
use netisolation::IsolationError;
use vmm_control::{ControlError, FailureKind};

use crate::{error::PoolError, host, record::Record};

/// Set when the pool closes, to end long-running jobs.
#[derive(Clone, Debug, Default)]
pub(crate) struct Stop(Arc<AtomicBool>);

impl Stop {
    pub(crate) fn set(&self) {
        self.0.store(true, Ordering::SeqCst);
    }

    fn is_set(&self) -> bool {
        self.0.load(Ordering::SeqCst)
    }

    /// # Errors
    /// Returns an error if the pool is closing.
    pub(crate) fn go_on(&self) -> io::Result<()> {
        if self.is_set() {
            Err(io::Error::other("the server is stopping"))
        } else {
            Ok(())
        }
    }

    /// The outcome of a job. Errors of a job that was told to stop are not reported as failures.
    pub(crate) fn outcome<T>(&self, outcome: Result<T, PoolError>) -> Result<T, PoolError> {
        outcome.map_err(|error| {
            if self.is_set() {
                PoolError::Draining
            } else {
                error
            }
        })
    }
}

/// Errors of jobs.
#[derive(Debug, thiserror::Error)]
pub(crate) enum WorkError {
    /// An I/O error of a file, a cgroup or a socket.
    #[error("{0}")]
    Io(&'static str, #[source] io::Error),
    /// A request to the VMM failed.
    #[error("{0}")]
    Control(&'static str, #[source] ControlError),
    /// A request to a server in the guest, usually the agent, failed.
    #[error("{0}")]
    Agent(&'static str, #[source] ClientError),
    /// The guest gave an unexpected response, which is escaped by [`guest_text`].
    #[error("the guest answered \"{0}\"")]
    Answer(String),
    /// The agent sent data before it got a request.
    #[error("the guest agent sent data before a request")]
    Early,
    #[error("no response within {0:?}")]
    Timeout(Duration),
    /// The files or the network of a sandbox do not allow the operation.
    #[error("{0}")]
    Image(String),
    #[error("{0}")]
    Network(&'static str, #[source] IsolationError),
}

impl WorkError {
    /// The label of this error in [`crate::PoolStats::failed`].
    pub(crate) fn cause(&self) -> &'static str {
        match self {
            Self::Io(..) => "io",
            Self::Control(..) => "vmm",
            Self::Agent(..) | Self::Answer(_) | Self::Early => "agent",
            Self::Timeout(_) => "timeout",
            Self::Image(_) => "image",
            Self::Network(..) => "network",
        }
    }

    /// The error for callers of the pool. `what` is the failed operation.
    pub(crate) fn into_pool(self, what: &'static str, id: &SandboxId) -> PoolError {
        match &self {
            Self::Control(_, ControlError::Refused(failure)) => match failure.kind {
                FailureKind::NoSpace => return PoolError::NoSpace(self.one_line()),
                FailureKind::AgentUnready => return PoolError::AgentSilent(id.clone()),
                FailureKind::BadSpec
                | FailureKind::BadSnapshot
                | FailureKind::WrongPhase
                | FailureKind::UnsuitableHost
                | FailureKind::GuestExited
                | FailureKind::Io => {}
            },
            Self::Io(_, e) if is_full(e) => {
                return PoolError::NoSpace(self.one_line());
            }
            Self::Agent(_, ClientError::Timeout(_)) | Self::Timeout(_) => {
                return PoolError::AgentSilent(id.clone());
            }
            Self::Io(..)
            | Self::Control(..)
            | Self::Agent(..)
            | Self::Answer(_)
            | Self::Early
            | Self::Image(_)
            | Self::Network(..) => {}
        }
        PoolError::Failed {
            what,
            why: self.one_line(),
        }
    }

    /// The chain of causes in one line. It is escaped because the VMM or the guest may have supplied parts of it.
    fn one_line(&self) -> String {
        guest_text(&chain(self))
    }
}

/// The identity that the guest receives.
#[derive(Clone, Debug)]
pub(crate) enum NewIdentity {
    /// A new host name, which is the sandbox's id, and a new machine id.
    Fresh { id: SandboxId, machine_id: String },
    /// The guest keeps its host name and machine id.
    Keep,
}

/// The body of `POST /init` for the sandbox of this record, with fresh entropy and the current time. Without a TAP, the
/// guest turns its network card off. `authority` comes from [`crate::PoolConfig::ca_bundle`].
pub(crate) fn init_request(
    identity: &NewIdentity,
    record: &Record,
    authority: Option<&str>,
) -> io::Result<InitRequest> {
    let (hostname, machine_id) = match identity {
        NewIdentity::Fresh { id, machine_id } => {
            (Some(id.as_str().to_owned()), Some(machine_id.clone()))
        }
        NewIdentity::Keep => (None, None),
    };
    let mut env_vars = record.defaults.env.clone();
    env_vars.extend(record.init.env_vars.clone());
    Ok(InitRequest {
        hostname,
        machine_id,
        entropy: Some(model::hex(&host::random::<32>()?)),
        timestamp: Some(Timestamp::from_unix_ns(host::unix_ns())),
        env_vars,
        // An empty token removes a token that the guest has from its template or snapshot.
        access_token: Some(record.init.access_token.clone().unwrap_or_default()),
        network: Some(record.tap.is_some()),
        default_user: record.defaults.user.clone(),
        default_workdir: record.defaults.workdir.clone(),
        // An empty text removes the bundle from a snapshot of a sandbox with rules.
        ca_bundle: authority.map(|pem| match record.policy.ruled.as_slice() {
            [] => String::new(),
            [_, ..] => pem.to_owned(),
        }),
    })
}

/// Connects to the agent. The client rejects responses that exceed [`AnswerLimits::CONTROL`].
pub(crate) fn connect_agent(vsock: &Path, timeout: Duration) -> Result<EnvdClient, WorkError> {
    connect(vsock, ENVD_PORT, timeout)
        .map_err(|e| WorkError::Agent("connect to the guest agent", e))
}

/// Connects to a server in the guest by its vsock port.
pub(crate) fn connect(
    vsock: &Path,
    port: u16,
    timeout: Duration,
) -> Result<EnvdClient, ClientError> {
    let stream = vmm_control::connect(vsock, Some(timeout));
    let stream = stream.map_err(|source| ClientError::NotReachable {
        doing: "connecting to the VMM",
        source,
    })?;
    let mut client = EnvdClient::connect_over(stream, port, timeout)?;
    client.set_limits(AnswerLimits::CONTROL);
    Ok(client)
}

#[cfg(test)]
mod tests {
    use std::{os::unix::net::UnixListener, sync::mpsc::channel, thread};

    use nix::sys::socket::{Backlog, listen};

    use super::*;

    #[test]
    fn connecting_to_a_vmm_that_does_not_accept_times_out() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("vsock");
        let vmm = UnixListener::bind(&path).unwrap();
        listen(&vmm, Backlog::new(1).unwrap()).unwrap();
        let (tell, hear) = channel();
        thread::spawn(move || {
            // The first connections wait in the backlog for a greeting; the last one finds the backlog full.
            for _ in 0..4 {
                let failed = connect_agent(&path, Duration::from_millis(50)).unwrap_err();
                tell.send(failed.cause()).unwrap();
            }
        });
        for _ in 0..4 {
            assert_eq!(hear.recv_timeout(Duration::from_secs(30)), Ok("agent"));
        }
    }
}
