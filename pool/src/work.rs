//! What is done to one slot: the jobs that the driver starts and that report back to it. All of them but
//! [`lease::serve`] block, and run on threads for that. A job that fails leaves no process behind that it started.

pub(crate) mod lease;
pub(crate) mod save;
pub(crate) mod start;
pub(crate) mod wall_clock;

use std::{io, path::Path, time::Duration};

use api_types::envd::{AnswerLimits, ClientError, ENVD_PORT, EnvdClient, InitRequest, Timestamp};
use api_types::guest_text;
use model::SandboxId;
use model::chain;
use netisolation::IsolationError;
use vmm_control::{ControlError, FailureKind};

use crate::{error::PoolError, host, spec::Init};

/// Why a job failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum WorkError {
    /// A file, a directory or a control group.
    #[error("{0}")]
    Io(&'static str, #[source] io::Error),
    /// The VMM.
    #[error("{0}")]
    Control(&'static str, #[source] ControlError),
    /// The agent.
    #[error("{0}")]
    Agent(&'static str, #[source] ClientError),
    /// An answer of the guest that is not the one it should be; see [`guest_text`].
    #[error("the guest answered \"{0}\"")]
    Answer(String),
    /// The guest has sent what nobody asked for.
    #[error("the guest agent spoke before it was asked")]
    Early,
    /// Nobody answered in time.
    #[error("no answer within {0:?}")]
    Timeout(Duration),
    /// What the sandbox would start from cannot be read.
    #[error("{0}")]
    Image(String),
    /// The TAP.
    #[error("{0}")]
    Network(&'static str, #[source] IsolationError),
}

impl WorkError {
    /// A short name for counters.
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

    /// As callers of the pool see it.
    pub(crate) fn into_pool(self, what: &'static str, id: &SandboxId) -> PoolError {
        match &self {
            Self::Control(_, ControlError::Refused(failure)) => match failure.kind {
                FailureKind::NoSpace => return PoolError::NoSpace(self.told()),
                FailureKind::AgentUnready => return PoolError::AgentSilent(id.clone()),
                FailureKind::BadSpec
                | FailureKind::BadSnapshot
                | FailureKind::WrongPhase
                | FailureKind::UnsuitableHost
                | FailureKind::GuestExited
                | FailureKind::Io => {}
            },
            Self::Io(_, e) if e.kind() == io::ErrorKind::StorageFull => {
                return PoolError::NoSpace(self.told());
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
            why: self.told(),
        }
    }

    /// The causes in one line. The VMM and its guest have a hand in some of them.
    fn told(&self) -> String {
        guest_text(&chain(self))
    }
}

/// Who a VM becomes.
#[derive(Clone, Debug)]
pub(crate) enum Who {
    /// A machine of its own.
    New { id: SandboxId, machine_id: String },
    /// The one that it was.
    Same,
}

/// Whether the guest's network card leads anywhere.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Card {
    /// To the VM's TAP.
    Connected,
    /// Nowhere: it is off.
    Off,
}

impl Card {
    /// Of a VM with this TAP.
    pub(crate) fn of<T>(tap: Option<&T>) -> Self {
        tap.map_or(Self::Off, |_| Self::Connected)
    }
}

/// The body of `POST /init` as of now.
pub(crate) fn init_request(who: &Who, init: &Init, card: Card) -> io::Result<InitRequest> {
    let (hostname, machine_id) = match who {
        Who::New { id, machine_id } => (Some(id.as_str().to_owned()), Some(machine_id.clone())),
        Who::Same => (None, None),
    };
    Ok(InitRequest {
        hostname,
        machine_id,
        entropy: Some(host::hex(&host::random::<32>()?)),
        timestamp: Some(Timestamp::from_unix_ns(host::unix_ns())),
        env_vars: init.env_vars.clone(),
        // An empty one opens a door that the template's source had locked.
        access_token: Some(init.access_token.clone().unwrap_or_default()),
        network: Some(card == Card::Connected),
        ..InitRequest::default()
    })
}

/// A connection to the agent, from its first byte on. No call reads more of it than control paths need.
pub(crate) fn connect_agent(vsock: &Path, timeout: Duration) -> Result<EnvdClient, WorkError> {
    connect(vsock, ENVD_PORT, timeout)
        .map_err(|e| WorkError::Agent("connect to the guest agent", e))
}

/// The same to another server of the guest.
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
    fn a_vmm_that_accepts_nothing_is_given_up() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("vsock");
        let vmm = UnixListener::bind(&path).unwrap();
        listen(&vmm, Backlog::new(1).unwrap()).unwrap();
        let (tell, hear) = channel();
        thread::spawn(move || {
            // The first ones wait in the queue, and for the greeting; the last one finds the queue full.
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
