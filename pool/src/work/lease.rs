//! Leases a warm slot: resumes the VM and sends the caller's settings to the agent. A caller waits for the lease, so
//! both messages are sent before either response is awaited, and both connections are already open.

use std::{io, os::unix::net::UnixStream as StdStream, sync::Arc, time::Duration};

use envd::guest_text;
use library::durable::Durability;
use model::{SandboxId, StartPhase, Timeline};
use netisolation::Isolation;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::UnixStream,
    time::timeout,
};
use vmm_control::{Call, Failure, Reply, Request, frame};

use super::{NewIdentity, WorkError, init_request, wall_clock};
use crate::{
    host,
    record::{Kept, Record, SlotDir},
};

/// Limit on the length of a response's head, in bytes.
const MAX_HEAD: usize = 4096;

/// The open connections of a slot.
#[derive(Debug)]
pub(crate) struct Lines {
    pub(crate) control: UnixStream,
    pub(crate) agent: UnixStream,
}

impl Lines {
    /// Must be called within a Tokio runtime.
    pub(crate) fn new(control: StdStream, agent: StdStream) -> io::Result<Self> {
        control.set_nonblocking(true)?;
        agent.set_nonblocking(true)?;
        Ok(Self {
            control: UnixStream::from_std(control)?,
            agent: UnixStream::from_std(agent)?,
        })
    }
}

#[derive(Debug)]
pub(crate) struct LeasePlan {
    pub(crate) id: SandboxId,
    pub(crate) dir: SlotDir,
    pub(crate) network: Option<Isolation>,
    /// [`crate::PoolConfig::ca_bundle`].
    pub(crate) authority: Option<Arc<str>>,
    /// The slot's record, with the settings of the lease.
    pub(crate) record: Record,
    pub(crate) timeline: Timeline,
    pub(crate) timeout: Duration,
}

/// A leased slot.
#[derive(Debug)]
pub(crate) struct Served {
    pub(crate) record: Record,
    pub(crate) timeline: Timeline,
    pub(crate) lines: Lines,
}

/// Leases a warm slot.
///
/// # Errors
/// Returns an error if the sandbox cannot be confined, its record cannot be written, or the VMM or the agent fails or
/// does not respond in time. The driver must then end the VM.
pub(crate) async fn serve(mut plan: LeasePlan, mut lines: Lines) -> Result<Served, WorkError> {
    let bound = plan.timeout;
    // The policy must be in force before the guest runs. If the server is killed here, the record still says that the
    // slot has no owner.
    if let (Some(network), Some(tap)) = (&plan.network, plan.record.tap) {
        network
            .confine(tap, &plan.id, &plan.record.policy)
            .map_err(|e| WorkError::Network("confine the sandbox", e))?;
        plan.timeline
            .stamp(StartPhase::Confined, host::monotonic_ns());
    }
    check_silent(&lines.agent)?;
    // Built as late as possible, because it contains the current time.
    let sent_ns = host::monotonic_ns();
    let init = init_request(&NewIdentity::Keep, &plan.record, plan.authority.as_deref())
        .map_err(|e| WorkError::Io("generate random bytes", e))?;
    let init = http_request(&init)?;
    let work = async {
        let resume = frame::encode(&Call::from(Request::Resume))
            .map_err(|e| WorkError::Io("encode a request", io::Error::other(e)))?;
        let vmm = |e| WorkError::Io("resume the VM", e);
        lines.control.write_all(&resume).await.map_err(vmm)?;
        let sent = lines.agent.write_all(&init).await;
        sent.map_err(|e| WorkError::Io("send settings to the guest agent", e))?;
        read_resumed(&mut lines.control).await?;
        plan.timeline
            .stamp(StartPhase::Resumed, host::monotonic_ns());
        // The record is written while the guest handles the request, and before the caller gets its response. It is
        // written on this task, because writing a small file to the page cache takes less time than handing the work to
        // a thread.
        plan.record.kept = Kept::Running;
        plan.record.warm = true;
        plan.dir
            .write(&plan.record, Durability::Process)
            .map_err(|e| WorkError::Io("write the sandbox's record", e))?;
        read_init_answer(&mut lines.agent).await?;
        let now_ns = host::monotonic_ns();
        plan.timeline.stamp(StartPhase::AgentReady, now_ns);
        if wall_clock::may_be_late(sent_ns, now_ns) {
            wall_clock::set_again(&lines.agent, bound);
        }
        Ok(())
    };
    timeout(bound, work)
        .await
        .map_err(|_| WorkError::Timeout(bound))??;
    Ok(Served {
        record: plan.record,
        timeline: plan.timeline,
        lines,
    })
}

/// The bytes of a `POST /init` request.
pub(super) fn http_request(init: &envd::InitRequest) -> Result<Vec<u8>, WorkError> {
    let body = serde_json::to_vec(init)
        .map_err(|e| WorkError::Io("encode a request", io::Error::other(e)))?;
    let mut request = format!(
        "POST /init HTTP/1.1\r\nHost: guest\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n",
        body.len()
    )
    .into_bytes();
    request.extend_from_slice(&body);
    Ok(request)
}

/// Reads the VMM's response to `resume`.
async fn read_resumed(control: &mut UnixStream) -> Result<(), WorkError> {
    let failed = |e| WorkError::Io("resume the VM", e);
    let mut header = [0; frame::HEADER];
    control.read_exact(&mut header).await.map_err(failed)?;
    let len = frame::check_header(&header).map_err(|e| failed(io::Error::other(e)))?;
    let mut body = vec![0; len];
    control.read_exact(&mut body).await.map_err(failed)?;
    let answer: Result<Reply, Failure> =
        serde_json::from_slice(&body).map_err(|e| failed(io::Error::other(e)))?;
    match answer {
        Ok(_) => Ok(()),
        Err(e) => Err(failed(io::Error::other(e))),
    }
}

/// Checks that the agent has sent nothing since its last response. Such data could be mistaken for the response to the
/// next request.
fn check_silent(agent: &UnixStream) -> Result<(), WorkError> {
    match agent.try_read(&mut [0]) {
        Err(e) if e.kind() == io::ErrorKind::WouldBlock => Ok(()),
        Err(e) => Err(WorkError::Io("read from the guest agent", e)),
        Ok(0) => Err(WorkError::Io(
            "read from the guest agent",
            io::ErrorKind::UnexpectedEof.into(),
        )),
        Ok(_) => Err(WorkError::Early),
    }
}

/// Reads the agent's response to `/init`. A successful response must have no body.
pub(super) async fn read_init_answer(agent: &mut UnixStream) -> Result<(), WorkError> {
    let mut head = Vec::with_capacity(256);
    let mut piece = [0; 512];
    loop {
        let n = agent
            .read(&mut piece)
            .await
            .map_err(|e| WorkError::Io("read from the guest agent", e))?;
        head.extend_from_slice(&piece[..n]);
        let whole = head.windows(4).position(|w| w == b"\r\n\r\n");
        if whole.is_none() && n > 0 && head.len() < MAX_HEAD {
            continue;
        }
        let is_good = head.starts_with(b"HTTP/1.1 2") && whole == head.len().checked_sub(4);
        return if is_good {
            Ok(())
        } else {
            Err(WorkError::Answer(guest_text(&String::from_utf8_lossy(
                &head,
            ))))
        };
    }
}
